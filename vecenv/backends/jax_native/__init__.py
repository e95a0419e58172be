"""``JaxVectorEnv``: functional environments behind Gymnasium's vector interface.

All the work is done by :class:`vecenv.jax.FunctionalVectorEnv`, compiled; this class holds the state that Gymnasium's
interface hides, hands results over as numpy, JAX or torch, and speaks Gymnasium's language of seeds, masks and infos. The
state is not hidden for good: read ``envs.state`` to keep a checkpoint, assign it to return there.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Final

import jax
import numpy as np

from vecenv.backends.jax_native.driver import JaxDriver, compile_now
from vecenv.front.driver import Stepped
from vecenv.front.guard import exclusive
from vecenv.front.vector_env import VectorEnvBase
from vecenv.jax.env import EnvState
from vecenv.jax.functional import FunctionalVectorEnv
from vecenv.jax.interop import require_torch
from vecenv.jax.libraries import adapt, make_env

__all__ = ["JaxVectorEnv", "functional_of"]

_OPTIONS: Final = frozenset(inspect.signature(FunctionalVectorEnv).parameters) - {"env", "num_envs"}


class JaxVectorEnv(VectorEnvBase[Any, Any, Any]):
    """Thousands of JAX-native environments stepped by one compiled call, with Gymnasium's vector interface.

    Environment i of ``reset(seed=s)`` has the key ``jax.random.key(s + i)``: its trajectory is the same for every
    ``num_envs``, up to the rounding of XLA's programs, and equal bit for bit to ``SyncVectorEnv`` over
    :class:`vecenv.jax.GymEnv` of as many ``lanes``.

    Without a seed, each goes on to the next episode of its own stream. Actions are numpy, JAX or torch arrays, or lists;
    nothing is clipped to bounds. ``step_async`` and ``send`` return at once, and the device works meanwhile.

    Under DISABLED, an environment that ended stays as it is and pays 0 until it is reset.

    Args:
        env: A name known to Brax or Playground, an environment of any library that :func:`vecenv.jax.adapt` knows, a
            ``JaxEnv``, or a :class:`~vecenv.jax.FunctionalVectorEnv` (then no other option may be given).
        num_envs: How many.
        to: What arrays are: ``"numpy"`` (fresh, writeable, as in Gymnasium), ``"jax"`` (on the device, in JAX's dtypes), or
            ``"torch"`` (on the device, handed over by DLPack).
        library: ``"brax"`` or ``"playground"``, for a name.
        infos: Report the environment's metrics. Without them ``infos`` holds only what autoreset needs.
        render_mode: ``"rgb_array"`` or ``None``.
        **options: Those of :class:`~vecenv.jax.FunctionalVectorEnv` (``autoreset_mode``, ``max_episode_steps``, ``reset``,
            ``stagger``, ``frame_skip``, ``randomize``, ``discount``, ``pool_size``, ``micro_batch``, ``devices``).
            Others go to the named environment: ``backend="spring"``.

    With ``to="jax"`` and ``"torch"``, nothing waits for the device: every info column is there at every step with its mask,
    and under SAME_STEP ``infos["final_obs"]`` is a batch, valid where ``infos["_final_obs"]``.

    Raises:
        gymnasium.error.NameNotFound: No such environment; and whatever else :func:`vecenv.jax.adapt` raises.
        ValueError, TypeError: Options that make no sense.
        ImportError: ``to="torch"`` without torch.
    """

    _driver: JaxDriver

    def __init__(
        self, env: Any, num_envs: int = 1, *, to: str = "numpy", library: str | None = None, infos: bool = True,
        render_mode: str | None = None, **options: Any,
    ) -> None:  # fmt: skip
        self.closed = True  # until there is something to close
        if to not in ("numpy", "jax", "torch"):
            raise ValueError(f"to must be 'numpy', 'jax' or 'torch', got {to!r}.")
        if to == "torch":
            require_torch()
        if render_mode not in (None, "rgb_array"):
            raise ValueError(f"render_mode must be None or 'rgb_array', got {render_mode!r}.")
        functional = functional_of(env, num_envs, library, options)
        self.functional, self.to, self.render_mode = functional, to, render_mode
        for name in ("observation_space", "action_space", "single_observation_space", "single_action_space"):
            setattr(self, name, getattr(functional, name))
        self.num_envs, self.autoreset_mode = functional.num_envs, functional.autoreset_mode
        fps = getattr(functional.single_env, "frames_per_second", 0) or 30
        self.metadata = {"autoreset_mode": self.autoreset_mode, "render_modes": ["rgb_array"], "render_fps": fps}
        self.compile_seconds: dict[str, float] = {}
        self._open(JaxDriver(functional, to, infos))

    @exclusive
    def render(self, indices: Sequence[int] | None = None) -> tuple[Any, ...] | None:
        """Frames ``uint8[height, width, 3]`` of the chosen environments (default, all), drawn one after the other.

        Raises:
            gymnasium.error.ResetNeeded: Before the first ``reset``.
            RuntimeError: MuJoCo found no OpenGL; says what to set.
            NotImplementedError: The library cannot draw this environment.
            gymnasium.error.AlreadyPendingCallError: A call is pending.
        """
        self._driver.require_idle("render")
        if self.render_mode is None:
            return None
        inner = self._driver.current().inner.env
        single: Any = self.functional.single_env
        chosen = range(self.num_envs) if indices is None else indices
        return tuple(single.render(jax.tree.map(lambda leaf, i=i: leaf[i], inner)) for i in chosen)

    @property
    def np_random_seed(self) -> tuple[int | None, ...]:  # type: ignore[override]
        """The seed each environment was last given; ``None`` where its stream came from a state that was assigned."""
        return tuple(self._driver.latest.seeds)

    def __repr__(self) -> str:
        if not hasattr(self, "_driver"):
            return f"{type(self).__name__}(closed)"
        name = self.spec.id if self.spec is not None else getattr(self.functional.single_env, "name", "env")
        phase = "pending" if self._driver.outstanding.rows else "before reset" if self._driver.state is None else "ready"
        return (
            f"{type(self).__name__}({name}, num_envs={self.num_envs}, to={self.to!r}, "
            f"autoreset_mode={self.autoreset_mode.name}, {'closed' if self.closed else phase})"
        )

    # -- beyond Gymnasium ------------------------------------------------------------------------------------------

    @property
    @exclusive
    def state(self) -> EnvState:
        """Everything, as a pytree: a copy, which later steps do not touch. Assign it to return there, as often as you like.

        Raises (assigning):
            TypeError, ValueError: No state of such an environment, or of another number of them.
            StaleStateError: Its arrays have been donated to another computation.
        """
        self._driver.require_idle("state")
        return self._driver.copied()

    @state.setter
    @exclusive
    def state(self, state: EnvState) -> None:
        self._driver.require_idle("state")
        self._driver.assign(state)

    @exclusive
    def step_chunk(self, actions: Any) -> Stepped:
        """``T`` steps in one compiled call; on small environments up to four times faster than ``T`` calls.

        Args:
            actions: Leaves ``[T, num_envs, ...]``. Every new ``T`` is compiled once.

        Returns:
            As ``step``, with a leading axis ``T`` everywhere. ``infos`` holds the metrics, and ``"next_obs"`` (the true
            successors, in every autoreset mode) and ``"valid"`` (``bool[T, num_envs]``, false on steps that only reset).
        """
        self._driver.require_idle("step_chunk")
        length, stepped = self._driver.chunk(actions)
        self._driver.gives(self._driver.taken, length * self.num_envs, 0)
        return stepped

    @exclusive
    def warmup(self, chunk: int | None = None) -> dict[str, float]:
        """Compile everything now, rather than in the first reset and step; the environments are left as they are.

        Args:
            chunk: Also compile ``step_chunk`` of that many steps.

        Returns:
            Seconds it took, by function: mostly compilation, ``{"reset": ..., "step": ...}``. Also in ``compile_seconds``.
        """
        self._driver.require_idle("warmup")
        self.compile_seconds |= compile_now(self._driver, chunk)
        return dict(self.compile_seconds)


def functional_of(env: Any, num_envs: int, library: str | None, options: dict[str, Any]) -> FunctionalVectorEnv:
    """The functional environment for these arguments of ``JaxVectorEnv``.

    Raises:
        ValueError: Options for an environment that has its own already; a number of environments that is no number.
        TypeError: Options that nothing knows.
    """
    if isinstance(env, FunctionalVectorEnv):
        if options or num_envs not in (1, env.num_envs) or len(env.batch_shape) != 1:
            raise ValueError(f"{env!r} has its options already (and must have one batch axis); got {num_envs=}, {options}.")
        return env
    if not isinstance(num_envs, int | np.integer) or num_envs < 1:
        raise ValueError(f"num_envs must be a positive integer, got {num_envs!r}.")
    given = {name: options[name] for name in options if name in _OPTIONS}
    for_env = {name: options[name] for name in options if name not in _OPTIONS}
    if isinstance(env, str):
        env = adapt(make_env(env, library, **for_env))
    elif for_env or library is not None:
        unknown = sorted(for_env) or ["library"]
        raise TypeError(f"{unknown} are no options of an environment that exists already; these are {sorted(_OPTIONS)}.")
    return FunctionalVectorEnv(env, int(num_envs), **given)

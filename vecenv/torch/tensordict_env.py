"""``TensorDictEnv``: JAX-native environments as a TorchRL environment that keeps its state in the TensorDict.

Every TensorDict holds the state as two tensors, so it can be stepped twice, or stored and stepped again later, and gradients
flow through all torch operations on it. TorchRL's reset masks select rows of these tensors, and do not affect the gradients
of other rows.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from tensordict import TensorDict
from torchrl.data.tensor_specs import Categorical, Composite, Unbounded
from torchrl.envs import EnvBase

from vecenv.adapters.torchrl import make_codec
from vecenv.backends.jax_native import parse_functional
from vecenv.jax.env import EnvState
from vecenv.jax.functional import FunctionalVectorEnv
from vecenv.jax.interop import keys_from
from vecenv.jax.libraries import available_envs, differentiability, require_gradient
from vecenv.system.reporting import warn
from vecenv.torch.differentiable import DifferentiableEnv, TorchState, torch_dtype

__all__ = ["TensorDictEnv"]

_RESERVED_KEYS = frozenset({"reward", "done", "terminated", "truncated", "action", "next", "state", "_reset", "_step"})


class _AvailableEnvs:
    """A descriptor for ``available_envs``, which can be read on the class and on its instances."""

    def __get__(self, instance: Any, owner: Any) -> list[str]:
        return [name for names in available_envs().values() for name in names]


class TensorDictEnv(EnvBase):  # type: ignore[misc, unused-ignore]
    """Environments of Brax, MuJoCo Playground and other JAX libraries as a TorchRL ``EnvBase``, with gradients.

    The TensorDicts that go into and come out of a step hold the state under ``"state"``, as ``"floats"`` ``[*B, D]`` and
    ``"integers"`` ``[*B, M]``. Stepping the same TensorDict twice gives the same result, so rollouts can branch.
    Observations, rewards and the state are differentiable with respect to all earlier actions. A row with an ended episode
    stays unchanged, with reward 0, until it is reset. A ``"_reset"`` mask does not affect the gradients of other rows.

    A reset begins the next episode in the row's own sequence of episodes; the environment keeps the position in each
    sequence. After ``set_seed(s)``, the next reset of all rows gives row i the key ``jax.random.key(s + i)``.

    The environment can be pickled and copied if its arguments can.

    Args:
        env: A name in Brax or Playground, an environment that :func:`vecenv.jax.adapt` accepts, or a
            :class:`vecenv.jax.FunctionalVectorEnv` with mode DISABLED and one row per element of the batch (then without
            other options).
        batch_size: Any shape, including ``()``.
        requires_grad: ``True``: raise for an environment without a gradient, and warn if the gradient is 0 for every
            action; ``False``: compute no gradients; ``None``: compute gradients if the environment has any.
        device: The device of the tensors. If it is not JAX's device, tensors are copied between the two.
        categorical_action_encoding: Encode discrete spaces as integers instead of one-hot vectors.
        allow_done_after_reset: As in TorchRL's ``EnvBase``.
        from_pixels: Only ``False`` is supported, as in TorchRL's ``BraxEnv``.
        **options: Options of :class:`vecenv.jax.FunctionalVectorEnv`, except for ``autoreset_mode``; others, such as
            ``backend="spring"``, go to the named environment.

    Attributes:
        functional: The underlying :class:`vecenv.jax.FunctionalVectorEnv`, with a single batch axis.
        available_envs: The names in Brax and Playground; can also be read on the class.

    Raises:
        gymnasium.error.NameNotFound: No library has an environment of this name.
        ValueError: ``requires_grad=True``, and the environment has no gradient; the message names the remedy if there is
            one. Or a ``FunctionalVectorEnv`` has another mode or number of rows, or options are given with it; or the batch
            is empty.
        TypeError: An option is unknown, or is ``autoreset_mode``.
        NotImplementedError: The actions are a Dict or a Tuple, or ``from_pixels=True``.

    Example::

        env = vecenv.torch.TensorDictEnv("ant", batch_size=[16], backend="spring")
        env.set_seed(0)
        data = env.rollout(10, policy)
        (-data["next", "reward"].mean()).backward()
    """

    available_envs = _AvailableEnvs()

    def __init__(
        self, env: Any, batch_size: Any = (), *, requires_grad: bool | None = None, device: Any = "cpu",
        categorical_action_encoding: bool = False, allow_done_after_reset: bool = False, from_pixels: bool = False,
        **options: Any,
    ) -> None:  # fmt: skip
        if from_pixels:
            raise NotImplementedError("from_pixels=True is not supported: observations are the environment's own")
        batch = torch.Size(batch_size)
        if not batch.numel():
            raise ValueError(f"batch_size must have at least one environment, got {tuple(batch)}")
        super().__init__(device=device, batch_size=batch, allow_done_after_reset=allow_done_after_reset)
        self._constructor_arguments: dict[str, Any] = {
            "env": env, "batch_size": tuple(batch), "requires_grad": requires_grad,
            "categorical_action_encoding": categorical_action_encoding,
            "allow_done_after_reset": allow_done_after_reset,
        }  # fmt: skip
        self._options = options
        self.functional = _functional(env, batch.numel(), options)
        derivative = differentiability(self.functional)
        if requires_grad and derivative == "zero":
            warn(f"a step of {getattr(self.functional.single_env, 'name', env)} has a gradient of 0 for every action")
        elif requires_grad:
            require_gradient(self.functional)
        self.requires_grad_of_actions = bool(requires_grad) or (requires_grad is None and derivative == "reverse")
        self._inner = DifferentiableEnv(self.functional, (), gradients=self.requires_grad_of_actions)
        self._next_seed: int | None = None
        self._reset_state: EnvState | None = None  # every row's state after its latest reset
        self._make_specs(not categorical_action_encoding)
        self.is_closed = False

    def _make_specs(self, onehot: bool) -> None:
        functional, batch = self.functional, self.batch_size
        action_space = functional.single_action_space
        if isinstance(action_space, spaces.Dict | spaces.Tuple):
            raise NotImplementedError(f"actions must be one tensor, but the action space is {action_space}")
        keys = map(str, _observation_keys(functional))
        names = {key: f"observation_{key}" if key in _RESERVED_KEYS else key for key in keys}
        self._observations = make_codec(functional.single_observation_space, 1, onehot, names.__getitem__)
        self._actions = make_codec(action_space, 1, onehot)
        self._has_box_actions = isinstance(action_space, spaces.Box)
        spec = self._expand_spec(self._observations.spec)
        observed = dict(spec.items()) if _observation_keys(functional) else {"observation": spec}
        widths, dtypes = self._inner.widths, self._inner.dtypes
        columns = zip(_STATE_KEYS, widths, dtypes, strict=True)
        state_specs = {name: Unbounded(shape=(*batch, w), dtype=d) for name, w, d in columns}
        device = self.device or "cpu"
        self.observation_spec = Composite({**observed, "state": Composite(state_specs, shape=batch)}, shape=batch).to(device)
        self.state_spec = Composite({"state": Composite(state_specs, shape=batch).clone()}, shape=batch).to(device)
        self.action_spec = self._expand_spec(self._actions.spec).to(device)
        self.reward_spec = Unbounded(shape=(*batch, 1), dtype=torch_dtype(jnp.result_type(float)), device=device)
        flag = Categorical(2, shape=(*batch, 1), dtype=torch.bool, device=device)
        flags = {"done": flag, "terminated": flag.clone(), "truncated": flag.clone()}
        self.done_spec = Composite(flags, shape=batch, device=device)

    def _expand_spec(self, spec: Any) -> Any:
        """Expand the spec of one row, with a leading axis of size 1, to the shape of the batch."""
        return spec[0].expand(*self.batch_size, *spec.shape[1:]) if self.batch_size else spec[0]

    # -- methods that TorchRL calls ----------------------------------------------------------------------------------

    def _reset(self, tensordict: Any = None, *, seed: int | None = None) -> Any:
        mask = None if tensordict is None else tensordict.get("_reset", None)
        if mask is None or self._reset_state is None:
            self._begin(seed)
        elif (rows := mask.detach().cpu().numpy().reshape(-1)).any():
            if seed is not None:
                raise ValueError("seed= is for resets of all environments, but '_reset' selects some")
            self._reset_state = self.functional.reset_mask(self._reset_state, rows)
        return self.tensordict_of(self._inner.wrap(self._require_reset_state()))

    def _require_reset_state(self) -> EnvState:
        if self._reset_state is None:
            self._begin(None)
        assert self._reset_state is not None
        return self._reset_state

    def _begin(self, seed: int | None) -> None:
        """Begin an episode in every row: from the seed if there is one, or else the next in the row's sequence."""
        seed = self._next_seed if seed is None else seed
        n = self.functional.num_envs
        if seed is None and self._reset_state is not None:
            self._reset_state = self.functional.reset_mask(self._reset_state, jnp.ones(n, bool))
        else:
            self._reset_state = self.functional.begin(jnp.asarray(keys_from(seed, n)))
        self._next_seed = None

    def _step(self, tensordict: Any) -> Any:
        if tensordict.get("state", None) is None:
            before = self._inner.wrap(self._require_reset_state())
        else:
            before = self.state_of(tensordict)
        action = tensordict.get("action")
        rows = action.reshape(self.functional.num_envs, *action.shape[len(self.batch_size) :])
        if not self._has_box_actions:
            rows = torch.from_numpy(self._actions.decode(rows))
        after = self._inner.step(before, rows.to(before.packed.device))
        reward = after.reward
        step_mask = tensordict.get("_step", None)
        if step_mask is not None:
            mask = step_mask.reshape(-1, 1).to(before.packed.device)
            packed, integers = after.packed, after.integers
            after = self._inner.state(torch.where(mask, packed, before.packed), torch.where(mask, integers, before.integers))
            reward = torch.where(mask[:, 0], reward, torch.zeros_like(reward))
        result = self.tensordict_of(after)
        result.set("reward", self._to_batch_shape(reward.unsqueeze(-1)))
        return result

    def _set_seed(self, seed: int | None) -> None:
        self._next_seed = seed

    # -- states ------------------------------------------------------------------------------------------------------

    def state_of(self, tensordict: Any) -> TorchState:
        """Return the state that a TensorDict holds, with all fields (``info``, ...) and a single batch axis."""
        n = self.functional.num_envs
        device = self._inner.device
        packed, integers = (
            tensordict.get(("state", name)).reshape(n, width).to(device)
            for name, width in zip(_STATE_KEYS, self._inner.widths, strict=True)
        )
        return self._inner.state(packed, integers)

    def tensordict_of(self, state: TorchState) -> Any:
        """Convert a state to a TensorDict on the environment's device, as from ``reset``; inverse of :meth:`state_of`."""
        observations = self._observations.encode(state.obs)
        entries = observations if _observation_keys(self.functional) else {"observation": observations}
        flags = {name: getattr(state, name).unsqueeze(-1) for name in ("done", "terminated", "truncated")}
        state_tensors = dict(zip(_STATE_KEYS, (state.packed, state.integers), strict=True))
        leaves = {name: self._to_batch_shape(leaf) for name, leaf in {**entries, **flags}.items()}
        state_leaves = {name: self._to_batch_shape(leaf) for name, leaf in state_tensors.items()}
        leaves["state"] = TensorDict(state_leaves, batch_size=self.batch_size, device=self.device)
        return TensorDict(leaves, batch_size=self.batch_size, device=self.device)

    def _to_batch_shape(self, leaf: Any) -> Any:
        """Reshape a single batch axis to the batch's shape, and move the tensors to the environment's device."""
        if isinstance(leaf, dict):
            return {name: self._to_batch_shape(inner) for name, inner in leaf.items()}
        leaf = leaf.reshape((*self.batch_size, *leaf.shape[1:]))
        return leaf if self.device is None else leaf.to(self.device)

    # -- other methods -------------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: Any) -> TensorDictEnv:
        arguments = {**self._constructor_arguments, "device": self.device, "env": self.functional}  # already compiled
        copied = _rebuild(type(self), arguments, self._copy_progress())
        copied._constructor_arguments, copied._options = self._constructor_arguments, self._options
        return copied  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        arguments = {**self._constructor_arguments, **self._options, "device": self.device}
        return _rebuild, (type(self), arguments, self._copy_progress())

    def _copy_progress(self) -> Any:
        """Return the next seed and the tensors of the state after the latest reset, for :func:`_rebuild`."""
        if self._reset_state is None:
            return self._next_seed, None
        state = self._inner.wrap(self._reset_state)
        return self._next_seed, (state.packed, state.integers)

    def __repr__(self) -> str:
        name = getattr(self.functional.single_env, "name", "env")
        return f"{type(self).__name__}({name}, batch_size={list(self.batch_size)}, device={self.device})"


_STATE_KEYS = ("floats", "integers")


def _rebuild(cls: Any, arguments: dict[str, Any], progress: Any) -> Any:
    env = cls(**arguments)
    env._next_seed, tensors = progress
    if tensors is not None:
        env._reset_state = env._inner.unwrap(env._inner.state(*tensors))
    return env


def _functional(env: Any, n: int, options: dict[str, Any]) -> FunctionalVectorEnv:
    if isinstance(env, FunctionalVectorEnv):
        if env.autoreset_mode is not AutoresetMode.DISABLED or env.batch_shape != (n,):
            raise ValueError(
                f"{env!r} resets its rows itself, or has another number of rows: pass the environment that it was built from"
            )
        return parse_functional(env, n, None, options)
    if "autoreset_mode" in options:
        raise TypeError("autoreset_mode is not an option here: TorchRL resets finished rows")
    return parse_functional(env, n, None, {**options, "autoreset_mode": AutoresetMode.DISABLED})


def _observation_keys(functional: FunctionalVectorEnv) -> tuple[Any, ...]:
    """Return the keys of a Dict observation space; an empty tuple for other spaces."""
    space = functional.single_observation_space
    return tuple(space.spaces) if isinstance(space, spaces.Dict) else ()

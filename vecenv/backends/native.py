"""Vector environments that a library steps by itself: any ``vector_entry_point``, and ALE's native ``AtariVectorEnv``.

The library does the work. This class gives its calls the meaning that they have on the other backends: it refuses what the
library would ignore, assert, or never return from, and puts what comes back into Gymnasium's form. What a library does
beyond Gymnasium's interface is one row of a table. Any other is taken to have one seed for all its environments and to
reset them together, and it steps when the answer is fetched.
"""

from __future__ import annotations

import contextlib
import copy as copies
import os
import threading
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, Final

import numpy as np
from gymnasium import spaces
from gymnasium.error import NoAsyncCallError, ResetNeeded
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import iterate

from vecenv.errors import StepTimeout
from vecenv.front.arguments import count_of, reset_mask_of, seeds_of
from vecenv.front.attributes import NoAttributes
from vecenv.front.capabilities import Capabilities, figures, unable
from vecenv.front.deadlines import seconds_of
from vecenv.front.guard import refuse_busy, refuse_closed, refuse_forked
from vecenv.front.phases import Phase, advance

__all__ = ["NativeVectorEnv"]

_LIBRARIES: Final[dict[str, Collection[str]]] = {
    # class -> what it does
    # "rows": reset() takes a seed for each environment (31 bits, -1: none) and reset_mask, and ignores all other options
    # "threads": it steps in threads of its own, without the interpreter's lock
    # "fresh": the observations that it gives out are the caller's own
    "ale_py.vector_env.AtariVectorEnv": {"rows", "threads", "fresh"},
}
_ARRAYS: Final = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


class NativeVectorEnv(NoAttributes, VectorEnv[Any, Any, Any]):
    """A library's own vector environment, with the calls of the other backends.

    Args:
        library: The library's vector environment, which belongs to this one from now on.
        copy: Give out observations that are the caller's own. ``False``: what the library gives out, which may change later.
        reason: Why this library was taken, for :attr:`plan`.

    Raises:
        NotImplementedError: The library steps only some of its environments at a time (ALE's ``batch_size``).

    Attributes:
        library: The library's vector environment; ``None`` after :meth:`close`.
        plan: Which class steps the environments, and why: a text.

    ``step`` returns ``(observations, rewards, terminations, truncations, infos)``: observations of ``observation_space``;
    rewards float64, flags bool, all ``(num_envs,)`` and fresh; infos a dict of arrays with a mask ``_key`` for every key.
    Under same-step autoreset, ``infos["final_obs"]`` and ``infos["final_info"]`` have Gymnasium's form; of an episode's last
    step ALE tells nothing but the observation, so its ``final_info`` is empty.
    """

    def __init__(self, library: VectorEnv[Any, Any, Any], *, copy: bool = True, reason: str = "it was handed in") -> None:
        self.num_envs, self.spec, self.render_mode = library.num_envs, library.spec, library.render_mode
        for name in ("observation_space", "action_space", "single_observation_space", "single_action_space"):
            setattr(self, name, getattr(library, name))
        # ALE writes its mode into the dict that all classes without metadata of their own share
        stated = {} if library.metadata is VectorEnv.metadata else library.metadata
        self.autoreset_mode = getattr(library, "autoreset_mode", stated.get("autoreset_mode", AutoresetMode.NEXT_STEP))
        self.metadata = {**stated, "autoreset_mode": self.autoreset_mode}
        self._name = f"{type(library).__module__}.{type(library).__qualname__}"
        self._does = _LIBRARIES.get(self._name, ())
        self._own: Any = _own if copy and "fresh" not in self._does else lambda observations: observations
        self.library, self.plan = library, f"{self._name}: {reason}"
        self._owner, self._lock, self._phase, self._begun = os.getpid(), threading.RLock(), Phase.DEFAULT, False
        # It waits in the library, so that the caller can give up waiting (a timeout, Ctrl-C) and the answer is not lost.
        self._waiter = ThreadPoolExecutor(1, "vecenv-native") if "threads" in self._does else None
        if (rows := getattr(library, "batch_size", self.num_envs)) != self.num_envs:
            raise NotImplementedError(f"backend 'native' steps all environments at once; {self._name} has batch_size={rows}")

    # -- reset ---------------------------------------------------------------------------------------------------------

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset all environments, or those of ``options["reset_mask"]``; see :meth:`reset_async`."""
        self.reset_async(seed, options)
        return self.reset_wait()

    def reset_async(self, seed: Any = None, options: dict[str, Any] | None = None, *, env_id: Any = None) -> None:
        """Begin a reset; :meth:`reset_wait` or :meth:`recv` fetches the answer.

        Args:
            seed: An int (environment i gets ``seed + i``; a library with one generator for all gets ``seed``), one int or
                ``None`` for each environment, or ``None``.
            options: ``"reset_mask"``, a bool array ``(num_envs,)``, chooses the environments; the others stay as they are.
                Other keys are handed to the library. The dict is not changed.

        Raises:
            NotImplementedError: The library has no seed for each environment, or resets all of them together.
            TypeError, ValueError: Seeds, mask or options of the wrong kind, length or range.
            ResetNeeded: The first reset must be of all environments.
            AlreadyPendingCallError: An answer is owed. In all these cases nothing was sent.
        """
        seeds, (mask, others) = seeds_of(seed, self.num_envs), reset_mask_of(options, self.num_envs)
        mask = np.ones(self.num_envs, np.bool_) if mask is None else mask
        if env_id is not None:
            unable(self, "reset environments by env_id", f"{self._name} answers for all of them at once")
        if "rows" in self._does:
            if others:
                raise ValueError(f"{self._name} takes no reset options but 'reset_mask', got {sorted(map(str, others))}")
            seed = np.array([-1 if one is None else one % 2**31 for one in seeds]).astype(np.int64, casting="safe")[mask]
            others = {} if mask.all() else {"reset_mask": mask}
        elif not mask.all() or seeds != seeds_of(seed := seeds[0], self.num_envs):
            raise NotImplementedError(f"backend 'native': {self._name} resets all by one seed; got {seeds}, mask {mask}")
        self._begin("reset_async", mask, seed=seed, options=others or None)

    def reset_wait(self, timeout: float | None = None) -> tuple[Any, dict[str, Any]]:
        """Fetch the answer to :meth:`reset_async`; raises as :meth:`step_wait`."""
        observations, *_, infos = self._finish("reset_wait", timeout)
        return observations, infos

    # -- step ----------------------------------------------------------------------------------------------------------

    def step(self, actions: Any) -> Any:
        """Step all environments; see :meth:`step_async` and :meth:`step_wait`."""
        self.step_async(actions)
        return self.step_wait()

    def step_async(self, actions: Any) -> None:
        """Begin a step: ALE's threads set to work. Other libraries compute nothing until :meth:`step_wait`.

        Args:
            actions: A batch of ``action_space``; arrays of another dtype are cast where at most precision is lost.

        Raises:
            TypeError, ValueError: Actions of the wrong dtype, shape or range; nothing was sent.
            ResetNeeded: Before the first reset.
            AlreadyPendingCallError: An answer is owed.
        """
        self._begin("step_async", None, self._checked(actions))

    def step_wait(self, timeout: float | None = None) -> Any:
        """Fetch the answer to :meth:`step_async`.

        Raises:
            StepTimeout: Not within ``timeout`` seconds; the answer is still owed, call again.
            NotImplementedError: A timeout, where the library steps in the caller's own thread; the answer is still owed.
            NoAsyncCallError: Nothing is owed.
            Exception: Whatever the library raises.
        """
        return self._finish("step_wait", timeout)

    def send(self, actions: Any, env_id: Any = None) -> None:
        """As :meth:`step_async`. ``env_id`` may only name all environments, in their order.

        Raises:
            NotImplementedError: ``env_id`` names only some environments, or another order.
        """
        if env_id is not None and not np.array_equal(env_id, np.arange(self.num_envs)):
            raise NotImplementedError(f"backend 'native' steps all environments at once, in order; got env_id={env_id!r}")
        self.step_async(actions)

    def recv(self, timeout: float | None = None, *, count: int | None = None) -> Any:
        """Fetch the answer to :meth:`send` or :meth:`reset_async`, of all environments.

        Returns:
            What ``step`` returns, with ``infos["env_id"]``. After a reset, rewards are 0 and flags False.

        Raises:
            NoAsyncCallError: Nothing was sent. Otherwise as :meth:`step_wait`.
        """
        if count_of(count, self.num_envs, self.num_envs) != self.num_envs:
            unable(self, f"receive {count} of {self.num_envs} environments", f"{self._name} answers for all of them at once")
        return self._finish("recv", timeout)

    def _checked(self, actions: Any) -> Any:
        """A copy of the caller's actions that is a batch of the library's action space."""
        space, given, wraps = self.action_space, actions, False
        if isinstance(space, _ARRAYS):
            given = np.asarray(actions)
            if not np.can_cast(given.dtype, space.dtype, "same_kind"):
                raise TypeError(f"actions must have dtype {space.dtype}, got {given.dtype}; nothing was sent")
            actions = given.astype(space.dtype)
            wraps = given.dtype != space.dtype and space.dtype.kind in "iu" and not np.array_equal(actions, given)
        if wraps or actions not in space:
            raise ValueError(f"actions must be {self.num_envs} of {self.single_action_space}, got {given!r}; none was sent")
        return copies.deepcopy(actions) if actions is given else actions

    # -- asking, and dressing answers ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _alone(self, method: str) -> Iterator[None]:
        """Refuse a forked child, a call after ``close()``, and a second thread."""
        if os.getpid() != self._owner:
            refuse_forked(self, self._owner, "its threads")
        if self.closed:
            refuse_closed(self)
        if not self._lock.acquire(blocking=False):
            refuse_busy(self, method)
        try:
            yield
        finally:
            self._lock.release()

    def _begin(self, method: str, mask: Any, *args: Any, **kwargs: Any) -> None:
        """Call the library, or, without threads, get ready to. From here on the answer is owed."""
        with self._alone(method):
            phase = advance(self._phase, method, self)
            if not self._begun and (mask is None or not mask.all()):
                raise ResetNeeded(f"`{method}` before the first reset of all environments")
            call = getattr(self.library, phase.value)
            self._owed: Any = self._waiter.submit(call, *args, **kwargs) if self._waiter else lambda: call(*args, **kwargs)
            self._phase, self._begun, self._mask = phase, True, mask

    def _finish(self, method: str, timeout: float | None) -> Any:
        """Hand the answer over. Not in time, it stays owed."""
        with self._alone(method):
            seconds = seconds_of(timeout)
            if method != "recv":
                advance(self._phase, method, self)
            elif self._phase is Phase.DEFAULT:
                raise NoAsyncCallError("Calling `recv` without any prior call to `send` or `reset_async`.", "recv")
            if self._waiter is None and seconds is not None:
                raise NotImplementedError(f"backend 'native': {self._name} steps in the caller's thread, without a timeout")
            if self._waiter is not None and not wait([self._owed], seconds).done:
                raise StepTimeout(f"`{method}` has timed out after {timeout} seconds; the answer is still owed: call again")
            try:
                answer = self._owed.result() if self._waiter else self._owed()
            except Exception:
                self._phase = Phase.DEFAULT
                raise
            dressed = self._dressed(answer, method == "recv")
            self._phase = Phase.DEFAULT
            return dressed

    def _dressed(self, answer: Any, numbered: bool) -> Any:
        """What the library returned, in Gymnasium's form, with ``env_id`` among the infos or not."""
        observations, *outcome, told = answer
        rewards, *flags = outcome or [np.zeros(self.num_envs)] * 3
        terminations, truncations = np.array(flags, np.bool_)
        done, infos = terminations | truncations, {**({"env_id": np.arange(self.num_envs)} if numbered else {}), **told}
        if "_final_obs" not in infos and (last := infos.pop("final_obs", None)) is not None and done.any():
            final = np.full(self.num_envs, None, dtype=object)
            for row, observation in enumerate(iterate(self.observation_space, last)):
                final[row] = copies.deepcopy(observation) if done[row] else None
            infos |= {"final_obs": final, "_final_obs": done, "final_info": infos.get("final_info", {}), "_final_info": done}
        infos = self._columns(infos, np.ones(self.num_envs, np.bool_) if self._mask is None else self._mask)
        return self._own(observations), np.array(rewards, np.float64), terminations, truncations, infos

    def _columns(self, infos: Mapping[str, Any], mask: Any) -> dict[str, Any]:
        """Infos as fresh arrays, a row an environment, each with its mask; what is one for all is repeated."""
        columns: dict[str, Any] = {}
        for key, value in infos.items():
            if not key.startswith("_") or key[1:] not in infos:
                each = value if np.shape(value)[:1] == (self.num_envs,) else [value] * self.num_envs
                columns[key] = self._columns(value, mask) if isinstance(value, Mapping) else np.array(each)
                columns[f"_{key}"] = np.array(infos.get(f"_{key}", mask))
        return columns

    # -- the rest ------------------------------------------------------------------------------------------------------

    @property
    def capabilities(self) -> Capabilities:
        """What the library can do."""
        rows = "rows" in self._does
        return Capabilities(
            "native", attributes=False, first_ready=False, reset_mask=rows, masked_seeds=rows, reset_options=not rows,
            in_this_process=True,
        )  # fmt: skip

    def stats(self) -> dict[str, float]:
        """The figures of all backends, nan where a library tells none."""
        return figures({"in_flight": float(self.num_envs if self._phase is not Phase.DEFAULT else 0)})

    def render(self) -> Any:
        """One frame an environment; ``None`` without a render mode."""
        with self._alone("render"):
            return None if self.render_mode is None else self.library.render()

    def close_extras(self, timeout: float | None = 60.0, terminate: bool = False) -> None:
        """Let go of the library, when the call that is under way has ended. In a forked child, do nothing.

        Args:
            timeout: Seconds to wait for another thread that is in a call; afterwards the library is left to that call.
            terminate: Do not wait.
        """
        self.closed = True
        seconds = 0.0 if terminate else seconds_of(timeout)
        if getattr(self, "_owner", None) == os.getpid() and self._lock.acquire(timeout=-1 if seconds is None else seconds):
            if self._waiter is not None:
                self._waiter.shutdown(wait=not terminate)
            self.library.close()
            self.library = None  # type: ignore[assignment]


def _own(value: Any) -> Any:
    """A copy; arrays of any library become numpy's."""
    if isinstance(value, dict | tuple):
        return {key: _own(part) for key, part in value.items()} if isinstance(value, dict) else tuple(map(_own, value))
    return np.array(value) if hasattr(value, "__array__") else copies.deepcopy(value)

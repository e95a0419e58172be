"""Vector environments that a library steps by itself: any ``vector_entry_point``, and ALE's native ``AtariVectorEnv``.

The library does the work. This class gives its calls the meaning that they have on the other backends: it refuses what the
library would ignore, assert, or never return from, and puts the results into Gymnasium's form. A table says what a library
does beyond Gymnasium's interface. Any other library is taken to have one seed for all its environments, to reset them
together, and to step when the answer is fetched.
"""

from __future__ import annotations

import copy as copies
import functools
import time
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, Final

import numpy as np
from gymnasium import spaces
from gymnasium.error import ResetNeeded
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import iterate

from vecenv.front.arguments import ResetOptions, seeds_of, wrong_shape
from vecenv.front.capabilities import Capabilities
from vecenv.front.driver import Call, LockstepDriver, Phase, RunOnce, Stepped
from vecenv.front.vector_env import VectorEnvBase, exclusive

_LIBRARIES: Final[dict[str, Collection[str]]] = {
    # class -> what it does
    # "rows": reset() takes a seed for each environment (31 bits, -1: none) and reset_mask, and ignores all other options
    # "threads": it steps in threads of its own, without the interpreter's lock
    # "fresh": the observations that it gives out are the caller's own
    "ale_py.vector_env.AtariVectorEnv": {"rows", "threads", "fresh"},
}
_ARRAYS: Final = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


class NativeVectorEnv(VectorEnvBase[Any, Any, Any]):
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
    step ALE tells nothing but the observation, so its ``final_info`` is empty. Actions of another dtype are cast where at
    most precision is lost.

    ``step_async`` sets ALE's threads to work. Other libraries compute nothing until the answer is fetched, and know no
    timeouts; those with one generator for all environments take one seed, an int, for all.
    """

    _driver: _Library

    def __init__(self, library: VectorEnv[Any, Any, Any], *, copy: bool = True, reason: str = "it was handed in") -> None:
        self.num_envs, self.spec, self.render_mode = library.num_envs, library.spec, library.render_mode
        for name in ("observation_space", "action_space", "single_observation_space", "single_action_space"):
            setattr(self, name, getattr(library, name))
        # ALE writes its mode into the dict that all classes without metadata of their own share
        stated = {} if library.metadata is VectorEnv.metadata else library.metadata
        self.autoreset_mode = getattr(library, "autoreset_mode", stated.get("autoreset_mode", AutoresetMode.NEXT_STEP))
        self.metadata = {**stated, "autoreset_mode": self.autoreset_mode}
        driver = _Library(library, copy)
        self.plan = f"{driver.title}: {reason}"
        if (rows := getattr(library, "batch_size", self.num_envs)) != self.num_envs:
            raise NotImplementedError(f"backend 'native' steps all at once; {driver.title} has batch_size={rows}")
        self._open(driver)

    @property
    def library(self) -> Any:
        """The library's vector environment; ``None`` after :meth:`close`."""
        return self._driver.library

    @exclusive
    def render(self) -> Any:
        """One frame an environment; ``None`` without a render mode."""
        self._driver.require_idle("render")
        return None if self.render_mode is None else self.library.render()


class _Library(LockstepDriver):
    """A library's vector environment as a :class:`vecenv.front.driver.Driver`."""

    yields = False

    def __init__(self, library: VectorEnv[Any, Any, Any], copy: bool) -> None:
        super().__init__(library.num_envs)
        self.title = f"{type(library).__module__}.{type(library).__qualname__}"
        self.why = f"{self.title} answers for all of them at once"
        self.does = _LIBRARIES.get(self.title, ())
        self.library: Any = library
        self._latest: Any = None, None, None  # the call that was made last, what answers it, and of which rows
        self._begun: Any = None  # what a thread has begun to answer
        self._own: Any = _own if copy and "fresh" not in self.does else lambda observations: observations
        # It waits in the library, so that the caller can give up waiting (a timeout, Ctrl-C) and the answer is not lost.
        self._waiter = ThreadPoolExecutor(1, "vecenv-native") if "threads" in self.does else None

    @property
    def asked(self) -> Call | None:
        return self._latest[0]  # type: ignore[no-any-return]

    @property
    def capabilities(self) -> Capabilities:
        rows = "rows" in self.does
        return Capabilities(
            "native", attributes=False, first_ready=False, timeouts="threads" in self.does, row_seeds=rows, reset_mask=rows,
            masked_seeds=rows, reset_options=not rows, row_options=False, in_this_process=True,
        )  # fmt: skip

    def begin_reset(self, call: Call, seeds: list[Any], mask: Any, options: ResetOptions) -> None:
        all_rows = mask is None or mask.all()
        if self.asked is None and not all_rows:
            raise ResetNeeded("The first reset must be of all environments, without reset_mask.")
        if "rows" in self.does:
            seed: Any = np.array([-1 if one is None else one % 2**31 for one in seeds]).astype(np.int64, casting="safe")
            seed, options = (seed, None) if all_rows else (seed[mask], {"reset_mask": mask})
        elif seeds != seeds_of(seed := seeds[0], len(seeds)):
            raise NotImplementedError(f"backend 'native': {self.title} resets all by one seed; got {seeds}")
        mask = np.ones(len(seeds), np.bool_) if mask is None else mask
        self._ask(call, mask, functools.partial(self.library.reset, seed=seed, options=options or None))

    def begin_step(self, call: Call, actions: Any) -> None:
        if self.asked is None:
            raise ResetNeeded("Call reset first.")
        all_rows = np.ones(self.library.num_envs, np.bool_)
        self._ask(call, all_rows, functools.partial(self.library.step, self._checked(actions)))

    def _ask(self, call: Call, mask: Any, ask: Any) -> None:
        self._latest = call, RunOnce(ask), mask
        self._begin()

    def _begin(self) -> None:
        """Let the library begin, where it has threads. What was interrupted here begins with the next wait."""
        work = self._latest[1]
        if self._waiter is not None and self._begun is not work:
            self._waiter.submit(work)
            self._begun = work

    def _checked(self, actions: Any) -> Any:
        """A copy of the caller's actions that is a batch of the library's action space."""
        space, given, wraps = self.library.action_space, actions, False
        if isinstance(space, _ARRAYS):
            given = np.asarray(actions)
            if given.shape != space.shape:
                raise wrong_shape("actions", given.shape, tuple(space.shape or ()))
            if not np.can_cast(given.dtype, space.dtype, "same_kind"):
                raise TypeError(f"actions must have dtype {space.dtype}, got {given.dtype}; nothing was sent")
            actions = given.astype(space.dtype)
            wraps = given.dtype != space.dtype and space.dtype.kind in "iu" and not np.array_equal(actions, given)
        if wraps or actions not in space:
            single = self.library.single_action_space
            raise ValueError(f"actions must be {self.library.num_envs} of {single}, got {given!r}; none was sent")
        return copies.deepcopy(actions) if actions is given else actions

    def wait(self, deadline: float) -> bool:
        if self._waiter is None:
            raise NotImplementedError(f"backend 'native': {self.title} steps in the caller's thread, without a timeout")
        self._begin()
        began = time.monotonic()
        done = wait([self._latest[1].future], max(deadline - began, 0.0)).done
        self._waited += time.monotonic() - began
        return bool(done)

    def read(self, kind: Phase) -> Stepped:
        _, work, mask = self._latest
        try:
            if self._waiter is None:
                return self._dressed(work.here(), mask)
            self._begin()
            return self._dressed(work.future.result(), mask)
        finally:
            self.pending_error = work.failure

    def _dressed(self, answer: Any, mask: Any) -> Stepped:
        """What the library returned, in Gymnasium's form."""
        count = len(mask)
        observations, *outcome, infos = answer
        rewards, *flags = outcome or [np.zeros(count)] * 3
        terminations, truncations = np.array(flags, np.bool_)
        done, infos = terminations | truncations, dict(infos)
        if "_final_obs" not in infos and (last := infos.pop("final_obs", None)) is not None and done.any():
            final = np.full(count, None, dtype=object)
            for row, observation in enumerate(iterate(self.library.observation_space, last)):
                final[row] = copies.deepcopy(observation) if done[row] else None
            infos |= {"final_obs": final, "_final_obs": done, "final_info": infos.get("final_info", {}), "_final_info": done}
        columns = self._columns(infos, mask)
        return self._own(observations), np.array(rewards, np.float64), terminations, truncations, columns

    def _columns(self, infos: Mapping[str, Any], mask: Any) -> dict[str, Any]:
        """Infos as fresh arrays, a row per environment, each with its mask; what is one for all is repeated."""
        columns: dict[str, Any] = {}
        for key, value in infos.items():
            if not key.startswith("_") or key[1:] not in infos:
                each = value if np.shape(value)[:1] == (len(mask),) else [value] * len(mask)
                columns[key] = self._columns(value, mask) if isinstance(value, Mapping) else np.array(each)
                columns[f"_{key}"] = np.array(infos.get(f"_{key}", mask))
        return columns

    def close(self, *, terminate: bool = False) -> None:
        if self._waiter is not None:
            self._waiter.shutdown(wait=not terminate)
        if self.library is not None:
            self.library.close()
        self.library = None


def _own(value: Any) -> Any:
    """A copy; arrays of any library become numpy's."""
    if isinstance(value, dict | tuple):
        return {key: _own(part) for key, part in value.items()} if isinstance(value, dict) else tuple(map(_own, value))
    return np.array(value) if hasattr(value, "__array__") else copies.deepcopy(value)

"""How to ask a vector env for a step in two halves, for some rows only, or not for ever: what it says it can do.

Gymnasium's interface is ``reset`` and ``step`` of everybody. Classes with ``step_async`` and ``step_wait`` can be left
alone while they step, and given up on. Those whose capabilities say so can step some rows. For the others, a row that must
not be stepped is reset and stepped along with nobody looking.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
from gymnasium.error import NoAsyncCallError
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper

from vecenv.front.capabilities import capabilities_of
from vecenv.front.gymnasiums import GymnasiumAsync

__all__ = ["Calls", "Rows", "Stepped", "autoreset_mode_of", "calls_of"]

_USUAL_TIMEOUT: Final = 60.0

Rows: TypeAlias = npt.NDArray[np.intp]
Stepped: TypeAlias = tuple[Any, npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any], dict[str, Any]]


def autoreset_mode_of(envs: VectorEnv[Any, Any, Any]) -> AutoresetMode:
    """The autoreset mode that a vector env says it has.

    Raises:
        ValueError: It says none.
    """
    mode = (envs.metadata or {}).get("autoreset_mode")
    if mode is None:
        raise ValueError(f"{envs} does not say when it resets: metadata['autoreset_mode'] is missing.")
    return AutoresetMode(mode)


class Calls:
    """A vector env that knows ``reset`` and ``step`` only: the second half of a step does the work.

    Args:
        envs: The vector env.
        timeout: Seconds an answer may take, or ``None``. This class has to wait, however long it takes.

    Attributes:
        seeded_masks: Whether a reset of some rows takes seeds.
    """

    def __init__(self, envs: VectorEnv[Any, Any, Any], timeout: float | None) -> None:
        self.envs: Any = envs
        self.timeout = timeout
        able = capabilities_of(envs.unwrapped)
        self.seeded_masks = able is None or able.masked_seeds
        self._actions: Any = None
        self._disabled = autoreset_mode_of(envs) is AutoresetMode.DISABLED
        self._ended = np.zeros(envs.num_envs, np.bool_)  # by now, and not reset

    def reset(self, seeds: list[int] | None, mask: npt.NDArray[np.bool_] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset everybody, or the rows under ``mask``."""
        self._ended[... if mask is None else mask] = False
        return self._reset(seeds, None if mask is None else {"reset_mask": mask})

    def _reset(self, seeds: list[int] | None, options: dict[str, Any] | None) -> tuple[Any, dict[str, Any]]:
        observations, infos = self.envs.reset(seed=seeds, options=options)
        return observations, infos

    def begin(self, actions: Any) -> None:
        """Begin a step of everybody."""
        self._actions = actions

    def finish(self) -> Stepped:
        """The outcome of :meth:`begin`."""
        stepped = self._stepped()
        if self._disabled:
            self._ended = stepped[2] | stepped[3]
        return stepped

    def _stepped(self) -> Stepped:
        stepped: Stepped = self.envs.step(self._actions)
        return stepped

    def begin_some(self, rows: Rows, actions: Any, chosen: Any) -> None:
        """Begin a step of ``rows``; ``actions`` are everybody's, ``chosen`` those of ``rows``. The others have ended."""
        if self._ended.any():
            self.reset(None, self._ended.copy())
        self.begin(actions)

    def finish_some(self, rows: Rows) -> tuple[Rows | None, Stepped]:
        """The outcome of :meth:`begin_some`: of which rows (``None``: of everybody), and what."""
        return None, self.finish()

    def drain(self) -> None:
        """Wait for an answer that is still owed, and forget it."""


class AsyncCalls(Calls):
    """A vector env with ``step_async`` and ``step_wait``."""

    _owed: Callable[..., Any] | None = None  # what waits for the answer
    _lost: BaseException | None = None

    def _reset(self, seeds: list[int] | None, options: dict[str, Any] | None) -> tuple[Any, dict[str, Any]]:
        self.drain()
        self.envs.reset_async(seed=seeds, options=options)
        self._owed = self.envs.reset_wait
        observations, infos = self._wait()
        return observations, infos

    def begin(self, actions: Any) -> None:
        self._require()
        self.envs.step_async(actions)
        self._owed = self.envs.step_wait

    def _stepped(self) -> Stepped:
        stepped: Stepped = self._wait()
        return stepped

    def _wait(self) -> Any:
        assert self._owed is not None
        try:
            answer = self._owed(timeout=self.timeout)
        except (multiprocessing.TimeoutError, KeyboardInterrupt) as error:
            if isinstance(self.envs, GymnasiumAsync) and capabilities_of(self.envs) is None:
                self._lost = error  # Gymnasium's own takes the late answer for that of the next call
            raise
        except BaseException:
            self._owed = None
            raise
        self._owed = None
        return answer

    def drain(self) -> None:
        self._require()
        if self._owed is None:
            return
        with contextlib.suppress(NoAsyncCallError):
            try:
                self._wait()
            except multiprocessing.TimeoutError:
                raise
            except Exception:  # of a step that nobody waits for any more; the reset will show whether it mattered
                return

    def _require(self) -> None:
        if self._lost is not None:
            raise RuntimeError(
                f"Gymnasium's {type(self.envs).__name__} loses count of its answers after a {type(self._lost).__name__}: "
                "close it and build another, or use vecenv.AsyncVectorEnv."
            ) from self._lost


class RowCalls(AsyncCalls):
    """One that says it is :attr:`first_ready <vecenv.front.capabilities.Capabilities.first_ready>`: some rows can step."""

    def begin_some(self, rows: Rows, actions: Any, chosen: Any) -> None:
        self._require()
        self.envs.send(chosen, rows)
        self._owed = functools.partial(self.envs.recv, count=len(rows))

    def finish_some(self, rows: Rows) -> tuple[Rows | None, Stepped]:
        stepped: Stepped = self._wait()
        return np.asarray(stepped[4]["env_id"], np.intp), stepped


def calls_of(envs: VectorEnv[Any, Any, Any], timeout: float | str | None) -> Calls:
    """The best there is for ``envs``, by what it says it can do; of a wrapper, ``reset`` and ``step`` only."""
    able = capabilities_of(envs)
    if timeout == "auto":  # an engine's own step_timeout is what it does when it is given none
        timeout = _USUAL_TIMEOUT if able is None or own_timeout(envs) is None else None
    assert not isinstance(timeout, str)
    if isinstance(envs, VectorWrapper) or not hasattr(envs, "step_async"):
        return Calls(envs, timeout)
    return (RowCalls if able is not None and able.first_ready else AsyncCalls)(envs, timeout)


def own_timeout(envs: VectorEnv[Any, Any, Any]) -> float | None:
    """After how many seconds a vector env itself takes a step to hang; ``None``: never."""
    try:
        seconds: float | None = getattr(envs, "step_timeout", None)
    except NotImplementedError:  # a backend without one
        return None
    return seconds

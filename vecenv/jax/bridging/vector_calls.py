"""How to ask a vector env for a step in two halves, for some rows only, or not for ever: what its class allows.

Gymnasium's interface is ``reset`` and ``step`` of everybody. Classes with ``step_async`` and ``step_wait`` can be left
alone while they step, and given up on. vecenv's own can step some rows. For the others, a row that must not be stepped is
reset and stepped along with nobody looking.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from typing import Any, TypeAlias

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium.error import NoAsyncCallError
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper

from vecenv.engine.vector_env import AsyncVectorEnv

__all__ = ["Calls", "Rows", "Stepped", "autoreset_mode_of", "calls_of"]

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
    """

    seeded_masks = True
    """Whether a reset of some rows takes seeds."""

    def __init__(self, envs: VectorEnv[Any, Any, Any], timeout: float | None) -> None:
        self.envs: Any = envs
        self.timeout = timeout
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

    _owed: str | None = None  # the call whose answer is to be waited for
    _lost: BaseException | None = None

    def _reset(self, seeds: list[int] | None, options: dict[str, Any] | None) -> tuple[Any, dict[str, Any]]:
        self.drain()
        self.envs.reset_async(seed=seeds, options=options)
        observations, infos = self._wait("reset_wait")
        return observations, infos

    def begin(self, actions: Any) -> None:
        self._require()
        self.envs.step_async(actions)
        self._owed = "step_wait"

    def _stepped(self) -> Stepped:
        stepped: Stepped = self._wait("step_wait")
        return stepped

    def _wait(self, method: str) -> Any:
        self._owed = method
        try:
            answer = getattr(self.envs, method)(timeout=self.timeout)
        except (multiprocessing.TimeoutError, KeyboardInterrupt) as error:
            if isinstance(self.envs, gymnasium.vector.AsyncVectorEnv):
                self._lost = error  # it would take the late answer for that of the next call
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
                self._wait(self._owed)
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
    """vecenv's own: ``send`` and ``recv`` of some rows."""

    def begin_some(self, rows: Rows, actions: Any, chosen: Any) -> None:
        self.envs.send(chosen, rows)
        self._owed = "recv"

    def finish_some(self, rows: Rows) -> tuple[Rows | None, Stepped]:
        stepped = self._wait_for(len(rows))
        return np.asarray(stepped[4]["env_id"], np.intp), stepped

    def _wait_for(self, count: int) -> Stepped:
        stepped: Stepped = self._wait("recv")
        return stepped


class ProcessCalls(RowCalls):
    """``AsyncVectorEnv``, whose ``recv`` returns ``batch_size`` rows."""

    def _wait_for(self, count: int) -> Stepped:
        whole, self.envs.batch_size = self.envs.batch_size, count
        try:
            return super()._wait_for(count)
        finally:
            self.envs.batch_size = whole

    def drain(self) -> None:
        if self._owed == "recv":
            self._owed = None  # a reset takes back what is in flight
        super().drain()


class PoolCalls(RowCalls):
    """EnvPool, whose environments are seeded when they are built, all at once."""

    seeded_masks = False


def calls_of(envs: VectorEnv[Any, Any, Any], timeout: float | None) -> Calls:
    """The best there is for ``envs``."""
    if isinstance(envs, AsyncVectorEnv):
        policy = envs._engine.policy
        patience = None if policy.restart and policy.step_timeout is not None else timeout  # it will see to it itself
        return (ProcessCalls if envs.batch_size == envs.num_envs else AsyncCalls)(envs, patience)
    if type(envs).__module__.startswith("vecenv.backends.envpool"):
        return PoolCalls(envs, timeout)
    if hasattr(envs, "step_async") and not isinstance(envs, VectorWrapper):  # past the wrapper
        return AsyncCalls(envs, timeout)
    return Calls(envs, timeout)

"""Calls on the environments themselves: methods, attributes, functions, frames."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle
import numpy as np
from gymnasium.core import RenderFrame
from gymnasium.vector import AutoresetMode

from vecenv.engine.engine import Engine
from vecenv.engine.pending import Result, Worker
from vecenv.front.arguments import ResetOptions, env_ids_of, reset_mask_of, rows_of, seeds_of
from vecenv.front.guard import exclusive
from vecenv.front.phases import Phase, advance
from vecenv.link.messages import Op

__all__ = ["Attributes"]

_RESERVED = ("reset", "step", "close", "_setattr", "_check_spaces")


class Attributes:
    """The part of a vector environment that reaches through to the environments."""

    num_envs: int
    num_workers: int
    autoreset_mode: AutoresetMode
    _driver: Engine
    _finish: Callable[[str, Phase, float | None], Result]

    @exclusive
    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """``env.get_wrapper_attr(name)`` of every environment, called with the arguments if it can be called."""
        self._begin_call(name, args, kwargs)
        return self._call_answer(None)  # type: ignore[no-any-return]

    @exclusive
    def call_async(self, name: str, /, *args: object, **kwargs: object) -> None:
        """Begin a :meth:`call`."""
        self._begin_call(name, args, kwargs)

    def _begin_call(self, name: str, args: Any, kwargs: Any) -> None:
        self._require_nothing_owed("call_async", "call_async")
        if name in _RESERVED:
            raise ValueError(f"Trying to call function `{name}` with `call`, use `{name}` directly instead.")
        payload = (name, args, kwargs)
        _require_picklable(payload, self.num_workers)
        self._driver.ask_call(Op.CALL, lambda worker: payload, "call")

    def _require_nothing_owed(self, method: str, name: str) -> None:
        if (phase := self._driver.phase) is not Phase.DEFAULT:
            advance(phase, method, self, name)
        self._driver.require_no_rows(name)

    @exclusive
    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Fetch the answer to :meth:`call_async`: a tuple of one result an environment.

        The answers to :meth:`exec_func_send`, and to a :meth:`set_attr`, a save or a load that was interrupted, are fetched
        by it, too.

        Raises:
            StepTimeout: Not within ``timeout`` seconds; the answer is still owed, call again.
            Exception: What the call raised in an environment; the environments stay alive.
        """
        return self._call_answer(timeout)  # type: ignore[no-any-return]

    def _call_answer(self, timeout: float | None) -> Any:
        call = self._driver.call
        sequel = None if call is None else call.sequel
        del call  # as in `_finish`
        result = self._finish("call_wait", Phase.WAITING_CALL, timeout)
        return tuple(result.results.get(row) for row in range(self.num_envs)) if sequel is None else sequel(result, timeout)

    @exclusive
    def exec_func(
        self, func: Callable[..., Any], indices: Sequence[int] | int | None = None, *args: Any, **kwargs: Any
    ) -> tuple[Any, ...]:
        """``func(env, *args, **kwargs)`` in the workers, for the environments ``indices`` (``None``: all).

        ``func`` may be a lambda or a closure. Returns a tuple of ``num_envs`` results, ``None`` for the others.
        """
        self._begin_exec(func, indices, args, kwargs)
        return self._call_answer(None)  # type: ignore[no-any-return]

    @exclusive
    def exec_func_send(
        self, func: Callable[..., Any], indices: Sequence[int] | int | None = None, *args: Any, **kwargs: Any
    ) -> None:
        """Begin an :meth:`exec_func`."""
        self._begin_exec(func, indices, args, kwargs)

    def _begin_exec(self, func: Callable[..., Any], indices: Any, args: Any, kwargs: Any) -> None:
        self._require_nothing_owed("call_async", "exec_func")
        if not callable(func):
            raise TypeError(f"exec_func wants a function of an environment, got {func!r}")
        if indices is None:
            chosen = set(range(self.num_envs))
        else:
            named = [indices] if isinstance(indices, (int, np.integer)) else list(indices)
            chosen = set(env_ids_of(named, self.num_envs).tolist())
        _require_picklable((func, args, kwargs), self.num_workers)

        def payload(worker: Worker) -> Any:
            ks = [row - worker.rows[0] for row in worker.rows if row in chosen]
            return (ks, func, args, kwargs) if ks else None

        self._driver.ask_call(Op.EXEC, payload, "exec_func")

    @exclusive
    def exec_func_fetch(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Fetch the answer to :meth:`exec_func_send`."""
        return self._call_answer(timeout)  # type: ignore[no-any-return]

    @exclusive
    def get_attr(self, name: str) -> tuple[Any, ...]:
        """An attribute of every environment (of whichever wrapper has it)."""
        self._begin_call(name, (), {})
        return self._call_answer(None)  # type: ignore[no-any-return]

    @exclusive
    def set_attr(self, name: str, values: list[Any] | tuple[Any, ...] | object) -> None:
        """Set an attribute of every environment; a list or tuple is one value an environment, else all get the same.

        If it is interrupted while the call is pending, :meth:`call_wait` fetches that.
        """
        if not isinstance(values, (list, tuple)):
            values = [values] * self.num_envs
        if len(values) != self.num_envs:
            raise ValueError(
                "Values must be a list or tuple with length equal to the number of environments. "
                f"Got `{len(values)}` values for {self.num_envs} environments."
            )
        self._require_nothing_owed("set_attr", "set_attr")
        each = values
        _require_picklable(each, self.num_workers)
        self._driver.ask_call(Op.SET_ATTR, lambda worker: (name, [each[row] for row in worker.rows]), "set_attr")
        self._finish("call_wait", Phase.WAITING_CALL, None)

    @exclusive
    def set_next_options(
        self, options: ResetOptions = None, *, seed: int | Sequence[int | None] | None = None, env_id: Any = None
    ) -> None:
        """Options, and seeds, of the next episode that autoreset begins in each environment; once.

        They wait there until its episode is over, through resets by name, by a mask or of all environments, which have
        options of their own. Later ones take their place; ``set_next_options()`` takes them away. An environment that
        fails, or whose worker dies, forgets them. If it is interrupted while the call is pending, :meth:`call_wait` fetches
        that.

        Args:
            options: A dict for each of them, of which each gets a copy; or a sequence with a dict or ``None`` for each.
            seed: As of ``reset``: an int gives environment i ``seed + i``; a sequence gives each its own.
            env_id: Only these environments; a sequence of options or seeds is in their order. The others keep what they
                have.

        Raises:
            TypeError, ValueError: Options, seeds or indices of the wrong length, type or range, options that cannot be
                pickled; a ``reset_mask``, which is about a reset of many; an autoreset mode that begins no episodes.
                Nothing was sent.
            AlreadyPendingCallError: Something is in flight.
        """
        rows = rows_of(env_id, self.num_envs)
        if self.autoreset_mode is AutoresetMode.DISABLED:
            raise ValueError("autoreset_mode=DISABLED begins no episodes: give reset() the options, and a reset_mask")
        seeds = seeds_of(seed, self.num_envs, rows)
        mask, options = reset_mask_of(options, self.num_envs, rows)
        if mask is not None:
            raise ValueError("options['reset_mask'] is about a reset of many environments: use env_id instead")
        self._require_nothing_owed("set_next_options", "set_next_options")
        each = options if isinstance(options, list) else [options] * self.num_envs
        chosen = set(rows)
        given = [(own, None if one is None else dict(one)) for own, one in zip(seeds, each, strict=True)]  # kept until then
        _require_picklable(given, self.num_workers)

        def payload(worker: Worker) -> Any:
            own = [given[row] if row in chosen else None for row in worker.rows]
            return own if any(item is not None for item in own) else None

        self._driver.ask_call(Op.SET_NEXT, payload, "set_next_options")
        self._finish("call_wait", Phase.WAITING_CALL, None)

    @exclusive
    def render(self) -> tuple[RenderFrame, ...] | None:
        """One frame (or list of frames) an environment, in a tuple."""
        self._begin_call("render", (), {})
        return self._call_answer(None)  # type: ignore[no-any-return]

    @property
    @exclusive
    def np_random_seed(self) -> tuple[int, ...]:
        """The environments' seeds."""
        self._begin_call("np_random_seed", (), {})
        return self._call_answer(None)  # type: ignore[no-any-return]

    @property
    @exclusive
    def np_random(self) -> tuple[np.random.Generator, ...]:
        """Copies of the environments' generators."""
        self._begin_call("np_random", (), {})
        return self._call_answer(None)  # type: ignore[no-any-return]

    call_send = call_async
    call_fetch = call_wait


def _require_picklable(payload: Any, num_workers: int) -> None:
    """Arguments that cannot travel are the caller's to know, before anything is sent."""
    if num_workers:
        cloudpickle.dumps(payload)

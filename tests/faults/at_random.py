"""A program that interrupts calls with real signals at random moments, and checks the results.

Usage: ``python at_random.py ALARM|SIGINT SETTING TRIALS SEED CALL ...``. The last line of output is JSON: for each call,
the numbers of trials, interrupted trials, wrong results, hangs and tolerated failures, and descriptions of the first
failures.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import queue
import random
import signal
import sys
import threading
import time
import warnings
from types import FrameType
from typing import Any

from interrupted_calls import SETTINGS, ComparedEngine, Outcomes, make_call, median_seconds
from interrupted_close import CLOSE_SETTINGS, check_interrupted_close, warm_up
from interruption import PACKAGE, Stopped
from streams import FIRST_READY, RowStream

HANG_SECONDS = 60.0  # a trial that takes longer did not end when its workers were killed, so the program exits


class SignalInterruption:
    """A context manager like :class:`interruption.Interruption`, for an exception raised by the handler of a real signal.

    Args:
        kind: ``"ALARM"``: a timer raises :class:`Stopped`; ``"SIGINT"``: a thread sends the signal of Ctrl-C.
        delay: Seconds until the signal.
    """

    armed: SignalInterruption | None = None  # the one that raises at the next signal

    def __init__(self, kind: str, delay: float) -> None:
        self.kind, self.delay = kind, delay
        self.note = ""  # the notes of the exception that left the body
        self.fired = self.propagated = self.in_finalizer = False
        self._raised: BaseException | None = None

    def __repr__(self) -> str:
        return f"{self.kind} after {self.delay * 1e6:.0f} us"

    def __enter__(self) -> SignalInterruption:
        SignalInterruption.armed = self
        if self.kind == "ALARM":
            signal.setitimer(signal.ITIMER_REAL, self.delay)
        else:
            DELAYS.put(self.delay)
            SENDER_READY.get()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: Any) -> bool:
        self.note = "\n".join(getattr(error, "__notes__", ()))
        SignalInterruption.armed = None
        signal.setitimer(signal.ITIMER_REAL, 0)
        self.propagated = error is not None and error is self._raised
        self._raised = None
        return self.propagated

    @property
    def name(self) -> str:
        return Stopped.__name__ if self.kind == "ALARM" else KeyboardInterrupt.__name__

    @property
    def swallowed(self) -> bool:
        return self.fired and not self.propagated and not self.in_finalizer

    def raise_in_package(self, frame: FrameType | None) -> None:
        """Raise once, while the package is on the stack: after the call has returned, an exception would lose its result."""
        while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
            frame = frame.f_back
        if frame is not None and not self.fired:
            self.fired = True
            self._raised = Stopped() if self.kind == "ALARM" else KeyboardInterrupt()
            raise self._raised


DELAYS: queue.SimpleQueue[float] = queue.SimpleQueue()
SENDER_READY: queue.SimpleQueue[None] = queue.SimpleQueue()


def handle_signal(number: int, frame: FrameType | None) -> None:
    if SignalInterruption.armed is not None:
        SignalInterruption.armed.raise_in_package(frame)


def handle_unraisable(unraisable: Any) -> None:
    """Record an interruption in a finalizer, from which it cannot propagate; report other errors."""
    armed = SignalInterruption.armed
    if armed is not None and unraisable.exc_value is armed._raised:
        armed.in_finalizer = True
    elif not isinstance(unraisable.exc_value, (Stopped, KeyboardInterrupt)):
        sys.__unraisablehook__(unraisable)


def send_delayed_signals() -> None:
    """Send SIGINT after each delay. Spin instead of sleeping: a call without workers takes less time than a wake-up."""
    while True:
        delay = DELAYS.get()
        SENDER_READY.put(None)
        deadline = time.perf_counter() + delay
        while time.perf_counter() < deadline:
            pass
        os.kill(os.getpid(), signal.SIGINT)


def run_trials(call: str, kind: str, setting: str, trials: int, rng: random.Random) -> Outcomes:
    """Make ``trials`` calls and interrupt each of them, every fourth one twice.

    On a busy machine, many signals arrive after the call. In that case, make up to 20 times as many calls, until a tenth of
    ``trials`` have been interrupted.
    """
    outcomes = Outcomes(max_hung=4, max_wrong=40)
    trial = 0

    def make_interruptions() -> list[SignalInterruption]:
        number = 2 if trial % 4 == 0 else 1
        return [SignalInterruption(kind, 1e-6 + rng.uniform(0, 1.3 * seconds)) for _ in range(number)]

    if call == "close":
        close_setting = CLOSE_SETTINGS.get(setting) or SETTINGS[setting]
        warm_up(close_setting)
        opened = [close_setting.open() for _ in range(3)]
        seconds = median_seconds(lambda: opened.pop().close(), 3)
        subject: Any = None
    elif call in ("send", "recv", "reset_async"):
        subject = RowStream(FIRST_READY.get(setting) or FIRST_READY["two of four"])
        seconds = 300e-6
    else:
        subject = ComparedEngine(SETTINGS[setting]).__enter__()
        seconds = median_seconds(lambda: make_call(call, SETTINGS[setting], 1).whole(subject.envs))
        subject.reset_both()
    while (trial < trials or (outcomes.fired < trials / 10 and trial < 20 * trials)) and not outcomes.should_stop:
        trial += 1
        outcomes.attempts += 1
        faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
        interruptions = make_interruptions()
        try:
            if call == "close":
                check_interrupted_close(close_setting, rng.choice(["idle", "a step pending"]), interruptions)
            elif isinstance(subject, RowStream):
                subject.cycle(call, interruptions, trial)
            else:
                subject.attempt(call, "whole", interruptions)
        except (Exception, KeyboardInterrupt) as error:
            outcomes.add(error, f"{call}, {setting}, {interruptions[0]}")
            del error
            if subject is not None:
                subject.renew()
        outcomes.fired += any(interruption.fired for interruption in interruptions)
    if subject is not None:
        outcomes.tolerated = subject.tolerated
        subject.end()
    faulthandler.cancel_dump_traceback_later()
    gc.collect()
    return outcomes


def main(kind: str, setting: str, trials: str, seed: str, *calls: str) -> None:
    warnings.simplefilter("ignore")
    sys.unraisablehook = handle_unraisable
    signal.signal(signal.SIGALRM, handle_signal)
    signal.signal(signal.SIGINT, handle_signal)
    sys.setswitchinterval(1e-6)  # with the default, 5 ms, a call without workers would return before the thread runs
    threading.Thread(target=send_delayed_signals, daemon=True).start()
    rng = random.Random(seed)
    results = {}
    for call in calls:
        outcomes = run_trials(call, kind, setting, int(trials), rng)
        results[call] = {
            "trials": outcomes.attempts, "raised": outcomes.fired, "wrong": outcomes.wrong, "hung": outcomes.hung,
            "tolerated": outcomes.tolerated, "texts": outcomes.texts[:5],
        }  # fmt: skip
    print(json.dumps(results), flush=True)
    os._exit(0)  # do not wait for the thread, which may still send a signal


if __name__ == "__main__":
    main(*sys.argv[1:])

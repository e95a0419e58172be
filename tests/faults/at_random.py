"""A program that interrupts calls by real signals at random moments, and checks the results.

``python at_random.py ALARM|SIGINT SETTING TRIALS SEED CALL ...``; its last line of output is JSON: numbers of trials, of
signals
that raised, of wrong and of hung trials, and descriptions of the first few failures.
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

from endings import ENDS, interrupted_close, warm_up
from interrupted_calls import SETTINGS, Subject, Verdicts, make_call, seconds
from interruption import PACKAGE, Stopped
from streams import FIRST_READY, Stream

STUCK = 60.0  # seconds; by then even killing the workers did not help, and the program ends


class AtRandom:
    """A context manager like :class:`interruption.Interruption` that raises in its body when a real signal arrives.

    Args:
        kind: ``"ALARM"``: by a timer, with an exception of its own; ``"SIGINT"``: from another thread, as Ctrl-C.
        delay: Seconds until then.
    """

    armed: AtRandom | None = None

    def __init__(self, kind: str, delay: float) -> None:
        self.kind, self.delay = kind, delay
        self.moment = 1
        self.fired = self.came_out = self.in_a_finalizer = False
        self._raised: BaseException | None = None

    note = ""  # notes of the exception when it left the body

    def __repr__(self) -> str:
        return f"{self.kind} after {self.delay * 1e6:.0f} us"

    def __enter__(self) -> AtRandom:
        AtRandom.armed = self
        if self.kind == "ALARM":
            signal.setitimer(signal.ITIMER_REAL, self.delay)
        else:
            DELAYS.put(self.delay)
            AWAKE.get()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: Any) -> bool:
        self.note = "\n".join(getattr(error, "__notes__", ()))
        AtRandom.armed = None
        signal.setitimer(signal.ITIMER_REAL, 0)
        self.came_out = error is not None and error is self._raised
        self._raised = None
        return self.came_out

    @property
    def name(self) -> str:
        return Stopped.__name__ if self.kind == "ALARM" else KeyboardInterrupt.__name__

    @property
    def swallowed(self) -> bool:
        return self.fired and not self.came_out and not self.in_a_finalizer

    def arrive(self, frame: FrameType | None) -> None:
        """Raise if a call is still under way: a returned result belongs to the caller."""
        while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
            frame = frame.f_back
        if frame is not None and not self.fired:
            self.fired = True
            self._raised = Stopped() if self.kind == "ALARM" else KeyboardInterrupt()
            raise self._raised


DELAYS: queue.SimpleQueue[float] = queue.SimpleQueue()
AWAKE: queue.SimpleQueue[None] = queue.SimpleQueue()


def handler(number: int, frame: FrameType | None) -> None:
    if AtRandom.armed is not None:
        AtRandom.armed.arrive(frame)


def ignored(unraisable: Any) -> None:
    armed = AtRandom.armed
    if armed is not None and unraisable.exc_value is armed._raised:
        armed.in_a_finalizer = True
    elif not isinstance(unraisable.exc_value, (Stopped, KeyboardInterrupt)):
        sys.__unraisablehook__(unraisable)


def send_ctrl_c() -> None:
    """Wait without sleeping: a call in this process takes less time than a thread needs to wake up."""
    while True:
        delay = DELAYS.get()
        AWAKE.put(None)
        until = time.perf_counter() + delay
        while time.perf_counter() < until:
            pass
        os.kill(os.getpid(), signal.SIGINT)


def trials_of(call: str, kind: str, setting: str, trials: int, rng: random.Random) -> Verdicts:
    """Make this many calls, each interrupted, and sometimes interrupted again.

    On a busy machine many signals arrive after the call: then more calls are made, until a tenth of them was interrupted.
    """
    verdicts = Verdicts(most_hung=4, most_wrong=40)
    count = 0

    def interruptions(duration: float) -> list[AtRandom]:
        return [AtRandom(kind, 1e-6 + rng.uniform(0, 1.3 * duration)) for _ in range(1 + (count % 4 == 0))]

    if call == "close":
        chosen = ENDS.get(setting) or SETTINGS[setting]
        warm_up(chosen)
        opened = [chosen.open() for _ in range(3)]
        took = seconds(lambda: opened.pop().close(), 3)
        subject: Any = None
    elif call in ("send", "recv", "reset_async"):
        subject = Stream(FIRST_READY.get(setting) or FIRST_READY["two of four"])
        took = 300e-6
    else:
        subject = Subject(SETTINGS[setting]).__enter__()
        took = seconds(lambda: make_call(call, SETTINGS[setting], 1).whole(subject.envs))
        subject.in_step()
    while (count < trials or (verdicts.fired < trials / 10 and count < 20 * trials)) and not verdicts.enough:
        count += 1
        verdicts.attempts += 1
        faulthandler.dump_traceback_later(STUCK, exit=True)
        chosen_ones = interruptions(took)
        try:
            if call == "close":
                interrupted_close(chosen, rng.choice(["idle", "a step pending"]), chosen_ones)
            elif isinstance(subject, Stream):
                subject.cycle(call, chosen_ones[0], count)
            else:
                subject.attempt(call, "whole", chosen_ones)
        except (Exception, KeyboardInterrupt) as error:
            verdicts.add(error, f"{call}, {setting}, {chosen_ones[0]}")
            del error
            if subject is not None:
                subject.renew()
        verdicts.fired += any(one.fired for one in chosen_ones)
    if subject is not None:
        verdicts.excused = subject.excused
        subject.end()
    faulthandler.cancel_dump_traceback_later()
    gc.collect()
    return verdicts


def main(kind: str, setting: str, trials: str, seed: str, *calls: str) -> None:
    warnings.simplefilter("ignore")
    sys.unraisablehook = ignored
    signal.signal(signal.SIGALRM, handler)
    signal.signal(signal.SIGINT, handler)
    sys.setswitchinterval(1e-6)  # otherwise the other thread runs only when a call in this process is over
    threading.Thread(target=send_ctrl_c, daemon=True).start()
    rng = random.Random(seed)
    found = {}
    for call in calls:
        verdicts = trials_of(call, kind, setting, int(trials), rng)
        found[call] = {
            "trials": verdicts.attempts, "raised": verdicts.fired, "wrong": verdicts.wrong, "hung": verdicts.hung,
            "excused": verdicts.excused, "texts": verdicts.texts[:5],
        }  # fmt: skip
    print(json.dumps(found), flush=True)
    os._exit(0)  # the thread may be asleep, and its signal must not be raised any more


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Helpers of the tests of interruptions: settings, calls, and the check of an attempt.

The values of an environment (``counting.py``) follow from the seed of its last seeded reset and from all calls
since, and every result is unique. So an old, repeated or torn result, or that of another row, differs from the result of a
second,
undisturbed ``SyncVectorEnv``; and after a seeded reset both are equal again, whatever happened before.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from counting import RAISE, Counting, Texts, Words, echo
from gymnasium.error import ResetNeeded
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from interruption import PACKAGE, Interruption

import vecenv
from vecenv.state.capture import capture_state, prepare_restore
from vecenv.state.snapshots import FORMAT, Snapshot, describe_kind
from vecenv.testing import assert_identical

HERE = str(Path(__file__).parent)
UNDISTURBED = contextlib.nullcontext()
PATIENCE = 20.0  # seconds until an attempt counts as hanging; one takes milliseconds

# --- configurations -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """A way to run environments.

    Attributes:
        options: Arguments of the engine.
        count: The number of environments.
        kind: Their class.
        length: Steps of an episode; 0: no end.
        listed: Actions are passed as a list.
        local: Environments that live in the calling process.
        at_once: The most rows of a worker in one message of ``send``, as ``batch_size="auto"`` may choose; 0: all.
    """

    options: dict[str, Any]
    count: int = 4
    kind: type[Counting] = Counting
    length: int = 0
    listed: bool = False
    local: tuple[int, ...] = ()
    at_once: int = 0

    def env_fns(self) -> list[Callable[[], Any]]:
        return [functools.partial(self.kind, index, self.length) for index in range(self.count)]

    def open(self) -> vecenv.AsyncVectorEnv:
        envs = vecenv.AsyncVectorEnv(self.env_fns(), **{"context": "fork", **self.options})
        driver = envs._driver
        getattr(driver, "exchange", driver).rows_at_once = self.at_once or None
        return envs

    def reference(self) -> SyncVectorEnv:
        mode = self.options.get("autoreset_mode", "NextStep")
        return SyncVectorEnv(self.env_fns(), autoreset_mode=mode)

    def actions(self, numbers: Sequence[int]) -> Any:
        if self.kind is Words:
            return tuple("abcdefgh"[number] * (1 + number % 3) for number in numbers)
        return list(map(int, numbers)) if self.listed else np.array(numbers, np.int64)


RESTART = {"on_failure": vecenv.Restart(10**6, 1e6)}
SETTINGS = {
    "in process": Setting({"num_workers": 0}, length=5, local=(0, 1, 2, 3)),
    "caller's share": Setting({"num_workers": 1, "use_caller": True}, local=(0, 1, 2, 3)),
    "one worker": Setting({"num_workers": 1}, length=5),
    "four workers": Setting({"num_workers": 4}, count=8),
    "same step": Setting({"num_workers": 2, "autoreset_mode": "SameStep"}, length=3),
    "max_concurrency": Setting({"num_workers": 4, "max_concurrency": 2}),
    "restart": Setting({"num_workers": 2, **RESTART}, length=5),
    "list actions": Setting({"num_workers": 2}, listed=True),
    "Text actions": Setting({"num_workers": 2}, kind=Words),
    "Text observations": Setting({"num_workers": 2}, kind=Texts, length=5),
    "no shared memory": Setting({"num_workers": 2, "shared_memory": False}),
    "batch_size": Setting({"num_workers": 2, "batch_size": 2}),
}

# --- calls --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """A call with its arguments.

    Attributes:
        state: ``_state`` while its result is pending.
        whole: Makes it and returns the result.
        begin: Only submits it; ``None`` where there is no such method.
        wait: Returns the pending result.
        reference: The same with a ``SyncVectorEnv``.
        read: Converts a result to the form of the reference's.
    """

    name: str
    state: str
    whole: Callable[[Any], Any]
    begin: Callable[[Any], Any] | None
    wait: Callable[[Any], Any]
    reference: Callable[[SyncVectorEnv], Any]
    read: Callable[[Any], Any] = lambda found: found


CALLS = (
    "step", "reset", "reset_some", "call", "get_attr", "set_attr", "set_next_options", "exec_func", "save", "load",
    "state_dict", "load_state_dict", "abandon",
)  # fmt: skip


def make_call(name: str, setting: Setting, tick: int) -> Call:
    """Return the ``tick``-th call; its arguments never repeat."""
    word = f"word {tick}"
    if name == "step":
        actions = setting.actions([(tick * 3 + row * 5) % RAISE for row in range(setting.count)])
        return Call(
            name, "step", lambda e: e.step(actions), lambda e: e.step_async(actions), lambda e: e.step_wait(),
            lambda s: s.step(actions),
        )  # fmt: skip
    if name in ("reset", "reset_some"):
        some: dict[str, Any] = {"seed": 1000 * tick} if tick % 3 else {}
        if name == "reset_some":
            mask = (np.arange(setting.count) + tick) % 2 == 0
            some["options"] = {"reset_mask": mask}
        return Call(
            name, "reset", lambda e: e.reset(**some), lambda e: e.reset_async(**some), lambda e: e.reset_wait(),
            lambda s: s.reset(**{key: dict(value) if key == "options" else value for key, value in some.items()}),
        )  # fmt: skip
    if name == "call":
        return Call(
            name, "call", lambda e: e.call("echo", word), lambda e: e.call_async("echo", word), lambda e: e.call_wait(),
            lambda s: s.call("echo", word),
        )  # fmt: skip
    if name == "get_attr":
        return Call(
            name, "call", lambda e: e.get_attr("total"), None, lambda e: e.call_wait(), lambda s: s.get_attr("total")
        )
    if name == "exec_func":
        chosen = None if tick % 2 else [0, setting.count - 1]

        def some_of_them(same: SyncVectorEnv) -> Any:
            ids = range(setting.count) if chosen is None else chosen
            return tuple(echo(env, word) if row in ids else None for row, env in enumerate(same.envs))

        return Call(
            name, "call", lambda e: e.exec_func(echo, chosen, word), lambda e: e.exec_func_send(echo, chosen, word),
            lambda e: e.exec_func_fetch(), some_of_them,
        )  # fmt: skip
    if name in ("save", "state_dict"):
        whole = name == "state_dict"
        return Call(
            name, "call", lambda e: e.state_dict() if whole else e.save(), None, lambda e: e.call_wait(),
            lambda s: [(*counts_of(env.unwrapped), as_list(env.unwrapped.observe())) for env in s.envs],
            lambda found: snapshot_contents(setting, snapshots_in(found) if whole else found),
        )  # fmt: skip
    if name in ("load", "load_state_dict"):
        ends = setting.options.get("autoreset_mode") != "SameStep"  # where the next step begins an episode, it may be due
        kept = [
            snapshot_of(env_fn(), 1000 * tick + row, tick % 4, ends)
            for row, env_fn in enumerate(setting.env_fns())
        ]

        def filled(same: SyncVectorEnv) -> Any:
            for row, snapshot in enumerate(kept):
                prepare_restore(same.envs[row].unwrapped, snapshot.body)()
                same._autoreset_envs[row] = snapshot.row.pending
                same._env_obs[row] = snapshot.observation
            return [as_list(snapshot.observation) for snapshot in kept]

        state = state_of(setting, kept, tick)
        return Call(
            name, "call", lambda e: e.load(kept) if name == "load" else e.load_state_dict(state), None,
            lambda e: e.call_wait(), filled, lambda seen: list(map(as_list, seen)),
        )  # fmt: skip

    def nothing(answer: Any) -> None:
        assert answer is None or answer == (None,) * setting.count, answer

    if name == "abandon":  # no worker has a pending request, so none is ended
        return Call(name, "default", lambda e: nothing(e.abandon([0])), None, lambda e: None, lambda s: None)
    if name == "set_next_options":
        options = [{"tick": tick, "row": row} for row in range(setting.count)]
        return Call(
            name, "call", lambda e: nothing(e.set_next_options(options)), None, lambda e: nothing(e.call_wait()),
            lambda s: None,
        )  # fmt: skip
    assert name == "set_attr"
    marks: Any = [f"mark {tick} of {row}" for row in range(setting.count)]
    return Call(
        name, "call", lambda e: nothing(e.set_attr("mark", marks)), None, lambda e: nothing(e.call_wait()),
        lambda s: s.set_attr("mark", marks),
    )  # fmt: skip


def counts_of(env: Any) -> tuple[Any, ...]:
    """Return all counts of an environment."""
    return (*env.counts(), env.calls, env.marks, env.mark)


def as_list(observation: Any) -> Any:
    """Return an observation in a form that can be compared with any other."""
    return observation.tolist() if isinstance(observation, np.ndarray) else observation


def snapshot_contents(setting: Setting, snapshots: Sequence[Snapshot]) -> list[Any]:
    """Return the contents of snapshots, by loading them into separate environments."""
    seen = []
    for env_fn, snapshot in zip(setting.env_fns(), snapshots, strict=True):
        env = env_fn()
        prepare_restore(env, snapshot.body)()
        seen.append((*counts_of(env), as_list(snapshot.observation)))
    return seen


STATE = ("format", "num_envs", "autoreset_mode", "snapshots", "counters", "seeds", "spaces")


def snapshots_in(state: dict[str, Any]) -> Sequence[Snapshot]:
    """Return the snapshots of a ``state_dict()``, which has to be complete."""
    assert tuple(state) == STATE, list(state)
    assert len(state["counters"]) == 3
    assert len(state["spaces"]) == 4
    return state["snapshots"]  # type: ignore[no-any-return]


def state_of(setting: Setting, snapshots: Sequence[Snapshot], tick: int) -> dict[str, Any]:
    """Return a ``state_dict()`` with these snapshots, of a vector environment that no test has."""
    mode = AutoresetMode(setting.options.get("autoreset_mode", "NextStep")).name
    values = FORMAT, setting.count, mode, tuple(snapshots), (tick, tick, 0), np.random.SeedSequence(tick).state, [None] * 4
    return dict(zip(STATE, values, strict=True))


def snapshot_of(env: Any, seed: int, steps: int, ends: bool) -> Snapshot:
    """Return a state that none of the rows was ever in."""
    env.reset(seed=seed)
    env.steps = steps
    pending, observation = ends and steps == 3, env.observe()
    return Snapshot.of(describe_kind(env), capture_state(env), pending=pending, observation=observation)


# --- resources ----------------------------------------------------------------------------------


def children() -> set[int]:
    """Return processes that this one started and did not reap."""
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            found |= {int(pid) for pid in (task / "children").read_text().split()}
    return found


def kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def list_resources() -> dict[str, list[str]]:
    """Return processes, descriptors with their targets, this package's entries of /dev/shm, and mappings of shared memory.
    """
    descriptors = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if not re.fullmatch(r"/proc/\d+/fd", target):  # the descriptor that reads this list
                descriptors.append(f"{name} -> {target}")
    mappings = Path("/proc/self/maps").read_text().splitlines()
    shared = [line for line in mappings if re.search(r"memfd:|/dev/shm/|/vecenv-[^/]*$", line)]
    return {
        "processes": sorted(map(str, children())),
        "descriptors": sorted(descriptors),
        "/dev/shm": sorted(name for name in os.listdir("/dev/shm") if re.match("vecenv-(?!test)", name)),
        "mappings": sorted(line.split(maxsplit=5)[0] + " " + line.split(maxsplit=5)[-1] for line in shared),
    }


def new_resources(before: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return resources that did not exist before."""
    now = list_resources()
    return {kind: new for kind in now if (new := sorted(set(now[kind]) - set(before[kind])))}


def needs_reset(envs: Any) -> bool:
    """True if an interruption hit the engine while it changed its state: then only a reset of all environments is left."""
    return "phase=RESET_NEEDED" in repr(envs)


def drops_calls(envs: Any) -> bool:
    """True for the engine that drops a call which was interrupted while it waited; it may have been executed."""
    return hasattr(envs._driver, "exchange")


def in_flight(envs: Any) -> int:
    """Return the rows that were sent, or reset by ``reset_async``, and not received yet."""
    stats = envs.stats()
    if "in_flight" in stats:
        return int(stats["in_flight"])
    flow = envs._driver
    return flow.underway + len(flow.ready) + (envs.num_envs if envs._state.value == "reset" else 0)


class Hung(AssertionError):
    """Raised if an attempt did not end until it was killed."""


class Watchdog:
    """A thread that kills processes started since then, when the body of its ``with`` takes too long.

    If that does not help, for instance because they are started again and again, it raises :class:`Hung` in the main
    thread, by a signal, repeatedly, until the exception leaves the body.
    """

    _active: list[Watchdog] = []  # noqa: RUF012

    def __init__(self, known: set[int], patience: float = PATIENCE) -> None:
        self._known, self._patience = known, patience
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog")
        self.bit = self._raising = False

    def __enter__(self) -> Watchdog:
        signal.signal(signal.SIGURG, Watchdog._raise)
        Watchdog._active.append(self)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        Watchdog._active.remove(self)
        self._over.set()
        self._thread.join()

    @staticmethod
    def _raise(number: int, frame: object) -> None:
        if any(one._raising for one in Watchdog._active):
            raise Hung("it did not end when its workers were killed")

    def _watch(self) -> None:
        wait = self._patience
        for bites in itertools.count():
            if self._over.wait(wait):
                break
            self.bit = True
            kill(children() - self._known)
            wait = 0.5
            if bites > 6:
                self._raising = True
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGURG)


# --- checks of an attempt -----------------------------------------------------------------------


@dataclass
class Subject:
    """An engine and an undisturbed reference. A wrong result spoils it: :meth:`renew` builds another.

    Attributes:
        tick: Calls so far.
        excused: How often an environment in the calling process failed, as it may.
        resets: How often a reset was needed.
    """

    setting: Setting
    tick: int = 0
    excused: int = 0
    resets: int = 0
    envs: Any = None
    same: Any = None
    known: set[int] = field(default_factory=set)

    def __enter__(self) -> Subject:
        self.known = children()
        self._open()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        self._end(terminate=False)

    def _open(self) -> None:
        self.envs, self.same = self.setting.open(), self.setting.reference()
        self.in_step()

    def _end(self, terminate: bool) -> None:
        envs, self.envs, self.same = self.envs, None, None
        if envs is not None:
            ignored = BaseException if terminate else ()
            with Watchdog(self.known, 1.0 if terminate else 10.0), contextlib.suppress(ignored):
                envs.close(terminate=terminate)
        del envs
        self.reap()

    def reap(self) -> None:
        """Kill and reap the processes that were started here and still exist."""
        left = children() - self.known
        kill(left)
        for pid in left:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)

    def renew(self) -> None:
        self._end(terminate=True)
        self._open()

    def in_step(self) -> None:
        """Reset with a seed, after which both are equal."""
        self.tick += 1
        assert_identical(self.envs.reset(seed=7 * self.tick), self.same.reset(seed=7 * self.tick), "seeded reset")

    def attempt(self, name: str, part: str, interruptions: Sequence[Interruption]) -> None:
        """Make a call, interrupt it, and require the right result.

        Args:
            name: A call of :data:`CALLS`.
            part: ``"whole"``, or the half in which it is interrupted: ``"begin"`` or ``"wait"``.
            interruptions: The first falls into the call, the others into the calls that get the result.

        Raises:
            Hung: It had to be ended by force.
            AssertionError: The result is wrong, or ``_state`` does not name the pending call.
            BaseException: It failed.
        """
        self.tick += 1
        self._excused_texts = ""
        call = make_call(name, self.setting, self.tick)
        with Watchdog(self.known) as watchdog:
            try:
                self._attempt(call, part, list(interruptions))
                self._checked()
            except BaseException as error:
                if watchdog.bit:
                    raise Hung(f"it hung; after its workers were killed: {brief(error)}") from None
                raise
        if watchdog.bit:
            raise Hung("it went on only when its workers were killed")
        for interruption in interruptions:
            assert not interruption.swallowed or interruption.name in self._excused_texts, f"{interruption} was swallowed"

    def _attempt(self, call: Call, part: str, interruptions: list[Interruption]) -> None:
        envs = self.envs
        wanted = call.reference(self.same)
        begun = part == "wait"
        try:
            if begun:
                call.begin(envs)  # type: ignore[misc]
            todo = {"whole": call.whole, "begin": call.begin, "wait": call.wait}[part]
            while True:
                returned = False
                interruption: Any = interruptions.pop(0) if interruptions else UNDISTURBED
                with interruption:
                    found = todo(envs)  # type: ignore[misc]
                    returned = True
                if not returned and (needs_reset(envs) or (call.state == "call" and drops_calls(envs))):
                    self._reset_after(call)
                    return
                state = envs._state.value
                if state == "default" and self._names_a_local(getattr(interruption, "note", "")):
                    self._excuse(interruption.note)
                    return
                if returned and todo is not call.begin:
                    break
                assert state in ("default", call.state), f"after an interrupted {call.name} the state is {state!r}"
                assert state == call.state or not (begun or returned), f"{call.name} was begun, and the state is {state!r}"
                begun = begun or state == call.state
                todo = call.wait if begun else call.whole
        except Exception as error:
            if isinstance(error, AssertionError) or not self._names_a_local(text := brief(error, whole=True)):
                raise
            self._excuse(text)
            return
        assert_identical(call.read(found), wanted, call.name)
        assert state == "default", f"after {call.name} the state is {state!r}"

    def _reset_after(self, call: Call) -> None:
        """Handle the third verdict: a reset makes both equal again. A call that was dropped may have been executed."""
        self.resets += 1
        if needs_reset(self.envs):
            with pytest.raises(ResetNeeded, match="reset"):
                self.envs.get_attr("mark")
        else:
            call.whole(self.envs)
        self.in_step()
        if call.state == "call":
            self.renew()

    def _checked(self) -> None:
        """Check that a step and a call afterwards are right: nothing was executed twice, and no result is one call late."""
        self.tick += 1
        envs, same = self.envs, self.same
        for name in ("step", "call"):
            call = make_call(name, self.setting, self.tick)
            assert_identical(call.read(call.whole(envs)), call.reference(same), f"{name} afterwards")
        for name in ("mark", "marks"):
            assert_identical(envs.get_attr(name), same.get_attr(name), f"{name} afterwards")

    def _excuse(self, text: str) -> None:
        """Accept that an environment in the calling process was hit itself, if it is named."""
        self._excused_texts += text
        self.excused += 1
        self.in_step()

    def _names_a_local(self, text: str) -> bool:
        named = re.search(r"\benvs?\b \[?(\d+)", text)
        return bool(self.setting.local) and named is not None and int(named[1]) in self.setting.local


def brief(error: BaseException, whole: bool = False) -> str:
    """Return an exception with its notes on one line; without ``whole`` the beginning of it."""
    text = " | ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
    return text if whole else " ".join(text.split())[:300]


@dataclass
class Verdicts:
    """Counts of the outcomes of many attempts; ``enough`` is true when to stop."""

    attempts: int = 0
    fired: int = 0
    hung: int = 0
    wrong: int = 0
    excused: int = 0
    texts: list[str] = field(default_factory=list)
    most_hung: int = 2
    most_wrong: int = 8

    @property
    def enough(self) -> bool:
        return self.hung >= self.most_hung or self.hung + self.wrong >= self.most_wrong

    def add(self, error: BaseException, what: str) -> None:
        if isinstance(error, Hung):
            self.hung += 1
        else:
            self.wrong += 1
        place = traceback.extract_tb(error.__traceback__)[-1]
        self.texts.append(f"{what}: {brief(error)} [{Path(place.filename).name}:{place.lineno}]")

    def __str__(self) -> str:
        stopped = " (stopped here)" if self.enough else ""
        return (
            f"{self.attempts} attempts, {self.fired} interrupted, {self.wrong} wrong, {self.hung} hung{stopped}, "
            f"{self.excused} failed as they may\n  " + "\n  ".join(self.texts)
        )

    def check(self) -> None:
        assert self.wrong + self.hung == 0, str(self)


def within(setting: Setting) -> tuple[str, ...]:
    """Return the files to interrupt: the package's, and those of environments in this process."""
    return (PACKAGE, HERE + os.sep + "counting.py") if setting.local else (PACKAGE,)


def seconds(call: Callable[[], Any], times: int = 5) -> float:
    """Return the median duration of some calls."""
    found = []
    for _ in range(times):
        before = time.perf_counter()
        call()
        found.append(time.perf_counter() - before)
    return sorted(found)[times // 2]


if sys.platform != "linux":  # everything here looks at /proc
    raise ImportError("for Linux only")

"""What the tests of interruptions share: how environments are run, the calls, and how an attempt is judged.

Whatever an environment (``counting.py``) says follows from the seed of its last seeded reset and from what it was asked
since, and every answer is unique. So an answer that is old, repeated, torn or somebody else's is not the one that a second,
undisturbed ``SyncVectorEnv`` gives; and after a seeded reset both are equal again, whatever was before.
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from counting import RAISE, Counting, Texts, Words, tell
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from interruption import PACKAGE, Interruption
from spare_twins import Seeded, twin

import vecenv
from vecenv.state.capture import capture_state, prepare_restore
from vecenv.state.snapshots import FORMAT, Snapshot, kind_of
from vecenv.testing import assert_identical

HERE = str(Path(__file__).parent)
UNDISTURBED = contextlib.nullcontext()
PATIENCE = 20.0  # seconds until an attempt is taken to hang; one takes milliseconds

# --- configurations -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """How environments are run.

    Attributes:
        options: Arguments of the engine.
        count: How many environments.
        kind: Their class.
        length: Steps of an episode; 0: no end.
        listed: Actions are given as a list.
        local: Environments that live in the calling process.
        at_once: Rows of a worker in one message of ``send`` at most, as ``batch_size="auto"`` may choose; 0: all.
    """

    options: dict[str, Any]
    count: int = 4
    kind: type[Counting] = Counting
    length: int = 0
    listed: bool = False
    local: tuple[int, ...] = ()
    at_once: int = 0

    @property
    def spares(self) -> bool:
        """Any environment may have any row, and another after each episode."""
        return "spare_workers" in self.options

    @property
    def calls(self) -> tuple[str, ...]:
        """Those of :data:`CALLS` that are not refused."""
        return tuple(name for name in CALLS if name != "set_next_options" or not self.spares)

    def env_fns(self) -> list[Callable[[], Any]]:
        return [functools.partial(self.kind, 0 if self.spares else index, self.length) for index in range(self.count)]

    def open(self) -> vecenv.AsyncVectorEnv:
        envs = vecenv.AsyncVectorEnv(self.env_fns(), **{"context": "fork", **self.options})
        envs._driver.rows_at_once = self.at_once or None
        return envs

    def reference(self) -> SyncVectorEnv:
        mode = self.options.get("autoreset_mode", "NextStep")
        if self.spares:
            return twin(self.env_fns(), autoreset_mode=mode)
        return SyncVectorEnv(self.env_fns(), autoreset_mode=mode)

    def actions(self, numbers: Sequence[int]) -> Any:
        if self.kind is Words:
            return tuple("abcdefgh"[number] * (1 + number % 3) for number in numbers)
        return list(map(int, numbers)) if self.listed else np.array(numbers, np.int64)


RESTART = {"on_failure": "restart", "restart_limit": 10**6, "restart_period": 1e6}
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
    "spare workers": Setting({"spare_workers": 2}, count=3, length=3),
    "spare workers, same step": Setting({"spare_workers": 2, "autoreset_mode": "SameStep"}, count=3, length=2),
    "spare workers, restart": Setting({"spare_workers": 1, **RESTART}, count=2, length=2),
}

# --- calls --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """A call with its arguments.

    Attributes:
        state: What ``_state`` says while its answer is pending.
        whole: Makes it and gives the answer.
        begin: Only makes it; ``None`` where there is no such method.
        wait: Gives the answer that is pending.
        reference: The same with a ``SyncVectorEnv``.
        read: Answer -> what is like the reference's.
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
    """The ``tick``-th call: its arguments are like no other's."""
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
            name, "call", lambda e: e.call("tell", word), lambda e: e.call_async("tell", word), lambda e: e.call_wait(),
            lambda s: s.call("tell", word),
        )  # fmt: skip
    if name == "get_attr":
        return Call(
            name, "call", lambda e: e.get_attr("total"), None, lambda e: e.call_wait(), lambda s: s.get_attr("total")
        )
    if name == "exec_func":
        chosen = None if tick % 2 else [0, setting.count - 1]

        def some_of_them(same: SyncVectorEnv) -> Any:
            ids = range(setting.count) if chosen is None else chosen
            return tuple(tell(env, word) if row in ids else None for row, env in enumerate(same.envs))

        return Call(
            name, "call", lambda e: e.exec_func(tell, chosen, word), lambda e: e.exec_func_send(tell, chosen, word),
            lambda e: e.exec_func_fetch(), some_of_them,
        )  # fmt: skip
    if name in ("save", "state_dict"):
        whole = name == "state_dict"
        return Call(
            name, "call", lambda e: e.state_dict() if whole else e.save(), None, lambda e: e.call_wait(),
            lambda s: [(*known(env.unwrapped), as_list(env.unwrapped.observe())) for env in s.envs],
            lambda found: shown(setting, snapshots_in(found) if whole else found),
        )  # fmt: skip
    if name in ("load", "load_state_dict"):
        ends = setting.options.get("autoreset_mode") != "SameStep"  # where the next step begins an episode, it may be due
        kept = [
            snapshot_of(env_fn(), 1000 * tick + row, tick % 4, ends, (1000 * tick, row, 0) if setting.spares else None)
            for row, env_fn in enumerate(setting.env_fns())
        ]

        def filled(same: SyncVectorEnv) -> Any:
            for row, snapshot in enumerate(kept):
                prepare_restore(same.envs[row].unwrapped, snapshot.body)()
                if isinstance(same.envs[row], Seeded):
                    same.envs[row].goes_on_from(1000 * tick)
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

    if name == "abandon":  # nobody owes anything, and so nobody is ended
        return Call(name, "default", lambda e: nothing(e.abandon([0])), None, lambda e: None, lambda s: None)
    if name == "set_next_options":
        options = [{"tick": tick, "row": row} for row in range(setting.count)]
        return Call(
            name, "call", lambda e: nothing(e.set_next_options(options)), None, lambda e: nothing(e.call_wait()),
            lambda s: None,
        )  # fmt: skip
    assert name == "set_attr"
    marks: Any = [f"mark {tick} of {row}" for row in range(setting.count)]
    if setting.spares:
        marks = f"mark {tick} of all"
    return Call(
        name, "call", lambda e: nothing(e.set_attr("mark", marks)), None, lambda e: nothing(e.call_wait()),
        lambda s: s.set_attr("mark", marks),
    )  # fmt: skip


def known(env: Any) -> tuple[Any, ...]:
    """All that an environment counts."""
    return (*env.numbers(), env.calls, env.marks, env.mark)


def as_list(observation: Any) -> Any:
    """An observation that can be compared with any other."""
    return observation.tolist() if isinstance(observation, np.ndarray) else observation


def shown(setting: Setting, snapshots: Sequence[Snapshot]) -> list[Any]:
    """What is in snapshots, seen by loading them into environments of nobody's."""
    seen = []
    for env_fn, snapshot in zip(setting.env_fns(), snapshots, strict=True):
        env = env_fn()
        prepare_restore(env, snapshot.body)()
        seen.append((*known(env), as_list(snapshot.observation)))
    return seen


STATE = ("format", "num_envs", "autoreset_mode", "snapshots", "counters", "seeds", "spaces")


def snapshots_in(state: dict[str, Any]) -> Sequence[Snapshot]:
    """Those of a ``state_dict()``, which is whole."""
    assert tuple(state) == STATE, list(state)
    assert len(state["counters"]) == 3
    assert len(state["spaces"]) == 4
    return state["snapshots"]  # type: ignore[no-any-return]


def state_of(setting: Setting, snapshots: Sequence[Snapshot], tick: int) -> dict[str, Any]:
    """A ``state_dict()`` with these, of a vector environment that none of these tests has."""
    mode = AutoresetMode(setting.options.get("autoreset_mode", "NextStep")).name
    values = FORMAT, setting.count, mode, tuple(snapshots), (tick, tick, 0), np.random.SeedSequence(tick).state, [None] * 4
    return dict(zip(STATE, values, strict=True))


def snapshot_of(env: Any, seed: int, steps: int, ends: bool, episodes: Any) -> Snapshot:
    """A state that none of the rows was ever in."""
    env.reset(seed=seed)
    env.steps = steps
    pending, observation = ends and steps == 3, env.observe()
    return Snapshot.of(kind_of(env), capture_state(env), pending=pending, observation=observation, episodes=episodes)


# --- what is there ------------------------------------------------------------------------------


def children() -> set[int]:
    """Processes that this one started and did not reap."""
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            found |= {int(pid) for pid in (task / "children").read_text().split()}
    return found


def kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def belongings() -> dict[str, list[str]]:
    """Processes, descriptors with what they lead to, this package's entries of /dev/shm, and mappings of shared memory."""
    descriptors = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if not re.fullmatch(r"/proc/\d+/fd", target):  # the one that reads this list
                descriptors.append(f"{name} -> {target}")
    mappings = Path("/proc/self/maps").read_text().splitlines()
    shared = [line for line in mappings if re.search(r"memfd:|/dev/shm/|/vecenv-[^/]*$", line)]
    return {
        "processes": sorted(map(str, children())),
        "descriptors": sorted(descriptors),
        "/dev/shm": sorted(name for name in os.listdir("/dev/shm") if re.match("vecenv-(?!test)", name)),
        "mappings": sorted(line.split(maxsplit=5)[0] + " " + line.split(maxsplit=5)[-1] for line in shared),
    }


def new_since(before: dict[str, list[str]]) -> dict[str, list[str]]:
    """What is here now and was not before."""
    now = belongings()
    return {kind: new for kind in now if (new := sorted(set(now[kind]) - set(before[kind])))}


def in_flight(envs: Any) -> int:
    """Rows that were sent, or asked to reset by ``reset_async``, and not received yet."""
    stats = envs.stats()
    if "in_flight" in stats:
        return int(stats["in_flight"])
    flow = envs._driver
    return flow.underway + len(flow.ready) + (envs.num_envs if envs._state.value == "reset" else 0)


class Hung(AssertionError):
    """It did not end until it was ended by force."""


class Watchdog:
    """A thread that kills the processes which were started since, when the body of its ``with`` takes too long.

    Where that does not help either, for instance where they are started again and again, it raises :class:`Hung` in the main
    thread, by a signal: again and again, until it comes out.
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


# --- how it is judged ---------------------------------------------------------------------------


@dataclass
class Subject:
    """An engine and an undisturbed twin. A wrong answer spoils it: :meth:`renew` builds another.

    Attributes:
        tick: Calls so far.
        excused: How often an environment in the calling process failed, as it may.
    """

    setting: Setting
    tick: int = 0
    excused: int = 0
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
        """Kill and reap what was started here and is still there."""
        left = children() - self.known
        kill(left)
        for pid in left:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)

    def renew(self) -> None:
        self._end(terminate=True)
        self._open()

    def in_step(self) -> None:
        """After a reset with a seed both are the same."""
        self.tick += 1
        assert_identical(self.envs.reset(seed=7 * self.tick), self.same.reset(seed=7 * self.tick), "seeded reset")

    def attempt(self, name: str, part: str, interruptions: Sequence[Interruption]) -> None:
        """Make a call, interrupt it, and demand the answer.

        Args:
            name: Which call, of :data:`CALLS`.
            part: ``"whole"``, or the half in which it is interrupted: ``"begin"`` or ``"wait"``.
            interruptions: The first falls into the call, the others into what is called to get the answer.

        Raises:
            Hung: It had to be ended by force.
            AssertionError: The answer is wrong, or ``_state`` does not say what is pending.
            BaseException: It failed.
        """
        self.tick += 1
        self._told = ""
        call = make_call(name, self.setting, self.tick)
        with Watchdog(self.known) as watchdog:
            try:
                self._attempt(call, part, list(interruptions))
                self._checked()
            except BaseException as error:
                if watchdog.bit:
                    raise Hung(f"it hung; ended by force it said: {brief(error)}") from None
                raise
        if watchdog.bit:
            raise Hung("it went on only when its workers were killed")
        for interruption in interruptions:
            assert not interruption.swallowed or interruption.name in self._told, f"{interruption} was swallowed"

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
                state = envs._state.value
                if state == "default" and self._names_a_local(getattr(interruption, "said", "")):
                    self._excuse(interruption.said)
                    return
                if returned and todo is not call.begin:
                    break
                assert state in ("default", call.state), f"after an interrupted {call.name} the state is {state!r}"
                assert state == call.state or not (begun or returned), f"{call.name} was begun, and the state is {state!r}"
                begun = begun or state == call.state
                todo = call.wait if begun else call.whole
        except Exception as error:
            if isinstance(error, AssertionError) or not self._names_a_local(said := brief(error, whole=True)):
                raise
            self._excuse(said)
            return
        assert_identical(call.read(found), wanted, call.name)
        assert state == "default", f"after {call.name} the state is {state!r}"

    def _checked(self) -> None:
        """A step and a call afterwards are right: nothing was executed twice, and nothing is a question behind."""
        self.tick += 1
        envs, same = self.envs, self.same
        for name in ("step", "call"):
            call = make_call(name, self.setting, self.tick)
            assert_identical(call.read(call.whole(envs)), call.reference(same), f"{name} afterwards")
        for name in ("mark", "marks"):
            assert_identical(envs.get_attr(name), same.get_attr(name), f"{name} afterwards")

    def _excuse(self, said: str) -> None:
        """An environment in the calling process may have been hit itself, and then it is named."""
        self._told += said
        self.excused += 1
        self.in_step()

    def _names_a_local(self, text: str) -> bool:
        named = re.search(r"\benvs?\b \[?(\d+)", text)
        return bool(self.setting.local) and named is not None and int(named[1]) in self.setting.local


def brief(error: BaseException, whole: bool = False) -> str:
    """An exception with its notes, on one line; without ``whole`` the beginning of it."""
    text = " | ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
    return text if whole else " ".join(text.split())[:300]


@dataclass
class Verdicts:
    """What became of many attempts; ``enough`` says when to stop."""

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


@contextlib.contextmanager
def pythons_own_ctrl_c() -> Iterator[None]:
    """Python's own handler, also where this was started in the background and SIGINT is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def within(setting: Setting) -> tuple[str, ...]:
    """Whose code is interrupted: the package's, and the environments' own where they live in this process."""
    return (PACKAGE, HERE + os.sep + "counting.py") if setting.local else (PACKAGE,)


def seconds(call: Callable[[], Any], times: int = 5) -> float:
    """How long a call takes, the median of some."""
    found = []
    for _ in range(times):
        before = time.perf_counter()
        call()
        found.append(time.perf_counter() - before)
    return sorted(found)[times // 2]


if sys.platform != "linux":  # everything here looks at /proc
    raise ImportError("for Linux only")

"""Helpers for tests that interrupt calls: settings, calls, and the check of an interrupted call.

The values of an environment (``counting.py``) depend on the seed of its last seeded reset and on all calls since, and
every result is unique. So an old, repeated or torn result, or the result of another row, differs from that of the
reference, an uninterrupted ``SyncVectorEnv``. After a reset with a seed, both are equal again.
"""

from __future__ import annotations

import contextlib
import copy
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
from counting import RAISE, CountingEnv, LargeObservationEnv, TextActionEnv, TextObservationEnv, echo
from gymnasium.error import ResetNeeded
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from interruption import PACKAGE, Interruption, Stopped

import vecenv
from vecenv.state.capture import capture_state, prepare_restore
from vecenv.state.snapshots import FORMAT, Snapshot, describe_kind
from vecenv.testing import assert_identical

HERE = str(Path(__file__).parent)
UNINTERRUPTED = contextlib.nullcontext()
HANG_SECONDS = 20.0  # an attempt takes milliseconds, and counts as a hang after this time

# --- configurations -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """A way to run environments.

    Attributes:
        options: Arguments of the engine.
        count: The number of environments.
        env_class: The class of the environments.
        length: Steps per episode; 0: the episode never ends.
        list_actions: True if actions are passed as a list.
        local_envs: The environments that may be in the calling process.
        rows_per_message: The maximum for one message of ``send``, which ``batch_size="auto"`` may set; 0: no maximum.
    """

    options: dict[str, Any]
    count: int = 4
    env_class: type[CountingEnv] = CountingEnv
    length: int = 0
    list_actions: bool = False
    local_envs: tuple[int, ...] = ()
    rows_per_message: int = 0

    def env_fns(self) -> list[Callable[[], Any]]:
        return [functools.partial(self.env_class, index, self.length) for index in range(self.count)]

    def open(self) -> vecenv.AsyncVectorEnv:
        envs = vecenv.AsyncVectorEnv(self.env_fns(), **{"context": "fork", **self.options})
        if hasattr(envs._driver, "exchange"):  # an engine without workers sends no messages
            envs._driver.exchange.rows_at_once = self.rows_per_message or None
        return envs

    def make_reference(self) -> SyncVectorEnv:
        mode = self.options.get("autoreset_mode", "NextStep")
        return SyncVectorEnv(self.env_fns(), autoreset_mode=mode)

    def make_actions(self, numbers: Sequence[int]) -> Any:
        """Convert numbers to a batch of actions of the environments' action space."""
        if self.env_class is TextActionEnv:
            return tuple("abcdefgh"[number] * (1 + number % 3) for number in numbers)
        return list(map(int, numbers)) if self.list_actions else np.array(numbers, np.int64)

    def names_local_env(self, text: str) -> bool:
        """True if a text names one of :attr:`local_envs`."""
        match = re.search(r"\benvs? \[?(\d+)", text)
        return match is not None and int(match[1]) in self.local_envs


RESTART = {"on_failure": vecenv.Restart(10**6, 1e6)}
SETTINGS = {
    "in process": Setting({"num_workers": 0}, length=5, local_envs=(0, 1, 2, 3)),
    "caller's share": Setting({"num_workers": 1, "use_caller": True}, local_envs=(0, 1, 2, 3)),
    "one worker": Setting({"num_workers": 1}, length=5),
    "four workers": Setting({"num_workers": 4}, count=8),
    "same step": Setting({"num_workers": 2, "autoreset_mode": "SameStep"}, length=3),
    "max_concurrency": Setting({"num_workers": 4, "max_concurrency": 2}),
    "restart": Setting({"num_workers": 2, **RESTART}, length=5),
    "list actions": Setting({"num_workers": 2}, list_actions=True),
    "Text actions": Setting({"num_workers": 2}, env_class=TextActionEnv),
    "Text observations": Setting({"num_workers": 2}, env_class=TextObservationEnv, length=5),
    "no shared memory": Setting({"num_workers": 2, "shared_memory": False}),
    "batch_size": Setting({"num_workers": 2, "batch_size": 2}),
    "lent observations": Setting({"num_workers": 2}, env_class=LargeObservationEnv, length=5),
}

# --- calls --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """A call with its arguments, as a whole and in two parts.

    Attributes:
        state: ``_state`` while its result is pending.
        whole: Makes the call and returns its result.
        begin: Submits the call; ``None`` if there is no such method.
        wait: Returns the pending result.
        reference: Makes the same call with a ``SyncVectorEnv``.
        convert: Converts a result to the form of the reference's result.
    """

    name: str
    state: str
    whole: Callable[[Any], Any]
    begin: Callable[[Any], Any] | None
    wait: Callable[[Any], Any]
    reference: Callable[[SyncVectorEnv], Any]
    convert: Callable[[Any], Any] = lambda result: result


CALLS = (
    "step", "reset", "reset_some", "call", "get_attr", "set_attr", "set_next_options", "exec_func", "save", "load",
    "state_dict", "load_state_dict", "abandon",
)  # fmt: skip


def make_call(name: str, setting: Setting, tick: int) -> Call:
    """Return a call. Its arguments depend on ``tick``, so that the result of an earlier call differs."""
    text = f"text {tick}"
    if name == "step":
        actions = setting.make_actions([(tick * 3 + row * 5) % RAISE for row in range(setting.count)])
        return Call(
            name, "step", lambda envs: envs.step(actions), lambda envs: envs.step_async(actions),
            lambda envs: envs.step_wait(), lambda sync: sync.step(actions),
        )  # fmt: skip
    if name in ("reset", "reset_some"):
        arguments: dict[str, Any] = {"seed": 1000 * tick} if tick % 3 else {}
        if name == "reset_some":
            mask = (np.arange(setting.count) + tick) % 2 == 0
            arguments["options"] = {"reset_mask": mask}  # SyncVectorEnv removes the mask, so it gets a copy
        return Call(
            name, "reset", lambda envs: envs.reset(**arguments), lambda envs: envs.reset_async(**arguments),
            lambda envs: envs.reset_wait(), lambda sync: sync.reset(**copy.deepcopy(arguments)),
        )  # fmt: skip
    if name == "call":
        return Call(
            name, "call", lambda envs: envs.call("echo", text), lambda envs: envs.call_async("echo", text),
            lambda envs: envs.call_wait(), lambda sync: sync.call("echo", text),
        )  # fmt: skip
    if name == "get_attr":
        return Call(
            name, "call", lambda envs: envs.get_attr("total"), None, lambda envs: envs.call_wait(),
            lambda sync: sync.get_attr("total"),
        )  # fmt: skip
    if name == "exec_func":
        chosen = None if tick % 2 else [0, setting.count - 1]

        def call_reference(reference: SyncVectorEnv) -> Any:
            ids = range(setting.count) if chosen is None else chosen
            return tuple(echo(env, text) if row in ids else None for row, env in enumerate(reference.envs))

        return Call(
            name, "call", lambda envs: envs.exec_func(echo, chosen, text),
            lambda envs: envs.exec_func_send(echo, chosen, text), lambda envs: envs.exec_func_fetch(), call_reference,
        )  # fmt: skip
    if name in ("save", "state_dict"):
        is_dict = name == "state_dict"
        return Call(
            name, "call", lambda envs: envs.state_dict() if is_dict else envs.save(), None, lambda envs: envs.call_wait(),
            lambda sync: [(*all_counts(env.unwrapped), to_comparable(env.unwrapped.observe())) for env in sync.envs],
            lambda saved: read_snapshots(setting, extract_snapshots(saved) if is_dict else saved),
        )  # fmt: skip
    if name in ("load", "load_state_dict"):
        has_pending_autoresets = setting.options.get("autoreset_mode") != "SameStep"  # in snapshots between two steps
        snapshots = [
            make_snapshot(env_fn(), 1000 * tick + row, tick % 4, has_pending_autoresets)
            for row, env_fn in enumerate(setting.env_fns())
        ]

        def load_reference(reference: SyncVectorEnv) -> Any:
            for row, snapshot in enumerate(snapshots):
                prepare_restore(reference.envs[row].unwrapped, snapshot.body)()
                reference._autoreset_envs[row] = snapshot.row.pending
                reference._env_obs[row] = snapshot.observation
            return [to_comparable(snapshot.observation) for snapshot in snapshots]

        state = make_state_dict(setting, snapshots, tick)
        return Call(
            name, "call", lambda envs: envs.load(snapshots) if name == "load" else envs.load_state_dict(state), None,
            lambda envs: envs.call_wait(), load_reference, lambda observations: list(map(to_comparable, observations)),
        )  # fmt: skip

    def require_no_result(result: Any) -> None:
        assert result is None or result == (None,) * setting.count, result

    if name == "abandon":  # no worker is ended, because no request is pending
        return Call(
            name, "default", lambda envs: require_no_result(envs.abandon([0])), None, lambda envs: None, lambda sync: None
        )
    if name == "set_next_options":
        options = [{"tick": tick, "row": row} for row in range(setting.count)]
        return Call(
            name, "call", lambda envs: require_no_result(envs.set_next_options(options)), None,
            lambda envs: require_no_result(envs.call_wait()), lambda sync: None,
        )  # fmt: skip
    assert name == "set_attr"
    marks: Any = [f"mark {tick} of {row}" for row in range(setting.count)]
    return Call(
        name, "call", lambda envs: require_no_result(envs.set_attr("mark", marks)), None,
        lambda envs: require_no_result(envs.call_wait()), lambda sync: sync.set_attr("mark", marks),
    )  # fmt: skip


def all_counts(env: Any) -> tuple[Any, ...]:
    """Return the counts of an environment, including those of calls and marks, which its observations lack."""
    return (*env.counts(), env.calls, env.marks, env.mark)


def to_comparable(observation: Any) -> Any:
    """Convert an array to a list, so that ``==`` returns one bool; return other observations unchanged."""
    return observation.tolist() if isinstance(observation, np.ndarray) else observation


def read_snapshots(setting: Setting, snapshots: Sequence[Snapshot]) -> list[Any]:
    """Load snapshots into new environments and return the counts and observations."""
    contents = []
    for env_fn, snapshot in zip(setting.env_fns(), snapshots, strict=True):
        env = env_fn()
        prepare_restore(env, snapshot.body)()
        contents.append((*all_counts(env), to_comparable(snapshot.observation)))
    return contents


STATE_KEYS = ("format", "num_envs", "autoreset_mode", "snapshots", "counters", "seeds", "spaces")


def extract_snapshots(state: dict[str, Any]) -> Sequence[Snapshot]:
    """Check that a ``state_dict()`` is complete, and return its snapshots."""
    assert tuple(state) == STATE_KEYS, list(state)
    assert len(state["counters"]) == 3
    assert len(state["spaces"]) == 4
    return state["snapshots"]  # type: ignore[no-any-return]


def make_state_dict(setting: Setting, snapshots: Sequence[Snapshot], tick: int) -> dict[str, Any]:
    """Return a ``state_dict()`` with these snapshots, and with counters that no engine of the tests has."""
    mode = AutoresetMode(setting.options.get("autoreset_mode", "NextStep")).name
    values = FORMAT, setting.count, mode, tuple(snapshots), (tick, tick, 0), np.random.SeedSequence(tick).state, [None] * 4
    return dict(zip(STATE_KEYS, values, strict=True))


def make_snapshot(env: Any, seed: int, steps: int, has_pending_autoresets: bool) -> Snapshot:
    """Return a snapshot of a state that no row has had."""
    env.reset(seed=seed)
    env.steps = steps
    pending = has_pending_autoresets and steps == 3
    return Snapshot.of(describe_kind(env), capture_state(env), pending=pending, observation=env.observe())


# --- resources ----------------------------------------------------------------------------------


def child_pids() -> set[int]:
    """Return the pids of the children of this process, zombies included."""
    pids: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            pids |= {int(pid) for pid in (task / "children").read_text().split()}
    return pids


def kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def kill_children(known: set[int]) -> set[int]:
    """Kill and reap all children but the known ones; return their pids."""
    pids = child_pids() - known
    kill(pids)
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
    return pids


def list_resources() -> dict[str, list[str]]:
    """Return processes, descriptors with targets, this package's entries of /dev/shm, and mappings of shared memory."""
    descriptors = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if not re.fullmatch(r"/proc/\d+/fd", target):  # the descriptor that this loop reads
                descriptors.append(f"{name} -> {target}")
    mappings = Path("/proc/self/maps").read_text().splitlines()
    shared = [line for line in mappings if re.search(r"memfd:|/dev/shm/|/vecenv-[^/]*$", line)]
    return {
        "processes": sorted(map(str, child_pids())),
        "descriptors": sorted(descriptors),
        "/dev/shm": sorted(name for name in os.listdir("/dev/shm") if re.match("vecenv-(?!test)", name)),
        "mappings": sorted(line.split(maxsplit=5)[0] + " " + line.split(maxsplit=5)[-1] for line in shared),
    }


def new_resources(before: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return the resources that are not in ``before``."""
    new = {kind: sorted(set(names) - set(before[kind])) for kind, names in list_resources().items()}
    return {kind: names for kind, names in new.items() if names}


def needs_reset(envs: Any) -> bool:
    """True if only a reset of all environments is allowed: the engine was interrupted while it changed its state."""
    return "phase=RESET_NEEDED" in repr(envs)


def drops_calls(envs: Any) -> bool:
    """True for an engine with workers: it drops interrupted calls, which may have been executed."""
    return hasattr(envs._driver, "exchange")


def in_flight(envs: Any) -> int:
    """Return the number of rows that were sent, or reset by ``reset_async``, and not received yet."""
    stats = envs.stats()
    if "in_flight" in stats:
        return int(stats["in_flight"])
    driver = envs._driver
    return driver.underway + len(driver.ready) + (envs.num_envs if envs._state.value == "reset" else 0)


class HangError(AssertionError):
    """The error of an attempt that did not end until its workers were killed."""


class Watchdog:
    """A context manager that kills all children except ``known`` if its body takes longer than ``seconds``.

    If the body still does not end, for example because it restarts the children, a signal raises :class:`HangError` in the
    main thread, repeatedly, until the exception leaves the body.

    Attributes:
        fired: True if the body took too long.
    """

    _active: list[Watchdog] = []  # noqa: RUF012

    def __init__(self, known: set[int], seconds: float = HANG_SECONDS) -> None:
        self._known, self._seconds = known, seconds
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog")
        self.fired = self._raising = False

    def __enter__(self) -> Watchdog:
        signal.signal(signal.SIGURG, Watchdog._handle_signal)
        Watchdog._active.append(self)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        Watchdog._active.remove(self)
        self._done.set()
        self._thread.join()

    @staticmethod
    def _handle_signal(number: int, frame: object) -> None:
        if any(watchdog._raising for watchdog in Watchdog._active):
            raise HangError("the attempt did not end when its workers were killed")

    def _watch(self) -> None:
        seconds = self._seconds
        for kills in itertools.count():
            if self._done.wait(seconds):
                break
            self.fired = True
            kill(child_pids() - self._known)
            seconds = 0.5
            if kills > 6:  # killing the children does not help
                self._raising = True
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGURG)


# --- checks of an attempt -----------------------------------------------------------------------


@dataclass
class ComparedEngine:
    """An engine and an uninterrupted reference. After a wrong result, :meth:`renew` builds both again.

    Attributes:
        tick: The number of calls so far.
        tolerated: The number of tolerated failures: environments in the calling process may be interrupted themselves.
        resets: The number of interruptions after which a reset was needed, or that dropped a call.
        known: The children of this process that are not workers of the engine.
    """

    setting: Setting
    tick: int = 0
    tolerated: int = 0
    resets: int = 0
    envs: Any = None
    reference: Any = None
    known: set[int] = field(default_factory=set)

    def __enter__(self) -> ComparedEngine:
        self.known = child_pids()
        self._open()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        self._end(terminate=False)

    def _open(self) -> None:
        self.envs, self.reference = self.setting.open(), self.setting.make_reference()
        self.reset_both()

    def _end(self, terminate: bool) -> None:
        envs, self.envs, self.reference = self.envs, None, None
        if envs is not None:
            ignored = BaseException if terminate else ()
            with Watchdog(self.known, 1.0 if terminate else 10.0), contextlib.suppress(ignored):
                envs.close(terminate=terminate)
        del envs
        kill_children(self.known)

    def renew(self) -> None:
        self._end(terminate=True)
        self._open()

    def reset_both(self) -> None:
        """Reset the engine and the reference with a seed, after which they are equal."""
        self.tick += 1
        assert_identical(self.envs.reset(seed=7 * self.tick), self.reference.reset(seed=7 * self.tick), "seeded reset")

    def attempt(self, name: str, part: str, interruptions: Sequence[Interruption]) -> None:
        """Make a call, interrupt it, and check the result and the next calls.

        Args:
            name: A call of :data:`CALLS`.
            part: ``"whole"``, or the half that is interrupted: ``"begin"`` or ``"wait"``.
            interruptions: The first one interrupts the call, the others the calls that return its result.

        Raises:
            HangError: The call did not return until its workers were killed.
            AssertionError: The result is wrong, or ``_state`` does not name the pending call.
            BaseException: The call failed.
        """
        self.tick += 1
        self._tolerated_texts = ""
        call = make_call(name, self.setting, self.tick)
        with Watchdog(self.known) as watchdog:
            try:
                self.interrupt_call(call, part, list(interruptions))
                self._check_next_calls()
            except BaseException as error:
                if watchdog.fired:
                    raise HangError(f"the call hung; after its workers were killed: {describe_error(error)}") from None
                raise
        if watchdog.fired:
            raise HangError("the call returned only when its workers were killed")
        for interruption in interruptions:
            may_swallow = interruption.name in self._tolerated_texts or _is_in_trial_step(interruption)
            assert not interruption.swallowed or may_swallow, f"{interruption} was swallowed"

    def interrupt_call(self, call: Call, part: str, interruptions: list[Interruption]) -> None:
        """Make a call and compare its result. After an interruption, wait if the call is pending; otherwise repeat it."""
        envs = self.envs
        expected = call.reference(self.reference)
        submitted = part == "wait"
        try:
            if submitted:
                call.begin(envs)  # type: ignore[misc]
            next_call = {"whole": call.whole, "begin": call.begin, "wait": call.wait}[part]
            while True:
                returned = False
                interruption: Any = interruptions.pop(0) if interruptions else UNINTERRUPTED
                with interruption:
                    result = next_call(envs)  # type: ignore[misc]
                    returned = True
                state = envs._state.value
                call_dropped = call.state == "call" and state == "default" and drops_calls(envs)
                if not returned and (needs_reset(envs) or call_dropped):
                    self._recover(call)
                    return
                if state == "default" and self.setting.names_local_env(getattr(interruption, "note", "")):
                    self._tolerate(interruption.note)
                    return
                if returned and next_call is not call.begin:
                    break
                assert state in ("default", call.state), f"after an interrupted {call.name} the state is {state!r}"
                is_pending = submitted or returned
                assert state == call.state or not is_pending, f"{call.name} is pending, but the state is {state!r}"
                submitted = submitted or state == call.state
                next_call = call.wait if submitted else call.whole
        except Exception as error:
            text = describe_error(error, whole=True)
            if isinstance(error, AssertionError) or not self.setting.names_local_env(text):
                raise
            self._tolerate(text)
            return
        assert_identical(call.convert(result), expected, call.name)
        assert state == "default", f"after {call.name} the state is {state!r}"

    def _recover(self, call: Call) -> None:
        """Reset both after an interruption that requires it, or that dropped a call, which may have been executed."""
        self.resets += 1
        if needs_reset(self.envs):
            with pytest.raises(ResetNeeded, match="reset"):
                self.envs.get_attr("mark")
        else:
            call.whole(self.envs)
        self.reset_both()
        if call.state == "call":
            self.renew()

    def _check_next_calls(self) -> None:
        """Check that the interrupted call was not executed twice, and that later calls do not return its result."""
        self.tick += 1
        envs, reference = self.envs, self.reference
        for name in ("step", "call"):
            call = make_call(name, self.setting, self.tick)
            assert_identical(call.convert(call.whole(envs)), call.reference(reference), f"{name} afterwards")
        for name in ("mark", "marks"):
            assert_identical(envs.get_attr(name), reference.get_attr(name), f"{name} afterwards")

    def _tolerate(self, text: str) -> None:
        """Accept a failure of an environment in the calling process, which was interrupted itself; ``text`` names it."""
        self._tolerated_texts += text
        self.tolerated += 1
        self.reset_both()


def _is_in_trial_step(interruption: Any) -> bool:
    """True if the exception was raised in a step that ``save`` tries.

    There it counts as an exception of the environment, because no signal handler raised it.
    """
    is_injected = isinstance(interruption, Interruption) and interruption.error is Stopped
    return is_injected and re.search(r"\bcounting\.py|\bstep_env\b", interruption.where) is not None


def describe_error(error: BaseException, whole: bool = False) -> str:
    """Return the text of an exception with its notes: the first 300 characters on one line or, with ``whole``, all."""
    text = " | ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
    return text if whole else " ".join(text.split())[:300]


@dataclass
class Outcomes:
    """Counts of the outcomes of many attempts."""

    attempts: int = 0
    fired: int = 0
    hung: int = 0
    wrong: int = 0
    tolerated: int = 0
    texts: list[str] = field(default_factory=list)
    max_hung: int = 2
    max_wrong: int = 8

    @property
    def should_stop(self) -> bool:
        """True if the failures have reached a maximum, after which other attempts are skipped."""
        return self.hung >= self.max_hung or self.hung + self.wrong >= self.max_wrong

    def add(self, error: BaseException, attempt: str) -> None:
        if isinstance(error, HangError):
            self.hung += 1
        else:
            self.wrong += 1
        place = traceback.extract_tb(error.__traceback__)[-1]
        self.texts.append(f"{attempt}: {describe_error(error)} [{Path(place.filename).name}:{place.lineno}]")

    def __str__(self) -> str:
        stopped = " (stopped here)" if self.should_stop else ""
        return (
            f"{self.attempts} attempts, {self.fired} interrupted, {self.wrong} wrong, {self.hung} hung{stopped}, "
            f"{self.tolerated} tolerated failures\n  " + "\n  ".join(self.texts)
        )

    def check(self) -> None:
        assert self.wrong + self.hung == 0, str(self)


def interruptible_files(setting: Setting) -> tuple[str, ...]:
    """Return the files to interrupt: the package, and ``counting.py`` if environments live in this process."""
    return (PACKAGE, HERE + os.sep + "counting.py") if setting.local_envs else (PACKAGE,)


def median_seconds(call: Callable[[], Any], times: int = 5) -> float:
    """Return the median duration of ``times`` calls."""
    durations = []
    for _ in range(times):
        started_at = time.perf_counter()
        call()
        durations.append(time.perf_counter() - started_at)
    return sorted(durations)[times // 2]


if sys.platform != "linux":
    raise ImportError("this module reads /proc, which only Linux has")

"""Everything at once: resets, steps, calls, timeouts, kills and restarts, in any order.

Every environment is a witness whose rows say which environment, life, episode and step they belong to; a
ledger knows what each must say next. So every row that an engine returns here is checked against what that
environment really did: a row that is shifted, repeated, torn or somebody else's cannot pass.

The same actor (:class:`Chaos`) is driven by hypothesis, which looks for a short sequence that breaks
something, and by a seeded random generator, which goes on for long (``pytest -m slow``).
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError
from gymnasium.vector import AutoresetMode
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from observe import PATIENCE, remaining
from vandals import Ledger, Obedient

import vecenv
from vecenv.errors import EnvError, EnvFailed, StepTimeout, WorkerDied
from vecenv.testing.faulty import FaultyEnv, WitnessEnv

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*Received the following error"),
    pytest.mark.filterwarnings(r"ignore:[\s\S]*Traceback"),
    pytest.mark.filterwarnings("ignore:.*Raising the last exception"),
    pytest.mark.filterwarnings("ignore:.*while waiting for a pending call"),
]

MODES = list(AutoresetMode)
COUNT, LENGTH = 4, 5
# what an action does; everything below is an ordinary step
RAISE, EXIT, DIE, CRASH, DAWDLE = 11, 12, 13, 14, 15
HARMLESS = 10
DAWDLING = 0.06


class Pause:
    def __call__(self, result: Any) -> Any:
        time.sleep(DAWDLING)
        return result


def make(index: int) -> Any:
    """A witness that obeys: certain actions are faults."""
    env: Any = Obedient(index, length=LENGTH)
    for action, fault in ((RAISE, "raises"), (EXIT, "sys_exit"), (DIE, "kill"), (CRASH, "segfault"), (DAWDLE, Pause())):
        env = FaultyEnv(env, fault, action=action)
    return env


class Make:
    def __init__(self, index: int) -> None:
        self.index = index

    def __call__(self) -> Any:
        return make(self.index)


class Chaos:
    """One engine, and everything that can be done to it. Each method is a move; :meth:`moves` are those allowed now."""

    def __init__(self, *, workers: int | None, mode: AutoresetMode, restart: bool, context: str) -> None:
        self.restart = restart
        self.mode = mode
        self.envs = vecenv.AsyncVectorEnv(
            [Make(index) for index in range(COUNT)],
            num_workers=workers,
            autoreset_mode=mode,
            context=context,
            on_failure="restart" if restart else "raise",
            restart_limit=10**6,
            restart_period=1.0,
        )
        self.per_worker = COUNT // (workers or COUNT)
        self.ledger = Ledger(COUNT, length=LENGTH, mode=mode)
        self.ledger.reset(self.envs.reset(seed=1), seeds=[1, 2, 3, 4])
        self.pending: Any = None  # actions of the step, or the name of the other call, whose answer is owed
        self.killed = False  # a worker was killed and no answer has told of it yet
        self.failed: set[int] = set()
        self.rows = 0
        self.log: list[str] = []

    def close(self) -> None:
        self.envs.close(timeout=2)

    # moves

    def step(self, actions: list[int]) -> None:
        self.step_async(actions)
        self.wait(None)

    def step_async(self, actions: list[int]) -> None:
        self.log.append(f"step_async({actions})")
        try:
            self.envs.step_async(actions)
        except WorkerDied:
            self._lost()
        except EnvFailed:
            assert self.failed
            self._recover()
        else:
            self.pending = actions

    def wait(self, timeout: float | None) -> None:
        """Fetch what is owed, or find out that it is not there yet."""
        self.log.append(f"wait({timeout})")
        pending = self.pending
        try:
            if pending == "reset":
                self.ledger.reset(self.envs.reset_wait(timeout=timeout))
            elif pending == "call":
                assert self.envs.call_wait(timeout=timeout) == (17,) * COUNT
            else:
                answer = self.envs.step_wait(timeout=timeout)
                self._check(pending, answer)
        except StepTimeout:
            assert timeout is not None
            return
        except (ValueError, EnvError) as error:
            assert not self.restart or pending == "call"
            assert pending != "call"
            self.pending = None
            self._failed(pending, error)
            return
        except WorkerDied:
            assert not self.restart or pending == "call"
            self.pending = None
            self._lost()
            return
        except EnvFailed:
            # a call that meets a worker which was killed, and nothing has been said about it yet
            assert self.killed or self.failed
            self.pending = None
            self._recover()
            return
        self.pending = None

    def _check(self, actions: list[int], answer: tuple[Any, ...]) -> None:
        infos = answer[-1]
        restarted = infos.get("_restarted", np.zeros(COUNT, dtype=bool))
        culprits = {env for env in range(COUNT) if actions[env] in (RAISE, EXIT, DIE, CRASH)}
        assert self.restart or not restarted.any()
        if not self.killed:
            skipped = self.mode is AutoresetMode.NEXT_STEP  # an action during an automatic reset is not carried out
            expected = {env for env in culprits if not (skipped and self.ledger.done[env])}
            neighbours = {
                other
                for env in expected
                if actions[env] in (DIE, CRASH)
                for other in range(COUNT)
                if other // self.per_worker == env // self.per_worker
            }
            assert set(np.flatnonzero(restarted)) == expected | neighbours, (actions, restarted)
        if restarted.any():
            self.killed = False
        self.ledger.step(actions, answer)
        self.rows += COUNT

    def _failed(self, actions: list[int], error: Exception) -> None:
        """Some environment raised: it says which, and only those that were told to."""
        assert any(action in (RAISE, EXIT, DIE, CRASH) for action in actions), error
        assert "env" in " ".join(error.__notes__)
        self._recover()

    def _lost(self) -> None:
        self.killed = False
        self._recover()

    def _recover(self) -> None:
        """Reset everything: lives that go on go on, others are new, and all rows are beginnings."""
        self.log.append("recover")
        while True:
            try:
                observations, infos = self.envs.reset()
                break
            except WorkerDied:
                continue  # another one, killed meanwhile
        self.killed = self.killed and self.restart
        self.failed.clear()
        for env in range(COUNT):
            row, last = WitnessEnv.read(observations[env]), self.ledger.rows[env]
            assert (row["witness_id"], row["tick"]) == (env, 0)
            if last is not None and row["life"] == last["life"]:
                assert row["episode"] > last["episode"]
                assert row["steps"] - last["steps"] in (0, 1)
            else:
                assert row["life"] not in self.ledger.lives
                assert (row["episode"], row["steps"]) == (1, 0)
                self.ledger.lives.add(row["life"])
            assert infos["tick"][env] == 0
            self.ledger.rows[env] = row
            self.ledger.done[env] = self.ledger.reborn[env] = False

    def reset(self, seed: int | None) -> None:
        self.log.append(f"reset({seed})")
        seeds = None if seed is None else [seed, seed + 1, seed + 2, seed + 3]
        try:
            answer = self.envs.reset(seed=seed)
        except WorkerDied:
            self._lost()
            return
        rebuilt = set(range(COUNT)) if self.killed else set()
        self._forgive_rebuilt(answer, rebuilt)
        self.ledger.reset(answer, seeds=seeds)
        self.killed = False

    def _forgive_rebuilt(self, answer: tuple[Any, Any], rebuilt: set[int]) -> None:
        """A reset may find a worker dead and replace it at once: those rows have new lives."""
        for env in rebuilt:
            last = self.ledger.rows[env]
            if last is not None and WitnessEnv.read(answer[0][env])["life"] != last["life"]:
                self.ledger.rows[env] = None

    def reset_some(self, mask: list[bool]) -> None:
        self.log.append(f"reset_some({mask})")
        if self.killed:
            return self.reset(None)  # what of an unmasked row of a dead worker can be said is another test's matter
        chosen = np.array(mask)
        answer = self.envs.reset(options={"reset_mask": chosen})
        self.ledger.reset(answer, mask=chosen)
        return None

    def reset_async(self) -> None:
        self.log.append("reset_async()")
        if self.killed:
            return self.reset(None)
        self.envs.reset_async()
        self.pending = "reset"
        return None

    def call_async(self) -> None:
        self.log.append("call_async()")
        if self.killed:
            return self.reset(None)
        self.envs.call_async("echo", 17)
        self.pending = "call"
        return None

    def call(self, good: bool) -> None:
        self.log.append(f"call({good})")
        if self.killed:
            return self.reset(None)
        if good:
            ledger = self.ledger  # of an environment that a restart has just built, it still holds the old one's row
            steps = [0 if new else row["steps"] for new, row in zip(ledger.reborn, ledger.rows, strict=True)]
            assert self.envs.get_attr("steps") == tuple(steps)
        else:
            with pytest.raises((AttributeError, ValueError)):
                self.envs.call("do", "raises") if len(self.log) % 2 else self.envs.call("nosuch")
        return None

    def wrong_call(self) -> None:
        self.log.append("wrong_call()")
        if self.pending is None:
            for call in (self.envs.step_wait, self.envs.reset_wait, self.envs.call_wait):
                with pytest.raises(NoAsyncCallError):
                    call()
            with pytest.raises(ValueError, match=r"(?i)action"):
                self.envs.step([1] * (COUNT - 1))
        else:
            for call in (lambda: self.envs.step_async([1] * COUNT), lambda: self.envs.get_attr("steps")):
                with pytest.raises(AlreadyPendingCallError):
                    call()

    def kill(self, worker: int, *, certain: bool = False) -> None:
        """As the OOM killer does: at any time, and nobody is told. ``certain``: wait until it is over."""
        workers = self.envs._pool.workers
        victim = workers[worker % len(workers)]
        self.log.append(f"kill({victim.index})")
        os.kill(victim.pid, signal.SIGKILL)
        self.killed = True
        if certain:
            assert not remaining([victim.pid], PATIENCE)

    def stop_and_go(self, worker: int) -> None:
        """A worker is stopped, an answer is late, and then it goes on."""
        workers = self.envs._pool.workers
        victim = workers[worker % len(workers)]
        self.log.append(f"stop_and_go({victim.index})")
        # continued by a thread: what is asked of a stopped worker meanwhile may be more than one answer
        again = threading.Timer(0.03, _signal, (victim.pid, signal.SIGCONT))
        _signal(victim.pid, signal.SIGSTOP)
        again.start()
        try:
            if self.pending is not None:
                self.wait(0.02)
        finally:
            again.join()


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it may be dying of the step that is pending
        os.kill(pid, number)


ACTIONS = st.one_of(st.integers(0, HARMLESS), st.sampled_from([DAWDLE, RAISE, EXIT, DIE, CRASH]))
CONTEXTS = ["fork", "forkserver"]


class Machine(RuleBasedStateMachine):
    """Hypothesis at the controls."""

    def __init__(self) -> None:
        super().__init__()
        self.chaos: Any = None

    @initialize(workers=st.sampled_from([None, 2]), mode=st.sampled_from(MODES), restart=st.booleans())
    def start(self, workers: int | None, mode: AutoresetMode, restart: bool) -> None:
        self.chaos = Chaos(workers=workers, mode=mode, restart=restart, context="fork")

    @precondition(lambda self: self.chaos.pending is None)
    @rule(actions=st.lists(st.integers(0, HARMLESS), min_size=COUNT, max_size=COUNT))
    def step(self, actions: list[int]) -> None:
        self.chaos.step(actions)

    @precondition(lambda self: self.chaos.pending is None)
    @rule(actions=st.lists(ACTIONS, min_size=COUNT, max_size=COUNT))
    def step_async(self, actions: list[int]) -> None:
        self.chaos.step_async(actions)

    @precondition(lambda self: self.chaos.pending is not None)
    @rule(timeout=st.sampled_from([None, 0.0, 0.01]))
    def wait(self, timeout: float | None) -> None:
        self.chaos.wait(timeout)
        self.finish()

    @precondition(lambda self: self.chaos.pending is None)
    @rule(seed=st.one_of(st.none(), st.integers(10, 99)))
    def reset(self, seed: int | None) -> None:
        self.chaos.reset(seed)

    @precondition(lambda self: self.chaos.pending is None)
    @rule(mask=st.lists(st.booleans(), min_size=COUNT, max_size=COUNT).filter(any))
    def reset_some(self, mask: list[bool]) -> None:
        self.chaos.reset_some(mask)

    @precondition(lambda self: self.chaos.pending is None)
    @rule(what=st.sampled_from(["reset_async", "call_async"]))
    def other_async(self, what: str) -> None:
        getattr(self.chaos, what)()

    @precondition(lambda self: self.chaos.pending is None)
    @rule(good=st.booleans())
    def call(self, good: bool) -> None:
        self.chaos.call(good)

    @precondition(lambda self: not self.chaos.killed)
    @rule()
    def wrong_call(self) -> None:
        self.chaos.wrong_call()

    @precondition(lambda self: self.chaos.pending is None and not self.chaos.killed)
    @rule(worker=st.integers(0, COUNT - 1))
    def kill(self, worker: int) -> None:
        self.chaos.kill(worker, certain=True)

    @precondition(lambda self: not self.chaos.killed)
    @rule(worker=st.integers(0, COUNT - 1))
    def stop_and_go(self, worker: int) -> None:
        self.chaos.stop_and_go(worker)
        self.finish()

    def finish(self) -> None:
        """Whether an answer was in time is chance; what comes after must not be, or hypothesis cannot repeat it."""
        if self.chaos.pending is not None:
            self.chaos.wait(None)

    def teardown(self) -> None:
        if self.chaos is not None:
            self.chaos.close()


@pytest.mark.long
@pytest.mark.timeout(120, method="signal")
def test_any_order() -> None:
    """Hypothesis looks for the sequence of calls that gets a wrong row, a hang or an engine that does not recover."""
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=20,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            database=None,
            phases=[Phase.generate],  # to shrink what kills processes takes minutes; the last moves are in the note
        ),
    )


def play(chaos: Chaos, generator: np.random.Generator, moves: int) -> None:
    """So many moves, chosen at random."""

    def actions(harmless: float) -> list[int]:
        faults = [DAWDLE, DAWDLE, RAISE, EXIT, DIE, CRASH]
        return [
            int(generator.integers(0, HARMLESS + 1)) if generator.random() < harmless else int(generator.choice(faults))
            for _ in range(COUNT)
        ]

    calm: list[tuple[float, Callable[[], None]]] = [
        (20, lambda: chaos.step(actions(1.0))),
        (6, lambda: chaos.step(actions(0.9))),
        (6, lambda: chaos.step_async(actions(0.9))),
        (2, lambda: chaos.reset(None if generator.random() < 0.5 else int(generator.integers(1000)))),
        (2, lambda: chaos.reset_some((generator.integers(0, 2, COUNT) | np.eye(COUNT, dtype=int)[0]).astype(bool).tolist())),
        (2, chaos.reset_async),
        (2, chaos.call_async),
        (2, lambda: chaos.call(bool(generator.integers(2)))),
        (1, chaos.wrong_call),
        (1, lambda: chaos.kill(int(generator.integers(COUNT)))),
        (1, lambda: chaos.stop_and_go(int(generator.integers(COUNT)))),
    ]
    owed: list[tuple[float, Callable[[], None]]] = [
        (4, lambda: chaos.wait(None)),
        (4, lambda: chaos.wait(0.01)),
        (1, lambda: chaos.wait(0.0)),
        (1, chaos.wrong_call),
        (1, lambda: chaos.stop_and_go(int(generator.integers(COUNT)))),
    ]
    for _ in range(moves):
        choices = calm if chaos.pending is None else owed
        if chaos.killed:  # only what may find out
            choices = choices[:2] if chaos.pending is None else choices[:3]
        weights = np.array([weight for weight, _ in choices])
        choices[generator.choice(len(choices), p=weights / weights.sum())][1]()


def run(seed: int, moves: int, **options: Any) -> Chaos:
    chaos = Chaos(**options)
    try:
        play(chaos, np.random.default_rng(seed), moves)
        if chaos.pending is not None:
            chaos.wait(None)
    except BaseException as error:
        error.add_note(f"seed {seed}, {options}; the last moves: {'; '.join(chaos.log[-12:])}")
        raise
    finally:
        chaos.close()
    return chaos


@pytest.mark.long
@pytest.mark.parametrize("restart", [False, True], ids=["raise", "restart"])
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.timeout(60, method="signal")
def test_short_run(mode: AutoresetMode, restart: bool) -> None:
    """A hundred moves of a fixed seed."""
    run(7, 100, workers=2, mode=mode, restart=restart, context="fork")


@pytest.mark.slow
@pytest.mark.timeout(900, method="signal")
@pytest.mark.parametrize("context", ["fork", "forkserver", "spawn"])
@pytest.mark.parametrize("restart", [False, True], ids=["raise", "restart"])
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_long_run(mode: AutoresetMode, restart: bool, context: str) -> None:
    """Thousands of moves, twenty seeds, both ways to share the environments out; every row checked."""
    moves = {"fork": 1000, "forkserver": 600, "spawn": 150}[context]
    rows = 0
    for seed in range(20 if context != "spawn" else 2):
        workers = None if seed % 2 else 2
        rows += run(seed, moves // 4, workers=workers, mode=mode, restart=restart, context=context).rows
    assert rows > 100


def test_the_ledger_notices() -> None:
    """A check that cannot fail shows nothing: rows that are shifted, torn, repeated or swapped are found."""
    env_rows = [Obedient(index, length=LENGTH) for index in range(2)]
    starts = [env.reset(seed=1) for env in env_rows]

    def batch(results: list[tuple[Any, ...]]) -> tuple[Any, ...]:
        infos: dict[str, Any] = {}
        for env, result in enumerate(results):
            infos = vecenv.AsyncVectorEnv._add_info(_Counted(), infos, result[-1], env)
        columns = [np.array(column) for column in list(zip(*results, strict=True))[1:-1]]
        return (np.stack([result[0] for result in results]), *columns, infos)

    steps = [[env.step(action) for env in env_rows] for action in (1, 2)]
    observations, *rest = batch(steps[1])
    torn = observations.copy()
    torn[0, 20:] = batch(steps[0])[0][0, 20:]
    wrong = {
        "shifted": batch(steps[1]),
        "swapped": (batch(steps[0])[0][::-1], *batch(steps[0])[1:]),
        "old reward": (batch(steps[0])[0], *batch(steps[1])[1:]),
        "old infos": (*batch(steps[0])[:-1], batch(steps[1])[-1]),
        "torn": (torn, *rest),
    }
    for name, answer in wrong.items():
        ledger = Ledger(2, length=LENGTH)
        ledger.reset(batch(starts))
        assert _objects(ledger, answer), f"{name} was not noticed"
    ledger = Ledger(2, length=LENGTH)
    ledger.reset(batch(starts))
    ledger.step([1, 1], batch(steps[0]))
    with pytest.raises(AssertionError):
        ledger.step([1, 1], batch(steps[0]))  # repeated


def _objects(ledger: Ledger, answer: tuple[Any, ...]) -> bool:
    try:
        ledger.step([1, 1], answer)
    except AssertionError:
        return True
    return False


class _Counted:
    num_envs = 2

    def __getattr__(self, name: str) -> Any:
        return getattr(vecenv.AsyncVectorEnv, name).__get__(self)

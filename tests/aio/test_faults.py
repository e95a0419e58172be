"""Tests of faults: if one of many environments dies, hangs, raises or is cancelled, only its episode is lost."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import psutil
import pytest
from signals import Alarm, signal_handler
from text_envs import TextEnv, check_all_slots, run, step_directly

import vecenv
from vecenv.aio import EpisodeEnv, Pool
from vecenv.engine.submissions import Submissions
from vecenv.errors import EnvFailed, ObservationError, RestartsExhausted, StartupTimeout, StepTimeout, WorkerDied
from vecenv.testing import FaultyEnv
from vecenv.testing.faulty import FaultyConstructor

LARGE_SIZE = pytest.param(64, marks=[pytest.mark.long])
# action, or "cancel" -> the error of the step
FAULTS = {
    "kill": WorkerDied, "abort": WorkerDied, "hang": StepTimeout, "raise error": EnvFailed, "cancel": asyncio.CancelledError,
}  # fmt: skip
WORKER_OPTIONS = [
    pytest.param({}, id="process-per-env"),
    pytest.param({"num_workers": 2}, id="two-workers"),
    pytest.param({"num_workers": 2, "env_threads": 8}, id="threads"),
]


def is_worker_failure(error: BaseException) -> bool:
    return isinstance(error, WorkerDied | StepTimeout)


@pytest.mark.sampled(
    "process-per-env-kill-restart-6", "two-workers-abort-restart-6", "threads-cancel-restart-6", "two-workers-hang-restart-6"
)  # fmt: skip
@pytest.mark.parametrize("size", [6, LARGE_SIZE])
@pytest.mark.parametrize("on_failure", ["restart", pytest.param("raise", marks=pytest.mark.long)])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("workers", ["process-per-env", "two-workers", "threads"])
def test_one_fault_ends_only_its_episode(fault: str, workers: str, on_failure: Any, size: int) -> None:
    """If a worker with several environments dies, each of their episodes fails."""
    options: dict[str, Any] = {"step_timeout": 0.5, "cancel_timeout": 2.0, "on_failure": on_failure}
    if workers != "process-per-env":
        options["num_workers"] = 2
    if workers == "threads":
        options["env_threads"] = size
    if workers == "two-workers" and size > 10:
        options["step_timeout"] = 5.0

    async def main() -> None:
        async with Pool(partial(TextEnv, 8), size, **options) as pool:
            errors = await asyncio.gather(*(play(pool, number) for number in range(size)))
            lost = [number for number, error in enumerate(errors) if error is not None]
            worker_rows = next(rows for rows in pool._envs.worker_rows if episodes[0].env_id in rows)
            if fault in ("raise error", "cancel"):
                assert lost == [0]
            else:
                failed_rows = {episodes[number].env_id for number in lost}
                if workers == "threads" and fault == "hang":  # other episodes may end before the worker is killed
                    assert failed_rows <= set(worker_rows), errors
                else:
                    assert failed_rows == set(worker_rows), errors
                assert all(is_worker_failure(errors[number]) for number in lost)
            assert type(errors[0]) is FAULTS[fault], errors[0]
            await check_all_slots(pool)

    episodes: dict[int, EpisodeEnv] = {}

    async def play(pool: Pool, number: int) -> BaseException | None:
        actions = [f"step {step}" for step in range(8)]
        try:
            async with pool.episode(seed=number) as env:
                episodes[number] = env
                results: list[Any] = [env.observation]
                for step, action in enumerate(actions):
                    if number == 0 and step == 3:
                        await trigger_fault(env)
                    await asyncio.sleep(0.02)
                    results.append((await env.step(action))[:4])
        except (WorkerDied, StepTimeout, EnvFailed, asyncio.CancelledError) as error:
            if number and not isinstance(error, StepTimeout):
                assert "died" in str(error) or "failed earlier" in str(error), error
            return error
        expected = step_directly(TextEnv(8), number, actions)
        assert results == [expected[0][0], *(each[:4] for each in expected[1:])]
        return None

    async def trigger_fault(env: EpisodeEnv) -> None:
        if fault != "cancel":
            await env.step(fault)
        step = asyncio.create_task(env.step("wait 0.2"))
        await asyncio.sleep(0.01)
        step.cancel()
        await step

    run(main(), seconds=100)


@pytest.mark.long
@pytest.mark.parametrize("on_failure", ["raise", "restart"])
@pytest.mark.parametrize("context", ["spawn", "forkserver"])
def test_pool_stays_usable_after_faults_with_other_start_methods(context: Any, on_failure: Any) -> None:
    async def main() -> None:
        async with Pool(TextEnv, 4, num_workers=2, context=context, on_failure=on_failure) as pool:
            for fault in ("kill", "raise error", "abort"):
                async with pool.episode() as env:
                    with pytest.raises((WorkerDied, EnvFailed)):
                        await env.step(fault)
            await check_all_slots(pool)

    run(main(), seconds=200)


async def test_each_failure_raises_its_own_message() -> None:
    async with Pool(TextEnv, 3, step_timeout=0.3, cancel_timeout=0.1) as pool:
        async with pool.episode() as env:
            with pytest.raises(EnvFailed, match=rf"env {env.env_id}, worker .* step: ValueError: wrong: abc") as failure:
                await env.step("raise abc")
            assert isinstance(failure.value.__cause__, ValueError)
            assert env.failure is failure.value
            with pytest.raises(EnvFailed, match=rf"env {env.env_id} failed earlier .*by reset\(\) first: ValueError"):
                await env.step("x")
            with pytest.raises(EnvFailed, match="failed earlier"):
                await env.save()
            await env.reset()
            await env.step("x")
            with pytest.raises(WorkerDied, match=r"died during step: killed by SIGKILL") as death:
                await env.step("kill")
            assert death.value.envs == (env.env_id,)
            await env.reset()
            with pytest.raises(StepTimeout, match=r"hung for more than 0.3 s.* at text_envs.py:\d+ in _apply") as hang:
                await env.step("hang")
            assert hang.value.envs == (env.env_id,)
            await env.reset()
            step = asyncio.create_task(env.step("wait 0.05"))
            await asyncio.sleep(0)  # the task submits the step
            step.cancel()
            with pytest.raises(asyncio.CancelledError):
                await step
            with pytest.raises(EnvFailed, match="its step was cancelled"):
                await env.step("x")
            await env.reset()
            with pytest.raises(EnvFailed, match="during reset: ValueError: wrong: b"):
                await env.reset(options={"begin": "raise b"})
            await env.reset()
        with pytest.raises(EnvFailed, match="during reset"):
            async with pool.episode(options={"begin": "raise b"}):
                raise AssertionError
        assert {record.command for record in pool.errors} == {"step", "reset"}
        await check_all_slots(pool)


async def test_step_or_reset_whose_info_cannot_be_pickled_ends_the_episode() -> None:
    def make_env() -> FaultyEnv:
        return FaultyEnv(FaultyEnv(TextEnv(), "unpicklable_info", step=6), "unpicklable_info", reset=2)

    async with Pool(make_env, 1) as pool, pool.episode(seed=1) as env:
        for action in "abcde":
            await env.step(action)
        with pytest.raises(EnvFailed, match="cannot pickle"):
            await env.step("f")  # the last step of the episode
        with pytest.raises(EnvFailed, match="failed earlier"):
            await env.step("g")
        with pytest.raises(EnvFailed, match="cannot pickle"):
            await env.reset()
        with pytest.raises(EnvFailed, match="failed earlier"):
            await env.step("a")
        observation, _ = await env.reset(seed=1)
        assert observation == step_directly(TextEnv(), 1, [])[0][0]


class MisfitEnv(gym.Env[Any, str]):
    """An environment with pickled observations, which have no keys after the action, or the reset option, "misfit"."""

    def __init__(self) -> None:
        self.observation_space = gym.spaces.Dict({"text": gym.spaces.Text(9)})
        self.action_space = gym.spaces.Text(9)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return self._observe("misfit" if options else "begin"), {}

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self._observe(action), 0.0, False, False, {}

    def _observe(self, text: str) -> dict[str, str]:
        return {} if text == "misfit" else {"text": text}


async def test_pickled_observation_that_does_not_fit_ends_the_episode() -> None:
    async with Pool(MisfitEnv, 2, 1) as pool, pool.episode() as env:
        assert (await env.step("a"))[0] == {"text": "a"}
        with pytest.raises(EnvFailed, match=r"during step: ObservationError: env \d: observation does not fit") as failure:
            await env.step("misfit")
        assert isinstance(failure.value.__cause__, ObservationError)
        with pytest.raises(EnvFailed, match="failed earlier"):
            await env.step("b")
        with pytest.raises(EnvFailed, match="during reset: ObservationError"):
            await env.reset(options={"misfit": True})
        assert await env.reset() == ({"text": "begin"}, {})
        assert [(record.env, record.command) for record in pool.errors] == [(env.env_id, "step"), (env.env_id, "reset")]


async def test_worker_is_killed_if_a_cancelled_step_hangs() -> None:
    async with Pool(TextEnv, 3, cancel_timeout=0.2, on_failure=vecenv.Restart(0)) as pool:
        for _ in range(3):  # restarts after a cancelled step do not count towards the limit
            async with pool.episode() as env:
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.05):
                        await env.step("hang")
        await check_all_slots(pool)
        assert pool.stats()["restarts"] == 3


async def test_failures_of_other_episodes_name_the_cancelled_step_that_hangs() -> None:
    async with Pool(TextEnv, 2, num_workers=1, step_timeout=0.3, cancel_timeout=5) as pool:
        async with pool.episode() as env:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await env.step("hang")
        with pytest.raises(WorkerDied, match=f"env {env.env_id} hung for more than 0.3 s.* at text_envs.py") as death:
            async with pool.episode():
                raise AssertionError
        assert not isinstance(death.value, StepTimeout)
        await check_all_slots(pool)


async def test_worker_is_kept_if_a_cancelled_step_returns_in_time() -> None:
    async with Pool(TextEnv, 1, cancel_timeout=5) as pool:
        (process,) = pool._envs.processes
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05), pool.episode() as env:
                await env.step("wait 0.2")
        await check_all_slots(pool)  # returns after the late reply, which is dropped
        assert pool._envs.processes == [process]


async def test_worker_is_kept_if_a_cancelled_step_waits_for_other_steps() -> None:
    async with Pool(TextEnv, 4, num_workers=1, cancel_timeout=0.1) as pool:
        async with pool.episode() as first, pool.episode() as second, pool.episode() as third:
            running = asyncio.create_task(first.step("wait 0.3"))
            queued = asyncio.create_task(second.step("wait 0.01"))
            last = asyncio.create_task(third.step("x"))
            await asyncio.sleep(0.02)
            queued.cancel()
            assert (await running)[4]["action"] == ["wait 0.3"]
            assert (await last)[4]["action"] == ["x"]
        await check_all_slots(pool)
        assert pool.stats()["restarts"] == 0


async def test_worker_is_kept_if_a_cancelled_step_waits_for_a_thread() -> None:
    async with Pool(TextEnv, 3, num_workers=1, env_threads=2, cancel_timeout=0.3) as pool:
        async with pool.episode() as first, pool.episode() as second, pool.episode() as third:
            running = [asyncio.create_task(env.step("wait 0.5")) for env in (first, second)]
            queued = asyncio.create_task(third.step("x"))
            await asyncio.sleep(0.02)
            queued.cancel()
            assert [(await step)[4]["action"] for step in running] == [["wait 0.5"]] * 2
        await check_all_slots(pool)
        assert pool.stats()["restarts"] == 0


class SlowlyBuiltEnv(TextEnv):
    """An environment that, while ``folder/wait`` exists, reports that it is being built, and waits."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        while (folder / "wait").exists():
            (folder / "building").touch()
            time.sleep(0.01)


async def test_saving_an_environment_delays_no_step_in_another_thread(tmp_path: Path) -> None:
    make_env = partial(SlowlyBuiltEnv, tmp_path)
    async with Pool(make_env, 2, num_workers=1, env_threads=2) as pool, pool.episode() as first, pool.episode() as second:
        (tmp_path / "wait").touch()
        saving = asyncio.create_task(first.save())  # builds environments, to verify that the state continues exactly
        try:
            async with asyncio.timeout(20):
                while not (tmp_path / "building").exists():
                    await asyncio.sleep(0.01)
                assert (await second.step("x"))[4]["action"] == ["x"]
            assert not saving.done()
        finally:
            (tmp_path / "wait").unlink()
        assert (await first.load(await saving)).startswith("0 ")


async def test_failed_start_of_a_process_counts_as_one_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Pool(TextEnv, 1, num_workers=1, on_failure=vecenv.Restart(1)) as pool:
        replace = pool._envs._pool.replace
        refused_workers = []

        def fail_once(worker: Any) -> Any:
            if refused_workers:
                return replace(worker)
            refused_workers.append(worker)
            raise BlockingIOError

        monkeypatch.setattr(pool._envs._pool, "replace", fail_once)
        async with pool.episode() as env:
            with pytest.raises(WorkerDied):
                await env.step("kill")
        await check_all_slots(pool)
        assert refused_workers


async def test_reset_raises_the_error_of_a_restart_until_a_process_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Any) -> Any:
        raise RuntimeError("the main file is gone")

    async with Pool(TextEnv, 1, on_failure=vecenv.Restart(1)) as pool:
        with monkeypatch.context() as patch:
            patch.setattr(pool._envs._pool, "replace", fail)
            async with pool.episode() as env:
                waiting_task = asyncio.create_task(pool.episode().__aenter__())
                with pytest.raises(WorkerDied):
                    await env.step("kill")
                with pytest.raises(RuntimeError, match="main file"):
                    await asyncio.wait_for(env.reset(), 10)
            with pytest.raises(RuntimeError, match="main file"):
                await asyncio.wait_for(waiting_task, 10)
        await check_all_slots(pool)
        assert pool.stats()["restarts"] == 1


@pytest.mark.parametrize("on_failure", ["raise", "restart"])
async def test_deaths_are_detected_without_pidfd_open(on_failure: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_os_error(*_: Any) -> int:
        raise OSError

    monkeypatch.setattr(os, "pidfd_open", raise_os_error, raising=False)

    async with Pool(TextEnv, 4, num_workers=2, on_failure=on_failure) as pool:
        async with pool.episode() as first, pool.episode() as second:
            with pytest.raises(WorkerDied):
                await first.step("kill")
            os.kill(await second.call("pid"), signal.SIGKILL)
            await asyncio.sleep(0.3)
            with pytest.raises(WorkerDied):
                await second.step("x")
        await check_all_slots(pool)


@pytest.mark.parametrize("on_failure", ["raise", "restart"])
async def test_idle_workers_that_die_are_replaced(on_failure: Any) -> None:
    async with Pool(TextEnv, 6, num_workers=3, on_failure=on_failure) as pool:
        for process in pool._envs.processes:
            os.kill(process.pid, signal.SIGKILL)
        await asyncio.sleep(0.3)  # until the kernel reports the deaths
        await check_all_slots(pool)


@pytest.mark.parametrize("on_failure", ["raise", "restart"])
async def test_death_between_calls_raises_in_the_next_call(on_failure: Any) -> None:
    async with Pool(TextEnv, 4, num_workers=2, on_failure=on_failure) as pool:
        async with pool.episode() as env:
            os.kill(await env.call("pid"), signal.SIGKILL)
            await asyncio.sleep(0.3)
            with pytest.raises(WorkerDied, match="died while idle"):
                await env.call("pid")
            with pytest.raises(EnvFailed, match="failed earlier"):
                await env.step("x")
        await check_all_slots(pool)


async def test_workers_end_although_a_signal_handler_interrupts_close(monkeypatch: pytest.MonkeyPatch) -> None:
    unwatch = Submissions._unwatch

    def unwatch_and_signal(submissions: Submissions, worker: Any) -> None:
        unwatch(submissions, worker)
        signal.raise_signal(signal.SIGUSR2)

    pool = await Pool(TextEnv, 4, num_workers=2).__aenter__()
    processes = [psutil.Process(process.pid) for process in pool._envs.processes]
    monkeypatch.setattr(Submissions, "_unwatch", unwatch_and_signal)
    with signal_handler(signal.SIGUSR2, Alarm), pytest.raises(Alarm):
        await pool.close()
    await pool.close()
    assert not any(process.is_running() for process in processes)


@pytest.mark.parametrize("fault", ["kill", "hang"])
@pytest.mark.parametrize("options", WORKER_OPTIONS)
async def test_evaluate_reports_only_the_episode_that_ends_its_worker(fault: str, options: dict[str, Any]) -> None:
    first_observation = step_directly(TextEnv(), 2, [])[0][0]

    async def policy(observation: str) -> str:
        await asyncio.sleep(0.01)
        return fault if observation == first_observation else "x"

    reported: list[int] = []
    async with Pool(TextEnv, 6, step_timeout=1.0, **options) as pool:
        results = await pool.evaluate(policy, 8, seed=0, retries=0, on_episode=lambda result: reported.append(result.index))
        await check_all_slots(pool)
    assert [result.index for result in results if result.error is not None] == [2]
    assert type(results[2].error) is FAULTS[fault]
    assert sorted(reported) == list(range(8))
    for index, result in enumerate(results):
        if index != 2:
            rewards = [step[1] for step in step_directly(TextEnv(), index, ["x"] * 6)[1:]]
            assert result.episode_return == pytest.approx(sum(rewards), rel=1e-12)  # `sum` rounds differently in Python 3.12


async def test_worker_that_dies_too_often_is_abandoned_and_others_continue() -> None:
    async with Pool(TextEnv, 2, on_failure=vecenv.Restart(1)) as pool:
        async with pool.episode() as abandoned_env:
            with pytest.raises(WorkerDied):
                await abandoned_env.step("kill")
            await abandoned_env.reset()
            with pytest.raises(WorkerDied):
                await abandoned_env.step("kill")
            with pytest.raises(RestartsExhausted, match="more than 1 restarts"):
                await abandoned_env.reset()
        for _ in range(4):
            async with pool.episode() as other_env:
                await other_env.step("x")
                assert other_env.env_id != abandoned_env.env_id
        assert "abandoned=1" in repr(pool)
        async with pool.episode() as other_env:
            waiting_task = asyncio.create_task(pool.episode().__aenter__())
            with pytest.raises(WorkerDied):
                await other_env.step("kill")
        with pytest.raises(RestartsExhausted):
            await waiting_task
        with pytest.raises(RestartsExhausted):
            async with pool.episode():
                raise AssertionError


class EnvFnThatMayHang:
    """A function that builds a :class:`TextEnv`, but hangs if a file exists."""

    def __init__(self, flag: Path) -> None:
        self._flag = flag

    def __call__(self) -> TextEnv:
        if self._flag.exists():
            time.sleep(1000)
        return TextEnv()


@pytest.mark.long
def test_reset_raises_until_the_worker_can_build_its_environment() -> None:
    async def main(flag: Path) -> None:
        async with Pool(EnvFnThatMayHang(flag), 1, worker_options=vecenv.WorkerOptions(start_timeout=4)) as pool:
            flag.touch()
            async with pool.episode() as env:
                with pytest.raises(WorkerDied):
                    await env.step("kill")
                with pytest.raises(WorkerDied, match=r"not ready within 4 seconds"):
                    await env.reset()
                flag.unlink()
                await env.reset()
                await env.step("x")
            await check_all_slots(pool)

    with tempfile.TemporaryDirectory() as folder:
        run(main(Path(folder) / "flag"))


def test_failed_start_of_a_pool_raises_and_leaks_nothing() -> None:
    with pytest.raises(StartupTimeout):
        Pool(FaultyConstructor(TextEnv, "sleep"), 2, worker_options=vecenv.WorkerOptions(start_timeout=0.5, dummy_env=True))
    with pytest.raises(ZeroDivisionError):
        Pool(lambda: TextEnv(1 // 0), 2)


def test_loop_keeps_running_while_workers_restart_and_close() -> None:
    """Environments that are rebuilt or closed wait for a file that only a running loop can write."""

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def wait_for_the_loop(call: str) -> None:
            (folder / f"{call} began").touch()
            deadline = time.monotonic() + 60
            while not (folder / f"{call} may end").exists():
                if time.monotonic() > deadline:
                    os._exit(1)
                time.sleep(0.01)

        class LoopDependentEnv(TextEnv):
            def __init__(self) -> None:
                super().__init__()
                if (folder / "started").exists():
                    wait_for_the_loop("build")

            def close(self) -> None:
                if (folder / "started").exists():
                    wait_for_the_loop("close")

        async def let_call_end(call: str) -> None:
            while not (folder / f"{call} began").exists():
                await asyncio.sleep(0.01)
            (folder / f"{call} may end").touch()

        async def main() -> None:
            async with Pool(LoopDependentEnv, 2, on_failure="restart") as pool:
                (folder / "started").touch()
                tasks = [asyncio.create_task(let_call_end(call)) for call in ("build", "close")]
                async with pool.episode() as env:
                    with pytest.raises(WorkerDied):
                        await env.step("kill")
                    await env.reset()
            await asyncio.gather(*tasks)

        run(main())


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "episodes",
    [
        300,
        pytest.param(2_000, marks=pytest.mark.long),
        pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
    ],
)
@pytest.mark.parametrize("options", WORKER_OPTIONS)
def test_random_cancels_leak_no_slot_process_or_descriptor(episodes: int, options: dict[str, Any]) -> None:
    """Calls that are not cancelled return correct results. The fixture around every test also checks for leaks."""

    async def play(pool: Pool, number: int) -> None:
        rng = random.Random(number)
        actions = [f"{number} {step}" for step in range(3)]
        async with pool.episode(seed=number) as env:
            results: list[Any] = [env.observation]
            for action in actions:
                if rng.random() < 0.3:
                    await asyncio.sleep(rng.random() * 0.002)
                results.append((await env.step(action))[:4])
        expected = step_directly(TextEnv(), number, actions)
        assert results == [expected[0][0], *(each[:4] for each in expected[1:])]
        completed.append(number)

    completed: list[int] = []

    async def main() -> None:
        rng = random.Random(1)
        async with Pool(TextEnv, 8, **options) as pool:
            descriptors = len(os.listdir("/proc/self/fd"))
            remaining = iter(range(episodes))

            async def play_and_cancel() -> None:
                for number in remaining:
                    task = asyncio.create_task(play(pool, number))
                    if rng.random() < 0.5:
                        await asyncio.sleep(rng.random() * 0.01)
                        task.cancel()
                    (error,) = await asyncio.gather(task, return_exceptions=True)
                    assert error is None or isinstance(error, asyncio.CancelledError), error

            await asyncio.gather(*(play_and_cancel() for _ in range(16)))
            await check_all_slots(pool)
            assert len(os.listdir("/proc/self/fd")) == descriptors
            assert pool.stats()["restarts"] == 0
            assert not pool.stats()["in_flight"]

    run(main(), seconds=800)
    assert episodes * 0.4 < len(completed) < episodes

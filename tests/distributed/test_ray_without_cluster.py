"""``RayVectorEnv`` over hosts in this process: values, first-ready batches, failures, invalid options, and copies."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import pickle
import random
import re
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import MagicMock

import gymnasium
import numpy as np
import pytest
from envs import CounterEnv, GymnasiumInfoMerger, NestedDictEnv, SpaceEnv, counters, info_env_fn, scripted_env_fns
from gymnasium import spaces
from gymnasium.error import AlreadyPendingCallError
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hosts_here import InProcessCluster, InProcessRayVectorEnv
from sampling import each_once

import vecenv
from vecenv.backends import RayVectorEnv
from vecenv.backends.ray.cluster import Cluster, _connect, _HostActor
from vecenv.errors import (
    ClusterError,
    EnvError,
    EnvFailed,
    HostDied,
    ObservationError,
    RestartsExhausted,
    StepTimeout,
    WorkerDied,
)
from vecenv.testing import VectorEnvContract, assert_identical, assert_same_trajectory
from vecenv.tools.replay import replay
from vecenv.wrappers import RecordEpisodeStatistics


class _RayContract(VectorEnvContract):
    options: ClassVar[dict[str, Any]] = {}

    def make(self, num_envs: int = 3, autoreset_mode: AutoresetMode = AutoresetMode.NEXT_STEP, **kwargs: Any) -> Any:
        return InProcessRayVectorEnv(scripted_env_fns(num_envs), autoreset_mode=autoreset_mode, **self.options, **kwargs)


class TestTwoHosts(_RayContract):
    pass


@pytest.mark.long
class TestObservationsByPickle(_RayContract):
    options: ClassVar[dict[str, Any]] = {"shared_memory": False}


@pytest.mark.long
class TestRestarting(_RayContract):
    options: ClassVar[dict[str, Any]] = {"on_failure": "restart"}


@pytest.mark.long
class TestNestedObservations(VectorEnvContract):
    def make(self, num_envs: int = 3, autoreset_mode: AutoresetMode = AutoresetMode.NEXT_STEP, **kwargs: Any) -> Any:
        fns = [functools.partial(NestedDictEnv, index) for index in range(num_envs)]
        return InProcessRayVectorEnv(fns, autoreset_mode=autoreset_mode, **kwargs)


# -- values --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_hosts", "mode", "copy"), each_once([1, 2, 3, 5], AutoresetMode, [True, False]))
def test_trajectories_and_infos_equal_sync_vector_env(num_hosts: int, mode: AutoresetMode, copy: bool) -> None:
    envs = InProcessRayVectorEnv(scripted_env_fns(5), num_hosts=num_hosts, autoreset_mode=mode, copy=copy)
    # SyncVectorEnv truncates floats to int if the first value of an info is an int, hence GymnasiumInfoMerger
    reference = SyncVectorEnv(scripted_env_fns(5), autoreset_mode=mode)
    assert_same_trajectory(GymnasiumInfoMerger(envs), reference, 40, seed=[3, 1, None, 9, 2])
    envs.close()


@pytest.mark.parametrize("mode", AutoresetMode)
def test_info_keys_have_the_order_of_the_local_engine(mode: AutoresetMode, closes: Any) -> None:
    envs = closes(InProcessRayVectorEnv(scripted_env_fns(5, rotate_infos=False), autoreset_mode=mode))
    local: Any = closes(vecenv.AsyncVectorEnv(scripted_env_fns(5, rotate_infos=False), autoreset_mode=mode, num_workers=0))
    assert list(envs.reset(seed=1)[1]) == list(local.reset(seed=1)[1])
    for _ in range(20):
        actions = local.action_space.sample()
        assert list(envs.step(actions)[4]) == list(local.step(actions)[4])
        if mode is AutoresetMode.DISABLED:
            envs.reset(), local.reset()


SPACES = [
    spaces.Text(5),
    spaces.Sequence(spaces.Box(-1, 1, (2,))),
    spaces.OneOf([spaces.Discrete(3), spaces.Box(0, 1, (2,))]),
    spaces.Tuple((spaces.Discrete(3), spaces.MultiBinary(4))),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("space", SPACES, ids=repr)
@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_any_space_gives_the_results_of_sync_vector_env(space: spaces.Space, mode: AutoresetMode, closes: Any) -> None:
    fns = [functools.partial(SpaceEnv, space, space, env_id=index, lengths=(2 + index,)) for index in range(4)]
    envs = closes(InProcessRayVectorEnv(fns, autoreset_mode=mode))
    assert_same_trajectory(envs, SyncVectorEnv(fns, autoreset_mode=mode), 12, seed=5)


class ProcessRandomEnv(gymnasium.Env[Any, Any]):
    """An environment that draws from the global generators of its process."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.array([np.random.normal(), random.random()]), {}

    def step(self, action: Any) -> Any:
        return np.array([np.random.normal(), random.random()]), 0.0, bool(np.random.rand() < 0.2), False, {}


def test_own_generators_give_equal_results_on_hosts_and_locally() -> None:
    results = []
    for engine_class, options in ((InProcessRayVectorEnv, {"num_hosts": 2}), (vecenv.AsyncVectorEnv, {"num_workers": 0})):
        envs: Any = engine_class([ProcessRandomEnv] * 4, generators="own", **options)
        results.append([envs.reset(seed=3)[0], *(envs.step(np.zeros(4, np.int64))[0] for _ in range(30))])
        snapshots = envs.save()
        results[-1] += [envs.step(np.zeros(4, np.int64))[0] for _ in range(9)]
        envs.load(snapshots)
        assert_identical([envs.step(np.zeros(4, np.int64))[0] for _ in range(9)], results[-1][-9:])
        envs.close()
    assert_identical(results[0], results[1])


def test_calls_reach_every_environment_with_its_own_arguments(closes: Any) -> None:
    envs = closes(InProcessRayVectorEnv(counters(5), num_hosts=3))
    envs.reset(seed=1)
    assert envs.call("add", 2, scale=10) == (20, 21, 22, 23, 24)
    envs.set_attr("note", [10, 11, 12, 13, 14])
    assert envs.get_attr("note") == (10, 11, 12, 13, 14)
    envs.set_attr("note", "all")
    assert envs.get_attr("note") == ("all",) * 5
    assert envs.exec_func(lambda env, plus: env.env_id + plus, [4, 1], 100) == (None, 101, None, None, 104)
    assert [frame[0, 0, 0] for frame in envs.render() or ()] == [0, 10, 20, 30, 40]
    assert envs.np_random_seed == (1, 2, 3, 4, 5)
    with pytest.raises(AttributeError, match="nosuch"):
        envs.call("nosuch")
    assert envs.get_attr("env_id") == (0, 1, 2, 3, 4)


def test_exception_of_a_call_is_raised_once(closes: Any) -> None:
    envs = closes(InProcessRayVectorEnv(counters(2), on_failure="restart"))
    with pytest.raises(ZeroDivisionError) as info:
        envs.exec_func(lambda env: 1 / 0, [1])
    [note] = info.value.__notes__
    assert note.startswith("env 1, host 1 ")


def test_different_bounds_need_observation_mode_different(closes: Any) -> None:
    fns = [functools.partial(SpaceEnv, spaces.Box(0, 1 + index, (2,), np.float32)) for index in range(4)]
    with pytest.raises(RuntimeError, match=r"Env 1 has"):
        InProcessRayVectorEnv(fns)
    envs = closes(InProcessRayVectorEnv(fns, observation_mode="different"))
    sync = SyncVectorEnv(fns, observation_mode="different")
    assert envs.observation_space == sync.observation_space


def test_stats_sum_over_hosts(closes: Any) -> None:
    envs = closes(InProcessRayVectorEnv(counters(4)))
    envs.reset()
    for _ in range(3):
        envs.step([0] * 4)
    assert envs.stats()["steps"] == 12
    assert envs.stats()["resets"] == 4


def test_stats_count_only_steps_with_results(closes: Any) -> None:
    for engine_class in (InProcessRayVectorEnv, vecenv.AsyncVectorEnv):
        envs: Any = closes(engine_class([*counters(3), functools.partial(MisshapenObservationEnv, 3)], context="fork"))
        envs.reset(seed=1)
        with pytest.raises(ObservationError):
            envs.step([0] * 4)
        assert (envs.stats()["steps"], envs.stats()["resets"]) == (3, 4)


def test_stats_do_not_count_a_step_that_a_host_refuses(closes: Any) -> None:
    fns = [*counters(3), functools.partial(MisshapenObservationEnv, 3)]
    envs = closes(InProcessRayVectorEnv(fns, num_hosts=1, on_failure=vecenv.Restart(0)))
    envs.reset(seed=1)
    for _ in range(2):  # the second step is refused before anything is sent
        with pytest.raises(RestartsExhausted):
            envs.step(np.zeros(4, np.int64))
        assert envs.stats()["steps"] == 3


def test_timeout_names_the_first_four_late_hosts_in_order(closes: Any) -> None:
    cluster = InProcessCluster()
    envs = closes(InProcessRayVectorEnv(counters(6), cluster, num_hosts=6))
    envs.reset(seed=0)
    cluster.paused = set(range(6))
    envs.step_async([0] * 6)
    with pytest.raises(StepTimeout) as caught:
        envs.step_wait(timeout=0.01)
    assert list(caught.value.where) == [0, 1, 2, 3]
    assert re.findall(r"env \d, host \d", str(caught.value)) == [f"env {i}, host {i}" for i in range(4)]
    cluster.paused = set()
    envs.step_wait()


# -- first-ready batches ---------------------------------------------------------------------------------------


def test_recv_returns_the_rows_of_the_first_host_to_reply(closes: Any) -> None:
    cluster = InProcessCluster()
    envs = closes(InProcessRayVectorEnv(counters(6, lengths=(100,)), cluster, num_hosts=3, batch_size=2))
    envs.reset_async(seed=0)
    cluster.paused = {0}
    received = [envs.recv()[4]["env_id"].tolist() for _ in range(2)]
    assert received == [[2, 3], [4, 5]]
    with pytest.raises(StepTimeout, match="host 0"):
        envs.recv(timeout=0.01)
    with pytest.raises(AlreadyPendingCallError, match="env 0, "):
        envs.send([1], [0])
    steps = np.zeros(6, int)
    for _ in range(5):
        envs.send([1, 1], [2, 3])
        observations, rewards, *_, infos = envs.recv()
        steps[infos["env_id"]] += 1
        assert observations[:, 1].tolist() == steps[infos["env_id"]].tolist()
        np.testing.assert_allclose(rewards, infos["env_id"] + observations[:, 1] / 1000)
    cluster.paused = set()
    assert envs.recv()[4]["env_id"].tolist() == [0, 1]


def test_step_timeout_of_a_host_is_recorded(closes: Any) -> None:
    cluster = InProcessCluster()
    envs = closes(InProcessRayVectorEnv(counters(4, lengths=(100,)), cluster, num_hosts=2))
    envs._driver.exchange.step_timeout = 0.05  # the option needs hosts with worker processes
    envs.reset(seed=0)
    cluster.paused = {1}
    with pytest.raises(StepTimeout, match="host 1"):
        envs.step([1] * 4)
    (record,) = envs.errors
    assert (record.env, record.worker, record.command, type(record.error)) == (None, 1, "step", StepTimeout)
    cluster.paused = set()
    assert envs.step_wait()[1].shape == (4,)


class SlowlyRestartingCluster(InProcessCluster):
    """A cluster of hosts that restart slowly. It fails a test that begins to wait after the deadline."""

    def launch(self, plan: Any) -> None:
        if len(self.hosts) >= 2:
            time.sleep(0.3)
        super().launch(plan)

    def collect(self, references: list[int], deadline: float | None, *, every: bool = False) -> list[tuple[int, Any]]:
        assert deadline is None or deadline > time.monotonic()
        return super().collect(references, deadline, every=every)


def test_start_of_a_new_host_does_not_count_towards_step_timeout(closes: Any) -> None:
    cluster = SlowlyRestartingCluster()
    envs = closes(InProcessRayVectorEnv(counters(4, lengths=(100,)), cluster, on_failure="restart"))
    envs._driver.exchange.step_timeout = 0.2  # the option needs hosts with worker processes
    envs.reset(seed=0)
    cluster.crash(0)
    assert envs.step([1] * 4)[4]["restarted"].tolist() == [1, 1, 0, 0]


def test_rows_sent_one_by_one_have_the_results_of_sync_vector_env(closes: Any) -> None:
    envs = closes(InProcessRayVectorEnv(scripted_env_fns(5), num_hosts=2, batch_size=1))
    sync = closes(SyncVectorEnv(scripted_env_fns(5)))
    envs.reset(seed=4)
    sync.reset(seed=4)
    for t in range(12):
        actions = sync.action_space.sample()
        expected = sync.step(actions)
        for row in np.random.default_rng(t).permutation(5):
            envs.send(actions[[row]], [row])
        for _ in range(5):
            observations, rewards, terminations, truncations, infos = envs.recv()
            (row,) = infos["env_id"]
            assert_identical(observations["x"][0], expected[0]["x"][row])
            assert (rewards[0], terminations[0], truncations[0]) == tuple(part[row] for part in expected[1:4])
            assert ("word" in infos) == bool(expected[4].get("_word", np.zeros(5, bool))[row])


def test_reset_waits_for_rows_in_flight(closes: Any) -> None:
    envs = closes(InProcessRayVectorEnv(counters(4), batch_size=2))
    envs.reset(seed=1)
    envs.send([1] * 4)
    observations, _ = envs.reset(seed=7)
    assert observations[:, 1].tolist() == [0] * 4
    assert observations[:, 3].tolist() == [7, 8, 9, 10]


# -- failures --------------------------------------------------------------------------------------------------


def test_reset_of_some_rows_returns_the_current_observations_of_rows_in_flight(closes: Any) -> None:
    """The reset drops their results, but not what they did, as on the local engine."""
    results = []
    for envs in (InProcessRayVectorEnv(counters(4)), vecenv.AsyncVectorEnv(counters(4), num_workers=0)):
        closes(envs)
        envs.reset(seed=1)
        envs.send([0, 0], [0, 2])
        results.append(envs.reset(options={"reset_mask": np.array([False, True, False, False])})[0])
        assert envs.in_flight.tolist() == []
        results.append(envs.step([0] * 4)[0])
    assert_identical(results[:2], results[2:])
    assert results[0][:, 1].tolist() == [1, 0, 1, 0]


class RaisingEnv(CounterEnv):
    """An environment that raises in its third step."""

    def step(self, action: Any) -> Any:
        if self.steps == 2:
            raise KeyError("third step", self.env_id)
        return super().step(action)


def _make_fns_with_one_raising(index: int, n: int = 4) -> list[Any]:
    fns = counters(n, lengths=(50,))
    fns[index] = functools.partial(RaisingEnv, env_id=index, lengths=(50,))
    return fns


def test_error_of_an_environment_is_raised_with_its_index(closes: Any) -> None:
    envs = closes(InProcessRayVectorEnv(_make_fns_with_one_raising(3)))
    envs.reset()
    envs.step([0] * 4)
    envs.step([0] * 4)
    with pytest.raises(KeyError, match="third step") as info:
        envs.step([0] * 4)
    assert any("env 3, host 1" in note for note in info.value.__notes__)
    assert info.value.envs == (3,)  # type: ignore[attr-defined]
    with pytest.raises(EnvFailed, match="env 3 "):
        envs.step([0] * 4)
    assert envs.errors[-1].env == 3
    observations, _ = envs.reset()
    assert observations[:, 1].tolist() == [0] * 4
    assert envs.step([0] * 4)[0][:, 1].tolist() == [1] * 4


@pytest.mark.parametrize("on_failure", ["raise", "restart"])
def test_failure_in_a_step_that_a_reset_drops_is_recorded(on_failure: str, closes: Any) -> None:
    for engine_class in (vecenv.AsyncVectorEnv, InProcessRayVectorEnv):
        envs: Any = closes(engine_class(_make_fns_with_one_raising(3), on_failure=on_failure, context="fork"))
        envs.reset(seed=1)
        for _ in range(2):
            envs.step([0] * 4)
        observer = MagicMock(spec=vecenv.Observer)
        envs.add_observer(observer)
        envs.send([0] * 4)
        assert envs.reset(seed=5)[0][:, 3].tolist() == [5, 6, 7, 8]
        assert not observer.on_failure.called, "only `errors` reports a failure in a dropped request"
        assert [(record.env, record.command, type(record.error)) for record in envs.errors] == [(3, "step", KeyError)]
        assert envs.step([0] * 4)[0][:, 1].tolist() == [1] * 4


@pytest.mark.parametrize("shared_memory", [True, False])
def test_reset_of_a_failed_row_returns_the_current_observations_of_the_others(shared_memory: bool, closes: Any) -> None:
    results = []
    for engine_class in (InProcessRayVectorEnv, vecenv.AsyncVectorEnv):
        fns, options = _make_fns_with_one_raising(2), {"shared_memory": shared_memory, "context": "fork"}
        envs: Any = closes(engine_class(fns, **options))
        envs.reset(seed=1)
        for _ in range(2):
            envs.step(np.zeros(4, np.int64))
        with pytest.raises(KeyError):
            envs.step(np.zeros(4, np.int64))
        steps = envs.stats()["steps"]
        results.append((steps, envs.reset(options={"reset_mask": np.arange(4) == 2})[0]))
    assert_identical(*results)
    assert results[0][1][:, 1].tolist() == [3, 3, 0, 3]


def test_step_without_restarts_left_raises_the_same_as_a_local_one(closes: Any) -> None:
    errors = []
    for engine_class in (InProcessRayVectorEnv, vecenv.AsyncVectorEnv):
        options = {"on_failure": vecenv.Restart(limit=0), "context": "fork"}
        envs: Any = closes(engine_class(_make_fns_with_one_raising(3), **options))
        envs.reset(seed=1)
        for _ in range(2):
            envs.step(np.zeros(4, np.int64))
        with pytest.raises(vecenv.errors.RestartsExhausted, match="more than 0 restarts") as caught:
            envs.step(np.zeros(4, np.int64))
        errors.append(caught.value)
    assert errors[0].envs == errors[1].envs == (3,)


def test_environment_that_raises_is_restarted_by_its_host(closes: Any) -> None:
    envs = closes(InProcessRayVectorEnv(_make_fns_with_one_raising(3), on_failure="restart"))
    local: Any = closes(vecenv.AsyncVectorEnv(_make_fns_with_one_raising(3), num_workers=0, on_failure="restart"))
    envs.reset(seed=1)
    local.reset(seed=1)
    for t in range(4):
        actual, expected = envs.step([0] * 4), local.step([0] * 4)
        actual[0][:, 3] = expected[0][:, 3] = 0  # the new environment has a random seed
        assert_identical(actual, expected, f"step {t}")
    assert envs.stats()["restarts"] == 1


def test_reset_replaces_a_worker_that_died_while_idle(closes: Any) -> None:
    cluster = InProcessCluster()
    envs = closes(InProcessRayVectorEnv(counters(2), cluster, num_hosts=1, workers_per_host=1, context="fork"))
    envs.reset(seed=1)
    [process] = cluster.host(0).envs.processes
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert envs.reset(seed=5)[0][:, 3].tolist() == [5, 6]
    assert envs.step([0] * 2)[0][:, 1].tolist() == [1, 1]
    [record] = envs.errors
    assert isinstance(record.error, WorkerDied)
    assert (record.command, record.error.command) == ("idle", "idle")
    assert not any("during reset" in note for note in record.error.__notes__)


class UnpicklableInfoEnv(CounterEnv):
    """An environment with an info that cannot be pickled, in its second step."""

    def step(self, action: Any) -> Any:
        *results, info = super().step(action)
        return *results, {"lock": threading.Lock()} if self.steps == 2 else info


def test_info_that_cannot_be_pickled_does_not_affect_later_steps(closes: Any) -> None:
    fns = counters(2, lengths=(50,))
    fns[1] = functools.partial(UnpicklableInfoEnv, 1, lengths=(50,))
    envs = closes(InProcessRayVectorEnv(fns, num_hosts=1, workers_per_host=1, context="fork", batch_size=2))
    envs.reset(seed=1)
    envs.step([0] * 2)
    with pytest.raises(TypeError, match="cannot pickle"):
        envs.step([0] * 2)
    assert envs.step([0] * 2)[0][:, 1].tolist() == [3, 3]
    envs.reset(seed=1)
    envs.step([0] * 2)
    envs.send([0] * 2)
    with pytest.raises(TypeError, match="cannot pickle"):
        envs.recv()
    assert envs.recv()[0][:, 1].tolist() == [2, 2], "the rows have no results"


class UnpicklableText(str):
    """A text that cannot be pickled."""

    def __deepcopy__(self, memo: Any) -> Any:
        return self

    def __reduce__(self) -> Any:
        raise TypeError("cannot pickle this text")


class UnpicklableTextEnv(CounterEnv):
    """An environment with observations of text. With index 1, that of the second step cannot be pickled."""

    def __init__(self, env_id: int) -> None:
        super().__init__(env_id, lengths=(50,))
        self.observation_space = spaces.Text(9)  # type: ignore[assignment]

    def reset(self, **kwargs: Any) -> Any:
        return "first", super().reset(**kwargs)[1]

    def step(self, action: Any) -> Any:
        _, *results, _ = super().step(action)
        is_lost = (self.env_id, self.steps) == (1, 2)
        return UnpicklableText("lost") if is_lost else f"step {self.steps}", *results, {"lost": 1} if is_lost else {}


def test_row_keeps_its_last_observation_if_the_next_one_cannot_be_pickled(closes: Any) -> None:
    fns = [functools.partial(UnpicklableTextEnv, env_id) for env_id in range(2)]
    envs = closes(InProcessRayVectorEnv(fns, num_hosts=1, workers_per_host=0, batch_size=1))
    envs.reset(seed=1)
    envs.send([0] * 2)
    assert [envs.recv()[0] for _ in range(2)] == [("step 1",)] * 2
    envs.send([0] * 2, [0, 1])
    with pytest.raises(TypeError, match="cannot pickle this text"):
        envs.recv()
    observations, *_, infos = envs.recv()
    assert (observations, infos["env_id"].tolist()) == (("step 2",), [0])
    envs.send([0] * 2, [0, 1])
    for _ in range(2):
        observations, *_, infos = envs.recv()
        assert observations == ("step 3",)
        assert "lost" not in infos


class MisshapenObservationEnv(CounterEnv):
    """An environment that returns an observation of a wrong shape in each step."""

    def step(self, action: Any) -> Any:
        return np.zeros(99), *super().step(action)[1:]


def test_errors_of_vecenv_contain_the_global_env_index(closes: Any) -> None:
    envs = closes(InProcessRayVectorEnv([*counters(3), functools.partial(MisshapenObservationEnv, 3)]))
    envs.reset(seed=1)
    with pytest.raises(ObservationError, match=r"^env 3: observation: got shape"):
        envs.step([0] * 4)
    for call in (lambda: envs.step([0] * 4), lambda: envs.save([3])):
        with pytest.raises(EnvFailed, match=r"^env 3 failed earlier.* first: ObservationError: env 3: "):
            call()
    with pytest.raises(EnvFailed, match=r"^env 3 failed earlier"):
        envs.get_attr("steps")


class ArmBreaksEnv(CounterEnv):
    """An environment that raises an exception with an index of its own in each step."""

    def step(self, action: Any) -> Any:
        raise ValueError("arm of env 0 is broken")


def test_log_lines_of_an_actor_contain_the_global_env_index(
    closes: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    main, logger = sys.modules["__main__"], logging.getLogger("vecenv")
    for name in ("__file__", "__spec__"):  # the actor changes them
        monkeypatch.setattr(main, name, None, raising=False)
    monkeypatch.setattr(logger, "filters", [])
    fns = [*counters(3), functools.partial(ArmBreaksEnv, 3)]
    envs = closes(InProcessRayVectorEnv(fns, on_failure="restart"))
    actor = _HostActor(envs.cluster.host(1)._plan)
    assert actor.start().error is None
    closes(actor.envs)
    actor.envs.reset(seed=1)
    actor.envs.step([0, 0])
    logger.warning("envs %s have been stepping for %.0f s", "0-1, 3", 60)
    assert [re.sub(r", at .*", "", line) for line in caplog.messages] == [
        "vecenv restarts after a failure: env 3: ValueError: arm of env 0 is broken",
        "envs 2-3, 5 have been stepping for 60 s",
    ]


class MissingKeyEnv(CounterEnv):
    """An environment with pickled observations, which lack their key after action 1."""

    def __init__(self, env_id: int) -> None:
        super().__init__(env_id)
        self.observation_space = spaces.Dict(text=spaces.Text(5))  # type: ignore[assignment]

    def reset(self, **kwargs: Any) -> Any:
        return {"text": "abc"}, super().reset(**kwargs)[1]

    def step(self, action: Any) -> Any:
        return {} if action == 1 else {"text": "abc"}, *super().step(action)[1:]


def test_error_of_a_pickled_observation_has_the_global_env_index(closes: Any) -> None:
    for engine_class in (InProcessRayVectorEnv, vecenv.AsyncVectorEnv):
        envs: Any = closes(engine_class([functools.partial(MissingKeyEnv, i) for i in range(4)], context="fork"))
        envs.reset(seed=1)
        with pytest.raises(ObservationError, match=r"^env 3: ") as caught:
            envs.step([0, 0, 0, 1])
        assert caught.value.envs == (3,)  # type: ignore[attr-defined]


class SimulatorEnv(CounterEnv):
    """An environment with errors that mention "env 0" of its simulator, in the text and in a note."""

    def __init__(self, env_id: int, fails_in: str, error_class: type[BaseException] = ValueError) -> None:
        if fails_in == "init":
            raise RuntimeError("Env 0 of the simulator is locked")
        super().__init__(env_id)
        self.error_class = error_class

    def step(self, action: Any) -> Any:
        error = self.error_class("env 0 of the simulator broke")
        error.add_note("env 0 of the simulator, joint 1, during landing")
        raise error


@pytest.mark.parametrize("workers", [0, 1])
def test_numbers_in_an_environments_error_text_do_not_change(workers: int, closes: Any) -> None:
    options = {"workers_per_host": workers, "context": "fork"}
    for error_class, text in ((ValueError, r"^env 0 of the"), (SystemExit, r"env 3, .*: SystemExit: env 0 of the")):
        env_fns = [*counters(3), functools.partial(SimulatorEnv, 3, "step", error_class)]
        envs = closes(InProcessRayVectorEnv(env_fns, **options))
        envs.reset(seed=1)
        with pytest.raises((ValueError, EnvError), match=text) as info:
            envs.step([0] * 4)
        *own_notes, note = info.value.__notes__
        assert own_notes == ["env 0 of the simulator, joint 1, during landing"] * (error_class is ValueError)
        assert note.startswith("env 3, host 1 ")
    with pytest.raises(RuntimeError, match=r"^Env 0 of the simulator is locked"):
        InProcessRayVectorEnv([*counters(3), functools.partial(SimulatorEnv, 3, "init")], **options)


@pytest.mark.parametrize("when", ["idle", "step"])
def test_dead_host_is_named_and_restarted_by_reset(when: str) -> None:
    cluster = InProcessCluster()
    envs = InProcessRayVectorEnv(counters(4, lengths=(50,)), cluster)
    envs.reset(seed=1)
    if when == "idle":
        cluster.crash(1)
        envs.step_async(np.zeros(4, np.int64))
    else:
        envs.step_async(np.zeros(4, np.int64))
        cluster.crash(1)
    with pytest.raises(HostDied, match=r"host 1 .*envs 2-3, died") as info:
        envs.step_wait()
    assert info.value.envs == (2, 3)
    assert [cluster.executed.count((0, method)) for method in ("reset", "step")] == [1, 1], "a request was sent twice"
    with pytest.raises(EnvFailed):
        envs.step([0] * 4)
    observations, _ = envs.reset(seed=5)
    assert observations[:, 3].tolist() == [5, 6, 7, 8]
    assert envs.step([0] * 4)[0][:, 1].tolist() == [1] * 4
    envs.close()
    assert cluster.closed


class ClusterWithDeathsInReset(InProcessCluster):
    """A cluster that loses host 1 in each of the next ``deaths`` resets."""

    deaths = 0

    def submit(self, index: int, method: str, *args: Any) -> int:
        number = super().submit(index, method, *args)
        if (index, method) == (1, "reset") and self.deaths:
            self.deaths -= 1
            self.crash(1)
        return number


def test_reset_is_repeated_once_with_its_seeds_and_then_with_new_ones(closes: Any) -> None:
    cluster = ClusterWithDeathsInReset()
    envs = closes(InProcessRayVectorEnv(counters(4), cluster, on_failure="restart"))
    for deaths, seed, first_seeds in ((1, 5, [5, 6, 7, 8]), (2, 5, [5, 6]), (1, None, [-1, -1])):
        cluster.deaths = deaths
        seeds = envs.reset(seed=seed)[0][:, 3].tolist()
        assert seeds[: len(first_seeds)] == first_seeds
        assert not {-1, 7, 8}.intersection(seeds[len(first_seeds) :])


@pytest.mark.parametrize("mode", AutoresetMode)
def test_rows_of_a_dead_host_are_truncated_and_rebuilt(mode: AutoresetMode, closes: Any) -> None:
    cluster = InProcessCluster()
    envs = closes(InProcessRayVectorEnv(counters(4, lengths=(50,)), cluster, on_failure="restart", autoreset_mode=mode))
    envs.reset(seed=1)
    before = envs.step([0] * 4)[0]
    cluster.crash(0)
    observations, rewards, terminations, truncations, infos = envs.step([0] * 4)
    assert truncations.tolist() == [True, True, False, False]
    assert not terminations.any()
    assert rewards.tolist() == [0.0, 0.0, 2.002, 3.002]
    assert infos["restarted"].tolist() == [1, 1, 0, 0]
    assert_identical(infos["final_obs"][0], before[0])
    assert infos["_final_obs"].tolist() == [True, True, False, False]
    if mode is AutoresetMode.SAME_STEP:
        assert observations[:, 1].tolist() == [0, 0, 2, 2]
    else:
        assert_identical(observations[:2], before[:2])
    if mode is AutoresetMode.DISABLED:
        envs.reset(options={"reset_mask": truncations})
    following = envs.step([0] * 4)[0]
    assert following[:, 1].tolist() == ([0, 0, 3, 3] if mode is AutoresetMode.NEXT_STEP else [1, 1, 3, 3])
    assert envs.stats()["restarts"] == 1


@pytest.mark.parametrize("mode", AutoresetMode)
def test_lost_rows_continue_from_a_loaded_snapshot(mode: AutoresetMode, closes: Any) -> None:
    """One host dies, and the other one restarts an environment that raised."""
    cluster = InProcessCluster()
    envs = closes(InProcessRayVectorEnv(_make_fns_with_one_raising(3), cluster, on_failure="restart", autoreset_mode=mode))
    envs.reset(seed=1)
    envs.step([0] * 4)
    snapshots = envs.save(verify=False)
    envs.step([0] * 4)
    cluster.crash(0)
    *_, infos = envs.step([0] * 4)
    restarted = np.flatnonzero(infos["restarted"])
    assert restarted.tolist() == [0, 1, 3]
    assert envs.load([snapshots[row] for row in restarted], env_id=restarted)[:, 1].tolist() == [1, 1, 1]
    assert envs.step([0] * 4)[0][:, 1].tolist() == [2, 2, 4, 2]
    assert envs.stats()["restarts"] == 2


def test_start_timeout_may_be_infinite_or_less_than_a_second(closes: Any) -> None:
    options = vecenv.WorkerOptions(start_timeout=float("inf"))
    envs = closes(InProcessRayVectorEnv(counters(2), worker_options=options))
    assert envs.start_timeout == float("inf")
    envs.reset()
    cluster = MagicMock()
    Cluster.require_cores(cluster, 0.5)
    cluster._placement_group.wait.assert_called_once_with(1)


def test_restarts_stay_counted_if_their_host_is_lost(closes: Any) -> None:
    cluster = InProcessCluster()
    envs = closes(InProcessRayVectorEnv(_make_fns_with_one_raising(1), cluster, on_failure="restart"))
    envs.reset(seed=1)
    for _ in range(3):
        envs.step([0] * 4)
    assert envs.stats()["restarts"] == 1
    cluster.crash(0)
    envs.step([0] * 4)
    assert envs.stats()["restarts"] == 2
    assert "restarted=2" in repr(envs)
    assert envs.state_dict(verify=False)["counters"][2] == 2


def test_lost_row_ends_with_its_last_observation_after_a_reset_of_another_row(closes: Any) -> None:
    cluster = InProcessCluster()
    envs = closes(InProcessRayVectorEnv(counters(2, lengths=(9,)), cluster, num_hosts=1, on_failure="restart"))
    envs.reset(seed=1)
    last = envs.step([0, 0])[0]
    cluster.crash(0)
    with pytest.raises(HostDied):
        envs.call("render")
    observations, _ = envs.reset(options={"reset_mask": np.array([True, False])})
    assert_identical(observations[1], last[1])
    *_, infos = envs.step([0, 0])
    assert infos["_restarted"].tolist() == [False, True]
    assert_identical(infos["final_obs"][1], last[1])


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_snapshot_after_a_restart_of_a_host_continues_with_the_same_results(mode: AutoresetMode, closes: Any) -> None:
    cluster = InProcessCluster()
    envs = closes(InProcessRayVectorEnv(counters(2, lengths=(9,)), cluster, on_failure="restart", autoreset_mode=mode))
    envs.reset(seed=1)
    envs.step([0, 0])
    cluster.crash(1)
    last, *_, infos = envs.step([0, 0])
    assert infos["_restarted"].tolist() == [False, True]
    snapshots = pickle.loads(pickle.dumps(envs.save()))
    expected = [envs.step([0, 0]) for _ in range(3)]
    assert_identical(envs.load(snapshots), last)
    assert_identical([envs.step([0, 0]) for _ in range(3)], expected)


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_snapshot_after_a_restart_of_a_host_holds_episode_statistics_too(mode: AutoresetMode, closes: Any) -> None:
    cluster = InProcessCluster()
    inner = InProcessRayVectorEnv(counters(2, lengths=(3,)), cluster, on_failure="restart", autoreset_mode=mode)
    envs: Any = closes(RecordEpisodeStatistics(inner))
    envs.reset(seed=1)
    envs.step([0, 0])
    cluster.crash(1)
    last = envs.step([0, 0])[0]
    snapshots, snapshots_of_inner = envs.save(), inner.save()

    def play() -> Any:
        results = [envs.step([0, 0]) for _ in range(6)]
        lengths = [infos["episode"]["l"] for *_, infos in results if "episode" in infos]
        return [observations for observations, *_ in results], lengths

    expected = play()
    assert_identical(envs.load(snapshots), last)
    assert_identical(play(), expected)
    with pytest.warns(UserWarning, match="counts from here"):
        assert_identical(envs.load(snapshots_of_inner), last)


def test_dead_host_is_restarted_in_recv(closes: Any) -> None:
    cluster = InProcessCluster()
    envs = closes(InProcessRayVectorEnv(counters(4, lengths=(50,)), cluster, on_failure="restart", batch_size=2))
    envs.reset(seed=1)
    envs.send([0] * 4, range(4))
    cluster.crash(1)
    truncated = {}
    for _ in range(2):
        _, _, _, truncations, infos = envs.recv()
        truncated.update(zip(infos["env_id"].tolist(), truncations.tolist(), strict=True))
    assert truncated == {0: False, 1: False, 2: True, 3: True}


def test_stats_and_close_do_not_wait_for_a_dead_host() -> None:
    cluster = InProcessCluster()
    envs = InProcessRayVectorEnv(counters(4), cluster)
    envs.reset()
    cluster.crash(1)
    assert envs.stats()["resets"] == 4
    envs.close()
    assert cluster.closed


class ClusterInterruptedInClose(InProcessCluster):
    """A cluster that is interrupted once while its hosts close."""

    interrupted = False

    def collect(self, references: list[int], deadline: float | None, *, every: bool = False) -> list[tuple[int, Any]]:
        if self.calls[references[0]][1] == "close" and not self.interrupted:
            self.interrupted = True
            raise KeyboardInterrupt
        return super().collect(references, deadline, every=every)


def test_close_succeeds_after_an_interrupted_close() -> None:
    cluster = ClusterInterruptedInClose()
    envs = InProcessRayVectorEnv(counters(2), cluster)
    with pytest.raises(KeyboardInterrupt):
        envs.close()
    assert cluster.closed, "the interrupted close did not end the hosts"
    envs.close()
    assert envs.closed


def test_missing_cores_for_a_new_host_raise_at_once(closes: Any) -> None:
    cluster = InProcessCluster()
    envs = closes(InProcessRayVectorEnv(counters(4), cluster, on_failure="restart"))
    envs.reset()
    cluster.crash(0)
    cluster.has_free_cores = False
    with pytest.raises(ClusterError) as caught:
        envs.step([0] * 4)
    assert caught.value.envs == (0, 1)  # type: ignore[attr-defined]
    cluster.has_free_cores = True
    assert envs.step([0] * 4)[3].tolist()[:2] == [True, True]


def _build_if_licensed(license_file: Path, env_id: int) -> gymnasium.Env:
    if not license_file.exists():
        raise FileNotFoundError("no license")
    return CounterEnv(env_id, (50,))


def test_env_fn_that_raises_on_a_new_host_ends_the_step(tmp_path: Path, closes: Any) -> None:
    cluster, license_file = InProcessCluster(), tmp_path / "license"
    license_file.touch()
    fns = [functools.partial(_build_if_licensed, license_file, row) for row in range(4)]
    envs = closes(InProcessRayVectorEnv(fns, cluster, on_failure="restart"))
    envs.reset()
    cluster.crash(1)
    license_file.unlink()
    with pytest.raises(FileNotFoundError, match="no license") as caught:
        envs.step([0] * 4)
    assert caught.value.envs == (2, 3)  # type: ignore[attr-defined]
    with pytest.raises(FileNotFoundError, match="no license"):
        envs.step([0] * 4)
    license_file.touch()
    assert envs.step([0] * 4)[3].tolist() == [False, False, True, True]
    assert envs.stats()["restarts"] == 1


class ClusterWithTimeLimitInStart(InProcessCluster):
    """A cluster in which the program's time limit can expire while a new host starts."""

    expires = False

    def collect(self, references: list[int], deadline: float | None, *, every: bool = False) -> list[tuple[int, Any]]:
        if self.expires and self.calls[references[0]][1] == "start":
            self.expires = False
            signal.raise_signal(signal.SIGALRM)
        return super().collect(references, deadline, every=every)


def test_step_wait_continues_after_a_time_limit_during_the_start_of_a_host(closes: Any) -> None:
    def raise_timeout(number: int, frame: Any) -> None:
        raise TimeoutError("the program's time limit")

    cluster = ClusterWithTimeLimitInStart()
    envs = closes(InProcessRayVectorEnv(counters(4, lengths=(50,)), cluster, on_failure="restart"))
    envs.reset()
    cluster.crash(1)
    previous = signal.signal(signal.SIGALRM, raise_timeout)
    try:
        cluster.expires = True
        with pytest.raises(TimeoutError, match="time limit"):
            envs.step([0] * 4)
        assert envs.step_wait()[3].tolist() == [False, False, True, True]
    finally:
        signal.signal(signal.SIGALRM, previous)


def test_step_wait_can_be_repeated_after_a_timeout_of_a_host(closes: Any) -> None:
    cluster = InProcessCluster()
    envs = closes(InProcessRayVectorEnv(counters(4, lengths=(9,)), cluster))
    envs.reset()
    envs.step_async([0] * 4)
    cluster.paused = {1}
    for _ in range(2):
        with pytest.raises(StepTimeout, match="envs 2-3, host 1"):
            envs.step_wait(timeout=0.01)
    cluster.paused = set()
    assert envs.step_wait()[0][:, 1].tolist() == [1] * 4
    assert envs.step([0] * 4)[0][:, 1].tolist() == [2] * 4


@pytest.mark.long
def test_workers_of_each_host_have_their_own_variables(closes: Any) -> None:
    variables = vecenv.WorkerOptions(env={"VECENV_TEST_DEVICE": str})
    envs = closes(InProcessRayVectorEnv(counters(4), num_hosts=2, workers_per_host=2, worker_options=variables))
    devices = envs.exec_func(lambda env: os.environ.get("VECENV_TEST_DEVICE"))
    assert devices == ("0", "1", "0", "1")


def test_workers_of_each_host_run_on_the_chosen_cores(closes: Any) -> None:
    core = min(os.sched_getaffinity(0))
    options: Any = {"num_hosts": 1, "workers_per_host": 2, "context": "fork"}
    envs = closes(InProcessRayVectorEnv(counters(2), worker_options=vecenv.WorkerOptions(cores=[core, core]), **options))
    assert envs.exec_func(lambda env: os.sched_getaffinity(0)) == ({core}, {core})
    with pytest.raises(ValueError, match=r"WorkerOptions\(cores\) must be a list with the cores of 2 workers"):
        InProcessRayVectorEnv(counters(2), worker_options=vecenv.WorkerOptions(cores=[core]), **options)


@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [3]], ids=["of all hosts", "of one host"])
def test_load_of_a_snapshot_that_does_not_fit_changes_nothing(rows: list[int], closes: Any) -> None:
    envs = closes(InProcessRayVectorEnv(counters(4, lengths=(50,))))
    envs.reset(seed=1)
    snapshots = envs.save(verify=False)
    envs.step([0] * 4)
    wrong = snapshots[3].having(kind=replace(snapshots[3].row.kind, env_id="Other-v0"))
    with pytest.raises(vecenv.errors.SnapshotMismatch, match="does not fit: it is of Other-v0"):
        envs.load([*snapshots[:3], wrong][-len(rows) :], rows)
    assert envs.step([0] * 4)[0][:, 1].tolist() == [2] * 4
    assert envs.load(snapshots)[:, 1].tolist() == [0] * 4
    assert envs.step([0] * 4)[0][:, 1].tolist() == [1] * 4


class UnloadableEnv(CounterEnv):
    """An environment that raises in a load if ``cannot_load`` is set."""

    cannot_load = False

    def take_snapshot(self) -> Any:
        return self.steps

    def restore_snapshot(self, state: Any) -> None:
        if self.cannot_load:
            raise ValueError("this state cannot be loaded")
        self.steps = state


@pytest.mark.parametrize("on_failure", ["raise", "restart"])
def test_load_that_fails_on_one_host_fails_only_rows_that_are_not_loaded(on_failure: str, closes: Any) -> None:
    fns = [functools.partial(UnloadableEnv, row, (50,)) for row in range(4)]
    envs = closes(InProcessRayVectorEnv(fns, on_failure=on_failure))
    envs.reset(seed=1)
    snapshots = envs.save(verify=False)
    for _ in range(3):
        envs.step([0] * 4)
    envs.set_attr("cannot_load", [False, False, False, True])
    with pytest.raises(ValueError, match="cannot be loaded") as caught:
        envs.load(snapshots)
    assert caught.value.envs == (3,)  # type: ignore[attr-defined]
    assert "failed=[3]" in repr(envs)
    if on_failure == "raise":
        with pytest.raises(EnvFailed, match="env 3"):
            envs.step([0] * 4)
        envs.reset(options={"reset_mask": np.arange(4) == 3})
    observations, _, _, truncations, _ = envs.step([0] * 4)
    assert observations[:3, 1].tolist() == [1] * 3
    assert truncations.tolist() == [False, False, False, on_failure == "restart"]
    assert envs.stats()["restarts"] == (on_failure == "restart")


@pytest.mark.parametrize("on_failure", ["raise", "restart"])
def test_rows_of_an_interrupted_load_are_rebuilt(on_failure: str, closes: Any) -> None:
    cluster = InProcessCluster()
    envs = closes(InProcessRayVectorEnv(counters(4, lengths=(50,)), cluster, on_failure=on_failure))
    envs.reset(seed=1)
    if on_failure == "restart":
        cluster.crash(1)
        envs.step([0] * 4)  # the next step of rows 2 and 3 returns resets that are held
    snapshots, collect, interruptions = envs.save(verify=False), cluster.collect, [None, KeyboardInterrupt]

    def raise_or_collect(*arguments: Any, **options: Any) -> Any:
        if interruptions and (interruption := interruptions.pop(0)):
            raise interruption
        return collect(*arguments, **options)

    cluster.collect = raise_or_collect  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        envs.load(snapshots)
    with pytest.raises(EnvFailed, match="env 0: the load of its state was interrupted"):
        envs.save([0], verify=False)
    if on_failure == "raise":
        with pytest.raises(EnvFailed, match="the load of its state was interrupted"):
            envs.step([0] * 4)
        envs.reset()
    assert envs.step([0] * 4)[3].tolist() == [on_failure == "restart"] * 4
    assert not envs.step([0] * 4)[3].any()


@pytest.mark.parametrize("on_failure", ["raise", "restart"])
def test_failures_by_row_do_not_affect_other_rows(on_failure: str, closes: Any) -> None:
    """An environment raises in its third step, and a host dies in the fourth."""
    cluster = InProcessCluster()
    envs = closes(InProcessRayVectorEnv(_make_fns_with_one_raising(1), cluster, on_failure=on_failure, batch_size=1))
    envs.reset(seed=1)
    for step in range(4):
        if step == 3:
            cluster.crash(1)
        envs.send([0] * 4, range(4))
        rows, errors = [], []
        while envs.in_flight.size:
            try:
                rows.append(int(envs.recv()[4]["env_id"][0]))
            except (KeyError, HostDied) as error:
                errors.append(type(error))
        lost, expected_errors = [], []
        if on_failure == "raise" and step >= 2:
            lost, expected_errors = ([1], [KeyError]) if step == 2 else ([2, 3], [HostDied])
        assert sorted(rows) == [row for row in range(4) if row not in lost]
        assert errors == expected_errors
        if lost:
            envs.reset_async(env_id=lost)
            envs.recv(count=len(lost))
    assert envs.stats()["in_flight"] == 0
    assert envs.stats()["restarts"] == (0 if on_failure == "raise" else 2)


def test_interrupted_wait_can_be_repeated_or_dropped_by_a_reset(closes: Any) -> None:
    cluster = InProcessCluster()
    envs = closes(InProcessRayVectorEnv(counters(4, lengths=(50,)), cluster))
    envs.reset(seed=1)
    collect, interruptions = cluster.collect, [KeyboardInterrupt] * 2

    def raise_or_collect(*arguments: Any, **options: Any) -> Any:
        if interruptions:
            raise interruptions.pop()
        return collect(*arguments, **options)

    cluster.collect = raise_or_collect  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        envs.step([0] * 4)
    with pytest.raises(AlreadyPendingCallError):
        envs.step([0] * 4)
    with pytest.raises(KeyboardInterrupt):
        envs.step_wait()
    assert envs.step_wait()[0][:, 1].tolist() == [1] * 4
    interruptions.append(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        envs.step([0] * 4)
    assert envs.reset(seed=5)[0][:, 1].tolist() == [0] * 4
    interruptions.append(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        envs.call("pid")
    assert envs.step([0] * 4)[0][:, 1].tolist() == [1] * 4
    interruptions.append(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        envs.call("pid")
    assert envs.reset(options={"reset_mask": np.arange(4) == 2})[0][:, 1].tolist() == [1, 1, 0, 1]


def test_recv_during_a_step_names_step_wait(closes: Any) -> None:
    envs = closes(InProcessRayVectorEnv(counters(4)))
    envs.reset(seed=1)
    envs.step_async([0] * 4)
    with pytest.raises(AlreadyPendingCallError, match=r"Calling `recv` while .*`step_wait` fetches it"):
        envs.recv()
    envs.step_wait()


class TextEnv(CounterEnv):
    """An environment with pickled observations. Action 2 raises; action 3 returns an observation without keys."""

    def __init__(self, env_id: int) -> None:
        super().__init__(env_id)
        self.observation_space = spaces.Dict({"text": spaces.Text(9)})

    def _observe(self) -> Any:
        return {"text": "a"}

    def step(self, action: Any) -> Any:
        observation, *others = super().step(action)
        if action == 2:
            raise KeyError("nothing")
        return {} if action == 3 else observation, *others


@pytest.mark.parametrize("actions", [[0, 3, 3], [2, 3, 3]])
def test_errors_name_every_environment_with_an_observation_that_does_not_fit(actions: list[int], closes: Any) -> None:
    envs = closes(InProcessRayVectorEnv([functools.partial(TextEnv, row) for row in range(4)]))
    envs.reset(seed=1)
    envs.send([0, *actions], range(4))
    rows, failed = [], []
    while (count := len(envs.in_flight)) > 0:
        try:
            rows += envs.recv(count=count)[4]["env_id"].tolist()
        except (KeyError, ObservationError) as error:
            failed += error.envs  # type: ignore[union-attr]
    assert sorted(rows + failed) == list(range(4))
    misfits = {record.env: str(record.error) for record in envs.errors if isinstance(record.error, ObservationError)}
    assert sorted(misfits) == [2, 3]
    for row, text in misfits.items():
        assert f"env {row}: observation does not fit its space" in text
    assert [record.env for record in envs.errors if isinstance(record.error, KeyError)] == [1] * (actions[0] == 2)


class RaisingObserver(vecenv.Observer):
    def __init__(self, method: str = "on_result") -> None:
        self.error: Exception | None = None
        setattr(self, method, self.raise_error)

    def raise_error(self, *arguments: Any) -> None:
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize("error", [TypeError("a mistake"), OSError("a mistake")])
def test_reset_drops_a_result_for_which_an_observer_raises(error: Exception, closes: Any) -> None:
    envs = closes(InProcessRayVectorEnv(counters(2)))
    observer = RaisingObserver()
    envs.add_observer(observer)
    envs.reset(seed=5)
    observer.error = error
    with pytest.raises(type(error), match="a mistake"):
        envs.step([0, 0])
    observer.error = None
    assert envs.reset(seed=5)[0][:, 3].tolist() == [5, 6]


@pytest.mark.parametrize("fault", ["raises", "host dies", "host died before"])
def test_step_after_an_exception_in_on_reset_of_a_restart_continues(fault: str, closes: Any) -> None:
    cluster, observer = InProcessCluster(), RaisingObserver("on_reset")
    fns = _make_fns_with_one_raising(1, 2) if fault == "raises" else counters(2, lengths=(50,))
    envs = closes(InProcessRayVectorEnv(fns, cluster, on_failure="restart"))
    envs.add_observer(observer)
    envs.reset(seed=5)
    for _ in range(2):
        envs.step([0, 0])
    observer.error = OSError("the disk is full")
    if fault != "raises":
        cluster.crash(1)
    if fault == "host died before":
        with pytest.raises(HostDied):
            envs.call("render")
    with pytest.raises(OSError, match="the disk is full"):
        envs.step([0, 0])
    observer.error = None
    truncated = [envs.step([0, 0])[3].tolist() for _ in range(2)]
    assert truncated == [[False, fault != "raises"], [False, False]]


def test_infos_of_different_shapes_are_kept(closes: Any) -> None:
    fns = [info_env_fn([{"key": np.arange(length)}]) for length in (1, 2, 3)]
    envs = closes(InProcessRayVectorEnv(fns, num_hosts=2))
    envs.reset(seed=1)
    infos = envs.step(envs.action_space.sample())[4]
    assert [value.tolist() for value in infos["key"]] == [[0], [0, 1], [0, 1, 2]]
    assert infos["_key"].all()


# -- invalid options, spaces and functions ----------------------------------------------------------------------

INVALID_OPTIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"num_workers": 2}, TypeError, "workers_per_host"),
    ({"nosuch": 2}, TypeError, "no option 'nosuch'.*step_timeout"),
    ({"worker": print}, TypeError, "no option 'worker'"),
    (
        {"worker_options": vecenv.WorkerOptions(env={"A": 1}), "workers_per_host": 0},
        ValueError,
        "`worker_options` needs worker processes",
    ),
    ({"placement": "strict"}, ValueError, "'STRICT_SPREAD'"),
    ({"num_hosts": 0}, ValueError, r"`num_hosts` must be None or an int within 1\.\.3, got 0"),
    ({"num_hosts": 4}, ValueError, "within 1..3, got 4"),
    ({"num_hosts": None, "envs_per_host": 1.5}, ValueError, "`envs_per_host`"),
    ({"num_hosts": 2, "envs_per_host": 1}, ValueError, "need 3 hosts, not num_hosts=2"),
    ({"batch_size": 9}, ValueError, "`batch_size`"),
    ({"on_failure": "retry"}, ValueError, "`on_failure`"),
    ({"workers_per_host": -1}, ValueError, "`num_workers`"),
    ({"observation_mode": "similar"}, ValueError, "observation_mode"),
]


@pytest.mark.parametrize(("options", "error", "text"), INVALID_OPTIONS, ids=lambda value: str(value)[:30])
def test_invalid_options_raise_before_hosts_start(options: dict[str, Any], error: type[Exception], text: str) -> None:
    cluster = InProcessCluster()
    with pytest.raises(error, match=text):
        InProcessRayVectorEnv(counters(3), cluster, **options)
    assert not cluster.hosts


def test_empty_list_of_environments_raises() -> None:
    with pytest.raises(ValueError, match="at least one"):
        InProcessRayVectorEnv([])


def test_unpicklable_env_fn_is_named_before_hosts_start() -> None:
    fns = counters(3)
    frame = sys._getframe()  # cannot be pickled
    fns[2] = functools.partial(CounterEnv, frame)
    cluster = InProcessCluster()
    with pytest.raises(TypeError, match="frame") as info:
        InProcessRayVectorEnv(fns, cluster)
    assert any(text.startswith("env_fns[2]") for text in info.value.__notes__)
    assert not cluster.hosts
    del frame  # it refers to itself


@pytest.mark.parametrize("address", [None, "auto"])
def test_ray_address_is_checked_like_an_argument(monkeypatch: pytest.MonkeyPatch, address: str | None) -> None:
    ray = MagicMock()
    ray.util.get_node_ip_address.return_value = "127.0.0.1"
    monkeypatch.setenv("RAY_ADDRESS", "ray://example:10001")
    with pytest.raises(ValueError, match="address='ray://example:10001': Ray Client has no zero-copy reads"):
        _connect(ray, address)
    assert not ray.init.called
    monkeypatch.setenv("RAY_ADDRESS", "local")
    assert _connect(ray, address), "vecenv did not start the cluster"
    assert ray.init.call_args.kwargs["_node_ip_address"] == "127.0.0.1"


def test_error_without_ray_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: None)
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    with pytest.raises(ImportError, match=r"vecenv\[ray\]"):
        RayVectorEnv(counters(2))


def _raise_missing_file(env_id: int) -> gymnasium.Env:
    raise FileNotFoundError(f"no data for {env_id}")


def test_error_of_an_env_fn_on_its_host_is_raised_unchanged() -> None:
    cluster = InProcessCluster()
    with pytest.raises(FileNotFoundError, match="no data for 2") as info:
        InProcessRayVectorEnv([*counters(2), *(functools.partial(_raise_missing_file, row) for row in (2, 3))], cluster)
    assert any("host 1 (envs 2-3)" in note for note in info.value.__notes__)
    assert cluster.closed


def test_hosts_with_different_spaces_are_named() -> None:
    box = functools.partial(SpaceEnv, spaces.Box(0, 1, (2,)))
    large_box = functools.partial(SpaceEnv, spaces.Box(0, 1, (3,)))
    other_actions = functools.partial(SpaceEnv, spaces.Box(0, 1, (2,)), spaces.Discrete(9))
    for fns, text in (
        ([box, box, large_box, large_box], r"Env 2 has Box.*host 1"),
        ([box, box, other_actions, other_actions], r"Env 2 has Discrete.*host 1"),
        ([box, box, box, large_box], r"Env 3 has Box"),
    ):
        cluster = InProcessCluster()
        with pytest.raises(RuntimeError, match=text):
            InProcessRayVectorEnv(fns, cluster)
        assert cluster.closed


def test_function_shared_by_environments_is_sent_once(closes: Any) -> None:
    cluster = InProcessCluster()
    fn = functools.partial(CounterEnv, env_id=3)
    envs = closes(InProcessRayVectorEnv([fn] * 4, cluster))
    assert [len(host._plan.env_fns.functions) for host in cluster.hosts] == [1, 1]
    assert envs.get_attr("env_id") == (3,) * 4


def test_host_reserves_a_core_per_worker_and_one_more() -> None:
    cluster = InProcessCluster()
    InProcessRayVectorEnv(counters(3), cluster, workers_per_host=0).close()
    assert cluster.cpus == [1, 1]
    cluster.has_free_cores = False
    with pytest.raises(ClusterError):
        InProcessRayVectorEnv(counters(5), cluster, workers_per_host=2)
    assert cluster.cpus == [3, 3]


# -- number of copies ------------------------------------------------------------------------------------------


class EmptyInfosEnv(SpaceEnv):
    """An environment with empty infos."""

    def step(self, action: Any) -> Any:
        return *super().step(action)[:4], {}


@pytest.mark.parametrize("shape", [(2,), (96, 96, 2)], ids=["small", "large"])
def test_plain_step_makes_one_call_per_host_and_returns_one_object_or_arrays(shape: tuple[int, ...]) -> None:
    cluster = InProcessCluster()
    space = spaces.Box(0, 255, shape, np.uint8)
    fns = [functools.partial(EmptyInfosEnv, space, spaces.Box(0, 1, shape), env_id=i, lengths=(3,)) for i in range(8)]
    envs = InProcessRayVectorEnv(fns, cluster)
    assert_same_trajectory(envs, SyncVectorEnv(fns), 9, seed=1)
    replies = [cluster.done[number] for number, (_, method, _) in cluster.calls.items() if method == "step"]
    assert [type(reply) for reply in replies] == [bytes if shape == (2,) else tuple] * 18
    assert [len(pickle.loads(args)) for _, method, args in cluster.calls.values() if method == "step"] == [1] * 18
    assert cluster.executed.count((0, "step")) == 9
    envs.close()


def test_step_wait_can_be_repeated_after_an_interruption_while_results_are_stored(
    closes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = spaces.Box(0, 255, (2,), np.uint8)
    fns = [functools.partial(EmptyInfosEnv, space, spaces.Box(0, 1, (2,)), env_id=i) for i in range(4)]
    envs, sync = closes(InProcessRayVectorEnv(fns)), closes(SyncVectorEnv(fns))
    exchange, actions = envs._driver.exchange, np.zeros((4, 2), np.float32)
    for each in (envs, sync):
        each.reset(seed=1)
    for number in range(2):  # the number of hosts with results that are stored before
        write, replies = exchange._write, []

        def write_and_interrupt(reply: Any, write: Any = write, replies: Any = replies, number: int = number) -> None:
            write(reply)
            replies.append(reply)
            if len(replies) == number + 1:
                raise KeyboardInterrupt

        monkeypatch.setattr(exchange, "_write", write_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            envs.step(actions)
        monkeypatch.undo()
        assert_identical(envs.step_wait(), sync.step(actions))
    assert envs.stats()["steps"] == 8


def test_snapshots_can_be_exchanged_with_a_local_engine(closes: Any) -> None:
    env_fn = functools.partial(gymnasium.make, "CartPole-v1")
    on_hosts = closes(InProcessRayVectorEnv([env_fn] * 4))
    local: Any = closes(vecenv.AsyncVectorEnv([env_fn] * 4, num_workers=0))
    on_hosts.reset(seed=3)
    local.reset(seed=9)
    for number in range(20):
        on_hosts.step(np.array([0, 1, 1, 0]) ^ (number & 1))
    assert_identical(local.load(on_hosts.save()), on_hosts.observations.copy())
    for number in range(30):
        actions = np.array([1, 1, 0, 0]) ^ (number & 1)
        assert_identical(on_hosts.step(actions), local.step(actions))
    [third] = local.save([2])
    on_hosts.load(third, [0, 3])
    first, *_ = on_hosts.step(np.zeros(4, np.int64))
    assert_identical(first[0], first[3])
    with pytest.raises(vecenv.errors.SnapshotMismatch, match=r"the snapshot does not fit: .*made with"):
        on_hosts.load([third, third.having(kind=replace(third.row.kind, arguments=(("other", "1"),)))], [0, 3])


# -- the flight recorder ---------------------------------------------------------------------------------------------------


class SixthStepFaultEnv(CounterEnv):
    """An environment that raises or ends its process in its sixth step if its index is 3."""

    def __init__(self, fault: str, row: int) -> None:
        super().__init__(row)
        self.fault, self.row, self.step_count = fault, row, 0

    def step(self, action: Any) -> Any:
        self.step_count += 1
        if self.row == 3 and self.step_count == 6:
            if self.fault == "dies":
                os._exit(3)
            raise ValueError(f"row {self.row} broke")
        return super().step(action)


def _make_sixth_step_faults(fault: str) -> list[Any]:
    return [functools.partial(SixthStepFaultEnv, fault, row) for row in range(4)]


@pytest.mark.sampled("raise-dies")
@pytest.mark.parametrize("fault", ["raises", "dies"])
@pytest.mark.parametrize("on_failure", ["raise", "restart"])
def test_recordings_of_failures_on_hosts_are_written_by_the_caller(fault: str, on_failure: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"on_failure": on_failure, "record_failures": tmp_path}
    if fault == "dies":
        options["workers_per_host"] = 1
    envs = InProcessRayVectorEnv(_make_sixth_step_faults(fault), num_hosts=2, **options)
    with contextlib.closing(envs):
        envs.reset(seed=4)
        notes: list[str] = []
        for _ in range(8):
            try:
                envs.step(envs.action_space.sample())
            except (ValueError, WorkerDied) as error:
                notes = error.__notes__
                break
    file = next(tmp_path.glob("*-env3-*.vecenv"))
    assert on_failure == "restart" or any(str(tmp_path) in note for note in notes)
    assert replay(file).status == "happened again"


def test_record_of_a_row_on_a_host_can_be_replayed(tmp_path: Path) -> None:
    envs = InProcessRayVectorEnv(_make_sixth_step_faults("raises"), num_hosts=2, record_failures=tmp_path)
    with contextlib.closing(envs):
        envs.reset(seed=4)
        envs.step(envs.action_space.sample())
        assert envs.capabilities.recording
        path = envs.record(2, tmp_path / "row 2.vecenv")
    assert replay(path).text == "nothing had failed, and its one step matched the record"

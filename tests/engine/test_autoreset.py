"""Ends of episodes: the three autoreset modes, and the seeds and options of the next episode."""

from __future__ import annotations

import operator
import warnings
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from envs import (
    CounterEnv,
    Options,
    RaisingEnv,
    ReturningEnv,
    ReusingEnv,
    assert_matches_sync,
    counters,
    describe,
    open_engine,
    raises_and_warns,
    ready_engine,
)
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import vecenv
from vecenv.errors import EnvFailed, EpisodeOver, ObservationError

# --- the end of an episode in each of the three modes --------------------------------------------

ZEROS = np.zeros(4, dtype=np.float32)

EPISODES: dict[str, Options] = {
    "of one step": {"lengths": (1,)},
    "of one step, without infos": {"lengths": (1,), "infos": False},
    "of different lengths": {"lengths": (1, 3, 2)},
    "that are truncated": {"lengths": (2, 3), "truncates": True},
}


@pytest.mark.sampled(10)
@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize("kind", EPISODES)
def test_episodes_end_and_begin_as_in_sync_vector_env(
    engine: Options, shared_memory: bool, kind: str, mode: AutoresetMode
) -> None:
    """Each environment begins with another length, so that the episodes end at different steps."""
    lengths = EPISODES[kind]["lengths"]
    lengths_of_rows = [lengths[row % len(lengths) :] + lengths for row in range(3)]
    fns = [partial(CounterEnv, row, **EPISODES[kind] | {"lengths": lengths_of_rows[row]}) for row in range(3)]
    assert_matches_sync(fns, 12, autoreset_mode=mode, shared_memory=shared_memory, **engine)


def test_final_info_in_a_reset_info_replaces_the_info_of_the_last_step(engine: Options) -> None:
    def build() -> ReturningEnv:
        return ReturningEnv([(ZEROS, {"final_info": {"reset": 1}})], [(ZEROS + 1, 1.0, True, False, {"step": 2})])

    with ready_engine([build] * 2, autoreset_mode="SameStep", **engine) as envs:
        infos = envs.step([0, 0])[4]
        assert infos["final_info"]["reset"].tolist() == [1, 1]
        assert "step" not in infos["final_info"]


class FinalInfoEnv(ReusingEnv):
    """A :class:`ReusingEnv` with a ``final_info`` in the infos of its resets."""

    def reset(self, **kwargs: Any) -> Any:
        observation, info = super().reset(**kwargs)
        return observation, info | {"final_info": {"own": 1}}


def test_final_obs_is_unaffected_by_a_reset_with_final_info(engine: Options) -> None:
    with ready_engine([FinalInfoEnv] * 2, autoreset_mode="SameStep", **engine) as envs:
        envs.step([0, 0])
        infos = envs.step([0, 0])[4]
        assert infos["final_info"]["own"].tolist() == [1, 1]
        assert [observation[1] for observation in infos["final_obs"]] == [2, 2]


def test_final_observations_are_unchanged_by_later_episodes(engine: Options) -> None:
    with ready_engine(counters(2, lengths=(1,)), autoreset_mode="SameStep", **engine) as envs:
        first = envs.step([0, 0])[4]["final_obs"]
        copies = [array.copy() for array in first]
        for _ in range(3):
            envs.step([0, 0])
        np.testing.assert_array_equal(np.stack(first), np.stack(copies))
        first[0][:] = 0  # does not raise: wrappers may overwrite final observations


def test_final_observation_is_kept_if_the_env_reuses_its_array(engine: Options, shared_memory: bool) -> None:
    with ready_engine([ReusingEnv] * 2, autoreset_mode="SameStep", shared_memory=shared_memory, **engine) as envs:
        envs.step([0, 0])
        observations, _, _, _, infos = envs.step([0, 0])
        assert observations[:, 1:3].tolist() == [[0, 2], [0, 2]]
        assert [final[1:3].tolist() for final in infos["final_obs"]] == [[2, 1], [2, 1]]
        assert infos["final_info"]["steps"].tolist() == [2, 2]


def test_disabled_mode_never_resets_and_forwards_steps_after_the_end(engine: Options, shared_memory: bool) -> None:
    """Without workers, steps after the end raise instead, as in ``SyncVectorEnv``."""
    options = {"autoreset_mode": "Disabled", "shared_memory": shared_memory, **engine}
    with ready_engine(counters(2, lengths=(2,)), **options) as envs:
        for t in range(1, 5):
            if t > 2 and engine.get("num_workers") == 0:
                with pytest.raises(EpisodeOver, match="env 0 was stepped after the end of its episode"):
                    envs.step([0, 0])
                continue
            observations, _, terminations, _, infos = envs.step([0, 0])
            assert observations[:, 1:3].tolist() == [[t, 1], [t, 1]]
            assert terminations.tolist() == [t >= 2] * 2
            assert set(infos) == {"steps", "_steps"}


class InfoReusingEnv(gymnasium.Env[Any, Any]):
    """An environment that returns the same objects in every info. Its steps and resets overwrite their contents."""

    observation_space = action_space = spaces.Discrete(3)

    def __init__(self) -> None:
        self.array, self.inner = np.zeros(2), {"list": [0]}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        self.array[:], self.inner["list"][0] = 7.0, 7
        return 0, {"array": self.array, "inner": self.inner}

    def step(self, action: Any) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self.array[:], self.inner["list"][0] = 3.0, 3
        return 1, 0.0, bool(action), False, {"array": self.array, "inner": self.inner}


def test_final_info_is_unaffected_by_the_reset_in_the_same_step(engine: Options) -> None:
    with ready_engine([InfoReusingEnv] * 2, autoreset_mode=AutoresetMode.SAME_STEP, **engine) as envs:
        infos = envs.step([1, 0])[4]
        assert infos["final_info"]["array"][0].tolist() == [3.0, 3.0]
        assert infos["final_info"]["inner"]["list"][0] == [3]
        assert infos["array"].tolist() == [[7.0, 7.0], [3.0, 3.0]]


@pytest.mark.parametrize("kwargs", [{"num_workers": 0}, {"num_workers": 1, "env_threads": 2}], ids=str)
@pytest.mark.parametrize("mode", AutoresetMode)
def test_episode_end_follows_the_converted_flag(mode: AutoresetMode, kwargs: Options) -> None:
    """The list ``[[False]]`` is true in Python, but is converted to the flag ``False``."""
    steps = [(ZEROS + 1, 1.0, [[False]], False, {}), (ZEROS + 2, 1.0, np.array([True, False]), False, {})]
    with ready_engine([lambda: ReturningEnv([(ZEROS, {})], steps)], autoreset_mode=mode, **kwargs) as envs:
        observations, _, terminations, _, infos = envs.step([0])
        assert (observations[0, 0], terminations[0], infos) == (1.0, False, {})
        assert envs.get_attr("reset_count") == (1,)
        with pytest.raises(ObservationError, match=r"env 0: terminated: got ndarray array.*, expected one bool"):
            envs.step([0])


class UncopyableObject:
    """An object that can be pickled but not copied."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("cannot be copied")


@pytest.mark.parametrize("kwargs", [{"num_workers": 0}, {"num_workers": 1}, {"num_workers": 1, "env_threads": 2}], ids=str)
def test_objects_in_final_info_are_not_copied(kwargs: Options) -> None:
    uncopyable = UncopyableObject()
    step = (ZEROS, 1.0, True, False, {"alone": uncopyable, "in a list": [uncopyable]})
    with ready_engine([lambda: ReturningEnv([(ZEROS, {})], [step])] * 2, autoreset_mode="SameStep", **kwargs) as envs:
        infos = envs.step([0, 0])[4]["final_info"]
        assert [type(value) for value in infos["alone"]] == [UncopyableObject] * 2
        if kwargs["num_workers"] == 0:
            assert infos["alone"][0] is infos["in a list"][0][0] is uncopyable


# --- ``set_next_options``: seeds and options of the episodes that autoreset begins --------------


def get_reset_arguments(infos: dict[str, Any], row: int) -> Any:
    """Return a description of the arguments with which a row was reset, or ``None`` if it was not."""
    return infos["reset_kwargs"][row] if "reset_kwargs" in infos and infos["_reset_kwargs"][row] else None


def step_and_collect_resets(envs: Any, steps: int) -> list[list[Any]]:
    """Step all rows ``steps`` times, and return a list for each row: descriptions of the arguments of its resets."""
    resets: list[list[Any]] = [[] for _ in range(envs.num_envs)]
    for _ in range(steps):
        infos = envs.step(np.zeros(envs.num_envs, np.int64))[4]
        for row, row_resets in enumerate(resets):
            if (arguments := get_reset_arguments(infos, row)) is not None:
                row_resets.append(arguments)
    return resets


def describe_reset(options: Any, seed: int | None = None) -> str:
    """Describe the arguments of a reset as :func:`get_reset_arguments` does."""
    return describe({"seed": seed, "options": options})


NO_ARGUMENTS = describe({})


@pytest.mark.parametrize(("mode", "steps"), [("NextStep", 7), ("SameStep", 5)])
def test_next_options_apply_to_one_episode_of_each_row(engine: Options, mode: str, steps: int) -> None:
    with ready_engine(counters(3, lengths=(2,)), autoreset_mode=mode, **engine) as envs:
        options = [{"level": 1}, None, {"level": 3}]
        envs.set_next_options(options, seed=[None, 5, 6])
        options[0]["level"] = 99  # type: ignore[index] # has no effect: the options were copied
        first_resets = [describe_reset({"level": 1}), describe_reset(None, 5), describe_reset({"level": 3}, 6)]
        assert step_and_collect_resets(envs, steps) == [[first, NO_ARGUMENTS] for first in first_resets]


def test_next_options_dict_applies_to_all_and_int_seeds_are_consecutive(engine: Options) -> None:
    with ready_engine(counters(3, lengths=(2,)), **engine) as envs:
        envs.set_next_options({"level": 4}, seed=20)
        assert step_and_collect_resets(envs, 3) == [[describe_reset({"level": 4}, seed)] for seed in (20, 21, 22)]


def test_next_options_of_some_rows_leave_others_unchanged(engine: Options) -> None:
    with ready_engine(counters(3, lengths=(2,)), **engine) as envs:
        envs.set_next_options({"level": 1})
        envs.set_next_options([{"level": 2}, {"level": 0}], env_id=[2, 0])
        envs.reset(options={"level": "reset"})
        expected = [[describe_reset({"level": level})] for level in (0, 1, 2)]
        assert step_and_collect_resets(envs, 3) == expected, "reset() used the next options"
        envs.set_next_options({"level": 1})
        envs.set_next_options(env_id=[1])
        level_1 = describe_reset({"level": 1})
        assert step_and_collect_resets(envs, 3) == [[level_1], [NO_ARGUMENTS], [level_1]]


def test_next_options_apply_to_episodes_of_send_and_recv(engine: Options) -> None:
    with ready_engine(counters(2, lengths=(1,)), **engine) as envs:
        envs.set_next_options([{"level": 0}, {"level": 1}])
        for _ in range(2):
            envs.send(np.zeros(1, np.int64), [1])
            infos = envs.recv(count=1)[4]
        assert get_reset_arguments(infos, 0) == describe_reset({"level": 1})


class GoalEnv(gymnasium.Env[Any, Any]):
    """An environment that takes its goal, the first observation of an episode, out of the options. Each step ends one."""

    observation_space = action_space = spaces.Discrete(10)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        return (options or {"goals": [0]})["goals"].pop(), {}

    def step(self, action: Any) -> tuple[int, float, bool, bool, dict[str, Any]]:
        return 9, 0.0, True, False, {}


@pytest.mark.parametrize("kwargs", [{"num_workers": 0}, {"num_workers": 1}, {"num_workers": 2}], ids=str)
def test_options_are_not_shared_with_the_program_or_between_envs(kwargs: Options) -> None:
    options = {"goals": [1, 2, 3]}
    with ready_engine([GoalEnv] * 2, autoreset_mode="SameStep", **kwargs) as envs:
        assert envs.reset(options=options)[0].tolist() == [3, 3]
        assert envs.reset(options=[options, options])[0].tolist() == [3, 3]
        assert options == {"goals": [1, 2, 3]}
        envs.reset_async(options=options)
        options["goals"].append(4)
        assert envs.reset_wait()[0].tolist() == [3, 3]
        envs.set_next_options(options)
        options["goals"].append(5)
        assert envs.step([0, 0])[0].tolist() == [4, 4]
        assert options == {"goals": [1, 2, 3, 4, 5]}
        uncopyable = {"goals": [1], "object": UncopyableObject()}
        envs.reset(options={"reset_mask": np.array([True, False]), **uncopyable})  # does not raise


class RaisesForActionOne(gymnasium.Wrapper[Any, Any, Any, Any]):
    """An environment that raises for action 1."""

    def __init__(self) -> None:
        super().__init__(counters(1, lengths=(3,))[0]())

    def step(self, action: Any) -> Any:
        if action == 1:
            raise ArithmeticError("action 1")
        return super().step(action)


def test_failed_rows_drop_their_next_options(engine: Options) -> None:
    with ready_engine([RaisesForActionOne, counters(2, lengths=(3,))[1]], **engine) as envs:
        envs.set_next_options({"level": 1})
        with raises_and_warns(ArithmeticError):
            envs.step([1, 0])
        envs.reset(options={"reset_mask": np.array([True, False])})
        assert step_and_collect_resets(envs, 4) == [[describe_reset(None)], [describe_reset({"level": 1})]]


def test_next_options_reach_rows_in_the_worker_of_a_failed_row(engine: Options) -> None:
    with ready_engine([RaisesForActionOne, counters(2, lengths=(3,))[1]], **engine) as envs:
        with raises_and_warns(ArithmeticError):
            envs.step([1, 0])
        envs.set_next_options({"level": 1}, env_id=[1])
        with pytest.raises(EnvFailed, match="env 0"):
            envs.set_next_options({"level": 1}, env_id=[0])
        envs.reset(options={"reset_mask": np.array([True, False])})
        assert step_and_collect_resets(envs, 3)[1] == [describe_reset({"level": 1})]


def test_next_options_without_autoreset_raise() -> None:
    with (
        open_engine(counters(2), autoreset_mode="Disabled", num_workers=0) as envs,
        pytest.raises(ValueError, match="autoreset_mode=DISABLED begins no episodes"),
    ):
        envs.set_next_options({"level": 1})


def test_load_restores_the_next_options_of_the_snapshot(engine: Options) -> None:
    with ready_engine(counters(3, lengths=(2,)), **engine) as envs:
        envs.set_next_options([{"level": 1}, None, None], seed=[None, 5, None])
        snapshots = envs.save()
        envs.set_next_options({"level": 9})
        envs.load(snapshots)
        saved = [[describe_reset({"level": 1})], [describe_reset(None, 5)], [NO_ARGUMENTS]]
        assert step_and_collect_resets(envs, 3) == saved


# --- disabled mode: environments that are stepped after the end of their episode ----------------

FINISHED_ENV_TEXT = "env 1 was stepped after the end of its episode"


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"num_workers": 1, "env_threads": 2}], ids=str)
def test_disabled_mode_executes_steps_of_a_finished_env_and_warns_once(options: dict[str, Any]) -> None:
    fns = [partial(CounterEnv, 0, lengths=(9,)), partial(CounterEnv, 1, lengths=(1,))]
    with ready_engine(fns, autoreset_mode="Disabled", **options) as envs:
        assert envs.step(np.zeros(2, int))[2].tolist() == [False, True]
        with pytest.warns(UserWarning, match=FINISHED_ENV_TEXT):
            envs.step(np.zeros(2, int))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            envs.step(np.zeros(2, int))
        assert envs.get_attr("steps") == (3, 3)


def test_disabled_mode_without_workers_refuses_steps_of_a_finished_env() -> None:
    fns = [partial(CounterEnv, 0, lengths=(9,)), partial(CounterEnv, 1, lengths=(2,))]
    reference: Any = SyncVectorEnv(fns, autoreset_mode="Disabled")
    with open_engine(fns, autoreset_mode="Disabled", num_workers=0) as envs:
        for vector_env in (envs, reference):
            vector_env.reset(seed=1)
            vector_env.step(np.zeros(2, int))
            ended = vector_env.step(np.zeros(2, int))[2]
            assert ended.tolist() == [False, True]
            for _ in range(2):
                with pytest.raises(AssertionError) as caught:
                    vector_env.step(np.zeros(2, int))
            vector_env.reset(options={"reset_mask": ended})
            assert vector_env.step(np.zeros(2, int))[2].tolist() == [False, False]
            vector_env.reset(seed=1)
            vector_env.step(np.zeros(2, int))
            if vector_env is envs:
                assert isinstance(caught.value, EpisodeOver)
                assert FINISHED_ENV_TEXT in str(caught.value)
    reference.close()


@pytest.mark.parametrize("by_row", [False, True])
def test_step_of_a_finished_env_raises_and_restarts_nothing(by_row: bool) -> None:
    fns = [partial(CounterEnv, 0, lengths=(1,)), partial(CounterEnv, 1, lengths=(9,))]
    with ready_engine(fns, autoreset_mode="Disabled", num_workers=0, on_failure="restart") as envs:
        envs.step([0, 0])
        before = envs.call("unwrapped")
        if by_row:
            envs.send([0, 0], [0, 1])
        else:
            envs.step_async([0, 0])
        with pytest.raises(EpisodeOver, match="env 0 was stepped after the end of its episode"):
            envs.recv(count=2) if by_row else envs.step_wait()
        if by_row:
            assert envs.recv(count=1)[4]["env_id"].tolist() == [1]
        assert envs.stats()["restarts"] == 0
        assert all(map(operator.is_, envs.call("unwrapped"), before))
        assert envs.call("steps") == (1, 2)


@pytest.mark.parametrize("dies", [False, True])
def test_environment_that_fails_beside_the_step_of_a_finished_one_is_rebuilt_by_its_next_step(
    dies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vecenv.AsyncVectorEnv, "_refuses_finished", True)  # as in a replacement of `SyncVectorEnv`
    fns = [partial(CounterEnv, 0, lengths=(1,)), partial(RaisingEnv, 1, None if dies else ValueError("x"), at=2)]
    with ready_engine(fns, autoreset_mode="Disabled", num_workers=2, on_failure="restart") as envs:
        envs.step([0, 0])
        if dies:
            envs.processes[1].kill()
        with pytest.raises(EpisodeOver) as caught:
            envs.step([0, 0])
        assert caught.value.envs == (0, 1)  # type: ignore[attr-defined]
        assert not any("on_failure" in note for note in caught.value.__notes__)
        assert envs.stats()["restarts"] == 0
        envs.reset(options={"reset_mask": np.array([True, False])})
        assert envs.step([0, 0])[3].tolist() == [False, True]
        assert envs.stats()["restarts"] == 1


@pytest.mark.parametrize("num_workers", [0, 1])
def test_recv_raises_for_a_finished_env_and_then_returns_the_others(
    num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vecenv.AsyncVectorEnv, "_refuses_finished", True)  # as in a replacement of `SyncVectorEnv`
    fns = [partial(CounterEnv, k, lengths=(1 if k == 0 else 9,)) for k in range(3)]
    with open_engine(fns, autoreset_mode="Disabled", num_workers=num_workers) as envs:
        envs.reset(seed=1)
        envs.step([0] * 3)
        envs.send([0] * 3, [0, 1, 2])
        with pytest.raises(EpisodeOver, match="env 0 was stepped after the end of its episode"):
            envs.recv(count=2)
        observations, *_, infos = envs.recv(count=2)
        assert infos["env_id"].tolist() == [1, 2]
        assert observations[:, 1].tolist() == [2, 2]
        envs.reset(options={"reset_mask": np.array([True, False, False])})
        envs.send([0], [0])
        assert envs.recv(count=1)[0][:, 1:3].tolist() == [[1, 2]]


@pytest.mark.parametrize("num_workers", [1, 0])
def test_steps_of_a_finished_env_after_reset_or_load_do_not_warn(num_workers: int, recwarn: pytest.WarningsRecorder) -> None:
    with ready_engine([partial(CounterEnv, 0, lengths=(2,))], autoreset_mode="Disabled", num_workers=num_workers) as envs:
        (snapshot,) = envs.save(verify=False)
        mask = np.ones(1, bool)
        for begin_episode in (envs.reset, lambda: envs.load(snapshot), lambda: envs.reset(options={"reset_mask": mask})):
            envs.step(np.zeros(1, int))
            assert envs.step(np.zeros(1, int))[2].all()
            begin_episode()
        envs.step(np.zeros(1, int))
    # From Python 3.12 on, a fork warns if there are other threads, and pytest-timeout has one.
    texts = [str(warning.message) for warning in recwarn]
    assert [text for text in texts if "multi-threaded" not in text] == []


class InPlaceResultsEnv(gymnasium.Env[Any, Any]):
    """An environment of length 0 that returns the same reward and flag arrays in every step. Resets overwrite them."""

    observation_space, action_space = spaces.Box(-9, 9, (1,), np.float64), spaces.Discrete(2)

    def __init__(self) -> None:
        self.reward, self.done = np.zeros(()), np.zeros((), np.bool_)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.reward[...], self.done[...] = 0.0, False
        return np.zeros(1), {}

    def step(self, action: Any) -> Any:
        self.reward += 1.0
        self.done[...] = self.reward == 3.0
        return self.reward.reshape(1).copy(), self.reward, self.done, False, {}

    def __len__(self) -> int:
        return 0


@pytest.mark.parametrize("options", [{"num_workers": 0}, {"num_workers": 1}, {"num_workers": 1, "env_threads": 2}])
def test_same_step_reset_does_not_change_returned_values(options: dict[str, Any]) -> None:
    envs = vecenv.AsyncVectorEnv([InPlaceResultsEnv] * 2, autoreset_mode="SameStep", **options)
    envs.reset(seed=1)
    for step in range(1, 7):
        _, rewards, terminations, _, _ = envs.step([0, 0])
        assert rewards.tolist() == [(step - 1) % 3 + 1] * 2
        assert terminations.tolist() == [step % 3 == 0] * 2
    envs.close()


def test_env_with_len_0_is_built_only_once() -> None:
    built = []

    def build() -> Any:
        built.append(InPlaceResultsEnv())
        return built[-1]

    envs = vecenv.AsyncVectorEnv([build], num_workers=0, worker_options=vecenv.WorkerOptions(dummy_env=False))
    envs.reset(seed=1)
    envs.reset()
    envs.close()
    assert len(built) == 1

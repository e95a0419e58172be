"""``as_torchrl``: TorchRL's checks pass, transitions follow the physics, and all autoreset modes return the same data."""

from __future__ import annotations

import functools
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from client_envs import make_cartpole, make_full_env_fns
from dying_agents import DyingAgents, make_agent_rows
from envs import ReturningEnv, SpaceEnv, info_env_fn
from gymnasium import spaces

pytest.importorskip("torchrl", reason="needs TorchRL: pip install 'vecenv[clients]'")

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector, MultiSyncCollector
from torchrl.envs import GymWrapper, ParallelEnv, SerialEnv, TransformedEnv
from torchrl.envs.utils import check_env_specs

import vecenv
from vecenv.adapters import as_torchrl

MODES = ["NextStep", "SameStep", "Disabled"]
# without ("gymnasium", "SameStep"): SyncVectorEnv has no reset masks in same-step mode
BACKENDS_AND_MODES = [(backend, mode) for backend in ("serial", "envpool", "gymnasium") for mode in MODES]
BACKENDS_AND_MODES.remove(("gymnasium", "SameStep"))


def make_cartpoles(mode: str | None = "SameStep", limit: int = 23, backend: str = "serial", **options: Any) -> Any:
    """Build four CartPoles, which end when the pole falls or at the time limit."""
    if backend == "gymnasium":
        return as_torchrl(gym.vector.SyncVectorEnv([functools.partial(make_cartpole, limit)] * 4, autoreset_mode=mode))
    kwargs = {} if mode is None else {"autoreset_mode": mode}
    if backend == "process":
        kwargs |= {"num_workers": 2}
    if backend == "envpool":
        pytest.importorskip("envpool", reason="needs EnvPool: pip install 'vecenv[envpool]'")
    return as_torchrl("CartPole-v1", 4, backend, vector_kwargs=kwargs, max_episode_steps=limit, **options)


def random_rollout(env: Any, steps: int, seed: int = 3, **options: Any) -> Any:
    env.set_seed(seed)
    torch.manual_seed(0)
    return env.rollout(steps, break_when_any_done=False, **options)


def physics_error(before: Any, action: Any, after: Any) -> Any:
    """Return the largest difference between CartPole's next observation and the one from the equations of motion."""
    _, velocity, angle, spin = before.double().unbind(-1)
    force = torch.where(action.argmax(-1) == 1, 10.0, -10.0).double()
    temp = (force + 0.05 * spin**2 * angle.sin()) / 1.1
    spin_rate = (9.8 * angle.sin() - angle.cos() * temp) / (0.5 * (4 / 3 - 0.1 * angle.cos() ** 2 / 1.1))
    acceleration = temp - 0.05 * spin_rate * angle.cos() / 1.1
    rates = torch.stack([velocity, acceleration, spin, spin_rate], -1)
    return (after.double() - before.double() - 0.02 * rates).abs().amax(-1)


@pytest.mark.parametrize(("backend", "mode"), BACKENDS_AND_MODES)
def test_every_transition_follows_the_physics(backend: str, mode: str) -> None:
    env = make_cartpoles(mode, backend=backend)
    data = random_rollout(env, 50)
    over = data["next", "done"][..., 0]
    assert over.sum() > 4
    assert data["next", "truncated"].any()
    assert data["next", "terminated"].any()
    assert physics_error(data["observation"], data["action"], data["next", "observation"]).max() < 1e-6
    first_observations = data["observation"][:, 1:][over[:, :-1]]
    assert first_observations.abs().max() <= 0.05
    continues = ~over[:, :-1]
    assert torch.equal(data["observation"][:, 1:][continues], data["next", "observation"][:, :-1][continues])
    env.close()


def test_tensors_have_a_device_only_if_one_is_given() -> None:
    for device in (None, torch.device("cpu")):
        env = make_cartpoles(device=device)
        data = random_rollout(env, 30)
        assert (env.device, data.device, data["next"].device) == (device, device, device)
        env.close()


def test_writing_into_returned_tensors_does_not_affect_later_steps() -> None:
    env, other = make_cartpoles(), make_cartpoles()
    for each in (env, other):
        each.set_seed(3)
    states = [each.reset() for each in (env, other)]
    for _ in range(60):
        stepped = []
        for each, state in zip((env, other), states, strict=True):
            state["action"] = torch.tensor([[0, 1]] * 4)
            stepped.append(each.step_and_maybe_reset(state))
        assert torch.equal(stepped[0][0]["next", "reward"], stepped[1][0]["next", "reward"])
        assert torch.equal(stepped[0][1]["observation"], stepped[1][1]["observation"])
        states = [after for _, after in stepped]
        for key in ("reward", "done", "terminated", "truncated"):  # only in the first environments
            stepped[0][0]["next", key].fill_(1)
    env.close()
    other.close()


@pytest.mark.parametrize("nested", [False, True], ids=["Box", "Dict"])
def test_rollout_equals_gym_wrapper_in_every_mode(nested: bool) -> None:
    def rollout(env: Any) -> Any:
        torch.manual_seed(0)
        return env.rollout(30, auto_reset=False, tensordict=env.reset(seed=3), break_when_any_done=False)

    def make_envs(mode: str) -> Any:
        return vecenv.AsyncVectorEnv(make_full_env_fns(4, nested=nested), num_workers=0, autoreset_mode=mode)

    theirs = GymWrapper(gym.vector.SyncVectorEnv(make_full_env_fns(4, nested=nested), autoreset_mode="Disabled"))
    expected = rollout(theirs)
    assert expected["next", "done"].sum() > 10
    for mode in MODES:
        env = as_torchrl(make_envs(mode))
        actual = rollout(env)
        keys = set(expected.keys(include_nested=True, leaves_only=True))
        assert keys == set(actual.keys(include_nested=True, leaves_only=True))
        for key in keys:
            assert torch.equal(actual[key], expected[key]), (mode, key)
        env.close()
    theirs.close()


@pytest.mark.parametrize("frame_skip", [1, 2])
def test_agents_that_die_at_different_times_have_correct_transitions_in_every_mode(frame_skip: int) -> None:
    data = {}
    for mode in MODES:
        env = as_torchrl(make_agent_rows(mode), frame_skip=frame_skip, infos=["life"])
        data[mode] = random_rollout(env, 30)
        for options in ({"break_when_all_done": True}, {}):  # the first leaves the rows of ended agents out of steps
            random_rollout(env, 20, **options)
        env.reset(env.rand_step(env.reset()).set("_reset", torch.arange(9) < 3))  # all agents of one environment
        with pytest.raises(ValueError, match="some rows of env 1 "):
            env.reset(env.reset().set("_reset", torch.arange(9) == 4))
        env.close()
    for actual in data.values():
        before, after, agents = actual["observation"], actual["next", "observation"], torch.arange(9) % 3 + 1
        lives = actual["next", "life"]
        is_alive = lives.ne(0)  # before the step
        ended = actual["next", "done"][..., 0]
        assert (ended & is_alive).sum() > 20
        time = before[..., 1] + torch.where(ended, (lives - before[..., 1]).clip(max=frame_skip), frame_skip)
        assert torch.equal(after[..., 0][is_alive], agents[:, None].expand(-1, 30)[is_alive].float())
        assert torch.equal(after[..., 1][is_alive], time[is_alive])
        assert not after[~is_alive].any()
        if frame_skip == 1:
            for key in ("observation", ("next", "observation"), ("next", "done"), ("next", "life"), ("next", "reward")):
                assert torch.equal(actual[key], data["SameStep"][key])


class DyingAgentsWithDiscreteSpace(DyingAgents):
    """A game in which agents observe their own number."""

    def observation_space(self, agent: int) -> spaces.Space[Any]:
        return spaces.Discrete(3, start=1)

    def _observe(self, agents: list[int]) -> Any:
        return {agent: np.int64(agent) for agent in agents}


@pytest.mark.parametrize("mode", MODES)
def test_padding_outside_a_discrete_space_has_no_entry_in_its_one_hot_vector(mode: str) -> None:
    games = vecenv.MultiAgentVecEnv([DyingAgentsWithDiscreteSpace] * 3, num_workers=0, autoreset_mode=mode)
    env = as_torchrl(games.flatten_agents(), infos=["life"])
    data = random_rollout(env, 30)["next"]
    expected = torch.eye(3, dtype=torch.int64).repeat(3, 1)[:, None] * data["life"].ne(0)[..., None]
    assert torch.equal(data["observation"], expected)
    assert data["life"].eq(0).any()
    env.close()


@pytest.mark.parametrize(("backend", "mode"), [("serial", "NextStep"), ("serial", "Disabled"), ("envpool", None)])
def test_check_env_specs_passes(backend: str, mode: str | None) -> None:
    env = make_cartpoles(mode, backend=backend)
    check_env_specs(env, break_when_any_done="both")
    env.close()


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_results_of_worker_processes_equal_those_of_one_process(mode: str) -> None:
    ours, serial = make_cartpoles(mode, backend="process"), make_cartpoles(mode)
    check_env_specs(ours)
    actual, expected = random_rollout(ours, 60), random_rollout(serial, 60)
    assert expected["next", "done"].sum() > 6
    assert torch.equal(actual["next", "observation"], expected["next", "observation"])
    actual, expected = (random_rollout(env, 30, break_when_all_done=True) for env in (ours, serial))
    assert torch.equal(actual["next", "observation"], expected["next", "observation"])
    ours.close()
    serial.close()


@pytest.mark.parametrize(("backend", "mode"), BACKENDS_AND_MODES)
def test_finished_rows_keep_their_observation_until_they_are_reset(backend: str, mode: str) -> None:
    env = make_cartpoles(mode, backend=backend)
    env.set_seed(1)
    state = env.reset()
    for _ in range(23):
        last = env.step(state.set("action", torch.tensor([[1, 0]] * 2 + [[0, 1], [1, 0]])))["next"]
        state = env.step_mdp(last.empty().set("next", last).set("action", state["action"]))
    assert last["done"].all()
    again = env.step(TensorDict({"action": env.action_spec.rand()}, [4]))["next"]
    assert torch.equal(again["observation"], last["observation"])
    assert torch.equal(again["terminated"], last["terminated"])
    assert not again["reward"].any()
    mask = torch.tensor([True, False, True, False]).unsqueeze(-1)
    partly_reset = env.reset(again.select("observation", "done", "terminated", "truncated").set("_reset", mask))
    assert partly_reset["done"][:, 0].tolist() == [False, True, False, True]
    assert torch.equal(partly_reset["observation"][1::2], last["observation"][1::2])
    assert partly_reset["observation"][::2].abs().max() <= 0.05
    after = env.step(partly_reset.set("action", env.action_spec.rand()))["next"]
    assert after["reward"][:, 0].tolist() == [1, 0, 1, 0]
    errors = physics_error(partly_reset["observation"], partly_reset["action"], after["observation"])
    assert errors[::2].max() < 1e-6
    env.close()


def test_rollout_with_break_when_all_done_continues_until_all_rows_are_over() -> None:
    for backend in ("serial", "gymnasium"):
        env = make_cartpoles("Disabled", backend=backend)
        data = random_rollout(env, 40, break_when_all_done=True)
        over = data["next", "done"][..., 0]
        assert over[:, -1].all()
        assert data.shape[1] <= 23
        assert (over[:, 1:] >= over[:, :-1]).all()
        env.close()


def test_step_mask_leaves_running_rows_unchanged_or_is_refused() -> None:
    env = make_cartpoles("NextStep")
    state = random_rollout(env, 3)[:, -1]["next"].exclude("reward")
    before = state["observation"].clone()
    state.set("action", env.action_spec.rand()).set("_step", torch.tensor([True, False, True, True]))
    after = env.step(state)["next"]
    assert torch.equal(after["observation"][1], before[1])
    assert after["reward"][:, 0].tolist() == [1, 0, 1, 1]
    env.close()
    env = make_cartpoles("Disabled", backend="gymnasium")
    env.reset()
    state = TensorDict({"action": env.action_spec.rand(), "_step": torch.tensor([True, False, True, True])}, [4])
    with pytest.raises(NotImplementedError, match=r"cannot leave out \[1\]"):
        env.step(state)
    env.close()


@pytest.mark.parametrize("backend", ["serial", "envpool"])
def test_reset_mask_resets_only_its_rows(backend: str) -> None:
    env = make_cartpoles(None, backend=backend)
    env.set_seed(5)
    first = env.step(TensorDict({"action": env.action_spec.rand()}, [4]))["next"]
    running = first.select("observation", "done", "terminated", "truncated")
    unchanged = env.reset(running.clone().set("_reset", torch.zeros(4, 1) > 0))
    assert torch.equal(unchanged["observation"], first["observation"])
    mask = torch.tensor([True, False, False, False]).unsqueeze(-1)
    reset = env.reset(running.set("_reset", mask))
    assert torch.equal(reset["observation"][1:], first["observation"][1:])
    assert not torch.equal(reset["observation"][0], first["observation"][0])
    env.close()


def test_reset_after_close_builds_new_environments_unless_existing_ones_were_passed() -> None:
    env = make_cartpoles(None)
    assert not env.is_closed
    before = random_rollout(env, 5)
    env.close()
    assert env.is_closed
    assert "closed" in repr(env)
    with pytest.raises(RuntimeError, match="already closed"):
        env.close()
    env.close(raise_if_closed=False)
    assert torch.equal(random_rollout(env, 5)["observation"], before["observation"])
    env.close()
    from_envs = as_torchrl(vecenv.make_vec("CartPole-v1", 2, "serial"))
    from_envs.close()
    with pytest.raises(gym.error.ClosedEnvironmentError, match="a function that builds"):
        from_envs.reset()
    from_function = as_torchrl(functools.partial(vecenv.make_vec, "CartPole-v1", 2, "serial"))
    from_function.close()
    from_function.reset()
    from_function.close()


def test_close_after_an_interrupted_close_closes_the_rest() -> None:
    class InterruptedVectorEnv(gym.vector.SyncVectorEnv):
        closings = 0

        def close_extras(self, **kwargs: Any) -> None:
            self.closings += 1
            if self.closings == 1:
                raise KeyboardInterrupt
            super().close_extras(**kwargs)

    envs = InterruptedVectorEnv([lambda: gym.make("CartPole-v1")])
    env = as_torchrl(envs)
    with pytest.raises(KeyboardInterrupt):
        env.close()
    env.close()
    assert envs.closed
    assert env.is_closed


def test_set_seed_and_seeded_resets_give_equal_observations() -> None:
    env = make_cartpoles(None)
    next_seed = env.set_seed(7)
    assert next_seed not in (None, 7)
    first, second = env.reset()["observation"], env.reset()["observation"]
    assert not torch.equal(first, second)
    assert torch.equal(env.reset(seed=7)["observation"], first)
    env.set_seed(8)
    assert torch.equal(env.reset()["observation"][:-1], first[1:])
    env.close()


class ActionEchoEnv(gym.Env[Any, Any]):
    """An environment that observes its last action. An observation and an info are called ``reward``, like TorchRL's key."""

    def __init__(self) -> None:
        box = spaces.Box(-2.0, 2.0, (2,), np.float32)
        dial = spaces.MultiDiscrete([2, 3], start=[1, 5])
        both = spaces.Tuple((spaces.Discrete(3, start=-1), box))
        self.action_space = spaces.Dict({"move": box, "dial": dial, "both": both})
        bits = spaces.MultiBinary(3)
        self.observation_space = spaces.Dict({"last": self.action_space, "reward": bits, "size": spaces.Discrete(4)})
        self.last: Any = None
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.last, self.steps = self.action_space.sample(), 0
        return self._observe(), {"lives": 3}

    def step(self, action: Any) -> Any:
        self.last, self.steps = action, self.steps + 1
        info = {"reward": 10.0 * self.steps, "lives": 3 - self.steps, "note": "text"}
        return self._observe(), 0.5, self.steps == 3, False, info

    def _observe(self) -> Any:
        return {"last": self.last, "reward": np.array([1, 0, 1], np.int8), "size": self.steps}


def test_bfloat16_actions_are_accepted() -> None:
    env_fn = functools.partial(SpaceEnv, spaces.Discrete(3), spaces.Box(-1, 1, (2,)))
    env = as_torchrl(env_fn, 2, "serial")
    data = env.step(env.reset().set("action", torch.ones(2, 2, dtype=torch.bfloat16)))
    assert data["next", "reward"].tolist() == [[1.0], [1.0]]
    env.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("categorical", [False, True])
def test_dict_and_tuple_spaces_are_converted(categorical: bool, mode: str) -> None:
    options: dict[str, Any] = {"categorical_action_encoding": categorical, "vector_kwargs": {"autoreset_mode": mode}}
    env = as_torchrl(ActionEchoEnv, 2, "serial", infos=True, **options)
    check_env_specs(env)
    data = random_rollout(env, 6)
    actions, observed = data["action"], data["next", "last"]
    for key in ("move", "dial", ("both", "0"), ("both", "1")):
        assert torch.equal(actions[key].float(), observed[key].float()), key
    assert actions["dial"].shape == (2, 6, 2 if categorical else 5)
    assert data["observation_reward"].tolist() == [[[1, 0, 1]] * 6] * 2
    assert data["next", "reward"].unique().tolist() == [0.5]
    assert data["next", "info_reward"].tolist() == [[10.0, 20.0, 30.0] * 2] * 2
    assert data["next", "lives"].tolist() == [[2, 1, 0] * 2] * 2
    assert data["lives"].tolist() == [[3, 2, 1] * 2] * 2
    env.close()
    env = as_torchrl(ActionEchoEnv, 2, "serial", infos=["lives"])
    assert "info_reward" not in env.observation_spec.keys()  # noqa: SIM118  (a Composite is not a mapping)
    env.close()
    with pytest.raises(ValueError, match=r"no numeric infos \['points'\]; they report \['lives', 'reward'\]"):
        as_torchrl(ActionEchoEnv, 2, "serial", infos=["points"])


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.uint64])
def test_unsigned_observations_are_refused_and_unsigned_infos_become_int64(dtype: Any) -> None:
    info = {"depth": np.full((2, 2), 9, dtype)}
    env = as_torchrl(ReturningEnv, 2, "serial", infos=["depth"], **constant_results(info))
    data = random_rollout(env, 6)["next", "depth"]
    assert data.dtype == torch.int64
    assert data.unique().tolist() == [9]
    env.close()
    with pytest.raises(NotImplementedError, match=r"TorchRL cannot use Box\(.*: convert it"):
        as_torchrl(functools.partial(SpaceEnv, spaces.Box(0, 9, (2,), dtype)), 2, "serial")


@pytest.mark.parametrize("other", [np.ones(3), {"left": 1.0}])
def test_infos_that_do_not_fit_their_column_are_zero(other: Any) -> None:
    infos = [{"force": value} for value in (np.full(2, 7.0), np.full(2, 8.0), other, np.full(2, 9.0))]
    env = as_torchrl(info_env_fn(infos, infos[:1]), 2, "serial", infos=["force"])
    data = random_rollout(env, 3)["next", "force"]
    assert data.tolist() == [[[8.0] * 2, [0.0] * 2, [9.0] * 2]] * 2
    env.close()


def constant_results(info: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of a ``ReturningEnv`` with episodes of one step and this info."""
    zeros = np.zeros(4, np.float32)
    return {"resets": [(zeros, info)], "steps": [(zeros, 1.0, True, False, info)]}


@pytest.mark.parametrize("mode", MODES)
def test_frame_skip_stops_at_the_end_of_an_episode(mode: str) -> None:
    single, skipping = make_cartpoles(mode, 20), make_cartpoles(mode, 20, frame_skip=3)
    single.set_seed(4)
    state = single.reset()
    actions = torch.nn.functional.one_hot(torch.randint(2, (7, 4), generator=torch.Generator().manual_seed(0)), 2)
    expected_steps = []
    for action in actions:
        total = torch.zeros(4, 1)
        for _ in range(3):
            state = single.step(state.set("action", action))["next"]
            total += state["reward"]
        expected_steps.append((total, state["observation"], state["done"]))
    assert expected_steps[-1][2].all()
    totals = torch.cat([total for total, *_ in expected_steps]).flatten().tolist()
    assert {1.0, 2.0} & set(totals), "no episode ended within a frame skip"
    skipping.set_seed(4)
    state = skipping.reset()
    for action, (total, observation, done) in zip(actions, expected_steps, strict=True):
        state = skipping.step(state.set("action", action))["next"]
        assert torch.equal(state["reward"], total)
        assert torch.equal(state["observation"], observation)
        assert torch.equal(state["done"], done)
    check_env_specs(skipping)
    single.close()
    skipping.close()


@pytest.mark.parametrize("mode", MODES)
def test_step_and_maybe_reset_equals_torchrls_own(mode: str) -> None:
    env = make_cartpoles(mode)
    actual = random_rollout(env, 40)
    expected = random_rollout(TransformedEnv(env), 40)  # uses TorchRL's own step_and_maybe_reset
    assert actual["next", "done"].sum() > 3
    for key in set(actual.keys(include_nested=True, leaves_only=True)):
        assert torch.equal(actual[key], expected[key]), key
    env.close()


def test_as_torchrl_accepts_envpools_pools_and_torchrls_arguments() -> None:
    envpool = pytest.importorskip("envpool", reason="needs EnvPool: pip install 'vecenv[envpool]'")
    pool = envpool.make("CartPole-v1", env_type="gymnasium", num_envs=3, seed=9)
    env = as_torchrl(pool)
    assert (env.env_name, env.lib) == ("CartPoleGymnasiumEnvPool", envpool)
    assert env.vector_env.np_random_seed == (9, 10, 11)
    first = env.reset()["observation"]
    assert pool._recv.__self__ is env.vector_env._driver.pool
    assert torch.equal(first, torch.from_numpy(vecenv.make_vec("CartPole-v1", 3, "envpool").reset(seed=9)[0]))
    check_env_specs(env)
    assert torch.equal(env.reset(seed=9)["observation"], first)  # a new pool of the same configuration
    env.close()
    env.reset()
    env.close()
    env = as_torchrl("ALE/Pong-v5", backend="envpool", num_workers=2)
    assert "Pong-v5" in repr(env)
    assert env.env_name == "Pong-v5"
    assert env.num_workers == 2
    assert env.batch_size == (2,)
    env.close()
    with pytest.raises(TypeError, match="num_threads"):
        as_torchrl("CartPole-v1", 2, "envpool", num_workers=2)
    with pytest.raises(TypeError, match=r"a pool built by envpool.make\(\)"):
        vecenv.backends.EnvPoolVectorEnv.over(gym.make("CartPole-v1"))


def test_invalid_arguments_are_refused() -> None:
    envs = vecenv.make_vec("CartPole-v1", 2, "serial")
    with pytest.raises(TypeError, match=r"is a vector environment or builds one: omit num_envs$"):
        as_torchrl(envs, 3)
    with pytest.raises(TypeError, match=r"builds one: omit num_workers$"):
        as_torchrl(envs, num_workers=2)
    with pytest.raises(ValueError, match="frame_skip"):
        as_torchrl(envs, frame_skip=0)
    with pytest.raises(ValueError, match="padding_done=False"):
        as_torchrl(make_agent_rows("NextStep", padding_done=False))
    envs.close()
    with pytest.raises(ValueError, match="`num_envs` must be a positive int, got 0"):
        as_torchrl("CartPole-v1", 0)
    with pytest.raises(TypeError, match="pass num_envs for a function"):
        as_torchrl(make_cartpole)
    envs = vecenv.make_vec("CartPole-v1", 2, "serial", vector_kwargs={"copy": False})
    with pytest.raises(ValueError, match="copy=True"):
        as_torchrl(envs)
    envs.close()
    pytest.importorskip("envpool", reason="needs EnvPool: pip install 'vecenv[envpool]'")
    for kwargs in ({"batch_size": 1}, {"batch_size": 1, "autoreset_mode": "Disabled"}):
        with pytest.raises(ValueError, match="batch_size"):
            as_torchrl(vecenv.make_vec("CartPole-v1", 2, "envpool", vector_kwargs=kwargs))


def act_towards_the_fall(observation: Any) -> Any:
    return torch.nn.functional.one_hot((observation[..., 2] > 0).long(), 2)


def test_collector_batches_equal_a_rollout() -> None:
    env = make_cartpoles(None)
    policy = TensorDictModule(act_towards_the_fall, in_keys=["observation"], out_keys=["action"])
    env.set_seed(3)
    expected = env.rollout(30, policy, break_when_any_done=False)
    env.set_seed(3)
    collector = Collector(env, policy, frames_per_batch=40, total_frames=120)
    actual = torch.cat([batch.clone() for batch in collector], 1)
    collector.shutdown()
    assert expected["next", "done"].any()
    for key in ("observation", ("next", "observation"), ("next", "reward"), ("next", "done")):
        assert torch.equal(actual[key], expected[key]), key


@pytest.mark.long
@pytest.mark.parametrize("batched_env_class", [SerialEnv, ParallelEnv])
def test_torchrls_batched_environments_accept_as_torchrl(batched_env_class: Any) -> None:
    make = functools.partial(as_torchrl, "CartPole-v1", 3, "serial", max_episode_steps=8)
    env = batched_env_class(2, make)
    check_env_specs(env)
    data = env.rollout(20, break_when_any_done=False)
    assert data.shape == (2, 3, 20)
    assert physics_error(data["observation"], data["action"], data["next", "observation"]).max() < 1e-6
    env.close()


@pytest.mark.long
@pytest.mark.timeout(240)
def test_collector_in_another_process_returns_all_frames() -> None:
    make = functools.partial(as_torchrl, "CartPole-v1", 3)  # the collector's process may not start workers
    collector = MultiSyncCollector([make], None, frames_per_batch=30, total_frames=60)
    assert [batch.numel() for batch in collector] == [30, 30]
    collector.shutdown()

"""Tests that snapshots of environments, wrappers and whole engines are exact, and tests of the verification."""

from __future__ import annotations

import functools
import importlib.util
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from operator import length_hint
from pathlib import Path
from typing import Any

import gymnasium
import kept_envs
import numpy as np
import pytest
from gymnasium import wrappers
from gymnasium.spaces import Box, Dict, Discrete
from gymnasium.wrappers import (
    AtariPreprocessing,
    FrameStackObservation,
    NormalizeObservation,
    RecordEpisodeStatistics,
    TimeLimit,
    TransformObservation,
)
from programs import python_output
from test_save_and_load import advance

import vecenv
from vecenv import state
from vecenv.errors import NotRestorable
from vecenv.state.capture import capture_state, prepare_restore
from vecenv.testing import assert_identical, assert_isolated, assert_restorable

# --- the verification finds and names inexact state, and accepts everything else -----------------

EXACT_ENVS = [
    kept_envs.CountingEnv, kept_envs.RandomConstructorEnv, kept_envs.GeneratorsEnv, kept_envs.EzPickledEnv,
    kept_envs.SnapshotMethodsEnv, kept_envs.ArraysEnv, kept_envs.SlotsEnv,
]  # fmt: skip
ERRORS = {
    kept_envs.ClassStateEnv: r"ClassStateEnv cannot be saved: .* continues differently: .*observations.*ClassStateEnv\.last",
    kept_envs.ModuleStateEnv: r"continues differently: .*kept_envs\._SHARED_COUNT",
    kept_envs.GlobalGeneratorEnv: r"continues differently: .*numpy's global generator",
    kept_envs.LibcGeneratorEnv: (
        r"LibcGeneratorEnv cannot be saved: loaded into another environment, it continues differently: "
        r".*step 0, observations"
    ),
    kept_envs.ClosureStateEnv: r"continues differently: .*ClosureStateEnv\.increment",
    kept_envs.GeneratorFrameEnv: r"GeneratorFrameEnv\.numbers \(generator\) cannot be saved",
    kept_envs.AddressEnv: r"AddressEnv cannot be saved: the reset of a scratch environment raised KeyError: \d+",
    kept_envs.MatrixInfoEnv: r"MatrixInfoEnv cannot be saved: its results cannot be compared: ValueError: The truth value",
    kept_envs.SocketEnv: (
        r"cannot be saved: SocketEnv\.connection \(socket\): the other end of a socket cannot be restored"
    ),
}


@pytest.mark.parametrize("env_fn", EXACT_ENVS)
def test_assert_restorable_accepts_exact_environments(env_fn: Callable[[], Any]) -> None:
    assert_restorable(env_fn)


@pytest.mark.parametrize("env_fn", ERRORS)
def test_assert_restorable_names_hidden_state(env_fn: Callable[[], Any]) -> None:
    with pytest.raises(NotRestorable, match=ERRORS[env_fn]):
        assert_restorable(env_fn)


@pytest.mark.long
def test_assert_restorable_finds_state_shown_in_one_step_of_ten() -> None:
    for seed in range(30):
        text = r"continues differently: (its RarelyVisibleStateEnv\.exchange is|.*step [01], observations)"
        with pytest.raises(NotRestorable, match=text):
            assert_restorable(kept_envs.RarelyVisibleStateEnv, seed=seed)


def partial_make(name: str) -> Callable[[], Any]:
    return functools.partial(gymnasium.make, name)


def make_wrapped_cartpole() -> Any:
    """Return CartPole under wrappers that have state."""
    env: Any = gymnasium.make("CartPole-v1")
    env = TransformObservation(env, lambda observation: observation * 2, env.observation_space)
    env = FrameStackObservation(NormalizeObservation(RecordEpisodeStatistics(env)), 3)
    return TimeLimit(env, 50)


@pytest.mark.parametrize(
    "env_fn", [make_wrapped_cartpole, *map(partial_make, ("Pendulum-v1", "Blackjack-v1", "FrozenLake-v1"))]
)
def test_assert_restorable_accepts_gymnasium_environments_and_wrappers(env_fn: Callable[[], Any]) -> None:
    assert_restorable(env_fn)


@pytest.mark.sampled("HalfCheetah-v5")
@pytest.mark.parametrize("name", ["Ant-v5", "HalfCheetah-v5"])
def test_mujoco_snapshots_contain_the_warm_start_of_the_solver(name: str) -> None:
    pytest.importorskip("mujoco")
    assert_restorable(partial_make(name))


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("jaxlib") is None, reason="needs JAX: pip install 'vecenv[jax]'")
def test_assert_restorable_accepts_jax_keys() -> None:
    program = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import kept_envs
from vecenv.testing import assert_restorable
assert_restorable(kept_envs.JaxKeysEnv)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)  # JAX starts threads that never end


def test_assert_restorable_does_not_change_global_generators() -> None:
    np.random.seed(3)
    random.seed(3)
    expected = np.random.RandomState(3).rand(), random.Random(3).random()
    with pytest.raises(NotRestorable):
        assert_restorable(kept_envs.GlobalGeneratorEnv)
    assert (np.random.rand(), random.random()) == expected


def test_assert_restorable_reports_an_error_of_a_second_constructor() -> None:
    built: list[Any] = []

    def build_once() -> Any:
        if built:
            raise OSError("the port is taken")
        built.append(kept_envs.CountingEnv())
        return built[0]

    with pytest.raises(NotRestorable, match=r"build_once.*the port is taken.*verify=False"):
        assert_restorable(build_once)


class RaiseInCloseEnv(kept_envs.CountingEnv):
    """An environment that counts calls of ``close`` of all instances, and raises in all but the first."""

    num_closed = 0

    def close(self) -> None:
        RaiseInCloseEnv.num_closed += 1
        if RaiseInCloseEnv.num_closed > 1:
            raise OSError("the port is busy")


@pytest.mark.parametrize(("check", "limit"), [(assert_restorable, 2), (assert_restorable, 9), (assert_isolated, 3)])
def test_scratch_environments_are_all_closed_after_an_error(check: Any, limit: int) -> None:
    num_built, RaiseInCloseEnv.num_closed = 0, 0

    def build() -> Any:
        nonlocal num_built
        if num_built == limit:
            raise OSError("no port is left")
        num_built += 1
        return RaiseInCloseEnv()

    with pytest.raises(OSError, match="the port is busy"):
        check(build)
    assert RaiseInCloseEnv.num_closed == num_built


def test_register_adds_a_codec_for_a_class() -> None:
    class Tape:
        __slots__ = ("numbers",)

        def __init__(self) -> None:
            self.numbers = iter(range(10**6))

    class TapeEnv(kept_envs.CountingEnv):
        def __init__(self) -> None:
            super().__init__()
            self.tape = Tape()

        def observation_offset(self, action: int) -> float:
            return next(self.tape.numbers)

    def restore(tape: Tape, position: int) -> None:
        tape.numbers = iter(range(position, 10**6))

    state.register(Tape, lambda tape: 10**6 - length_hint(tape.numbers), restore)
    assert_restorable(TapeEnv)


# --- popular environments, wrappers, games and simulators, in every autoreset mode ----------------

STEPS = 300
ROWS = 2
MODES = ("NextStep", "SameStep", "Disabled")
NORMALIZED = (
    "Pendulum-v1", "Ant-v5", "Humanoid-v5", "HalfCheetah-v5", "Hopper-v5", "Walker2d-v5", "Pusher-v5", "Reacher-v5",
)  # fmt: skip
LIMITED = ("CartPole-v1", "FrozenLake-v1", "Blackjack-v1", f"Taxi-v{4 if 'Taxi-v4' in gymnasium.registry else 3}")
ATARI = ("Pong", "Breakout", "SpaceInvaders", "Seaquest", "MsPacman")
GRIDS = ("MiniGrid-DoorKey-6x6-v0", "MiniGrid-Dynamic-Obstacles-5x5-v0")
BOXES = ("LunarLander-v3", "BipedalWalker-v3")


def has_packages(*packages: str) -> bool:
    return all(importlib.util.find_spec(package) is not None for package in packages)


def make_limited(name: str) -> Any:
    return TimeLimit(RecordEpisodeStatistics(gymnasium.make(name)), 90)


def make_normalized(name: str) -> Any:
    return FrameStackObservation(NormalizeObservation(make_limited(name)), 2)


def make_atari(name: str) -> Any:
    import ale_py

    gymnasium.register_envs(ale_py)
    env: Any = gymnasium.make(f"ALE/{name}-v5", frameskip=1, repeat_action_probability=0.25)
    env = FrameStackObservation(AtariPreprocessing(env, terminal_on_life_loss=True), 4)
    return TimeLimit(RecordEpisodeStatistics(env), 90)


def make_minigrid(name: str) -> Any:
    import minigrid
    from minigrid.wrappers import ImgObsWrapper

    gymnasium.register_envs(minigrid)
    return ImgObsWrapper(make_limited(name))


def make_tictactoe() -> Any:
    from pettingzoo.classic import tictactoe_v3

    return vecenv.multi_agent.from_aec(tictactoe_v3.env())


def make_spread() -> Any:
    from mpe2 import simple_spread_v3

    return simple_spread_v3.parallel_env(max_cycles=20)


def make_multi_agent(game: Callable[[], Any], mode: str, num_workers: int) -> Any:
    return vecenv.MultiAgentVecEnv([game] * ROWS, autoreset_mode=mode, num_workers=num_workers)


def make_async(env_fn: Callable[[], Any], mode: str, num_workers: int) -> Any:
    return vecenv.AsyncVectorEnv([env_fn] * ROWS, autoreset_mode=mode, num_workers=num_workers)


def make_jax(name: str, config: dict[str, Any], mode: str, num_workers: int) -> Any:
    from vecenv.backends import JaxVectorEnv

    return JaxVectorEnv(name, ROWS, autoreset_mode=mode, max_episode_steps=60, **config)


ENV_FNS: dict[str, Callable[[], Any]] = {
    **{name: functools.partial(make_limited, name) for name in LIMITED},
    **{
        name: functools.partial(make_normalized, name)
        for name in NORMALIZED
        if name == "Pendulum-v1" or has_packages("mujoco")
    },
    **{name: functools.partial(make_atari, name) for name in ATARI if has_packages("ale_py", "cv2")},
    **{name: functools.partial(make_minigrid, name) for name in GRIDS if has_packages("minigrid")},
}
GAMES = {
    **({"tictactoe": make_tictactoe} if has_packages("pettingzoo", "pygame") else {}),
    **({"simple_spread": make_spread} if has_packages("mpe2") else {}),
}
SIMULATORS: dict[str, tuple[str, dict[str, Any]]] = {
    **({"brax": ("inverted_pendulum", {"backend": "spring"})} if has_packages("brax") else {}),
    **(
        {"playground": ("CartpoleBalance", {"config_overrides": {"impl": "jax"}})}
        if has_packages("mujoco_playground")
        else {}
    ),
}
CASES: dict[str, Callable[[str, int], Any]] = {  # these functions take the autoreset mode and the number of workers
    **{name: functools.partial(make_async, env_fn) for name, env_fn in ENV_FNS.items()},
    **{name: functools.partial(make_multi_agent, game) for name, game in GAMES.items()},
    **{name: functools.partial(make_jax, *settings) for name, settings in SIMULATORS.items()},
}
LONG_TESTS = {"Hopper-v5": "SameStep", "Pong": "SameStep", "simple_spread": "NextStep"}
FOLDERS = [str(folder) for folder in Path(__file__).parents[:2]]  # those of this file and of the modules that it imports
CONTINUE_PROGRAM = """
import pickle, sys
sys.path[:0] = {folders!r}
from test_proof import continue_from_file
continue_from_file({path!r})
"""


def sample_actions(envs: Any, infos: Any) -> Any:
    """Return random actions, within the action masks if there are any."""
    if "action_mask" not in infos:
        return envs.action_space.sample()
    priorities = envs.action_space.np_random.random(infos["action_mask"].shape)
    return np.argmax(priorities * infos["action_mask"], axis=-1)


def get_latest_infos(results: Any) -> Any:
    """Return the infos of a step, updated with those of the reset after it, if there was one."""
    step, reset = results
    return step[4] if reset is None else {**step[4], **reset[1]}


def continue_from_file(path: str) -> None:
    """Load the snapshots of a file, step with its actions, and write the results. It runs in another interpreter."""
    with open(path, "rb") as file:
        name, mode, snapshots, actions = pickle.load(file)
    with closing(CASES[name](mode, 0)) as envs:
        envs.load(snapshots)
        results = [advance(envs, mode, step_actions) for step_actions in actions]
    with open(path + ".out", "wb") as file:
        pickle.dump(results, file)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("name", "mode", "steps"),
    [
        *(pytest.param(name, mode, 100, marks=pytest.mark.long) for name, mode in LONG_TESTS.items() if name in CASES),
        *(pytest.param(name, mode, STEPS, marks=pytest.mark.slow) for name in CASES for mode in MODES),
    ],
)
def test_loaded_snapshots_continue_exactly_in_other_processes(name: str, mode: str, steps: int, tmp_path: Any) -> None:
    make_engine = CASES[name]
    with (
        closing(make_engine(mode, 2)) as envs,
        closing(make_engine(mode, 0)) as in_process,
        closing(make_engine(mode, 1)) as one_worker,
    ):
        _, infos = envs.reset(seed=5)
        envs.action_space.seed(5)
        for _ in range(40):
            infos = get_latest_infos(advance(envs, mode, sample_actions(envs, infos)))
        snapshots = envs.save()
        in_process.load(snapshots)
        one_worker.reset(seed=1)
        one_worker.load(snapshots)
        actions, results = [], []
        for number in range(steps):
            actions.append(sample_actions(envs, infos))
            results.append(advance(envs, mode, actions[-1]))
            for loaded in (in_process, one_worker):
                assert_identical(advance(loaded, mode, actions[-1]), results[-1], f"step {number}")
            infos = get_latest_infos(results[-1])
        assert any((step[2] | step[3]).any() for step, _ in results)
    path = str(tmp_path / "snapshots")
    with open(path, "wb") as file:
        pickle.dump((name, mode, snapshots, actions), file)
    program = CONTINUE_PROGRAM.format(folders=FOLDERS, path=path)
    subprocess.run([sys.executable, "-c", program], check=True, timeout=900)
    with open(path + ".out", "rb") as file:
        assert_identical(pickle.load(file), results)


MAIN_PROGRAM = """
import dataclasses, enum, typing
import kept_envs, vecenv

@dataclasses.dataclass
class Position:
    at: int = 0

class Side(enum.Enum):
    LEFT = 0
    RIGHT = 1

class Pair(typing.NamedTuple):
    side: Side
    position: Position

class Counter:
    def __init__(self, count=0):
        self.numbers = iter_from(count)

def iter_from(count):
    for count in range(count, 10**9):
        yield count

def save(counter):
    count = next(counter.numbers)
    counter.numbers = iter_from(count)
    return count

vecenv.state.register(Counter, save, lambda counter, count: counter.__init__(count))

class MainEnv(kept_envs.CountingEnv):
    def __init__(self):
        super().__init__()
        self.counter = Counter()

    def reset(self, **options):
        self.pair, self.kind = Pair(Side.LEFT, Position()), Position
        return super().reset(**options)

    def observation_offset(self, action):
        self.pair.position.at += action
        self.pair = Pair(Side(action % 2), self.pair.position)
        return self.pair.position.at + (self.pair.side is Side.LEFT) + next(self.counter.numbers)

if __name__ == "__main__":
    envs, others = (vecenv.AsyncVectorEnv([MainEnv] * 2, context="forkserver") for _ in range(2))
    envs.reset(seed=1)
    envs.step([1, 2])
    others.load(envs.save())
    print((envs.step([2, 0])[0] == others.step([2, 0])[0]).all())
    envs.close()
    others.close()
"""


def test_classes_of_the_main_program_are_saved_in_workers_that_import_it(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(MAIN_PROGRAM)
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    assert python_output(program, PYTHONPATH=path) == "True\n"


BOX2D = [name for name in BOXES if has_packages("Box2D")]


@pytest.mark.parametrize("name", BOX2D or ["without Box2D"])
def test_save_of_box2d_environments_raises(name: str) -> None:
    if not BOX2D:  # another class with the same name replaces that of Box2D
        world = type("b2World", (), {"__module__": "Box2D.Box2D"})
        env_fn: Callable[[], Any] = functools.partial(make_env_with_world, world)
    else:
        env_fn = functools.partial(make_limited, name)
    with closing(vecenv.AsyncVectorEnv([env_fn], num_workers=0)) as envs:
        envs.reset(seed=0)
        with pytest.raises(NotRestorable, match=r"\.world \(b2World\): .*joint impulses"):
            envs.save(verify=False)


def make_env_with_world(world: type) -> Any:
    env = gymnasium.make("CartPole-v1")
    env.unwrapped.world = world()  # type: ignore[attr-defined]
    return env


# --- each of Gymnasium's wrappers is saved exactly. A wrapper that the table lacks fails its test --

Env = Any  # not gymnasium.Env[Any, Any], because wrappers have different type parameters


class RandomImageEnv(gymnasium.Env[Any, Any]):
    """An environment with an image that actions and random numbers change. An episode ends at random."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 0}  # noqa: RUF012 - with 0, HumanRendering does not wait
    observation_space = Box(0, 255, (12, 10, 3), np.uint8)
    render_mode = "rgb_array"

    def __init__(self, action_space: Any = None) -> None:
        self.action_space = action_space or Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.picture = self.np_random.integers(0, 256, (12, 10, 3), np.uint8)
        return self.picture.copy(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        change = int(np.sum(np.asarray(action, float) * 7))
        self.picture = self.picture + np.uint8(change % 256) + self.np_random.integers(0, 3, (12, 10, 3), np.uint8)
        return self.picture.copy(), float(self.picture.mean()), bool(self.np_random.random() < 0.03), False, {}

    def render(self) -> Any:
        return self.picture.copy()


class AttributesInInfos(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A wrapper that adds attributes of an environment to its infos, so that the verification compares them."""

    def __init__(self, env: Env, read: Callable[[Any], Any] = lambda env: env.render()) -> None:
        super().__init__(env)
        self.read = read

    def reset(self, **options: Any) -> Any:
        observation, info = self.env.reset(**options)
        return observation, {**info, "attributes": np.array(self.read(self.env))}

    def step(self, action: Any) -> Any:
        *step, info = self.env.step(action)
        return (*step, {**info, "attributes": np.array(self.read(self.env))})


def make_env_with_continuous_actions() -> Env:
    return RandomImageEnv(Box(-1, 1, (2,), np.float32))


def make_pendulum() -> Env:
    """Return an environment with a bounded vector as observation."""
    return gymnasium.make("Pendulum-v1", max_episode_steps=40)


def make_blackjack() -> Env:
    """Return an environment with tuples of numbers as observations, and short episodes."""
    return gymnasium.make("Blackjack-v1")


def make_dict_env() -> Env:
    """Return an environment with a dict of observations."""
    space = Dict({"one": Box(-1, 1, (3,)), "other": Box(-9, 9, (3,))})
    return wrappers.TransformObservation(make_pendulum(), lambda vector: {"one": vector, "other": vector * 2}, space)


def make_jax_env() -> Env:
    return gymnasium.make("phys2d/CartPole-v1", max_episode_steps=40)


def make_array_conversion() -> Env:
    import jax.numpy as jnp

    return wrappers.ArrayConversion(make_pendulum(), env_xp=np, target_xp=jnp)


def make_preprocessed_atari() -> Env:
    import ale_py

    gymnasium.register_envs(ale_py)
    return wrappers.AtariPreprocessing(gymnasium.make("ALE/Pong-v5", frameskip=1, max_episode_steps=60))


def make_video_recorder() -> Env:
    video = wrappers.RecordVideo(RandomImageEnv(), "videos", step_trigger=lambda step: step == 3, video_length=10**6, fps=30)

    def read_attributes(env: Any) -> Any:
        return env.step_id, env.episode_id, *(int(frame.sum()) for frame in env.recorded_frames)

    return AttributesInInfos(video, read_attributes)


WRAPPER_ENV_FNS: dict[str, Callable[[], Env]] = {
    "AddRenderObservation": lambda: wrappers.AddRenderObservation(RandomImageEnv(), render_only=False),
    "AddWhiteNoise": lambda: AttributesInInfos(wrappers.AddWhiteNoise(RandomImageEnv(), 0.3)),
    "ArrayConversion": make_array_conversion,
    "AtariPreprocessing": make_preprocessed_atari,
    "Autoreset": lambda: wrappers.Autoreset(wrappers.TimeLimit(RandomImageEnv(), 9)),
    "ClipAction": lambda: wrappers.ClipAction(make_pendulum()),
    "ClipReward": lambda: wrappers.ClipReward(make_pendulum(), -1, 0),
    "DelayObservation": lambda: wrappers.DelayObservation(make_pendulum(), 3),
    "DiscretizeAction": lambda: wrappers.DiscretizeAction(make_pendulum(), 5),
    "DiscretizeObservation": lambda: wrappers.DiscretizeObservation(make_pendulum(), 50, multidiscrete=True),
    "DtypeObservation": lambda: wrappers.DtypeObservation(make_pendulum(), np.float64),
    "FilterObservation": lambda: wrappers.FilterObservation(make_dict_env(), ["other"]),
    "FlattenObservation": lambda: wrappers.FlattenObservation(make_dict_env()),
    "FrameStackObservation": lambda: wrappers.FrameStackObservation(RandomImageEnv(), 4, padding_type="zero"),
    "GrayscaleObservation": lambda: wrappers.GrayscaleObservation(RandomImageEnv()),
    "HumanRendering": lambda: wrappers.HumanRendering(RandomImageEnv()),
    "JaxToNumpy": lambda: wrappers.JaxToNumpy(make_jax_env()),
    "JaxToTorch": lambda: wrappers.JaxToTorch(make_jax_env()),
    "MaxAndSkipObservation": lambda: wrappers.MaxAndSkipObservation(RandomImageEnv(), 3),
    "NormalizeObservation": lambda: wrappers.NormalizeObservation(make_pendulum()),
    "NormalizeReward": lambda: wrappers.NormalizeReward(make_pendulum()),
    "NumpyToTorch": lambda: wrappers.NumpyToTorch(make_pendulum()),
    "ObstructView": lambda: AttributesInInfos(wrappers.ObstructView(RandomImageEnv(), 0.3, 2)),
    "OrderEnforcing": lambda: wrappers.OrderEnforcing(RandomImageEnv()),
    "PassiveEnvChecker": lambda: wrappers.PassiveEnvChecker(RandomImageEnv()),
    "RecordEpisodeStatistics": lambda: wrappers.RecordEpisodeStatistics(make_blackjack(), buffer_length=5),
    "RecordVideo": make_video_recorder,
    "RenderCollection": lambda: AttributesInInfos(wrappers.RenderCollection(RandomImageEnv(), pop_frames=False)),
    "RepeatAction": lambda: wrappers.RepeatAction(RandomImageEnv(), 3),
    "RescaleAction": lambda: wrappers.RescaleAction(make_pendulum(), np.float32(-3), np.float32(5)),
    "RescaleObservation": lambda: wrappers.RescaleObservation(make_pendulum(), np.float32(0), np.float32(1)),
    "ReshapeObservation": lambda: wrappers.ReshapeObservation(RandomImageEnv(), (360,)),
    "ResizeObservation": lambda: wrappers.ResizeObservation(RandomImageEnv(), (5, 7)),
    "StickyAction": lambda: wrappers.StickyAction(make_env_with_continuous_actions(), 0.4, (1, 3)),
    "TimeAwareObservation": lambda: wrappers.TimeAwareObservation(make_pendulum(), normalize_time=True),
    "TimeLimit": lambda: wrappers.TimeLimit(RandomImageEnv(), 17),
    "TransformAction": lambda: wrappers.TransformAction(
        make_env_with_continuous_actions(), lambda action: action * 0.5, make_env_with_continuous_actions().action_space
    ),
    "TransformObservation": lambda: wrappers.TransformObservation(make_pendulum(), lambda vector: vector / 2, None),
    "TransformReward": lambda: wrappers.TransformReward(make_pendulum(), lambda reward: reward * 3),
}
REQUIRED_PACKAGES = {
    "ArrayConversion": ("jax", "array_api_compat"),
    "AtariPreprocessing": ("ale_py", "cv2"),
    "HumanRendering": ("pygame",),
    "JaxToNumpy": ("jax", "array_api_compat"),
    "JaxToTorch": ("jax", "torch", "array_api_compat"),
    "NumpyToTorch": ("torch", "array_api_compat"),
    "RecordVideo": ("moviepy",),
    "ResizeObservation": ("cv2",),
}
SLOW_WRAPPERS = {"ArrayConversion", "AtariPreprocessing", "HumanRendering", "JaxToNumpy", "JaxToTorch", "NumpyToTorch"}
WRAPPER_PROGRAM = """
import sys
sys.path[:0] = {folders!r}
from test_proof import WRAPPER_ENV_FNS
from vecenv.testing import assert_restorable
assert_restorable(WRAPPER_ENV_FNS[{name!r}])
"""


@pytest.mark.sampled(
    "DelayObservation",
    "FrameStackObservation",
    "NormalizeObservation",
    "StickyAction",
    "TimeLimit",
    "RecordEpisodeStatistics",
)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.long] if name in SLOW_WRAPPERS else [])
        for name in wrappers.__all__
        if name != "vector"  # a module
    ],
)
def test_assert_restorable_accepts_gymnasium_wrapper(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in REQUIRED_PACKAGES.get(name, ()):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{name} needs {package}")
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    monkeypatch.chdir(tmp_path)
    if {"jax", "torch", "pygame"} & set(REQUIRED_PACKAGES.get(name, ())):  # these packages start threads that never end
        program = WRAPPER_PROGRAM.format(folders=FOLDERS, name=name)
        subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
    else:
        assert_restorable(WRAPPER_ENV_FNS[name])


def test_loaded_autoreset_wrapper_resets_in_the_next_step() -> None:
    """The verification resets an environment after its last step, so it does not cover the flag of ``Autoreset``."""
    saved, target = WRAPPER_ENV_FNS["Autoreset"](), WRAPPER_ENV_FNS["Autoreset"]()
    saved.reset(seed=3)
    target.reset(seed=4)
    has_ended = False
    while not has_ended:
        _, _, terminated, truncated, _ = saved.step(1)
        has_ended = terminated or truncated
    state = capture_state(saved)
    expected = [saved.step(1) for _ in range(3)]
    prepare_restore(target, state)()
    assert_identical([target.step(1) for _ in range(3)], expected)
    for env in (saved, target):
        env.close()


OPTIMIZED_PROGRAM = """
import kept_envs
from vecenv.errors import NotRestorable
from vecenv.testing import assert_restorable

try:
    assert_restorable(kept_envs.ClassStateEnv)
except NotRestorable:
    print("refused")
"""


def test_python_without_assert_statements_verifies_snapshots() -> None:
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    assert python_output("-O", "-c", OPTIMIZED_PROGRAM, PYTHONPATH=path) == "refused\n"

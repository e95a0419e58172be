"""Exact snapshots and their proof: environments, wrappers, and whole engines."""

from __future__ import annotations

import functools
import importlib.util
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
from test_save_and_load import advanced

import vecenv
from vecenv import state
from vecenv.errors import NotRestorable
from vecenv.state.capture import capture_state, prepare_restore
from vecenv.testing import assert_identical, assert_isolated, assert_restorable

# --- The proof finds and names inexact state, and accepts the rest ------------------------------

EXACT = [kept_envs.Counts, kept_envs.Built, kept_envs.Generators, kept_envs.Stepwise, kept_envs.Offers, kept_envs.Arrays]
NAMED = {
    kept_envs.ByClass: r"ByClass cannot be saved: .* continues differently: .*observations.*ByClass\.last",
    kept_envs.ByModule: r"continues differently: .*kept_envs\._DRAWN",
    kept_envs.ByGlobalGenerator: r"continues differently: .*numpy's global generator",
    kept_envs.InC: r"InC cannot be saved: loaded into another environment, it continues differently: .*step 0, observations",
    kept_envs.InClosure: r"continues differently: .*InClosure\.tick",
    kept_envs.InFrame: r"InFrame\.numbers \(generator\) cannot be saved",
    kept_envs.OverSocket: r"cannot be saved: OverSocket\.line \(socket\): the other end of a socket cannot be restored",
}


@pytest.mark.parametrize("env_fn", EXACT)
def test_plain_python_is_exact(env_fn: Callable[[], Any]) -> None:
    assert_restorable(env_fn)


@pytest.mark.parametrize("env_fn", NAMED)
def test_hidden_state_is_found_and_named(env_fn: Callable[[], Any]) -> None:
    with pytest.raises(NotRestorable, match=NAMED[env_fn]):
        assert_restorable(env_fn)


@pytest.mark.long
def test_state_that_shows_in_one_step_of_ten_is_found() -> None:
    for seed in range(30):
        with pytest.raises(NotRestorable, match=r"continues differently: (its Sticky\.sticks is|.*step [01], observations)"):
            assert_restorable(kept_envs.Sticky, seed=seed)


def made(name: str) -> Callable[[], Any]:
    return functools.partial(gymnasium.make, name)


def wrapped() -> Any:
    """Build an environment with wrappers that have state."""
    env: Any = gymnasium.make("CartPole-v1")
    env = TransformObservation(env, lambda seen: seen * 2, env.observation_space)
    env = FrameStackObservation(NormalizeObservation(RecordEpisodeStatistics(env)), 3)
    return TimeLimit(env, 50)


@pytest.mark.parametrize("env_fn", [wrapped, *map(made, ("Pendulum-v1", "Blackjack-v1", "FrozenLake-v1"))])
def test_gymnasiums_environments_and_wrappers_are_exact(env_fn: Callable[[], Any]) -> None:
    assert_restorable(env_fn)


@pytest.mark.sampled("HalfCheetah-v5")
@pytest.mark.parametrize("name", ["Ant-v5", "HalfCheetah-v5"])
def test_physics_snapshots_contain_the_solvers_start(name: str) -> None:
    pytest.importorskip("mujoco")
    assert_restorable(made(name))


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("jaxlib") is None, reason="needs JAX: pip install 'vecenv[jax]'")
def test_jax_keys_are_saved_like_generators() -> None:
    program = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import kept_envs
from vecenv.testing import assert_restorable
assert_restorable(kept_envs.JaxKeys)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)  # JAX starts threads, which stay


def test_proof_does_not_change_shared_generators() -> None:
    np.random.seed(3)
    random.seed(3)
    wanted = np.random.RandomState(3).rand(), random.Random(3).random()
    with pytest.raises(NotRestorable):
        assert_restorable(kept_envs.ByGlobalGenerator)
    assert (np.random.rand(), random.random()) == wanted


def test_environment_that_cannot_be_rebuilt_is_reported() -> None:
    built: list[Any] = []

    def once() -> Any:
        if built:
            raise OSError("the port is taken")
        built.append(kept_envs.Counts())
        return built[0]

    with pytest.raises(NotRestorable, match=r"once.*the port is taken.*verify=False"):
        assert_restorable(once)


class RaisesInClose(kept_envs.Counts):
    """An environment with a ``close`` that counts, and raises after the first time."""

    num_closed = 0

    def close(self) -> None:
        RaisesInClose.num_closed += 1
        if RaisesInClose.num_closed > 1:
            raise OSError("the port is busy")


@pytest.mark.parametrize(("check", "limit"), [(assert_restorable, 2), (assert_restorable, 9), (assert_isolated, 3)])
def test_all_scratch_environments_are_closed(check: Any, limit: int) -> None:
    num_built, RaisesInClose.num_closed = 0, 0

    def build() -> Any:
        nonlocal num_built
        if num_built == limit:
            raise OSError("no port is left")
        num_built += 1
        return RaisesInClose()

    with pytest.raises(OSError, match="the port is busy"):
        check(build)
    assert RaisesInClose.num_closed == num_built


def test_a_codec_is_registered_in_one_line() -> None:
    class Tape:
        __slots__ = ("place",)

        def __init__(self) -> None:
            self.place = iter(range(10**6))

    class Taped(kept_envs.Counts):
        def __init__(self) -> None:
            super().__init__()
            self.tape = Tape()

        def more(self, action: int) -> float:
            return next(self.tape.place)

    def put(tape: Tape, at: int) -> None:
        tape.place = iter(range(at, 10**6))

    state.register(Tape, lambda tape: 10**6 - length_hint(tape.place), put)
    assert_restorable(Taped)


# --- The matrix: popular environments, wrappers, games and simulators, in every autoreset mode ----

STEPS = 300
ROWS = 2
MODES = ("NextStep", "SameStep", "Disabled")
VECTORS = ("Pendulum-v1", "Ant-v5", "Humanoid-v5", "HalfCheetah-v5", "Hopper-v5", "Walker2d-v5", "Pusher-v5", "Reacher-v5")
PLAIN = ("CartPole-v1", "FrozenLake-v1", "Blackjack-v1", f"Taxi-v{4 if 'Taxi-v4' in gymnasium.registry else 3}")
ATARI = ("Pong", "Breakout", "SpaceInvaders", "Seaquest", "MsPacman")
GRIDS = ("MiniGrid-DoorKey-6x6-v0", "MiniGrid-Dynamic-Obstacles-5x5-v0")
BOXES = ("LunarLander-v3", "BipedalWalker-v3")


def installed(*packages: str) -> bool:
    return all(importlib.util.find_spec(package) is not None for package in packages)


def plain(name: str) -> Any:
    return TimeLimit(RecordEpisodeStatistics(gymnasium.make(name)), 90)


def vector(name: str) -> Any:
    return FrameStackObservation(NormalizeObservation(plain(name)), 2)


def atari_game(name: str) -> Any:
    import ale_py

    gymnasium.register_envs(ale_py)
    env: Any = gymnasium.make(f"ALE/{name}-v5", frameskip=1, repeat_action_probability=0.25)
    env = FrameStackObservation(AtariPreprocessing(env, terminal_on_life_loss=True), 4)
    return TimeLimit(RecordEpisodeStatistics(env), 90)


def grid(name: str) -> Any:
    import minigrid
    from minigrid.wrappers import ImgObsWrapper

    gymnasium.register_envs(minigrid)
    return ImgObsWrapper(plain(name))


def tictactoe() -> Any:
    from pettingzoo.classic import tictactoe_v3

    return vecenv.multi_agent.from_aec(tictactoe_v3.env())


def spread() -> Any:
    from mpe2 import simple_spread_v3

    return simple_spread_v3.parallel_env(max_cycles=20)


def players(game: Callable[[], Any], mode: str, num_workers: int) -> Any:
    return vecenv.MultiAgentVecEnv([game] * ROWS, autoreset_mode=mode, num_workers=num_workers)


def processes(env_fn: Callable[[], Any], mode: str, num_workers: int) -> Any:
    return vecenv.AsyncVectorEnv([env_fn] * ROWS, autoreset_mode=mode, num_workers=num_workers)


def device(name: str, config: dict[str, Any], mode: str, num_workers: int) -> Any:
    from vecenv.backends import JaxVectorEnv

    return JaxVectorEnv(name, ROWS, autoreset_mode=mode, max_episode_steps=60, **config)


PYTHON: dict[str, Callable[[], Any]] = {
    **{name: functools.partial(plain, name) for name in PLAIN},
    **{name: functools.partial(vector, name) for name in VECTORS if name == "Pendulum-v1" or installed("mujoco")},
    **{name: functools.partial(atari_game, name) for name in ATARI if installed("ale_py", "cv2")},
    **{name: functools.partial(grid, name) for name in GRIDS if installed("minigrid")},
}
GAMES = {
    **({"tictactoe": tictactoe} if installed("pettingzoo", "pygame") else {}),
    **({"simple_spread": spread} if installed("mpe2") else {}),
}
DEVICES: dict[str, tuple[str, dict[str, Any]]] = {
    **({"brax": ("inverted_pendulum", {"backend": "spring"})} if installed("brax") else {}),
    **({"playground": ("CartpoleBalance", {"config_overrides": {"impl": "jax"}})} if installed("mujoco_playground") else {}),
}
CASES: dict[str, Callable[[str, int], Any]] = {  # builds a vector environment of a mode, with that many workers
    **{name: functools.partial(processes, env_fn) for name, env_fn in PYTHON.items()},
    **{name: functools.partial(players, game) for name, game in GAMES.items()},
    **{name: functools.partial(device, *settings) for name, settings in DEVICES.items()},
}
QUICK = {"Hopper-v5": "SameStep", "Pong": "SameStep", "simple_spread": "NextStep"}
ELSEWHERE = """
import pickle, sys
sys.path.insert(0, {folder!r})
from test_proof import run_elsewhere
run_elsewhere({path!r})
"""


def actions_for(envs: Any, infos: Any) -> Any:
    """Return random actions that are allowed."""
    if "action_mask" not in infos:
        return envs.action_space.sample()
    chance = envs.action_space.np_random.random(infos["action_mask"].shape)
    return np.argmax(chance * infos["action_mask"], axis=-1)


def latest_infos(results: Any) -> Any:
    """Return the infos of a step, with those of the reset after it."""
    step, again = results
    return step[4] if again is None else {**step[4], **again[1]}


def run_elsewhere(path: str) -> None:
    """Load and step in another interpreter; return its results."""
    with open(path, "rb") as file:
        name, mode, kept, actions = pickle.load(file)
    with closing(CASES[name](mode, 0)) as envs:
        envs.load(kept)
        results = [advanced(envs, mode, one) for one in actions]
    with open(path + ".out", "wb") as file:
        pickle.dump(results, file)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("name", "mode", "steps"),
    [
        *(pytest.param(name, mode, 100, marks=pytest.mark.long) for name, mode in QUICK.items() if name in CASES),
        *(pytest.param(name, mode, STEPS, marks=pytest.mark.slow) for name in CASES for mode in MODES),
    ],
)
def test_snapshot_continues_bit_for_bit_in_other_processes(
    name: str, mode: str, steps: int, tmp_path: Any
) -> None:
    make = CASES[name]
    with closing(make(mode, 2)) as envs, closing(make(mode, 0)) as here, closing(make(mode, 1)) as there:
        _, infos = envs.reset(seed=5)
        envs.action_space.seed(5)
        for _ in range(40):
            infos = latest_infos(advanced(envs, mode, actions_for(envs, infos)))
        kept = envs.save()
        here.load(kept)
        there.reset(seed=1)
        there.load(kept)
        actions, results = [], []
        for number in range(steps):
            actions.append(actions_for(envs, infos))
            results.append(advanced(envs, mode, actions[-1]))
            for other in (here, there):
                assert_identical(advanced(other, mode, actions[-1]), results[-1], f"step {number}")
            infos = latest_infos(results[-1])
        assert any((step[2] | step[3]).any() for step, _ in results)
    path = str(tmp_path / "kept")
    with open(path, "wb") as file:
        pickle.dump((name, mode, kept, actions), file)
    program = ELSEWHERE.format(folder=__file__.rpartition("/")[0], path=path)
    subprocess.run([sys.executable, "-c", program], check=True, timeout=900)
    with open(path + ".out", "rb") as file:
        assert_identical(pickle.load(file), results)


BOX2D = [name for name in BOXES if installed("Box2D")]


@pytest.mark.parametrize("name", BOX2D or ["no Box2D here"])
def test_inexact_environments_are_refused(name: str) -> None:
    if not BOX2D:  # then the refused class is one of the same name
        world = type("b2World", (), {"__module__": "Box2D.Box2D"})
        env_fn: Callable[[], Any] = functools.partial(with_world, world)
    else:
        env_fn = functools.partial(plain, name)
    with closing(vecenv.AsyncVectorEnv([env_fn], num_workers=0)) as envs:
        envs.reset(seed=0)
        with pytest.raises(NotRestorable, match=r"\.world \(b2World\): .*joint impulses"):
            envs.save(verify=False)


def with_world(world: type) -> Any:
    env = gymnasium.make("CartPole-v1")
    env.unwrapped.world = world()  # type: ignore[attr-defined]
    return env


# --- Each of Gymnasium's own wrappers is saved exactly. A wrapper without a row here is a failure

Env = Any  # gymnasium.Env[Any, Any], because each wrapper has type parameters of its own


class RandomImages(gymnasium.Env[Any, Any]):
    """An environment with an image that its actions and its generator change; an episode ends at random."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 0}  # noqa: RUF012 - as Gymnasium has it; 0: no waiting
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
    """A wrapper that adds other attributes of an environment to its infos, where the proof reads them."""

    def __init__(self, env: Env, look: Callable[[Any], Any] = lambda env: env.render()) -> None:
        super().__init__(env)
        self.look = look

    def reset(self, **options: Any) -> Any:
        seen, info = self.env.reset(**options)
        return seen, {**info, "shown": np.array(self.look(self.env))}

    def step(self, action: Any) -> Any:
        *step, info = self.env.step(action)
        return (*step, {**info, "shown": np.array(self.look(self.env))})


def continuous() -> Env:
    return RandomImages(Box(-1, 1, (2,), np.float32))


def numbers() -> Env:
    """Return an environment with a bounded vector."""
    return gymnasium.make("Pendulum-v1", max_episode_steps=40)


def cards() -> Env:
    """Return an environment with tuples of numbers, and short episodes."""
    return gymnasium.make("Blackjack-v1")


def named() -> Env:
    """Return an environment with a dict of observations."""
    space = Dict({"one": Box(-1, 1, (3,)), "other": Box(-9, 9, (3,))})
    return wrappers.TransformObservation(numbers(), lambda seen: {"one": seen, "other": seen * 2}, space)


def jax_env() -> Env:
    return gymnasium.make("phys2d/CartPole-v1", max_episode_steps=40)


def converted() -> Env:
    import jax.numpy as jnp

    return wrappers.ArrayConversion(numbers(), env_xp=np, target_xp=jnp)


def atari() -> Env:
    import ale_py

    gymnasium.register_envs(ale_py)
    return wrappers.AtariPreprocessing(gymnasium.make("ALE/Pong-v5", frameskip=1, max_episode_steps=60))


def recording() -> Env:
    video = wrappers.RecordVideo(RandomImages(), "videos", step_trigger=lambda step: step == 3, video_length=10**6, fps=30)
    def attributes(env: Any) -> Any:
        return env.step_id, env.episode_id, *(int(frame.sum()) for frame in env.recorded_frames)

    return AttributesInInfos(video, attributes)


TABLE: dict[str, Callable[[], Env]] = {
    "AddRenderObservation": lambda: wrappers.AddRenderObservation(RandomImages(), render_only=False),
    "AddWhiteNoise": lambda: AttributesInInfos(wrappers.AddWhiteNoise(RandomImages(), 0.3)),
    "ArrayConversion": converted,
    "AtariPreprocessing": atari,
    "Autoreset": lambda: wrappers.Autoreset(wrappers.TimeLimit(RandomImages(), 9)),
    "ClipAction": lambda: wrappers.ClipAction(numbers()),
    "ClipReward": lambda: wrappers.ClipReward(numbers(), -1, 0),
    "DelayObservation": lambda: wrappers.DelayObservation(numbers(), 3),
    "DiscretizeAction": lambda: wrappers.DiscretizeAction(numbers(), 5),
    "DiscretizeObservation": lambda: wrappers.DiscretizeObservation(numbers(), 50, multidiscrete=True),
    "DtypeObservation": lambda: wrappers.DtypeObservation(numbers(), np.float64),
    "FilterObservation": lambda: wrappers.FilterObservation(named(), ["other"]),
    "FlattenObservation": lambda: wrappers.FlattenObservation(named()),
    "FrameStackObservation": lambda: wrappers.FrameStackObservation(RandomImages(), 4, padding_type="zero"),
    "GrayscaleObservation": lambda: wrappers.GrayscaleObservation(RandomImages()),
    "HumanRendering": lambda: wrappers.HumanRendering(RandomImages()),
    "JaxToNumpy": lambda: wrappers.JaxToNumpy(jax_env()),
    "JaxToTorch": lambda: wrappers.JaxToTorch(jax_env()),
    "MaxAndSkipObservation": lambda: wrappers.MaxAndSkipObservation(RandomImages(), 3),
    "NormalizeObservation": lambda: wrappers.NormalizeObservation(numbers()),
    "NormalizeReward": lambda: wrappers.NormalizeReward(numbers()),
    "NumpyToTorch": lambda: wrappers.NumpyToTorch(numbers()),
    "ObstructView": lambda: AttributesInInfos(wrappers.ObstructView(RandomImages(), 0.3, 2)),
    "OrderEnforcing": lambda: wrappers.OrderEnforcing(RandomImages()),
    "PassiveEnvChecker": lambda: wrappers.PassiveEnvChecker(RandomImages()),
    "RecordEpisodeStatistics": lambda: wrappers.RecordEpisodeStatistics(cards(), buffer_length=5),
    "RecordVideo": recording,
    "RenderCollection": lambda: AttributesInInfos(wrappers.RenderCollection(RandomImages(), pop_frames=False)),
    "RepeatAction": lambda: wrappers.RepeatAction(RandomImages(), 3),
    "RescaleAction": lambda: wrappers.RescaleAction(numbers(), np.float32(-3), np.float32(5)),
    "RescaleObservation": lambda: wrappers.RescaleObservation(numbers(), np.float32(0), np.float32(1)),
    "ReshapeObservation": lambda: wrappers.ReshapeObservation(RandomImages(), (360,)),
    "ResizeObservation": lambda: wrappers.ResizeObservation(RandomImages(), (5, 7)),
    "StickyAction": lambda: wrappers.StickyAction(continuous(), 0.4, (1, 3)),
    "TimeAwareObservation": lambda: wrappers.TimeAwareObservation(numbers(), normalize_time=True),
    "TimeLimit": lambda: wrappers.TimeLimit(RandomImages(), 17),
    "TransformAction": lambda: wrappers.TransformAction(
        continuous(), lambda action: action * 0.5, continuous().action_space
    ),
    "TransformObservation": lambda: wrappers.TransformObservation(numbers(), lambda seen: seen / 2, None),
    "TransformReward": lambda: wrappers.TransformReward(numbers(), lambda reward: reward * 3),
}
NEEDS = {
    "ArrayConversion": ("jax", "array_api_compat"),
    "AtariPreprocessing": ("ale_py", "cv2"),
    "HumanRendering": ("pygame",),
    "JaxToNumpy": ("jax", "array_api_compat"),
    "JaxToTorch": ("jax", "torch", "array_api_compat"),
    "NumpyToTorch": ("torch", "array_api_compat"),
    "RecordVideo": ("moviepy",),
    "ResizeObservation": ("cv2",),
}
TAKES_SECONDS = {"ArrayConversion", "AtariPreprocessing", "HumanRendering", "JaxToNumpy", "JaxToTorch", "NumpyToTorch"}
ALONE = """
import sys
sys.path.insert(0, {folder!r})
from test_proof import TABLE
from vecenv.testing import assert_restorable
assert_restorable(TABLE[{name!r}])
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
        pytest.param(name, marks=[pytest.mark.long] if name in TAKES_SECONDS else [])
        for name in wrappers.__all__
        if name != "vector"  # a module
    ],
)
def test_each_wrapper_of_gymnasium_is_saved_exactly(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in NEEDS.get(name, ()):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{name} needs {package}")
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    monkeypatch.chdir(tmp_path)
    if {"jax", "torch", "pygame"} & set(NEEDS.get(name, ())):  # they start threads, which stay
        program = ALONE.format(folder=str(Path(__file__).parent), name=name)
        subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
    else:
        assert_restorable(TABLE[name])


def test_autoreset_is_due_after_a_load() -> None:
    """The proof resets finished environments, so it never meets the flag of Autoreset."""
    one, other = TABLE["Autoreset"](), TABLE["Autoreset"]()
    one.reset(seed=3)
    other.reset(seed=4)
    while not any(one.step(1)[2:4]):
        pass
    state = capture_state(one)
    wanted = [one.step(1) for _ in range(3)]
    prepare_restore(other, state)()
    assert_identical([other.step(1) for _ in range(3)], wanted)
    for env in (one, other):
        env.close()


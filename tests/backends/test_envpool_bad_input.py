"""Every call that ends the interpreter, or reads wrong memory, when made on raw EnvPool is an exception here."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

pytest.importorskip("envpool")

from gymnasium.error import UnregisteredEnv
from gymnasium.spaces import Box, Dict, Discrete

from vecenv.backends import EnvPoolVectorEnv
from vecenv.backends.envpool import task
from vecenv.backends.envpool.rows import ActionChecker

from .conftest import Make, zeros

# What ends the interpreter, or reads wrong memory, on raw EnvPool. What every backend has to refuse is in the contract.
INTEGERS = (np.int8, np.int16, np.int32, np.int64)
ACTIONS = [
    # task, actions for two environments, the error and what it says
    *(
        (task_id, np.array([0, wrong], dtype), ValueError, "envs [1]")
        for task_id, wrong in (
            ("CartPole-v1", 7), ("CartPole-v1", -1), ("Taxi-v3", 99), ("FrozenLake-v1", 9), ("MiniGrid-Empty-5x5-v0", 99)
        )
        for dtype in INTEGERS
    ),
    ("Pong-v5", [0, 99], ValueError, "from 0 to 5"),
    ("HighwayFast-v0", np.array([2**32, 0], np.uint64), ValueError, "envs [0]"),
    ("HighwayFast-v0", np.array([2**32, 0]), ValueError, "envs [0]"),
    ("HighwayFast-v0", np.array([2**64 - 1, 0], np.uint64), ValueError, "envs [0]"),
    ("Pendulum-v1", np.zeros((2, 3), np.float32), ValueError, "(2, 1)"),
    ("Ant-v4", np.zeros(2), ValueError, "(2, 8)"),
    *(
        ("CartPole-v1", np.array(wrong), TypeError, "must be integers")
        for wrong in ([0.0, 0.0], ["a", "a"], [None, None], [False, False], [0j, 0])
    ),
    ("CartPole-v1", [[0], [0, 1]], ValueError, "actions"),
    ("CartPole-v1", {"action": 0}, (ValueError, TypeError), "actions"),
    ("CartPole-v1", np.full(4, 9, np.int32)[::2], ValueError, "envs [0, 1]"),
    ("CartPole-v1", np.full(2, 9, ">i4"), ValueError, "envs [0, 1]"),
]


@pytest.mark.parametrize(("task_id", "actions", "error", "says"), ACTIONS)
def test_what_crashes_raw_envpool_is_an_exception(make: Make, task_id: str, actions: Any, error: Any, says: str) -> None:
    envs = make(2, task_id)
    envs.reset()
    for _ in range(2):  # also after a good step
        with pytest.raises(error, match=re.escape(says)):
            envs.step(actions)
        envs.step(envs.action_space.sample())


@pytest.mark.long
def test_integers_of_a_box_are_held_against_it(make: Make) -> None:
    envs = make(2, "BinPack-v2")
    envs.reset()
    high = envs.action_space.high  # type: ignore[attr-defined]
    for wrong, error, says in ((high + 1, ValueError, r"envs \[0, 1\]"), (high - high - 1, ValueError, "envs"),
                               (high * 0.5, TypeError, "integers")):  # fmt: skip
        with pytest.raises(error, match=says):
            envs.step(wrong)


def test_indices_beyond_32_bits_are_refused(make: Make) -> None:
    envs = make(batch_size=2)
    envs.reset()
    for wrong in (np.array([2**31], np.int64), np.array([2**32], np.uint64)):
        for call in (lambda ids: envs.send(zeros(1), ids), lambda ids: envs.reset_async(env_id=ids)):
            with pytest.raises(ValueError, match=r"0\.\.3"):
                call(wrong)


def test_actions_that_are_read_only_strided_or_of_the_other_byte_order_are_taken(make: Make) -> None:
    wide = np.zeros((8, 3), np.float32)
    wide.flags.writeable = False
    for envs, every in ((make(4, "Pendulum-v1"), (wide[::2, 1:2], np.zeros((4, 1), ">f8"))),
                        (make(), (np.zeros(8, np.int64)[::2], np.zeros(4, ">i4")))):  # fmt: skip
        envs.reset()
        for actions in every:
            envs.step(actions)


@pytest.mark.long
def test_a_pool_is_closed_while_environments_step(make: Make) -> None:
    for batch_size in (4, 2):
        envs = make(4, "Ant-v4", batch_size=batch_size)
        envs.reset()
        envs.send(np.zeros((4, 8)), np.arange(4))
        envs.close()


@pytest.mark.long
@pytest.mark.timeout(900)  # options are tried in processes of their own, which import EnvPool: seconds each, more under load
@pytest.mark.parametrize(
    ("task_id", "options", "says"),
    [
        *(("Pong-v5", {"noop_max": wrong}, "noop_max must be from 1 to 10000") for wrong in (0, -1, 2**31 - 1)),
        *(("Pong-v5", {"stack_num": wrong}, "stack_num must be from 1 to 256") for wrong in (0, -1)),
        ("Pong-v5", {"img_height": 0}, "img_height must be from 1 to 4096, got 0"),
        *(("Pong-v5", {"img_width": wrong}, "img_width must be from 1 to 4096") for wrong in (0, 10**6)),
        ("Pong-v5", {"frame_skip": 0}, "frame_skip must be from 1"),
        ("Pong-v5", {"repeat_action_probability": 1.5}, "from 0 to 1"),
        ("Pong-v5", {"repeat_action_probability": float("nan")}, "must be a number"),
        ("Pong-v5", {"task": "brakeout"}, "did you mean 'breakout'"),
        ("AcrobotSwingup-v1", {"task_name": "swim"}, "task_name"),
        ("MiniGrid-Empty-5x5-v0", {"env_name": ""}, "Accepted: "),
        ("HandReach-v0", {"hand_task": "x"}, "Accepted: manipulate, reach"),
        ("CartPole-v1", {"num_threads": 10**6}, "num_threads must be from 1 to 4096"),
        ("BabyAI-ActionObjDoor-v0", {"num_cols": 0}, "num_cols=0: a process that tried"),
        ("Go9x9-v1", {"board_size": 1}, "Check failed: size_ > 1"),
        ("Go9x9-v1", {"history_length": 0}, "history_length=0"),
        ("Exit-v0", {"policy_frequency": 0}, "policy_frequency=0"),
        ("AdroitHandDoor-v1", {"obs_dim": 5}, "Unexpected Adroit observation size"),
        ("Highway-v0", {"observation_vehicles_count": -1}, "a process that tried"),
    ],
    ids=str,
)
def test_options_that_end_raw_envpool_are_refused(task_id: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        EnvPoolVectorEnv(task_id, 1, **options)


@pytest.mark.long
def test_unusual_options_within_the_range_are_taken(make: Make) -> None:
    pong = make(1, "Pong-v5", noop_max=1, stack_num=1, img_height=1, img_width=100, frame_skip=1, task="pong")
    assert pong.observation_space.shape == (1, 1, 1, 100)
    for envs in (pong, make(1, "Highway-v0", vehicles_count=20), make(num_threads=16)):
        envs.reset()
        envs.step(envs.action_space.sample())


# --- what is refused at construction ------------------------------------------------------------


def test_an_unknown_task_names_close_ones() -> None:
    with pytest.raises(UnregisteredEnv, match=r"no task 'CartPole-v9': did you mean .*'CartPole-v1'"):
        EnvPoolVectorEnv("CartPole-v9")
    with pytest.raises(UnregisteredEnv, match="task_ids"):
        EnvPoolVectorEnv("qqqq")
    with pytest.raises(TypeError, match="string"):
        EnvPoolVectorEnv(7)  # type: ignore[arg-type]


def test_an_unknown_option_names_the_right_ones() -> None:
    with pytest.raises(TypeError, match=r"no option 'frameskip'. Did you mean 'frame_skip'\? Accepted keys:.*episodic_life"):
        EnvPoolVectorEnv("Pong-v5", frameskip=4)
    with pytest.raises(TypeError, match=r"'env_seed' cannot be set here: pass seed="):
        EnvPoolVectorEnv("Pong-v5", env_seed=[1])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"frame_skip": "four"}, "'Pong-v5'"), ({"stack_num": "four"}, "stack_num must be an integer"),
        ({"task": 3}, "task must be a string"), ({"max_num_players": 2}, "belongs to the task"),
    ],
)  # fmt: skip
def test_a_value_of_the_wrong_type_names_the_option(options: dict[str, Any], says: str) -> None:
    with pytest.raises(TypeError, match=says):
        EnvPoolVectorEnv("Pong-v5", 1, **options)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"num_envs": 0}, ValueError, "num_envs must be from 1"),
        ({"num_envs": 2.0}, TypeError, "num_envs must be an integer"),
        ({"num_envs": 6, "batch_size": 4}, ValueError, r"must divide num_envs=6 \(one of \[1, 2, 3, 6\]\), got 4"),
        ({"num_envs": 6, "batch_size": 12}, ValueError, "must divide"),
        ({"num_envs": 6, "batch_size": 0}, ValueError, "batch_size"),
        ({"num_threads": 0}, ValueError, "num_threads"),
        ({"num_threads": 1.5}, TypeError, "num_threads"),
        ({"max_episode_steps": 0}, ValueError, "max_episode_steps must be from 1"),
        ({"max_episode_steps": -1}, ValueError, "max_episode_steps must be from 1"),
        ({"render_mode": "human"}, ValueError, "'rgb_array' or None"),
        ({"autoreset_mode": "x"}, ValueError, "not a valid AutoresetMode"),
        ({"num_envs": 4, "batch_size": 2, "autoreset_mode": "SameStep"}, ValueError, "one batch"),
        ({"num_envs": 2, "seed": [1]}, ValueError, "num_envs=2 but got length=1"),
        ({"seed": -1}, ValueError, "must not be negative"),
        ({"seed": 1.5}, TypeError, "seed must be an integer"),
        ({"num_envs": 2, "seed": [1, "a"]}, TypeError, "seed of env 1"),
    ],
    ids=str,
)
def test_options_without_a_meaning_are_refused(options: dict[str, object], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        EnvPoolVectorEnv("CartPole-v1", **options)  # type: ignore[arg-type]


@pytest.mark.long
def test_without_envpool_the_error_says_what_to_install() -> None:
    program = """
import sys
sys.modules["envpool"] = None
from vecenv.backends import EnvPoolVectorEnv
try:
    EnvPoolVectorEnv("CartPole-v1")
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=250, check=True)
    assert "pip install 'vecenv[envpool]'" in done.stdout
    assert "Python 3.11 to 3.14" in done.stdout


def test_importing_the_backend_does_not_import_envpool() -> None:
    program = "import sys, vecenv.backends.envpool; print('envpool' in sys.modules, 'jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=250, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_task_ids_are_listed_by_family() -> None:
    assert "CartPole-v1" in EnvPoolVectorEnv.task_ids()
    assert "Pong-v5" in EnvPoolVectorEnv.task_ids("atari")
    assert set(EnvPoolVectorEnv.task_ids("mujoco.dmc")) < set(EnvPoolVectorEnv.task_ids("mujoco"))
    with pytest.raises(ValueError, match=r"no family 'mario'; it has atari, box2d"):
        EnvPoolVectorEnv.task_ids("mario")


# --- actions of spaces that no task of EnvPool 1.2.5 has -----------------------------------------


def test_dict_actions_are_checked_leaf_by_leaf() -> None:
    space = Dict({"go": Discrete(3, start=1), "arm": Dict({"push": Box(-1, 1, (2,), np.float32)})})
    check = ActionChecker(space, ["action.go", "action.arm.push"], [np.int32, np.float32])
    ids = np.arange(2, dtype=np.int32)
    actions = {"go": [1, 3], "arm": {"push": np.zeros((2, 2))}}
    go, push = check(actions, ids)
    assert (go.dtype, push.dtype) == (np.int32, np.float32)
    assert go.tolist() == [1, 3]
    with pytest.raises(ValueError, match=r"actions\['go'\] must be from 1 to 3; got \[0\] for envs \[1\]"):
        check({**actions, "go": [1, 0]}, ids)
    with pytest.raises(ValueError, match=r"actions\['arm.push'\]: got shape .*, wanted \(2, 2\)"):
        check({**actions, "arm": {"push": np.zeros(2)}}, ids)
    with pytest.raises(TypeError, match="no 'go'; they have"):
        check({"arm": actions["arm"]}, ids)
    with pytest.raises(TypeError, match="must be a dict"):
        check([1, 2], ids)
    assert [array.shape for array in check.dummy(3)] == [(3,), (3, 2)]
    assert check.dummy(1)[0].tolist() == [1]


def test_options_are_tried_once_and_common_ones_never(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    class Done:
        returncode, stdout, stderr = 0, b"survived", b""

    monkeypatch.setattr(task.subprocess, "run", lambda *_, **__: tried.append(1) or Done)
    task._trial.cache_clear()
    try:
        EnvPoolVectorEnv(
            "Pong-v5", 1, frame_skip=2, stack_num=2, noop_max=10, episodic_life=True, img_height=64, img_width=64
        )
        EnvPoolVectorEnv("FrozenLake-v1", 1, size=4)  # the default
        assert not tried
        for _ in range(2):
            EnvPoolVectorEnv("Ant-v4", 1, ctrl_cost_weight=0.25)
        assert tried == [1]
        EnvPoolVectorEnv("Ant-v4", 1, ctrl_cost_weight=0.125)
        assert tried == [1, 1]
    finally:
        task._trial.cache_clear()


def test_a_trial_that_does_not_end_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "_TRIAL_SECONDS", 0.01)
    task._trial.cache_clear()
    with pytest.raises(ValueError, match=r"cannot be had with ctrl_cost_weight=0.75: .* no answer within 0.01 s"):
        EnvPoolVectorEnv("Ant-v4", 1, ctrl_cost_weight=0.75)
    task._trial.cache_clear()

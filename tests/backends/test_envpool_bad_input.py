"""Every call that ends the interpreter, or reads wrong memory, when made on raw EnvPool is an exception here.

Each runs in a process of its own, so that one that crashes after all cannot take the tests along. Those processes are forked
from one that has imported EnvPool and built nothing, because the import is what takes time.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import numpy as np
import pytest

pytest.importorskip("envpool")

from gymnasium.error import UnregisteredEnv
from gymnasium.spaces import Box, Dict, Discrete

from vecenv.backends import EnvPoolVectorEnv
from vecenv.backends.envpool import task
from vecenv.backends.envpool.rows import ActionChecker

RUNNER = """
import sys
sys.modules["jax"] = None  # EnvPool imports it if it is there, which takes a second

import json, os, tempfile
import envpool
import numpy as np
from vecenv.backends import EnvPoolVectorEnv

def refused(call, *errors, says=""):
    try:
        call()
    except errors as error:
        assert says in str(error), str(error)
    else:
        raise AssertionError("accepted")

def make(task_id="CartPole-v1", num_envs=4, **options):
    options = dict(num_threads=2, seed=0) | options
    envs = EnvPoolVectorEnv(task_id, num_envs, **options)
    if envs.batch_size == num_envs:
        envs.reset()
    return envs

def run(lines):
    names = dict(globals())
    exec(lines, names)
    envs = names.get("envs")
    if envs is not None and not envs.closed and envs.batch_size == envs.num_envs:
        envs.reset()  # whatever was refused, the environments go on
        envs.step(envs.action_space.sample())
        envs.close()
    print("survived")

results = {}
for case, lines in json.load(sys.stdin).items():
    with tempfile.TemporaryFile("w+") as said:
        if (pid := os.fork()) == 0:
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
            import signal
            signal.alarm(300)
            try:
                run(lines)
                sys.stdout.flush()
            except BaseException:
                import traceback
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
            if "end of the interpreter" in case:
                raise SystemExit(0)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        said.seek(0)
        results[case] = [code, said.read()]
print(json.dumps(results))
"""

# What was tried -> the lines that try it. What every backend has to refuse is in the contract (`tests/contract`).
CRASHES = {
    "env_id out of range": """
        envs = make()
        for wrong in ([4], [-1], [0, 99], np.array([2**31], np.int64), np.array([2**32], np.uint64)):
            refused(lambda: envs.send(np.zeros(len(wrong), int), wrong), ValueError, says="0..3")
            refused(lambda: envs.reset_async(env_id=wrong), ValueError, says="0..3")
    """,
    "wrong trailing shape after a good step": """
        envs = make("Pendulum-v1")
        envs.step(np.zeros((4, 1), np.float32))
        refused(lambda: envs.step(np.zeros((4, 3), np.float32)), ValueError, says="(4, 1)")
        envs.close()
        envs = make("Ant-v4", 2)
        envs.step(np.zeros((2, 8)))
        refused(lambda: envs.step(np.zeros(2)), ValueError, says="(2, 8)")
    """,
    "discrete actions out of range": """
        for task, wrong in (
            ("CartPole-v1", 7), ("CartPole-v1", -1), ("Taxi-v3", 99), ("FrozenLake-v1", 9), ("MiniGrid-Empty-5x5-v0", 99),
            ("Pong-v5", 99),
        ):
            envs = make(task, 2)
            for dtype in (np.int8, np.int16, np.int32, np.int64):
                refused(lambda: envs.step(np.array([0, wrong], dtype)), ValueError, says="envs [1]")
            envs.close()
        envs = make("HighwayFast-v0", 2)
        refused(lambda: envs.step(np.array([2**32, 0], np.uint64)), ValueError, says="envs [0]")
        refused(lambda: envs.step(np.array([2**32, 0])), ValueError, says="envs [0]")
        refused(lambda: envs.step(np.array([2**64 - 1, 0], np.uint64)), ValueError, says="envs [0]")
    """,
    "integers of a Box out of range": """
        envs = make("BinPack-v2", 2)
        high = envs.action_space.high
        refused(lambda: envs.step(high + 1), ValueError, says="envs [0, 1]")
        refused(lambda: envs.step(high - high - 1), ValueError, says="envs [0, 1]")
        refused(lambda: envs.step(high * 0.5), TypeError, says="integers")
    """,
    "floats, strings and objects as actions": """
        envs = make()
        for wrong in (np.zeros(4), np.array(["a"] * 4), [None] * 4, [object()] * 4, np.zeros(4, bool), np.zeros(4, complex)):
            refused(lambda: envs.step(wrong), TypeError)
        refused(lambda: envs.step([[0], [0, 1], [0], [0]]), ValueError)
        refused(lambda: envs.step(None), ValueError, TypeError)
        refused(lambda: envs.step({"action": 0}), ValueError, TypeError)
    """,
    "reset, then reset_async, with small batches": """
        envs = make(batch_size=2)
        for _ in range(5):
            envs.reset()
            envs.reset_async()
            envs.recv()
            envs.reset_async()
            envs.reset_wait()
            envs.reset_async(env_id=[0])
    """,
    "close while environments are in flight": """
        for batch_size in (4, 2):
            envs = make("Ant-v4", batch_size=batch_size)
            envs.reset()
            envs.send(np.zeros((4, 8)), np.arange(4))
            envs.close()
    """,
    "the end of the interpreter while a helper waits": """
        import time
        from vecenv.errors import StepTimeout
        envs = make(batch_size=2)
        envs.reset()
        recv = envs._driver.receiver._recv
        envs._driver.receiver._recv = lambda: (time.sleep(0.5), recv())[1]
        envs.send(np.zeros(4, int))
        refused(lambda: envs.recv(timeout=0.01), StepTimeout)
    """,
    "options of Atari that are out of range": """
        for option, value, says in [
            ("noop_max", 0, "noop_max must be from 1 to 10000, got 0"),
            ("noop_max", -1, "noop_max"),
            ("noop_max", 2**31 - 1, "noop_max"),
            ("stack_num", 0, "stack_num must be from 1 to 256, got 0"),
            ("stack_num", -1, "stack_num"),
            ("img_height", 0, "img_height must be from 1 to 4096, got 0"),
            ("img_width", 0, "img_width must be from 1 to 4096, got 0"),
            ("img_width", 10**6, "img_width"),
            ("frame_skip", 0, "frame_skip must be from 1"),
            ("repeat_action_probability", 1.5, "from 0 to 1"),
            ("repeat_action_probability", float("nan"), "must be a number"),
        ]:
            refused(lambda: make("Pong-v5", 1, **{option: value}), ValueError, says=says)
        refused(lambda: make("Pong-v5", 1, stack_num="four"), TypeError, says="stack_num must be an integer")
        refused(lambda: make("Pong-v5", 1, max_num_players=2), TypeError, says="belongs to the task")
        envs = make("Pong-v5", 1, noop_max=1, stack_num=1, img_height=1, img_width=100, frame_skip=1)
        assert envs.observation_space.shape == (1, 1, 1, 100)
    """,
    "games that EnvPool does not have": """
        refused(lambda: make("Pong-v5", 1, task="brakeout"), ValueError, says="did you mean 'breakout'")
        refused(lambda: make("Pong-v5", 1, task=3), TypeError, says="task must be a string")
        refused(lambda: make("AcrobotSwingup-v1", 1, task_name="swim"), ValueError)
        refused(lambda: make("MiniGrid-Empty-5x5-v0", 1, env_name=""), ValueError, says="Accepted: ")
        refused(lambda: make("HandReach-v0", 1, hand_task="x"), ValueError, says="Accepted: manipulate, reach")
        envs = make("Pong-v5", 1, task="pong")
    """,
    "more threads than a machine can have": """
        refused(lambda: make(num_threads=10**6), ValueError, says="num_threads must be from 1 to 4096")
        envs = make(num_threads=16)
    """,
    "options that end the process together with others": """
        refused(lambda: make("BabyAI-ActionObjDoor-v0", 1, num_cols=0), ValueError, says="num_cols=0: a process that tried")
        refused(lambda: make("Go9x9-v1", 1, board_size=1), ValueError, says="Check failed: size_ > 1")
        refused(lambda: make("Go9x9-v1", 1, history_length=0), ValueError, says="history_length=0")
        refused(lambda: make("Exit-v0", 1, policy_frequency=0), ValueError, says="policy_frequency=0")
        refused(lambda: make("AdroitHandDoor-v1", 1, obs_dim=5), ValueError, says="Unexpected Adroit observation size")
        refused(lambda: make("Highway-v0", 1, observation_vehicles_count=-1), ValueError, says="a process that tried")
        envs = make("Highway-v0", 1, vehicles_count=20)
    """,
    "arrays that are read only, strided or of the other byte order": """
        envs = make("Pendulum-v1")
        wide = np.zeros((8, 3), np.float32)
        wide.flags.writeable = False
        envs.step(wide[::2, 1:2])
        envs.step(np.zeros((4, 1), ">f8"))
        envs.close()
        envs = make()
        envs.step(np.zeros(8, np.int64)[::2])
        envs.step(np.zeros(4, ">i4"))
        refused(lambda: envs.step(np.full(8, 9, np.int32)[::2]), ValueError)
        refused(lambda: envs.step(np.full(4, 9, ">i4")), ValueError)
    """,
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, tuple[int, str]]:
    """Case -> exit code (negative for a signal) and what was printed."""
    cases = {case: textwrap.dedent(lines) for case, lines in CRASHES.items()}
    done = subprocess.run(
        [sys.executable, "-c", RUNNER], input=json.dumps(cases), capture_output=True, text=True, check=True
    )
    return {case: (code, said) for case, (code, said) in json.loads(done.stdout).items()}


@pytest.mark.long
@pytest.mark.timeout(900)  # options are tried in processes of their own, which import EnvPool: seconds each, more under load
@pytest.mark.parametrize("case", CRASHES)
def test_what_crashes_raw_envpool_is_an_exception(case: str, outcomes: dict[str, tuple[int, str]]) -> None:
    code, said = outcomes[case]
    assert (code, said.splitlines()[-1:]) == (0, ["survived"]), said


@pytest.mark.long
def test_a_crash_would_be_seen() -> None:
    """The runner tells what happens when the same is done to raw EnvPool."""
    lines = """
        pool = envpool.make_gymnasium("CartPole-v1", num_envs=4, num_threads=1)
        pool.reset()
        pool.step(np.zeros(3, dtype=np.int32))
    """
    done = subprocess.run(
        [sys.executable, "-c", RUNNER],
        input=json.dumps({"raw": textwrap.dedent(lines)}),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert json.loads(done.stdout)["raw"][0] < 0


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


def test_a_value_of_the_wrong_type_names_the_task() -> None:
    with pytest.raises(TypeError, match="'Pong-v5'"):
        EnvPoolVectorEnv("Pong-v5", frame_skip="four")


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


def test_reset_options_that_envpool_does_not_have_are_refused() -> None:
    envs = EnvPoolVectorEnv("CartPole-v1", 2)
    with pytest.raises(ValueError, match=r"no reset options but 'reset_mask', got \['low'\]"):
        envs.reset(options={"low": 0.0})


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
    with pytest.raises(ValueError, match=r"actions\['arm.push'\] must have shape \(2, 2\)"):
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

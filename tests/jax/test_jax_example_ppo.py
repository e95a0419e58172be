"""``examples/ppo.py`` computes correct advantages, collects the transitions of the environments, and learns."""

from __future__ import annotations

import importlib.util
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from programs import EXAMPLES, check_help, check_missing_library, import_program, run_python
from sampling import each_once

import vecenv

PROGRAM = EXAMPLES / "ppo.py"
HAS_ENVPOOL = importlib.util.find_spec("envpool") is not None


@pytest.fixture(scope="module")
def ppo() -> Iterator[ModuleType]:
    for library in ("flax", "optax", "rich", "matplotlib"):
        pytest.importorskip(library, reason="needs pip install 'vecenv[examples]'")
    with import_program(PROGRAM) as module:
        yield module


def calculate_advantages(
    transitions: list[dict[str, Any]], last_value: float, discount: float, gae_lambda: float
) -> list[float]:
    """Return the advantages of one environment as sums over the later steps of the same episode."""
    values = [t["value"] for t in transitions[1:]] + [last_value]
    pairs = zip(transitions, values, strict=True)
    deltas = [t["reward"] + discount * value * (not t["terminated"]) - t["value"] for t, value in pairs]
    advantages = []
    for start in range(len(deltas)):
        total, weight = 0.0, 1.0
        for t in range(start, len(deltas)):
            total += weight * deltas[t]
            weight *= discount * gae_lambda
            if transitions[t]["done"]:
                break
        advantages.append(total)
    return advantages


@pytest.mark.parametrize("first_ready", [False, True])
def test_advantages_equal_their_definition_in_any_order_of_rows(ppo: ModuleType, first_ready: bool) -> None:
    rng = np.random.default_rng(0)
    n, batches = 6, 40
    ids = np.stack([rng.permutation(n)[:3] if first_ready else np.arange(n) for _ in range(batches)])
    shape = ids.shape
    rollout = {
        "env_id": ids,
        "reward": rng.normal(size=shape).astype(np.float32),
        "value": rng.normal(size=shape).astype(np.float32),
        "terminated": rng.random(shape) < 0.1,
    }
    rollout["done"] = rollout["terminated"] | (rng.random(shape) < 0.1)
    last_values = rng.normal(size=n).astype(np.float32)
    found = ppo.advantages(rollout, last_values, 0.97, 0.9)
    for env in range(n):
        positions = list(zip(*np.nonzero(ids == env), strict=True))
        transitions = [{name: field[position] for name, field in rollout.items()} for position in positions]
        expected = calculate_advantages(transitions, float(last_values[env]), 0.97, 0.9)
        np.testing.assert_allclose([found[position] for position in positions], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("first_ready", [False, True])
def test_transitions_equal_those_of_the_environments(ppo: ModuleType, first_ready: bool) -> None:
    """No transition of an environment is missing or out of order, and resets have a weight of 0."""
    import gymnasium
    import jax

    options = {"num_workers": 2, "context": "forkserver", **({"batch_size": 2} if first_ready else {})}
    envs = vecenv.make_vec("CartPole-v1", 4, vector_kwargs=options, max_episode_steps=15)
    agent = ppo.Agent(envs, 8)
    collector = ppo.Collector(envs, agent, 5, first_ready)
    rollout = collector.collect(agent.init(jax.random.key(0)), jax.random.key(1), 80 if first_ready else 40)
    envs.close()
    ends = 0
    for env in range(4):
        positions = list(zip(*np.nonzero(rollout["env_id"] == env), strict=True))
        single = gymnasium.make("CartPole-v1", max_episode_steps=15)
        observation, _ = single.reset(seed=5 + env)
        done = False
        for position in positions:
            row = {name: field[position] for name, field in rollout.items()}
            if done:
                assert row["weight"] == 0.0
                assert row["reward"] == 0.0
                np.testing.assert_array_equal(row["observation"], observation, "the last observation is repeated")
                observation, _ = single.reset()
                done, ends = False, ends + 1
                continue
            if row["weight"] == 0.0:  # the first row of an environment that was not in the first batch
                assert first_ready
                continue
            np.testing.assert_array_equal(row["observation"], observation)
            observation, reward, terminated, truncated, _ = single.step(int(row["choice"]))
            assert (row["reward"], row["terminated"], row["done"]) == (reward, terminated, terminated or truncated)
            done = bool(row["done"])
        single.close()
    assert ends >= 4


def run_example(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return run_python(PROGRAM, *arguments, cwd=cwd, timeout=280)


@pytest.mark.long
@pytest.mark.slow
def test_program_reaches_a_low_target_and_draws_a_plot(ppo: ModuleType, tmp_path: Path) -> None:
    process = run_example("CartPole-v1", "--target", "60", cwd=tmp_path)
    assert process.returncode == 0, process.stderr[-3000:]
    assert "(target reached)" in process.stdout
    assert (tmp_path / "ppo-results" / "CartPole-v1-process.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
@pytest.mark.parametrize("backend", ["process", "envpool"])
@pytest.mark.parametrize("options", [[], ["--first-ready"]], ids=["step", "first-ready"])
def test_program_reaches_its_target(ppo: ModuleType, env_id: str, backend: str, options: list[str], tmp_path: Path) -> None:
    if backend == "envpool" and not HAS_ENVPOOL:
        pytest.skip("needs envpool")
    process = run_example(env_id, "--backend", backend, "--steps", "600000", *options, cwd=tmp_path)
    assert process.returncode == 0, process.stdout + process.stderr[-3000:]


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["CartPol-v1"], "CartPole-v1"),
        (["CartPole-v1", "--backend", "proces"], "did you mean 'process'"),
        pytest.param(
            ["CartPole-v1", "--backend", "serial", "--steps", "100"],
            "no episode ended within 100 steps",
            marks=pytest.mark.slow,
        ),
        pytest.param(["FrozenLake-v1"], "needs observations that are a flat array of numbers", marks=pytest.mark.slow),
    ],
)
def test_usage_errors_print_no_traceback(ppo: ModuleType, arguments: list[str], text: str, tmp_path: Path) -> None:
    process = run_example(*arguments, cwd=tmp_path)
    assert process.returncode == 1
    assert text in process.stderr
    assert "Traceback" not in process.stderr


@pytest.mark.long
@pytest.mark.parametrize(("program", "library"), each_once(["ppo", "ppo_jax"], ["flax", "optax", "rich", "matplotlib"]))
def test_missing_library_names_the_install_command(program: str, library: str) -> None:
    check_missing_library(program, library, "examples")


@pytest.mark.long
@pytest.mark.parametrize("program", ["ppo", "ppo_jax"])
def test_help_shows_usage_and_options(ppo: ModuleType, program: str) -> None:
    check_help(program, "--learning-rate", "of Adam", "(default: 64)", "CartPole-v1")

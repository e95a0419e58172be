"""``examples/ppo.py`` on two simulated hosts of a Ray cluster on this machine."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from programs import run_python

ray = pytest.importorskip("ray", reason="needs Ray: pip install 'vecenv[clients]'")
for library in ("flax", "optax", "rich", "matplotlib"):
    pytest.importorskip(library, reason="needs pip install 'vecenv[examples]'")

from ray.cluster_utils import Cluster  # noqa: E402

EXAMPLE = Path(__file__).parents[2] / "examples" / "ppo.py"
SHORT = ("--num-envs", "8", "--rollout", "32", "--steps", "2048", "--epochs", "2")
LAST_LINE = re.compile(r"CartPole-v1-[a-z-]+: mean return (\S+)( \(target reached\))? after (\S+) steps and \S+ s; (\S+)")


@pytest.fixture(scope="module", autouse=True)
def address() -> Iterator[str]:
    """Yield the address of a cluster of two simulated nodes, so that no other cluster on this machine is used."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    options = {"num_cpus": 2, "object_store_memory": 200 * 1024 * 1024}
    cluster = Cluster(initialize_head=True, connect=True, head_node_args={**options, "include_dashboard": False})
    cluster.add_node(**options)
    cluster.wait_for_nodes()
    yield cluster.address
    ray.shutdown()
    cluster.shutdown()


def run_ppo(cwd: Path, backend: str, *arguments: str, **variables: str) -> tuple[float, bool, int, Path]:
    """Run the example; return the mean return, True if it reached the target, the steps, and the path of its plot."""
    result = run_python(EXAMPLE, "CartPole-v1", "--backend", backend, *arguments, cwd=cwd, timeout=280, **variables)
    match = LAST_LINE.fullmatch(result.stdout.splitlines()[-1] if result.stdout else "")
    assert match, result.stdout + result.stderr[-3000:]
    assert result.returncode == (0 if match[2] else 1)
    return float(match[1]), bool(match[2]), int(match[3].replace(",", "")), cwd / match[4]


def test_training_on_two_hosts_equals_training_in_one_process(address: str, tmp_path: Path) -> None:
    on_hosts = run_ppo(tmp_path, "ray", "--num-hosts", "2", *SHORT, RAY_ADDRESS=address)
    assert on_hosts[:3] == run_ppo(tmp_path, "serial", *SHORT)[:3]
    assert on_hosts[2] == 2048
    assert on_hosts[3].read_bytes().startswith(b"\x89PNG")


def test_training_with_first_ready_hosts_completes(address: str, tmp_path: Path) -> None:
    mean_return, _, steps, _ = run_ppo(tmp_path, "ray", "--num-hosts", "2", "--first-ready", *SHORT, RAY_ADDRESS=address)
    assert steps == 2048
    assert 5 < mean_return < 100


def test_request_for_more_hosts_than_exist_prints_one_error_line(address: str, tmp_path: Path) -> None:
    result = run_python(EXAMPLE, "--backend", "ray", "--num-hosts", "64", cwd=tmp_path, RAY_ADDRESS=address)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith("ppo: "), result.stderr[-3000:]
    assert "Traceback" not in result.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_example_learns_cartpole_on_two_hosts(address: str, tmp_path: Path) -> None:
    mean_return, reached, _, _ = run_ppo(tmp_path, "ray", "--num-hosts", "2", "--steps", "600000", RAY_ADDRESS=address)
    assert reached
    assert mean_return >= 475

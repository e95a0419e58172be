"""``RayVectorEnv`` on two simulated nodes: placement, first-ready batches, and the ends of hosts and nodes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from envs import GymnasiumInfoMerger, counters, scripted_env_fns
from gymnasium.vector import SyncVectorEnv
from test_ray_cluster import make_file_controlled_env_fns

from vecenv.backends import RayVectorEnv
from vecenv.errors import HostDied
from vecenv.testing import assert_same_trajectory

ray = pytest.importorskip("ray", reason="Ray is not installed (pip install 'vecenv[ray]')")
pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]


def test_each_host_is_placed_on_its_own_node(nodes: Any) -> None:
    envs: Any = RayVectorEnv(scripted_env_fns(5), workers_per_host=1)  # num_hosts defaults to the number of nodes with cores
    assert envs.num_hosts == 2
    groups = [group for group in ray.util.placement_group_table().values() if group["state"] == "CREATED"]
    assert len(set(groups[-1]["bundles_to_node_id"].values())) == 2
    assert_same_trajectory(GymnasiumInfoMerger(envs), SyncVectorEnv(scripted_env_fns(5)), 20, seed=3)
    envs.close()


def test_default_workers_per_host_use_the_cores_of_a_node(nodes: Any) -> None:
    envs: Any = RayVectorEnv(counters(8), num_hosts=2)
    groups = [group for group in ray.util.placement_group_table().values() if group["state"] == "CREATED"]
    assert [bundle["CPU"] for bundle in groups[-1]["bundles"].values()] == [3.0, 3.0]
    envs.close()


def test_recv_returns_the_rows_of_the_first_node_to_reply(nodes: Any, tmp_path: Path) -> None:
    envs: Any = RayVectorEnv(make_file_controlled_env_fns(tmp_path, 4), num_hosts=2, workers_per_host=1, batch_size=2)
    envs.reset(seed=1)
    (tmp_path / "0").write_text("wait")
    envs.send([0] * 4, range(4))
    for _ in range(5):
        infos = envs.recv(timeout=20)[4]
        assert infos["env_id"].tolist() == [2, 3]
        envs.send([0, 0])
    (tmp_path / "0").unlink()
    received = [tuple(envs.recv(timeout=20)[4]["env_id"].tolist()) for _ in range(2)]
    assert sorted(received) == [(0, 1), (2, 3)]
    envs.close()


@pytest.mark.parametrize("on_failure", ["raise", "restart"])
def test_killed_host_restarts_on_its_node(nodes: Any, on_failure: str) -> None:
    envs: Any = RayVectorEnv(counters(4, lengths=(50,)), num_hosts=2, workers_per_host=1, on_failure=on_failure)
    envs.reset(seed=1)
    os.kill(envs.hosts[1]["pid"], signal.SIGKILL)
    if on_failure == "raise":
        with pytest.raises(HostDied):
            envs.step([0] * 4)
        assert envs.reset(seed=7)[0][:, 3].tolist() == [7, 8, 9, 10]
    else:
        assert envs.step([0] * 4)[3].tolist() == [False, False, True, True]
        assert envs.step([0] * 4)[0][:, 1].tolist() == [2, 2, 0, 0]
    envs.close()


@pytest.mark.parametrize("on_failure", ["raise", "restart"])
def test_host_of_a_killed_node_restarts_on_another(nodes: Any, on_failure: str) -> None:
    third = nodes.add_node(num_cpus=3, object_store_memory=200 * 1024 * 1024)
    nodes.wait_for_nodes()
    envs: Any = RayVectorEnv(counters(6, lengths=(50,)), num_hosts=3, workers_per_host=1, on_failure=on_failure)
    envs.reset(seed=1)
    group = [group for group in ray.util.placement_group_table().values() if group["state"] == "CREATED"][-1]
    (index,) = [int(host) for host, node in group["bundles_to_node_id"].items() if node == third.node_id]
    rows = [2 * index, 2 * index + 1]
    nodes.remove_node(third, allow_graceful=False)
    nodes.add_node(num_cpus=3, object_store_memory=200 * 1024 * 1024)
    started_at = time.monotonic()
    if on_failure == "raise":
        with pytest.raises(HostDied) as caught:
            envs.step([0] * 6)
        assert list(caught.value.envs) == rows
        print(f"detected after {time.monotonic() - started_at:.1f} s")
        assert time.monotonic() - started_at < 30
        assert envs.reset(seed=7)[0][:, 3].tolist() == list(range(7, 13))
    else:
        lost = np.isin(np.arange(6), rows)
        *_, truncations, infos = envs.step([0] * 6)
        assert truncations.tolist() == lost.tolist()
        assert infos["_restarted"].tolist() == lost.tolist()
    assert envs.step([0] * 6)[0].shape == (6, 4)
    envs.close()
    newest = [node for node in nodes.list_all_nodes() if node is not nodes.head_node][-1]
    nodes.remove_node(newest)

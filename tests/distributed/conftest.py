"""Fixtures with Ray clusters. Their tests run late, because Ray starts threads that never end (see tests/conftest.py)."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent.parent
sys.path[:0] = [str(Path(__file__).parent), str(TESTS), str(TESTS / "evaluating")]

STORE_BYTES = 200 * 1024 * 1024  # of Ray's object store
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_raylet_start_wait_time_s": "240",  # a start takes long on a busy machine
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Yield Ray, connected to a cluster of one node that vecenv did not start."""
    ray = pytest.importorskip("ray", reason="Ray is not installed (pip install 'vecenv[ray]')")
    os.environ.update(ENVIRONMENT)
    ray.init(address="local", num_cpus=8, include_dashboard=False, object_store_memory=STORE_BYTES, log_to_driver=False)
    yield ray
    ray.shutdown()


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """Yield a cluster of three simulated nodes: a head without cores, and two nodes with three cores."""
    ray = pytest.importorskip("ray", reason="Ray is not installed (pip install 'vecenv[ray]')")
    from ray.cluster_utils import Cluster

    os.environ.update(ENVIRONMENT)
    simulated_cluster = Cluster(
        initialize_head=True,
        connect=True,
        head_node_args={"num_cpus": 0, "include_dashboard": False, "object_store_memory": STORE_BYTES},
    )
    for _ in range(2):
        simulated_cluster.add_node(num_cpus=3, object_store_memory=STORE_BYTES)
    simulated_cluster.wait_for_nodes()
    yield simulated_cluster
    ray.shutdown()
    simulated_cluster.shutdown()

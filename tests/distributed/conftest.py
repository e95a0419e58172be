"""Ray clusters for tests, which run late because of their threads (``PERMANENT_THREAD_FOLDERS`` in tests/conftest.py)."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent.parent
sys.path[:0] = [str(Path(__file__).parent), str(TESTS), str(TESTS / "evaluating")]

MEMORY = 200 * 1024 * 1024
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_raylet_start_wait_time_s": "240",  # on a busy machine
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Yield a cluster of one node that was started before vecenv was used."""
    ray = pytest.importorskip("ray", reason="Ray is not installed (pip install 'vecenv[ray]')")
    os.environ.update(ENVIRONMENT)
    ray.init(address="local", num_cpus=8, include_dashboard=False, object_store_memory=MEMORY, log_to_driver=False)
    yield ray
    ray.shutdown()


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """Yield a cluster of three simulated nodes: a head without cores, and two with three cores each."""
    ray = pytest.importorskip("ray", reason="Ray is not installed (pip install 'vecenv[ray]')")
    from ray.cluster_utils import Cluster

    os.environ.update(ENVIRONMENT)
    simulated = Cluster(
        initialize_head=True,
        connect=True,
        head_node_args={"num_cpus": 0, "include_dashboard": False, "object_store_memory": MEMORY},
    )
    for _ in range(2):
        simulated.add_node(num_cpus=3, object_store_memory=MEMORY)
    simulated.wait_for_nodes()
    yield simulated
    ray.shutdown()
    simulated.shutdown()

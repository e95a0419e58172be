"""Tests of programs that have no Ray cluster: vecenv starts one on this machine only, and stops it."""

from __future__ import annotations

import json
import os
import textwrap
from pathlib import Path
from typing import Any

import pytest
from programs import python_output

pytest.importorskip("ray", reason="Ray is not installed (pip install 'vecenv[ray]')")
pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

OWN_CLUSTER_PROGRAM = """
    import json, time
    import psutil
    from envs import counters
    from vecenv.backends import RayVectorEnv

    def is_running(process):
        try:
            return process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    if __name__ == "__main__":
        this_process = psutil.Process()
        envs = RayVectorEnv(counters(4), num_hosts=2, address="local")  # placement is PACK, because there is one node
        second = RayVectorEnv(counters(2), num_hosts=1, workers_per_host=2)
        processes = [this_process, *this_process.children(recursive=True)]
        addresses = {c.laddr.ip for p in processes for c in p.net_connections("inet") if c.status == "LISTEN"}
        commands = [" ".join(p.cmdline()) for p in processes]
        envs.reset(seed=1)
        envs.step([0] * 4)
        envs.close()
        second.reset(seed=1)  # the cluster still runs
        rewards = second.step([0] * 2)[1].tolist()
        second.close()
        deadline = time.monotonic() + 10
        while (left := [p.pid for p in processes[1:] if is_running(p)]) and time.monotonic() < deadline:
            time.sleep(0.1)
        import ray
        print(json.dumps({
            "addresses": sorted(addresses), "left": left, "initialized": ray.is_initialized(), "rewards": rewards,
            "dashboard": [c for c in commands if "dashboard.py" in c and "--disable-frontend" not in c],
        }))
"""


SHUTDOWN_PROGRAM = """
    import json
    import ray
    from envs import counters
    from vecenv.backends import RayVectorEnv
    from vecenv.errors import ClusterError

    def get_step_error(envs):
        try:
            envs.step([0] * 2)
        except ClusterError as error:
            return str(error)

    if __name__ == "__main__":
        # "local", because the clusters of other tests may end at any time
        options = {"num_hosts": 1, "workers_per_host": 0, "address": "local"}
        one, other = (RayVectorEnv(counters(2), **options) for _ in range(2))
        one.reset(seed=1)
        ray.shutdown()
        report = {"resets": one.stats()["resets"], "error": get_step_error(one)}
        one.close(terminate=True)
        report["restarted"] = ray.is_initialized()
        ray.init(address="local", num_cpus=2, include_dashboard=False)
        third = RayVectorEnv(counters(2), num_hosts=1, workers_per_host=0)
        other.close()
        report["rewards"] = third.reset(seed=1) and third.step([0] * 2)[1].tolist()
        third.close()
        print(json.dumps({**report, "kept": ray.is_initialized()}))
"""


def run_program(program: str, folder: Path) -> dict[str, Any]:
    """Run a program and return the JSON object that it prints as its last line."""
    file = folder / "program.py"
    file.write_text(textwrap.dedent(program))
    tests = Path(__file__).parent.parent
    output = python_output(file, timeout=200, PYTHONPATH=os.pathsep.join([str(tests), str(tests.parent)]))
    report: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    return report


def test_step_after_ray_shutdown_raises_and_later_close_keeps_the_next_cluster(tmp_path: Path) -> None:
    report = run_program(SHUTDOWN_PROGRAM, tmp_path)
    assert report.pop("error").startswith("ray.shutdown() ended the hosts")
    assert report == {"resets": 2, "restarted": False, "rewards": [0.001, 1.001], "kept": True}


def test_own_cluster_listens_on_loopback_only_and_is_stopped_by_close(tmp_path: Path) -> None:
    report = run_program(OWN_CLUSTER_PROGRAM, tmp_path)
    assert set(report["addresses"]) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    assert report["addresses"], "no process of the cluster listens"
    assert report["left"] == []
    assert report["initialized"] is False
    assert report["dashboard"] == []
    assert report["rewards"] == [0.001, 1.001]

"""A cluster that vecenv starts for this machine alone and stops again, in a separate program."""

from __future__ import annotations

import json
import os
import textwrap
from pathlib import Path

import pytest
from programs import printed

pytest.importorskip("ray", reason="Ray is not installed (pip install 'vecenv[ray]')")
pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

PROGRAM = """
    import json, time
    import psutil
    from envs import counters
    from vecenv.backends import RayVectorEnv

    def runs(process):
        try:
            return process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    if __name__ == "__main__":
        me = psutil.Process()
        envs = RayVectorEnv(counters(4), num_hosts=2, address="local")  # and PACK, because there is one node
        second = RayVectorEnv(counters(2), num_hosts=1, workers_per_host=2)
        ours = [me, *me.children(recursive=True)]
        addresses = {c.laddr.ip for p in ours for c in p.net_connections("inet") if c.status == "LISTEN"}
        commands = [" ".join(p.cmdline()) for p in ours]
        envs.reset(seed=1)
        envs.step([0] * 4)
        envs.close()
        second.reset(seed=1)  # still there
        rewards = second.step([0] * 2)[1].tolist()
        second.close()
        deadline = time.monotonic() + 10
        while (left := [p.pid for p in ours[1:] if runs(p)]) and time.monotonic() < deadline:
            time.sleep(0.1)
        import ray
        print(json.dumps({
            "addresses": sorted(addresses), "left": left, "initialized": ray.is_initialized(), "rewards": rewards,
            "dashboard": [c for c in commands if "dashboard.py" in c and "--disable-frontend" not in c],
        }))
"""


def test_cluster_listens_on_loopback_only_and_is_stopped(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    tests = Path(__file__).parent.parent
    shown = printed(program, timeout=200, PYTHONPATH=os.pathsep.join([str(tests), str(tests.parent)]))
    report = json.loads(shown.strip().splitlines()[-1])
    assert set(report["addresses"]) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    assert report["addresses"], "it listens nowhere"
    assert report["left"] == []
    assert report["initialized"] is False
    assert report["dashboard"] == []
    assert report["rewards"] == [0.001, 1.001]

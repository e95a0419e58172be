"""The program that test_bridge_deadlock.py runs. Arguments: the number of threads, and the size of an action in bytes.

Each thread calls a compiled program of eight steps before the program's inputs are ready. XLA then runs the program and its
host calls on its own threads, one per core.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
from bridge_envs import CallLogVectorEnv

import vecenv.jax as vj


def main(num_threads: int, action_bytes: int) -> None:
    threading.Thread(target=exit_on_timeout, daemon=True).start()
    failures: list[BaseException] = []

    def run_and_record_failure(seed: int) -> None:
        try:
            run_steps(seed, action_bytes)
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=run_and_record_failure, args=(seed,)) for seed in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(failures or "done")


def exit_on_timeout() -> None:
    """End the process after 240 s, and print how much processor time it has used since this call.

    A hanging process uses none, unlike a process that is only slow because the machine is busy.
    """
    started_at, cpu_time_at_start = time.monotonic(), time.process_time()
    while time.monotonic() - started_at < 240:
        time.sleep(1)
    faulthandler.dump_traceback(all_threads=True)
    print(f"still running after 240 s; used {time.process_time() - cpu_time_at_start:.1f} s of processor time", flush=True)
    os._exit(1)


def run_steps(seed: int, action_bytes: int) -> None:
    envs = CallLogVectorEnv(2)
    width = action_bytes // 8  # two rows of float32
    envs.single_action_space = gym.spaces.Box(-np.inf, np.inf, (width,), np.float32)
    envs.action_space = gym.spaces.Box(-np.inf, np.inf, (2, width), np.float32)
    with vj.bridge(envs) as env:
        state = env.reset(jax.random.key(seed))
        slow = jax.jit(lambda x: jax.lax.fori_loop(0, 20, lambda _, y: y @ x / 300.0, x))

        @jax.jit
        def program(state, x):  # type: ignore[no-untyped-def]
            action = jnp.full((2, width), x[0, 0])
            return jax.lax.scan(lambda s, _: (env.step(s, action + s.reward[0]), None), state, None, length=8)[0]

        for _ in range(3):
            state = program(state, slow(jnp.ones((300, 300))))
            jax.block_until_ready(slow(jnp.ones((300, 300))))  # unrelated work between two programs
        assert jax.block_until_ready(state).steps.tolist() == [24, 24]
        assert envs.calls == "R" + 24 * "S"


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))

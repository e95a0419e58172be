"""The program of test_bridge_deadlock.py. Its arguments are the number of threads and the bytes of an action.

Each thread runs a compiled program of eight steps with inputs that are not ready when it starts. Then XLA runs the program
and its host calls on its own threads, one per core.
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


def main(threads: int, size: int) -> None:
    threading.Thread(target=exit_on_timeout, daemon=True).start()
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            run_steps(number, size)
        except BaseException as error:
            failures.append(error)
            raise

    workers = [threading.Thread(target=work, args=(i,)) for i in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    print(failures or "done")


def exit_on_timeout() -> None:
    """End the process after 240 s, and print the processor time that it used.

    A process that hangs uses none. On a busy machine, the program can take as long without a hang.
    """
    began, used = time.monotonic(), time.process_time()
    while time.monotonic() - began < 240:
        time.sleep(1)
    faulthandler.dump_traceback(all_threads=True)
    print(f"no end after 240 s, of which {time.process_time() - used:.1f} s of processor time", flush=True)
    os._exit(1)


def run_steps(number: int, size: int) -> None:
    envs = CallLogVectorEnv(2)
    width = size // 8  # two rows of float32
    envs.single_action_space = gym.spaces.Box(-np.inf, np.inf, (width,), np.float32)
    envs.action_space = gym.spaces.Box(-np.inf, np.inf, (2, width), np.float32)
    with vj.bridge(envs) as env:
        state = env.reset(jax.random.key(number))
        slow = jax.jit(lambda x: jax.lax.fori_loop(0, 20, lambda _, y: y @ x / 300.0, x))

        @jax.jit
        def program(state, x):  # type: ignore[no-untyped-def]
            action = jnp.full((2, width), x[0, 0])
            return jax.lax.scan(lambda s, _: (env.step(s, action + s.reward[0]), None), state, None, length=8)[0]

        for _ in range(3):
            state = program(state, slow(jnp.ones((300, 300))))
            jax.block_until_ready(slow(jnp.ones((300, 300))))  # other work between the programs
        assert jax.block_until_ready(state).steps.tolist() == [24, 24]
        assert envs.calls == "R" + 24 * "S"


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))

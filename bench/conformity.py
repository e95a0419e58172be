"""Other engines against ``vecenv conform``: ``python bench/conformity.py`` prints the table of ``docs/engines.md``.

Each engine is built as its own documentation says. Those that bring their own environments are asked only what needs no
knowledge of them. An engine that is not installed is left out, and named.
"""

from __future__ import annotations

import argparse
import importlib.metadata
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from gymnasium.vector import AutoresetMode

from vecenv.tools.conform import BROKEN, KEPT, CliError, conform

ENGINES = {
    "Gymnasium SyncVectorEnv": ("gymnasium.vector:SyncVectorEnv", "gymnasium"),
    "Gymnasium AsyncVectorEnv": ("gymnasium.vector:AsyncVectorEnv", "gymnasium"),
    "Gymnasium CartPoleVectorEnv": ("bench.conformity:cartpole", "gymnasium"),
    "ALE AtariVectorEnv": ("bench.conformity:atari", "ale-py"),
    "EnvPool": ("bench.conformity:envpool_cartpole", "envpool"),
    "SB3 DummyVecEnv": ("stable_baselines3.common.vec_env:DummyVecEnv", "stable-baselines3"),
    "SB3 SubprocVecEnv": ("stable_baselines3.common.vec_env:SubprocVecEnv", "stable-baselines3"),
    "Tianshou DummyVectorEnv": ("tianshou.env:DummyVectorEnv", "tianshou"),
    "Tianshou SubprocVectorEnv": ("tianshou.env:SubprocVectorEnv", "tianshou"),
    "TorchRL SerialEnv": ("bench.conformity:torchrl_serial", "torchrl"),
    "TorchRL ParallelEnv": ("bench.conformity:torchrl_parallel", "torchrl"),
    "vecenv AsyncVectorEnv": ("vecenv:AsyncVectorEnv", "vecenv"),
}


def cartpole(num_envs: int) -> Any:
    """Gymnasium's own CartPole in NumPy."""
    import gymnasium

    return gymnasium.make_vec("CartPole-v1", num_envs, vectorization_mode="vector_entry_point")


def atari(num_envs: int, autoreset_mode: AutoresetMode) -> Any:
    """ALE's C++ threads."""
    from ale_py.vector_env import AtariVectorEnv

    only_mode = autoreset_mode is AutoresetMode.NEXT_STEP  # of its first versions
    return AtariVectorEnv("pong", num_envs, **({} if only_mode else {"autoreset_mode": autoreset_mode}))


def envpool_cartpole(num_envs: int) -> Any:
    """EnvPool's C++ threads, with the interface of its Gymnasium type."""
    import envpool

    envs = envpool.make_gymnasium("CartPole-v1", num_envs=num_envs)
    return _Batched(envs, num_envs)


class _Batched:
    """EnvPool's pool has the single spaces under the names of the batched ones, and no metadata."""

    def __init__(self, envs: Any, num_envs: int) -> None:
        from gymnasium.vector.utils import batch_space

        self._envs, self.num_envs = envs, num_envs
        self.single_observation_space, self.single_action_space = envs.observation_space, envs.action_space
        self.observation_space = batch_space(envs.observation_space, num_envs)
        self.action_space = batch_space(envs.action_space, num_envs)
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        if seed is not None or options:
            raise NotImplementedError("reset() takes neither seeds nor options; make() takes a seed")
        return self._envs.reset()

    def step(self, actions: Any) -> Any:
        return self._envs.step(actions)

    def close(self) -> None:
        self._envs.close()


def torchrl_serial(env_fns: Sequence[Callable[[], Any]]) -> Any:
    """TorchRL's environments in this process."""
    from torchrl.envs import SerialEnv

    return SerialEnv(len(env_fns), [partial(_wrapped, fn) for fn in env_fns])


def torchrl_parallel(env_fns: Sequence[Callable[[], Any]]) -> Any:
    """TorchRL's worker processes."""
    from torchrl.envs import ParallelEnv

    return ParallelEnv(len(env_fns), [partial(_wrapped, fn) for fn in env_fns])


def _wrapped(env_fn: Callable[[], Any]) -> Any:
    from torchrl.envs import GymWrapper

    return GymWrapper(env_fn(), categorical_action_encoding=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="engines whose names have this in them")
    parser.add_argument("--no-faults", action="store_true", help="without exceptions, kills and timeouts")
    given = parser.parse_args()
    columns: dict[str, dict[str, str]] = {}
    for name, (engine, package) in ENGINES.items():
        if given.only and given.only.lower() not in name.lower():
            continue
        try:
            rows = conform(engine, list(AutoresetMode), faults=not given.no_faults)
        except CliError as error:
            print(f"left out: {name}: {error}")
            continue
        title = f"{name} {importlib.metadata.version(package)}" if package != "vecenv" else name
        columns[title] = {row.name: row.state for row in rows}
        for row in rows:
            if row.state == BROKEN:
                mode = next(mode for mode, state in row.modes.items() if state == BROKEN)
                print(f"{name}: {row.name}: {mode}: {row.why[mode]}")
    names = list(dict.fromkeys(name for column in columns.values() for name in column))
    print(f"\n| promise | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
    for name in names:
        cells = [column.get(name, "") for column in columns.values()]
        print(f"| {name} | {' | '.join('yes' if cell == KEPT else cell for cell in cells)} |")


if __name__ == "__main__":
    main()

"""Other engines against ``vecenv conform``: ``python bench/conformity.py`` prints ``docs/generated/engines.md``.

Each engine is built as its own documentation shows. Those that bring their own environments are checked where that
needs no knowledge of them. An engine that is not installed is left out, and named.
"""

from __future__ import annotations

import argparse
import importlib.metadata
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
from gymnasium.vector import AutoresetMode

from bench.engines import torchrl_env
from bench.tables import ROOT, between
from vecenv.tools import CliError
from vecenv.tools.conform import BROKEN, KEPT, conform

SIGNS = {KEPT: "yes", BROKEN: "**no**"}

ENGINES = {
    "Gymnasium SyncVectorEnv": ("gymnasium.vector:SyncVectorEnv", "gymnasium"),
    "Gymnasium AsyncVectorEnv": ("gymnasium.vector:AsyncVectorEnv", "gymnasium"),
    "Gymnasium CartPoleVectorEnv": ("bench.conformity:cartpole", "gymnasium"),
    "ALE AtariVectorEnv": ("bench.conformity:atari", "ale-py"),
    "EnvPool": ("bench.conformity:envpool_cartpole", "envpool"),
    "MuJoCo Playground": ("bench.conformity:playground_cartpole", "playground"),
    "SB3 DummyVecEnv": ("stable_baselines3.common.vec_env:DummyVecEnv", "stable-baselines3"),
    "SB3 SubprocVecEnv": ("stable_baselines3.common.vec_env:SubprocVecEnv", "stable-baselines3"),
    "Tianshou DummyVectorEnv": ("tianshou.env:DummyVectorEnv", "tianshou"),
    "Tianshou SubprocVectorEnv": ("tianshou.env:SubprocVectorEnv", "tianshou"),
    "TorchRL SerialEnv": ("bench.conformity:torchrl_serial", "torchrl"),
    "TorchRL ParallelEnv": ("bench.conformity:torchrl_parallel", "torchrl"),
    "vecenv AsyncVectorEnv": ("vecenv:AsyncVectorEnv", "vecenv"),
}


def cartpole(num_envs: int) -> Any:
    """Build Gymnasium's own CartPole in NumPy."""
    import gymnasium

    return gymnasium.make_vec("CartPole-v1", num_envs, vectorization_mode="vector_entry_point")


def atari(num_envs: int, autoreset_mode: AutoresetMode) -> Any:
    """Build ALE's C++ threads."""
    from ale_py.vector_env import AtariVectorEnv

    only_mode = autoreset_mode is AutoresetMode.NEXT_STEP  # of its first versions
    return AtariVectorEnv("pong", num_envs, **({} if only_mode else {"autoreset_mode": autoreset_mode}))


def envpool_cartpole(num_envs: int) -> Any:
    """Build EnvPool's C++ threads, with the interface of its Gymnasium type."""
    return _Batched(num_envs)


class _Batched:
    """An adapter: EnvPool's pool names the single spaces like the batched ones, has no metadata, and is seeded when built.
    """

    def __init__(self, num_envs: int) -> None:
        from gymnasium.vector.utils import batch_space

        self.num_envs = num_envs
        self._make(0)
        self.single_observation_space, self.single_action_space = self._envs.observation_space, self._envs.action_space
        self.observation_space = batch_space(self._envs.observation_space, num_envs)
        self.action_space = batch_space(self._envs.action_space, num_envs)
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}

    def _make(self, seed: int) -> None:
        import envpool

        self._envs = envpool.make_gymnasium("CartPole-v1", num_envs=self.num_envs, seed=seed)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        if options or isinstance(seed, list):
            raise NotImplementedError("reset() takes no options, and make() takes one seed")
        if seed is not None:
            self._envs.close()
            self._make(seed)
        return self._envs.reset()

    def step(self, actions: Any) -> Any:
        return self._envs.step(actions)

    def close(self) -> None:
        self._envs.close()


def playground_cartpole(num_envs: int) -> Any:
    """Build Playground's environments in the wrappers that its trainers use, with episodes of four steps."""
    return _Playground(num_envs)


class _Playground:
    """An adapter from JAX states to results of steps; the wrappers reset an environment in the step that ends its episode.
    """

    metadata: ClassVar[dict[str, Any]] = {"autoreset_mode": AutoresetMode.SAME_STEP}

    def __init__(self, num_envs: int) -> None:
        import jax
        from gymnasium.spaces import Box
        from gymnasium.vector.utils import batch_space
        from mujoco_playground import registry, wrapper

        env = wrapper.wrap_for_brax_training(registry.load("CartpoleBalance"), episode_length=4)
        self.num_envs, self._random = num_envs, jax.random
        self._reset, self._step = jax.jit(env.reset), jax.jit(env.step)
        self.single_observation_space = Box(-np.inf, np.inf, (env.observation_size,), np.float32)
        self.single_action_space = Box(-1, 1, (env.action_size,), np.float32)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        if options or isinstance(seed, list):
            raise NotImplementedError("reset() takes keys, and no options")
        self._state = self._reset(self._random.split(self._random.PRNGKey(seed or 0), self.num_envs))
        return np.array(self._state.obs), {}

    def step(self, actions: Any) -> Any:
        if np.shape(actions) != self.action_space.shape:
            raise ValueError("a wrong number of actions")
        self._state = state = self._step(self._state, actions)
        cut = np.array(state.info["truncation"], bool)
        names = {name: np.array(value) for name, value in state.info.items() if name.endswith("final_obs")}
        infos = {"final_obs": next(iter(names.values())), "_final_obs": np.array(state.done, bool)} if names else {}
        return np.array(state.obs), np.array(state.reward), np.array(state.done, bool) & ~cut, cut, infos

    def close(self) -> None:
        """Do nothing: there is nothing to close."""


def torchrl_serial(env_fns: Sequence[Callable[[], Any]]) -> Any:
    """Build TorchRL's environments in this process."""
    from torchrl.envs import SerialEnv

    return SerialEnv(len(env_fns), [partial(torchrl_env, fn) for fn in env_fns])


def torchrl_parallel(env_fns: Sequence[Callable[[], Any]]) -> Any:
    """Build TorchRL's worker processes."""
    from torchrl.envs import ParallelEnv

    return ParallelEnv(len(env_fns), [partial(torchrl_env, fn) for fn in env_fns])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="engines whose names have this in them")
    parser.add_argument("--no-faults", action="store_true", help="without exceptions, kills and timeouts")
    parser.add_argument("--write", action="store_true", help="put the table into docs/generated/engines.md")
    given = parser.parse_args()
    columns: dict[str, dict[str, str]] = {}
    for name, (engine, package) in ENGINES.items():
        if given.only and given.only.lower() not in name.lower():
            continue
        try:
            title = "vecenv" if package == "vecenv" else f"{name} {importlib.metadata.version(package)}"
            rows = conform(engine, faults=not given.no_faults)
        except (CliError, importlib.metadata.PackageNotFoundError) as error:
            print(f"left out: {name}: {error}")
            continue
        columns[title] = {row.name: row.state for row in rows}
        for row in rows:
            if row.state == BROKEN:
                mode = next(mode for mode, state in row.modes.items() if state == BROKEN)
                print(f"{name}: {row.name}: {mode}: {row.why[mode]}")
    lines = table(columns)
    print("\n".join(["", *lines]))
    if given.write:
        page = ROOT / "docs" / "generated" / "engines.md"
        page.write_text(between(page.read_text(), "engines", lines))


def table(columns: dict[str, dict[str, str]]) -> list[str]:
    """Return the table: a row per promise, a column per engine."""
    names = list(dict.fromkeys(name for column in columns.values() for name in column))
    lines = [f"| promise | {' | '.join(columns)} |", f"|---|{':---:|' * len(columns)}"]
    for name in names:
        cells = [SIGNS.get(column.get(name, ""), "-") for column in columns.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    main()

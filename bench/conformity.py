"""Checks engines with ``vecenv conform``: ``python -m bench.conformity`` prints the table of ``docs/generated/engines.md``.

Each engine is built as in its own documentation. Engines with their own environments run only the checks that work for any
environment. Engines that are not installed are omitted, with a message.
"""

from __future__ import annotations

import argparse
import importlib.metadata
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
from gymnasium.vector import AutoresetMode

from bench.engines import make_torchrl_env
from bench.tables import ROOT, replace_between
from vecenv.tools import CliError
from vecenv.tools.conform import BROKEN, KEPT, conform

SIGNS = {KEPT: "yes", BROKEN: "**no**"}

ENGINES = {
    "Gymnasium SyncVectorEnv": ("gymnasium.vector:SyncVectorEnv", "gymnasium"),
    "Gymnasium AsyncVectorEnv": ("gymnasium.vector:AsyncVectorEnv", "gymnasium"),
    "Gymnasium CartPoleVectorEnv": ("bench.conformity:make_cartpole", "gymnasium"),
    "ALE AtariVectorEnv": ("bench.conformity:make_atari", "ale-py"),
    "EnvPool": ("bench.conformity:make_envpool_cartpole", "envpool"),
    "MuJoCo Playground": ("bench.conformity:make_playground_cartpole", "playground"),
    "SB3 DummyVecEnv": ("stable_baselines3.common.vec_env:DummyVecEnv", "stable-baselines3"),
    "SB3 SubprocVecEnv": ("stable_baselines3.common.vec_env:SubprocVecEnv", "stable-baselines3"),
    "Tianshou DummyVectorEnv": ("tianshou.env:DummyVectorEnv", "tianshou"),
    "Tianshou SubprocVectorEnv": ("tianshou.env:SubprocVectorEnv", "tianshou"),
    "TorchRL SerialEnv": ("bench.conformity:make_torchrl_serial", "torchrl"),
    "TorchRL ParallelEnv": ("bench.conformity:make_torchrl_parallel", "torchrl"),
    "vecenv AsyncVectorEnv": ("vecenv:AsyncVectorEnv", "vecenv"),
}


def make_cartpole(num_envs: int) -> Any:
    """Build Gymnasium's CartPole that is vectorized in NumPy."""
    import gymnasium

    return gymnasium.make_vec("CartPole-v1", num_envs, vectorization_mode="vector_entry_point")


def make_atari(num_envs: int, autoreset_mode: AutoresetMode) -> Any:
    """Build ALE's engine, which steps games in C++ threads."""
    from ale_py.vector_env import AtariVectorEnv

    # the first versions of ALE's engine have only next-step autoreset, and do not accept the argument
    options = {} if autoreset_mode is AutoresetMode.NEXT_STEP else {"autoreset_mode": autoreset_mode}
    return AtariVectorEnv("pong", num_envs, **options)


def make_envpool_cartpole(num_envs: int) -> Any:
    """Build EnvPool's engine, which steps environments in C++ threads, with its Gymnasium interface."""
    return _EnvPoolAdapter(num_envs)


class _EnvPoolAdapter:
    """An adapter for EnvPool, which has no batched spaces, and can be seeded only when it is built."""

    def __init__(self, num_envs: int) -> None:
        from gymnasium.vector.utils import batch_space

        self.num_envs = num_envs
        self._build_envs(0)
        self.single_observation_space, self.single_action_space = self._envs.observation_space, self._envs.action_space
        self.observation_space = batch_space(self._envs.observation_space, num_envs)
        self.action_space = batch_space(self._envs.action_space, num_envs)
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}

    def _build_envs(self, seed: int | list[int]) -> None:
        import envpool

        self._envs = envpool.make_gymnasium("CartPole-v1", num_envs=self.num_envs, seed=seed)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        if options:
            raise NotImplementedError("reset() takes no options")
        if seed is not None:
            self._envs.close()
            self._build_envs(seed)
        return self._envs.reset()

    def step(self, actions: Any) -> Any:
        return self._envs.step(actions)

    def close(self) -> None:
        self._envs.close()


def make_playground_cartpole(num_envs: int) -> Any:
    """Build Playground's environments in the wrappers that its trainers use, with episodes of four steps."""
    return _PlaygroundAdapter(num_envs)


class _PlaygroundAdapter:
    """An adapter that converts Playground's states to results of steps. The step that ends an episode also resets."""

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
            raise NotImplementedError("reset() takes neither options nor a list of seeds")
        self._state = self._reset(self._random.split(self._random.PRNGKey(seed or 0), self.num_envs))
        return np.array(self._state.obs), {}

    def step(self, actions: Any) -> Any:
        if np.shape(actions) != self.action_space.shape:
            raise ValueError(f"actions: got the shape {np.shape(actions)}, expected {self.action_space.shape}")
        self._state = state = self._step(self._state, actions)
        truncated = np.array(state.info["truncation"], bool)
        final_obs = [np.array(value) for name, value in state.info.items() if name.endswith("final_obs")]
        infos = {"final_obs": final_obs[0], "_final_obs": np.array(state.done, bool)} if final_obs else {}
        return np.array(state.obs), np.array(state.reward), np.array(state.done, bool) & ~truncated, truncated, infos

    def close(self) -> None:
        """Do nothing, because compiled functions need not be closed."""


def make_torchrl_serial(env_fns: Sequence[Callable[[], Any]]) -> Any:
    """Build TorchRL's engine that steps in this process."""
    from torchrl.envs import SerialEnv

    return SerialEnv(len(env_fns), [partial(make_torchrl_env, env_fn) for env_fn in env_fns])


def make_torchrl_parallel(env_fns: Sequence[Callable[[], Any]]) -> Any:
    """Build TorchRL's engine with worker processes."""
    from torchrl.envs import ParallelEnv

    return ParallelEnv(len(env_fns), [partial(make_torchrl_env, env_fn) for env_fn in env_fns])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="check only engines with this text in their names")
    parser.add_argument("--no-faults", action="store_true", help="omit the checks of exceptions, kills and timeouts")
    parser.add_argument("--write", action="store_true", help="write the table into docs/generated/engines.md")
    options = parser.parse_args()
    if options.write and (options.only or options.no_faults):
        parser.error("--write needs all engines and checks: omit --only and --no-faults")
    columns: dict[str, dict[str, str]] = {}
    for name, (engine, package) in ENGINES.items():
        if options.only and options.only.lower() not in name.lower():
            continue
        try:
            title = "vecenv" if package == "vecenv" else f"{name} {importlib.metadata.version(package)}"
            rows = conform(engine, faults=not options.no_faults)
        except (CliError, importlib.metadata.PackageNotFoundError) as error:
            print(f"{name} is omitted: {error}")
            continue
        columns[title] = {row.name: row.state for row in rows}
        for row in rows:
            if row.state == BROKEN:
                mode = next(mode for mode, state in row.modes.items() if state == BROKEN)
                print(f"{name}: {row.name}: {mode}: {row.why[mode]}")
    lines = format_table(columns)
    print("\n".join(["", *lines]))
    if options.write:
        page = ROOT / "docs" / "generated" / "engines.md"
        page.write_text(replace_between(page.read_text(), "engines", lines))


def format_table(columns: dict[str, dict[str, str]]) -> list[str]:
    """Return the lines of a Markdown table with a row per promise and a column per engine."""
    names = list(dict.fromkeys(name for column in columns.values() for name in column))
    lines = [f"| promise | {' | '.join(columns)} |", f"|---|{':---:|' * len(columns)}"]
    for name in names:
        cells = [SIGNS.get(column.get(name, ""), "-") for column in columns.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    main()

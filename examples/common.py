"""Code that ppo.py and ppo_jax.py share: command-line options from a dataclass, an actor-critic, and the learning curve."""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import flax.linen as nn
import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

Config = TypeVar("Config")

# --- command-line options -----------------------------------------------------------------------------------------------


def option(default: Any, help: str) -> Any:
    """Return a dataclass field that :func:`parse` reads from a command-line option; a bool becomes a switch."""
    return dataclasses.field(default=default, metadata={"help": help})


def parse(
    cls: type[Config], doc: str | None, presets: Mapping[str, Mapping[str, Any]], key: str, argv: list[str] | None = None
) -> Config:
    """Parse the command line. The option ``key`` selects a preset, which replaces the defaults of other options."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=formatter, allow_abbrev=False, argument_default=argparse.SUPPRESS
    )
    defaults = {field.name: field.default for field in dataclasses.fields(cls)}
    for field in dataclasses.fields(cls):
        name, default, help_text = "--" + field.name.replace("_", "-"), field.default, field.metadata["help"]
        if default != float("inf"):  # otherwise the help text describes the default
            help_text += f" (default: {default})"
        if field.name == "env_id":
            parser.add_argument("env_id", nargs="?", help=help_text)
        elif isinstance(default, bool):
            parser.add_argument(name, help=help_text, action="store_true")
        else:
            parser.add_argument(name, help=help_text, type=type(default))
    lines = [f"  {name}: " + ", ".join(f"{k}={v}" for k, v in preset.items()) for name, preset in presets.items()]
    parser.epilog = "\n".join([f"defaults by {key}:", *lines])
    given = vars(parser.parse_args(argv))
    preset = presets.get(given.get(key, defaults[key]), {})
    return cls(**{**preset, **given})


# --- the actor-critic ---------------------------------------------------------------------------------------------------


class Categorical(NamedTuple):
    """A distribution over the actions of a Discrete space, numbered from 0."""

    logits: jax.Array

    def sample(self, key: jax.Array) -> jax.Array:
        return jax.random.categorical(key, self.logits)

    def mode(self) -> jax.Array:
        return jnp.argmax(self.logits, -1)

    def log_prob(self, choice: jax.Array) -> jax.Array:
        return -optax.softmax_cross_entropy_with_integer_labels(self.logits, choice)

    def entropy(self) -> jax.Array:
        return optax.softmax_cross_entropy(self.logits, jax.nn.softmax(self.logits))


class Gaussian(NamedTuple):
    """A distribution over the actions of a flat Box, which are not clipped to its bounds yet."""

    mean: jax.Array
    log_std: jax.Array

    def sample(self, key: jax.Array) -> jax.Array:
        return self.mean + jnp.exp(self.log_std) * jax.random.normal(key, self.mean.shape)

    def mode(self) -> jax.Array:
        return self.mean

    def log_prob(self, choice: jax.Array) -> jax.Array:
        return jax.scipy.stats.norm.logpdf(choice, self.mean, jnp.exp(self.log_std)).sum(-1)

    def entropy(self) -> jax.Array:
        return (self.log_std + 0.5 * jnp.log(2 * jnp.pi * jnp.e)).sum(-1)


class ActorCritic(nn.Module):
    """Two multilayer perceptrons: ``observation [..., d] -> (distribution over actions, value [...])``."""

    outputs: int
    discrete: bool
    hidden: int

    @nn.compact
    def __call__(self, observation: jax.Array) -> tuple[Categorical | Gaussian, jax.Array]:
        def mlp(outputs: int, scale: float) -> jax.Array:
            x = observation.astype(jnp.float32)
            for _ in range(2):
                x = nn.tanh(nn.Dense(self.hidden, kernel_init=nn.initializers.orthogonal(2**0.5))(x))
            return nn.Dense(outputs, kernel_init=nn.initializers.orthogonal(scale))(x)

        value = mlp(1, 1.0)[..., 0]
        if self.discrete:
            return Categorical(mlp(self.outputs, 0.01)), value
        return Gaussian(*jnp.split(mlp(2 * self.outputs, 0.01), 2, -1)), value


class Agent:
    """An actor-critic for the spaces of a vector environment. Its parameters are passed to each call."""

    def __init__(self, envs: Any, hidden: int) -> None:
        observations, self.space = envs.single_observation_space, envs.single_action_space
        self.discrete = isinstance(self.space, gym.spaces.Discrete)
        if not (isinstance(observations, gym.spaces.Box) and len(observations.shape) == 1):
            raise SystemExit(f"this program needs observations that are a flat array of numbers, not {observations}")
        if not self.discrete and not (isinstance(self.space, gym.spaces.Box) and len(self.space.shape) == 1):
            raise SystemExit(f"this program needs actions that are discrete or a flat array of numbers, not {self.space}")
        self.inputs = observations.shape[0]
        self.net = ActorCritic(int(self.space.n if self.discrete else self.space.shape[0]), self.discrete, hidden)

    def init(self, key: jax.Array) -> Any:
        return self.net.init(key, jnp.zeros(self.inputs))

    def __call__(self, params: Any, observation: jax.Array) -> tuple[Categorical | Gaussian, jax.Array]:
        return self.net.apply(params, observation)

    def action(self, choice: jax.Array) -> jax.Array:
        """Convert a sample of the distribution to an action of the environments."""
        return choice + self.space.start if self.discrete else jnp.clip(choice, self.space.low, self.space.high)


# --- the learning curve -------------------------------------------------------------------------------------------------


class Point(NamedTuple):
    steps: int
    seconds: float
    mean_return: float


class Curve:
    """A learning curve, which shows a progress bar within a ``with`` block, and can be plotted at the end."""

    def __init__(self, total: int) -> None:
        columns = BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
        self._bar = Progress(*columns, console=Console(stderr=True))
        self._task = self._bar.add_task("compiling", total=total)
        self._start = time.perf_counter()
        self.points: list[Point] = []

    def __enter__(self) -> Curve:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def add(self, steps: int, mean_return: float) -> None:
        seconds = time.perf_counter() - self._start
        self.points.append(Point(steps, seconds, mean_return))
        text = f"mean return {mean_return:.1f}, {steps / seconds:,.0f} steps/s"
        self._bar.update(self._task, completed=steps, description=text)

    def draw(self, path: Path, title: str, episodes: str, level: float, level_name: str) -> None:
        """Write a plot of the curve. ``episodes`` describes the averaged episodes; a dashed line marks ``level``."""
        figure = Figure(figsize=(6.0, 3.4), layout="constrained")
        axes = figure.subplots()
        axes.plot([p.steps for p in self.points], [p.mean_return for p in self.points], color="#1b7f5c", linewidth=2)
        if np.isfinite(level):
            axes.axhline(level, color="#c8553d", linestyle="--", linewidth=1)
            axes.annotate(f" {level_name} {level:g}", (0, level), color="#c8553d", fontsize=8, va="bottom")
        axes.set(xlabel="environment steps", ylabel=f"mean return, {episodes}")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_title(title, fontsize=10)
        axes.grid(alpha=0.2)
        axes.spines[["top", "right"]].set_visible(False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=100)

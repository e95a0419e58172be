"""``evaluate_sb3``: a Stable-Baselines3 model on a list of episodes, each run once."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from stable_baselines3.common.base_class import BaseAlgorithm

from vecenv.adapters.sb3 import SB3VecEnv
from vecenv.evaluating.episodes import EpisodeResult, Listed
from vecenv.evaluating.evaluate import evaluate

__all__ = ["evaluate_sb3"]


def evaluate_sb3(
    model: BaseAlgorithm, envs: Any, episodes: Listed, *, deterministic: bool = True, **options: Any
) -> list[EpisodeResult]:
    """:func:`vecenv.evaluate` of a Stable-Baselines3 model, in the place of ``evaluate_policy``.

    Observations are normalised by the statistics of the model's own ``VecNormalize``, if it has one, which stay as they are;
    returns are those of the environments. A recurrent policy (sb3-contrib) keeps a state for each row.

    Args:
        model: Anything with ``predict``, ``observation_space`` and ``action_space``, as SB3's algorithms.
        envs: A vector environment, or what :func:`as_sb3` made of one. What the model was trained through beside
            ``VecNormalize`` and ``VecMonitor``, a stack of frames for one, has to be in its environments.
        episodes: How many, or a sequence of :class:`vecenv.Episode`.
        deterministic: The likeliest action. Otherwise it is drawn from torch's generator, and no two evaluations are alike.
        options: As of :func:`vecenv.evaluate`.

    Raises:
        ValueError: The model's observations or actions are of other spaces than the environments'.
        Exception: As :func:`vecenv.evaluate`.
    """
    inner = envs.vector_env if isinstance(envs, SB3VecEnv) else envs
    for name in ("observation", "action"):
        ours, its = getattr(inner, f"single_{name}_space", None), getattr(model, f"{name}_space")
        if ours is not None and ours.shape != its.shape:
            raise ValueError(f"the model's {name}s are {its}, the environments' {ours}")
    return evaluate(inner, _Predicting(model, inner, deterministic), episodes, **options)


class _Predicting:
    """``model.predict`` as a policy; states of recurrent ones are ``(layers, rows, ...)``."""

    def __init__(self, model: Any, envs: Any, deterministic: bool) -> None:
        self._model = model
        self._rows = getattr(envs, "num_envs", 0) + 1  # and one for padding
        self._deterministic = deterministic
        self._normalize: Any = model.get_vec_normalize_env() if hasattr(model, "get_vec_normalize_env") else None
        self._states: tuple[npt.NDArray[Any], ...] | None = None

    def __call__(self, observations: Any, rows: npt.NDArray[np.intp], begins: npt.NDArray[np.bool_]) -> Any:
        if self._normalize is not None:
            observations = self._normalize.normalize_obs(observations)
        state = None if self._states is None else tuple(part[:, rows] for part in self._states)
        actions, said = self._model.predict(
            observations, state=state, episode_start=begins, deterministic=self._deterministic
        )
        if said is not None:
            if self._states is None:
                self._states = tuple(np.zeros((len(part), self._rows, *part.shape[2:]), part.dtype) for part in said)
            for kept, part in zip(self._states, said, strict=True):
                kept[:, rows] = part
        return actions

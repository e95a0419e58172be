"""``as_sb3``: a vector environment as Stable-Baselines3 wants one; ``evaluate_sb3``: its models on a list of episodes.

SB3's interface is older than Gymnasium's: one ``done`` flag, a list of infos, and in the step that ends an episode the first
observation of the next one, with the last one in ``info["terminal_observation"]``. ``AutoresetMode.SAME_STEP`` is that in
other words, and is translated row by row. In the other modes the rows of a step hold the true last observations, and
environments whose episode has ended are reset at once, by a mask; so no transition is lost and none is made up, in any mode.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import concatenate, create_empty_array
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.preprocessing import check_for_nested_spaces
from stable_baselines3.common.vec_env import VecEnv

from vecenv.adapters.single import AnyVectorEnv, SingleEnvs, added_keys, require, reset_all
from vecenv.evaluating import evaluate
from vecenv.evaluating.episodes import EpisodeResult, Listed
from vecenv.evaluating.policies import map_leaves
from vecenv.front.arguments import OnlyMask
from vecenv.front.infos import info_rows

__all__ = ["SB3VecEnv", "as_sb3", "evaluate_sb3"]

Indices = int | Iterable[int] | None


def as_sb3(envs: AnyVectorEnv) -> SB3VecEnv:
    """A Stable-Baselines3 ``VecEnv`` over a vector environment; closing it closes ``envs``.

    ``as_sb3(vecenv.make_vec("CartPole-v1", 8))`` goes where ``make_vec_env("CartPole-v1", 8)`` or ``SubprocVecEnv(...)``
    went, under ``VecMonitor``, ``VecNormalize`` and the rest. Rewards are float32, as ``DummyVecEnv``'s are.

    Args:
        envs: Any vector environment whose arrays are fresh numpy, of every backend. With ``autoreset_mode="SameStep"`` a
            step that ends an episode is one trip to the environments; in the other modes it is two.

    Raises:
        ImportError: Stable-Baselines3 is not installed.
        TypeError: Not a Gymnasium vector environment.
        ValueError: ``copy=False``, or arrays that are no numpy; says what to change.
        NotImplementedError: Dict or Tuple observations within Dict or Tuple observations, which SB3 does not have.
    """
    return SB3VecEnv(envs)


class SB3VecEnv(VecEnv):  # type: ignore[misc, unused-ignore]  # (Any where SB3 is not installed)
    """What :func:`as_sb3` returns.

    Attributes:
        vector_env: The vector environment beneath.
        reset_infos: The info of each environment's latest reset.
    """

    def __init__(self, envs: AnyVectorEnv) -> None:
        mode = require(envs, "Stable-Baselines3", list(AutoresetMode))
        check_for_nested_spaces(envs.single_observation_space)
        self.vector_env: Any = envs
        self._singles = SingleEnvs(envs)
        self._same_step = mode is AutoresetMode.SAME_STEP
        self._actions: Any = None
        self._begin: Any = getattr(envs, "step_async", None)  # vector wrappers and compiled environments have none
        self._finish: Any = getattr(envs, "step_wait", None)
        super().__init__(envs.num_envs, envs.single_observation_space, envs.single_action_space)
        self._structured = isinstance(envs.single_action_space, (spaces.Dict, spaces.Tuple))
        self._added = added_keys(envs)
        self.metadata = dict(envs.metadata)
        self.spec = envs.spec

    # -- reset and step ---------------------------------------------------------------------------------------------

    def reset(self) -> Any:
        """Reset all environments, with what ``seed`` and ``set_options`` said since the last time; drops a pending step."""
        options: Any = self._options
        if all(each == options[0] for each in options):
            options = options[0] or None
        observations, infos = reset_all(self.vector_env, self._seeds, options)
        self.reset_infos = info_rows(infos, self.num_envs)
        self._reset_seeds()
        self._reset_options()
        return observations

    def set_options(self, options: list[dict[str, Any]] | dict[str, Any] | None = None) -> None:
        """Options of the next reset: one dict for all environments, or a list with one for each.

        Raises (the next ``reset``):
            ValueError, NotImplementedError: The vector environment takes none, or cannot give each its own.
        """
        super().set_options(options)

    def step_async(self, actions: Any) -> None:
        """Begin a step.

        Args:
            actions: ``actions[i]`` is environment i's, as everywhere in SB3; of a ``Dict`` space, a dict is the batch.
        """
        if self._structured and not isinstance(actions, Mapping):
            actions = self._joined(actions)
        if self._begin is None:
            self._actions = np.array(actions)
        else:
            self._begin(actions)

    def _joined(self, actions: Any) -> Any:
        """One structured action an environment as the batch that vector environments take."""
        if len(actions) != self.num_envs:
            raise ValueError(f"step wants an action for each of {self.num_envs} environments, got {len(actions)}")
        empty: Any = create_empty_array(self.action_space, self.num_envs)
        return concatenate(self.action_space, list(actions), empty)

    def step_wait(self) -> tuple[Any, npt.NDArray[np.float32], npt.NDArray[np.bool_], list[dict[str, Any]]]:
        """Finish it: ``(observations, rewards, dones, infos)``."""
        results = self.vector_env.step(self._actions) if self._begin is None else self._finish()
        observations, rewards, terminations, truncations, infos = results
        dones = terminations | truncations
        rows = info_rows(infos, self.num_envs)
        ended = np.flatnonzero(dones).tolist()
        if ended and not self._same_step:
            for row in ended:
                rows[row]["terminal_observation"] = _row(observations, row)
            observations, infos = self.vector_env.reset(options=OnlyMask(reset_mask=dones.copy()))
            for row, info in enumerate(info_rows(infos, self.num_envs)):
                if dones[row]:
                    self.reset_infos[row] = info
        elif ended:
            for row in ended:
                rows[row], self.reset_infos[row] = _parted(rows[row], self._added)
        for info, truncated in zip(rows, (truncations & ~terminations).tolist(), strict=True):
            info["TimeLimit.truncated"] = truncated
        return observations, rewards.astype(np.float32), dones, rows

    # -- single environments ----------------------------------------------------------------------------------------

    def get_attr(self, attr_name: str, indices: Indices = None) -> list[Any]:
        """An attribute of each environment, of whichever wrapper has it."""
        return self._singles.get(attr_name, self._get_indices(indices))

    def set_attr(self, attr_name: str, value: Any, indices: Indices = None) -> None:
        """Set an attribute where it is, below wrappers too; SB3's own sets it on the outermost wrapper, and there only."""
        self._singles.set(attr_name, value, self._get_indices(indices))

    def env_method(self, method_name: str, *method_args: Any, indices: Indices = None, **method_kwargs: Any) -> list[Any]:
        """Call a method of each environment, of whichever wrapper has it."""
        return self._singles.call(method_name, self._get_indices(indices), *method_args, **method_kwargs)

    def env_is_wrapped(self, wrapper_class: type[Any], indices: Indices = None) -> list[bool]:
        """Whether each environment has a wrapper of this class."""
        return self._singles.is_wrapped(wrapper_class, self._get_indices(indices))

    # -- pictures and the end ---------------------------------------------------------------------------------------

    def get_images(self) -> Sequence[npt.NDArray[np.uint8] | None]:
        """One frame an environment; ``None`` each, with a warning, unless ``render_mode`` is ``"rgb_array"``."""
        if self.render_mode != "rgb_array":
            warnings.warn(f"render_mode is {self.render_mode!r}; pictures need 'rgb_array'", stacklevel=2)
            return [None] * self.num_envs
        return list(self.vector_env.render())

    def close(self) -> None:
        """Close the vector environment."""
        self.vector_env.close()


def _parted(merged: dict[str, Any], added: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The info of an episode's last step, and that of the reset after it, which same-step mode puts beside it.

    What vector wrappers ``added`` is about the episode that ended.
    """
    info: dict[str, Any] = merged.pop("final_info", {})
    info.update({key: merged.pop(key) for key in added if key in merged})
    if "final_obs" in merged:
        info["terminal_observation"] = merged.pop("final_obs")
    if "restarted" in merged:  # on_failure="restart": this step was lost, and the episode with it
        info["restarted"] = merged.pop("restarted")
    return info, merged


def _row(batch: Any, row: int) -> Any:
    """One environment's observation, as a copy; where the space is Discrete, environments give an int."""
    return map_leaves(lambda leaf: int(leaf[row]) if isinstance(leaf[row], np.int64) else leaf[row].copy(), batch)


# -- evaluation --------------------------------------------------------------------------------------------------------


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
        actions, states = self._model.predict(
            observations, state=state, episode_start=begins, deterministic=self._deterministic
        )
        if states is not None:
            if self._states is None:
                self._states = tuple(np.zeros((len(part), self._rows, *part.shape[2:]), part.dtype) for part in states)
            for kept, part in zip(self._states, states, strict=True):
                kept[:, rows] = part
        return actions

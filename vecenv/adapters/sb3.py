"""``as_sb3`` wraps a vector environment in a Stable-Baselines3 ``VecEnv``; ``evaluate_sb3`` evaluates an SB3 model.

SB3's interface is older than Gymnasium's. It has one ``done`` flag and a list of infos; a step that ends an episode returns
the first observation of the next one, with the last one in ``info["terminal_observation"]``. ``AutoresetMode.SAME_STEP``
returns the same in another format, which is converted row by row. In the other modes a step returns the last observation of
an episode, and the adapter then resets its environment with ``reset_mask``. So in every mode, all transitions are correct
and none is missing.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import Space, spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.preprocessing import check_for_nested_spaces, is_image_space
from stable_baselines3.common.vec_env import (
    VecEnv,
    VecEnvWrapper,
    VecFrameStack,
    VecMonitor,
    VecNormalize,
    VecTransposeImage,
)

from vecenv.adapters.single import (
    AnyVectorEnv,
    SingleEnvs,
    agents_per_env,
    require_settings,
    reset_all,
)
from vecenv.evaluating import evaluate
from vecenv.evaluating.episodes import EpisodeList, EpisodeResult, episode_statistics_keys
from vecenv.evaluating.policies import map_leaves
from vecenv.front.arguments import MaskOnlyOptions
from vecenv.front.by_row import infos_by_row
from vecenv.front.driver import Phase, pending_call_error
from vecenv.system.reporting import warn

__all__ = ["SB3VecEnv", "as_sb3", "evaluate_sb3"]

Indices = int | Iterable[int] | None


def as_sb3(envs: AnyVectorEnv) -> SB3VecEnv:
    """Wrap a vector environment in a Stable-Baselines3 ``VecEnv``; closing the wrapper closes ``envs``.

    ``VecMonitor(as_sb3(vecenv.make_vec("CartPole-v1", 8)))`` replaces ``make_vec_env("CartPole-v1", 8)``. The result can be
    wrapped in ``VecNormalize`` and similar wrappers. Rewards are float32, as in ``DummyVecEnv``.

    Args:
        envs: A vector environment of any backend that returns fresh numpy arrays. With ``autoreset_mode="SameStep"`` a
            step that ends an episode takes one request to the environments; in the other modes it takes two.

    Raises:
        TypeError: ``envs`` is not a Gymnasium vector environment.
        ValueError: ``envs`` has ``copy=False``, arrays that are not NumPy's or, with several environments, a vector wrapper
            ``NormalizeObservation`` or, unless its mode is ``"SameStep"``, no resets with a ``reset_mask``.
        NotImplementedError: Dict or Tuple observations within Dict or Tuple observations, which SB3 does not support.
    """
    return SB3VecEnv(envs)


class SB3VecEnv(VecEnv):  # type: ignore[misc, unused-ignore]  # (Any where SB3 is not installed)
    """A Stable-Baselines3 ``VecEnv`` over a vector environment, built by :func:`as_sb3`.

    Attributes:
        vector_env: The wrapped vector environment.
        reset_infos: The info of each environment's latest reset.
    """

    def __init__(self, envs: AnyVectorEnv) -> None:
        mode = require_settings(envs, "Stable-Baselines3", list(AutoresetMode))
        check_for_nested_spaces(envs.single_observation_space)
        self.vector_env: Any = envs
        self._single_envs = SingleEnvs(envs)
        self._same_step = mode is AutoresetMode.SAME_STEP
        if not self._same_step and hasattr(envs.unwrapped, "spares"):
            warn(
                f"with autoreset_mode={mode.value!r} as_sb3 resets finished environments itself, so the spare environments "
                "are never used: pass autoreset_mode='SameStep'"
            )
        self._actions: Any = None
        self._stepped: Any = None  # a step's results, until its ended environments have been reset
        self._begin_step: Any = getattr(envs, "step_async", None)  # absent from wrappers and, for example, SyncVectorEnv
        self._by_row = infos_by_row(envs)
        self._rows_are_agents = agents_per_env(envs) > 1
        super().__init__(envs.num_envs, envs.single_observation_space, envs.single_action_space)
        self._structured = isinstance(envs.single_action_space, (spaces.Dict, spaces.Tuple))
        self._added_info_keys = episode_statistics_keys(envs)
        self.metadata = dict(envs.metadata)
        self.spec = envs.spec

    # -- reset and step ---------------------------------------------------------------------------------------------

    def reset(self) -> Any:
        """Reset all environments with the seeds and options that were set since the last reset, and drop a pending step."""
        options: Any = [each or None for each in self._options]  # as in `DummyVecEnv`
        if len(options) == self.num_envs and _are_equal(options):
            options = options[0]
        observations, self.reset_infos = reset_all(self._by_row, self._seeds, options)
        self._stepped = None
        self._reset_seeds()
        self._reset_options()
        return observations

    def set_options(self, options: list[dict[str, Any]] | dict[str, Any] | None = None) -> None:
        """Set the options of the next reset: one dict for all environments, or a list with one dict per environment.

        Raises (the next ``reset``):
            ValueError, NotImplementedError: The vector environment accepts no options, or none per environment.
        """
        super().set_options(options)

    def step_async(self, actions: Any) -> None:
        """Begin a step.

        Args:
            actions: ``actions[i]`` belongs to environment i, as always in SB3; a dict holds a batch per key.
        """
        if self._stepped is not None:
            raise pending_call_error("step_async", Phase.WAITING_STEP)
        if self._structured and not isinstance(actions, Mapping):
            actions = self._join_actions(actions)
        if self._begin_step is None:
            self._actions = copy.deepcopy(actions) if self._structured else np.array(actions)
        else:
            self._begin_step(actions)

    def _join_actions(self, actions: Any) -> Any:
        """Join one structured action per environment into a batch of the vector environment."""
        if len(actions) != self.num_envs:
            raise ValueError(f"step needs one action for each of {self.num_envs} environments, got {len(actions)}")
        empty: Any = create_empty_array(self.action_space, self.num_envs)
        return concatenate(self.action_space, list(actions), empty)

    def step_wait(self) -> tuple[Any, npt.NDArray[np.float32], npt.NDArray[np.bool_], list[dict[str, Any]]]:
        """Finish the step and return ``(observations, rewards, dones, infos)``. If it is interrupted, call it again."""
        if self._stepped is None:
            self._stepped = self._by_row.step(self._actions) if self._begin_step is None else self._by_row.step_wait()
        observations, rewards, terminations, truncations, infos = self._stepped
        dones = terminations | truncations
        ended = np.flatnonzero(dones).tolist()
        last: dict[int, Any] = {}
        if ended and not self._same_step:
            last = {row: _copy_row(observations, row) for row in ended}
            to_reset = np.array([info["env_done"] for info in infos]) if self._rows_are_agents else dones.copy()
            if to_reset.any():
                observations, reset_infos = reset_all(self._by_row, options=MaskOnlyOptions(reset_mask=to_reset))
            for row in np.flatnonzero(to_reset).tolist():
                self.reset_infos[row] = reset_infos[row]
        self._stepped = None
        if ended and self._same_step:
            for row in ended:
                infos[row], last[row], reset_info = _split_info(infos[row], self._added_info_keys)
                if not self._rows_are_agents or reset_info["env_done"]:
                    self.reset_infos[row] = reset_info
        for info, truncated in zip(infos, (truncations & ~terminations).tolist(), strict=True):
            info["TimeLimit.truncated"] = truncated
        for row, observation in last.items():
            infos[row]["terminal_observation"] = observation
        return observations, rewards.astype(np.float32), dones, infos

    # -- single environments ----------------------------------------------------------------------------------------

    def get_attr(self, attr_name: str, indices: Indices = None) -> list[Any]:
        """Return an attribute of each environment, from the outermost wrapper that has it."""
        return self._single_envs.get(attr_name, self._get_indices(indices))

    def set_attr(self, attr_name: str, value: Any, indices: Indices = None) -> None:
        """Set an attribute where it exists, also below wrappers. SB3's own classes only set it on the outermost wrapper."""
        self._single_envs.set(attr_name, value, self._get_indices(indices))

    def env_method(self, method_name: str, *method_args: Any, indices: Indices = None, **method_kwargs: Any) -> list[Any]:
        """Call a method of each environment, on the outermost wrapper that has it."""
        return self._single_envs.call(method_name, self._get_indices(indices), *method_args, **method_kwargs)

    def env_is_wrapped(self, wrapper_class: type[Any], indices: Indices = None) -> list[bool]:
        """Return a bool per environment: True if it has a wrapper of this class."""
        return self._single_envs.is_wrapped(wrapper_class, self._get_indices(indices))

    # -- frames, close() and repr() -----------------------------------------------------------------------------------------

    def get_images(self) -> Sequence[npt.NDArray[np.uint8] | None]:
        """Return one frame per environment; unless ``render_mode`` is ``"rgb_array"``, warn and return ``None`` for each."""
        if self.render_mode != "rgb_array":
            warnings.warn(f"render_mode is {self.render_mode!r}; frames need 'rgb_array'", stacklevel=2)
            return [None] * self.num_envs
        return list(self.vector_env.render())

    def close(self) -> None:
        """Close the vector environment."""
        self.vector_env.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.vector_env!r})"


def _are_equal(options: Sequence[dict[str, Any] | None]) -> bool:
    try:
        return all(each == options[0] for each in options)
    except ValueError:  # different arrays, for which `==` returns an array
        return False


def _split_info(merged: dict[str, Any], added: Collection[str]) -> tuple[dict[str, Any], Any, dict[str, Any]]:
    """Split an info of same-step mode into the last step's info and observation, and the info of the following reset.

    Keys ``added`` by vector wrappers belong to the episode that ended.
    """
    info: dict[str, Any] = merged.pop("final_info", {})
    info.update({key: merged.pop(key) for key in added if key in merged})
    if merged.get("restarted") is True:  # on_failure="restart": the step was lost, and with it the episode
        info["restarted"] = merged.pop("restarted")
    return info, merged.pop("final_obs", None), merged


def _copy_row(batch: Any, row: int) -> Any:
    """Copy one environment's observation; for a Discrete space it is an int, as from the environment itself."""
    return map_leaves(lambda leaf: int(leaf[row]) if isinstance(leaf[row], np.int64) else leaf[row].copy(), batch)


# -- evaluation --------------------------------------------------------------------------------------------------------


def evaluate_sb3(
    model: BaseAlgorithm, envs: Any, episodes: EpisodeList, *, deterministic: bool = True, **options: Any
) -> list[EpisodeResult]:
    """Run :func:`vecenv.evaluate` with a Stable-Baselines3 model, in place of ``evaluate_policy``.

    Observations are normalised by the ``VecNormalize`` around ``envs``, or by the model's own if there is none; its
    statistics are not updated. Returns are not normalised. A recurrent policy (sb3-contrib) keeps one state per row.

    Args:
        model: An object with ``predict``, ``observation_space`` and ``action_space``, such as SB3's algorithms.
        envs: A vector environment, or the result of :func:`as_sb3`, even within ``VecMonitor``, ``VecNormalize`` or
            ``VecTransposeImage`` (the model transposes images by itself). Other wrappers used in training, such as frame
            stacking, must be in the single environments.
        episodes: A number of episodes, or a sequence of :class:`vecenv.Episode`.
        deterministic: Use the most likely action. Otherwise actions are drawn from torch's generator, so evaluations differ.
        options: Further arguments of :func:`vecenv.evaluate`.

    Raises:
        TypeError: ``model`` has no ``predict``, or ``envs`` is not a vector environment or has another wrapper
            of Stable-Baselines3.
        ValueError: The model's observation or action space differs from that of the environments.
        Exception: The errors of :func:`vecenv.evaluate`.
    """
    normalize = model.get_vec_normalize_env() if hasattr(model, "get_vec_normalize_env") else None
    while isinstance(envs, VecEnvWrapper):
        if isinstance(envs, VecNormalize):
            normalize = envs
        elif not isinstance(envs, VecMonitor | VecTransposeImage):
            stacks = ", as docs/clients.md shows" if isinstance(envs, VecFrameStack) else ""
            raise TypeError(
                f"evaluate_sb3 does not apply {type(envs).__name__}: wrap the single environments instead{stacks}"
            )
        envs = envs.venv
    inner = envs.vector_env if isinstance(envs, SB3VecEnv) else envs
    if not hasattr(model, "predict") or not (isinstance(inner, VectorEnv) or hasattr(inner, "possible_agents")):
        swapped = hasattr(envs, "predict")
        problem = "are the first two swapped?" if swapped else "needs a model with predict() and a vector environment"
        raise TypeError(f"evaluate_sb3(model, envs, episodes): got model={model!r} and envs={envs!r}: {problem}")
    for name in ("observation", "action"):
        env_space, model_space = getattr(inner, f"single_{name}_space", None), getattr(model, f"{name}_space")
        if env_space is not None and not _fits(env_space, model_space):
            raise ValueError(
                f"the model's {name}s are {model_space}, the environments' {env_space}; wrappers used in training other "
                "than VecNormalize must be in the single environments"
            )
    return evaluate(inner, _ModelPolicy(model, inner, normalize, deterministic), episodes, **options)


def _fits(env_space: Space[Any], model_space: Space[Any]) -> bool:
    """True if the spaces are equal, apart from bounds and dtypes of Boxes and the position of image channels.

    SB3 puts channels first.
    """
    if isinstance(env_space, spaces.Dict) and isinstance(model_space, spaces.Dict):
        return env_space.keys() == model_space.keys() and all(_fits(env_space[key], model_space[key]) for key in env_space)
    if not isinstance(env_space, spaces.Box):
        return env_space == model_space
    shape = env_space.shape
    if not is_image_space(env_space) or not is_image_space(model_space):
        return shape == model_space.shape
    return model_space.shape in (shape, (*shape[2:], *shape[:2]))


class _ModelPolicy:
    """A policy that calls ``model.predict``; states of recurrent models are ``(layers, rows, ...)``."""

    def __init__(self, model: Any, envs: Any, normalize: Any, deterministic: bool) -> None:
        self._model = model
        self._num_rows = getattr(envs, "num_envs", 0) + 1  # one more for padding
        self._deterministic = deterministic
        self._normalize = normalize
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
                self._states = tuple(np.zeros((len(part), self._num_rows, *part.shape[2:]), part.dtype) for part in states)
            for stored, part in zip(self._states, states, strict=True):
                stored[:, rows] = part
        return actions

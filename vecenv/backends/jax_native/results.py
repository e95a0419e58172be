"""What a ``JaxVectorEnv`` returns: a state of the device as numpy, JAX or torch, in Gymnasium's form."""

from __future__ import annotations

import time
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode

from vecenv.front.driver import Stepped
from vecenv.jax.native.functional import FunctionalVectorEnv
from vecenv.jax.native.handover import info_arrays, masked_infos, rows_of, to_numpy, to_torch
from vecenv.jax.native.state import EnvState

__all__ = ["Reader"]

_PAUSE = 1e-4  # between two looks at whether the device is done: JAX has no wait with an end


class Reader:
    """Reads states.

    Args:
        functional: The environments.
        to: ``"numpy"``, ``"jax"`` or ``"torch"``.
        infos: Report the environments' metrics.

    Attributes:
        waited: Seconds spent waiting for the device. With ``"jax"`` and ``"torch"`` only :meth:`wait` waits.
    """

    def __init__(self, functional: FunctionalVectorEnv, to: str, infos: bool) -> None:
        self.waited = 0.0
        self._to = to
        self._infos = infos
        self._num_envs = functional.num_envs
        self._space = functional.observation_space
        self._single_space = functional.single_observation_space
        self._same_step = functional.autoreset_mode is AutoresetMode.SAME_STEP

    def wait(self, state: EnvState, deadline: float) -> bool:
        """Wait for the device until ``deadline``; whether it is done."""
        began = time.monotonic()
        leaves: list[Any] = jax.tree.leaves((state.obs, state.reward))
        try:
            while not all(leaf.is_ready() for leaf in leaves):
                if time.monotonic() >= deadline:
                    return False
                time.sleep(_PAUSE)
            return True
        finally:
            self.waited += time.monotonic() - began

    def stepped(self, state: EnvState, infos: bool = True) -> Stepped:
        """What ``step`` returns; without ``infos`` of a state that a reset returned, whose environments report none."""
        if self._to != "numpy":
            said = self._device_infos(state) if infos else {}
            values: Any = (state.obs, state.reward, state.terminated, state.truncated, said)
            stepped: Stepped = values if self._to == "jax" else to_torch(values)
            return stepped
        began = time.perf_counter()
        terminated = np.array(state.terminated)  # whatever is asked for first waits for the whole program
        self.waited += time.perf_counter() - began
        truncated = np.array(state.truncated)
        rewards = np.asarray(state.reward).astype(np.float64)
        said = self._host_infos(state, terminated, truncated) if infos else {}
        return to_numpy(self._space, state.obs), rewards, terminated, truncated, said

    def chunk(self, out: EnvState) -> Stepped:
        """What ``step_chunk`` returns, of states stacked along a leading axis."""
        infos = {**(out.info if self._infos else {}), "next_obs": out.next_obs, "valid": out.valid}
        values: Any = (out.obs, out.reward, out.terminated, out.truncated, infos)
        if self._to == "numpy":
            observations, rewards, *others = jax.tree.map(np.array, values)
            values = (observations, rewards.astype(np.float64), *others)
        elif self._to == "torch":
            values = to_torch(values)
        stepped: Stepped = values
        return stepped

    def _host_infos(
        self, state: EnvState, terminated: npt.NDArray[np.bool_], truncated: npt.NDArray[np.bool_]
    ) -> dict[str, Any]:
        info = info_arrays(state.info) if self._infos else {}
        if not self._same_step:
            return masked_infos(info, np.asarray(state.valid))
        ended = terminated | truncated
        infos: dict[str, Any] = {}
        if ended.any():
            infos["final_obs"] = self._final_observations(state, ended)
            infos["final_info"] = masked_infos(info, ended)
            infos["_final_obs"], infos["_final_info"] = ended.copy(), ended.copy()
        infos.update(masked_infos(info, ~ended))
        return infos

    def _final_observations(self, state: EnvState, ended: npt.NDArray[np.bool_]) -> npt.NDArray[np.object_]:
        host = jax.tree.map(np.asarray, state.next_obs)
        column = np.full(self._num_envs, None, dtype=object)
        for row in np.flatnonzero(ended).tolist():
            column[row] = rows_of(self._single_space, host, row)
        return column

    def _device_infos(self, state: EnvState) -> dict[str, Any]:
        info = state.info if self._infos else {}
        if not self._same_step:
            return masked_infos(info, state.valid)
        ended = state.terminated | state.truncated
        final = {"final_obs": state.next_obs, "final_info": masked_infos(info, ended)}
        return {**final, "_final_obs": ended, "_final_info": ended, **masked_infos(info, ~ended)}

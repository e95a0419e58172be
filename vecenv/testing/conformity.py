"""Checks whether an engine keeps the promises in Gymnasium's documentation of vector environments.

Each check is a function of one or two open vector environments; :func:`make_program` turns its body into a program that
shows the defect. ``vecenv conform`` runs the checks (:mod:`vecenv.tools.conform`). Checks with a parameter ``envs`` rely on
:class:`InputReportingEnv`; the others also fit engines that build their own environments. :attr:`Check.known` lists issues
about engines with the defect.
"""

from __future__ import annotations

import copy
import inspect
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, iterate

__all__ = [
    "CHECKS", "NUM_ENVS", "Check", "InputReportingEnv", "as_gymnasium", "make_env_fns", "make_program", "step_until_done",
    "step_with_resets",
]  # fmt: skip

NUM_ENVS: Final = 3  # environments per check
_MAX_STEPS: Final = 300  # an episode must end within this many

# the pages that document the promises
_VECTOR: Final = "https://gymnasium.farama.org/api/vector/"
_MODES: Final = "https://farama.org/Vector-Autoreset-Mode"
_ENV: Final = "https://gymnasium.farama.org/api/env/"

EVERY: Final = tuple(AutoresetMode)
NEXT, SAME, DISABLED = (AutoresetMode.NEXT_STEP,), (AutoresetMode.SAME_STEP,), (AutoresetMode.DISABLED,)


class InputReportingEnv(gymnasium.Env[Any, Any]):
    """An environment that reports its inputs: its observation is (seed of the latest reset, episode, step, action).

    A missing seed or action is -1. The reward is 100 times the episode plus the step. Episodes end by termination,
    truncation, or both, in turn. Until the last step of an episode, it returns the same array and the same dict every time,
    as many environments do. After a reset with the options ``{"given": -1}``, steps raise.

    Args:
        length: The number of steps in an episode.
    """

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (4,), np.float64)
    action_space = gymnasium.spaces.Discrete(9)
    resets = 0

    def __init__(self, length: int = 3) -> None:
        self.length = length
        self.state = np.array([-1.0, -1.0, 0.0, -1.0])
        self.info: dict[str, Any] = {}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.resets += 1
        self.state[:] = (-1 if seed is None else seed), self.state[1] + 1, 0, -1
        self.info.clear()
        self.given = (options or {}).get("given")
        self.info.update({"begins": int(self.state[1])} | ({} if self.given is None else {"given": self.given}))
        return self.state, self.info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.state[2:] = self.state[2] + 1, action
        _, episode, step, _ = self.state
        ended = step == self.length
        self.info.clear()
        self.info.update({"at": int(step)} | ({"odd": True} if step % 2 else {}))
        if self.given == -1:
            raise ValueError("fails on purpose")
        terminated, truncated = ((True, False), (False, True), (True, True))[int(episode) % 3]
        state, info = (self.state.copy(), self.info.copy()) if ended else (self.state, self.info)
        return state, float(100 * episode + step), bool(ended and terminated), bool(ended and truncated), info


def make_env_fns(count: int = NUM_ENVS) -> list[Callable[[], InputReportingEnv]]:
    """Return functions that build environments with episodes of 3, 4, 5 ... steps."""
    return [partial(InputReportingEnv, 3 + index) for index in range(count)]


def step_with_resets(envs: Any, actions: Any) -> Any:
    """Step and return the results. If autoreset is disabled, also reset environments after the end of an episode."""
    results = envs.step(actions)
    if (ended := results[2] | results[3]).any() and envs.metadata.get("autoreset_mode") == AutoresetMode.DISABLED:
        envs.reset(options={"reset_mask": ended})
    return results


@dataclass(frozen=True)
class Check:
    """A check of one promise.

    Attributes:
        name: A short name.
        run: A function of one vector environment, or of two equal ones. It raises ``NotImplementedError`` if
            they do not support the check, and another exception if the promise is broken.
        modes: The autoreset modes to check.
        about: The documented promise, and its source.
        known: The issues about engines that broke it.
        fault: True if the check involves an exception, a killed worker or a timeout.
    """

    name: str
    run: Callable[..., None]
    modes: tuple[AutoresetMode, ...]
    about: str
    known: str
    fault: bool

    @property
    def needs_reporting_envs(self) -> bool:
        """True if the check needs :class:`InputReportingEnv` environments: such a check names its parameter ``envs``."""
        return next(iter(inspect.signature(self.run).parameters)) == "envs"

    @property
    def num_engines(self) -> int:
        """The number of vector environments that :attr:`run` needs."""
        return len(inspect.signature(self.run).parameters)


CHECKS: list[Check] = []


def _check(
    name: str, about: str, modes: tuple[AutoresetMode, ...] = EVERY, known: str = "", *, fault: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds the function to :data:`CHECKS`."""

    def add(run: Callable[..., None]) -> Callable[..., None]:
        CHECKS.append(Check(name, run, modes, about, known, fault))
        return run

    return add


def make_program(check: Check, engine: str, expression: str) -> str:
    """Return a complete program that shows the defect; ``expression`` builds the engine."""
    module, _, name = engine.partition(":")
    lines = inspect.getsource(check.run).splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("def ")) + 1
    body = textwrap.dedent("\n".join(lines[first:]))
    opened = "\n".join(f"{variable} = {expression}" for variable in inspect.signature(check.run).parameters)
    return (
        "import copy\nimport gymnasium\nimport numpy as np\nfrom gymnasium.vector import AutoresetMode\n"
        f"from gymnasium.vector.utils import batch_space, iterate\nfrom {module} import {name}\n"
        f"from vecenv.testing.conformity import *\n\n{opened}\n{body}\n"
    )


# -- any engine -----------------------------------------------------------------------------------------------------------


@_check("spaces are batched", f"`observation_space` and `action_space` are batches of the single ones: {_VECTOR}")
def spaces(any_envs: Any) -> None:
    assert any_envs.observation_space == batch_space(any_envs.single_observation_space, any_envs.num_envs)
    assert any_envs.action_space == batch_space(any_envs.single_action_space, any_envs.num_envs)


@_check("metadata names the mode", f"`metadata['autoreset_mode']` is the mode: {_MODES}")
def metadata(any_envs: Any) -> None:
    assert isinstance(any_envs.metadata.get("autoreset_mode"), AutoresetMode), any_envs.metadata


@_check("reset: observations and infos", f"`reset` returns a batch of observations and a dict: {_VECTOR}")
def reset_returns(any_envs: Any) -> None:
    observations, infos = any_envs.reset(seed=1)
    assert observations in any_envs.observation_space, "the observations are not in observation_space"
    assert isinstance(infos, dict), type(infos)


@_check("step: observations, rewards, flags and infos",
        f"rewards are numbers and flags bools, one per environment: {_VECTOR}")  # fmt: skip
def step_returns(any_envs: Any) -> None:
    any_envs.reset(seed=1)
    observations, *numbers, infos = any_envs.step(any_envs.action_space.sample())
    assert observations in any_envs.observation_space, "the observations are not in observation_space"
    for name, array, kinds in zip(("rewards", "terminations", "truncations"), numbers, ("fiu", "b", "b"), strict=True):
        assert array.shape == (any_envs.num_envs,), f"{name}: {array.shape}"
        assert array.dtype.kind in kinds, f"{name}: {array.dtype}"
    assert isinstance(infos, dict), type(infos)


@_check("arrays of an earlier step do not change", f"with `copy=True` observations are fresh at every step: {_VECTOR}",
        known="tianshou#1281")  # fmt: skip
def fresh_arrays(any_envs: Any) -> None:
    any_envs.reset(seed=1)
    results = [step_with_resets(any_envs, any_envs.action_space.sample())[:4] for _ in range(2)]
    copies = copy.deepcopy(results)
    any_envs.step(any_envs.action_space.sample())
    for now, before in zip(results, copies, strict=True):
        for name, array, old in zip(("observations", "rewards", "terminations", "truncations"), now, before, strict=True):
            np.testing.assert_equal(array, old, err_msg=f"{name} of an earlier step changed")


@_check("every info has a mask", f"each key of infos has a bool mask `_key`: {_VECTOR}", known="ALE#614")
def masks(any_envs: Any) -> None:
    infos = [any_envs.reset(seed=1)[1]] + [step_with_resets(any_envs, any_envs.action_space.sample())[4] for _ in range(5)]
    for key in [key for info in infos for key in info if not str(key).startswith("_")]:
        for info in [info for info in infos if key in info]:
            assert np.shape(info.get(f"_{key}")) == (any_envs.num_envs,), f"{key!r} has no mask"


@_check("the same seed gives the same trajectory", f"a seed makes a reset deterministic: {_ENV}#gymnasium.Env.reset")
def same_seed(any_envs: Any, twin: Any) -> None:
    np.testing.assert_equal(any_envs.reset(seed=5)[0], twin.reset(seed=5)[0])
    any_envs.action_space.seed(1)
    for _ in range(20):
        actions = any_envs.action_space.sample()
        for mine, other in zip(step_with_resets(any_envs, actions)[:4], step_with_resets(twin, actions)[:4], strict=True):
            np.testing.assert_equal(mine, other)


@_check("an int seeds environment i with seed + i", f"an int n seeds the environments with n, n + 1, ...: {_VECTOR}")
def consecutive_seeds(any_envs: Any, twin: Any) -> None:
    mine = any_envs.reset(seed=5)[0]
    try:
        other = twin.reset(seed=[5 + i for i in range(any_envs.num_envs)])[0]
    except Exception as error:
        raise NotImplementedError(f"reset() accepts no list of seeds: {error}") from error
    np.testing.assert_equal(mine, other)


@_check("a masked reset leaves the others alone",
        f"`options['reset_mask']` resets only the environments that it marks: {_MODES}", known="ALE#673, #676")  # fmt: skip
def masked_reset(any_envs: Any) -> None:
    any_envs.reset(seed=1)
    before = copy.deepcopy(any_envs.step(any_envs.action_space.sample())[0])
    after = any_envs.reset(options={"reset_mask": np.array([True] + [False] * (any_envs.num_envs - 1))})[0]
    rows_after, rows_before = (list(iterate(any_envs.observation_space, batch))[1:] for batch in (after, before))
    np.testing.assert_equal(rows_after, rows_before)


@_check("a wrong number of actions is refused", f"`actions` is an element of `action_space`: {_VECTOR}",
        known="Gymnasium#1417")  # fmt: skip
def wrong_actions(any_envs: Any) -> None:
    any_envs.reset(seed=1)
    refused = False
    try:
        any_envs.step(batch_space(any_envs.single_action_space, any_envs.num_envs + 1).sample())
    except Exception:
        refused = True
    assert refused, f"{any_envs.num_envs + 1} actions were accepted for {any_envs.num_envs} environments"


@_check("close may be called twice", f"`close` of a closed vector environment does nothing: {_VECTOR}")
def closing(any_envs: Any) -> None:
    any_envs.reset(seed=1)
    any_envs.close()
    any_envs.close()


# -- engines that step the user's own environments -----------------------------------------------------------------------


@_check("seeds reach each environment",
        f"each environment is reset with its own seed, or without a seed for `None`: {_VECTOR}",
        known="SB3#1790")  # fmt: skip
def seeds(envs: Any) -> None:
    assert envs.reset(seed=[7, None, 3])[0][:, 0].tolist() == [7, -1, 3]
    assert envs.reset(seed=4)[0][:, 0].tolist() == [4, 5, 6]
    assert envs.reset()[0][:, 0].tolist() == [-1, -1, -1]


@_check("options reach each environment", f"`options` go to every environment's reset: {_VECTOR}")
def options(envs: Any) -> None:
    assert envs.reset(options={"given": 3})[1]["given"].tolist() == [3, 3, 3]


@_check(
    "actions and rewards belong to this step",
    f"row i of the results of `step` belongs to environment i and action i: {_VECTOR}",
)
def results_of_this_step(envs: Any) -> None:
    envs.reset(seed=1)
    for at in (1, 2):
        observations, rewards, *_ = envs.step(np.array([at, at + 1, at + 2]))
        assert observations[:, 3].tolist() == [at, at + 1, at + 2], "an environment got another's action"
        steps = observations[:, 2].tolist(), (rewards - 100 * observations[:, 1]).tolist()
        assert steps == ([at] * 3, [at] * 3), "results of another step"


@_check("termination is not truncation",
        f"the two flags are the environment's own, and both may be set: {_ENV}#gymnasium.Env.step",
        known="openai/gym#3102, EnvPool#239")  # fmt: skip
def flags(envs: Any) -> None:
    endings = set()
    envs.reset(seed=1)
    for _ in range(40):
        _, rewards, terminations, truncations, _ = step_with_resets(envs, np.zeros(3, np.int64))
        rows = zip(rewards, terminations, truncations, strict=True)
        endings |= {(int(reward // 100) % 3, bool(end), bool(cut)) for reward, end, cut in rows if end or cut}
    assert endings == {(0, True, False), (1, False, True), (2, True, True)}, sorted(endings)


@_check("a mask marks the environments that reported an info",
        f"a mask is True for environments that reported the key: {_VECTOR}")  # fmt: skip
def partial_masks(envs: Any) -> None:
    if not envs.reset(seed=1)[1]:
        raise NotImplementedError("its infos are empty")
    assert envs.step(np.zeros(3, np.int64))[4]["_odd"].tolist() == [True] * 3
    infos = envs.step(np.zeros(3, np.int64))[4]
    assert "odd" not in infos or not infos["_odd"].any(), "an info of an earlier step"
    assert infos["at"].tolist() == [2, 2, 2]


@_check("next-step: the step after an end resets", f"its action is ignored, its reward 0, its flags False: {_MODES}", NEXT,
        known="Gymnasium#914, EnvPool#194")  # fmt: skip
def next_step(envs: Any) -> None:
    envs.reset(seed=1)
    for _ in range(3):
        observations, _, terminations, *_ = envs.step(np.full(3, 5))
    assert terminations.tolist() == [True, False, False]
    assert observations[0].tolist() == [1, 0, 3, 5], "the last step did not return the last observation of the episode"
    observations, rewards, terminations, truncations, infos = envs.step(np.full(3, 5))
    assert observations[0].tolist() == [-1, 1, 0, -1], "not reset, reset twice, or stepped after the reset"
    assert (rewards[0], terminations[0], truncations[0]) == (0, False, False)
    assert infos["begins"][0] == 1


@_check("same-step: final observation and info", f"`final_obs` and `final_info` are the episode's last: {_MODES}", SAME,
        known="IsaacLab#4369, mujoco_playground#305, ALE#614")  # fmt: skip
def same_step(envs: Any) -> None:
    envs.reset(seed=1)
    for _ in range(3):
        observations, rewards, terminations, _, infos = envs.step(np.full(3, 5))
    assert (terminations.tolist(), rewards.tolist()) == ([True, False, False], [3, 3, 3])
    assert observations[:, 1].tolist() == [1, 0, 0], "the ended row has not begun its next episode"
    assert infos["_final_obs"].tolist() == [True, False, False]
    assert np.asarray(infos["final_obs"][0]).tolist() == [1, 0, 3, 5], "final_obs is not the last observation"
    assert infos["final_info"]["at"][0] == 3, "final_info is not the last info"
    assert infos["begins"][0] == 1


@_check("same-step: no final keys before an end", f"final keys are present only if an episode ended: {_MODES}", SAME)
def no_final_keys(envs: Any) -> None:
    envs.reset(seed=1)
    for _ in range(4):
        *_, terminations, truncations, infos = envs.step(np.zeros(3, np.int64))
        assert ("final_obs" in infos) == bool((terminations | truncations).any())
        assert infos.get("_final_obs", np.zeros(3, bool)).tolist() == (terminations | truncations).tolist()


def step_until_done(any_envs: Any) -> tuple[Any, Any]:
    """Reset, and take random steps until an episode ends; return the mask of ended episodes, and the infos of that step."""
    any_envs.reset(seed=1)
    for _ in range(_MAX_STEPS):
        *_, terminations, truncations, infos = any_envs.step(any_envs.action_space.sample())
        if (ended := np.asarray(terminations) | np.asarray(truncations)).any():
            return ended, infos
    raise NotImplementedError(f"no episode ended within {_MAX_STEPS} steps")


@_check("next-step: a reset has reward 0", f"the step after an end resets, with reward 0 and flags False: {_MODES}", NEXT,
        known="Gymnasium#914, EnvPool#194")  # fmt: skip
def reset_has_reward_0(any_envs: Any) -> None:
    ended, _ = step_until_done(any_envs)
    _, rewards, terminations, truncations, _ = any_envs.step(any_envs.action_space.sample())
    results = [np.asarray(array)[ended].tolist() for array in (rewards, terminations, truncations)]
    assert not any(map(any, results)), f"the step after an end returned rewards and flags {results}"


@_check("same-step: an end has a final observation", f"infos have `final_obs`, with a mask of ended rows: {_MODES}", SAME,
        known="IsaacLab#4369, mujoco_playground#305")  # fmt: skip
def end_has_final_obs(any_envs: Any) -> None:
    ended, infos = step_until_done(any_envs)
    assert "final_obs" in infos, "the last observation of an episode that ended is not in the infos"
    assert np.asarray(infos["_final_obs"]).tolist() == ended.tolist()


@_check("disabled: only the caller resets", f"without autoreset an episode goes on until a masked reset: {_MODES}", DISABLED)
def disabled(envs: Any) -> None:
    first = envs.reset(seed=1)[0][:, 1].copy()
    for _ in range(3):
        *_, terminations, truncations, infos = envs.step(np.zeros(3, np.int64))
    assert "final_obs" not in infos
    observations, infos = envs.reset(options={"reset_mask": terminations | truncations})
    assert (observations[:, 1] - first).tolist() == [1, 0, 0]
    assert observations[:, 2].tolist() == [0, 3, 3]


@_check("each episode is reset once",
        f"an automatic reset happens once per episode: {_MODES}", (*NEXT, *SAME))  # fmt: skip
def reset_once(envs: Any) -> None:
    envs.reset(seed=1)
    for _ in range(30):
        observations = envs.step(np.zeros(3, np.int64))[0]
    assert (np.array(envs.get_attr("resets")) == observations[:, 1] + 1).all(), "episodes were skipped"


@_check("statistics count each step once",
        f"`RecordEpisodeStatistics` counts the steps of each episode: {_VECTOR}wrappers/", (*NEXT, *SAME),
        known="Gymnasium#1017, #1624")  # fmt: skip
def statistics(envs: Any) -> None:
    wrapped = gymnasium.wrappers.vector.RecordEpisodeStatistics(envs)
    wrapped.reset(seed=1)
    for _ in range(20):
        infos = wrapped.step(np.zeros(3, np.int64))[4]
        if "episode" in infos:
            ended = np.flatnonzero(infos["_episode"])
            assert infos["episode"]["l"][ended].tolist() == [3 + i for i in ended], "a wrong length"


# -- faults ---------------------------------------------------------------------------------------------------------------


@_check("an exception is raised as itself", f"the call raises the environment's exception: {_VECTOR}", fault=True)
def raised(envs: Any) -> None:
    envs.reset(options={"given": -1})
    text = ""
    try:
        envs.step(np.zeros(3, np.int64))
    except ValueError as error:
        text = str(error)
    assert "fails on purpose" in text, text or "nothing was raised"


@_check("a killed worker is an error, not a hang", "a step raises within seconds if a process has ended", fault=True)
def killed_worker(envs: Any) -> None:
    envs.reset(seed=1)
    if not getattr(envs, "processes", None):
        raise NotImplementedError("it has no processes")
    victim = envs.processes[0]
    victim.kill()
    victim.join()
    raised = False
    try:
        envs.step(np.zeros(3, np.int64))
    except Exception:
        raised = True
    assert raised, "a step returned although a process had ended"


@_check("a result after a timeout belongs to its own step", f"a timeout neither loses nor shifts results: {_VECTOR}",
        fault=True)  # fmt: skip
def timeouts(envs: Any) -> None:
    envs.reset(seed=1)
    if not hasattr(envs, "step_async"):
        raise NotImplementedError("it has no step_async() and step_wait(timeout=)")
    envs.step_async(np.full(3, 1))
    try:
        envs.step_wait(timeout=0)
    except Exception:
        observations = envs.step_wait()[0]
        assert observations[:, 2].tolist() == [1, 1, 1], "results of another step"
    assert envs.step(np.full(3, 2))[0][:, 3].tolist() == [2, 2, 2], "results of another step"


# -- engines of other libraries ----------------------------------------------------------------------------------------
#
# Adapters give the engines of Stable-Baselines3, Tianshou and TorchRL Gymnasium's interface. Results that an engine does not
# return, such as TorchRL's infos, stay missing.


def as_gymnasium(envs: Any) -> Any:
    """Adapt a vector environment of a known library to Gymnasium's interface; return any other one unchanged."""
    for module, name, adapter in (
        ("stable_baselines3.common.vec_env", "VecEnv", _Sb3Envs), ("tianshou.env", "BaseVectorEnv", _TianshouEnvs),
        ("torchrl.envs", "EnvBase", _TorchRLEnvs),
    ):  # fmt: skip
        if (loaded := sys.modules.get(module)) is not None and isinstance(envs, getattr(loaded, name)):
            return adapter(envs)
    return envs


class _OtherLibraryEnvs(VectorEnv[Any, Any, Any]):
    """A vector environment of another library, with Gymnasium's interface."""

    def __init__(self, envs: Any, num_envs: int, observation_space: Any, action_space: Any, mode: AutoresetMode) -> None:
        self.inner, self.num_envs = envs, num_envs
        self.single_observation_space, self.single_action_space = observation_space, action_space
        self.observation_space = batch_space(observation_space, self.num_envs)
        self.action_space = batch_space(action_space, self.num_envs)
        self.metadata = {"autoreset_mode": mode}

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        """Reset all environments, or those of ``options["reset_mask"]``; reject a list of seeds."""
        others = dict(options or {})
        mask = others.pop("reset_mask", None)
        if isinstance(seed, list):
            raise NotImplementedError("it accepts only one seed")
        return self._reset(seed, mask, others)

    def _reset(self, seed: int | None, mask: Any, options: dict[str, Any]) -> Any:
        raise NotImplementedError

    def _merge_infos(self, infos: Any) -> dict[str, Any]:
        """Merge one info per environment into arrays with masks."""
        batched: dict[str, Any] = {}
        for env, info in enumerate(infos):
            batched = self._add_info(batched, info, env)
        return batched

    def close_extras(self, **kwargs: Any) -> None:
        self.inner.close()


class _Sb3Envs(_OtherLibraryEnvs):
    """An adapter for Stable-Baselines3: same-step autoreset, and ``info["terminal_observation"]`` as the final observation.

    ``info["TimeLimit.truncated"]`` marks a truncation.
    """

    def __init__(self, envs: Any) -> None:
        super().__init__(envs, envs.num_envs, envs.observation_space, envs.action_space, AutoresetMode.SAME_STEP)

    def _reset(self, seed: int | None, mask: Any, options: dict[str, Any]) -> Any:
        if mask is not None:
            raise NotImplementedError("reset() resets all environments")
        if options:
            self.inner.set_options(options)
        if seed is not None:
            self.inner.seed(seed)
        return self.inner.reset(), self._merge_infos(self.inner.reset_infos)

    def step(self, actions: Any) -> Any:
        observations, rewards, dones, infos = self.inner.step(actions)
        truncated = np.array([bool(info.pop("TimeLimit.truncated", False)) for info in infos])
        final_observations = [info.pop("terminal_observation", None) for info in infos]
        infos_by_row = [
            info if final_obs is None else {**reset_info, "final_obs": final_obs, "final_info": info}
            for info, final_obs, reset_info in zip(infos, final_observations, self.inner.reset_infos, strict=True)
        ]
        return observations, np.asarray(rewards), dones & ~truncated, dones & truncated, self._merge_infos(infos_by_row)

    def get_attr(self, name: str) -> Any:
        return self.inner.get_attr(name)

    @property
    def processes(self) -> Any:
        return self.inner.processes


class _TianshouEnvs(_OtherLibraryEnvs):
    """An adapter for Tianshou: no autoreset; ``reset(ids)`` resets some environments."""

    def __init__(self, envs: Any) -> None:
        observation_space, action_space = (envs.get_env_attr(name)[0] for name in ("observation_space", "action_space"))
        super().__init__(envs, envs.env_num, observation_space, action_space, AutoresetMode.DISABLED)
        self._latest: Any = None

    def _reset(self, seed: int | None, mask: Any, options: dict[str, Any]) -> Any:
        ids = np.arange(self.num_envs) if mask is None else np.flatnonzero(mask)
        keywords = {name: value for name, value in (("seed", seed), ("options", options or None)) if value is not None}
        observations, infos = self.inner.reset(ids, **keywords)
        if self._latest is None or mask is None:
            self._latest = np.array(observations)
        self._latest[ids] = observations
        return self._latest.copy(), self._merge_infos(infos)

    def step(self, actions: Any) -> Any:
        observations, *numbers, infos = self.inner.step(actions)
        self._latest = np.array(observations)
        return (observations, *numbers, self._merge_infos(infos))

    def get_attr(self, name: str) -> Any:
        return self.inner.get_env_attr(name)


class _TorchRLEnvs(_OtherLibraryEnvs):
    """An adapter for TorchRL: no autoreset, tensors everywhere, and no infos. The key ``"_reset"`` marks rows to reset.

    Observations must be a single array, ``"observation"``, and actions categorical.
    """

    def __init__(self, envs: Any) -> None:
        shape, choices = envs.observation_spec["observation"].shape[1:], envs.action_spec.space.n
        dtype: Any = str(envs.observation_spec["observation"].dtype).removeprefix("torch.")
        observation_space, action_space = Box(-np.inf, np.inf, tuple(shape), dtype), Discrete(choices)
        super().__init__(envs, envs.batch_size[0], observation_space, action_space, AutoresetMode.DISABLED)
        self._latest: Any = None

    def _reset(self, seed: int | None, mask: Any, options: dict[str, Any]) -> Any:
        import torch

        if options:
            raise NotImplementedError("reset() accepts no options")
        if seed is not None:
            self.inner.set_seed(seed)
        if mask is None:
            self._latest = self.inner.reset()
        else:
            self._latest = self.inner.reset(self._latest.set("_reset", torch.as_tensor(mask)[:, None]))
        return self._latest["observation"].numpy().copy(), {}

    def step(self, actions: Any) -> Any:
        import torch
        from torchrl.envs.utils import step_mdp

        if len(actions) != self.num_envs:
            raise ValueError(f"got {len(actions)} actions for {self.num_envs} environments")
        stepped = self.inner.step(self._latest.set("action", torch.as_tensor(np.asarray(actions))))
        self._latest = step_mdp(stepped)
        numbers = [stepped["next", name].numpy()[:, 0].copy() for name in ("reward", "terminated", "truncated")]
        return (stepped["next", "observation"].numpy().copy(), *numbers, {})

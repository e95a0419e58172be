"""``as_torchrl``: a TorchRL environment over a vector environment of any backend.

TorchRL resets environments itself, with a mask, right after the step that ended their episodes, and keeps both the last
observation of an episode and the first of the next one. ``_Rows`` adapts the three autoreset modes to that:

* SAME_STEP has already begun the next episode: its first observation is stored for the reset, which then needs no request.
* NEXT_STEP and DISABLED rows are reset with a mask before their next step.

If a row is stepped between the end of its episode and TorchRL's reset, it stays unchanged, with reward 0. An engine that can
step single rows skips it. Other engines step it (with autoreset disabled, after a hidden reset), and the result is dropped.
"""

from __future__ import annotations

import functools
import importlib
import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import torch
from gymnasium import spaces
from gymnasium.error import ClosedEnvironmentError
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array
from tensordict import TensorDict
from torchrl.data import Binary, Bounded, Categorical, Composite, MultiCategorical, MultiOneHot, OneHot, Unbounded
from torchrl.envs import EnvBase

from vecenv.adapters.single import agents_per_env, require_none_in_flight, require_settings, reset_all, send_alone
from vecenv.evaluating.policies import map_leaves
from vecenv.front.arguments import MaskOnlyOptions
from vecenv.front.capabilities import capabilities_of
from vecenv.front.infos import own_keys
from vecenv.make import make_vec

__all__ = ["TensorCodec", "Tensors", "TorchRLEnv", "as_torchrl", "make_codec"]

_UNINDEXABLE_DTYPES: Final = torch.uint16, torch.uint32, torch.uint64  # torch lacks most operations for these


# -- spaces as specs, and batches as tensors ---------------------------------------------------------------------------
#
# The format is that of TorchRL's ``GymWrapper``, so that programs written for it find the same keys: the entries of a Dict
# of observations have their own keys, any other space is ``"observation"`` or ``"action"``. In addition, Tuple spaces are
# dicts of ``"0"``, ``"1"``, ...; Discrete spaces may start anywhere; actions may be Dicts and Tuples.

Tensors: TypeAlias = Any
"""A tensor ``[n, ...]``, or nested dicts of them."""


@dataclass(frozen=True)
class TensorCodec:
    """The TorchRL form of a space.

    Attributes:
        spec: The spec of a batch.
        encode: Converts a batch of any number of rows to tensors, which share its memory if possible.
        decode: Converts tensors to a batch for Gymnasium's vector environments.
    """

    spec: Any
    encode: Callable[[Any], Tensors]
    decode: Callable[[Any], Any]


def _make_branch_codec(children: dict[str, TensorCodec], keys: tuple[Any, ...] | None, n: int) -> TensorCodec:
    """Build the codec of a Dict with these keys, or of a Tuple if ``keys`` is ``None``."""

    def encode(batch: Any) -> Tensors:
        sources = range(len(children)) if keys is None else keys
        return {name: child.encode(batch[source]) for source, (name, child) in zip(sources, children.items(), strict=True)}

    def decode(tensors: Any) -> Any:
        values = [child.decode(tensors[name]) for name, child in children.items()]
        return tuple(values) if keys is None else dict(zip(keys, values, strict=True))

    return TensorCodec(Composite({name: child.spec for name, child in children.items()}, shape=(n,)), encode, decode)


def make_codec(space: gym.Space[Any], n: int, onehot: bool, names: Callable[[str], str] = str) -> TensorCodec:
    """Build the codec of a space.

    Args:
        space: The space of one environment.
        n: The number of environments.
        onehot: Encode discrete values as one-hot vectors, TorchRL's default.
        names: Maps the keys of the outermost Dict to keys of the TensorDict.

    Raises:
        NotImplementedError: TorchRL has no spec for the space.
    """
    if isinstance(space, spaces.Dict):
        children = {names(str(key)): make_codec(inner, n, onehot) for key, inner in space.spaces.items()}
        return _make_branch_codec(children, tuple(space.spaces), n)
    if isinstance(space, spaces.Tuple):
        return _make_branch_codec({str(i): make_codec(inner, n, onehot) for i, inner in enumerate(space.spaces)}, None, n)
    for kind, leaf in _LEAVES.items():
        if isinstance(space, kind):
            return leaf(space, n, onehot)
    raise NotImplementedError(
        f"TorchRL has no tensors for {space}: only Box, Discrete, MultiDiscrete, MultiBinary, and Dict and Tuple of these"
    )


def _make_box_codec(space: Any, n: int, onehot: bool) -> TensorCodec:
    dtype = _torch_dtype(space.dtype)
    if dtype is torch.bool:
        return _make_binary_codec(space, n, onehot)
    if dtype in _UNINDEXABLE_DTYPES:
        raise NotImplementedError(
            f"torch lacks most operations for {dtype}, so TorchRL cannot use {space}: convert it to int32 or int64, "
            "for example with gymnasium.wrappers.TransformObservation"
        )
    low, high = torch.as_tensor(space.low), torch.as_tensor(space.high)
    if dtype.is_floating_point and bool(low.isinf().all()) and bool(high.isinf().all()):
        spec: Any = Unbounded(shape=space.shape, dtype=dtype)
    else:
        if dtype.is_floating_point:
            limits = torch.finfo(dtype)
            low, high = low.clamp(limits.min, limits.max), high.clamp(limits.min, limits.max)
        spec = Bounded(low, high, shape=space.shape, dtype=dtype)
    return TensorCodec(spec.expand(n, *space.shape), to_tensor, _to_numpy)


def _make_discrete_codec(space: Any, n: int, onehot: bool) -> TensorCodec:
    """Build the codec of a MultiDiscrete, or of a Discrete, which is treated as a MultiDiscrete with one number."""
    is_multi = isinstance(space, spaces.MultiDiscrete)
    counts = np.reshape(space.nvec if is_multi else space.n, -1).tolist()
    start = torch.as_tensor(np.asarray(space.start)).long().reshape(-1)

    def encode(batch: Any) -> Any:
        values = to_tensor(batch).long().reshape(-1, len(counts))
        values = values - start.to(values.device)
        if onehot:  # padding of dead agents may be outside the space: a row of zeros
            ranges = [torch.arange(count, device=values.device) for count in counts]
            return torch.cat([values[:, [i]] == choices for i, choices in enumerate(ranges)], -1).long()
        return values if is_multi else values[:, 0]

    def decode(tensor: Any) -> Any:
        if onehot:  # in TorchRL any vector is valid: its largest entry counts
            parts = tensor.to(torch.float32).split(counts, -1)
            tensor = torch.stack([part.argmax(-1) for part in parts], -1)
        values = _to_numpy(tensor.long().reshape(-1, len(counts))) + start.numpy()
        return values.reshape(-1, *space.shape).astype(space.dtype)

    spec: Any
    if is_multi:
        spec = (MultiOneHot if onehot else MultiCategorical)(counts, dtype=torch.long)
    else:
        spec = (OneHot if onehot else Categorical)(counts[0], dtype=torch.long)
    return TensorCodec(spec.expand(n, *spec.shape), encode, decode)


def _make_binary_codec(space: Any, n: int, onehot: bool) -> TensorCodec:
    return TensorCodec(Binary(shape=(n, *space.shape), dtype=_torch_dtype(space.dtype)), to_tensor, _to_numpy)


_LEAVES: dict[type[Any], Callable[[Any, int, bool], TensorCodec]] = {
    spaces.Box: _make_box_codec,
    spaces.Discrete: _make_discrete_codec,
    spaces.MultiDiscrete: _make_discrete_codec,
    spaces.MultiBinary: _make_binary_codec,
}


def _torch_dtype(dtype: Any) -> torch.dtype:
    converted: torch.dtype = torch.from_numpy(np.empty(0, dtype)).dtype
    return converted


def to_tensor(values: Any) -> torch.Tensor:
    """Convert an array of any library to a writable tensor on the same device."""
    if isinstance(values, torch.Tensor):
        return values
    if isinstance(values, np.ndarray):
        return torch.from_numpy(values if values.flags.writeable else values.copy())
    if hasattr(values, "__dlpack__"):
        return torch.from_dlpack(values).clone()  # JAX arrays are read-only
    return torch.as_tensor(values)


def _to_numpy(tensor: Any) -> Any:
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()  # NumPy has no bfloat16


def _copy_rows(tensors: Tensors, rows: Any) -> Tensors:
    """Copy some rows; ``rows`` is anything that indexes a tensor."""
    return map_leaves(lambda one: one[rows].clone(), tensors)


def _write(tensors: Tensors, rows: Any, values: Tensors) -> None:
    """Write ``values`` into some rows of ``tensors``, in place."""
    map_leaves(lambda one, new: one.__setitem__(rows, new), tensors, values)


Mask = npt.NDArray[np.bool_]

_RESERVED_KEYS = frozenset({"reward", "done", "terminated", "truncated", "action", "next", "_reset", "_step", "is_init"})
"""Keys with a meaning in TorchRL, at the root of a TensorDict."""


def _observation_key(key: str) -> str:
    """Return the key in a TensorDict for an entry of a Dict of observations."""
    return f"observation_{key}" if key in _RESERVED_KEYS else key


def as_torchrl(
    envs: Any, num_envs: int | None = None, backend: str = "process", *, num_workers: int | str | None = None,
    device: Any = None, frame_skip: int = 1, categorical_action_encoding: bool = False,
    infos: bool | Sequence[str] = False, allow_done_after_reset: bool = False,
    vector_kwargs: Mapping[str, Any] | None = None, wrappers: Sequence[Callable[[Any], Any]] | None = None,
    **env_kwargs: Any,
) -> TorchRLEnv:  # fmt: skip
    """Wrap a vector environment in a TorchRL ``EnvBase`` with ``batch_size`` ``[num_envs]``. Its ``close`` closes both.

    Vector environments built here have the autoreset mode ``"SameStep"`` by default, if the engine supports it, because then
    the end of an episode needs no second request. Others may have any mode. The data are the same in all modes.

    Args:
        envs: A name or ``EnvSpec``, or a function that builds one environment, for :func:`vecenv.make_vec`; or a vector
            environment, or an EnvPool pool; or, without ``num_envs``, a function that builds a vector environment.
            With ``backend="envpool"``, ``"ALE/Pong-v5"`` is EnvPool's ``"Pong-v5"``.
        num_envs: The number of environments; 1 by default for a name or ``EnvSpec``.
        backend: The backend of :func:`vecenv.make_vec`.
        num_workers: The number of worker processes. EnvPool has no worker processes: with it, this may be passed
            instead of ``num_envs``, as to TorchRL's ``MultiThreadedEnv``.
        device: The device of the tensors. With ``None``, as in ``GymWrapper``, they stay in the engine's memory and
            TensorDicts have no device, so that collectors copy nothing. For an engine that returns JAX or torch arrays,
            ``None`` means the CPU.
        frame_skip: Repeat every action that many times, in each row until its episode ends; rewards are summed.
        categorical_action_encoding: Encode Discrete and MultiDiscrete spaces (observations too, as in ``GymWrapper``) as
            integers.
        infos: Names of infos to add to the TensorDict, or ``True`` for all numeric ones that a first reset and step report.
            A name of an observation, or with a meaning in TorchRL, gets a prefix: ``"reward"`` becomes ``"info_reward"``.
        allow_done_after_reset: Passed to ``EnvBase``.
        vector_kwargs, wrappers, **env_kwargs: Passed to :func:`vecenv.make_vec`.

    Raises:
        TypeError: ``envs`` has an unsupported type, or options are passed that do not apply to it.
        ValueError: ``envs`` has ``copy=False``, a ``batch_size`` below ``num_envs`` or, with several environments, a vector
            wrapper ``NormalizeObservation``, or can neither autoreset within a step nor reset some rows; ``frame_skip`` is
            not a positive integer; or a name in ``infos`` is not reported.
        NotImplementedError: TorchRL has no spec for a space.

    Example::

        env = as_torchrl("CartPole-v1", 8)
        env.set_seed(0)
        data = env.rollout(100, break_when_any_done=False)  # TensorDict [8, 100]
        env.close()
    """
    keywords = {"num_workers": num_workers, "vector_kwargs": vector_kwargs, "wrappers": wrappers, **env_kwargs}
    options = {key: value for key, value in keywords.items() if value is not None}
    build: Callable[[], Any]
    if isinstance(envs, VectorEnv) or _is_pool(envs) or (num_envs is None and callable(envs)):
        if given := [*(["num_envs"] if num_envs is not None else []), *sorted(options)]:
            raise TypeError(f"{envs!r} is a vector environment or builds one: omit {', '.join(given)}")
        build = _make_reopener(envs)
    else:
        build = _make_builder(envs, num_envs, backend, options)
    return TorchRLEnv(
        build, device=device, frame_skip=frame_skip, onehot=not categorical_action_encoding, infos=infos,
        allow_done_after_reset=allow_done_after_reset,
    )  # fmt: skip


class TorchRLEnv(EnvBase):  # type: ignore[misc, unused-ignore]  # (EnvBase is Any if TorchRL is not installed)
    """A TorchRL environment over a vector environment, built by :func:`as_torchrl`.

    The first step resets all rows if no reset came before it. After ``close``, the next reset or step builds the
    environments again, or raises ``ClosedEnvironmentError`` if a vector environment was passed. A ``"_reset"`` mask without
    any True does nothing. A row with an ended episode stays unchanged, with reward 0, until its reset. ``set_seed(s)``
    applies to the next reset of all environments: environment i gets ``s + i``. ``reset(seed=..., options=...)`` sets both
    for one reset.

    Attributes:
        vector_env: The wrapped vector environment; ``None`` while it is closed.
        env_name: The id of the environments in Gymnasium's registry or EnvPool's (the class name of an EnvPool pool, which
            has no id); ``None`` if there is none.
    """

    _has_frame_skip = True

    def __init__(
        self, build: Callable[[], Any], *, device: Any, frame_skip: int, onehot: bool, infos: bool | Sequence[str],
        allow_done_after_reset: bool,
    ) -> None:  # fmt: skip
        if isinstance(frame_skip, bool) or not isinstance(frame_skip, int) or frame_skip < 1:
            raise ValueError(f"frame_skip must be a positive integer, got {frame_skip!r}")
        envs = build()
        n = envs.num_envs
        if device is None and getattr(envs.unwrapped, "to", "numpy") != "numpy":
            device = "cpu"  # observations may be on another device than rewards and flags
        super().__init__(device=device, batch_size=torch.Size([n]), allow_done_after_reset=allow_done_after_reset)
        self.frame_skip = frame_skip
        self._over_envpool = type(envs.unwrapped).__module__.startswith("vecenv.backends.envpool")
        self.env_name: str | None = envs.unwrapped.task.id if self._over_envpool else getattr(envs.spec, "id", None)
        self._build = build
        single = envs.single_observation_space
        self._has_named_entries = isinstance(single, spaces.Dict)  # the entries of a Dict have their own keys
        self._observations = make_codec(single, n, onehot, _observation_key)
        self._actions = make_codec(envs.single_action_space, n, onehot)
        self._seed_next: int | None = None
        self._columns: dict[str, torch.Tensor] = {}
        self._open(envs)
        if infos is not False:
            self._columns = self._info_columns(None if infos is True else list(infos))
            self._open(envs)
        self._make_specs()

    def _open(self, envs: Any) -> None:
        mode = require_row_resets(envs)
        self.vector_env: Any = envs
        self._rows = _Rows(envs, mode, self._observations, self._actions, self._columns)
        self.is_closed = False

    def _info_columns(self, names: list[str] | None) -> dict[str, torch.Tensor]:
        """Return the info columns of a reset and a step, as zeros in the dtype and shape of one row."""
        envs = self.vector_env
        found = _numeric_columns(envs.reset()[1], envs.num_envs)
        found |= _numeric_columns(envs.step(envs.action_space.sample())[4], envs.num_envs)
        if names is None:
            return found
        if missing := [name for name in names if name not in found]:
            raise ValueError(f"the environments report no numeric infos {missing}; they report {sorted(found)}")
        return {name: found[name] for name in names}

    def _make_specs(self) -> None:
        n = self.batch_size[0]
        spec = self._observations.spec
        visible = dict(spec.items()) if self._has_named_entries else {"observation": spec}
        self._names = {name: f"info_{name}" if name in _RESERVED_KEYS or name in visible else name for name in self._columns}
        for name, template in self._columns.items():
            visible[self._names[name]] = Unbounded(shape=(n, *template.shape), dtype=template.dtype)
        self.observation_spec = Composite(visible, shape=(n,)).to(self.device or "cpu")
        self.full_action_spec = Composite({"action": self._actions.spec}, shape=(n,)).to(self.device or "cpu")
        self.reward_spec = Unbounded(shape=(n, 1), device=self.device)
        flag = Categorical(2, shape=(n, 1), dtype=torch.bool, device=self.device)
        flags = {"done": flag, "terminated": flag.clone(), "truncated": flag.clone()}
        self.done_spec = Composite(flags, shape=(n,), device=self.device)

    # -- TorchRL's interface --------------------------------------------------------------------------------------------

    def _reset(self, tensordict: Any = None, *, seed: Any = None, options: Any = None) -> Any:
        if self.is_closed:
            self._open(self._build())
        mask = None if tensordict is None else tensordict.get("_reset", None)
        if mask is None or self._rows.visible is None:
            self._begin(seed, options)
        elif (selected := _to_mask(mask)).any():
            if seed is not None:
                raise ValueError("seed= is for resets of all environments, but '_reset' selects some")
            self._rows.restart(selected, options)
        return self._visible_tensordict()

    def _begin(self, seed: Any = None, options: Any = None) -> None:
        seed = self._seed_next if seed is None else seed
        self._rows.reset(seed, options)
        self._seed_next = None

    def _step(self, tensordict: Any) -> Any:
        if self.is_closed:
            self._open(self._build())
        if self._rows.visible is None:
            self._begin()
        selected = tensordict.get("_step", None)
        selected = None if selected is None else _to_mask(selected)
        rewards = self._rows.step(tensordict.get("action"), selected, self.frame_skip)
        return self._visible_tensordict(rewards)

    def step_and_maybe_reset(self, tensordict: Any) -> Any:
        """Step and reset like TorchRL's method, but without a reset request if the next episodes have already begun."""
        if self.__dict__.get("_compiled_step_and_maybe_reset") is not None or self._post_step_mdp_hooks is not None:
            return super().step_and_maybe_reset(tensordict)
        if tensordict.device != self.device:
            tensordict = tensordict.to(self.device)
        tensordict = self.step(tensordict)
        after = self.step_mdp(tensordict)
        rows = self._rows
        if rows.ended.any():
            if not rows.all_begun():
                return tensordict, self.maybe_reset(after)
            rows.restart(rows.ended)
            after.update(self._visible_tensordict())
        return tensordict, after

    def _set_seed(self, seed: int | None) -> None:
        self._seed_next = seed

    def _visible_tensordict(self, rewards: torch.Tensor | None = None) -> Any:
        rows = self._rows
        observations, infos = rows.visible
        visible = dict(observations) if self._has_named_entries else {"observation": observations}
        for name, column in infos.items():
            visible[self._names[name]] = column
        for name, flags in (("done", rows.ended), ("terminated", rows.terminated), ("truncated", rows.truncated)):
            visible[name] = torch.from_numpy(flags[:, None].copy())  # the caller may write to it
        if rewards is not None:
            visible["reward"] = rewards.unsqueeze(-1)
        if self.device is not None:
            visible = map_leaves(lambda one: one.to(self.device), visible)
        return TensorDict(visible, batch_size=self.batch_size, device=self.device)

    # -- other methods ------------------------------------------------------------------------------------------------

    @property
    def num_workers(self) -> int:
        """The number of environments, as in TorchRL's ``MultiThreadedEnv`` and ``ParallelEnv``."""
        return int(self.batch_size[0])

    @property
    def lib(self) -> Any:
        """The module of the environments' library: ``envpool`` for EnvPool, otherwise ``gymnasium``."""
        return importlib.import_module("envpool" if self._over_envpool else "gymnasium")

    def render(self) -> Any:
        """Return the result of the vector environment's ``render``."""
        return self.vector_env.render()

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Close the environments; see the class for the next reset or step.

        Raises:
            RuntimeError: They are already closed, and ``raise_if_closed`` is set.
        """
        if self.is_closed:
            if raise_if_closed:
                raise RuntimeError("the environment is already closed")
            return
        self.vector_env.close()  # first, so that another call closes the rest after an interruption
        self.is_closed, self.vector_env = True, None

    def __repr__(self) -> str:
        inner = "closed" if self.is_closed else repr(self.vector_env)
        return f"{type(self).__name__}({inner}, batch_size={list(self.batch_size)}, device={self.device})"


class _Rows:
    """The rows of a vector environment, and the state of each that TorchRL receives.

    Args:
        envs: The vector environment.
        mode: Its autoreset mode.
        observations, actions: The codecs of its spaces.
        infos: The columns of infos to return, by name, each with the dtype and shape of one row.

    Attributes:
        ended: bool ``(n,)``, true for rows that need a reset because their episode has ended.
        terminated, truncated: bool ``(n,)``, the reason why these episodes ended.
        visible: Observations and columns of all rows; ``None`` before the first reset.
    """

    def __init__(
        self,
        envs: Any,
        mode: AutoresetMode,
        observations: TensorCodec,
        actions: TensorCodec,
        infos: Mapping[str, torch.Tensor],
    ) -> None:
        self._envs, self._observations, self._actions = envs, observations, actions
        self._columns = dict(infos)
        n = envs.num_envs
        capabilities = capabilities_of(envs)
        # not under a wrapper, because send() and recv() would bypass it
        has_row_steps = capabilities is not None and (capabilities.first_ready or capabilities.backend == "envpool")
        self._can_step_rows = has_row_steps and envs.unwrapped is envs
        self._same_step = mode is AutoresetMode.SAME_STEP
        self._all_rows = np.arange(n)
        self._needs_hidden_resets = mode is AutoresetMode.DISABLED and not self._can_step_rows
        self._num_agents = agents_per_env(envs)
        self._env_is_over = np.ones(n, np.bool_)  # for ended rows: False while other agents of the environment are running
        self._unsteppable = np.zeros(n, np.bool_)  # the engine refuses to step these rows, or returns undefined results
        # first observations and infos of episodes that began before TorchRL's reset, valid where `_has_start` is true
        self._starts: Tensors = None
        self._has_start = np.zeros(n, np.bool_)
        self.terminated, self.truncated = np.zeros((2, n), np.bool_)
        self.visible: Tensors = None

    @property
    def ended(self) -> Mask:
        ended: Mask = self.terminated | self.truncated
        return ended

    def reset(self, seed: Any = None, options: Any = None) -> None:
        """Begin an episode in every row. Drop a pending result, for example of an interrupted step."""
        observations, infos = reset_all(self._envs, seed, options)
        self.visible = self._encode(observations, infos, self._all_rows)
        self._has_start, self._unsteppable, self.terminated, self.truncated = np.zeros((4, len(self._has_start)), np.bool_)

    def restart(self, mask: Mask, options: Mapping[str, Any] | None = None) -> None:
        """Begin an episode in the rows that ``mask`` selects; the others stay unchanged."""
        begun = mask & self._has_start if options is None else np.zeros_like(mask)
        to_reset = mask & ~begun
        if self._num_agents > 1:
            whole = self._expand_to_envs(mask, np.all)
            # an agent that ended before its environment has rows of padding, without a reset
            to_reset &= whole | self._env_is_over | ~self.ended
            to_reset |= whole & self._expand_to_envs(to_reset, np.any)
            begun &= ~to_reset
        if begun.any():
            self._write_rows(begun, self._starts, begun)
        if to_reset.any():
            require_none_in_flight(self._envs, "reset", np.flatnonzero(to_reset))
            mask_options = MaskOnlyOptions({**(options or {}), "reset_mask": to_reset.copy()})
            observations, infos = self._envs.reset(options=mask_options)
            self._write_rows(to_reset, self._encode(observations, infos, self._all_rows), to_reset)
            self._unsteppable = self._unsteppable & ~to_reset
        self._has_start, self.terminated, self.truncated = (
            flags & ~mask for flags in (self._has_start, self.terminated, self.truncated)
        )

    def _expand_to_envs(self, rows: Mask, reduce: Callable[..., Any]) -> Mask:
        """Return all rows of each environment in which any or all agents (``reduce``) are in ``rows``."""
        chosen: Mask = np.repeat(reduce(rows.reshape(-1, self._num_agents), axis=1), self._num_agents)
        return chosen

    def all_begun(self) -> bool:
        """True if all ended rows have already begun their next episode, so that a reset needs no request."""
        return not (self.ended & ~self._has_start).any()

    def step(self, tensors: Any, selected: Mask | None, frames: int) -> torch.Tensor:
        """Step the ``selected`` rows that have not ended, each for ``frames`` steps or until its episode ends.

        Returns:
            The sums of the rewards, float32 ``(n,)``; 0 for rows without a step.

        Raises:
            NotImplementedError: The engine steps all rows together, and not all running episodes are selected.
        """
        actions = self._actions.decode(tensors)
        if selected is not None and not self._can_step_rows and (left_out := ~selected & ~self.ended).any():
            raise NotImplementedError(
                f"{type(self._envs).__name__} steps all its environments together: it cannot leave out "
                f"{np.flatnonzero(left_out).tolist()} in the middle of their episodes"
            )
        total = None
        for _ in range(frames):
            live = ~self.ended if selected is None else selected & ~self.ended
            if not live.any():
                break
            rewards = self._step_once(actions, live)
            total = rewards if total is None else total + rewards
        return torch.zeros(len(self._all_rows)) if total is None else total

    def _step_once(self, actions: Any, live: Mask) -> torch.Tensor:
        """Step the ``live`` rows once, store their results, and return all rewards."""
        all_live = bool(live.all())
        if all_live or not self._can_step_rows:
            if self._unsteppable.any():
                self._envs.reset(options=MaskOnlyOptions(reset_mask=self._unsteppable.copy()))
            results, ids = self._envs.step(actions), self._all_rows
        else:
            rows = np.flatnonzero(live)
            send_alone(self._envs, map_leaves(lambda leaf: leaf[rows], actions), rows)
            results = self._envs.recv(count=len(rows))
            ids = np.asarray(results[4]["env_id"])
        batch = self._encode(results[0], results[4], ids)
        terminated, truncated = (_to_mask(flags) for flags in results[2:4])
        env_ended = terminated | truncated
        if self._num_agents > 1:
            env_ended = results[4]["env_done"]
            self._env_is_over = np.where(live, env_ended, self._env_is_over)
        if self._needs_hidden_resets:
            self._unsteppable = env_ended
        if self._same_step and (ended := (terminated | truncated) & live[ids]).any():
            self._store_starts(batch, np.flatnonzero(ended), ids, results[4])
        rewards = to_tensor(results[1]).to("cpu", torch.float32, copy=True)
        if not all_live:
            return self._apply_step(batch, rewards, (terminated, truncated), ids, live)
        self.visible, self.terminated, self.truncated = batch, terminated, truncated
        return rewards

    def _apply_step(self, batch: Tensors, rewards: Any, flags: Any, ids: Any, live: Mask) -> torch.Tensor:
        """Store the results of the ``live`` rows, leave the others unchanged, and return all rewards."""
        positions = np.flatnonzero(live[ids])
        rows = ids[positions]
        if len(ids) == len(live):
            self._has_start = self._has_start & live  # the other rows were stepped past their first observations
        self._write_rows(rows, batch, positions)
        self.terminated, self.truncated = self.terminated.copy(), self.truncated.copy()
        self.terminated[rows], self.truncated[rows] = flags[0][positions], flags[1][positions]
        all_rewards = torch.zeros(len(live))
        all_rewards[rows] = rewards[positions]
        return all_rewards

    def _write_rows(self, rows: Any, batch: Tensors, positions: Any) -> None:
        """Copy the rows at ``positions`` of a batch to ``rows``, in new tensors: the caller may hold the old ones."""
        visible = _copy_rows(self.visible, slice(None))
        _write(visible, rows, _copy_rows(batch, positions))
        self.visible = visible

    def _store_starts(self, batch: Tensors, rows: Any, ids: Any, infos: Mapping[str, Any]) -> None:
        """Store the first observations of the next episodes (same-step mode), and put the last ones into ``batch``."""
        if self._starts is None:
            self._starts = _copy_rows(self.visible, slice(None))
        _write(self._starts, ids[rows], _copy_rows(batch, rows))
        self._has_start = self._has_start.copy()
        self._has_start[ids[rows]] = True
        columns = self._read_columns(infos.get("final_info", {}), ids)
        _write(batch, rows, (self._encode_final(infos["final_obs"], rows), _copy_rows(columns, rows)))

    def _encode_final(self, finals: Any, rows: Any) -> Tensors:
        """Return the final observations of ``rows`` as tensors."""
        if not (isinstance(finals, np.ndarray) and finals.dtype.hasobject):
            return _copy_rows(self._observations.encode(finals), rows)
        space = self._envs.single_observation_space
        empty: Any = create_empty_array(space, len(rows))
        return self._observations.encode(concatenate(space, [finals[row] for row in rows], empty))

    def _encode(self, observations: Any, infos: Mapping[str, Any], ids: Any) -> Tensors:
        return self._observations.encode(observations), self._read_columns(infos, ids)

    def _read_columns(self, infos: Mapping[str, Any], ids: Any) -> dict[str, torch.Tensor]:
        """Return the columns of infos, with 0 for each environment without a value that fits the column."""
        found = {}
        for name, template in self._columns.items():
            column: Any = infos.get(name)
            shape = (len(ids), *template.shape)
            found[name] = torch.zeros(shape, dtype=template.dtype)
            if isinstance(column, np.ndarray) and column.dtype.hasobject:  # types or shapes differ between environments
                for row, value in enumerate(column):
                    if isinstance(value, _NUMERIC_TYPES) and np.shape(value) == template.shape:
                        found[name][row] = torch.as_tensor(value)
            elif np.shape(column) == shape:
                found[name] = to_tensor(column).to("cpu", template.dtype, copy=True)
        return found


_NUMERIC_TYPES: Final = (bool, int, float, np.number, np.bool_, np.ndarray)


def _numeric_columns(infos: Mapping[str, Any], n: int) -> dict[str, torch.Tensor]:
    """Return the numeric columns of infos, as zeros in the dtype and shape of one row."""
    found = {}
    for key in own_keys(infos):
        column = infos[key]
        if isinstance(column, Mapping) or key in ("env_id", "final_obs", "final_info"):
            continue
        if isinstance(column, np.ndarray) and column.dtype.kind not in "biuf":
            continue
        tensor = to_tensor(column)
        if tensor.shape[:1] == (n,):
            dtype = torch.int64 if tensor.dtype in _UNINDEXABLE_DTYPES else tensor.dtype
            found[key] = torch.zeros_like(tensor[0], device="cpu", dtype=dtype)
    return found


def _make_builder(source: Any, num_envs: int | None, backend: str, options: dict[str, Any]) -> Callable[[], Any]:
    """Return a function that builds a vector environment from a name or function on each call."""
    vector_kwargs = dict(options.pop("vector_kwargs", {}))
    num_workers = options.pop("num_workers", None)
    if backend == "envpool":
        if num_workers is not None and num_envs is not None:
            raise TypeError("EnvPool has threads and no worker processes: set vector_kwargs={'num_threads': ...} instead")
        num_envs = num_workers if num_envs is None else num_envs
        source = source.removeprefix("ALE/") if isinstance(source, str) else source
    elif num_workers is not None:
        vector_kwargs["num_workers"] = num_workers
    elif backend == "process" and multiprocessing.current_process().daemon:
        vector_kwargs.setdefault("num_workers", 0)  # daemons, such as TorchRL's collector processes, must not have children
    if backend in ("brax", "playground"):
        vector_kwargs.setdefault("to", "torch")

    make = functools.partial(make_vec, source, 1 if num_envs is None else num_envs, backend, **options)

    def build() -> Any:
        try:
            return make(vector_kwargs={"autoreset_mode": AutoresetMode.SAME_STEP, **vector_kwargs})
        except NotImplementedError:
            if "autoreset_mode" in vector_kwargs:
                raise
            return make(vector_kwargs=vector_kwargs)  # a library's own vector environment without that mode

    return build


def _make_reopener(source: Any) -> Callable[[], Any]:
    """Return a function that returns a given vector environment, but only once, or that builds a new one on each call."""
    if _is_pool(source):
        from vecenv.backends import EnvPoolVectorEnv

        return functools.partial(EnvPoolVectorEnv.over, source, autoreset_mode=AutoresetMode.SAME_STEP)
    if not isinstance(source, VectorEnv):
        return lambda: _require_vector_env(source())
    unused = [source]

    def return_once() -> Any:
        if not unused:
            raise ClosedEnvironmentError(
                f"{source!r} was closed and cannot be rebuilt: pass as_torchrl a name, or a function that builds a vector "
                "environment"
            )
        return unused.pop()

    return return_once


def _require_vector_env(envs: Any) -> Any:
    if not isinstance(envs, VectorEnv):
        raise TypeError(
            f"without num_envs, the function must build a vector environment, but it built {envs!r}; pass num_envs for a "
            "function that builds a single environment"
        )
    return envs


def require_row_resets(envs: Any) -> AutoresetMode:
    """Return the autoreset mode; raise if episodes cannot begin row by row, or steps return only some rows."""
    mode = require_settings(envs, "TorchRL", list(AutoresetMode), any_arrays=True)
    if agents_per_env(envs) > 1 and not envs.unwrapped.padding_done:
        raise ValueError(
            "TorchRL resets rows that are done, and with padding_done=False some rows of an ended environment are not: "
            "write as_torchrl(envs.flatten_agents())"
        )
    if getattr(envs, "batch_size", envs.num_envs) not in (None, envs.num_envs):
        raise ValueError(f"TorchRL steps all environments together: build them without batch_size={envs.batch_size}")
    return mode


def _is_pool(source: Any) -> bool:
    """True if the argument is one of EnvPool's own pools."""
    return hasattr(source, "_recv") and hasattr(source, "_send")


def _to_mask(flags: Any) -> Mask:
    """Convert flags of any library, of shape ``(n,)`` or ``(n, 1)``, to a bool array ``(n,)``."""
    array: Mask = np.array(flags.detach().cpu().numpy() if isinstance(flags, torch.Tensor) else flags, np.bool_)
    return array.reshape(-1)

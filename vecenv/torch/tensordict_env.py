"""``TensorDictEnv``: JAX-native environments as a TorchRL environment with its state in the TensorDict.

The state goes in and out as two tensors, so a TensorDict can be stepped twice, kept, and returned to, and gradients go
through whatever torch does with it: the masks of TorchRL's resets choose rows of tensors, and leave the gradient of the
others alone.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from tensordict import TensorDict
from torchrl.data.tensor_specs import Categorical, Composite, Unbounded
from torchrl.envs import EnvBase

from vecenv.adapters.torchrl import make_codec
from vecenv.backends.jax_native import parse_functional
from vecenv.jax.env import EnvState
from vecenv.jax.functional import FunctionalVectorEnv
from vecenv.jax.interop import keys_from
from vecenv.jax.libraries import available_envs, differentiability, require_gradient
from vecenv.system.reporting import warn
from vecenv.torch.differentiable import DifferentiableEnv, TorchState, torch_dtype

__all__ = ["TensorDictEnv"]

_TAKEN = frozenset({"reward", "done", "terminated", "truncated", "action", "next", "state", "_reset", "_step"})


class _AvailableEnvs:
    """The attribute ``available_envs`` of a class and of its objects."""

    def __get__(self, instance: Any, owner: Any) -> list[str]:
        return [name for names in available_envs().values() for name in names]


class TensorDictEnv(EnvBase):  # type: ignore[misc, unused-ignore]
    """Environments of Brax, MuJoCo Playground and their like as a TorchRL ``EnvBase``, with gradients.

    ``"state"`` is in the TensorDict, in and out, as ``"floats"`` ``[*B, D]`` and ``"integers"`` ``[*B, M]``: the same
    TensorDict stepped twice gives the same, and rollouts may branch. Observations, rewards and the state are differentiable
    with respect to all actions before them. Rows that are over stay as they are and pay 0 until they are reset; a
    ``"_reset"`` mask leaves the others' gradient alone.

    A reset of some rows starts the next episode of each row's own stream, of which the object keeps count.
    ``set_seed(s)`` is of the next reset of all rows: the i-th then has the key ``jax.random.key(s + i)``.

    It can be pickled and copied if its parts can.

    Args:
        env: A name of Brax or Playground, or an environment that :func:`vecenv.jax.adapt` takes.
        batch_size: Any shape, ``()`` too.
        requires_grad: ``True``: refuse an environment without a gradient, and warn if it is always 0; ``False``: give no
            gradients; ``None``: those that there are.
        device: Where tensors go; they are carried to JAX's device and back if that is another.
        categorical_action_encoding: Discrete spaces as integers, not one-hot.
        allow_done_after_reset: As everywhere in TorchRL.
        from_pixels: Only ``False``, as in TorchRL's ``BraxEnv``.
        **options: Those of :class:`vecenv.jax.FunctionalVectorEnv`, except for ``autoreset_mode``; others go to the named
            environment, as ``backend="spring"``.

    Attributes:
        functional: The :class:`vecenv.jax.FunctionalVectorEnv` beneath, its rows in one line.
        available_envs: The names of Brax and Playground, of the class or an object.

    Raises:
        gymnasium.error.NameNotFound: No such environment.
        ValueError: ``requires_grad=True`` and no gradient; the message names the cure.
        NotImplementedError: Dict or Tuple actions, or ``from_pixels=True``.

    Example::

        env = vecenv.torch.TensorDictEnv("ant", batch_size=[16], backend="spring")
        env.set_seed(0)
        data = env.rollout(10, policy)
        (-data["next", "reward"].mean()).backward()
    """

    available_envs = _AvailableEnvs()

    def __init__(
        self, env: Any, batch_size: Any = (), *, requires_grad: bool | None = None, device: Any = "cpu",
        categorical_action_encoding: bool = False, allow_done_after_reset: bool = False, from_pixels: bool = False,
        **options: Any,
    ) -> None:  # fmt: skip
        if from_pixels:
            raise NotImplementedError("from_pixels=True: observations are those of the environment, not images")
        batch = torch.Size(batch_size)
        super().__init__(device=device, batch_size=batch, allow_done_after_reset=allow_done_after_reset)
        self._made_of: dict[str, Any] = {
            "env": env, "batch_size": tuple(batch), "requires_grad": requires_grad,
            "categorical_action_encoding": categorical_action_encoding,
            "allow_done_after_reset": allow_done_after_reset, **options,
        }  # fmt: skip
        self.functional = _functional(env, max(batch.numel(), 1), options)
        found = differentiability(self.functional)
        if requires_grad and found == "zero":
            warn(f"a step of {getattr(self.functional.single_env, 'name', env)} has a gradient of 0 for every action")
        elif requires_grad:
            require_gradient(self.functional)
        self.requires_grad_of_actions = bool(requires_grad) or (requires_grad is None and found == "reverse")
        self._inner = DifferentiableEnv(self.functional, (), gradients=self.requires_grad_of_actions)
        self._seed_next: int | None = None
        self._begun: EnvState | None = None  # every row's latest start
        self._make_specs(not categorical_action_encoding)
        self.is_closed = False

    def _make_specs(self, onehot: bool) -> None:
        single, batch = self.functional, self.batch_size
        if isinstance(single.single_action_space, spaces.Dict | spaces.Tuple):
            raise NotImplementedError(f"actions have to be one tensor, and these are {single.single_action_space}")
        names = {key: f"observation_{key}" if key in _TAKEN else key for key in map(str, _entries(single))}
        self._observations = make_codec(single.single_observation_space, 1, onehot, names.__getitem__)
        self._actions = make_codec(single.single_action_space, 1, onehot)
        self._as_given = isinstance(single.single_action_space, spaces.Box)
        spec = self._spread(self._observations.spec)
        shown = dict(spec.items()) if _entries(single) else {"observation": spec}
        widths, dtypes = self._inner.widths, self._inner.dtypes
        kept = {name: Unbounded(shape=(*batch, w), dtype=d) for name, w, d in zip(_STATE, widths, dtypes, strict=True)}
        device = self.device or "cpu"
        self.observation_spec = Composite({**shown, "state": Composite(kept, shape=batch)}, shape=batch).to(device)
        self.state_spec = Composite({"state": Composite(kept, shape=batch).clone()}, shape=batch).to(device)
        self.action_spec = self._spread(self._actions.spec).to(device)
        self.reward_spec = Unbounded(shape=(*batch, 1), dtype=torch_dtype(jnp.result_type(float)), device=device)
        flag = Categorical(2, shape=(*batch, 1), dtype=torch.bool, device=device)
        flags = {"done": flag, "terminated": flag.clone(), "truncated": flag.clone()}
        self.done_spec = Composite(flags, shape=batch, device=device)

    def _spread(self, spec: Any) -> Any:
        """Return the spec of one row (with an axis of one) as that of the batch."""
        return spec[0].expand(*self.batch_size, *spec.shape[1:]) if self.batch_size else spec[0]

    # -- what TorchRL calls ------------------------------------------------------------------------------------------

    def _reset(self, tensordict: Any = None, *, seed: int | None = None) -> Any:
        mask = None if tensordict is None else tensordict.get("_reset", None)
        if mask is None or self._begun is None:
            self._begin(seed)
        elif (chosen := mask.detach().cpu().numpy().reshape(-1)).any():
            self._begun = self.functional.reset_mask(self._begun, chosen)
        return self.tensordict_of(self._inner.wrap(self._latest()))

    def _latest(self) -> EnvState:
        if self._begun is None:
            self._begin(None)
        assert self._begun is not None
        return self._begun

    def _begin(self, seed: int | None) -> None:
        """Return all rows at the start of an episode: of the seed, or the next of their streams."""
        seed = self._seed_next if seed is None else seed
        self._seed_next = None
        n = self.functional.num_envs
        if seed is None and self._begun is not None:
            self._begun = self.functional.reset_mask(self._begun, jnp.ones(n, bool))
            return
        self._begun = self.functional.begin(jnp.asarray(keys_from(seed, n)))

    def _step(self, tensordict: Any) -> Any:
        if tensordict.get("state", None) is None:
            before = self._inner.wrap(self._latest())
        else:
            before = self.state_of(tensordict)
        action = tensordict.get("action")
        rows = action.reshape(self.functional.num_envs, *action.shape[len(self.batch_size) :])
        if not self._as_given:
            rows = torch.from_numpy(self._actions.decode(rows))
        after = self._inner.step(before, rows.to(before.packed.device))
        reward = after.reward
        chosen = tensordict.get("_step", None)
        if chosen is not None:
            mask = chosen.reshape(-1, 1).to(before.packed.device)
            packed, integers = after.packed, after.integers
            after = self._inner.state(
                torch.where(mask, packed, before.packed), torch.where(mask, integers, before.integers)
            )
            reward = torch.where(mask[:, 0], reward, torch.zeros_like(reward))
        shown = self.tensordict_of(after)
        shown.set("reward", self._out(reward.unsqueeze(-1)))
        return shown

    def _set_seed(self, seed: int | None) -> None:
        self._seed_next = seed

    # -- states ------------------------------------------------------------------------------------------------------

    def state_of(self, tensordict: Any) -> TorchState:
        """Return the state in a TensorDict with all its fields (``episode_return``, ``info``, ...), rows in one line."""
        n = self.functional.num_envs
        device = self._inner.device
        packed, integers = (
            tensordict.get(("state", name)).reshape(n, width).to(device)
            for name, width in zip(_STATE, self._inner.widths, strict=True)
        )
        return self._inner.state(packed, integers)

    def tensordict_of(self, state: TorchState) -> Any:
        """Convert a state to the result of ``reset``, on the environment's device; the inverse of :meth:`state_of`."""
        observations = self._observations.encode(state.obs)
        shown = observations if _entries(self.functional) else {"observation": observations}
        flags = {name: getattr(state, name).unsqueeze(-1) for name in ("done", "terminated", "truncated")}
        kept = dict(zip(_STATE, (state.packed, state.integers), strict=True))
        found = {name: self._out(leaf) for name, leaf in {**shown, **flags}.items()}
        found["state"] = TensorDict(
            {name: self._out(leaf) for name, leaf in kept.items()}, batch_size=self.batch_size, device=self.device
        )
        return TensorDict(found, batch_size=self.batch_size, device=self.device)

    def _out(self, leaf: Any) -> Any:
        """Reshape rows in one line to the batch's shape, on the environment's device."""
        if isinstance(leaf, dict):
            return {name: self._out(inner) for name, inner in leaf.items()}
        leaf = leaf.reshape((*self.batch_size, *leaf.shape[1:]))
        return leaf if self.device is None else leaf.to(self.device)

    # -- other methods -------------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: Any) -> TensorDictEnv:
        made_of = {**self._made_of, "device": self.device, "env": self.functional}  # which is compiled already
        return _again(type(self), made_of, self._kept())  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _again, (type(self), {**self._made_of, "device": self.device}, self._kept())

    def _kept(self) -> Any:
        return self._seed_next, jax.tree.map(np.asarray, self._begun)

    def __repr__(self) -> str:
        name = getattr(self.functional.single_env, "name", "env")
        return f"{type(self).__name__}({name}, batch_size={list(self.batch_size)}, device={self.device})"


_STATE = ("floats", "integers")


def _again(kind: Any, made_of: dict[str, Any], kept: Any) -> Any:
    env = kind(**made_of)
    env._seed_next, begun = kept
    env._begun = jax.tree.map(jnp.asarray, begun)
    return env


def _functional(env: Any, n: int, options: dict[str, Any]) -> FunctionalVectorEnv:
    if isinstance(env, FunctionalVectorEnv):  # of a copy
        if env.autoreset_mode is not AutoresetMode.DISABLED or env.batch_shape != (n,):
            raise ValueError(f"{env!r} resets its rows itself, or has other rows: give the environment that it was made of")
        return env
    if "autoreset_mode" in options:
        raise TypeError("autoreset_mode is not an option here: TorchRL resets the rows that are over")
    return parse_functional(env, n, None, {**options, "autoreset_mode": AutoresetMode.DISABLED})


def _entries(functional: FunctionalVectorEnv) -> tuple[Any, ...]:
    """Return the entries of a Dict of observations; nothing for other spaces."""
    space = functional.single_observation_space
    return tuple(space.spaces) if isinstance(space, spaces.Dict) else ()

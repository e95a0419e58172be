"""Many single environments as one batch: steps, time limits, statistics, and the beginning of episodes.

Every function here is pure, works on a flat batch of ``n`` rows, and is meant to be compiled whole. Three decisions carry
the rest:

* **Fresh starts at almost no cost.** Resetting every row at every step and selecting costs a reset a step; restoring one
  stored start state makes all episodes alike. Here a while loop picks up to ``chunk`` rows that need it, resets those, and
  goes on while some are left: nothing happens on the many steps on which no episode ends.
* **The loop has a derivative.** A while loop has no reverse mode, but none is needed: a row that restarts forgets where it
  came from, and every other row passes through. That is the rule given to JAX below.
* **Keys belong to rows.** Row i's start states and noise are decided by its own key and its own episode count, so they
  depend neither on how many rows there are nor on when the others finish.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from gymnasium.vector import AutoresetMode
from jax.dtypes import float0

from vecenv.jax.native.env import default_key, select
from vecenv.jax.native.state import Array, EnvState, NativeState, PyTree
from vecenv.jax.native.wrap import Fixed

__all__ = ["Episodes", "Randomize"]

# randomize(model, keys) -> (models, in_axes), as in Brax's and Playground's training code: ``keys`` is uint32[n, k], the
# leaves of ``models`` that ``in_axes`` marks with 0 have a leading axis of n.
Randomize = Callable[[Any, Array], tuple[Any, Any]]

_FIRST = 0  # folded into an episode's key: the start state; step t folds in t >= 1
_POOL, _MODEL, _STAGGER = 2**31 - 1, 2**31 - 2, 2**31 - 3  # folded into a row's key; no episode count comes near


class Episodes:
    """The batch logic over one adapted environment; see :class:`vecenv.jax.FunctionalVectorEnv` for the options."""

    def __init__(
        self,
        env: Fixed,
        autoreset_mode: AutoresetMode,
        limit: int | None,
        *,
        pool_size: int = 0,
        stagger: bool = False,
        randomize: Randomize | None = None,
        discount: float = 1.0,
        micro_batch: int | None = None,
        reset_chunk: int | None = None,
    ) -> None:
        self.env = env
        self.mode = autoreset_mode
        self.limit = limit
        self.pool_size = pool_size
        self.stagger = stagger
        self.randomize = randomize
        self.discount = discount
        self.micro_batch = micro_batch
        self.reset_chunk = reset_chunk
        self._varied: list[int] = []  # which leaves of the model differ from row to row
        self._restart_rows = jax.custom_jvp(self._restart_loop)
        self._restart_rows.defjvp(self._restart_derivative)
        if randomize is not None:
            jax.eval_shape(self._models, default_key(0)[None])  # learns which leaves vary

    # -- what the outside calls ------------------------------------------------------------------------------------

    def begin(self, key: Array, episode: Array) -> EnvState:
        """All rows at the start of an episode. ``key`` is ``uint32[n, k]``, ``episode`` is ``int32[n]``."""
        n = key.shape[0]
        model = self._models(key)
        pool = self._pools(key, model)
        env, obs = jax.vmap(self._start)((key, episode, model, pool))
        elapsed = jnp.zeros(n, jnp.int32)
        if self.stagger:
            limit = self.limit or 1  # FunctionalVectorEnv sees to it that there is one
            draw: Any = jax.vmap(lambda k: jax.random.randint(jax.random.fold_in(k, _STAGGER), (), 0, limit))
            elapsed = draw(key).astype(jnp.int32)
        inner = NativeState(env, key, episode, elapsed, pool, model)
        zero, no, none = jnp.zeros(n, jnp.result_type(float)), jnp.zeros(n, bool), jnp.zeros(n, jnp.int32)
        return EnvState(
            obs=obs, reward=zero, terminated=no, truncated=no, next_obs=obs, valid=no, first=~no, steps=none,
            episode_return=zero, discounted_return=zero, last_return=zero, last_length=none,
            last_discounted_return=zero, info=self._empty_info(n), inner=inner,
        )  # fmt: skip

    def step(self, state: EnvState, action: PyTree) -> EnvState:
        """One step of every row that is in an episode; what the others do depends on the mode."""
        return _STEP[self.mode](self, state, action)

    def restart(self, state: EnvState, mask: Array, key: Array | None) -> EnvState:
        """Begin the next episode of the rows under ``mask``; with ``key`` (``uint32[n, k]``) the first of that key."""
        inner = state.inner
        if key is None:
            inner, obs = self._next_episode(mask, inner, state.obs)
        else:
            keys = jnp.where(mask[:, None], key, inner.key)
            anew = self.begin(keys, jnp.where(mask, 0, inner.episode))
            inner, obs = _merge(mask, (anew.inner, anew.obs), (inner, state.obs))
        zero, no = jnp.zeros_like(state.reward), jnp.zeros_like(mask)
        begun = state.replace(
            obs=obs, next_obs=obs, reward=zero, terminated=no, truncated=no, valid=no, first=~no,
            steps=jnp.zeros_like(state.steps), episode_return=zero, discounted_return=zero, inner=None,
        )  # fmt: skip
        merged: EnvState = _merge(mask, begun, state.replace(inner=None))
        return merged.replace(inner=inner)

    # -- the three autoreset modes ---------------------------------------------------------------------------------

    def _step_next(self, state: EnvState, action: PyTree) -> EnvState:
        """NEXT_STEP: a row that ended begins its next episode instead of stepping; its action is ignored."""
        begins = state.terminated | state.truncated
        steps = jnp.where(begins, 0, state.steps)
        # Rows that begin are stepped too, past their end, and begun over the result: restarts write a few rows in place,
        # where choosing between two whole states would read both and write a third.
        env, obs, reward, terminated, truncated, info = self._advance(_cut(begins, state.inner), steps, _cut(begins, action))
        inner, obs = self._next_episode(begins, state.inner.replace(env=env), obs)
        info = _merge(begins, jax.tree.map(jnp.zeros_like, info), info)
        after = state.replace(
            obs=obs, next_obs=obs, reward=jnp.where(begins, 0.0, reward), terminated=terminated & ~begins,
            valid=~begins, first=begins, info=info, inner=inner,
        )  # fmt: skip
        return self._count(after, truncated & ~begins, begins)

    def _step_same(self, state: EnvState, action: PyTree) -> EnvState:
        """SAME_STEP: a row that ends begins its next episode within the step; ``next_obs`` keeps what it ended on."""
        inner = state.inner
        env, obs, reward, terminated, truncated, info = self._advance(inner, state.steps, action)
        none = jnp.zeros_like(terminated)
        after = state.replace(
            obs=obs, next_obs=obs, reward=reward, terminated=terminated, valid=~none, info=info,
            inner=inner.replace(env=env),
        )  # fmt: skip
        after = self._count(after, truncated, none)
        ended = after.terminated | after.truncated
        inner, obs = self._next_episode(ended, after.inner, obs)
        zero = jnp.zeros_like(reward)
        return after.replace(
            obs=obs, first=ended, inner=inner, steps=jnp.where(ended, 0, after.steps),
            episode_return=jnp.where(ended, zero, after.episode_return),
            discounted_return=jnp.where(ended, zero, after.discounted_return),
        )  # fmt: skip

    def _step_disabled(self, state: EnvState, action: PyTree) -> EnvState:
        """DISABLED: a row that ended stays as it is, pays nothing and is not valid, until it is reset."""
        over = state.terminated | state.truncated
        inner = state.inner
        stepped = self._advance(_cut(over, inner), state.steps, _cut(over, action))
        env, obs, reward, terminated, truncated, info = stepped
        env, obs, info = _merge(over, (inner.env, state.obs, state.info), (env, obs, info))
        after = state.replace(
            obs=obs, next_obs=obs, reward=jnp.where(over, 0.0, reward), first=jnp.zeros_like(over), valid=~over,
            terminated=jnp.where(over, state.terminated, terminated), info=info, inner=inner.replace(env=env),
        )  # fmt: skip
        counted = self._count(after, truncated, jnp.zeros_like(over))
        frozen = _merge(over, _counters(state), _counters(counted))
        elapsed = jnp.where(over, inner.elapsed, counted.inner.elapsed)
        return counted.replace(**frozen, inner=counted.inner.replace(elapsed=elapsed))

    def _advance(self, inner: NativeState, steps: Array, action: PyTree) -> Any:
        """Step every row once: ``(env, obs, reward, terminated, truncated, info)``, no limits, no resets."""

        def one(row: Any) -> Any:
            env, key, episode, step, model, action = row
            noise = jax.random.fold_in(jax.random.fold_in(key, episode), step + 1)
            *stepped, info = self._with(model, lambda: self.env.step(env, action, noise))
            return (*stepped, jax.tree.map(lambda spec, leaf: leaf.astype(spec.dtype), self._info_spec, info))

        rows = (inner.env, inner.key, inner.episode, steps, inner.model, action)
        if self.micro_batch is None:
            return jax.vmap(one)(rows)
        return jax.lax.map(one, rows, batch_size=self.micro_batch)

    def _count(self, state: EnvState, truncated: Array, begins: Array) -> EnvState:
        """Time limit and statistics after a step; rows under ``begins`` are at step 0 of an episode."""
        inner = state.inner
        elapsed = jnp.where(begins, 0, inner.elapsed + 1)
        if self.limit is not None:
            truncated = truncated | (elapsed >= self.limit)
        counted = state.replace(truncated=truncated).counted(begins, self.discount)
        return counted.replace(inner=inner.replace(elapsed=elapsed))

    # -- the beginning of episodes ---------------------------------------------------------------------------------

    def _start(self, row: Any) -> tuple[PyTree, PyTree]:
        """Start state and observation of one row's episode: computed, or taken from its pool."""
        key, episode, model, pool = row
        key = jax.random.fold_in(jax.random.fold_in(key, episode), _FIRST)
        if pool is None:
            start: tuple[PyTree, PyTree] = self._with(model, lambda: self.env.init(key))
            return start
        drawn = jax.random.randint(key, (), 0, self.pool_size) if self.pool_size > 1 else 0
        picked: tuple[PyTree, PyTree] = jax.tree.map(lambda leaf: leaf[drawn], pool)
        return picked

    def _next_episode(self, need: Array, inner: NativeState, obs: PyTree) -> tuple[NativeState, PyTree]:
        episode = inner.episode + need.astype(jnp.int32)
        source = (inner.key, episode, inner.model, inner.pool)
        env, obs = self._restart_rows(need, source, (inner.env, obs))
        return inner.replace(env=env, episode=episode, elapsed=jnp.where(need, 0, inner.elapsed)), obs

    def _restart_loop(self, need: Array, source: PyTree, current: PyTree) -> PyTree:
        """``current`` with the rows under ``need`` started anew from ``source``, ``chunk`` rows at a time."""
        n = need.shape[0]
        chunk = min(n, self.reset_chunk or max(8, -(-n // 16)))

        def some_left(carry: Any) -> Array:
            return jnp.any(carry[0])

        def start_some(carry: Any) -> Any:
            left, current = carry
            rows = jnp.nonzero(left, size=chunk, fill_value=n)[0]
            chosen = jax.tree.map(lambda x: x.at[rows].get(mode="clip"), source)
            present = jax.tree.map(lambda x: x.at[rows].get(mode="clip"), current)
            fresh = _apart(jax.vmap(self._start), rows[0] < n, chosen, present)
            current = jax.tree.map(lambda x, new: x.at[rows].set(new, mode="drop"), current, fresh)
            return left.at[rows].set(False, mode="drop"), current

        return jax.lax.while_loop(some_left, start_some, (need, current))[1]

    def _restart_derivative(self, primals: Any, tangents: Any) -> Any:
        """Rows that restart forget their past; the others pass through."""

        def through(tangent: Any) -> Any:
            if tangent.dtype == float0:
                return tangent
            return select(primals[0], jnp.zeros_like(tangent), tangent)

        return self._restart_rows(*primals), jax.tree.map(through, tangents[2])

    def _pools(self, key: Array, model: PyTree) -> PyTree:
        if not self.pool_size:
            return None

        def store(key: Array, model: PyTree) -> Any:
            keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.fold_in(key, _POOL), i))(jnp.arange(self.pool_size))
            return self._with(model, lambda: jax.vmap(self.env.init)(keys))

        return jax.vmap(store)(key, model)

    # -- domain randomisation --------------------------------------------------------------------------------------

    def _models(self, key: Array) -> list[Array] | None:
        """The leaves of the physics model that differ from row to row, each ``[n, ...]``."""
        if self.randomize is None:
            return None
        keys = jax.vmap(lambda k: jax.random.fold_in(k, _MODEL))(key)
        models, in_axes = self.randomize(self.env.model, keys)
        spread = jax.tree.map(
            lambda axis, part: jax.tree.map(lambda _: -1 if axis is None else axis, part),
            in_axes,
            models,
            is_leaf=lambda axis: axis is None,
        )
        axes = jax.tree.leaves(spread)
        if set(axes) - {-1, 0}:
            raise ValueError(f"randomize must batch leaves along axis 0 (or None for not at all), got {sorted(set(axes))}.")
        self._varied = [i for i, axis in enumerate(axes) if axis == 0]
        leaves = jax.tree.leaves(models)
        return [jnp.asarray(leaves[i]) for i in self._varied]

    def _with(self, varied: list[Array] | None, body: Callable[[], Any]) -> Any:
        """Run ``body`` with one row's model in place."""
        if varied is None:
            return body()
        leaves, structure = jax.tree.flatten(self.env.model)
        for i, leaf in zip(self._varied, varied, strict=True):
            leaves[i] = leaf
        with self.env.using(jax.tree.unflatten(structure, leaves)):
            return body()

    def _empty_info(self, n: int) -> dict[str, Any]:
        empty: dict[str, Any] = jax.tree.map(lambda leaf: jnp.zeros((n, *leaf.shape), leaf.dtype), self._info_spec)
        return empty

    @functools.cached_property
    def _info_spec(self) -> Any:
        """Shapes and dtypes of one environment's info, by tracing a step."""
        key = default_key(0)
        state, _ = jax.eval_shape(self.env.init, key)
        action = jax.tree.map(jnp.asarray, self.env.single_action_space.sample())
        return jax.eval_shape(lambda state, action: self.env.step(state, action, key)[5], state, action)


def _apart(function: Callable[[Any], Any], always: Array, argument: Any, otherwise: Any) -> Any:
    """``function(argument)`` as the branch of a conditional that is always taken.

    XLA does not fuse across the edge of a branch. Fused with what stands around it, a start would be rounded differently
    in the restart loop and in a reset, and the same key would not give the same episode to the last bit.
    """
    return jax.lax.cond(always, lambda: function(argument), lambda: otherwise)


def _merge(mask: Array, yes: Any, no: Any) -> Any:
    """Row by row ``yes`` where ``mask`` holds, else ``no``, over two trees of the same structure."""
    return jax.tree.map(lambda one, other: select(mask, one, other), yes, no)


def _cut(mask: Array, tree: PyTree) -> PyTree:
    """``tree``, through whose rows under ``mask`` no gradient passes; the compiler sees that nothing is chosen.

    A step past the end of an episode may have a derivative that is not finite. Its result is thrown away, but zero times
    infinity is NaN, which would reach the action and all steps before.
    """
    return jax.tree.map(lambda leaf: select(mask, jax.lax.stop_gradient(leaf), leaf), tree)


def _counters(state: EnvState) -> dict[str, Array]:
    names = (
        "truncated", "steps", "episode_return", "discounted_return", "last_return", "last_length", "last_discounted_return",
    )  # fmt: skip
    return {name: getattr(state, name) for name in names}


_STEP: dict[AutoresetMode, Callable[[Episodes, EnvState, PyTree], EnvState]] = {
    AutoresetMode.NEXT_STEP: Episodes._step_next,
    AutoresetMode.SAME_STEP: Episodes._step_same,
    AutoresetMode.DISABLED: Episodes._step_disabled,
}

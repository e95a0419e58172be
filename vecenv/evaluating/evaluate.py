"""``vecenv.evaluate``: checks the arguments, chooses the runner that an engine allows, and shows progress."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from gymnasium import logger
from gymnasium.error import AlreadyPendingCallError
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper

from vecenv.errors import EnvFailed, SnapshotMismatch
from vecenv.evaluating.episodes import EpisodeResult, EpisodeResults, Episodes, Listed, listed
from vecenv.evaluating.policies import Acting
from vecenv.evaluating.runners import FirstReadyRunner, LockstepRunner
from vecenv.front.arguments import seconds_of
from vecenv.front.capabilities import Capabilities, capabilities_of, unable
from vecenv.state.snapshots import Kind, Snapshot
from vecenv.system.uninterrupted import Noted

__all__ = ["evaluate"]

_ENVPOOL_SEEDS = 2**31  # below: what its C++ takes


def evaluate(
    envs: VectorEnv[Any, Any, Any],
    policy: Callable[..., Any],
    episodes: Listed,
    *,
    seed: int | None = None,
    retries: int = 1,
    timeout: float | None = None,
    on_episode: Callable[[EpisodeResult], object] | None = None,
    progress: bool = False,
    frames: Iterable[int] = (),
    initial_state: Any = None,
    arrays: str | None = None,
    device: Any = None,
    batch: str = "ready",
) -> EpisodeResults:
    """Run each episode of a list exactly once, and give the results in the order of the list.

    Results do not depend on the number of environments or workers, unless environments share generators: then there is a
    warning, and ``generators="own"`` mends it. ``docs/evaluation.md`` says what each engine does.

    Args:
        envs: A vector environment with one agent each, in any autoreset mode, nothing in flight. Reset it afterwards.
        policy: ``policy(observations)`` gives an action for each row: the environments that are ready, 1 to ``num_envs``.
            It also gets what its parameters name: ``rows``, int ``(k,)``, which environments; ``begins``, bool ``(k,)``,
            which begin an episode; ``episodes``, int ``(k,)``, places in the list; ``rngs``, ``k`` generators, one per
            episode; ``infos``, ``k`` dicts; ``state``. Actions are arrays of numpy, torch or JAX.
        episodes: How many, or a sequence of :class:`vecenv.Episode` or snapshots (``envs.save()``).
        seed: An episode without a seed gets this one plus its place; generators follow from it too. ``None``: a random one.
        retries: How often a failed episode begins again, with its seed; then its result has the error. Where environments
            step together, an exception ends the evaluation.
        timeout: Seconds that one environment has for a step or a reset; then its worker is ended and the episode has failed.
            ``None``: the vector environment's ``step_timeout``.
        on_episode: Called with each result, in the order in which episodes end.
        progress: Show a bar, by ``tqdm``.
        frames: Places of episodes whose frames are kept (``render_mode="rgb_array"``); they run first, one at a time.
        initial_state: For a policy that names ``state``: the state at the beginning of an episode, an array or dicts, lists
            and tuples of them. The policy gets those of its rows, stacked, and returns ``(actions, state)``.
        arrays: Observations are ``"numpy"``, ``"torch"`` or ``"jax"`` arrays; ``None``: tensors for a ``torch.nn.Module``.
        device: Where tensors go; ``None``: where the module's parameters are.
        batch: ``"ready"``; ``"padded"``: always ``num_envs`` rows, the first one repeated, with ``num_envs`` in ``rows``;
            ``"single"``: one row at a time, so that no result depends on the rows beside it.

    Returns:
        A list of :class:`vecenv.EpisodeResult`, with ``returns``, ``lengths``, ``mean`` and ``std``.

    Raises:
        TypeError, ValueError: Wrong arguments, before anything runs; a policy that does not give an action for each row.
        NotImplementedError: The engine lacks seeds, options, snapshots, frames or timeouts for each episode.
        SnapshotMismatch: A snapshot does not fit the environments.
        AlreadyPendingCallError: Something is in flight.
        ImportError: ``progress`` without tqdm.
        Exception: Of the policy, ``on_episode`` or a signal handler. The next ``reset()`` waits for what was in flight.
    """
    todo = _checked_episodes(envs, policy, episodes, seed, retries, on_episode)
    given: dict[str, Any] = {"arrays": arrays, "device": device, "batch": batch, "initial_state": initial_state}
    act = Acting(policy, envs.num_envs, envs.single_observation_space, envs.single_action_space, **given)
    reporting = _Reporting(on_episode)
    runner = _runner(envs, todo, act, reporting, seconds_of(timeout), _filmed(frames, len(todo.episodes)))
    return _run(envs, todo, runner, reporting, progress)


class _Reporting:
    """Called with each result: moves the bar, if there is one, and calls the user's function."""

    def __init__(self, on_episode: Callable[[EpisodeResult], object] | None) -> None:
        self.bar: Any = None
        self._on_episode = on_episode

    def __call__(self, result: EpisodeResult) -> None:
        if self.bar is not None:
            self.bar.update()
        if self._on_episode is not None:
            self._on_episode(result)


def _checked_episodes(envs: Any, policy: Any, episodes: Listed, seed: Any, retries: Any, on_episode: Any) -> Episodes:
    if hasattr(envs, "possible_agents"):
        unable(envs, "evaluate episodes of several agents", "a result has one return")
    if not isinstance(envs, VectorEnv):
        raise _no_vector_env(envs, policy)
    wanted, base = listed(episodes, seed)
    todo = Episodes(wanted, base, retries)
    if on_episode is not None and not callable(on_episode):
        raise TypeError(f"on_episode must be callable, got {on_episode!r}")
    return todo


def _run(envs: Any, todo: Episodes, runner: Any, reporting: _Reporting, progress: bool) -> EpisodeResults:
    if progress:
        reporting.bar = _bar(len(todo.episodes))
    try:
        with Noted():
            runner.run()
    finally:
        if reporting.bar is not None:
            reporting.bar.close()
    if getattr(getattr(envs.unwrapped, "_driver", None), "warned_of_draws", ""):
        logger.warn(
            "%s",
            "what evaluate gave depends on which row each episode ran in, and on the others in its process: they draw "
            "from generators that they share. generators='own' makes results the same for every number of environments",
        )
    return EpisodeResults(todo.results[index] for index in range(len(todo.episodes)))


def _no_vector_env(envs: Any, policy: Any) -> TypeError:
    if isinstance(policy, VectorEnv):
        return TypeError(
            f"evaluate(envs, policy, episodes): got envs={envs!r} and policy={policy!r}: are the first two swapped?"
        )
    return TypeError(
        f"evaluate(envs, policy, episodes) wants a Gymnasium vector environment, as vecenv.make_vec builds, got {envs!r}"
    )


def _runner(
    envs: Any,
    todo: Episodes,
    act: Acting,
    report: Callable[[EpisodeResult], None],
    limit: float | None,
    filmed: frozenset[int],
) -> FirstReadyRunner | LockstepRunner:
    """What runs them on this engine.

    Raises:
        NotImplementedError: Nothing can.
    """
    able = capabilities_of(envs)
    if isinstance(envs, VectorWrapper) and not hasattr(type(envs), "recv"):
        able = None  # what its engine can do by row goes past it
    if (begun := _one_of_each_kind(todo)) and (able is None or not able.snapshots):
        unable(envs, "begin episodes with snapshots", "they cannot be loaded")
    if able is not None and able.first_ready and able.masked_seeds and hasattr(envs, "abandon"):
        if filmed and envs.render_mode != "rgb_array":
            raise ValueError(f"frames need render_mode='rgb_array', got {envs.render_mode!r}")
        if limit is not None and able.in_this_process:
            unable(envs, "end environments that hang", "the calling process steps some: isolate=True, or num_workers=")
        if flying := sorted(envs.in_flight.tolist()):
            raise AlreadyPendingCallError(f"Calling `evaluate` while envs {flying} are in flight: `recv` first.", "send")
        if limit is None and not able.in_this_process:
            limit = envs.step_timeout
        _require_fitting(envs, begun)
        return FirstReadyRunner(envs, todo, act, report, limit, filmed)
    if filmed:
        unable(envs, "give frames of single environments", "they step together")
    if limit is not None:
        unable(envs, "end environments that hang", "they are no processes of vecenv's")
    in_waves = _in_waves(envs, able, todo)
    _require_fitting(envs, begun)
    return LockstepRunner(envs, todo, act, report, in_waves=in_waves)


def _one_of_each_kind(todo: Episodes) -> dict[int, Snapshot]:
    """Of the snapshots that episodes begin with, the first of each kind of environment, by the place of its episode."""
    found: dict[Kind, tuple[int, Snapshot]] = {}
    for index, episode in enumerate(todo.episodes):
        if episode.snapshot is not None:
            found.setdefault(episode.snapshot.row.kind, (index, episode.snapshot))
    return dict(found.values())


def _require_fitting(envs: Any, begun: dict[int, Snapshot]) -> None:
    """Refuse snapshots of other environments. Loading one is the way to know; all rows are reset or loaded anyway."""
    for index, snapshot in begun.items():
        try:
            try:
                envs.load(snapshot, env_id=[0])
            except EnvFailed:  # a worker has died before
                envs.reset()
                envs.load(snapshot, env_id=[0])
        except SnapshotMismatch as error:
            raise SnapshotMismatch(f"episodes[{index}].snapshot: {error}") from error


def _in_waves(envs: Any, able: Capabilities | None, todo: Episodes) -> bool:
    """Whether all rows have to be seeded at once.

    Raises:
        NotImplementedError: No row can be given a seed, or an episode its options.
    """
    if able is None:
        if envs.metadata.get("autoreset_mode") not in AutoresetMode:
            unable(envs, "be evaluated", "its metadata say nothing of its autoreset mode")
        return False
    if not able.row_seeds:
        unable(envs, "evaluate episodes with a seed each", "its environments share one generator")
    if any(episode.options for episode in todo.episodes) and not able.reset_options:
        unable(envs, "evaluate episodes with options", "its environments take none")
    largest = max(todo.seed(index) for index in range(len(todo.episodes)))
    if able.backend == "envpool" and largest >= _ENVPOOL_SEEDS:
        unable(envs, f"give an episode the seed {largest}", "EnvPool's seeds are below 2**31")
    return not (able.reset_mask and able.masked_seeds)


def _filmed(frames: Iterable[int], count: int) -> frozenset[int]:
    chosen = frozenset(frames)
    if wrong := [index for index in chosen if not isinstance(index, (int, np.integer)) or not 0 <= index < count]:
        raise ValueError(f"frames must be places of episodes, from 0 to {count - 1}; got {wrong}")
    return frozenset(int(index) for index in chosen)


def _bar(total: int) -> Any:
    try:
        from tqdm.auto import tqdm
    except ImportError as error:
        raise ImportError("progress=True needs tqdm: pip install tqdm") from error

    class Bar(tqdm):  # type: ignore[misc, unused-ignore]  # (Any where tqdm is not installed)
        monitor_interval = 0  # its thread would be there when a worker is forked

    return Bar(total=total, unit="episode")

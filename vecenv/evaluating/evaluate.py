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
from vecenv.front.capabilities import Capabilities, capabilities_of, unable
from vecenv.front.deadlines import seconds_of
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

    They do not depend on how many environments or workers there are. (Where environments draw from generators that they
    share, they do; then there is a warning, and ``generators="own"`` mends it.)

    Where an engine answers row by row (worker processes, the calling process, Ray), an environment that is done begins the
    next episode at once, while the others go on, and none is stepped for nothing: there are as many steps as the lengths add
    up to. Engines whose environments step together do what they can; see ``docs/evaluation.md``.

    Args:
        envs: A vector environment with one agent each, in any autoreset mode; nothing may be in flight. Afterwards it has
            to be reset before it is used for something else.
        policy: ``policy(observations)`` gives an action for each row of ``observations``, which are the rows that are
            ready, from 1 to ``num_envs`` of them. It is also given what it names among its parameters: ``rows``, int
            ``(k,)``, which environments these are; ``begins``, bool ``(k,)``, which of them begin an episode; ``episodes``,
            int ``(k,)``, the places in the list; ``rngs``, ``k`` of ``numpy.random.Generator``, one per episode; ``infos``,
            ``k`` dicts; ``state``, see ``initial_state``. Actions may be arrays of numpy, torch or JAX.
        episodes: How many, or a sequence of :class:`vecenv.Episode`, or of snapshots (``envs.save()``), from which they go
            on.
        seed: An episode without a seed gets this one plus its place in the list; the generators follow from it as well.
            ``None``: an unpredictable one; the results say which seeds it came to.
        retries: How often an episode that fails is begun again, with the same seed. Afterwards its result has the error.
            With engines that step together an exception ends the evaluation.
        timeout: Seconds that one environment may take for a step or a reset before its worker is ended and the episode has
            failed. ``None``: the vector environment's own ``step_timeout``, or for ever.
        on_episode: Called with each result, in the order in which episodes end.
        progress: Show a bar, by ``tqdm``.
        frames: Places of episodes whose frames are kept (``render_mode="rgb_array"``). They are run one at a time, before
            all others.
        initial_state: For a policy that names ``state``: that of one episode at its beginning, an array or dicts, lists and
            tuples of them. The policy is given those of the rows that are ready, stacked, and returns ``(actions, state)``.
        arrays: What observations are given as: ``"numpy"``, ``"torch"`` (without gradients), ``"jax"``; ``None``: tensors
            if the policy is a ``torch.nn.Module``, else as they come.
        device: Where tensors go; ``None``: where the module's parameters are.
        batch: ``"ready"``; ``"padded"``: always ``num_envs`` rows, copies of the first at the end, with ``num_envs`` in
            ``rows``, so that a compiled policy is compiled once; ``"single"``: one row at a time, so that results are the
            same bit for bit even where a library computes a row in another way when it is beside others.

    Returns:
        A list of one :class:`vecenv.EpisodeResult` per episode, with ``returns``, ``lengths``, ``mean`` and ``std``: an
        :class:`~vecenv.evaluating.episodes.EpisodeResults`.

    Raises:
        TypeError, ValueError: Arguments that are wrong, before anything is run; a policy that returns something else than an
            action a row, before any environment is stepped with it.
        NotImplementedError: The engine cannot give each episode its seed, its options, or its snapshot, or frames, or a
            timeout; before anything is run.
        SnapshotMismatch: A snapshot does not fit the environments; before anything is run, though one of them has been
            loaded.
        AlreadyPendingCallError: Something is in flight.
        ImportError: ``progress`` without tqdm.
        Exception: What the policy, ``on_episode`` or a signal handler raises. What was in flight then is waited for by the
            next ``reset()``.
    """
    if hasattr(envs, "possible_agents"):
        unable(envs, "evaluate episodes of several agents", "a result has one return")
    if not isinstance(envs, VectorEnv):
        raise _no_vector_env(envs, policy)
    wanted, base = listed(episodes, seed)
    todo = Episodes(wanted, base, retries)
    if on_episode is not None and not callable(on_episode):
        raise TypeError(f"on_episode must be callable, got {on_episode!r}")
    filmed = _filmed(frames, len(wanted))
    act = Acting(
        policy, envs.num_envs, envs.single_observation_space, envs.single_action_space, arrays=arrays, device=device,
        batch=batch, initial_state=initial_state,
    )  # fmt: skip
    limit = seconds_of(timeout)
    bar: Any = None

    def report(result: EpisodeResult) -> None:
        if bar is not None:
            bar.update()
        if on_episode is not None:
            on_episode(result)

    runner = _runner(envs, todo, act, report, limit, filmed)
    if progress:
        bar = _bar(len(wanted))
    try:
        with Noted():
            runner.run()
    finally:
        if bar is not None:
            bar.close()
    if getattr(getattr(envs.unwrapped, "_driver", None), "warned_of_draws", ""):
        logger.warn(
            "%s",
            "what evaluate gave depends on which row each episode ran in, and on the others in its process: they draw "
            "from generators that they share. generators='own' makes results the same for every number of environments",
        )
    return EpisodeResults(todo.results[index] for index in range(len(wanted)))


def _no_vector_env(envs: Any, policy: Any) -> TypeError:
    if isinstance(policy, VectorEnv):
        return TypeError(
            f"evaluate(envs, policy, episodes): got envs={envs!r} and policy={policy!r}: are the first two swapped?"
        )
    return TypeError(f"evaluate wants a Gymnasium vector environment, as vecenv.make_vec builds, got {envs!r}")


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

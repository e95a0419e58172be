"""Episodes that name an environment, their task: one engine for many tasks returns the results of plain loops."""

from __future__ import annotations

import functools
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from envs import open_engine
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers.vector import TransformObservation
from walks import ENGINES, SEED, Walk, choose_actions, finish_walk, summarize

import vecenv
from vecenv.evaluating.episodes import Episode
from vecenv.evaluating.tasks import WaitingEpisodes

HERE = Path(__file__).parent


class TaskWalk(Walk):
    """A walk that appends ``longest`` and the id of its process to the file ``log`` when it is built."""

    def __init__(self, longest: int, log: str = "", **kwargs: Any) -> None:
        super().__init__(longest, **kwargs)
        if log:
            with open(log, "a") as file:
                file.write(f"{longest} {os.getpid()}\n")


def make_tasks(count: int = 4, **kwargs: Any) -> dict[str, Any]:
    return {f"walk-{number}": functools.partial(TaskWalk, 4 + 3 * number, **kwargs) for number in range(count)}


def make_episodes(num_tasks: int = 4, per_task: int = 5) -> list[Episode]:
    return [Episode(env=f"walk-{number}", seed=SEED + index) for number in range(num_tasks) for index in range(per_task)]


def expected_results(episodes: list[Episode]) -> list[Any]:
    """Return the results of plain loops over one environment per episode."""
    results = []
    for index, episode in enumerate(episodes):
        env = make_tasks()[str(episode.env)]()
        results.append(finish_walk(env, env.reset(seed=episode.seed)[0], index, SEED, episode.seed))
    return results


@pytest.mark.parametrize("num_envs", [1, 3, 16])
def test_evaluate_of_tasks_equals_plain_loops_for_every_num_envs(num_envs: int) -> None:
    with open_engine([vecenv.EnvChoice(make_tasks())] * num_envs, num_workers=min(num_envs, 2)) as envs:
        results = vecenv.evaluate(envs, choose_actions, make_episodes(), seed=SEED)
    assert summarize(results) == expected_results(make_episodes())
    assert [result.env for result in results] == [episode.env for episode in make_episodes()]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("mode", AutoresetMode, ids=lambda mode: mode.name)
@pytest.mark.parametrize("engine", [*ENGINES, "gymnasium"])
def test_evaluate_of_tasks_equals_plain_loops_with_every_engine(engine: str, mode: AutoresetMode) -> None:
    episodes = random.Random(3).sample(make_episodes(), 9)
    fns: Any = [vecenv.EnvChoice(make_tasks(), keep=2)] * 3
    envs: Any
    if engine == "gymnasium":
        envs = SyncVectorEnv(fns, autoreset_mode=mode)
    else:
        envs = vecenv.AsyncVectorEnv(fns, autoreset_mode=mode, **ENGINES[engine])
    try:
        assert summarize(vecenv.evaluate(envs, choose_actions, episodes, seed=SEED)) == expected_results(episodes)
    finally:
        envs.close()


def test_evaluate_of_tasks_behind_a_vector_wrapper_equals_plain_loops() -> None:
    """Gymnasium's wrappers have no method ``call``, which returns the names of the tasks."""
    with open_engine([vecenv.EnvChoice(make_tasks())] * 3, num_workers=2) as envs:
        episodes, wrapped = make_episodes(), TransformObservation(envs, lambda observations: observations)
        assert summarize(vecenv.evaluate(wrapped, choose_actions, episodes, seed=SEED)) == expected_results(episodes)
        with pytest.raises(ValueError, match="names no environment"):
            vecenv.evaluate(wrapped, choose_actions, 3)


def test_each_task_is_built_about_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with open_engine([vecenv.EnvChoice(make_tasks(8, log=str(log)))] * 4, num_workers=2) as envs:
        log.write_text("")  # each row has built an environment for its spaces
        vecenv.evaluate(envs, choose_actions, make_episodes(8, 6), seed=SEED)
    built = Counter(line.split()[0] for line in log.read_text().splitlines())
    assert len(built) >= 7
    assert sum(built.values()) <= 8 + 2, "more than one extra environment per worker"


def test_pop_for_prefers_the_task_of_the_row_or_the_longest_queue() -> None:
    episodes = [Episode(env=name) for name in "aaaabb"] + [Episode()]
    waiting = WaitingEpisodes(episodes)
    waiting.add(range(7))
    pop_for = waiting.pop_for
    assert [pop_for(0, worker_is_idle=True), pop_for(1, worker_is_idle=True), pop_for(0, worker_is_idle=False)] == [0, 4, 1]
    assert pop_for(2, worker_is_idle=False) == 6  # the episode that names no environment
    assert pop_for(2, worker_is_idle=False) is None
    assert pop_for(2, worker_is_idle=True) == 2  # from the longest queue
    assert pop_for(1, worker_is_idle=False) == 5
    assert pop_for(1, worker_is_idle=True) == 3
    assert not waiting


def test_pop_for_distributes_the_remaining_tasks_to_idle_workers() -> None:
    """A worker with idle rows receives half of the remaining tasks, even if the rows of the other worker are busy."""
    episodes = [Episode(env=name) for name in "abcdefgh" for _ in range(10)]
    waiting = WaitingEpisodes(episodes, [range(4), range(4, 8)])
    waiting.add(range(80))
    first = {waiting.pop_for(row, worker_is_idle=row in (0, 4)) for row in (0, 1, 4, 5)}
    assert first == {0, 10, 20, 30}
    for row in (0, 1, 4, 5):
        for _ in range(9):
            waiting.pop_for(row, worker_is_idle=False)
    idle_first = [waiting.pop_for(row, worker_is_idle=row == 0) for row in (0, 1, 2, 3)]
    assert idle_first == [40, 50, None, None]
    assert [waiting.pop_for(row, worker_is_idle=row == 4) for row in (4, 5, 6, 7)] == [60, 70, None, None]
    assert waiting.pop_for(2, worker_is_idle=True) in (41, 51, 61, 71)  # every task has a row, so this row shares one


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize(
    ("fault", "restarts"),
    [
        ("raise", False), ("die", False), ("raise once", False), ("die once", False),
        pytest.param("hang", False, marks=pytest.mark.long), ("die", True), ("raise once", True),
    ],
)  # fmt: skip
def test_failed_episode_does_not_affect_other_tasks(fault: str, restarts: bool, tmp_path: Path) -> None:
    env_fns = make_tasks()
    env_fns["walk-1"] = functools.partial(TaskWalk, 7, faults={SEED + 2: fault}, folder=str(tmp_path))
    limits = {"timeout": 2.0, "retries": 0} if fault == "hang" else {"retries": 1}
    kwargs: dict[str, Any] = {"on_failure": "restart"} if restarts else {}
    with open_engine([vecenv.EnvChoice(env_fns)] * 4, num_workers=2, **kwargs) as envs:
        results = vecenv.evaluate(envs, choose_actions, make_episodes(), seed=SEED, **limits)
    rows = zip(summarize(results), results, expected_results(make_episodes()), strict=True)
    for found, result, expected in rows:
        failed = result.env == "walk-1" and result.seed == SEED + 2 and not fault.endswith("once")
        assert (result.error is not None) == failed
        assert failed or found == expected


def test_episodes_of_tasks_can_begin_with_snapshots() -> None:
    with open_engine([vecenv.EnvChoice(make_tasks())] * 3, num_workers=2, autoreset_mode=AutoresetMode.DISABLED) as envs:
        envs.reset(seed=SEED, options=[{"env": "walk-3"}, {"env": "walk-2"}, {"env": "walk-1"}])
        snapshots = envs.save(verify=False)
        mixed = [*make_episodes()[:6], *(Episode(snapshot=snapshot) for snapshot in snapshots)]
        found = [summarize(vecenv.evaluate(envs, lambda obs: np.ones(len(obs), int), mixed, seed=SEED)) for _ in range(2)]
    with open_engine([vecenv.EnvChoice(make_tasks())], num_workers=0) as envs:
        found.append(summarize(vecenv.evaluate(envs, lambda obs: np.ones(len(obs), int), mixed, seed=SEED)))
    assert found[0] == found[1] == found[2]
    assert {result[1] for result in found[0][6:]} == {None}


@pytest.mark.parametrize(
    ("episodes", "error", "text"),
    [
        ([Episode(env="walk-9")], ValueError, r"episodes\[0\]: there is no environment 'walk-9'; did you mean 'walk-"),
        ([Episode(env="walk-1"), Episode()], ValueError, r"episodes\[1\] names no environment: .* one of 4: 'walk-0'"),
        (3, ValueError, r"episodes\[0\] names no environment"),
        ([Episode(env=3)], TypeError, r"episodes\[0\].env must be a name, got 3"),  # type: ignore[arg-type]
        ([Episode(env="a", options={"env": "b"})], TypeError, r"must be a name, got 'a' and options with 'env'"),
    ],
)
def test_wrong_task_names_raise_before_anything_runs(episodes: Any, error: type[Exception], text: str) -> None:
    with open_engine([vecenv.EnvChoice(make_tasks())] * 2, num_workers=0) as envs:
        with pytest.raises(error, match=text):
            vecenv.evaluate(envs, choose_actions, episodes)
        assert envs.stats()["resets"] == envs.stats()["in_flight"] == 0


@pytest.mark.parametrize("make", [vecenv.AsyncVectorEnv, SyncVectorEnv, gymnasium.vector.AsyncVectorEnv])
def test_evaluate_with_env_names_but_without_env_choice_raises(make: Any) -> None:
    envs = make([Walk] * 2)
    try:
        with pytest.raises(ValueError, match=r"episodes\[0\] names the environment 'x', but \w+ has none to choose from: "):
            vecenv.evaluate(envs, choose_actions, [Episode(env="x")])
        assert len(vecenv.evaluate(envs, choose_actions, 3, seed=1)) == 3
    finally:
        envs.close()


# --- tables ---------------------------------------------------------------------------------------------------------------


def make_result(index: int, env: str, episode_return: float, error: Exception | None = None) -> Any:
    return vecenv.EpisodeResult(index, 0, None, episode_return, 10, True, False, {}, error, 0.1, env=env)


def test_table_has_a_row_for_each_task_and_a_total() -> None:
    from rich.console import Console

    from vecenv.evaluating.episodes import EpisodeResults

    results = EpisodeResults([make_result(index, "push", float(value)) for index, value in enumerate((1, 2, 3, 4, 5, 6))])
    results += [make_result(6, "pull", 2.0), make_result(7, "pull", float("nan"), ValueError())]
    assert {name: len(group) for name, group in results.group().items()} == {"push": 6, "pull": 2}
    console = Console(width=100)
    with console.capture() as output:
        console.print(results.table(by="env"))
    rows = [line.replace("│", " ").split() for line in output.get().splitlines()]
    assert ["push", "6", "3.5", "1.539", "to", "5.461", "10", "0"] in rows  # with Student's t = 2.5706
    assert ["pull", "2", "2", "-", "10", "1"] in rows
    assert any(row[:3] == ["all", "8", "3.286"] and row[-1] == "1" for row in rows)
    assert list(results.group("terminated")) == [True]
    with pytest.raises(ValueError, match=r"by must be one of index, seed, .*; got 'task'"):
        results.table(by="task")


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_table_shows_names_in_brackets_and_infinite_returns() -> None:
    from rich.console import Console

    from vecenv.evaluating.episodes import EpisodeResults

    returns = {"push[left]": float("inf"), "[/b]": float("nan")}
    results = EpisodeResults([make_result(0, name, value) for name, last in returns.items() for value in (1.0, last)])
    console = Console(width=100)
    with console.capture() as output:
        console.print(results.table())
    rows = [line.replace("│", " ").split() for line in output.get().splitlines()]
    assert ["push[left]", "2", "inf", "nan", "to", "nan", "10", "0"] in rows
    assert ["[/b]", "2", "nan", "nan", "to", "nan", "10", "0"] in rows


# --- folders: finished episodes do not run again --------------------------------------------------------------------------


def test_evaluate_with_a_complete_folder_reads_the_same_results(tmp_path: Path) -> None:
    log_folder = tmp_path / "log"
    log_folder.mkdir()
    folder = tmp_path / "new" / "results"
    with open_engine([vecenv.EnvChoice(make_tasks(folder=str(log_folder)))] * 3, num_workers=2) as envs:
        reported: list[int] = []
        first = vecenv.evaluate(
            envs,
            choose_actions,
            make_episodes(),
            seed=SEED,
            folder=folder,
            name="first",
            on_episode=lambda result: reported.append(result.index),
        )
        steps = (log_folder / "steps").stat().st_size
        second = vecenv.evaluate(
            envs, choose_actions, make_episodes(), folder=folder, name="first", on_episode=lambda _: reported.append(-1)
        )
        assert (log_folder / "steps").stat().st_size == steps
    assert summarize(first) == summarize(second) == expected_results(make_episodes())
    assert [result.env for result in second] == [result.env for result in first]
    assert sorted(reported) == list(range(20))
    lines = (folder / "episodes.jsonl").read_text().splitlines()
    header, *results = map(json.loads, lines)
    assert header["name"] == "first"
    assert header["seed"] == SEED
    assert sorted(result["index"] for result in results) == list(range(20))


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_evaluate_with_a_folder_repeats_failed_episodes(tmp_path: Path) -> None:
    env_fns = make_tasks()
    env_fns["walk-1"] = functools.partial(TaskWalk, 7, faults={SEED + 2: "raise once"}, folder=str(tmp_path))
    with open_engine([vecenv.EnvChoice(env_fns)] * 3, num_workers=0) as envs:
        first = vecenv.evaluate(envs, choose_actions, make_episodes(), seed=SEED, folder=tmp_path / "a", retries=0)
        assert [result.index for result in first if result.error is not None] == [7]
        reported: list[int] = []
        second = vecenv.evaluate(
            envs,
            choose_actions,
            make_episodes(),
            seed=SEED,
            folder=tmp_path / "a",
            on_episode=lambda result: reported.append(result.index),
        )
    assert reported == [7]
    assert summarize(second) == expected_results(make_episodes())


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"seed": 4}, "holds results with seed 3, but this evaluation has 4: use another folder"),
        ({"name": "b"}, "holds results of policy 'a', but this evaluation has 'b'"),
        ({"name": None}, "holds results of policy 'a', but this evaluation has None"),
        ({"episodes": make_episodes(1, 2)}, "holds results of an episode list of length 3, but this evaluation has 2"),
        ({"episodes": [*make_episodes(1, 2), Episode(env="walk-2", seed=SEED + 2)]}, "results of an episode list with hash"),
        (
            {"episodes": [*make_episodes(1, 2), Episode(env="walk-0", seed=SEED + 2, options={"start": 1.0})]},
            "results of an episode list with hash",
        ),
    ],
)
def test_evaluate_with_the_folder_of_another_evaluation_raises(change: dict[str, Any], text: str, tmp_path: Path) -> None:
    arguments = {"episodes": make_episodes(1, 3), "seed": 3, "name": "a", "folder": tmp_path}
    with open_engine([vecenv.EnvChoice(make_tasks())] * 2, num_workers=0) as envs:
        vecenv.evaluate(envs, choose_actions, **arguments)
        before, resets = (tmp_path / "episodes.jsonl").read_bytes(), envs.stats()["resets"]
        with pytest.raises(ValueError, match=text):
            vecenv.evaluate(envs, choose_actions, **{**arguments, **change})
        assert (tmp_path / "episodes.jsonl").read_bytes() == before
        assert envs.stats()["resets"] == resets


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"folder": 3}, TypeError, "folder must be a path or None, got 3"),
        ({"folder": __file__}, ValueError, "is not a folder"),
        ({"name": "a"}, ValueError, "name= is stored in a folder"),
        ({"name": 3, "folder": "x"}, TypeError, "name must be a string or None, got 3"),
        ({"folder": "x", "frames": [0]}, ValueError, "frames= cannot be combined with folder="),
        ({"folder": "x", "episodes": [Episode(options={"a": object()})]}, TypeError, r"exactly, .*: expected numbers"),
    ],
)
def test_evaluate_with_wrong_folder_arguments_raises(
    arguments: dict[str, Any], error: type[Exception], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with open_engine([Walk] * 2, num_workers=0) as envs, pytest.raises(error, match=text):
        vecenv.evaluate(envs, choose_actions, arguments.pop("episodes", 2), **arguments)
    assert list(tmp_path.iterdir()) == []


def test_incomplete_last_line_is_repaired_and_a_damaged_line_raises(tmp_path: Path) -> None:
    file = tmp_path / "episodes.jsonl"
    with open_engine([Walk] * 2, num_workers=0) as envs:
        expected = summarize(vecenv.evaluate(envs, choose_actions, 6, seed=SEED, folder=tmp_path))
        intact = file.read_bytes()
        lines = intact.splitlines(keepends=True)
        for length in (0, 10, len(lines[0]), len(lines[0]) + 5, len(intact) - 1):
            file.write_bytes(intact[:length])
            assert summarize(vecenv.evaluate(envs, choose_actions, 6, seed=SEED, folder=tmp_path)) == expected
            assert file.read_bytes().count(b"\n") == 7
        for damaged in (b"{half\n", b"{}\n", b"7\n", b'{"index": 99, "error": null}\n'):
            file.write_bytes(lines[0] + damaged + lines[1])
            with pytest.raises(ValueError, match=r"line 2 of .*episodes\.jsonl is damaged"):
                vecenv.evaluate(envs, choose_actions, 6, seed=SEED, folder=tmp_path)


class MixedInfoWalk(Walk):
    """A walk with values of every type in its infos."""

    def step(self, action: Any) -> Any:
        *others, info = super().step(action)
        info |= {
            "array": np.arange(3, dtype=np.float32), "scalar": np.float32(0.1), "nan": float("nan"), "none": None,
            "tuple": (1, "two", [3.0]), "nested": {"a": np.array([True]), 5: np.int8(2)}, "flag": True, "object": {7},
            "empty": [np.str_(""), np.bytes_(b""), np.zeros((0, 2), np.float32), np.array(["", ""])],
        }  # fmt: skip
        return *others, info


def test_infos_from_a_folder_equal_the_original_infos(tmp_path: Path) -> None:
    from vecenv.testing import assert_identical

    with open_engine([MixedInfoWalk] * 2, num_workers=0) as envs:
        originals = vecenv.evaluate(envs, choose_actions, 3, seed=SEED)
        for _ in range(2):  # the second time, the infos are read from the folder
            results = vecenv.evaluate(envs, choose_actions, 3, seed=SEED, folder=tmp_path)
            for stored, original in zip(results, originals, strict=True):
                assert stored.info.pop("object") == "{7}"
                assert_identical(stored.info, {key: value for key, value in original.info.items() if key != "object"})


class OrderedInfoWalk(Walk):
    """A walk with infos that are instances of subclasses of dict."""

    def step(self, action: Any) -> Any:
        *others, info = super().step(action)
        return *others, OrderedDict(info, counts=defaultdict(int, steps=self.t))


def test_infos_of_subclasses_of_dict_from_a_folder_are_dicts(tmp_path: Path) -> None:
    with open_engine([OrderedInfoWalk] * 2, num_workers=1) as envs:
        originals = vecenv.evaluate(envs, choose_actions, 3, seed=SEED)
        for _ in range(2):  # the second time, the infos are read from the folder
            results = vecenv.evaluate(envs, choose_actions, 3, seed=SEED, folder=tmp_path)
            assert summarize(results) == summarize(originals)


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise ValueError("it has no text")


class UnprintableWalk(Walk):
    """A walk that raises an exception without a text."""

    def _cause_fault(self) -> None:
        if self.seed == SEED + 1:
            raise UnprintableError


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_error_without_text_in_a_folder_fails_only_its_episode(tmp_path: Path) -> None:
    with open_engine([UnprintableWalk] * 2, num_workers=0) as envs:
        results = vecenv.evaluate(envs, choose_actions, 3, seed=SEED, folder=tmp_path)
    assert [type(result.error) for result in results] == [type(None), UnprintableError, type(None)]


def test_evaluate_with_a_folder_locked_by_another_process_raises(tmp_path: Path) -> None:
    program = textwrap.dedent(f"""
        import sys, fcntl, os
        file = os.open({str(tmp_path / "episodes.jsonl")!r}, os.O_RDWR | os.O_CREAT)
        fcntl.flock(file, fcntl.LOCK_EX)
        print("locked", flush=True)
        sys.stdin.read()
    """)
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"locked\n"
        match = "another evaluation is writing its results there"
        with open_engine([Walk], num_workers=0) as envs, pytest.raises(ValueError, match=match):
            vecenv.evaluate(envs, choose_actions, 2, folder=tmp_path)
        other.communicate()


def test_evaluate_with_a_folder_in_use_by_the_same_process_raises(tmp_path: Path) -> None:
    children = []

    def choose_and_evaluate(observations: Any, rngs: Any) -> Any:
        (tmp_path / "episodes.jsonl").read_bytes()
        with pytest.raises(ValueError, match="another evaluation is writing its results there"):
            vecenv.evaluate(other, choose_actions, 2, seed=SEED, folder=tmp_path)
        if not children:
            children.append(start_sleeping_fork())
        return choose_actions(observations, rngs)

    with open_engine([Walk], num_workers=0) as envs, open_engine([Walk], num_workers=0) as other:
        results = vecenv.evaluate(envs, choose_and_evaluate, 2, seed=SEED, folder=tmp_path)
        again = vecenv.evaluate(other, choose_actions, 2, seed=SEED, folder=tmp_path)  # a forked child does not matter
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert [result.length for result in results] == [result.length for result in again]


def start_sleeping_fork() -> int:
    if (child := os.fork()) == 0:
        time.sleep(60)
        os._exit(0)
    return child


EVALUATION_PROGRAM = """
import sys
sys.path[:0] = {path!r}
import vecenv
from test_tasks import SEED, choose_actions, make_episodes, make_tasks

if __name__ == "__main__":
    envs = vecenv.make_vec(vecenv.EnvChoice(make_tasks(pause=0.002)), {num_envs}, vector_kwargs={{"num_workers": 2}})
    vecenv.evaluate(envs, choose_actions, make_episodes(4, 10), seed=SEED, folder={folder!r})
    envs.close()
"""


@pytest.mark.parametrize("kills", [1, pytest.param(2, marks=pytest.mark.long), pytest.param(10, marks=pytest.mark.long)])
def test_program_killed_at_any_moment_continues_with_its_folder(kills: int, tmp_path: Path) -> None:
    folder, rng = tmp_path / "results", random.Random(5)
    file = folder / "episodes.jsonl"
    script = tmp_path / "program.py"
    path = [str(HERE), str(HERE.parent)]
    counts = []
    for run_number in range(kills + 1):
        script.write_text(EVALUATION_PROGRAM.format(path=path, folder=str(folder), num_envs=rng.choice([1, 2, 4, 16])))
        with subprocess.Popen([sys.executable, str(script)]) as process:
            if run_number < kills:  # kill the process at a random moment after its first new result
                deadline = time.monotonic() + 60
                lines = counts[-1] if counts else 0
                while time.monotonic() < deadline and process.poll() is None and count_lines(file) <= lines:
                    time.sleep(0.002)
                time.sleep(rng.uniform(0, 0.05))
                process.send_signal(signal.SIGKILL)
        has_finished = process.returncode == 0 and count_lines(file) == 41  # it may be faster than its kill
        assert has_finished or process.returncode == (0 if run_number == kills else -9)
        counts.append(count_lines(file))
    indices = [json.loads(line)["index"] for line in file.read_bytes().splitlines()[1:]]
    assert sorted(indices) == list(range(40)), "an episode is missing or was stored twice"
    with open_engine([vecenv.EnvChoice(make_tasks())] * 2, num_workers=0) as envs:
        results = vecenv.evaluate(envs, choose_actions, make_episodes(4, 10), seed=SEED, folder=folder)
        assert envs.stats()["steps"] == 0
    assert summarize(results) == expected_results(make_episodes(4, 10))


def count_lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0

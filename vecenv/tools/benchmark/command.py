"""``vecenv bench``: one comparison or a series of them, as tables, JSON and pictures."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

from vecenv.system.cores import usable_cores
from vecenv.system.spawning import why_no_processes
from vecenv.tools import benchmark, doctor
from vecenv.tools.benchmark import tables
from vecenv.tools.benchmark.compare import Report
from vecenv.tools.benchmark.hosts import Candidate, Progress
from vecenv.tools.benchmark.runners import EnvFn
from vecenv.tools.usage import DIED, WRONG, CliError, did_you_mean, hint_of_arguments, resolve

__all__ = ["main"]


def main(arguments: argparse.Namespace) -> int:
    """Run the command; returns its exit code."""
    if arguments.suite is not None:
        return _suite(arguments.suite)
    if (why := why_no_processes()) is not None:
        raise CliError(f"vecenv bench compares engines in processes of their own: {why}")
    env_fn = resolve(arguments.env_id)
    measure = partial(_scale if arguments.scale else _main_job, arguments, env_fn)
    try:
        return measure(arguments.workers or usable_cores())
    except benchmark.TrajectoryMismatch as error:
        raise CliError(f"WRONG RESULTS, nothing was timed: {error}", WRONG) from None
    except benchmark.HostFailed as error:
        raise CliError(f"{arguments.env_id}: {error}{hint_of_arguments(str(error))}") from None
    except OSError as error:
        raise CliError(f"cannot write the results to {arguments.out}: {error}") from None


def _suite(rest: list[str]) -> int:
    root = Path(__file__).resolve().parents[3]
    if not (root / "bench" / "__main__.py").exists():
        raise CliError("the suite is part of a source checkout, and this is an installed package")
    return subprocess.run([sys.executable, "-m", "bench", *rest], cwd=root, check=False).returncode


def _choose(candidates: list[Candidate], names: str | None) -> list[Candidate]:
    if names is None:
        return candidates
    known = {candidate.name: candidate for candidate in candidates}
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in known:
            raise CliError(f"no engine {name!r}{did_you_mean(name, list(known)) or '.'} There are: {', '.join(known)}")
    if not wanted:
        raise CliError(f"--engines names no engine. There are: {', '.join(known)}")
    return [candidate for candidate in candidates if candidate.name in wanted]


def _refuse_what_cannot_be(candidates: list[Candidate]) -> None:
    """Say so before anything is started where the machine cannot hold what would run at once."""
    crowds = [candidate.processes + 1 for candidate in candidates if candidate.crowd]
    others = sum(candidate.processes + len(candidate.builds) for candidate in candidates if not candidate.crowd)
    in_one = max((candidate.processes for candidate in candidates), default=0)
    reason = doctor.shortage(others + max(crowds, default=0), in_one)
    if reason is None:
        return
    greedy = [candidate.name for candidate in candidates if candidate.crowd]
    rest = [candidate.name for candidate in candidates if not candidate.crowd]
    advice = f", or leave out {', '.join(greedy)} (--engines {','.join(rest)})" if greedy and rest else ""
    raise CliError(f"{reason}; take fewer environments or workers{advice}")


def _file_stem(arguments: argparse.Namespace) -> Path:
    name = re.sub(r"[^\w.-]+", "_", arguments.env_id)
    stem: Path = arguments.out / f"{name}-{arguments.num_envs}"
    return stem


def _main_job(arguments: argparse.Namespace, env_fn: EnvFn, workers: int) -> int:
    candidates = _choose(benchmark.default_candidates(env_fn, arguments.num_envs, workers), arguments.engines)
    _refuse_what_cannot_be(candidates)
    arguments.out.mkdir(parents=True, exist_ok=True)
    try:
        with tables.progress_bar() as progress:
            report = benchmark.compare(
                arguments.env_id,
                env_fn,
                arguments.num_envs,
                candidates,
                seconds=arguments.seconds or 1.0,
                repeats=arguments.repeats or 7,
                progress=progress,
            )
    except benchmark.Interrupted as stop:
        if not arguments.json:
            tables.print_report(stop.report)
        raise
    stem = _file_stem(arguments)
    files = [stem.with_name(f"{stem.name}.json"), stem.with_name(f"{stem.name}.png")]
    report.write(files[0])
    if not benchmark.draw_bars(report, files[1]):
        files.pop()
    if arguments.json:
        print(json.dumps(report.to_dict(), indent=1))
    else:
        tables.print_report(report)
        print(f"Written: {', '.join(map(str, files))}")
    return DIED if any(row.failed for row in report.rows) else 0


def _scale(arguments: argparse.Namespace, env_fn: EnvFn, workers: int) -> int:
    reports: list[Report] = []
    largest = benchmark.scale_candidates(env_fn, arguments.num_envs, _doubling(workers))
    chosen = _choose(largest, arguments.engines)
    _refuse_what_cannot_be(chosen)
    names = {candidate.name for candidate in chosen}  # some need more than one environment
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tables.progress_bar() as progress:
        sizes = _doubling(arguments.num_envs)
        for turn, size in enumerate(sizes):
            rows = benchmark.scale_candidates(env_fn, size, _doubling(workers))
            reports.append(
                benchmark.compare(
                    arguments.env_id,
                    env_fn,
                    size,
                    [candidate for candidate in rows if candidate.name in names],
                    seconds=arguments.seconds or 0.4,
                    repeats=arguments.repeats or 3,
                    progress=partial(_with_size, progress, size, turn, len(sizes)),
                )
            )
    stem = _file_stem(arguments)
    files = [stem.with_name(f"{stem.name}-scale.json"), stem.with_name(f"{stem.name}-scale.png")]
    everything = json.dumps([report.to_dict() for report in reports], indent=1)
    files[0].write_text(everything + "\n")
    if not benchmark.draw_scale(reports, files[1]):
        files.pop()
    if arguments.json:
        print(everything)
    else:
        tables.print_scale(reports)
        print(f"Written: {', '.join(map(str, files))}")
    return DIED if any(row.failed for report in reports for row in report.rows) else 0


def _doubling(top: int) -> list[int]:
    """1, 2, 4 and so on, up to and with ``top``."""
    return [1 << k for k in range(top.bit_length()) if 1 << k < top] + [top]


def _with_size(progress: Progress, size: int, turn: int, turns: int, stage: str, done: int, total: int) -> None:
    """One bar for all sizes: it fills once."""
    progress(f"{size} environments ({turn + 1} of {turns}): {stage}", turn * total + done, turns * total)

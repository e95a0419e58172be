"""``vecenv replay``: repeats a recorded failure in a separate process, so that a crash does not end the command.

With ``--pdb`` it is repeated in this process, under the debugger.
"""

from __future__ import annotations

import argparse
import bdb
import contextlib
import faulthandler
import functools
import inspect
import json
import math
import multiprocessing
import os
import pdb
import pickle
import re
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any, Final, NamedTuple

import gymnasium

from vecenv.errors import format_seconds
from vecenv.link import own_generators
from vecenv.recording.file import (
    KILLED,
    SUFFIX,
    Failed,
    Header,
    UnreadableRecord,
    newest_files,
    read,
    read_header,
)  # fmt: skip
from vecenv.recording.replay import AGAIN, CANNOT, DIFFERENT, STOPPED, Replay, ReplayResult
from vecenv.system.descriptors import DescriptorOwner
from vecenv.system.helper_process import HelperProcess
from vecenv.system.supervision import (
    STACK_SIGNALS,
    StackFile,
    catches_signal,
    describe_exit,
    env_frames,
    has_all_env_frames,
    innermost_location,
)  # fmt: skip
from vecenv.tools import USAGE, WRONG, CliError, one_line
from vecenv.tools.video import Frame, as_rgb, require_writer, write_video
from vecenv.wrappers.equal_envs import EqualEnvBuilder

_MAX_FRAMES: Final = 1000
_MAX_LISTED_FILES: Final = 5
_STACK_TIMEOUT_SECONDS: Final = 1.0
_NOTICE_DELAY_SECONDS: Final = 1.0
_UNEXPECTED_NOTICE_DELAY_SECONDS: Final = 5.0
"""The delay if the recorded failure cannot be a hang: longer, because otherwise every slow step would cause a notice."""
_GRACE_SECONDS: Final = 5.0
"""Seconds added to the recorded time limit, because the process has just started. Also how long it may take to end."""
_FILE_NAME: Final = re.compile(rf".+-env\d+-episode\d+-step\d+(-\d+)?{re.escape(SUFFIX)}")
_EXIT_CODES: Final = {AGAIN: 0, STOPPED: 0, DIFFERENT: WRONG, CANNOT: USAGE}


def main(arguments: argparse.Namespace) -> int:
    """repeat a failure from the file that record_failures= wrote

    Builds the environment, resets it with its seed and options, repeats its actions, and reports whether it fails in the
    same way, and where. FILE contains a pickle, which can run arbitrary code: replay only your own files.

    Exit codes: 0 the failure happened again, a record without a failure matched, or the replay stopped before step N; 1 it
    did not happen again, or results differed; 2 the file cannot be replayed, or wrong usage; 130 interrupted.
    Try: vecenv replay failures/CartPole-v1-env3-episode17-step412.vecenv
    """
    path: Path = arguments.file
    header, body = _check_arguments(arguments)
    if not arguments.json:
        print(f"{header.env_id}, env {header.env}, episode {header.episode}, step {header.step}, {header.written}")
        print(f"Recorded: {header.failed}")
        if differences := header.differences():
            print(f"Recorded with {', '.join(differences)}")
        if b"__main__" in body:
            print("What the main script or notebook defined is replayed as it was recorded: edits to it have no effect")
    if not arguments.yes:
        _require_trust(path)
    starting_points = ("snapshot",) if arguments.from_snapshot else ("latest", "first")
    images: Sequence[_Image] | None = None
    if arguments.pdb:
        result = _debug(path, begin=starting_points[0], until=arguments.until, frames=arguments.frames)
    else:
        result, images = _replay_from(path, starting_points, until=arguments.until, render=arguments.frames is not None)
    running_env, running_file = (None, None) if _EXIT_CODES[result.status] == 0 else _find_running_env(path, header)
    if arguments.json:
        print(json.dumps({
            "result": result.status, "text": result.text, "env_id": header.env_id, "env": header.env,
            "episode": header.episode, "step": result.step, "location": result.location, "traceback": result.stack,
            "recorded": header.failed, "recorded_step": header.step, "instead": running_file and str(running_file),
        }))  # fmt: skip
    elif not arguments.pdb:  # with --pdb, results are printed before the debugger starts
        _print_result(result)
    if running_env is not None and not arguments.json:
        advice = f"replay {running_file}" if running_file else "its file is gone"
        shared = f"Env {header.env} only shared a worker with env {running_env}"
        print(f"{shared}, which was running when the worker failed: {advice}")
    if arguments.frames is not None and images is not None and result.status != CANNOT:
        print(_write_frames(images, arguments.frames), file=sys.stderr if arguments.json else sys.stdout)
    return _EXIT_CODES[result.status]


def _check_arguments(arguments: argparse.Namespace) -> tuple[Header, bytes]:
    """Check all arguments, and return the header and the pickle of the file."""
    path: Path = arguments.file
    if arguments.pdb and arguments.json:
        raise CliError("--pdb and --json cannot be combined")
    if arguments.frames is not None:
        _require_writable(arguments.frames)
    if path.is_dir():
        raise CliError(_describe_folder(path))
    try:
        header, body = read_header(path)
    except FileNotFoundError as error:
        pruned = _FILE_NAME.fullmatch(path.name) and path.parent.is_dir()
        raise CliError(f"{error}{' (the recorder keeps only the newest files; see keep=)' if pruned else ''}") from None
    except (OSError, UnreadableRecord) as error:
        raise CliError(str(error)) from None
    if arguments.until is not None and arguments.until > header.step:
        end = f"at step {header.step}" if header.step else "before step 1"
        raise CliError(f"--until {arguments.until}: the record ends {end}")
    return header, body


def _require_writable(path: Path) -> None:
    """Raise if no frames can be written to ``path``."""
    try:
        require_writer(path)
        existed = path.exists()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
        if not existed:
            path.unlink()
    except (OSError, ValueError, ImportError) as error:
        raise CliError(f"--frames: {error}") from None


def _print_result(result: ReplayResult) -> None:
    if result.stack:
        print(result.stack.rstrip())
    print(result.text[0].upper() + result.text[1:])


def _find_running_env(path: Path, header: Header) -> tuple[int | None, Path | None]:
    """If another environment was running when the worker failed, return it, and its file if that still exists."""
    running_env = header.other_running_env
    if running_env is None:
        return None, None
    files = newest_files(path.parent)
    key = header.failure, running_env
    return running_env, next((file for file, other in files if (other.failure, other.env) == key), None)


def _describe_folder(folder: Path) -> str:
    """Return the error text for a folder given instead of a file. It lists the newest files."""
    files = newest_files(folder)
    if not files:
        return f"{folder} is a folder without recorded failures (*{SUFFIX})"
    own = [(path, header) for path, header in files if header.other_running_env is None]
    lines = "".join(f"\n  {path}: {header.failed}" for path, header in (own or files)[:_MAX_LISTED_FILES])
    return f"{folder} is a folder; choose one of its files. The newest:{lines}"


def _require_trust(path: Path) -> None:
    """Raise unless the user confirms at a terminal that the file is trusted."""
    if not sys.stdin.isatty():
        reason = "the file contains a pickle, which can run arbitrary code; pass --yes if it is yours"
        raise CliError(f"not replayed, because {reason}")
    question = f"{path} contains a pickle, which can run arbitrary code: continue only if it is yours. Replay it? [y/N] "
    print(question, end="", file=sys.stderr, flush=True)  # input() would print it to stdout, among the results
    try:
        answer = input()
    except EOFError:
        answer = ""
    if answer.strip().lower() not in ("y", "yes"):
        raise CliError("not replayed")


def _write_frames(images: Sequence[_Image], path: Path) -> str:
    """Write the frames, and return a message for the user."""
    if not images:
        return "No frames: the environment failed before the first step"
    try:
        count = write_video([image.frame for image in images], path, fps=images[-1].fps)
    except Exception as error:  # such as frames of different sizes
        raise CliError(f"--frames: {path} cannot be written: {one_line(error)}") from None
    return f"Wrote {path} ({count} frame{'s' if count > 1 else ''})"


# -- in a separate process ------------------------------------------------------------------------------------------------


class _NextCall(NamedTuple):
    """The next call of a replay: a request (:attr:`Replay.where`, :attr:`Replay.step`), or ``render()`` if ``renders``."""

    where: str
    step: int | None
    renders: bool = False


class _Image(NamedTuple):
    """A frame, and the number of frames per second."""

    frame: Frame
    fps: float


_Message = Failed | _NextCall | _Image | None
"""A message from the separate process before the result."""


class _Attempt(NamedTuple):
    """The result of a replay, and its latest frames."""

    result: ReplayResult
    images: Sequence[_Image]


def replay(path: Path, starting_points: Sequence[str] = ("latest", "first"), *, until: int | None = None) -> ReplayResult:
    """Replay a file in a separate process.

    Args:
        path: The file. It is unpickled, which can run arbitrary code.
        starting_points: Values of ``begin`` (:class:`~vecenv.recording.replay.Replay`). The next one is tried if the
            failure did not happen again: a replay from ``"latest"`` lacks state that an environment keeps across resets.
        until: Stop before this step of the episode; ``None``: replay the whole record.
    """
    return _replay_from(path, starting_points, until=until, render=False).result


def _replay_from(path: Path, starting_points: Sequence[str], **options: Any) -> _Attempt:
    attempts: list[_Attempt] = []
    for begin in starting_points:
        attempts.append(_replay(path, begin=begin, **options))
        if attempts[-1].result.status != DIFFERENT:
            break
    return attempts[-1] if attempts[-1].result.status in (AGAIN, STOPPED) else attempts[0]


def _replay(path: Path, **options: Any) -> _Attempt:
    context = multiprocessing.get_context("spawn")
    descriptors = DescriptorOwner(None)
    stack_file = StackFile(descriptors)
    helper = HelperProcess(context, _child, (path, stack_file, options), name="vecenv-replay", daemon=False)
    failed: Failed | None = None
    images: deque[_Image] = deque(maxlen=_MAX_FRAMES)
    call, hung, limit = _NextCall("while it was built", None), False, math.inf  # building has no limit
    notice_delay = math.inf
    try:
        helper.start()
        while not (hung := not _wait(helper, call, limit, notice_delay)) and (blob := helper.receive()):
            message: ReplayResult | _Message = pickle.loads(blob)
            if isinstance(message, ReplayResult):
                helper.has_ended(_GRACE_SECONDS)
                return _Attempt(message, images)
            if isinstance(message, _Image):
                images.append(message)
            elif isinstance(message, _NextCall):
                call = message
                limit = failed.seconds + _GRACE_SECONDS if failed is not None and failed.seconds else math.inf
                may_have_hung = limit < math.inf or (failed is not None and failed.exitcode == KILLED)
                notice_delay = _NOTICE_DELAY_SECONDS if may_have_hung else _UNEXPECTED_NOTICE_DELAY_SECONDS
            else:
                failed = message
        if hung:
            _request_stack(helper, stack_file)
        else:
            helper.has_ended(_GRACE_SECONDS)
        return _Attempt(_unfinished_result(failed, helper.reap(), call, hung, env_frames(stack_file.read())), images)
    finally:
        helper.end()
        descriptors.close()


def _wait(helper: HelperProcess, call: _NextCall, limit: float, notice_delay: float) -> bool:
    """Wait up to ``limit`` seconds for a message. Return False if none arrives.

    Print a notice after ``notice_delay`` seconds.
    """
    until = time.monotonic() + limit
    if notice_delay < math.inf:
        if helper.wait(time.monotonic() + notice_delay):
            return True
        name = "render()" if call.renders else call.where.partition(" ")[2]
        text = f"waiting for {name}, without a time limit (--pdb: Ctrl-C shows where it is)"
        if limit < math.inf:
            text = f"waiting up to {limit:g} s for {name}"
        print(text, file=sys.stderr, flush=True)
    return helper.wait(until)


def _request_stack(helper: HelperProcess, stack_file: StackFile) -> None:
    """Make a hanging process write its stack."""
    assert helper.pid is not None
    for number in STACK_SIGNALS:
        if not catches_signal(helper.pid, number):
            return
        stack_file.allow_dump()
        os.kill(helper.pid, number)
        until = time.monotonic() + _STACK_TIMEOUT_SECONDS
        while time.monotonic() < until:
            if has_all_env_frames(stack_file.read()):
                return
            time.sleep(0.01)


def _unfinished_result(failed: Failed | None, exitcode: int | None, call: _NextCall, hung: bool, stack: str) -> ReplayResult:
    """Return the result of a replay that did not finish."""
    limit = failed.seconds if failed is not None else None
    text = f"it hung for more than {format_seconds(limit)}" if hung and limit else describe_exit(exitcode)
    if call.renders:
        verb = "hung" if hung else "died"
        return ReplayResult(CANNOT, f"cannot be rendered, because the process {verb} in render(): {text}")
    same = failed is not None and (failed.how == "hung" if hung else failed.how == "died" and failed.exitcode == exitcode)
    return ReplayResult.from_failure(
        failed, call.where, text, same=same, step=call.step, location=innermost_location(stack), stack=stack
    )


def _child(caller: Connection[Any, Any], path: Path, stack_file: StackFile, options: dict[str, Any]) -> None:
    """Run a replay in the separate process: send the recorded failure, each request, each image and the result."""
    stack_file.install_handlers(env_threads=False)
    os.dup2(2, 1)  # stdout holds only results, even if the environment prints
    try:
        _replay_here(path, report=caller.send, **options)
    except UnreadableRecord as error:
        caller.send(ReplayResult(CANNOT, str(error)))
    except Exception as error:  # of the replay itself: exceptions of the environment are results
        reason = f"cannot be replayed, because the replay itself failed: {one_line(error)}"
        caller.send(ReplayResult(CANNOT, reason, stack=traceback.format_exc()))


def _replay_here(
    path: Path,
    *,
    begin: str,
    until: int | None,
    render: bool,
    report: Callable[[ReplayResult | _Message], object],
    debug: Callable[[Replay, Iterator[int], ReplayResult], ReplayResult] | None = None,
) -> ReplayResult:
    """Replay a file in this process; a crash of the environment ends this process.

    Args:
        path, until: The arguments of :func:`replay`.
        begin: One of its starting points.
        render: Render an image before each step, and one after the last.
        report: A function that receives the recorded failure, each request, each image and the result.
        debug: A function that starts the debugger and returns the final result. It is called when the replay has stopped or
            ended, with the replay, its remaining requests and the result so far. Without ``until``, the replay stops before
            a request in which the process died or hung, because that would leave no stack to inspect.

    Raises:
        UnreadableRecord: The record cannot be replayed. The text gives the reason.
    """
    header, body = read_header(path)
    record = read(header, body)
    report(record.failed)
    replay_run = Replay(header, record, begin=begin, wrap_env_fn=_make_renderable if render else None)
    ends_process = record.failed is not None and record.failed.how != "raised"
    requests = replay_run.run()
    result: ReplayResult | None = None
    for step in requests:
        if render and step:
            report(_NextCall("", None, renders=True))
            report(_render(replay_run.env, header.env))
        if until is not None:
            stops = step >= until
        else:
            stops = debug is not None and ends_process and replay_run.is_last
        if stops:
            result = replay_run.stopped
            break
        report(_NextCall(replay_run.where, replay_run.step))
    if result is None:
        result = replay_run.result
        if render and replay_run.env is not None:
            report(_NextCall("", None, renders=True))
            report(_render(replay_run.env, header.env))
    assert result is not None
    if debug is not None:
        result = debug(replay_run, requests, result)
    report(result)  # before close(), which may hang, or end the process
    replay_run.close()
    return result


# -- the debugger ---------------------------------------------------------------------------------------------------------


class _EnvDebugger(pdb.Pdb):
    """A debugger that stops neither in the code that calls the environment nor in the standard library."""

    def __init__(self) -> None:
        super().__init__(skip=["*"])  # without a pattern, Pdb does not call is_skipped_module()

    def is_skipped_module(self, module_name: str | None) -> bool:
        package, _, rest = (module_name or "").partition(".")
        return package in sys.stdlib_module_names or (package == "vecenv" and rest.partition(".")[0] in _CALLING_PACKAGES)

    def sigint_handler(self, signum: signal.Signals, frame: FrameType) -> None:
        """Show the prompt immediately. Pdb's own handler waits for the next line, which a hanging call never reaches."""
        self.message("\nInterrupted")
        self.set_trace(frame)
        sys.settrace(None)  # do not trace commands typed at the prompt
        self.interaction(frame, None)
        if self.quitting:
            raise bdb.BdbQuit
        sys.settrace(self.trace_dispatch)


_CALLING_PACKAGES: Final = frozenset({"tools", "recording", "worker", "link", "shm", "state", "system"})
"""The packages of vecenv that call the environment, directly or indirectly, during a replay."""


def _debug(path: Path, *, begin: str, until: int | None, frames: Path | None) -> ReplayResult:
    """Replay a file in this process and print the result. Start the debugger where it raised, or where the replay stops."""
    images: deque[_Image] = deque(maxlen=_MAX_FRAMES)

    def collect(message: ReplayResult | _Message) -> None:
        if isinstance(message, _Image):
            images.append(message)

    def debug(replay_run: Replay, requests: Iterator[int], result: ReplayResult) -> ReplayResult:
        _print_result(result)
        if frames is not None:
            print(_write_frames(images, frames))
        has_stopped = replay_run.result is None
        if has_stopped:
            if replay_run.record.failed is not None and replay_run.record.failed.how != "raised":
                print("Continuing repeats the failure in this process, and may end it")
            _EnvDebugger().runcall(deque, requests, 0)  # exhausts the iterator
            if replay_run.result is None or isinstance(replay_run.failure, bdb.BdbQuit):
                return result
            result = replay_run.result
            _print_result(result)
        if replay_run.failure is not None:
            if not result.location and result.step:
                print(f"No frame of the environment is left: --pdb --until {result.step} stops before that step")
            if replay_run.failure.__traceback__ is not None:
                pdb.post_mortem(replay_run.failure.__traceback__)
        return result

    faulthandler.enable()
    try:
        return _replay_here(path, begin=begin, until=until, render=frames is not None, report=collect, debug=debug)
    except UnreadableRecord as error:
        result = ReplayResult(CANNOT, str(error))
        _print_result(result)
        return result


# -- frames ---------------------------------------------------------------------------------------------------------------


def _make_renderable(env_fn: Callable[..., Any]) -> Callable[[], Any]:
    """Return a function that builds the environment with ``render_mode="rgb_array"``."""
    if isinstance(env_fn, EqualEnvBuilder):
        env_fn.env_fn = _make_renderable(env_fn.env_fn)
        return env_fn
    if isinstance(env_fn, functools.partial) and env_fn.func is own_generators._build:
        return own_generators.with_own_generators([_make_renderable(*env_fn.args)])[0]

    def build() -> Any:
        env = None
        if _accepts_render_mode(env_fn):
            with contextlib.suppress(TypeError):  # its `**kwargs` may go to something without this parameter
                env = env_fn(render_mode="rgb_array")
        env = env_fn() if env is None else env
        if env.render_mode == "rgb_array":
            return env
        if env.spec is None:
            advice = "build it with render_mode='rgb_array'"
            raise UnreadableRecord(f"cannot be rendered, because the environment is not registered: {advice}")
        env.close()
        try:
            return gymnasium.make(env.spec, render_mode="rgb_array")
        except Exception as error:
            problem = f"gymnasium.make(..., render_mode='rgb_array') raised {one_line(error)}"
            raise UnreadableRecord(f"cannot be rendered, because {problem}") from error

    return build


def _accepts_render_mode(env_fn: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(env_fn).parameters.values()
    except (TypeError, ValueError):  # a callable of an extension module may have no signature
        return False
    by_name = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    return any(
        (each.name == "render_mode" and each.kind in by_name) or each.kind is inspect.Parameter.VAR_KEYWORD
        for each in parameters
    )


def _render(env: Any, row: int) -> _Image:
    try:
        rendered = env.render()
    except Exception as error:
        raise UnreadableRecord(f"cannot be rendered, because render() raised {one_line(error)}") from error
    try:
        return _Image(as_rgb(rendered, row).copy(), float(getattr(env, "metadata", {}).get("render_fps") or 30))
    except ValueError as error:
        raise UnreadableRecord(f"cannot be rendered: {error}") from error

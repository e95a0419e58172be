"""``vecenv run PROGRAM`` behaves like ``python PROGRAM``: state of the interpreter, output, and exit code."""

from __future__ import annotations

import subprocess
import textwrap
import zipfile
from pathlib import Path

import pytest
from programs import run_python

from vecenv.tools import cli

PROGRAM = '''
    """A docstring."""
    import atexit, dataclasses, faulthandler, os, pickle, signal, sys, threading, warnings
    import multiprocessing
    import gymnasium

    NAMES = sorted(globals())
    x: int = 1

    @dataclasses.dataclass
    class Config:
        lr: float = 0.5

    def name_of_main(config):
        return type(config) is Config and __name__

    def bye():
        here = sys.modules["__main__"].__dict__ is globals()
        print("bye", here, pickle.loads(pickle.dumps(Config())), sys.excepthook is sys.__excepthook__)

    if __name__ == "__main__":
        atexit.register(bye)
        print(NAMES, __name__, __file__, __doc__, __package__, __cached__, __annotations__, type(__builtins__))
        print(__spec__ and (__spec__.name, __spec__.origin, __spec__.parent))
        print(type(__loader__), getattr(__loader__, "name", ""), getattr(__loader__, "path", ""))
        print(sys.argv, sys.path, os.getcwd(), sys.flags, sys.excepthook is sys.__excepthook__, sorted(os.environ))
        print(dataclasses.fields(Config)[0].type, name_of_main.__code__.co_filename, name_of_main.__code__.co_flags)
        print(warnings.filters, threading.active_count(), faulthandler.is_enabled(), multiprocessing.get_start_method(True))
        print([signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)])
        warnings.warn("shown once", DeprecationWarning)
        if "children" in sys.argv:
            for method in ("fork", "spawn", "forkserver"):
                with multiprocessing.get_context(method).Pool(1) as pool:
                    print(pool.map(name_of_main, [Config()]), type(pool.apply_async(Config).get(20)) is Config)
        sys.stdout.flush()
        if "interrupt" in sys.argv: raise KeyboardInterrupt
        if "raise" in sys.argv: raise ValueError(3)
        if "exit" in sys.argv: sys.exit("the end")
        if "term" in sys.argv: os.kill(os.getpid(), signal.SIGTERM)
        if "_exit" in sys.argv: os._exit(9)
        if "hook" in sys.argv:
            sys.excepthook = lambda kind, error, frames: print("hooked", kind, frames.tb_lineno, frames.tb_next)
            raise ValueError(3)
'''


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """Return a folder with the program as a file, a link, a module, a package, a folder and an archive."""
    source = textwrap.dedent(PROGRAM)
    for name in ("report.py", "package/__main__.py", "folder/__main__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(source)
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "folder" / "link.py").symlink_to(tmp_path / "report.py")
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        archive.writestr("__main__.py", source)
    (tmp_path / "bad.py").write_text("x = (\n")
    return tmp_path


def run_in_folder(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_python(*arguments, cwd=folder, PYTHONDONTWRITEBYTECODE="1")


@pytest.mark.parametrize(
    ("flags", "arguments"),
    [
        ("", "report.py raise"),
        pytest.param("", "report.py children", marks=pytest.mark.long),
        pytest.param("-O -W error::UserWarning", "report.py exit", marks=pytest.mark.long),
        pytest.param("-P", "./folder/../report.py interrupt", marks=pytest.mark.long),
        pytest.param("", "folder/link.py hook", marks=pytest.mark.long),
        pytest.param("", "report.py term", marks=pytest.mark.long),
        pytest.param("", "folder _exit", marks=pytest.mark.long),
        pytest.param("", "archive.zip exit", marks=pytest.mark.long),
        pytest.param("", "-m report children", marks=pytest.mark.long),
        ("", "-m report exit -- --seed -h"),
        pytest.param("", "-m package exit --seed 1", marks=pytest.mark.long),
        pytest.param("", "bad.py", marks=pytest.mark.long),
    ],
)
def test_program_has_the_same_output_and_exit_code_as_under_python(flags: str, arguments: str, programs: Path) -> None:
    plain = run_in_folder(programs, *flags.split(), *arguments.split())
    ours = run_in_folder(programs, *flags.split(), "-m", "vecenv", "run", "--quiet", *arguments.split())
    assert ours.stdout == plain.stdout
    assert (ours.returncode, ours.stderr) == (plain.returncode, plain.stderr)


@pytest.mark.long
def test_package_without_a_main_module_exits_with_2_and_one_line(tmp_path: Path) -> None:
    (tmp_path / "silent").mkdir()
    (tmp_path / "silent" / "__init__.py").touch()
    result = run_in_folder(tmp_path, "-m", "vecenv", "run", "-m", "silent")
    assert (result.returncode, result.stderr) == (2, "vecenv: no module 'silent.__main__'\n")


@pytest.mark.parametrize("module", ["sys", "math"])
def test_compiled_module_exits_with_2_and_one_line(module: str) -> None:
    result = run_python("-m", "vecenv", "run", "-m", module)
    assert (result.returncode, result.stderr) == (2, f"vecenv: module {module!r} is compiled, not a Python program\n")


def test_gymnasiums_class_is_replaced_before_a_package_is_imported(tmp_path: Path) -> None:
    (tmp_path / "derived").mkdir()
    source = "import gymnasium, sys\nclass Mine(gymnasium.vector.AsyncVectorEnv): pass\nARGUMENTS = list(sys.argv)\n"
    (tmp_path / "derived" / "__init__.py").write_text(source)
    source = "import derived, vecenv\nprint(issubclass(derived.Mine, vecenv.AsyncVectorEnv), derived.ARGUMENTS)\n"
    (tmp_path / "derived" / "__main__.py").write_text(source)
    result = run_in_folder(tmp_path, "-m", "vecenv", "run", "--quiet", "-m", "derived", "--seed", "1")
    assert (result.stdout, result.stderr) == ("True ['-m', '--seed', '1']\n", "")


@pytest.mark.parametrize("arguments", ["spawn bare.py", "forkserver -m bare"])
def test_program_that_workers_would_run_again_is_refused(arguments: str, programs: Path) -> None:
    (programs / "bare.py").write_text("print('runs')\n")
    result = run_in_folder(programs, "-m", "vecenv", "run", "--quiet", "--context", *arguments.split())
    assert (result.returncode, result.stdout) == (2, "")
    assert "the main guard is missing in " in result.stderr
    assert f": under '{arguments.split()[0]}' each worker imports the program again" in result.stderr


@pytest.mark.parametrize(
    "arguments", ["fork bare.py", "spawn report.py", "spawn guarded.py", "spawn folder", "forkserver -m package"]
)
def test_program_that_workers_would_not_run_again_is_accepted(arguments: str, programs: Path) -> None:
    (programs / "guarded.py").write_text("if __name__ in {'__main__', '__mp_main__'}: print('runs')\n")
    for name in ("bare.py", "folder/__main__.py", "package/__main__.py"):
        (programs / name).write_text("print('runs')\n")
    result = run_in_folder(programs, "-m", "vecenv", "run", "--quiet", "--context", *arguments.split())
    assert (result.returncode, bool(result.stdout), result.stderr.count("guard")) == (0, True, 0)


@pytest.mark.parametrize(
    ("option", "value", "text"),
    [
        ("--step-timeout", "-1", "`step_timeout` must be None or a number of seconds above 0, got -1.0."),
        ("--step-timeout", "nan", "`step_timeout` must be None or a number of seconds above 0, got nan."),
        ("--record-failures", "report.py", "the folder of `record_failures` is a file: 'report.py'"),
    ],
)
def test_invalid_option_value_exits_with_2_before_the_program_runs(
    option: str, value: str, text: str, programs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(programs)
    assert cli.main(["run", option, value, "report.py"]) == 2
    assert capsys.readouterr().err == f"vecenv: {text}\n"

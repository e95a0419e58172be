"""Faults that return: what they should not, or with the process left worse than it was."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from typing import Any, Final, NoReturn

import numpy as np

from vecenv.testing.faulty.endings import FOREVER, kill
from vecenv.testing.faulty.registry import fault

HUGE_INFO_BYTES: Final = 100 * 2**20
LEAK_BYTES: Final = 2**20


def _with_observation(result: Any, observation: Any) -> Any:
    return (observation, *result[1:])


def _with_info(result: Any, **info: Any) -> Any:
    return (*result[:-1], {**result[-1], **info})


@fault
def wrong_shape(result: Any) -> Any:
    """An observation with one element too many."""
    return _with_observation(result, np.append(np.asarray(result[0]).ravel(), 0))


@fault
def scalar_observation(result: Any) -> Any:
    """One number where the space has an array; broadcasting would hide it."""
    return _with_observation(result, np.asarray(result[0]).dtype.type(1))


@fault
def no_observation(result: Any) -> Any:
    """``None`` as the observation: a forgotten ``return``."""
    return _with_observation(result, None)


@fault
def wrong_dtype(result: Any) -> Any:
    """float64 numbers too large for float32: a cast makes them infinite."""
    return _with_observation(result, np.full(np.shape(result[0]), 1e300, dtype=np.float64))


@fault
def too_few_values(result: Any) -> Any:
    """A step as Gym had it before 0.26: one flag instead of two."""
    return (*result[:-2], result[-1])


@fault
def unpicklable_info(result: Any) -> Any:
    """An info that cannot be sent to another process."""
    return _with_info(result, lock=threading.Lock())


class _EvilValue:
    def __reduce__(self) -> tuple[Any, ...]:
        return sys.exit, (7,)


@fault
def evil_info(result: Any) -> Any:
    """An info that calls ``sys.exit`` where it is unpickled."""
    return _with_info(result, evil=_EvilValue())


@fault
def huge_info(result: Any) -> Any:
    """100 MiB in an info: far more than a pipe holds."""
    return _with_info(result, blob=bytes(HUGE_INFO_BYTES))


# --- the process is left worse than it was --------------------------------------------------------

_LEAKED: list[Any] = []


@fault
def leak_memory(result: Any) -> Any:
    """Keep another MiB, touched, for ever."""
    _LEAKED.append(bytearray(os.urandom(1)) * LEAK_BYTES)
    return result


@fault
def leak_descriptors(result: Any) -> Any:
    """Open a pipe and never close it."""
    _LEAKED.append(os.pipe())
    return result


@fault
def stdio(result: Any) -> Any:
    """Print, write to descriptor 1, read standard input to its end, and close it."""
    print("an environment prints")
    os.write(1, b"an environment writes\n")
    os.write(2, b"an environment complains\n")
    text = sys.stdin.read() if sys.stdin is not None and not sys.stdin.closed else ""
    try:
        os.read(0, 1)
    except OSError:
        text += "(stdin is closed)"
    return _with_info(result, stdin=text)


@fault
def start_thread(result: Any) -> Any:
    """Start a thread that never ends."""
    threading.Thread(target=time.sleep, args=(FOREVER,), daemon=True).start()
    return result


@fault
def start_subprocess(result: Any) -> Any:
    """Start a program that outlives the environment; its pid is ``info["subprocess"]``."""
    helper = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({FOREVER})"])
    _LEAKED.append(helper)
    return _with_info(result, subprocess=helper.pid)


@fault
def close_descriptors(result: Any) -> Any:
    """Close every descriptor beyond the first three, the worker's own included, as some daemons do at their start."""
    os.closerange(3, 4096)
    return result


@fault
def fork_helper(result: Any) -> Any:
    """Fork a helper that inherits all descriptors of the worker and sleeps; its pid is ``info["helper"]``."""
    helper = os.fork()
    if helper == 0:
        time.sleep(FOREVER)
        os._exit(0)
    return _with_info(result, helper=helper)


@fault
def fork_helper_and_die(result: Any) -> NoReturn:
    """As :func:`fork_helper`, then SIGKILL oneself: end of file on the worker's pipe will not come."""
    fork_helper(result)
    kill(result)


@fault
def fork_and_return(result: Any) -> Any:
    """Fork, and let both processes return from the call: two workers answer where one was asked."""
    os.fork()
    return result

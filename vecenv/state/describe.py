"""Descriptions of values as text: constructor arguments, spaces, and the functions that a snapshot does not contain.

Equal descriptions mean equal values, as far as values can be inspected: functions by their code and captured values, arrays
by their bytes, objects by their attributes. Environments, and most objects written in C, are described by their class alone.
A description does not depend on the process, so descriptions from two machines can be compared.
"""

from __future__ import annotations

import copyreg
import enum
import functools
import os
import re
import sys
import types
import zlib
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final

import gymnasium
import numpy as np

from vecenv.state.codecs import model_bytes, registered_name
from vecenv.system.signals import suppress_os_errors

_MAX_LENGTH: Final = 160
_MAX_DEPTH: Final = 12
_MAX_LISTED_ELEMENTS: Final = 8
_FILE_PIECE_BYTES: Final = 2**20
_EXACT_REPRS: Final = frozenset({type(None), bool, int, float, complex, str, bytes, bytearray, range})
_MODULES_WITH_EXACT_REPRS: Final = frozenset({"datetime", "decimal"})
_NOT_DESCRIBED: Final = frozenset({
    "__dict__", "__weakref__", "__module__", "__doc__",
    "__slotnames__",  # added by pickling
    "__annotations__", "__annotate__", "__annotate_func__", "__annotations_cache__",  # some are added by reading annotations
    "__firstlineno__", "__static_attributes__",  # depend on the position in the file, and on the order of a set
})  # fmt: skip
"""Attributes of classes that do not affect instances, or that differ between versions of Python."""
_ADDRESS: Final = re.compile(r" at 0x[0-9a-f]+")
_CODE: Final = re.compile(r"python(\d+\.\d+) ([0-9a-f]{8})")


def describe(value: Any) -> str:
    """Return a description of a value, of at most 160 characters."""
    return _shorten(_describe(value, ()))


def differ(one: str, other: str) -> bool:
    """True if two descriptions differ, other than by a file that has been created at a path.

    Bytecode is compared only if both are from the same version of Python.
    """
    if one == other or _is_file_created(one, other) or _is_file_created(other, one):
        return False
    if {version for version, _ in _CODE.findall(one)} == {version for version, _ in _CODE.findall(other)}:
        return True
    return _CODE.sub("", one) != _CODE.sub("", other)


def _is_file_created(before: str, after: str) -> bool:
    """True if ``before`` is a path without a file, and ``after`` a file of that name, such as a log of the environment."""
    name = os.path.basename(before[1:-1])
    return before[1:2] == "/" and after.startswith(f"file {name} ")


def _shorten(text: str) -> str:
    if len(text) <= _MAX_LENGTH:
        return text
    rest, codes = _CODE.sub("", text), _CODE.findall(text)
    short = f"{rest[: _MAX_LENGTH // 2]}... ({len(rest)} characters, {_crc(rest.encode())})"
    return f"{short} python{codes[0][0]} {_crc(repr(codes).encode())}" if codes else short


def _crc(data: bytes) -> str:
    return f"{zlib.crc32(data):08x}"


def _describe(value: Any, parents: tuple[int, ...]) -> str:
    kind = type(value)
    if isinstance(value, str | os.PathLike) and os.path.isabs(value) and os.path.isfile(value):
        return _describe_file(os.fspath(value))
    if kind in _EXACT_REPRS or getattr(kind, "__module__", None) in _MODULES_WITH_EXACT_REPRS:
        return repr(value)
    if isinstance(value, enum.Enum | slice):
        return _ADDRESS.sub("", repr(value))
    if isinstance(value, re.Pattern):  # its repr is cut off after 200 characters
        return f"re.compile({value.pattern!r}, {value.flags})"
    if isinstance(value, np.dtype) or (isinstance(value, np.generic | np.ndarray) and not value.dtype.hasobject):
        return _describe_numpy(value)
    if isinstance(value, os.PathLike):
        return repr(os.fspath(value))
    if registered_name(kind) == "mujoco._structs.MjModel":
        return f"MjModel {_crc(model_bytes(value))}"
    if isinstance(value, types.ModuleType):
        return f"module {value.__name__}"
    if id(value) in parents:
        return "..."
    if len(parents) > _MAX_DEPTH:
        return kind.__name__
    parents = (*parents, id(value))

    def describe_part(item: Any) -> str:
        return _describe(item, parents)

    if isinstance(value, type):
        return _describe_class(value, describe_part)
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{describe_part(key)}: {describe_part(item)}' for key, item in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(describe_part, value))}]"
    if isinstance(value, np.generic | np.ndarray):  # of objects: its repr leaves out the middle
        return f"{value.dtype}{value.shape} {describe_part(value.tolist())}"
    if isinstance(value, deque):
        return f"{kind.__name__}({describe_part(list(value))}, {value.maxlen})"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(map(describe_part, value)))}}}"
    if isinstance(value, functools.partial):
        return f"partial({describe_part(value.func)}, {describe_part(value.args)}, {describe_part(value.keywords)})"
    if isinstance(value, types.MethodType):
        return f"{describe_part(value.__func__)} of {type(value.__self__).__name__}"
    if isinstance(value, types.FunctionType):
        return _describe_function(value, describe_part)
    if isinstance(value, property):
        return f"property({describe_part((value.fget, value.fset))})"
    if isinstance(wrapped := getattr(value, "__wrapped__", None), types.FunctionType):
        return f"{kind.__name__}({describe_part(wrapped)})"
    if isinstance(value, gymnasium.Env):
        return kind.__name__
    if hasattr(kind, "__jax_array__") or (kind.__module__ or "").startswith("jaxlib"):
        return _describe_jax(value)
    if callable(value) and isinstance(name := getattr(value, "__name__", None), str):  # written in C, like `np.tanh`
        return f"{kind.__name__} {name}"
    attributes = _collect_attributes(value)
    exact: Any = next((base for base in kind.__mro__ if base in _EXACT_REPRS), None)
    if exact is not None:  # a class derived from `float`, `str` or the like
        return f"{kind.__name__}({exact.__repr__(value)}, {describe_part(attributes)})"
    return f"{kind.__name__}({describe_part(attributes)})" if attributes else kind.__name__


def describe_space(space: Any) -> str:
    """Return a space's repr, with a checksum of everything except its generator."""
    return f"{_ADDRESS.sub('', repr(space))} ({_crc(_describe(space, ()).encode())})"


def _collect_attributes(value: Any) -> dict[str, Any]:
    found = {name: getattr(value, name) for name in slot_names(type(value)) if hasattr(value, name)}
    own = getattr(value, "__dict__", None)
    found.update(own if isinstance(own, dict) else {})
    if isinstance(value, gymnasium.Space):  # leave out its generator's state and its cached reprs
        found = {name: item for name, item in found.items() if not name.startswith("_np_random") and name[-5:] != "_repr"}
    return found


def slot_names(kind: type) -> list[str]:
    """Return the names of the attributes that a class and its bases declare in ``__slots__``."""
    return copyreg._slotnames(kind)  # type: ignore[attr-defined, no-any-return]


def _describe_file(path: str) -> str:
    """Describe a file by its name and content, because its folder may be another one on another machine."""
    with suppress_os_errors(), open(path, "rb") as file:  # it may be a file of another user
        checksum = 0
        while piece := file.read(_FILE_PIECE_BYTES):
            checksum = zlib.crc32(piece, checksum)
        return f"file {os.path.basename(path)} {checksum:08x}"
    return f"file {path!r}"


def _describe_numpy(value: Any) -> str:
    if isinstance(value, np.dtype):
        return repr(value)
    if value.size <= _MAX_LISTED_ELEMENTS:
        return f"{value.dtype}{value.tolist()!r}" if value.shape else f"{value.dtype} {value.tolist()!r}"
    return f"{value.dtype}{value.shape} {_crc(np.ascontiguousarray(value).tobytes())}"


def _describe_jax(value: Any) -> str:
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        try:
            return _describe_numpy(np.asarray(value))
        except TypeError:  # JAX's random keys have no NumPy dtype
            return f"{value.dtype}{value.shape}"
    return type(value).__name__


def _describe_function(function: types.FunctionType, describe_part: Callable[[Any], str]) -> str:
    captured = []
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            captured.append(f"{name}={describe_part(cell.cell_contents)}")
        except ValueError:  # the cell is empty: the variable has no value yet
            captured.append(f"{name} is not set")
    captured += [describe_part(value) for value in (function.__defaults__, function.__kwdefaults__) if value]
    return f"{function.__qualname__}({', '.join(captured)}) {_describe_code(function.__code__)}"


def _describe_code(code: types.CodeType) -> str:
    constants = list(map(_describe_constant, code.co_consts))
    whole = repr((code.co_code, code.co_names, code.co_varnames, constants))
    return f"python{sys.version_info[0]}.{sys.version_info[1]} {_crc(whole.encode())}"


def _describe_constant(value: Any) -> str:
    if isinstance(value, types.CodeType):
        return _describe_code(value)
    return repr(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)


def is_importable(thing: Any) -> bool:
    """True if a function or class can be found by its module and qualified name."""
    found: Any = sys.modules.get(getattr(thing, "__module__", None) or "")
    for part in getattr(thing, "__qualname__", "<").split("."):
        found = getattr(found, part, None)
    return found is thing


def _describe_class(kind: type, describe_part: Callable[[Any], str]) -> str:
    name = f"{kind.__module__}.{kind.__qualname__}"
    if is_importable(kind):
        return name
    own = {key: item for key, item in vars(kind).items() if key not in _NOT_DESCRIBED}
    return f"{name}({describe_part(own)})"

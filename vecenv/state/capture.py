"""Functions that save the state of an environment as bytes, and restore it in another environment.

All layers of an environment go into one pickle, so that shared objects stay shared. An object that stays in place is stored
as its path from a layer through attributes and items; one that has a codec, as its path and the codec's state. The reader
finds the counterpart at this path in the environment that is being restored. The class of an attribute's value determines
its treatment (:func:`_treatment`). References to layers and to objects stored as paths, and numeric arrays and scalars, are
all pickled as calls of one function, :func:`stands_for_`, because pickling the names of many functions and classes would
double the time.

:func:`prepare_restore` reads everything, and raises if the state does not fit, without changing the environment. The
function that it returns applies the state; if it is interrupted, it can be repeated.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import io
import pickle
from collections import deque
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any, Final

import gymnasium
import numpy as np

from vecenv.errors import NotRestorable, SnapshotMismatch, VecEnvError
from vecenv.state.codecs import STAYS, Codec, Refused, cached_by_class, make_from_state, rule_for, save_space
from vecenv.state.describe import describe, differ, is_importable, slot_names

_ATOMS: Final = frozenset({type(None), bool, int, float, str, bytes, complex})
_PLAIN: Final = frozenset({*_ATOMS, dict, list, tuple, set, frozenset, type})

ObjectPath = tuple[Any, ...]
"""The path to an object: the number of a layer, then (by attribute?, name or key) for each step."""

# The treatments of attribute values: atoms and layers are pickled without their paths. Objects that stay, and spaces without
# generators, are left out of the pickle. Refused objects raise. All others are pickled, and their paths are kept.
_ATOM, _OTHER, _LAYER, _STAYING, _SPACE, _REFUSED = range(6)


@cached_by_class
def _treatment(kind: type) -> int:
    """Return the treatment of attribute values of a class: one of the constants above."""
    if kind in _ATOMS:
        return _ATOM
    if _is_layer(kind):
        return _LAYER
    rule = rule_for(kind)
    if rule is STAYS:
        return _OTHER if issubclass(kind, ModuleType) else _STAYING
    if isinstance(rule, Refused):
        return _REFUSED
    return _SPACE if issubclass(kind, gymnasium.Space) else _OTHER


def _is_layer(kind: type) -> bool:
    """True if objects of a class are environments: they can be reset and stepped, and have attributes."""
    has_methods = callable(getattr(kind, "step", None)) and callable(getattr(kind, "reset", None))
    return has_methods and kind.__dictoffset__ != 0 and kind not in _PLAIN


def find_layers(env: Any) -> list[Any]:
    """Return an environment's layers, outermost first: itself, and all environments that are attributes of its layers."""
    layers = [env]
    seen = {id(env)}
    for layer in layers:
        values = layer.__dict__.values()
        if _LAYER in map(_treatment, map(type, values)):
            for value in values:
                if _treatment(type(value)) == _LAYER and id(value) not in seen:
                    seen.add(id(value))
                    layers.append(value)
    return layers


@cached_by_class
def has_hidden_memory(kind: type) -> bool:
    """True if objects of a class have memory that their attributes do not show, because the class is written in C."""
    size = object.__basicsize__ + sum(8 for name in ("__dictoffset__", "__weakrefoffset__") if getattr(kind, name) > 0)
    return bool(kind.__itemsize__) or kind.__basicsize__ > size + 8 * len(slot_names(kind))


def capture_state(env: Any, layers: list[Any] | None = None) -> bytes:
    """Return the state of an environment.

    Args:
        env: The environment.
        layers: Its layers, from :func:`find_layers`; ``None``: find them.

    Raises:
        NotRestorable: A part of the state cannot be saved. The message names it.
    """
    layers = find_layers(env) if layers is None else layers
    return _Writer(layers).write()


def stands_for_(code: int, *values: Any) -> Any:
    """Represent a layer, a reference or an array in a pickle; only :class:`_Reader` interprets it.

    Its name is part of the format of snapshots. ``code`` is one of the constants below; their comments list the ``values``.
    """
    raise AssertionError("only read by prepare_restore()")


_LAYER_NUMBER: Final = 0  # (its number,)
_CONTENT: Final = 1  # (path to an object that its codec loads, the codec's state)
_IN_PLACE: Final = 2  # (path to an object that stays, its description or None)
_ARRAY: Final = 3  # (dtype, shape, bytes)
_SCALAR: Final = 4  # a NumPy scalar: (dtype, bytes)
_NUMERIC_KINDS: Final = frozenset("biufc")


def _array(dtype: str, shape: tuple[int, ...], content: bytes) -> Any:
    return np.ndarray(shape, dtype, content).copy()


def _scalar(dtype: str, content: bytes) -> Any:
    return np.frombuffer(content, dtype)[0]


class _Writer(pickle.Pickler):
    """A pickler that writes layers into one pickle."""

    def __init__(self, layers: list[Any]) -> None:
        self._file = io.BytesIO()
        super().__init__(self._file, pickle.HIGHEST_PROTOCOL)
        self._layers = layers
        self._numbers = {id(layer): number for number, layer in enumerate(layers)}
        self._paths: dict[int, ObjectPath] = {}
        self._walked = False

    def write(self) -> bytes:
        states = [self._layer_state(number, layer) for number, layer in enumerate(self._layers)]
        try:
            self.dump(states)
        except VecEnvError:
            raise
        except Exception as error:
            raise self._explain_error(states, error) from error
        return self._file.getvalue()

    def _layer_state(self, number: int, layer: Any) -> tuple[Any, Any]:
        """Return a layer's attributes and the names of those that stay in place, or its codec's state and ``None``."""
        kind = type(layer)
        rule = _layer_codec(kind)
        if rule is not None:
            return self._save_by_codec(rule, layer, kind.__name__), None
        attributes = layer.__dict__
        state = attributes.copy()
        names_in_place = []
        values = attributes.values()
        for name, value, treatment in zip(attributes, values, map(_treatment, map(type, values)), strict=True):
            if treatment in (_ATOM, _LAYER):
                continue
            if treatment == _STAYING or (treatment == _SPACE and save_space(value) is None):
                names_in_place.append(name)
                del state[name]
                continue
            self._paths.setdefault(id(value), (number, (True, name)))
            if treatment == _REFUSED:
                reason = rule_for(type(value)).reason  # type: ignore[union-attr]
                raise NotRestorable(f"{kind.__name__}.{name} ({type(value).__name__}): {reason}")
        return state, names_in_place

    def _save_by_codec(self, rule: Codec, obj: Any, name: str) -> Any:
        try:
            return rule.save(obj)
        except VecEnvError:
            raise
        except Exception as error:
            raise NotRestorable(f"{name} cannot be saved: {type(error).__name__}: {error}") from error

    def reducer_override(self, obj: Any) -> Any:
        if (number := self._numbers.get(id(obj))) is not None:
            return stands_for_, (_LAYER_NUMBER, number)
        kind = type(obj)
        rule = rule_for(kind)
        if rule is None:
            if kind is np.ndarray:
                flags = obj.flags
                if obj.dtype.kind not in _NUMERIC_KINDS or not (flags.c_contiguous and flags.writeable):
                    return NotImplemented
                return stands_for_, (_ARRAY, obj.dtype.str, obj.shape, obj.tobytes())
            if obj is stands_for_:
                return NotImplemented
            if isinstance(obj, np.generic) and obj.dtype.kind in _NUMERIC_KINDS:
                return stands_for_, (_SCALAR, obj.dtype.str, obj.tobytes())
            if kind is FunctionType or isinstance(obj, type):
                return NotImplemented if obj in _importable or _check_importable(obj) else self._reduce_as_reference(obj)
            if getattr(kind, "__setstate__", None) is not None and hasattr(obj, "_ezpickle_args"):
                return copyreg.__newobj__, (kind,), vars(obj), None, None, _set_attributes  # type: ignore[attr-defined]
            if hasattr(kind, "__jax_array__") or kind.__module__.startswith("jaxlib"):
                return _reduce_jax(obj, self._reduce_as_reference)
            return NotImplemented
        if isinstance(rule, Refused):
            place = kind.__name__
            with contextlib.suppress(NotRestorable):  # it has no path: it is in an object that `_walk` does not enter
                place = f"{_format_path(self._layers, self._find_path(obj))} ({place})"
            raise NotRestorable(f"{place}: {rule.reason}")
        if not isinstance(rule, Codec):
            return self._reduce_as_reference(obj)
        state = self._save_by_codec(rule, obj, kind.__name__)
        return self._reduce_as_reference(obj) if state is None else (stands_for_, (_CONTENT, self._find_path(obj), state))

    def _reduce_as_reference(self, obj: Any) -> Any:
        compared = rule_for(type(obj)) is not STAYS or isinstance(obj, ModuleType)
        return stands_for_, (_IN_PLACE, self._find_path(obj), describe(obj) if compared else None)

    def _find_path(self, obj: Any) -> ObjectPath:
        path = _path_in_globals(self._layers, obj) or self._paths.get(id(obj))
        if path is None and not self._walked:
            self._walked = True
            for key, found in _walk(self._layers, self._numbers):
                self._paths.setdefault(key, found)
            path = self._paths.get(id(obj))
        if path is None:
            raise NotRestorable(f"{type(obj).__name__}: its counterpart in another environment cannot be found")
        return path

    def _explain_error(self, states: list[tuple[Any, Any]], error: Exception) -> NotRestorable:
        """Return an error that names the attribute that cannot be pickled."""
        for (state, _), layer in zip(states, self._layers, strict=True):
            for name, value in state.items() if isinstance(state, dict) else ():
                probe = _Writer(self._layers)
                probe._paths, probe._walked = self._paths, self._walked
                try:
                    probe.dump(value)
                except Exception as cause:
                    return NotRestorable(f"{type(layer).__name__}.{name} ({type(value).__name__}) cannot be saved: {cause}")
        return NotRestorable(f"{type(self._layers[0]).__name__} cannot be saved: {type(error).__name__}: {error}")


@cached_by_class
def _layer_codec(kind: type) -> Codec | None:
    """Return a layer's codec; ``None`` if its attributes are its whole state."""
    rule = rule_for(kind)
    if isinstance(rule, Refused):
        raise NotRestorable(f"{kind.__name__} cannot be saved: {rule.reason}")
    if not isinstance(rule, Codec):
        if has_hidden_memory(kind):
            raise NotRestorable(f"{kind.__name__} has memory that its attributes do not show: it needs a codec")
        if names := ", ".join(slot_names(kind)):
            raise NotRestorable(f"{kind.__name__} has attributes in __slots__, which need a codec: {names}")
    return rule if isinstance(rule, Codec) else None


def _set_attributes(obj: Any, attributes: dict[str, Any]) -> None:
    """Set the attributes of an object that would otherwise be rebuilt from its arguments (``EzPickle``)."""
    obj.__dict__.update(attributes)


_importable: set[Any] = set()


def _check_importable(obj: Any) -> bool:
    if found := is_importable(obj):
        _importable.add(obj)
    return found


def _reduce_jax(obj: Any, reduce_as_reference: Callable[[Any], Any]) -> Any:
    import jax

    if isinstance(obj, jax.Array):
        if jax.numpy.issubdtype(obj.dtype, jax.dtypes.prng_key):
            return _wrapped_key, (jax.device_get(jax.random.key_data(obj)), str(jax.random.key_impl(obj)))
        return NotImplemented
    return reduce_as_reference(obj)  # for example a compiled function


def _wrapped_key(data: Any, implementation: str) -> Any:
    import jax

    return jax.random.wrap_key_data(data, impl=implementation)


def reachable_objects(layers: list[Any]) -> dict[int, tuple[Any, str]]:
    """Return the objects reachable from layers, except attributes of spaces, as id -> (object, formatted path)."""
    numbers = {id(layer): number for number, layer in enumerate(layers)}
    return {
        key: (_find(layers, path), _format_path(layers, path))
        for key, path in _walk(layers, numbers)
        if not isinstance(_find(layers, path[:-1]), gymnasium.Space)
    }


def _find(layers: list[Any], path: ObjectPath) -> Any:
    obj = layers[path[0]]
    for by_attribute, key in path[1:]:
        obj = getattr(obj, key) if by_attribute else obj[key]
    return obj


def _path_in_globals(layers: list[Any], obj: Any) -> ObjectPath | None:
    """Return the path to a class or function that workers received by value, through the globals of a method.

    Under ``spawn`` and ``forkserver`` these are the main program's classes and functions, which cannot be imported by name.
    """
    if not isinstance(obj, type | FunctionType):
        return None
    first, *others = obj.__qualname__.split(".")
    for number, layer in enumerate(layers):
        for name in dir(type(layer)):
            method = getattr(type(layer), name, None)
            if isinstance(method, FunctionType) and method.__module__ == obj.__module__ and first in method.__globals__:
                steps = (True, "__class__"), (True, name), (True, "__globals__"), (False, first)
                path = (number, *steps, *((True, other) for other in others))
                with contextlib.suppress(AttributeError):
                    if _find(layers, path) is obj:
                        return path
    return None


def _walk(layers: list[Any], numbers: dict[int, int]) -> Iterator[tuple[int, ObjectPath]]:
    """Yield (id, path) of each object reachable through attributes and items of layers, the shortest paths first."""
    todo: deque[tuple[Any, ObjectPath]] = deque((layer, (number,)) for number, layer in enumerate(layers))
    seen: set[int] = set()
    while todo:
        obj, path = todo.popleft()
        for step, value in _children(obj):
            if type(value) in _ATOMS or id(value) in numbers or id(value) in seen:
                continue
            seen.add(id(value))
            value_path = (*path, step)
            yield id(value), value_path
            todo.append((value, value_path))


def _children(obj: Any) -> Iterator[tuple[tuple[bool, Any], Any]]:
    """Yield (step, value) for each attribute and item that a step of a path, (by attribute?, name or key), can reach."""
    if isinstance(obj, dict):
        yield from (((False, key), value) for key, value in obj.items() if type(key) in _ATOMS or type(key) is tuple)
    elif isinstance(obj, list | tuple | deque):
        yield from (((False, index), value) for index, value in enumerate(obj))
    attributes = getattr(obj, "__dict__", None)
    if isinstance(attributes, dict) and not isinstance(obj, type | FunctionType | ModuleType):
        yield from (((True, name), value) for name, value in attributes.items())
    yield from (((True, name), getattr(obj, name)) for name in slot_names(type(obj)) if hasattr(obj, name))
    if type(obj) in (functools.partial, functools.partialmethod):  # not by `__module__`, which some types from SWIG lack
        yield from (((True, name), getattr(obj, name)) for name in ("func", "args", "keywords"))


class _Reader(pickle.Unpickler):
    """An unpickler that reads a :class:`_Writer`'s pickle for another environment, without changing it."""

    def __init__(self, blob: bytes, layers: list[Any]) -> None:
        super().__init__(io.BytesIO(blob))
        self._layers = layers
        self._load_targets: dict[int, ObjectPath] = {id(layer): (number,) for number, layer in enumerate(layers)}
        self.pending_loads: list[tuple[Codec, Any, Any]] = []
        self._readers = (layers.__getitem__, self._get_target, self._get_in_place, _array, _scalar)

    def find_class(self, module: str, name: str) -> Any:
        return self._read if name == "stands_for_" and module == __name__ else super().find_class(module, name)

    def _read(self, code: int, *values: Any) -> Any:
        return self._readers[code](*values)

    def _find_counterpart(self, path: ObjectPath) -> Any:
        try:
            return _find(self._layers, path)
        except (AttributeError, KeyError, IndexError, TypeError) as error:
            text = f"the environment has no {_format_path(self._layers, path)}, and snapshots do not contain it"
            raise SnapshotMismatch(text) from error

    def _get_in_place(self, path: ObjectPath, description: str | None) -> Any:
        """Return the object that stays in place at ``path``. Raise if it differs from the snapshot's."""
        obj = self._find_counterpart(path)
        if description is None:
            _require_kept_in_place(obj, _format_path(self._layers, path))
        elif differ(description, here := describe(obj)):
            raise SnapshotMismatch(f"its {_format_path(self._layers, path)} is {description}, but here it is {here}")
        return obj

    def _get_target(self, path: ObjectPath, state: Any) -> Any:
        """Return the object at ``path``, into which its codec will load the state.

        If there is no such object, or if it has no codec, is a layer, or is the target of another path, return a new object
        with the state.
        """
        try:
            obj = self._find_counterpart(path)
        except SnapshotMismatch:
            obj = None
        rule = rule_for(type(obj))
        if isinstance(rule, Codec) and self._load_targets.setdefault(id(obj), path) == path:
            try:
                self.pending_loads.append((rule, obj, rule.prepare(obj, state)))
            except SnapshotMismatch as error:
                raise SnapshotMismatch(f"{_format_path(self._layers, path)}: {error}") from error
            return obj
        if (new := make_from_state(state)) is None:
            raise SnapshotMismatch(f"no object at {_format_path(self._layers, path)} can load the saved state")
        return new


def _require_kept_in_place(obj: Any, path: str) -> None:
    """Raise unless an object is of a class that stays in place, or ``None``: a renderer may not exist yet."""
    if obj is not None and _treatment(type(obj)) not in (_STAYING, _SPACE):
        expected = "an object that snapshots do not contain (a space, a spec, a renderer or the like)"
        raise SnapshotMismatch(f"its {path} is {expected}, but here it is of class {type(obj).__name__}")


def _format_path(layers: list[Any], path: ObjectPath) -> str:
    """Format a path, such as ``AntEnv.data``."""
    text = type(layers[path[0]]).__name__
    for by_attribute, key in path[1:]:
        text += f".{key}" if by_attribute else f"[{key!r}]"
    return text


def prepare_restore(env: Any, blob: bytes, layers: list[Any] | None = None) -> Callable[[], None]:
    """Read a state without changing the environment. Return a function that restores it.

    If the function is interrupted, it can be repeated. It must not be repeated after a reset or a step of the environment,
    which changes the restored objects.

    Args:
        env: The environment.
        blob: A state from :func:`capture_state`.
        layers: The layers of ``env``, from :func:`find_layers`; ``None``: find them.

    Raises:
        SnapshotMismatch: The state does not fit.
    """
    layers = find_layers(env) if layers is None else layers
    reader = _Reader(blob, layers)
    pending_loads = reader.pending_loads
    attributes: list[tuple[dict[str, Any], dict[str, Any], list[str], int]] = []
    try:
        for layer, (state, names_in_place) in zip(layers, reader.load(), strict=True):
            if names_in_place is None:
                rule = rule_for(type(layer))
                if not isinstance(rule, Codec):
                    raise SnapshotMismatch(f"{type(layer).__name__} was saved by a codec that is not registered here")
                pending_loads.append((rule, layer, rule.prepare(layer, state)))
            else:
                for name in names_in_place:
                    _require_kept_in_place(layer.__dict__.get(name), f"{type(layer).__name__}.{name}")
                attributes.append((layer.__dict__, dict(state), list(names_in_place), len(state) + len(names_in_place)))
    except VecEnvError:
        raise
    except Exception as error:
        raise SnapshotMismatch(f"its bytes cannot be read: {type(error).__name__}: {error}") from error

    def restore() -> None:
        for own, saved, names_in_place, count in attributes:
            own.update(saved)
            for name in names_in_place:
                own.setdefault(name, None)
            if len(own) != count:
                for name in own.keys() - saved.keys() - set(names_in_place):
                    own.pop(name, None)
        for rule, obj, state in pending_loads:
            rule.load(obj, state)

    return restore

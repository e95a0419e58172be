"""A file of results, one JSON line per finished episode, from which a killed evaluation continues.

The first line identifies the evaluation. An incomplete last line comes from a killed program, and is removed. A failed
episode is recorded, and the next evaluation runs it again, so only the last line of an episode counts.

Returns and values of infos without a JSON type are stored as objects with one key: ``!array``, ``!scalar``, ``!tuple``,
``!dict``, ``!float`` for nan and infinities; ``!repr`` for any other object, which is read back as its repr.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from vecenv.evaluating.episodes import Episode, EpisodeResult
from vecenv.link.messages import original_summary

with contextlib.suppress(ImportError):  # missing on Windows: there, two programs may write into one file
    import fcntl

_FORMAT: Final = 1
_FILE: Final = "episodes.jsonl"
_JSON_TYPES: Final = (type(None), bool, int, str)
_PLAIN_FIELDS: Final = ("index", "env", "seed", "length", "terminated", "truncated", "seconds", "attempts")


class Journal:
    """The results stored in a folder, as a context manager: results can be appended only inside the context.

    Args:
        folder: The folder. Entering the context creates it and its parents.
        episodes: The list of episodes, all with a seed.
        seed: The seed of the evaluation.
        name: The name of the policy.

    Raises:
        TypeError: Options of an episode have no exact encoding.
        ValueError: The folder has results of another list, seed or name, or a damaged file, or is not a folder.
    """

    def __init__(self, folder: str | os.PathLike[str], episodes: Sequence[Episode], seed: int, name: str | None) -> None:
        self._path = _journal_path(folder)
        self._episodes = episodes
        self._header = {
            "format": _FORMAT, "episodes": len(episodes), "seed": seed, "name": name, "list": _hash_episodes(episodes),
        }  # fmt: skip
        self._fd = -1
        self.results: dict[int, EpisodeResult] = {}
        if self._path.exists():
            self._load_results(self._path.read_bytes())

    def __enter__(self) -> Journal:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            self._lock()
            with open(self._fd, "rb", closefd=False) as file:
                complete_size = self._load_results(file.read())
            os.ftruncate(self._fd, complete_size)
            if not complete_size:
                self._write(self._header)
        except BaseException:
            os.close(self._fd)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if "fcntl" in globals():
            fcntl.flock(self._fd, fcntl.LOCK_UN)  # workers that were forked meanwhile share the lock
        os.close(self._fd)

    def append(self, result: EpisodeResult) -> EpisodeResult:
        """Append a result, and return it as the file would restore it."""
        line = {name: getattr(result, name) for name in _PLAIN_FIELDS}
        line["return"], line["info"] = _encode(result.episode_return), _encode(result.info)
        line["error"] = None if result.error is None else original_summary(result.error)
        self._write(line)
        return replace(result, info=_decode(line["info"]))

    def _write(self, line: dict[str, Any]) -> None:
        data = f"{json.dumps(line, allow_nan=False)}\n".encode()
        while data:
            data = data[os.write(self._fd, data) :]

    def _lock(self) -> None:
        """Lock the file, or raise :class:`ValueError` if another evaluation has locked it."""
        if "fcntl" in globals():
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                folder = str(self._path.parent)
                raise ValueError(f"{folder=}: another evaluation is writing its results there") from error

    def _load_results(self, data: bytes) -> int:
        """Replace ``results`` with those in ``data``, and return the number of bytes in complete lines."""
        complete_size = data.rfind(b"\n") + 1
        header, *lines = _parse(self._path, data[:complete_size]) or [None]
        if header is not None:
            self._require_same_evaluation(header)
        self.results.clear()
        for number, line in enumerate(lines, 2):
            try:
                self.results.pop(line["index"], None)
                if line["error"] is None:
                    self.results[line["index"]] = self._parse_result(line)
            except (KeyError, IndexError, TypeError, ValueError) as error:
                raise _damage_error(self._path, number, error) from error
        return complete_size

    def _require_same_evaluation(self, header: Any) -> None:
        """Raise if the file belongs to another evaluation."""
        for key, description in (
            ("format", "a file of format"), ("seed", "results with seed"), ("name", "results of policy"),
            ("episodes", "results of an episode list of length"), ("list", "results of an episode list with hash"),
        ):  # fmt: skip
            found = header.get(key) if isinstance(header, dict) else None
            if found != self._header[key]:
                raise ValueError(
                    f"folder={str(self._path.parent)!r} holds {description} {found!r}, but this evaluation has "
                    f"{self._header[key]!r}: use another folder"
                )

    def _parse_result(self, line: dict[str, Any]) -> EpisodeResult:
        options, plain = self._episodes[line["index"]].options, {name: line[name] for name in _PLAIN_FIELDS}
        return EpisodeResult(
            options=options, episode_return=_decode(line["return"]), info=_decode(line["info"]), error=None, **plain
        )


def stored_seed(folder: str | os.PathLike[str]) -> int | None:
    """Return the seed of the evaluation stored in a folder, or ``None`` if the folder has no results."""
    path = _journal_path(folder)
    data = path.read_bytes() if path.exists() else b""
    lines = _parse(path, data[: data.find(b"\n") + 1])
    return lines[0].get("seed") if lines and isinstance(lines[0], dict) else None


def _journal_path(folder: str | os.PathLike[str]) -> Path:
    try:
        path = Path(folder)
    except TypeError:
        raise TypeError(f"folder must be a path or None, got {folder!r}") from None
    if path.exists() and not path.is_dir():
        raise ValueError(f"folder={str(path)!r} is not a folder")
    return path / _FILE


def _parse(path: Path, data: bytes) -> list[Any]:
    lines = []
    for number, line in enumerate(data.splitlines(), 1):
        try:
            lines.append(json.loads(line))
        except ValueError as error:
            raise _damage_error(path, number, error) from error
    return lines


def _damage_error(path: Path, number: int, error: Exception) -> ValueError:
    return ValueError(f"line {number} of {path} is damaged: {type(error).__name__}: {error}")


def _hash_episodes(episodes: Sequence[Episode]) -> str:
    """Return a hash of a list of episodes. Raise :class:`TypeError` for options that have no exact encoding."""
    digest = hashlib.sha256()
    for index, episode in enumerate(episodes):
        try:
            options = None if episode.options is None else _encode(dict(episode.options), strict=True)
        except TypeError as error:
            raise TypeError(f"episodes[{index}].options cannot be stored exactly, as folder= requires: {error}") from None
        snapshot = episode.snapshot
        state = "" if snapshot is None else hashlib.sha256(snapshot.body + snapshot.rest).hexdigest()
        digest.update(json.dumps([episode.seed, episode.env, options, state], sort_keys=True).encode() + b"\n")
    return digest.hexdigest()


# -- exact encoding of values -----------------------------------------------------------------------------------------


def _encode(value: Any, *, strict: bool = False) -> Any:
    """Encode a value for JSON; with ``strict``, raise :class:`TypeError` for objects that would become ``!repr``."""
    kind = type(value)
    if kind in _JSON_TYPES:
        return value
    if kind is float:
        return value if math.isfinite(value) else {"!float": repr(value)}
    if kind is list:
        return [_encode(each, strict=strict) for each in value]
    if kind is tuple:
        return {"!tuple": [_encode(each, strict=strict) for each in value]}
    if isinstance(value, dict):  # environments also return OrderedDicts and defaultdicts as infos
        if all(type(key) is str and not key.startswith("!") for key in value):
            return {key: _encode(each, strict=strict) for key, each in value.items()}
        return {"!dict": [[_encode(key, strict=strict), _encode(each, strict=strict)] for key, each in value.items()]}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufcSU":
        data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        if isinstance(value, np.generic):
            return {"!scalar": [value.dtype.str, data]}
        return {"!array": [value.dtype.str, list(value.shape), data]}
    if strict:
        raise TypeError(f"expected numbers, strings, arrays, lists, tuples and dicts, got {value!r}")
    return {"!repr": repr(value)}


def _decode(value: Any) -> Any:
    """Restore the value that :func:`_encode` encoded."""
    if isinstance(value, list):
        return [_decode(each) for each in value]
    if not isinstance(value, dict):
        return value
    match list(value.items()):
        case [("!float" | "!repr" as kind, text)]:
            return float(text) if kind == "!float" else text
        case [("!tuple", items)]:
            return tuple(map(_decode, items))
        case [("!dict", pairs)]:
            return {_decode(key): _decode(each) for key, each in pairs}
        case [("!scalar", (dtype, data))]:
            return np.ndarray((), dtype, base64.b64decode(data))[()]  # frombuffer refuses empty strings
        case [("!array", (dtype, shape, data))]:
            return np.ndarray(shape, dtype, base64.b64decode(data)).copy()
    return {key: _decode(each) for key, each in value.items()}

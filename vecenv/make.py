"""Construction of every kind of vector environment: :func:`make_vec`, like Gymnasium's, and :func:`register`.

A backend is one entry of a table: a function that builds a vector environment, the libraries that it needs, and the extra
that installs them. Wrong arguments (an unknown id, backend or option) and missing libraries are reported before anything is
built, and the error names the alternatives.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import functools
import importlib.util
import inspect
import multiprocessing
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, overload

import gymnasium
from gymnasium.envs.registration import EnvSpec, _find_spec, load_env_creator, registry
from gymnasium.vector import VectorEnv

from vecenv.engine.vector_env import AsyncVectorEnv
from vecenv.errors import how_to_install
from vecenv.front.arguments import check_option_names, parse_autoreset_mode
from vecenv.front.capabilities import raise_unsupported
from vecenv.planning.options import check_option
from vecenv.wrappers.prefetch import EpisodePrefetcher

if TYPE_CHECKING:
    from vecenv.backends import EnvPoolVectorEnv, JaxVectorEnv, NativeVectorEnv, RayVectorEnv

__all__ = ["find_spec", "make_vec", "register"]


# -- ids and the names of options --------------------------------------------------------------------------------------


def find_spec(env_id: str) -> EnvSpec:
    """Return the spec of an id in Gymnasium's registry.

    Raises:
        gymnasium.error.UnregisteredEnv: There is no such id. The message names similar ids, and libraries that
            may have the environment.
        ModuleNotFoundError: The module of a ``module:Env`` id cannot be imported.
    """
    try:
        return _find_spec(env_id)  # unlike gymnasium.spec, this imports modules and finds the newest version
    except gymnasium.error.Error as error:
        kind = type(error) if isinstance(error, gymnasium.error.UnregisteredEnv) else gymnasium.error.UnregisteredEnv
        raise kind(f"{error} {_suggest_places(env_id)}".rstrip()) from None


def _suggest_places(env_id: str) -> str:
    """Return hints, for an error message, on where to find an unregistered environment."""
    name = env_id.rpartition(":")[2]
    hints = []
    close = difflib.get_close_matches(name, registry, n=3, cutoff=0.7)
    if close:
        hints.append(f"Similar registered ids: {', '.join(close)}.")
    namespace = "ALE" if re.search(r"NoFrameskip-v\d|Deterministic-v\d", name) else name.partition("/")[0]
    library, command = _LIBRARIES.get(namespace, ("", ""))
    if library and importlib.util.find_spec(library) is not None:
        hints.append(f"{library} is installed and registers ids of this kind: `import {library}`, or '{library}:{name}'.")
    elif library:
        hints.append(f"Ids of this kind are registered by `import {library}`: {command}.")
    if importlib.util.find_spec("envpool") is not None:
        from vecenv.backends.envpool.task import task_ids

        with contextlib.suppress(ImportError, AttributeError, RuntimeError):  # such as a missing library
            if name.rpartition("/")[2] in task_ids():
                hints.append(f"EnvPool has {name.rpartition('/')[2]!r}: backend='envpool'.")
    return " ".join(hints)


_LIBRARIES = {
    # namespace -> the module that registers its ids, and the command that installs the module
    "ALE": ("ale_py", how_to_install("bench")),
    "MiniGrid": ("minigrid", "pip install minigrid"),
    "dm_control": ("shimmy", "pip install 'shimmy[dm-control]'"),
}


@functools.cache
def engine_options() -> tuple[str, ...]:
    parameters = inspect.signature(AsyncVectorEnv.__init__).parameters
    return tuple(name for name in parameters if name not in ("self", "env_fns"))


def check_env_options(spec: EnvSpec, env_kwargs: Mapping[str, Any], *, vector: bool = False) -> None:
    """Raise if the environment, or the vector environment, has no constructor, or one that lacks some of the options."""
    entry_point = spec.vector_entry_point if vector else spec.entry_point
    if entry_point is None and vector:
        raise gymnasium.error.Error(f"{spec.id!r} has no vector entry point, so backend 'native' has nothing to build")
    if entry_point is None:
        hint = "; backend='native' builds its library's vector environment" if spec.vector_entry_point is not None else ""
        raise gymnasium.error.Error(f"{spec.id!r} has no entry point, so there is no single environment to build{hint}")
    if vector:
        _check_names(env_kwargs, entry_point, _NATIVE_OPTIONS, f"{spec.id!r}, backend 'native',")
    else:
        extra = "render_mode", "max_episode_steps", "disable_env_checker"
        _check_names(env_kwargs, entry_point, extra, repr(spec.id), engine_options())


def _check_names(
    names: Iterable[str], entry_point: Any, extra: Sequence[str], owner: str, vector_options: Sequence[str] = ()
) -> None:
    """Raise for options that an entry point does not accept and that are not ``extra``, if its signature shows this."""
    parameters = entry_point_parameters(entry_point)
    if parameters is not None and not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        check_option_names(names, sorted({*parameters, *extra}), owner, vector_options=vector_options)


_NATIVE_OPTIONS = ("autoreset_mode", "copy")


def entry_point_parameters(entry_point: Any) -> Mapping[str, inspect.Parameter] | None:
    """Return the parameters of the function behind an entry point; ``None`` if it has no signature."""
    creator = load_env_creator(entry_point) if isinstance(entry_point, str) else entry_point
    try:
        # the function that a decorator returns may take more arguments than the one that it wraps
        return inspect.signature(creator, follow_wrapped=False).parameters
    except (TypeError, ValueError):
        return None


def is_vector_only(spec: EnvSpec) -> bool:
    """True if there is only a vector entry point, so that no single environment can be built."""
    return spec.entry_point is None and spec.vector_entry_point is not None


AnyVectorEnv: TypeAlias = VectorEnv[Any, Any, Any]
EnvFn: TypeAlias = Callable[..., gymnasium.Env[Any, Any]]
Wrappers: TypeAlias = Sequence[Callable[[Any], Any]]
OptionDict: TypeAlias = Mapping[str, Any] | None


@overload  # types cannot express that an id with only a vector entry point makes a NativeVectorEnv
def make_vec(
    id_or_env_fn: str | EnvSpec | EnvFn, num_envs: int = 1, backend: Literal["process", "serial"] | None = None, *,
    vector_kwargs: OptionDict = None, env_kwargs: OptionDict = None, wrappers: Wrappers | None = None, **options: Any,
) -> AsyncVectorEnv[Any, Any]: ...  # fmt: skip
@overload
def make_vec(
    id_or_env_fn: str | EnvSpec, num_envs: int, backend: Literal["envpool"], *,
    vector_kwargs: OptionDict = None, env_kwargs: OptionDict = None, **options: Any,
) -> EnvPoolVectorEnv: ...  # fmt: skip
@overload
def make_vec(
    id_or_env_fn: str | EnvSpec, num_envs: int, backend: Literal["brax", "playground"], *,
    vector_kwargs: OptionDict = None, env_kwargs: OptionDict = None, **options: Any,
) -> JaxVectorEnv: ...  # fmt: skip
@overload
def make_vec(
    id_or_env_fn: str | EnvSpec | EnvFn, num_envs: int, backend: Literal["ray"], *,
    vector_kwargs: OptionDict = None, env_kwargs: OptionDict = None, wrappers: Wrappers | None = None, **options: Any,
) -> RayVectorEnv[Any, Any]: ...  # fmt: skip
@overload
def make_vec(
    id_or_env_fn: str | EnvSpec, num_envs: int, backend: Literal["native"], *,
    vector_kwargs: OptionDict = None, env_kwargs: OptionDict = None, **options: Any,
) -> NativeVectorEnv: ...  # fmt: skip
@overload
def make_vec(
    id_or_env_fn: str | EnvSpec | EnvFn, num_envs: int = 1, backend: str | None = None, *,
    vector_kwargs: OptionDict = None, env_kwargs: OptionDict = None, wrappers: Wrappers | None = None, **options: Any,
) -> AnyVectorEnv: ...  # fmt: skip
def make_vec(
    id_or_env_fn: str | EnvSpec | EnvFn, num_envs: int = 1, backend: str | None = None, *,
    vector_kwargs: OptionDict = None, env_kwargs: OptionDict = None, wrappers: Wrappers | None = None, **options: Any,
) -> AnyVectorEnv:  # fmt: skip
    """Build a vector environment, from the id of its environments and the name of a backend.

    Args:
        id_or_env_fn: An id in Gymnasium's registry (``"CartPole-v1"``, ``"module:Env-v0"``) or an ``EnvSpec``; a function
            that builds one environment; or, for EnvPool, Brax and MuJoCo Playground, a name in that library.
        num_envs: Number of environments.
        backend: ``"process"``: worker processes, :class:`vecenv.AsyncVectorEnv`; as many as are fastest, unless
            ``num_workers`` or ``spare_workers`` is given. If JAX or torch is imported, ``context`` is ``"forkserver"`` by
            default, because the threads of these libraries do not survive a fork. The calling process steps some
            environments itself if that is more than a tenth faster. A crash of one of these environments ends that process:
            ``envs.plan`` and ``repr`` show them, and ``use_caller=False`` prevents this.
            ``"serial"``: the same class in the calling process alone.
            ``"envpool"``: EnvPool's C++ threads, :class:`vecenv.backends.EnvPoolVectorEnv`. ``"brax"`` and
            ``"playground"``: on the accelerator, :class:`vecenv.backends.JaxVectorEnv`.
            ``"ray"``: worker processes on the machines of a Ray cluster, :class:`vecenv.backends.RayVectorEnv`.
            ``"native"``: the library's own vector environment, :class:`vecenv.backends.NativeVectorEnv`; ``"process"`` uses
            it too for an id that has only a vector entry point.
            ``None``: ``"process"``, or for a name from :func:`register` the backend that was registered.
        vector_kwargs, env_kwargs: Options as dicts, for names that both the vector environment and its environments have:
            ``env_kwargs={"backend": "spring"}`` for Brax.
        wrappers: Functions that wrap each environment. For ``"process"``, ``"serial"`` and ``"ray"``.
        **options: Options of the vector environment, such as ``num_workers=2`` or ``step_timeout=60``; of the environment,
            such as ``render_mode=`` or ``max_episode_steps=``; and for ``"process"``, ``spare_workers=``, see
            :class:`vecenv.EpisodePrefetcher`.

    Returns:
        The vector environment, with its ``spec`` set, except for functions, Brax and Playground.

    Raises:
        gymnasium.error.UnregisteredEnv: There is no such environment. The message names similar ids.
        gymnasium.error.Error: The environment has no entry point of the kind that the backend needs.
        ValueError: There is no such backend (the message lists all), there are wrappers for a backend without Python
            environments, or ``num_envs`` is invalid.
        TypeError: There is no such option (the message lists those of the environment), the vector environment and the
            environment both have it, or an argument has a wrong type.
        ImportError: A library is missing. The message contains the command that installs it.
        NotImplementedError: The backend does not support ``spare_workers``, or the library not the ``autoreset_mode``.
    """
    registered = _find_registered(id_or_env_fn)
    if backend is None:
        backend = "process" if registered is None else registered.kwargs["backend"]
    entry = _find_backend(backend)
    spec = entry.spec(id_or_env_fn) if registered is None else registered
    vector_options, kwargs = _parse_kwargs("vector_kwargs", vector_kwargs), _parse_kwargs("env_kwargs", env_kwargs)
    _separate_options(options, vector_options, kwargs, entry.options(), _parameter_names(spec or id_or_env_fn))
    if {**options, **vector_options}.get("spare_workers") and backend not in ("process", "serial"):
        reason = "only worker processes on this machine can move between rows, those of backend='process'"
        raise_unsupported(f"backend {backend!r}", "have spare workers", reason)
    if isinstance(id_or_env_fn, EnvSpec):
        num_envs, vector_options, wrappers, kwargs = _merge_recorded(
            id_or_env_fn, num_envs, vector_options, wrappers, kwargs
        )
    check_option("num_envs", num_envs)
    if registered is not None:
        recorded = {**registered.kwargs["env_kwargs"], **kwargs}
        settings = kwargs if registered is id_or_env_fn else {**registered.kwargs, "env_kwargs": recorded}
        settings |= {"backend": backend, "options": {**settings["options"], **vector_options}}
        return _make_registered(int(num_envs), wrappers=wrappers, **settings)
    if backend == "process" and spec is not None and is_vector_only(spec):
        entry = _BACKENDS["native"]
    request = MakeRequest(id_or_env_fn, int(num_envs), vector_options, _parse_wrappers(wrappers), kwargs)
    envs = entry.build(request)
    if (result_spec := request.result_spec(entry.mode, envs.unwrapped.spec)) is not None:
        envs.unwrapped.spec = result_spec
    return envs


def _merge_recorded(
    spec: EnvSpec, num_envs: int, vector_kwargs: dict[str, Any], wrappers: Wrappers | None, kwargs: dict[str, Any]
) -> tuple[int, dict[str, Any], Wrappers | None, dict[str, Any]]:
    """Merge the arguments recorded in a vector environment's spec. As in Gymnasium, only options override recorded ones."""
    recorded = copy.deepcopy(spec.kwargs)
    recorded.pop("vectorization_mode", None)
    num_envs = recorded.pop("num_envs", num_envs)
    vector_kwargs = {**recorded.pop("vector_kwargs", {}), **vector_kwargs}
    return num_envs, vector_kwargs, recorded.pop("wrappers", wrappers), {**recorded, **kwargs}


def register(
    id: str, *, backend: str = "process", vector_kwargs: OptionDict = None, env_kwargs: OptionDict = None, **options: Any
) -> str:
    """Register a name under which ``gymnasium.make_vec`` builds an environment with vecenv.

    After ``vecenv.register("CartPole-v1")``, ``gymnasium.make_vec("vecenv/CartPole-v1", num_envs=8)`` is the same as
    ``vecenv.make_vec("CartPole-v1", num_envs=8)``.

    Args:
        id: An id for :func:`make_vec`. The new name omits a module and has a hyphen for a slash: ``"ale_py:ALE/Pong-v5"``
            becomes ``"vecenv/ALE-Pong-v5"``.
        backend: The backend; ``gymnasium.make_vec(..., backend=...)`` can override it.
        vector_kwargs, env_kwargs, **options: As for :func:`make_vec`; ``gymnasium.make_vec`` can override those of the
            environment.

    Returns:
        The new name. A second registration replaces the first.

    Raises:
        Exception: The errors of :func:`make_vec` about ids, backends, libraries and the names of options.
    """
    entry = _find_backend(backend)
    if not isinstance(id, str):
        raise TypeError(f"register needs an id, got {id!r}")
    found = entry.find(id)
    vector_options, env_options = _parse_kwargs("vector_kwargs", vector_kwargs), _parse_kwargs("env_kwargs", env_kwargs)
    _separate_options(options, vector_options, env_options, entry.options(), _parameter_names(found))
    if isinstance(found, EnvSpec):
        check_env_options(found, env_options, vector=backend == "native" or (backend == "process" and is_vector_only(found)))
    name = f"vecenv/{id.rpartition(':')[2].replace('/', '-')}"
    kwargs = {"id": id, "backend": backend, "options": vector_options, "env_kwargs": env_options}
    registry.pop(name, None)
    gymnasium.register(name, vector_entry_point=_REGISTERED, kwargs=kwargs)
    return name


_REGISTERED = f"{__name__}:_make_registered"


def _find_registered(id_or_env_fn: str | EnvSpec | EnvFn) -> EnvSpec | None:
    """Return the spec of a name from :func:`register`, or ``None`` for anything else."""
    spec = id_or_env_fn
    if isinstance(spec, str) and spec.rpartition(":")[2].startswith("vecenv/"):
        spec = find_spec(spec)
    return spec if isinstance(spec, EnvSpec) and spec.vector_entry_point == _REGISTERED else None


def _make_registered(
    num_envs: int, *, id: str, backend: str, options: dict[str, Any], env_kwargs: dict[str, Any],
    wrappers: Wrappers | None = None, **changed: Any,
) -> AnyVectorEnv:  # fmt: skip
    """Build a vector environment that :func:`register` registered. Called by Gymnasium and :func:`make_vec`."""
    env_options = {**env_kwargs, **changed}
    return make_vec(id, num_envs, backend, vector_kwargs=options, env_kwargs=env_options, wrappers=wrappers)


@dataclass(frozen=True)
class MakeRequest:
    """The arguments of a :func:`make_vec` call."""

    id_or_env_fn: str | EnvSpec | EnvFn
    num_envs: int
    vector_kwargs: dict[str, Any]
    wrappers: tuple[Callable[[Any], Any], ...]
    env_kwargs: dict[str, Any]

    def require_name(self, backend: str) -> str:
        """Return the environment's name, for backends that do not step Python environments.

        Raises:
            TypeError: The environment is given as a function.
            ValueError: There are wrappers.
        """
        if self.wrappers:
            raise ValueError(
                f"wrappers need Python environments, which backend {backend!r} does not have: wrap the result with wrappers "
                "from gymnasium.wrappers.vector"
            )
        if isinstance(self.id_or_env_fn, EnvSpec):
            return self.id_or_env_fn.id
        if not isinstance(self.id_or_env_fn, str):
            hint = "; vecenv.backends.JaxVectorEnv takes objects" if backend in ("brax", "playground") else ""
            raise TypeError(f"backend {backend!r} needs the name of an environment, got {self.id_or_env_fn!r}{hint}")
        return self.id_or_env_fn

    def result_spec(self, mode: str, spec: EnvSpec | None) -> EnvSpec | None:
        """Return the spec from which the vector environment can be built again; ``None`` if there is none."""
        if isinstance(self.id_or_env_fn, EnvSpec):
            spec = self.id_or_env_fn
        elif isinstance(self.id_or_env_fn, str) and mode in ("async", "sync"):
            spec = find_spec(self.id_or_env_fn)
        if spec is None:
            return None
        result = copy.deepcopy(spec)
        result.kwargs = {**({} if isinstance(self.id_or_env_fn, EnvSpec) else result.kwargs), **self.env_kwargs}
        if self.num_envs != 1:
            result.kwargs["num_envs"] = self.num_envs
        result.kwargs["vectorization_mode"] = mode
        if self.vector_kwargs:
            result.kwargs["vector_kwargs"] = self.vector_kwargs
        if self.wrappers:
            result.kwargs["wrappers"] = self.wrappers
        return result


@dataclass(frozen=True)
class Backend:
    """An entry in the table of backends.

    Attributes:
        build: Builds a vector environment.
        find: Name -> its spec in Gymnasium's registry, or any other value. Raises for an unknown name, except for Brax and
            Playground.
        needs: Required modules.
        extra: The extra that installs them: ``pip install 'vecenv[extra]'``.
        mode: Gymnasium's name for the kind of vectorization, recorded in the spec.
        options: Returns the names of the vector environment's options; empty if the backend separates the options itself.
    """

    build: Callable[[MakeRequest], AnyVectorEnv]
    find: Callable[[str], Any]
    needs: tuple[str, ...] = ()
    extra: str = ""
    mode: str = "vector_entry_point"
    options: Callable[[], Collection[str]] = tuple

    def spec(self, id_or_env_fn: str | EnvSpec | EnvFn) -> EnvSpec | None:
        """Return the spec in Gymnasium's registry, or ``None`` for functions and names of other libraries."""
        if isinstance(id_or_env_fn, EnvSpec):
            return id_or_env_fn
        return find_spec(id_or_env_fn) if isinstance(id_or_env_fn, str) and self.find is find_spec else None

    def missing(self) -> list[str]:
        """Return the required modules that are not installed."""
        return [name for name in self.needs if name not in sys.modules and importlib.util.find_spec(name) is None]


def _find_backend(backend: str) -> Backend:
    """Return the entry of a backend. Its libraries must be installed.

    Raises:
        ValueError: There is no such backend.
        ImportError: A library is missing.
    """
    entry = _BACKENDS.get(backend) if isinstance(backend, str) else None
    if entry is None:
        close = difflib.get_close_matches(str(backend), _BACKENDS, n=1)
        hint = f", did you mean {close[0]!r}?" if close else "."
        absent = {name: other.extra for name, other in _BACKENDS.items() if other.missing()}
        install = ""
        if absent:
            install = f". Not installed here: {_quote_names(absent)}; {how_to_install(','.join(absent.values()))}"
        raise ValueError(f"there is no backend {backend!r}{hint} Backends: {_quote_names(_BACKENDS)}{install}")
    if missing := entry.missing():
        raise ImportError(
            f"backend {backend!r} needs {' and '.join(missing)}, not installed here: {how_to_install(entry.extra)}"
        )
    return entry


def _quote_names(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def _parse_kwargs(name: str, kwargs: Any) -> dict[str, Any]:
    if kwargs is not None and not isinstance(kwargs, Mapping):
        owner = "the vector environment" if name == "vector_kwargs" else "the environment"
        raise TypeError(f"{name} must be a dict of options of {owner}, got {kwargs!r}")
    return dict(kwargs or {})


def _parameter_names(env: Any) -> frozenset[str]:
    """Return the parameter names of an environment's constructor, none for an id. ``env``: its spec, entry point or id."""
    entry_point = env.entry_point if isinstance(env, EnvSpec) else env
    if entry_point is None or (isinstance(env, str) and ":" not in env):
        return frozenset()
    parameters = entry_point_parameters(entry_point) or {}
    return frozenset(name for name, parameter in parameters.items() if parameter.kind is not parameter.VAR_KEYWORD)


def _separate_options(
    options: Mapping[str, Any], vector: dict[str, Any], env: dict[str, Any], vector_options: Collection[str],
    env_options: Collection[str],
) -> None:  # fmt: skip
    """Add each of ``options`` to ``vector``, the options of the vector environment, or else to ``env``.

    Raises:
        TypeError: Both have the option, or it is given twice.
    """
    for name, value in options.items():
        if name in vector_options and name in env_options:
            raise TypeError(
                f"both the vector environment and the environment have an option {name!r}: "
                f"write vector_kwargs={{{name!r}: ...}} or env_kwargs={{{name!r}: ...}}"
            )
        kwargs = vector if name in vector_options else env
        if name in kwargs:
            raise TypeError(f"make_vec got two values for {name!r}: {kwargs[name]!r} and {value!r}")
        kwargs[name] = value


def _parse_wrappers(wrappers: Wrappers | None) -> tuple[Callable[[Any], Any], ...]:
    if wrappers is not None and not (isinstance(wrappers, Sequence) and all(callable(wrapper) for wrapper in wrappers)):
        raise TypeError(f"wrappers must be a sequence of functions that wrap an environment, got {wrappers!r}")
    return tuple(wrappers or ())


# -- the backends ------------------------------------------------------------------------------------------------------


def _process_options() -> tuple[str, ...]:
    return (*engine_options(), "spare_workers")


def _build_process(request: MakeRequest) -> AnyVectorEnv:
    options = dict(request.vector_kwargs)
    options.setdefault("num_workers", None if options.get("spare_workers") else "auto")
    threads = any(name in sys.modules for name in ("jax", "torch"))  # their threads do not survive a fork
    if options.get("context") is None and threads and "forkserver" in multiprocessing.get_all_start_methods():
        options["context"] = "forkserver"
    return _build_engine(request, options)


def _build_serial(request: MakeRequest) -> AnyVectorEnv:
    if request.vector_kwargs.get("num_workers", 0) != 0:
        raise ValueError("backend 'serial' steps environments in this process; num_workers is for backend='process'")
    return _build_engine(request, {**request.vector_kwargs, "num_workers": 0})


def _build_engine(request: MakeRequest, options: dict[str, Any]) -> AnyVectorEnv:
    spares = options.pop("spare_workers", 0)
    check_option("spare_workers", spares)
    env_fns = [_make_env_fn(request)] * request.num_envs
    return EpisodePrefetcher.from_env_fns(env_fns, spares, **options) if spares else AsyncVectorEnv(env_fns, **options)


def _make_env_fn(request: MakeRequest) -> EnvFn:
    env_fn, kwargs = request.id_or_env_fn, request.env_kwargs
    if isinstance(env_fn, str | EnvSpec):
        spec = copy.deepcopy(find_spec(env_fn) if isinstance(env_fn, str) else env_fn)
        # Gymnasium's make() needs the arguments in its call, not in the spec
        kwargs = kwargs if isinstance(env_fn, EnvSpec) else {**spec.kwargs, **kwargs}
        check_env_options(spec, kwargs)
        spec.kwargs = {}
        env_fn = functools.partial(gymnasium.make, spec)
    if not callable(env_fn):
        raise TypeError(
            "make_vec needs an id, an EnvSpec or a function that builds an environment, got "
            + ("a list: write vecenv.AsyncVectorEnv(env_fns)" if isinstance(env_fn, list) else repr(env_fn))
        )
    if env_fn is request.id_or_env_fn:
        _check_names(kwargs, env_fn, (), getattr(env_fn, "__qualname__", repr(env_fn)), engine_options())
    build = functools.partial(_build_env, env_fn, request.wrappers, kwargs)
    build.__wrapped__ = env_fn  # type: ignore[attr-defined]  # `inspect.signature` then shows its `render_mode`
    return build


def _build_env(env_fn: EnvFn, wrappers: Wrappers, kwargs: dict[str, Any], **changed: Any) -> gymnasium.Env[Any, Any]:
    env = env_fn(**{**kwargs, **changed})
    for wrapper in wrappers:
        env = wrapper(env)
    return env


def _ray_options() -> tuple[str, ...]:
    from vecenv.backends import RayVectorEnv

    return (*inspect.signature(RayVectorEnv.__init__).parameters, *engine_options())


def _build_ray(request: MakeRequest) -> AnyVectorEnv:
    from vecenv.backends import RayVectorEnv

    return RayVectorEnv([_make_env_fn(request)] * request.num_envs, **request.vector_kwargs)


def _build_native(request: MakeRequest) -> AnyVectorEnv:
    from vecenv.backends import NativeVectorEnv

    request.require_name("native")
    spec = copy.deepcopy(find_spec(request.id_or_env_fn) if isinstance(request.id_or_env_fn, str) else request.id_or_env_fn)
    assert isinstance(spec, EnvSpec)
    if isinstance(request.id_or_env_fn, EnvSpec):
        spec.kwargs = {}  # make_vec() has already merged them
    options = {**request.env_kwargs, **request.vector_kwargs}
    check_env_options(spec, options, vector=True)
    copies = options.pop("copy", True)
    mode = options.pop("autoreset_mode", None)
    if mode is not None:
        mode = parse_autoreset_mode(mode)
        if "autoreset_mode" in (entry_point_parameters(spec.vector_entry_point) or ()):
            options["autoreset_mode"] = mode
    reason = f"{spec.id} has only a vector entry point" if is_vector_only(spec) else "backend='native' was requested"
    refusal = f"backend 'native': the library of {spec.id!r} does not offer {mode}"
    try:
        library = gymnasium.make_vec(spec, request.num_envs, "vector_entry_point", **options)
    except ValueError as error:
        if mode is not None and "autoreset_mode" in str(error):
            raise NotImplementedError(refusal) from error
        raise
    envs = NativeVectorEnv(library, copy=copies, reason=reason)
    if mode is not None and envs.autoreset_mode is not mode:
        envs.close()
        raise NotImplementedError(f"{refusal}, only {envs.autoreset_mode}")
    return envs


def _build_envpool(request: MakeRequest) -> AnyVectorEnv:
    from vecenv.backends import EnvPoolVectorEnv

    name = request.require_name("envpool")
    return EnvPoolVectorEnv(name, request.num_envs, **request.vector_kwargs, **request.env_kwargs)


def _find_envpool(name: str) -> str:
    from vecenv.backends.envpool.task import family_of

    return family_of(name)


def _build_jax(library: str, request: MakeRequest) -> AnyVectorEnv:
    from vecenv.backends.jax_native import JaxVectorEnv

    options = {**request.vector_kwargs, **request.env_kwargs}
    return JaxVectorEnv(request.require_name(library), request.num_envs, library=library, **options)


_BACKENDS: dict[str, Backend] = {
    "process": Backend(_build_process, find_spec, mode="async", options=_process_options),
    "serial": Backend(_build_serial, find_spec, mode="sync", options=_process_options),
    "envpool": Backend(_build_envpool, _find_envpool, ("envpool",), "envpool"),
    "brax": Backend(functools.partial(_build_jax, "brax"), str, ("jax", "brax"), "brax"),
    "playground": Backend(functools.partial(_build_jax, "playground"), str, ("jax", "mujoco_playground"), "playground"),
    "ray": Backend(_build_ray, find_spec, ("ray",), "ray", mode="async", options=_ray_options),
    "native": Backend(_build_native, find_spec),
}

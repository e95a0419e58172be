"""Functions that save the state of an environment and restore it, bit for bit.

An environment is a stack of layers: wrappers, and at the bottom the environment itself. Each layer is saved by the first way
that fits: a pair of methods that it offers, a codec for its class (:func:`register`), or a copy of its attributes. The
values of attributes are saved in the same way, at any depth: generators, simulators, emulators. Nothing is rebuilt from
constructor arguments, because that would be a silent reset. Shared objects that do not change (spaces, specs, models,
functions) stay in place.

:mod:`vecenv.state.proof` verifies with scratch environments that all this is exact.
"""

from __future__ import annotations

from vecenv.state.codecs import register

__all__ = ["register"]

"""Saves the state of an environment and restores it, bit for bit.

An environment is a stack of layers: wrappers, and at the bottom the environment itself. Each layer is saved by the first way
that fits: a pair of methods that it offers, a codec for its class (:func:`register`), or a copy of its attributes. The
values of attributes are saved in the same way, at any depth: generators, simulators, emulators. Nothing is rebuilt from
constructor arguments: that would be a reset without a notice. Shared objects that do not change (spaces, specs, models,
functions) stay where they are.

:mod:`vecenv.state.proof` tries on environments of its own whether all that is exact.
"""

from __future__ import annotations

from vecenv.state.codecs import register

__all__ = ["register"]

"""The state of an environment, taken out and put back, bit for bit.

An environment is a stack of layers: wrappers, and at the bottom the environment itself. Each layer is taken by the first
that fits: a pair of methods that it offers, a codec for its class (:func:`register`), or the copy of its attributes. What an
attribute holds is seen to in the same way, at any depth: generators, simulators, emulators. Nobody rebuilds anything from
constructor arguments: that is a reset that says nothing. What is shared and does not change (spaces, specs, models,
functions) stays where it is.

:mod:`vecenv.state.proof` tries on environments of its own whether all that was exact.
"""

from __future__ import annotations

from vecenv.state.registry import register

__all__ = ["register"]

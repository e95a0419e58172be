"""Shared memory: its layout (:mod:`vecenv.shm.layout`) and the block itself (:mod:`vecenv.shm.arena`)."""

from vecenv.shm.arena import Arena
from vecenv.shm.layout import INFO_BYTES, Batch, Layout, Tree, fixed_tree

__all__ = ["INFO_BYTES", "Arena", "Batch", "Layout", "Tree", "fixed_tree"]

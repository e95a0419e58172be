"""Shared memory: its layout (:mod:`vecenv.shm.layout`), its allocation (:mod:`vecenv.shm.arena`), and batches in it that the
program may hold (:mod:`vecenv.shm.lending`).
"""

from vecenv.shm.arena import Arena
from vecenv.shm.layout import INFO_BYTES, Layout, SharedArrays, Tree, fixed_tree

__all__ = ["INFO_BYTES", "Arena", "Layout", "SharedArrays", "Tree", "fixed_tree"]

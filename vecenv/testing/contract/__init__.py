"""The contract of a Gymnasium vector environment, as a test class that others inherit.

The tests know nothing of how the environments are run: not of processes, threads, devices or hosts. They
construct a vector environment through one factory, use only what :class:`gymnasium.vector.VectorEnv`
promises, and compare what comes back with what it must be. So the same class checks the process engine, a
simulator that steps on an accelerator, and a cluster.

Example::

    class TestMyVectorEnv(VectorEnvContract):
        autoreset_modes = (AutoresetMode.NEXT_STEP,)

        def make(self, num_envs=3, autoreset_mode=AutoresetMode.NEXT_STEP, **kwargs):
            return MyVectorEnv("Pong", num_envs)

What a backend cannot do is said in a class attribute, and the tests of it are skipped with that reason;
nothing is passed over in silence.
"""

from __future__ import annotations

from vecenv.trajectories import assert_identical, assert_same_trajectory
from vecenv.testing.contract.autoreset import AutoresetContract
from vecenv.testing.contract.interface import InterfaceContract
from vecenv.testing.contract.refusals import RefusalContract
from vecenv.testing.contract.seeding import SeedingContract
from vecenv.testing.contract.wrappers import WrapperContract

__all__ = ["VectorEnvContract", "assert_identical", "assert_same_trajectory"]


class VectorEnvContract(InterfaceContract, SeedingContract, AutoresetContract, RefusalContract, WrapperContract):
    """Everything that a Gymnasium vector environment owes its users, one base class a subject.

    Inherit, override :meth:`make`, and say in the class attributes what the backend cannot do.
    """

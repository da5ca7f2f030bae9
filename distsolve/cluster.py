"""MPI as a cluster of ``jax.distributed``: importing this module registers it.

JAX then asks mpi4py first wherever a program calls ``jax.distributed.initialize()``. A program that
calls `distsolve.initialize` does not need it.
"""

from __future__ import annotations

from distsolve import mpi
from distsolve.initialize import select_device
from distsolve.mpi._jaxcompat import ClusterEnv, ask_first
from distsolve.rendezvous import assemble, meet


def _port(text: str | None) -> int:
    if not text:
        return 0
    if not text.isdecimal() or int(text) > 65535:
        raise ValueError(
            f"JAX_COORDINATOR_PORT is {text!r}; expected a port from 1 to 65535, or 0 or nothing "
            "for one that is free."
        )
    return int(text)


@ask_first
class MPICluster(ClusterEnv):
    """The world of mpi4py; its methods are what JAX calls, each on every rank."""

    name = "distsolve"

    @classmethod
    def is_env_present(cls) -> bool:
        """Whoever imports this module has decided."""
        return True

    @classmethod
    def get_coordinator_address(
        cls, timeout_secs: int | None, override_coordinator_port: str | None
    ) -> str:
        """Give where all ranks can reach rank 0; collective at the first call."""
        port = _port(override_coordinator_port)
        timeout = timeout_secs or 300
        assemble(timeout=timeout)
        return meet(port=port, timeout=timeout)

    @classmethod
    def get_process_count(cls) -> int:
        """Give the size of the world."""
        return mpi.size()

    @classmethod
    def get_process_id(cls) -> int:
        """Give the rank in the world."""
        return mpi.rank()

    @classmethod
    def get_local_process_id(cls) -> int | None:
        """Give the GPU of this rank."""
        return select_device()

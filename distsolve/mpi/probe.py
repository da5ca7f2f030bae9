"""Whether MPI takes device pointers: a program of its own, because one that does not may crash.

Exits with 0 where a message and a sum came out right, in memory from XLA's own allocator and of a
size beyond MPI's short-message roads. The sum is a local one: a world of one rank reduces nothing.
"""

from __future__ import annotations

import resource
import sys

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

ELEMENTS = 1 << 20  # 4 MiB of float32


def _memory(x: jax.Array) -> list:
    return [MPI.buffer.fromaddress(x.unsafe_buffer_pointer(), x.nbytes), MPI.FLOAT]


def main() -> int:
    """Return the exit code."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is an answer, and leaves no file
    if jax.default_backend() == "cpu":
        print("JAX has no GPU here")
        return 1
    sent = jax.device_put(np.arange(1, ELEMENTS + 1, dtype=np.float32))
    received = jax.device_put(np.zeros(ELEMENTS, np.float32))
    jax.block_until_ready((sent, received))
    MPI.COMM_SELF.Sendrecv(_memory(sent), dest=0, recvbuf=_memory(received), source=0)
    MPI.SUM.Reduce_local(_memory(sent), _memory(received))
    # A copy on the device: JAX may have kept the old values of `received` on the host.
    right = np.array_equal(np.asarray(jnp.copy(received)), 2 * np.asarray(sent))
    if not right:
        print("the data came out wrong")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())

"""Whether MPI takes device pointers: a program of its own, because one that does not may crash.

Exits with 0 where a message and a reduction in place came out right, in memory from XLA's own
allocator and of a size beyond MPI's short-message roads.
"""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

ELEMENTS = 1 << 20  # 4 MiB of float32


def _memory(x: jax.Array) -> MPI.buffer:
    return MPI.buffer.fromaddress(x.unsafe_buffer_pointer(), x.nbytes)


def main() -> int:
    """Return the exit code."""
    sent = jnp.arange(ELEMENTS, dtype=jnp.float32) + 1
    received = jnp.zeros(ELEMENTS, jnp.float32)
    jax.block_until_ready((sent, received))
    comm = MPI.COMM_SELF
    comm.Sendrecv(
        [_memory(sent), MPI.FLOAT], dest=0, recvbuf=[_memory(received), MPI.FLOAT], source=0
    )
    comm.Allreduce(MPI.IN_PLACE, [_memory(received), MPI.FLOAT])
    # A copy: JAX may know the old values of `received`.
    right = np.array_equal(
        np.asarray(jnp.copy(received)), np.arange(ELEMENTS, dtype=np.float32) + 1
    )
    if not right:
        print("the data came out wrong")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())

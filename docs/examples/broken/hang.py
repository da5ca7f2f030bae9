"""A program that hangs: rank 0 makes a reduction that the others do not make.

DISTSOLVE_TIMEOUT=5 mpiexec -n 2 python hang.py
"""

import jax
import jax.numpy as jnp

from distsolve import mpi

rank = mpi.rank()


@jax.jit
def gradient(p):
    return mpi.allreduce(p * (rank + 1))


@jax.jit
def energy(p):
    return mpi.allreduce(jnp.sum(p**2))


p = jnp.ones(1000)
for _ in range(10):
    p = p - 0.1 * gradient(p)
if rank == 0:  # wrong: only the print belongs here
    print(f"energy {energy(p)}")
mpi.barrier()

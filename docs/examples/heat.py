"""The 1-d heat equation with the rod cut into pieces, checked against the whole rod.

    mpiexec -n 2 python heat.py

u' = u'' with u = 0 at both ends, by explicit steps. A step needs one cell of each neighbour: two
`sendrecv`. At the ends the neighbour is ``PROC_NULL``, and the template, 0, comes back.
With mpi4jax the ends would need a ``jnp.where``: there nothing is written for ``PROC_NULL``.
"""

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

import distsolve.mpi as mpi4jax

comm = MPI.COMM_WORLD
rank, size = comm.Get_rank(), comm.Get_size()
left = rank - 1 if rank > 0 else MPI.PROC_NULL
right = rank + 1 if rank < size - 1 else MPI.PROC_NULL

STEPS, RATIO = 200, 0.25  # RATIO = dt / dx**2
counts = [20 + 5 * r for r in range(size)]  # pieces of different lengths
start = sum(counts[:rank])
whole = np.sin(np.linspace(0, 7, sum(counts))).astype(np.float32)


def halo(u):
    """Return the cell before the first and the cell after the last of this rank's."""
    edge = jnp.zeros((), u.dtype)
    before = mpi4jax.sendrecv(u[-1], edge, source=left, dest=right, comm=comm)
    after = mpi4jax.sendrecv(u[0], edge, source=right, dest=left, comm=comm)
    return before, after


@jax.jit
def evolve(u):
    """Take all steps in one compiled loop."""

    def step(_, u):
        before, after = halo(u)
        padded = jnp.concatenate([before[None], u, after[None]])
        return u + RATIO * (padded[:-2] - 2 * u + padded[2:])

    return jax.lax.fori_loop(0, STEPS, step, u)


def evolve_serially(u):
    """Do the same with NumPy on the whole rod."""
    for _ in range(STEPS):
        padded = np.pad(u, 1)
        u = u + np.float32(RATIO) * (padded[:-2] - 2 * u + padded[2:])
    return u


mine = np.asarray(evolve(jnp.asarray(whole[start : start + counts[rank]])))
expected = evolve_serially(whole)[start : start + counts[rank]]
np.testing.assert_allclose(mine, expected, atol=1e-6)
heat = comm.allreduce(float(mine.sum()))
if rank == 0:
    print(f"{size} ranks, {sum(counts)} cells: agrees with the serial result, heat {heat:.4f}")

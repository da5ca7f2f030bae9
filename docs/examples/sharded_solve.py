"""From a SciPy solve to one whose vectors are in pieces: by a matrix, and by a function.

    mpiexec -n 2 python sharded_solve.py

-u'' + u = x on N points of the interval (0, 1) with u = 0 at both ends. Every rank owns some of the
points, in order; ranks may own different numbers of them.
"""

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
import scipy.sparse.linalg

import distsolve
from distsolve import mpi

jax.config.update("jax_enable_x64", True)

# One process: the matrix, and SciPy.
N = 60
h = 1 / (N + 1)
shape = scipy.sparse.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(N, N))
matrix = (shape / h**2 + scipy.sparse.eye_array(N)).tocsr()
points = h * np.arange(1, N + 1)
expected, _ = scipy.sparse.linalg.cg(matrix, points, rtol=1e-10)

# The same matrix with its rows on all ranks.
A = distsolve.DistributedCSR.from_whole(matrix)
mine = slice(A.rows.start, A.rows.stop)
b = jnp.asarray(points[mine])
u, info = distsolve.cg(A, b, tol=1e-10, space=distsolve.Sharded())
info.raise_if_failed()
np.testing.assert_allclose(u, expected[mine], rtol=1e-6)

# The same without a matrix: one number from each neighbour.
rank, size = mpi.rank(), mpi.size()
left = rank - 1 if rank > 0 else mpi.PROC_NULL
right = rank + 1 if rank < size - 1 else mpi.PROC_NULL


def stencil(u):
    """Return this rank's piece of the product; beyond both ends u is 0."""
    edge = jnp.zeros((), u.dtype)
    before = mpi.sendrecv(u[-1], edge, source=left, dest=right)
    after = mpi.sendrecv(u[0], edge, source=right, dest=left)
    return (2 * u - jnp.append(before, u[:-1]) - jnp.append(u[1:], after)) / h**2 + u


u, info = distsolve.cg(stencil, b, tol=1e-10, space=distsolve.Sharded())
info.raise_if_failed()
np.testing.assert_allclose(u, expected[mine], rtol=1e-6)

# What the whole solution is needed for can be computed in pieces, too.
largest = mpi.allreduce(jnp.max(u), mpi.MAX)
length = distsolve.norm(u, distsolve.Sharded())
assert np.isclose(largest, expected.max())
assert np.isclose(length, np.linalg.norm(expected))
everything = mpi.allgatherv(u, A.counts)  # all of it on every rank, where that fits
np.testing.assert_allclose(everything, expected, rtol=1e-6)
if rank == 0:
    print(f"{size} ranks, {A.counts} points: {info.message}")

# What goes wrong where the space is left out: each piece is taken for a whole vector.
_, wrong = distsolve.cg(stencil, b, tol=1e-10)
if rank == 0:
    print(f"without space=: {wrong.message}")
assert size == 1 or not np.isclose(float(wrong.rhs_norm), float(info.rhs_norm))

"""Least squares by gradient descent; every rank holds its own rows.

mpiexec -n 2 python regression.py
"""

import jax
import jax.numpy as jnp

import distsolve.mpi as mpi

n = 40 + 10 * mpi.rank()  # ranks hold different numbers of rows
truth = jnp.asarray([2.0, -1.0, 0.5])
x = jax.random.normal(jax.random.key(mpi.rank()), (n, 3), truth.dtype)
y = x @ truth


def loss(w):
    """Mean squared error over the rows of all ranks; one message for both sums."""
    error = x @ mpi.pvary(w) - y
    total, count = mpi.allreduce((jnp.sum(error**2), jnp.asarray(n, w.dtype)))
    return total / count


@jax.jit
def descend(w):
    """Take 100 steps, all ranks the same."""
    return jax.lax.fori_loop(0, 100, lambda _, w: w - 0.1 * jax.grad(loss)(w), w)


w = descend(jnp.zeros_like(truth))
if mpi.rank() == 0:
    print(
        f"{mpi.size()} ranks: w = {w}, MPI_Allreduce was called "
        f"{mpi.call_count()['MPI_Allreduce']} times"
    )
assert jnp.allclose(w, truth, atol=1e-4)

"""A user's first job: a reduction inside jit, and a distributed solve, from an installed wheel."""

import faulthandler
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

import distsolve
import distsolve.mpi as mpi

CHECKOUT = Path(sys.argv[1]).resolve()


def reduction():
    """Each rank holds its own values."""
    x = jnp.arange(3.0) + 10 * mpi.rank()
    total = jax.jit(lambda x: 2 * mpi.allreduce(x, mpi.SUM))(x)
    size = mpi.size()
    tens = 10 * sum(range(size))
    assert jnp.array_equal(total, 2 * (size * jnp.arange(3.0) + tens)), total


def solve():
    """The matrix is a sum over ranks; the solution is known."""
    share = jnp.asarray([1.0, 2.0, 3.0]) * (mpi.rank() + 1)
    diagonal = jnp.asarray([1.0, 2.0, 3.0]) * sum(range(1, mpi.size() + 1))
    x, info = distsolve.cg(lambda v: mpi.allreduce(share * v, mpi.SUM), diagonal, tol=1e-6)
    assert bool(info.converged), info
    assert jnp.allclose(x, 1.0, rtol=1e-5), x


faulthandler.dump_traceback_later(90, exit=True)
assert CHECKOUT not in Path(distsolve.__file__).resolve().parents, distsolve.__file__
reduction()
solve()
if mpi.rank() == 0:
    print(f"distsolve {distsolve.__version__}: allreduce in jit and cg on {mpi.size()} ranks")

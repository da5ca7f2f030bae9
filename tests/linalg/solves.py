"""What tests of several solvers share: comparisons over ranks, and systems spread over them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from spmd import agree, assert_allclose, ranks

from distsolve import mpi
from distsolve.linalg import Replicated, Sharded


def check(result, x, reason, iterations=None, rtol=1e-12, atol=0.0):
    """Compare a solve with what it should give, on all ranks."""
    found, info = result
    agree(info.reason_name == reason, f"{info.reason_name}: {info.message}")
    agree(bool(info.converged) == (reason == "converged"), info.message)
    if iterations is not None:
        agree(int(info.iterations) == iterations, info.message)
    assert_allclose(found, x, rtol=rtol, atol=atol)


def same_everywhere(info):
    """Assert that the report is the same on all ranks."""
    from mpi4py import MPI

    mine = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(info)]
    agree(mine == MPI.COMM_WORLD.bcast(mine), f"{info}")


def calls(function, *args):
    """Return the result of a call, and how many MPI calls this rank made for it, by name."""
    jax.effects_barrier()  # nothing that is under way counts
    before = mpi.call_count()
    result = jax.block_until_ready(function(*args))
    made = {name: n - before.get(name, 0) for name, n in mpi.call_count().items()}
    return result, {name: n for name, n in made.items() if n}


def reductions(made):
    """Return how many of these calls reduce."""
    return made.get("MPI_Allreduce", 0) + made.get("MPI_Iallreduce", 0)


def counted(function, *args):
    """Return the result of a call, and the number of its reductions on this rank."""
    result, made = calls(function, *args)
    return result, reductions(made)


def sent(function, *args):
    """Return the result of a call, and the number of its MPI calls of any kind."""
    result, made = calls(function, *args)
    return result, sum(made.values())


def messages(function, *args):
    """Return the result of a call after the first, and the number of its MPI calls of any kind."""
    jax.block_until_ready(function(*args))
    return sent(function, *args)


def several(count=1):
    """Return the count where ranks are several; one rank alone sends nothing."""
    return count if ranks().size > 1 else 0


def dense(M, n, dtype=np.float64):
    """Return the matrix of an operator on replicated vectors, or on one rank's piece."""
    return np.asarray(jax.jit(jax.vmap(M, in_axes=1, out_axes=1))(jnp.eye(n, dtype=dtype)))


class Layout(NamedTuple):
    """A space, and the rows that this rank holds in it."""

    space: Any
    mine: slice


def layout(name, n):
    """Return where n rows live: "replicated", or in "uneven" pieces.

    From three ranks on one has nothing: the last, or of a layout with a "gap" the one after rank 0.
    """
    rank, size = ranks().rank, ranks().size
    if name == "replicated":
        return Layout(Replicated(), slice(0, n))
    weights = np.arange(size) + 1.0
    if size > 2:
        weights[1 if name == "gap" else -1] = 0
    bounds = [0, *np.round(n * np.cumsum(weights) / weights.sum()).astype(int)]
    return Layout(Sharded(), slice(bounds[rank], bounds[rank + 1]))

"""What tests of several solvers share: comparisons over ranks, and systems spread over them."""

from typing import Any, NamedTuple

import jax
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


def counted(function, *args):
    """Return the result of a call, and the number of its reductions on this rank."""

    def reductions():
        calls = mpi.call_count()
        return calls.get("MPI_Allreduce", 0) + calls.get("MPI_Iallreduce", 0)

    jax.effects_barrier()  # nothing that is under way counts
    before = reductions()
    result = jax.block_until_ready(function(*args))
    return result, reductions() - before


def messages(function, *args):
    """Return the result of a call after the first, and the number of its MPI calls of any kind."""
    jax.block_until_ready(function(*args))
    jax.effects_barrier()  # nothing that is under way counts
    before = sum(mpi.call_count().values())
    result = jax.block_until_ready(function(*args))
    return result, sum(mpi.call_count().values()) - before


class Layout(NamedTuple):
    """A space, and the rows that this rank holds in it."""

    space: Any
    mine: slice


def layout(name, n):
    """Return where n rows live: "replicated", or in "uneven" pieces, at three ranks one empty."""
    rank, size = ranks().rank, ranks().size
    if name == "replicated":
        return Layout(Replicated(), slice(0, n))
    holders = size - 1 if size > 2 else size
    weights = np.arange(holders) + 1.0
    ends = np.round(n * np.cumsum(weights) / weights.sum()).astype(int)
    bounds = [0, *ends, *[n] * (size - holders)]
    return Layout(Sharded(), slice(bounds[rank], bounds[rank + 1]))

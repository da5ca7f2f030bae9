"""What tests of several solvers share: comparisons over ranks, and systems spread over them."""

from typing import Any, NamedTuple

import jax
import numpy as np
from spmd import agree, assert_allclose, ranks

from distsolve.linalg import Replicated, Sharded


def check(result, x, reason, rtol=1e-12, atol=0.0):
    """Compare a solve with what it should give, on all ranks."""
    found, info = result
    agree(info.reason_name == reason, f"{info.reason_name}: {info.message}")
    agree(bool(info.converged) == (reason == "converged"), info.message)
    assert_allclose(found, x, rtol=rtol, atol=atol)


def same_everywhere(info):
    """Assert that the report is the same on all ranks."""
    from mpi4py import MPI

    mine = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(info)]
    agree(mine == MPI.COMM_WORLD.bcast(mine), f"{info}")


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

"""What every rank must get, computed on one rank in NumPy from the operands of all ranks.

Operands are small whole numbers that differ from rank to rank: sums and products of a few of them
are exact in every order, so results are compared exactly at any number of ranks.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from spmd import ranks

from distsolve import mpi

FOLDS = {
    mpi.SUM: np.add,
    mpi.PROD: np.multiply,
    mpi.MIN: np.minimum,
    mpi.MAX: np.maximum,
    mpi.LAND: np.logical_and,
    mpi.LOR: np.logical_or,
    mpi.LXOR: np.logical_xor,
    mpi.BAND: np.bitwise_and,
    mpi.BOR: np.bitwise_or,
    mpi.BXOR: np.bitwise_xor,
}
LOGICAL = (mpi.LAND, mpi.LOR, mpi.LXOR)
BITWISE = (mpi.BAND, mpi.BOR, mpi.BXOR)
ARITHMETIC = (mpi.SUM, mpi.PROD, mpi.MIN, mpi.MAX)

IN_CHUNKS = ("allreduce", "reduce", "scan", "exscan", "reduce_scatter")
REDUCTIONS = (*IN_CHUNKS, "iallreduce")
WITH_ROOT = ("reduce", "bcast", "gather", "scatter", "gatherv", "scatterv")
WITH_COUNTS = ("gatherv", "scatterv", "allgatherv")
ROW = (2, 3)


def fitting(dtype: Any) -> tuple[mpi.Op, ...]:
    """The operations that are defined for a dtype."""
    if dtype == np.bool_:
        return LOGICAL
    if jnp.issubdtype(dtype, jnp.integer):
        return ARITHMETIC + LOGICAL + BITWISE
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return (mpi.SUM, mpi.PROD)
    return ARITHMETIC


def members(comm: Any) -> list[int]:
    """World ranks of a communicator, in its own order."""
    return comm.allgather(ranks().rank)


def data(world_rank: int, shape: Any, dtype: Any = np.float64, seed: int = 0) -> np.ndarray:
    """The operand of a rank."""
    random = np.random.default_rng([seed, world_rank])
    dtype = np.dtype(dtype)
    if dtype == np.bool_:
        return random.random(shape) < 0.6
    low = 0 if jnp.issubdtype(dtype, jnp.unsignedinteger) else -4
    values = random.integers(low, 6, shape)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        values = values + 1j * random.integers(low, 6, shape)
    return np.asarray(values).astype(dtype)


def fold(op: mpi.Op, xs: list) -> np.ndarray:
    """Combine arrays in the order of ranks; 16-bit floats in float32, rounded once.

    MPI does not touch a single operand: LAND of one 5 is 5.
    """
    if len(xs) == 1:
        return xs[0]
    dtype = xs[0].dtype
    narrow = dtype.itemsize == 2 and jnp.issubdtype(dtype, jnp.floating)
    total = xs[0].astype(np.float32) if narrow else xs[0]
    if op in LOGICAL:
        total = total.astype(bool)
    for x in xs[1:]:
        total = FOLDS[op](total, x.astype(np.float32) if narrow else x)
    return total.astype(dtype)


def identity(op: mpi.Op, like: np.ndarray) -> np.ndarray:
    """What leaves the other operand of an operation as it is."""
    dtype = like.dtype
    if op in (mpi.MIN, mpi.MAX):
        if jnp.issubdtype(dtype, jnp.integer):
            info = jnp.iinfo(dtype)
            value = info.max if op == mpi.MIN else info.min
        else:
            value = np.inf if op == mpi.MIN else -np.inf
    elif op == mpi.BAND:
        return ~np.zeros_like(like)
    else:
        value = 1 if op in (mpi.PROD, mpi.LAND) else 0
    return np.full_like(like, value)


def _at_root(xs: list, root: int, value: np.ndarray) -> list:
    return [value if r == root else x for r, x in enumerate(xs)]


def _split(x: np.ndarray, counts: Any) -> list:
    return np.split(x, np.cumsum(counts)[:-1])


def _alltoallv(xs: list, table: np.ndarray) -> list:
    sent = [_split(x, row) for x, row in zip(xs, table, strict=True)]
    return [np.concatenate(received) for received in zip(*sent, strict=True)]


SERIAL: dict[str, Callable[..., list]] = {
    "allreduce": lambda xs, op: [fold(op, xs)] * len(xs),
    "iallreduce": lambda xs, op: [fold(op, xs)] * len(xs),
    "reduce": lambda xs, op, root: _at_root(xs, root, fold(op, xs)),
    "scan": lambda xs, op: [fold(op, xs[: r + 1]) for r in range(len(xs))],
    "exscan": lambda xs, op: [identity(op, xs[0])] + [fold(op, xs[:r]) for r in range(1, len(xs))],
    "reduce_scatter": lambda xs, op: list(fold(op, xs)),
    "bcast": lambda xs, root: [xs[root]] * len(xs),
    "gather": lambda xs, root: _at_root(xs, root, np.stack(xs)),
    "scatter": lambda xs, root: list(xs[root]),
    "allgather": lambda xs: [np.stack(xs)] * len(xs),
    "alltoall": lambda xs: list(np.stack(xs, axis=1)),
    "gatherv": lambda xs, counts, root: _at_root(xs, root, np.concatenate(xs)),
    "scatterv": lambda xs, counts, root: _split(xs[root], counts),
    "allgatherv": lambda xs, counts: [np.concatenate(xs)] * len(xs),
    "alltoallv": _alltoallv,
    "sendrecv": lambda xs, shift: [xs[(r - shift) % len(xs)] for r in range(len(xs))],
}


def difference(got: Any, want: np.ndarray) -> str | None:
    """Say how a result differs from the oracle's on this rank; None if it does not."""
    found = np.asarray(got)
    if (found.dtype, found.shape) != (want.dtype, want.shape):
        return f"{found.dtype}{found.shape}, expected {want.dtype}{want.shape}"
    if np.all(found == want):
        return None
    return f"{found.tolist()} instead of {want.tolist()}"


def compare(name: str, results: list, cases: list, operands: list, rank: int) -> list[str]:
    """Compare the results of several argument lists; return the differences on this rank.

    Halves of unequal size have unequal numbers of cases, so ranks agree once, on the whole list.
    """
    found = [
        (f"{name}{arguments}", difference(y, SERIAL[name](xs, *arguments)[rank]))
        for y, arguments, xs in zip(results, cases, operands, strict=True)
    ]
    return [f"{call}: {text}" for call, text in found if text is not None]


def uneven(size: int, start: int) -> tuple[int, ...]:
    """Numbers of rows that differ from rank to rank, zero among them."""
    return tuple((start + 3 * r) % 4 for r in range(size))


def variants(name: str, size: int, ops: Any = (mpi.SUM,)) -> list[tuple]:
    """All argument lists of a primitive: operations, counts, shifts, and every root."""
    if name == "alltoallv":
        i, j = np.indices((size, size))
        return [((1 + i + 2 * j) % 4,)]
    if name == "sendrecv":
        return [(shift,) for shift in range(size)]
    found: list[tuple] = [()]
    if name in REDUCTIONS:
        found = [(op,) for op in ops]
    if name in WITH_COUNTS:
        found = [(uneven(size, start),) for start in (1, 2)]
    if name in WITH_ROOT:
        found = [(*more, root) for more in found for root in range(size)]
    return found


def shape(name: str, rank: int, size: int, arguments: tuple, row: tuple = ROW) -> tuple:
    """The shape of a rank's operand."""
    if name in ("reduce_scatter", "alltoall"):
        return (size, *row)
    if name == "scatter":
        return (size, *row) if rank == arguments[0] else row
    if name == "scatterv":
        return (sum(arguments[0]) if rank == arguments[1] else 1, *row)
    if name in WITH_COUNTS:
        return (arguments[0][rank], *row)
    if name == "alltoallv":
        return (int(sum(arguments[0][rank])), *row)
    return row


def operands(
    name: str, world: list[int], arguments: tuple, dtype: Any = np.float64, row: tuple = ROW
) -> list[np.ndarray]:
    """The operands of all ranks of a communicator."""
    size = len(world)
    return [data(who, shape(name, r, size, arguments, row), dtype) for r, who in enumerate(world)]


def invoke(name: str, x: Any, comm: Any, arguments: tuple, **keywords: Any) -> Any:
    """Call the public function, looked up now: tests of mutants replace it."""
    function, rank, size = getattr(mpi, name), comm.rank, comm.size
    if name == "alltoallv":
        (table,) = arguments
        return function(x, table[rank], table[:, rank], comm=comm, **keywords)
    if name == "sendrecv":
        (shift,) = arguments
        template = jax.tree.map(jnp.zeros_like, x)
        source, dest = (rank - shift) % size, (rank + shift) % size
        return function(x, template, source, dest, comm=comm, **keywords)
    if name == "iallreduce":
        return mpi.wait(function(x, *arguments, comm=comm, **keywords))
    return function(x, *arguments, comm=comm, **keywords)

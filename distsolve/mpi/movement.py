"""Data movement between all ranks: public functions that check their arguments and bind a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from distsolve.mpi import table
from distsolve.mpi.arguments import as_counts, check_leading, check_root
from distsolve.mpi.carrier import encode
from distsolve.mpi.comm import resolve
from distsolve.mpi.primitive import MPIPrimitive

_LEADING = {
    "gatherv": "this rank's entry of `counts`",
    "allgatherv": "this rank's entry of `counts`",
    "scatterv": "the sum of `counts`",
    "alltoallv": "the sum of `send_counts`",
}


def _movement(row: MPIPrimitive, x: Any, leading: int | None, **params: Any) -> Any:
    """Apply a one-operand data movement to each leaf."""
    call = row.spec.name

    def one(leaf: Any) -> Any:
        array, decode = encode(leaf, call)
        if leading is not None:
            check_leading(array, leading, call, _LEADING.get(call, "one entry per rank"))
        return decode(row(array, **params)[0])

    return jax.tree.map(one, x)


def gather(x: Any, root: int = 0, *, comm: Any = None) -> Any:
    """Stack every rank's `x` at the root.

    Parameters
    ----------
    x : pytree of arrays (*shape), the same shapes on every rank
    root : rank, known while tracing
    comm : as for `allreduce`.

    Returns
    -------
    pytree of arrays (size, *shape) at the root; `x` back elsewhere.

    Communication
    -------------
    One MPI_Gather per leaf.
    """
    record = resolve(comm)
    root = check_root(root, record, "gather")
    return _movement(table.gather, x, None, comm=record.id, root=root)


def scatter(x: Any, root: int = 0, *, comm: Any = None) -> Any:
    """Give rank r the root's ``x[r]``.

    Parameters
    ----------
    x : pytree of arrays
        ``(size, *shape)`` at the root; elsewhere a template ``(*shape)`` whose values do not
        matter.
    root, comm : as for `gather`.

    Returns
    -------
    pytree of arrays (*shape), sharded: each rank its own.

    Communication
    -------------
    One MPI_Scatter per leaf.
    """
    record = resolve(comm)
    root = check_root(root, record, "scatter")
    leading = record.size if record.rank == root else None
    return _movement(table.scatter, x, leading, comm=record.id, root=root)


def allgather(x: Any, *, comm: Any = None) -> Any:
    """Stack every rank's `x` on all ranks.

    Parameters
    ----------
    x : pytree of arrays (*shape), the same shapes on every rank
    comm : as for `allreduce`.

    Returns
    -------
    pytree of arrays (size, *shape), replicated.

    Communication
    -------------
    One MPI_Allgather per leaf.
    """
    return _movement(table.allgather, x, None, comm=resolve(comm).id)


def alltoall(x: Any, *, comm: Any = None) -> Any:
    """Give rank r this rank's ``x[r]``: row k of the result came from rank k.

    Parameters
    ----------
    x : pytree of arrays (size, *shape), sharded
    comm : as for `allreduce`.

    Returns
    -------
    pytree like `x`, sharded.

    Communication
    -------------
    One MPI_Alltoall per leaf.
    """
    record = resolve(comm)
    return _movement(table.alltoall, x, record.size, comm=record.id)


def gatherv(x: Any, counts: Sequence[int], root: int = 0, *, comm: Any = None) -> Any:
    """Concatenate every rank's rows at the root; the others get `x` back.

    Parameters
    ----------
    x : pytree of arrays (counts[rank], *shape)
    counts : rows of every rank, the same on all ranks, known while tracing
    root, comm : as for `gather`.

    Returns
    -------
    pytree of arrays (sum(counts), *shape) at the root; `x` back elsewhere.

    Communication
    -------------
    One MPI_Gatherv per leaf.
    """
    record, call = resolve(comm), "gatherv"
    counts = as_counts(counts, record, "counts", call)
    root = check_root(root, record, call)
    return _movement(
        table.gatherv, x, counts[record.rank], comm=record.id, counts=counts, root=root
    )


def scatterv(x: Any, counts: Sequence[int], root: int = 0, *, comm: Any = None) -> Any:
    """Give rank r its ``counts[r]`` rows of the root's `x`.

    Parameters
    ----------
    x : pytree of arrays
        ``(sum(counts), *shape)`` at the root; elsewhere a template whose leading axis has any
        length.
    counts, root, comm : as for `gatherv`.

    Returns
    -------
    pytree of arrays (counts[rank], *shape), sharded.

    Communication
    -------------
    One MPI_Scatterv per leaf.
    """
    record, call = resolve(comm), "scatterv"
    counts = as_counts(counts, record, "counts", call)
    root = check_root(root, record, call)
    leading = sum(counts) if record.rank == root else None
    return _movement(table.scatterv, x, leading, comm=record.id, counts=counts, root=root)


def allgatherv(x: Any, counts: Sequence[int], *, comm: Any = None) -> Any:
    """Concatenate every rank's rows on all ranks.

    Parameters
    ----------
    x, counts, comm : as for `gatherv`.

    Returns
    -------
    pytree of arrays (sum(counts), *shape), replicated.

    Communication
    -------------
    One MPI_Allgatherv per leaf.
    """
    record, call = resolve(comm), "allgatherv"
    counts = as_counts(counts, record, "counts", call)
    return _movement(table.allgatherv, x, counts[record.rank], comm=record.id, counts=counts)


def alltoallv(
    x: Any, send_counts: Sequence[int], recv_counts: Sequence[int], *, comm: Any = None
) -> Any:
    """Give rank r the r-th run of rows of `x`; get the runs meant for this rank, by rank.

    Parameters
    ----------
    x : pytree of arrays (sum(send_counts), *shape)
    send_counts, recv_counts : rows to and from every rank, known while tracing
        ``send_counts[r]`` here must equal ``recv_counts[this rank]`` on rank r. More than is
        expected is an error of MPI's, less may pass without a word; ``DISTSOLVE_CHECK=1`` compares.
    comm : as for `allreduce`.

    Returns
    -------
    pytree of arrays (sum(recv_counts), *shape), sharded.

    Communication
    -------------
    One MPI_Alltoallw per leaf.
    """
    record, call = resolve(comm), "alltoallv"
    send_counts = as_counts(send_counts, record, "send_counts", call)
    recv_counts = as_counts(recv_counts, record, "recv_counts", call)
    return _movement(
        table.alltoallv,
        x,
        sum(send_counts),
        comm=record.id,
        recv_counts=recv_counts,
        send_counts=send_counts,
    )


def barrier(*, comm: Any = None) -> None:
    """Wait until all ranks are here.

    Parameters
    ----------
    comm : as for `allreduce`.

    Communication
    -------------
    One MPI_Barrier.
    """
    table.barrier(comm=resolve(comm).id)

"""Reductions and broadcast: public functions that check their arguments and bind a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from distsolve.mpi import table
from distsolve.mpi._jaxcompat import is_tracing
from distsolve.mpi.arguments import as_chunk, as_op, check_leading, check_root, donated
from distsolve.mpi.carrier import as_array, encode
from distsolve.mpi.comm import live, resolve
from distsolve.mpi.operations import SUM, check_op
from distsolve.mpi.primitive import MPIPrimitive


def rank(comm: Any = None) -> int:
    """Give this process's rank in a communicator (None: the world), without any communication."""
    members = live(comm)
    return 0 if members is None else members.Get_rank()


def size(comm: Any = None) -> int:
    """Give the number of ranks of a communicator (None: the world), without any communication."""
    members = live(comm)
    return 1 if members is None else members.Get_size()


def prepare(comm: Any = None) -> None:
    """Duplicate a communicator now rather than at its first use.

    Communication
    -------------
    Collective over `comm`, a few small messages, once in its life; later calls do nothing.
    """
    resolve(comm)


def _each_dtype(
    x: Any, call: str, bind: Callable[[list], list], check: Callable[[Any], None] | None = None
) -> Any:
    """Apply a many-operand primitive to a pytree: one bind, so one message, per dtype."""
    if isinstance(x, jax.Array):
        if check is not None:
            check(x.dtype)
        return bind([x])[0]
    leaves, tree = jax.tree.flatten(x)
    leaves = [as_array(leaf, call) for leaf in leaves]
    groups: dict[Any, list[int]] = {}
    for i, leaf in enumerate(leaves):
        groups.setdefault(leaf.dtype, []).append(i)
    if check is not None:
        for dtype in groups:
            check(dtype)
    for members in groups.values():
        for i, y in zip(members, bind([leaves[i] for i in members]), strict=True):
            leaves[i] = y
    return jax.tree.unflatten(tree, leaves)


def _reduction(
    row: MPIPrimitive,
    x: Any,
    op: Any,
    comm: Any,
    donate: bool,
    chunk_bytes: int | None,
    **more: int,
) -> Any:
    call = row.spec.name
    op, donate = as_op(op, call), donated(x, donate, call)
    chunk = as_chunk(chunk_bytes)
    record = resolve(comm)
    return _each_dtype(
        x,
        call,
        lambda xs: row(*xs, donate=donate, chunk=chunk, comm=record.id, op=int(op), **more),
        lambda dtype: check_op(op, dtype, call),
    )


def allreduce(
    x: Any,
    op: Any = SUM,
    *,
    comm: Any = None,
    donate: bool = False,
    chunk_bytes: int | None = None,
) -> Any:
    """Combine `x` over all ranks; every rank gets the result.

    Parameters
    ----------
    x : pytree of arrays, the same structure, shapes and dtypes on every rank
        Each rank's own values.
    op : distsolve.mpi or mpi4py operation
        16-bit floats are combined in float32 and rounded once.
    comm : mpi4py.MPI.Intracomm or None
        None is the world.
    donate : bool
        Outside jit: reduce in the memory of `x`, which is consumed. Inside jit the memory of a
        dead or donated operand is used anyway.
    chunk_bytes : int or None
        Bytes handed to MPI at a time, the same on all ranks; None is the communicator's default.

    Returns
    -------
    pytree like `x`, replicated.

    Raises
    ------
    TypeError, ValueError
        While tracing, on every rank: an operation that does not fit a dtype, a bad communicator.

    Communication
    -------------
    One message per dtype for small leaves together (in pieces of at most 2 MiB, as are 16-bit
    floats of any size), and ceil(bytes / chunk) for each leaf of 64 KiB or more.

    Notes
    -----
    Derivative for SUM only. The tangent is the allreduce of tangents; the cotangent of a replicated
    value is replicated, so the transpose is the identity (see `pvary`).

    References
    ----------
    Thakur, Rabenseifner and Gropp (2005), doi:10.1177/1094342005051521.
    """
    return _reduction(table.allreduce, x, op, comm, donate, chunk_bytes)


def reduce(
    x: Any,
    op: Any = SUM,
    root: int = 0,
    *,
    comm: Any = None,
    donate: bool = False,
    chunk_bytes: int | None = None,
) -> Any:
    """Combine `x` over all ranks; the root gets the result, the others get `x` back.

    Parameters and communication as for `allreduce`; `root` is a rank, known while tracing.
    """
    root = check_root(root, resolve(comm), "reduce")
    return _reduction(table.reduce, x, op, comm, donate, chunk_bytes, root=root)


def scan(
    x: Any,
    op: Any = SUM,
    *,
    comm: Any = None,
    donate: bool = False,
    chunk_bytes: int | None = None,
) -> Any:
    """Combine `x` over the ranks up to and with this one. Parameters as for `allreduce`."""
    return _reduction(table.scan, x, op, comm, donate, chunk_bytes)


def exscan(
    x: Any,
    op: Any = SUM,
    *,
    comm: Any = None,
    donate: bool = False,
    chunk_bytes: int | None = None,
) -> Any:
    """Combine `x` over the ranks before this one; rank 0 gets the operation's identity.

    Parameters as for `allreduce`.
    """
    return _reduction(table.exscan, x, op, comm, donate, chunk_bytes)


def reduce_scatter(
    x: Any,
    op: Any = SUM,
    *,
    comm: Any = None,
    donate: bool = False,
    chunk_bytes: int | None = None,
) -> Any:
    """Combine blocks over all ranks; rank r gets block r.

    Parameters
    ----------
    x : pytree of arrays (size, *shape)
        The leading axis has one block per rank.
    donate : bool
        Outside jit: consume `x`. Its memory is larger than the result's, so it is freed, not used.
    op, comm, chunk_bytes : as for `allreduce`.

    Returns
    -------
    pytree of arrays (*shape), sharded: each rank its own block.

    Communication
    -------------
    Per leaf, ceil(bytes / chunk) calls of MPI_Reduce_scatter_block.
    """
    record, call = resolve(comm), "reduce_scatter"
    op, donate = as_op(op, call), donated(x, donate, call)
    chunk = as_chunk(chunk_bytes)

    def one(leaf: Any) -> Any:
        leaf = as_array(leaf, call)
        check_op(op, leaf.dtype, call)
        check_leading(leaf, record.size, call)
        (y,) = table.reduce_scatter(leaf, chunk=chunk, comm=record.id, op=int(op))
        if donate and not is_tracing():
            leaf.delete()
        return y

    return jax.tree.map(one, x)


def allreduce_symmetric(
    S: Any, *, comm: Any = None, donate: bool = False, chunk_bytes: int | None = None
) -> Any:
    """Sum symmetric or Hermitian matrices over all ranks through their upper triangles.

    Half the bytes of `allreduce` travel, in bounded scratch memory.

    Parameters
    ----------
    S : pytree of arrays (..., n, n)
        Real symmetric or complex Hermitian on each rank. Only the upper triangle is read.
    comm, donate, chunk_bytes : as for `allreduce`.

    Returns
    -------
    pytree like `S`, replicated: the sum, both triangles filled.

    Communication
    -------------
    Per leaf, the bytes of its triangles in pieces of one chunk.

    Notes
    -----
    The derivative is that of `allreduce` on symmetric matrices: cotangents are taken as they are.
    """
    record, call = resolve(comm), "allreduce_symmetric"
    chunk, donate = as_chunk(chunk_bytes), donated(S, donate, call)

    def one(leaf: Any) -> Any:
        leaf = as_array(leaf, call, "S")
        check_op(SUM, leaf.dtype, call)
        if leaf.ndim < 2 or leaf.shape[-1] != leaf.shape[-2]:
            raise ValueError(
                f"`S` of {call} has shape {leaf.shape}; expected square matrices (..., n, n)."
            )
        return table.allreduce_symmetric(
            leaf, donate=donate, chunk=chunk, comm=record.id, op=int(SUM)
        )[0]

    return jax.tree.map(one, S)


def merge_moments(tiles: jax.Array, *, comm: Any = None) -> jax.Array:
    """Merge counts, means and centred sums of samples over all ranks.

    Parameters
    ----------
    tiles : (..., tiles, length) of 32- or 64-bit floats, real or complex
        Laid out as `native/moments.pyx` says, alike on all ranks.
    comm : as for `allreduce`.

    Returns
    -------
    array like `tiles`, replicated, and equal on all ranks to the last bit.

    Communication
    -------------
    One message, in pieces of whole tiles of at most a chunk, or one tile.
    """
    return table.merge_moments(tiles, chunk=0, comm=resolve(comm).id)[0]


def pvary(x: Any, *, comm: Any = None) -> Any:
    """Mark a replicated value that enters per-rank work: the identity, transposed an allreduce.

    With `pvary` on the parameters, ``jax.grad`` of a loss that ends in an `allreduce` is the full
    gradient on every rank; without it each rank gets its own share.

    Parameters
    ----------
    x : pytree of arrays, replicated
    comm : as for `allreduce`.

    Returns
    -------
    pytree, equal to `x`.

    Communication
    -------------
    None forward; in reverse one allreduce per dtype.
    """
    record = resolve(comm)
    return _each_dtype(x, "pvary", lambda xs: table.pvary_p.bind(*xs, comm=record.id))


def bcast(
    x: Any,
    root: int = 0,
    *,
    comm: Any = None,
    donate: bool = False,
    chunk_bytes: int | None = None,
) -> Any:
    """Give every rank the root's `x`.

    Parameters
    ----------
    x : pytree of arrays, the same structure, shapes and dtypes on every rank
    root : rank, known while tracing
    comm, donate, chunk_bytes : as for `allreduce`.

    Returns
    -------
    pytree like `x`, replicated.

    Communication
    -------------
    As for `allreduce`.
    """
    record = resolve(comm)
    root = check_root(root, record, "bcast")
    chunk, donate = as_chunk(chunk_bytes), donated(x, donate, "bcast")
    leaves, tree = jax.tree.flatten(x)
    encoded = [encode(leaf, "bcast") for leaf in leaves]
    moved = _each_dtype(
        [array for array, _ in encoded],
        "bcast",
        lambda xs: table.bcast(*xs, donate=donate, chunk=chunk, comm=record.id, root=root),
    )
    return jax.tree.unflatten(
        tree, [decode(y) for y, (_, decode) in zip(moved, encoded, strict=True)]
    )

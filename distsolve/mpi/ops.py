"""The public functions: they check their arguments while tracing and bind a row of the table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from distsolve.mpi import table
from distsolve.mpi.carrier import as_array, encode
from distsolve.mpi.comm import (
    ANY_SOURCE,
    ANY_TAG,
    Comm,
    check_chunk,
    check_peer,
    check_root,
    check_tag,
    resolve,
    status_id,
)
from distsolve.mpi.library import load
from distsolve.mpi.operations import SUM, Op, check_op
from distsolve.mpi.primitive import MPIPrimitive


class Status(NamedTuple):
    """What is known of a received message, as arrays: source rank, tag, and elements received."""

    source: jax.Array
    tag: jax.Array
    count: jax.Array


def rank(comm: Any = None) -> int:
    """Give this process's rank in a communicator (None: the world)."""
    return resolve(comm).rank


def size(comm: Any = None) -> int:
    """Give the number of ranks of a communicator (None: the world)."""
    return resolve(comm).size


def prepare(comm: Any = None) -> None:
    """Duplicate a communicator now rather than at its first use.

    Communication
    -------------
    Collective over `comm`, a few small messages, once in its life; later calls do nothing.
    """
    resolve(comm)


def _as_op(op: Any, call: str) -> Op:
    if isinstance(op, Op):
        return op
    library = load()
    if library.MPI is not None and isinstance(op, library.MPI.Op):
        known = library.op_of_handle.get(library.MPI._handleof(op))
        if known is not None:
            return known
        raise ValueError(
            f"`op` of {call} is an MPI operation that compiled programs cannot use; expected one "
            f"of {', '.join(o.name for o in Op)}."
        )
    raise TypeError(
        f"`op` of {call} is {op!r} of type {type(op).__name__}; expected an operation such as "
        "distsolve.mpi.SUM or mpi4py.MPI.SUM."
    )


def _each_dtype(
    x: Any, call: str, bind: Callable[[list], list], check: Callable[[Any], None] | None = None
) -> Any:
    """Apply a many-operand primitive to a pytree: one bind, so one message, per dtype."""
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
    row: MPIPrimitive, x: Any, op: Any, comm: Any, donate: bool, chunk_bytes: int | None, **more: int
) -> Any:
    call = row.spec.name
    op = _as_op(op, call)
    chunk = 0 if chunk_bytes is None else check_chunk(chunk_bytes, "chunk_bytes")
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
    One message per dtype for small leaves together, and ceil(bytes / chunk) for each leaf of 64 KiB
    or more.

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
    x: Any, op: Any = SUM, root: int = 0, *, comm: Any = None, donate: bool = False,
    chunk_bytes: int | None = None,
) -> Any:
    """Combine `x` over all ranks; the root gets the result, the others get `x` back.

    Parameters and communication as for `allreduce`; `root` is a rank, known while tracing.
    """
    root = check_root(root, resolve(comm), "reduce")
    return _reduction(table.reduce, x, op, comm, donate, chunk_bytes, root=root)


def scan(
    x: Any, op: Any = SUM, *, comm: Any = None, donate: bool = False,
    chunk_bytes: int | None = None,
) -> Any:
    """Combine `x` over the ranks up to and with this one. Parameters as for `allreduce`."""
    return _reduction(table.scan, x, op, comm, donate, chunk_bytes)


def exscan(
    x: Any, op: Any = SUM, *, comm: Any = None, donate: bool = False,
    chunk_bytes: int | None = None,
) -> Any:
    """Combine `x` over the ranks before this one; rank 0 gets the operation's identity.

    Parameters as for `allreduce`.
    """
    return _reduction(table.exscan, x, op, comm, donate, chunk_bytes)


def reduce_scatter(
    x: Any, op: Any = SUM, *, comm: Any = None, chunk_bytes: int | None = None
) -> Any:
    """Combine blocks over all ranks; rank r gets block r.

    Parameters
    ----------
    x : pytree of arrays (size, *shape)
        The leading axis has one block per rank.
    op, comm, chunk_bytes : as for `allreduce`.

    Returns
    -------
    pytree of arrays (*shape), sharded: each rank its own block.
    """
    record, call = resolve(comm), "reduce_scatter"
    op = _as_op(op, call)
    chunk = 0 if chunk_bytes is None else check_chunk(chunk_bytes, "chunk_bytes")

    def one(leaf: Any) -> Any:
        leaf = as_array(leaf, call)
        check_op(op, leaf.dtype, call)
        _check_leading(leaf, record.size, call)
        return table.reduce_scatter(leaf, chunk=chunk, comm=record.id, op=int(op))[0]

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

    Notes
    -----
    The derivative is that of `allreduce` on symmetric matrices: cotangents are taken as they are.
    """
    record, call = resolve(comm), "allreduce_symmetric"
    chunk = 0 if chunk_bytes is None else check_chunk(chunk_bytes, "chunk_bytes")

    def one(leaf: Any) -> Any:
        leaf = as_array(leaf, call)
        check_op(SUM, leaf.dtype, call)
        if leaf.ndim < 2 or leaf.shape[-1] != leaf.shape[-2]:
            raise ValueError(
                f"`S` of {call} has shape {leaf.shape}; expected square matrices (..., n, n)."
            )
        return table.allreduce_symmetric(
            leaf, donate=donate, chunk=chunk, comm=record.id, op=int(SUM)
        )[0]

    return jax.tree.map(one, S)


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
    x: Any, root: int = 0, *, comm: Any = None, donate: bool = False,
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
    pytree like `x`, replicated. Communication as for `allreduce`.
    """
    record = resolve(comm)
    root = check_root(root, record, "bcast")
    chunk = 0 if chunk_bytes is None else check_chunk(chunk_bytes, "chunk_bytes")
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


def _check_leading(x: Any, wanted: int, call: str) -> None:
    if x.ndim == 0 or x.shape[0] != wanted:
        raise ValueError(
            f"`x` of {call} has shape {x.shape}; expected a leading axis of length {wanted}, one "
            "entry per rank."
        )


def _movement(row: MPIPrimitive, x: Any, leading: int | None, **params: Any) -> Any:
    """Apply a one-operand data movement to each leaf."""
    call = row.spec.name

    def one(leaf: Any) -> Any:
        array, decode = encode(leaf, call)
        if leading is not None:
            _check_leading(array, leading, call)
        return decode(row(array, **params)[0])

    return jax.tree.map(one, x)


def gather(x: Any, root: int = 0, *, comm: Any = None) -> Any:
    """Stack every rank's `x` at the root: (size, *shape) there, `x` back elsewhere."""
    record = resolve(comm)
    root = check_root(root, record, "gather")
    return _movement(table.gather, x, None, comm=record.id, root=root)


def scatter(x: Any, root: int = 0, *, comm: Any = None) -> Any:
    """Give rank r the root's ``x[r]``.

    Parameters
    ----------
    x : pytree of arrays
        (size, *shape) at the root; elsewhere a template (*shape) whose values do not matter.
    """
    record = resolve(comm)
    root = check_root(root, record, "scatter")
    leading = record.size if record.rank == root else None
    return _movement(table.scatter, x, leading, comm=record.id, root=root)


def allgather(x: Any, *, comm: Any = None) -> Any:
    """Stack every rank's `x` on all ranks: (size, *shape), replicated."""
    return _movement(table.allgather, x, None, comm=resolve(comm).id)


def alltoall(x: Any, *, comm: Any = None) -> Any:
    """Give rank r this rank's ``x[r]``: row k of the result came from rank k."""
    record = resolve(comm)
    return _movement(table.alltoall, x, record.size, comm=record.id)


def _as_counts(counts: Sequence[int], comm: Comm, name: str, call: str) -> tuple[int, ...]:
    try:
        values = tuple(int(c.__index__()) for c in counts)
    except (AttributeError, TypeError) as error:
        raise TypeError(
            f"`{name}` of {call} is {counts!r}; expected {comm.size} ints that are known while "
            "tracing."
        ) from error
    if len(values) != comm.size or min(values) < 0:
        raise ValueError(
            f"`{name}` of {call} is {counts!r}; expected {comm.size} non-negative ints, one per "
            "rank."
        )
    return values


def gatherv(x: Any, counts: Sequence[int], root: int = 0, *, comm: Any = None) -> Any:
    """Concatenate every rank's rows at the root; the others get `x` back.

    Parameters
    ----------
    x : pytree of arrays (counts[rank], *shape)
    counts : rows of every rank, the same on all ranks, known while tracing
    """
    record, call = resolve(comm), "gatherv"
    counts = _as_counts(counts, record, "counts", call)
    root = check_root(root, record, call)
    return _movement(
        table.gatherv, x, counts[record.rank], comm=record.id, counts=counts, root=root
    )


def scatterv(x: Any, counts: Sequence[int], root: int = 0, *, comm: Any = None) -> Any:
    """Give rank r its ``counts[r]`` rows of the root's `x`.

    Parameters
    ----------
    x : pytree of arrays
        (sum(counts), *shape) at the root; elsewhere a template whose leading axis has any length.
    counts : as for `gatherv`.
    """
    record, call = resolve(comm), "scatterv"
    counts = _as_counts(counts, record, "counts", call)
    root = check_root(root, record, call)
    leading = sum(counts) if record.rank == root else None
    return _movement(table.scatterv, x, leading, comm=record.id, counts=counts, root=root)


def allgatherv(x: Any, counts: Sequence[int], *, comm: Any = None) -> Any:
    """Concatenate every rank's rows on all ranks. Parameters as for `gatherv`."""
    record, call = resolve(comm), "allgatherv"
    counts = _as_counts(counts, record, "counts", call)
    return _movement(table.allgatherv, x, counts[record.rank], comm=record.id, counts=counts)


def alltoallv(
    x: Any, send_counts: Sequence[int], recv_counts: Sequence[int], *, comm: Any = None
) -> Any:
    """Give rank r the r-th run of rows of `x`; get the runs meant for this rank, by rank.

    Parameters
    ----------
    x : pytree of arrays (sum(send_counts), *shape)
    send_counts, recv_counts : rows to and from every rank, known while tracing
        ``send_counts[r]`` here must equal ``recv_counts[this rank]`` on rank r.
    """
    record, call = resolve(comm), "alltoallv"
    send_counts = _as_counts(send_counts, record, "send_counts", call)
    recv_counts = _as_counts(recv_counts, record, "recv_counts", call)
    return _movement(
        table.alltoallv, x, sum(send_counts),
        comm=record.id, recv_counts=recv_counts, send_counts=send_counts,
    )


def barrier(*, comm: Any = None) -> None:
    """Wait until all ranks are here."""
    table.barrier(comm=resolve(comm).id)


def send(x: Any, dest: int, *, tag: int = 0, comm: Any = None) -> None:
    """Send `x` to rank `dest`, one message per leaf; returns when MPI's MPI_Send does.

    Two ranks that both send first wait for each other forever once messages are too large to be
    buffered: use `sendrecv`.
    """
    record = resolve(comm)
    dest = check_peer(dest, record, "dest", "send")
    tag = check_tag(tag, "tag", "send")
    for leaf in jax.tree.leaves(x):
        table.send(encode(leaf, "send")[0], comm=record.id, dest=dest, tag=tag)


def _fill(status: Any, values: Sequence[int], nbytes: int) -> None:
    """Fill an ``MPI.Status`` after an eager call."""
    MPI = load().MPI
    status.Set_source(MPI.PROC_NULL if values[0] == MPI.PROC_NULL else values[0])
    status.Set_tag(values[1])
    status.Set_elements(MPI.BYTE, nbytes)


def recv(
    x: Any,
    source: Any = ANY_SOURCE,
    *,
    tag: Any = ANY_TAG,
    comm: Any = None,
    status: Any = None,
    return_status: bool = False,
) -> Any:
    """Receive a message like `x`.

    Parameters
    ----------
    x : array, or pytree of arrays with one message per leaf
        A template. Where the message is shorter, or `source` is ``PROC_NULL``, its values stay.
    source, tag : int or wildcard, known while tracing
    status : mpi4py.MPI.Status or None
        Filled when the call runs; counts are in ``MPI.BYTE``.
    return_status : bool
        Return ``(y, Status(source, tag, count))`` with arrays; the count is in elements.

    Raises
    ------
    jax.errors.JaxRuntimeError
        When the message is longer than the template.
    """
    record = resolve(comm)
    source = check_peer(source, record, "source", "recv")
    tag = check_tag(tag, "tag", "recv")
    leaves, tree = jax.tree.flatten(x)
    received, last = [], None
    for leaf in leaves:
        array, decode = encode(leaf, "recv")
        y, last = table.recv(
            array, comm=record.id, source=source, status=status_id(status), tag=tag
        )
        received.append(decode(y))
    return _with_status(jax.tree.unflatten(tree, received), last, return_status)


def _with_status(y: Any, values: Any, wanted: bool) -> Any:
    return (y, Status(values[0], values[1], values[2])) if wanted else y


def sendrecv(
    sendbuf: Any,
    recvbuf: Any,
    source: Any,
    dest: int,
    *,
    sendtag: int = 0,
    recvtag: Any = ANY_TAG,
    comm: Any = None,
    status: Any = None,
    return_status: bool = False,
) -> Any:
    """Send `sendbuf` to `dest` and receive a message like `recvbuf` from `source`, together.

    Parameters
    ----------
    sendbuf, recvbuf : arrays, or pytrees with one exchange per pair of leaves
    source, dest, sendtag, recvtag : int or wildcard, known while tracing
    status, return_status : as for `recv`.

    Returns
    -------
    pytree like `recvbuf`.

    Notes
    -----
    In reverse mode the cotangent travels back, from the rank that received to the rank that sent.
    """
    record, call = resolve(comm), "sendrecv"
    source = check_peer(source, record, "source", call)
    dest = check_peer(dest, record, "dest", call)
    sendtag = check_tag(sendtag, "sendtag", call)
    recvtag = check_tag(recvtag, "recvtag", call)
    sent = jax.tree.leaves(sendbuf)
    leaves, tree = jax.tree.flatten(recvbuf)
    if len(sent) != len(leaves):
        raise ValueError(
            f"`sendbuf` of {call} has {len(sent)} leaves and `recvbuf` has {len(leaves)}; expected "
            "as many, since each pair is one exchange."
        )
    received, last = [], None
    for s, r in zip(sent, leaves, strict=True):
        array, decode = encode(r, call)
        y, last = table.sendrecv(
            encode(s, call)[0], array, comm=record.id, dest=dest, recvtag=recvtag,
            sendtag=sendtag, source=source, status=status_id(status),
        )
        received.append(decode(y))
    return _with_status(jax.tree.unflatten(tree, received), last, return_status)

"""Messages between two ranks: public functions that check their arguments and bind a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from distsolve.mpi import table
from distsolve.mpi._jaxcompat import is_tracing
from distsolve.mpi.arguments import as_flag, check_peer, check_tag
from distsolve.mpi.carrier import encode
from distsolve.mpi.comm import resolve
from distsolve.mpi.status import check_status, fill_status, status_id
from distsolve.mpi.wildcards import ANY_SOURCE, ANY_TAG


class Status(NamedTuple):
    """What is known of a received message, as arrays: source rank, tag, and elements received."""

    source: jax.Array
    tag: jax.Array
    count: jax.Array  # type: ignore[assignment]  # hides tuple.count


def send(x: Any, dest: int, *, tag: int = 0, comm: Any = None) -> None:
    """Send `x` to rank `dest`; returns when MPI_Send does.

    Two ranks that both send first wait for each other forever once messages are too large to be
    buffered: use `sendrecv`.

    Parameters
    ----------
    x : array, or pytree of arrays
    dest : rank or ``PROC_NULL``, known while tracing
    tag : int, known while tracing
    comm : as for `allreduce`.

    Communication
    -------------
    One message per leaf.
    """
    record = resolve(comm)
    dest = check_peer(dest, record, "dest", "send")
    tag = check_tag(tag, "tag", "send")
    for leaf in jax.tree.leaves(x):
        table.send(encode(leaf, "send")[0], comm=record.id, dest=dest, tag=tag)


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
        Return ``(y, Status(source, tag, count))`` with arrays; the count is in elements, and for
        random keys in words.

    Returns
    -------
    pytree like `x`.

    Communication
    -------------
    One message per leaf.

    Raises
    ------
    jax.errors.JaxRuntimeError
        When the message is longer than the template.
    """
    record = resolve(comm)
    source = check_peer(source, record, "source", "recv")
    tag = check_tag(tag, "tag", "recv")

    def one(array: Any, index: int, number: int) -> Any:
        return table.recv(array, comm=record.id, source=source, status=number, tag=tag)

    return _receive(x, "x", "recv", one, status, return_status)


def _receive(
    x: Any,
    name: str,
    call: str,
    one: Callable[[Any, int, int], Any],
    status: Any,
    return_status: bool,
) -> Any:
    """Receive each leaf of a template by ``one(array, index, number of the status)``.

    The status is that of the last leaf. A compiled program fills the user's own by its number; for
    an eager call it is filled here.
    """
    leaves, tree = jax.tree.flatten(x)
    if not leaves:
        raise ValueError(f"`{name}` of {call} is a pytree without arrays: there is no message.")
    check_status(status)
    return_status = as_flag(return_status, f"`return_status` of {call}")
    number = status_id(status) if is_tracing() else 0
    received = []
    for index, leaf in enumerate(leaves):
        array, decode = encode(leaf, call, name)
        y, arrived = one(array, index, number)
        received.append(decode(y))
    if status is not None and not is_tracing():
        from_rank, tag, count = arrived.tolist()
        fill_status(status, from_rank, tag, count * array.dtype.itemsize)
    y = jax.tree.unflatten(tree, received)
    return (y, Status(arrived[0], arrived[1], arrived[2])) if return_status else y


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

    Communication
    -------------
    One message each way per pair of leaves.

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
    n_received = len(jax.tree.leaves(recvbuf))
    if len(sent) != n_received:
        raise ValueError(
            f"`sendbuf` of {call} has {len(sent)} leaves and `recvbuf` has {n_received}; expected "
            "as many, since each pair is one exchange."
        )

    def one(array: Any, index: int, number: int) -> Any:
        return table.sendrecv(
            encode(sent[index], call, "sendbuf")[0],
            array,
            comm=record.id,
            dest=dest,
            recvtag=recvtag,
            sendtag=sendtag,
            source=source,
            status=number,
        )

    return _receive(recvbuf, "recvbuf", call, one, status, return_status)

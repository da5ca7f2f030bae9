"""Messages between two ranks: public functions that check their arguments and bind a row."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from distsolve.mpi import table
from distsolve.mpi.carrier import encode
from distsolve.mpi.comm import ANY_SOURCE, ANY_TAG, check_peer, check_tag, resolve, status_id


class Status(NamedTuple):
    """What is known of a received message, as arrays: source rank, tag, and elements received."""

    source: jax.Array
    tag: jax.Array
    count: jax.Array


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
            encode(s, call)[0],
            array,
            comm=record.id,
            dest=dest,
            recvtag=recvtag,
            sendtag=sendtag,
            source=source,
            status=status_id(status),
        )
        received.append(decode(y))
    return _with_status(jax.tree.unflatten(tree, received), last, return_status)

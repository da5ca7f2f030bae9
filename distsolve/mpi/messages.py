"""Messages between two ranks: public functions that check their arguments and bind a row."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from distsolve.mpi import table
from distsolve.mpi._jaxcompat import is_tracing
from distsolve.mpi.arguments import check_peer, check_tag
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
    _refuse_nothing(leaves, "x", "recv")
    number = _in_program(status)
    received, arrived = [], None
    for leaf in leaves:
        array, decode = encode(leaf, "recv")
        y, arrived = table.recv(array, comm=record.id, source=source, status=number, tag=tag)
        received.append(decode(y))
    return _answer(jax.tree.unflatten(tree, received), array, arrived, status, return_status)


def _refuse_nothing(leaves: list, name: str, call: str) -> None:
    if not leaves:
        raise ValueError(f"`{name}` of {call} is a pytree without arrays: there is no message.")


def _in_program(status: Any) -> int:
    """The number under which a compiled program fills the user's status; eager calls need none."""
    check_status(status)
    return status_id(status) if is_tracing() else 0


def _answer(y: Any, carrier: Any, arrived: Any, status: Any, return_status: bool) -> Any:
    """The result in the form that was asked for; the status is that of the last leaf."""
    if status is not None and not is_tracing():
        source, tag, count = arrived.tolist()
        fill_status(status, source, tag, count * carrier.dtype.itemsize)
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
    _refuse_nothing(leaves, "recvbuf", call)
    number = _in_program(status)
    received, arrived = [], None
    for s, r in zip(sent, leaves, strict=True):
        array, decode = encode(r, call)
        y, arrived = table.sendrecv(
            encode(s, call)[0],
            array,
            comm=record.id,
            dest=dest,
            recvtag=recvtag,
            sendtag=sendtag,
            source=source,
            status=number,
        )
        received.append(decode(y))
    return _answer(jax.tree.unflatten(tree, received), array, arrived, status, return_status)

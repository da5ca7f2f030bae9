"""Where the ranks of a communicator meet: an address that every node reaches, and a port kept free.

JAX can only be told, not asked to try: jaxlib ends the process where a rank does not reach the
coordinator in time, and (0.10.2) where the coordinator finds its port taken. gRPC binds with
SO_REUSEPORT, so the coordinators of two jobs of one user even share a port without a word. Hence
rank 0 binds a port that the system calls free and keeps it, with SO_REUSEPORT and without
listening: the system gives it to nobody else, and the coordinator can listen on it. Before that a
rank of each node has read a token there, which shows that the address leads to rank 0.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from distsolve.mpi.comm import Comm, live, resolve
from distsolve.mpi.library import load
from distsolve.mpi.watchdog import waiting_for_all

LOOPBACK = "127.0.0.1"
ATTEMPTS = 5
STRANGER = "another program answers there"
_SIOCGIFADDR = 0x8915  # linux/sockios.h: the IPv4 address of a network interface

_addresses: dict[tuple[int, str | None, int], str] = {}
_kept: list[socket.socket] = []  # until the process ends: the coordinator may be started again


class Offer(NamedTuple):
    """What rank 0 tells the others."""

    host: str
    port: int
    token: bytes

    @property
    def address(self) -> str:
        """The address in the form that JAX takes."""
        return f"{self.host}:{self.port}"


def assemble(comm: Any = None, *, timeout: float) -> None:
    """Wait until all ranks of a communicator are here; the job ends where some do not come.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm or None
        None is the world.
    timeout : float
        Seconds that a rank waits for the others. A rank that has waited longer says so on stderr,
        and ends the job.

    Communication
    -------------
    A barrier.
    """
    members = live(comm)
    if members is not None:
        remedy = "start jax.distributed at the same place on all of them, or raise the time-out"
        with waiting_for_all(load().MPI, "the start of jax.distributed", remedy, timeout):
            members.Barrier()


def meet(
    comm: Any = None, *, interface: str | None = None, port: int = 0, timeout: float = 60.0
) -> str:
    """Give the address, ``host:port``, at which all ranks can reach rank 0.

    The port stays bound on rank 0, without listening, for as long as the process lives.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm or None
        None is the world.
    interface : str, optional
        Rank 0's network interface. By default the host name says which, or the loopback address is
        taken where all ranks share a node.
    port : int
        0 is one that the system calls free.
    timeout : float
        Seconds in which each node must have reached rank 0.

    Returns
    -------
    str
        Equal on all ranks.

    Raises
    ------
    ConnectionError
        On all ranks, where a node did not reach rank 0.
    RuntimeError
        On all ranks, where rank 0 has no address that other nodes could reach.
    ValueError
        On all ranks, where rank 0 has no such `interface`.

    Communication
    -------------
    Collective over `comm`: a broadcast and an allgather, and one connection from each node. Later
    calls with the same arguments do nothing.
    """
    record = resolve(comm)
    key = (record.id, interface, port)
    if key not in _addresses:
        if record.size == 1:
            host = own_address(interface, one_node=True)
            _addresses[key] = f"{host}:{_keep(port)}"
        else:
            _addresses[key] = _meet(live(comm), record, interface, port, timeout)
    return _addresses[key]


def _meet(members: Any, record: Comm, interface: str | None, port: int, timeout: float) -> str:
    for _ in range(ATTEMPTS):
        offer, troubles = _attempt(members, record, interface, port, timeout)
        if not troubles:
            return offer.address
        if set(troubles.values()) != {STRANGER}:
            break
    rank, trouble = min(troubles.items())
    raise ConnectionError(
        f"Rank {rank} did not reach rank 0 at {offer.address} within {timeout:g} s: {trouble}. "
        "Name a network interface of rank 0's node that all nodes reach by `interface=`, or let "
        "connections between the nodes through the firewall."
    )


def _attempt(
    members: Any, record: Comm, interface: str | None, port: int, timeout: float
) -> tuple[Offer, dict[int, str]]:
    """Return what rank 0 offered, and what kept which ranks from it; both equal on all ranks."""
    with contextlib.ExitStack() as until_all_tried:
        offer: Any = None
        if record.rank == 0:
            try:
                offer = until_all_tried.enter_context(_offer(record, interface, port))
            except (OSError, RuntimeError, ValueError) as error:
                offer = error
        offer = members.bcast(offer)
        if isinstance(offer, Exception):
            raise offer
        trouble = _try(offer, timeout) if record.local_rank == 0 else ""
        troubles = members.allgather(trouble)
    return offer, {rank: text for rank, text in enumerate(troubles) if text}


@contextlib.contextmanager
def _offer(record: Comm, interface: str | None, port: int) -> Iterator[Offer]:
    """Answer everyone who connects, while the context lasts, with a token; on rank 0."""
    host = own_address(interface, one_node=record.local_size == record.size)
    offer = Offer(host, _keep(port), secrets.token_bytes(16))
    try:
        server = socket.create_server((host, offer.port), backlog=record.size, reuse_port=True)
    except OSError as error:
        raise RuntimeError(
            f"Rank 0 cannot listen at {offer.address}: {error.strerror}. Name a network interface "
            f"of rank 0's node by `interface=`, one of {_interfaces()}."
        ) from error
    with server:
        answering = threading.Thread(target=_answer, args=(server, offer.token), daemon=True)
        answering.start()
        try:
            yield offer
        finally:
            server.shutdown(socket.SHUT_RDWR)  # ends the accept that the thread waits in
            answering.join()


def _answer(server: socket.socket, token: bytes) -> None:
    while True:
        try:
            peer, _ = server.accept()
        except OSError:
            return
        with peer, contextlib.suppress(OSError):
            peer.sendall(token)


def _try(offer: Offer, timeout: float) -> str:
    """Return why rank 0 was not reached, or nothing."""
    end = time.monotonic() + timeout
    try:
        with socket.create_connection((offer.host, offer.port), timeout) as peer:
            peer.settimeout(max(end - time.monotonic(), 0.001))
            answer = peer.recv(len(offer.token), socket.MSG_WAITALL)
    except OSError as error:
        return error.strerror or str(error)
    return "" if answer == offer.token else STRANGER


def _keep(port: int) -> int:
    """Bind a port and never let go; one that a stranger answers at is not given out again."""
    kept = socket.socket()
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        kept.bind(("", port))
    except OSError as error:
        kept.close()
        raise RuntimeError(f"Rank 0 cannot have port {port or 'any'}: {error.strerror}.") from error
    _kept.append(kept)
    return kept.getsockname()[1]


def own_address(interface: str | None, *, one_node: bool) -> str:
    """Return the IPv4 address at which this process can be reached, without communication.

    Parameters
    ----------
    interface : str or None
        A network interface; None goes by the host name.
    one_node : bool
        Whether no other node has to reach it, so that a loopback address will do.
    """
    if interface is not None:
        source = f"interface {interface!r}"
        try:
            found = [_address_of(interface)]
        except OSError as error:
            raise ValueError(
                f"`interface` is {interface!r}, which has no IPv4 address on rank 0's node: "
                f"{error.strerror}. Expected one of {_interfaces()}."
            ) from error
    elif one_node:
        return LOOPBACK
    else:
        name = socket.gethostname()
        source = f"host name {name!r}"
        try:
            answers = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
        except OSError as error:
            raise RuntimeError(
                f"The {source} of rank 0 has no IPv4 address: {error.strerror}. Name a network "
                f"interface by `interface=`, one of {_interfaces()}."
            ) from error
        found = [str(address[0]) for *_, address in answers]
    usable = [host for host in found if one_node or not ipaddress.ip_address(host).is_loopback]
    if not usable:
        raise RuntimeError(
            f"The {source} of rank 0 leads to the loopback address {found[0]}, which other nodes "
            "cannot reach. Name a network interface that they can by `interface=`, one of "
            f"{_interfaces()}."
        )
    return usable[0]


def _interfaces() -> str:
    """Return the network interfaces of this node that have an IPv4 address, with it."""
    found = []
    for _, name in socket.if_nameindex():
        with contextlib.suppress(OSError):
            found.append(f"{name!r} ({_address_of(name)})")
    return ", ".join(found)


def _address_of(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("256s", interface.encode()[:15])
        answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, request)
    return socket.inet_ntoa(answer[20:24])

"""Communicators as the small integers that programs carry.

A program never holds an MPI handle: handles differ by rank and by run. The first use of a
communicator duplicates it once (so that the user's own messages cannot match ours) and gives the
duplicate a number that is never used again and is the same on all its ranks.
"""

from __future__ import annotations

import functools
import os
import threading
import traceback
from typing import Any, NamedTuple

from distsolve.mpi import device, lifecycle, watchdog
from distsolve.mpi._jaxcompat import follow_ordered, wait_for_ordered
from distsolve.mpi.arguments import MAX_CHUNK, check_chunk
from distsolve.mpi.library import load
from distsolve.mpi.native import abi, nonblocking

_MIB = 1 << 20
# On one node a chunk must fit in cache: 4 MiB was the fastest of 32 KiB to 4 MiB at 2 ranks.
CHUNK_ON_ONE_NODE = 4 * _MIB
CHUNK_ACROSS_NODES = 16 * _MIB


class Comm(NamedTuple):
    """What tracing needs to know of a communicator."""

    id: int
    rank: int
    size: int
    local_rank: int  # among the ranks that share this one's node
    local_size: int


_world: Comm | None = None
_by_id: dict[int, Comm] = {}
_duplicates: dict[int, Any] = {}
_next_id = 1
_first_uses = threading.Lock()  # guards _next_id and _keyval; never held while ranks are waited for
_keyval: int | None = None
_chunk_override: int | None = None
_default_chunks: dict[int, int] = {}
_executables: dict[int, dict[Any, Any]] = {}


def resolve(comm: Any = None) -> Comm:
    """The record of a communicator; the first use duplicates it, which is collective.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm or None
        None is the world.
    """
    global _world
    if comm is None:
        if _world is None:
            _world = _record(live(None))
        return _world
    return _record(live(comm))


def of_id(comm_id: int) -> Comm:
    """The record with this number."""
    return _by_id[comm_id]


def default_chunk(comm_id: int) -> int:
    """The bytes that a reduction hands to MPI at a time, where nothing was set by a call."""
    return _default_chunks[comm_id]


def duplicate_of(comm_id: int) -> Any:
    """Our duplicate of a communicator, for messages of our own; None where there is no MPI."""
    return _duplicates.get(comm_id)


def executables_of(comm_id: int) -> dict[Any, Any]:
    """The compiled eager calls of a communicator, which go when it is freed."""
    return _executables.setdefault(comm_id, {})


def live(comm: Any) -> Any:
    """The communicator itself (None: the world), or an error; None where there is no MPI."""
    MPI = load().MPI
    if MPI is None:
        if comm is not None:
            raise TypeError(
                f"`comm` is {comm!r}, but with DISTSOLVE_NO_MPI=1 there is only the world of one "
                "rank: pass None."
            )
        return None
    if MPI.Is_finalized():
        raise RuntimeError("MPI has been finalised: distsolve.mpi cannot be used any more.")
    if comm is None:
        return MPI.COMM_WORLD
    if isinstance(comm, MPI.Comm) and comm == MPI.COMM_NULL:
        raise ValueError(
            "`comm` is COMM_NULL: it was freed, or this rank is not one of its members. Pass a "
            "live communicator, and leave out ranks that are not in it."
        )
    if not isinstance(comm, MPI.Intracomm):
        raise TypeError(
            f"`comm` is {comm!r} of type {type(comm).__name__}; expected an "
            "mpi4py.MPI.Intracomm, or None for the world."
        )
    return comm


def _record(comm: Any) -> Comm:
    if comm is None:
        return _world or _publish_serial()
    record = None if _keyval is None else comm.Get_attr(_keyval)
    return record if record is not None else _duplicate(load().MPI, comm)


def _duplicate(MPI: Any, comm: Any) -> Comm:
    global _keyval
    with _first_uses:
        if _keyval is None:
            _keyval = MPI.Comm.Create_keyval(delete_fn=_forget)
            lifecycle.start(MPI)
    wanted = _chunk_from_environment()
    device.check_environment()
    follow_ordered()
    with watchdog.waiting_for_all(
        MPI,
        "the first use of a communicator",
        "if they never make this call, as after a branch on the rank, let them make it; if they "
        "do, but later, call distsolve.mpi.prepare(comm) on all of them before",
    ):
        duplicate = comm.Dup()
    duplicate.Set_errhandler(MPI.ERRORS_RETURN)
    node = duplicate.Split_type(MPI.COMM_TYPE_SHARED)
    local_rank, local_size = node.Get_rank(), node.Get_size()
    node.Free()
    rank, size = duplicate.Get_rank(), duplicate.Get_size()
    chunk = wanted or (CHUNK_ON_ONE_NODE if local_size == size else CHUNK_ACROSS_NODES)
    comm_id = _agree_on_id(MPI, duplicate)
    chunk = duplicate.allreduce(chunk, op=MPI.MAX)
    direct_from, staging = _agree_on_road(MPI, duplicate, probing=local_rank == 0)
    group, everyone = duplicate.Get_group(), MPI.COMM_WORLD.Get_group()
    world = list(group.Translate_ranks(None, everyone))
    group.Free()
    everyone.Free()
    record = Comm(comm_id, rank, size, local_rank, local_size)
    _duplicates[record.id] = duplicate
    comm.Set_attr(_keyval, record)
    _publish(MPI._handleof(duplicate), record, world, chunk, direct_from, staging)
    watchdog.of_comm(MPI, duplicate, comm == MPI.COMM_WORLD)
    return record


def _agree_on_id(MPI: Any, duplicate: Any) -> int:
    """A number that is new on all ranks, whatever communicators their other threads use first."""
    global _next_id
    while True:
        proposed = duplicate.allreduce(_next_id, op=MPI.MAX)
        with _first_uses:
            is_new = proposed >= _next_id
            _next_id = max(_next_id, proposed + 1)
        if duplicate.allreduce(is_new, op=MPI.LAND):
            return proposed


def _publish_serial() -> Comm:
    record = _publish(
        0, Comm(0, 0, 1, 0, 1), [0], CHUNK_ON_ONE_NODE, device.NEVER, device.staging_bytes()
    )
    watchdog.of_comm(None, None, is_world=True)
    return record


def _agree_on_road(MPI: Any, duplicate: Any, probing: bool) -> tuple[int, int]:
    """How device memory comes to MPI: what no rank forbids, in pieces that all have room for."""
    mine = device.road(probing)
    agreed = duplicate.allreduce(mine.direct_from, op=MPI.MAX)
    reasons = duplicate.allgather(mine.reason if mine.direct_from == agreed else None)
    device.keep(agreed, next(reason for reason in reasons if reason))
    staging = duplicate.allreduce(device.staging_bytes(), op=MPI.MIN)
    return agreed if device.find() else device.NEVER, staging


def _publish(
    handle: int, record: Comm, world: list[int], chunk: int, direct_from: int, staging: int
) -> Comm:
    """Publish a communicator; ``world``: the numbers that its ranks have in the world."""
    abi.add_comm(
        record.id, handle, record.rank, world, _chunk_override or chunk, direct_from, staging
    )
    _by_id[record.id] = record
    _default_chunks[record.id] = chunk
    return record


def _forget(comm: Any, keyval: int, record: Comm) -> None:
    """Called by MPI while the user frees a communicator: free is collective, and so is this.

    Requests are completed even where a program failed: Open MPI 5.0.11 crashes in a later MPI call
    where a communicator was freed before its MPI_Iallreduce was complete.
    """
    for finish in (wait_for_ordered, functools.partial(nonblocking.complete_all, record.id)):
        try:
            finish()
        except Exception:
            traceback.print_exc()  # whoever waits for a failed program is told, too
    abi.remove_comm(record.id)
    _default_chunks.pop(record.id, None)
    _executables.pop(record.id, None)
    duplicate = _duplicates.pop(record.id, None)
    if duplicate is not None and not lifecycle.is_finalizing():
        duplicate.Free()


def _chunk_from_environment() -> int | None:
    text = os.environ.get("DISTSOLVE_CHUNK_BYTES", "")
    if text == "":
        return None
    try:
        return check_chunk(int(text), "DISTSOLVE_CHUNK_BYTES")
    except ValueError as error:
        raise ValueError(
            f"DISTSOLVE_CHUNK_BYTES is {text!r}; expected a number of bytes from 16 to "
            f"{MAX_CHUNK}, for instance 4194304."
        ) from error


def set_chunk_bytes(nbytes: int | None) -> None:
    """Set how many bytes a reduction hands to MPI at a time, for all communicators.

    Must be called with the same value on all ranks, between collectives. The default is 4 MiB
    where all ranks share a node and 16 MiB where they do not; the environment variable
    ``DISTSOLVE_CHUNK_BYTES`` sets it at the start.

    Parameters
    ----------
    nbytes : int or None
        Bytes, from 16 to 2**30. None goes back to each communicator's default.

    Raises
    ------
    TypeError, ValueError
        `nbytes` is no integer, or out of range.

    Communication
    -------------
    None. Reductions that are queued are finished first.
    """
    global _chunk_override
    follow_ordered()  # a queued reduction must not see another chunk than on the other ranks
    _chunk_override = None if nbytes is None else check_chunk(nbytes, "nbytes")
    for comm_id, default in _default_chunks.items():
        abi.set_chunk(comm_id, _chunk_override or default)

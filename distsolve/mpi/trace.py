"""The last MPI calls of this rank, as the handlers have recorded them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distsolve.mpi.native import abi, recorder
from distsolve.mpi.operations import DTYPES, Op

_DTYPES = {number: dtype for dtype, (number, _) in DTYPES.items()}


@dataclass(frozen=True)
class Call:
    """One MPI call.

    Attributes
    ----------
    sequence : int
        Its place among all calls of this rank, from 1.
    name : str
        The MPI function. One call may hand its data to MPI in several pieces.
    dtype : numpy.dtype or None
        Of the data; None where there are none, and for what MPI cannot reduce.
    count : int
        Elements on this rank; of ``gatherv`` and its like, on all ranks; of
        ``allreduce_symmetric``, those of the upper triangles.
    op : Op or None
    peer : int or None
        The root, or the rank at the other end.
    comm : int
        Number of the communicator, from 1, in the order of first use.
    number : int or None
        Its place among the collectives of its communicator, from 1: ranks of a correct program are
        in the same collective when they are at the same number. None for messages.
    where : str
        File and line of the user's program, ``?`` where they are not known.
    entered, left : float
        Seconds on the clock of `time.monotonic`; ``left`` is None as long as the call lasts.
    """

    sequence: int
    name: str
    dtype: np.dtype | None
    count: int
    op: Op | None
    peer: int | None
    comm: int
    number: int | None
    where: str
    entered: float
    left: float | None


def trace() -> list[Call]:
    """Return the last MPI calls of this rank, oldest first: at most 1024.

    Recording is always on. A collective that was not entered, or one that lasts, is best seen by
    comparing the ends of the lists of two ranks. ``kill -USR1 PID`` writes the same to stderr,
    however busy the process is, and so does a failing call, with the last 16.

    Communication: none.

    Returns
    -------
    list of Call
    """
    return [_call(entry) for entry in recorder.entries()]


def _call(entry: dict) -> Call:
    return Call(
        entry["sequence"],
        abi.NAMES[entry["call"]],
        _DTYPES.get(entry["dtype"]),
        entry["count"],
        Op(entry["op"]) if entry["op"] >= 0 else None,
        entry["peer"] if entry["peer"] >= 0 else None,
        entry["comm"],
        entry["number"] or None,
        recorder.text_of_site(entry["where"]),
        entry["entered"] * 1e-9,
        entry["left"] * 1e-9 if entry["left"] else None,
    )

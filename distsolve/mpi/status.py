"""Statuses of mpi4py: numbers for programs, and the values that calls leave in them."""

from __future__ import annotations

from typing import Any

from distsolve.mpi.library import load
from distsolve.mpi.native import abi

_statuses: dict[int, tuple[int, Any]] = {}


def check_status(status: Any) -> None:
    """Raise unless a status is mpi4py's, or None."""
    MPI = load().MPI
    if status is not None and (MPI is None or not isinstance(status, MPI.Status)):
        raise TypeError(
            f"`status` is {status!r} of type {type(status).__name__}; expected an "
            "mpi4py.MPI.Status or None; where there is no MPI, use return_status=True."
        )


def status_id(status: Any) -> int:
    """The number of an ``MPI.Status`` for use in programs; it is kept alive for their sake."""
    if status is None:
        return 0
    if id(status) not in _statuses:
        number = len(_statuses) + 1
        abi.add_status(number, load().address_of(status))
        _statuses[id(status)] = number, status
    return _statuses[id(status)][0]


def fill_status(status: Any, source: int, tag: int, nbytes: int) -> None:
    """Fill an ``MPI.Status`` from what an eager call returned."""
    status.Set_source(source)
    status.Set_tag(tag)
    status.Set_elements(load().MPI.BYTE, nbytes)

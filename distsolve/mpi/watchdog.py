"""The time-out of MPI calls: a thread that reports where every rank is, and ends the job."""

from __future__ import annotations

import contextlib
import faulthandler
import math
import numbers
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any

from distsolve.mpi import sites
from distsolve.mpi.native import agreement, recorder
from distsolve.mpi.native import watchdog as native

_ACTIONS = ("abort", "report")
_OFF = (0.0, "abort")
_CHECK_SECONDS = 60.0
_STDERR = 2
# Of the network that is reserved for documentation: nothing is sent there.
_ELSEWHERE = ("192.0.2.1", 9)

_limit: tuple[float, str] | None = None
_world: tuple[Any, Any] | None = None  # mpi4py's module and our duplicate of the world
_knows_all = False  # whether the places of all ranks of the world are known


def show_at_signal(rank: int) -> None:
    """Let SIGUSR1 show Python's stacks and the last calls, unless the program has a use for it."""
    if signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL:
        recorder.show_at_signal(rank)
        faulthandler.register(signal.SIGUSR1, file=_STDERR, all_threads=True, chain=True)
        recorder.stacks_are_shown()


def set_timeout(seconds: float | None, *, action: str = "abort") -> None:
    """Set how long an MPI call may take before it is reported as hanging.

    When a call of this library has been pending for so long, one rank writes to stderr: the call,
    its size, the line of the program, where every rank of the communicator is, and the Python
    stacks of some that are elsewhere. The job is ended then, or goes on. A rank that compiles while
    the others wait for it is no error: allow for that.

    ``DISTSOLVE_TIMEOUT`` (seconds) and ``DISTSOLVE_TIMEOUT_ACTION`` do the same from the start.
    With ``DISTSOLVE_CHECK=1`` it is on from the start: 60 seconds, and no more than a report.

    Parameters
    ----------
    seconds : float or None
        None turns it off.
    action : {"abort", "report"}
        Whether the report ends the job, with exit status 1.

    Communication: all ranks of the world must call it. The first time, one allgather of the places
    where their watchdogs listen, if the world has been used (`prepare`); communicators that were
    used before it and this call are not watched otherwise.
    """
    global _limit
    _limit = _checked(seconds, action, "seconds", "action")
    if _world is not None:
        _arm(*_world)
    elif native.is_running():
        native.set_limit(_limit[0], _limit[1] == "abort")


def of_comm(MPI: Any, duplicate: Any, is_world: bool) -> None:
    """Take note of a communicator at its first use, which is a collective moment; None: no MPI.

    Ranks whose settings differ would exchange different messages from here on: they all raise.
    """
    global _limit, _world
    if _limit is None:
        _limit = _of_environment()
    if duplicate is not None:
        settings = agreement.get_checking(), agreement.get_lines(), _limit
        _refuse_differences(duplicate.allgather((MPI.COMM_WORLD.Get_rank(), settings)))
    if is_world:
        _world = MPI, duplicate
    if _limit is not None:
        _arm(MPI, duplicate)


def _refuse_differences(everyone: list[tuple]) -> None:
    first, ours = everyone[0]
    for rank, theirs in everyone:
        if theirs != ours:
            raise RuntimeError(
                f"DISTSOLVE_CHECK, DISTSOLVE_TIMEOUT or set_timeout differ between ranks {first} "
                f"and {rank} (checking, lines, time-out: {ours} and {theirs}). Set them equally "
                "on all ranks: `mpiexec -genv NAME VALUE` (MPICH), `mpiexec -x NAME` (Open MPI)."
            )


@contextlib.contextmanager
def waiting_for_all(
    MPI: Any, what: str, remedy: str, seconds: float | None = None
) -> Iterator[None]:
    """Bound the time of something collective that comes before watchdogs know each other.

    Parameters
    ----------
    MPI : module
    what, remedy : str
        What the ranks are in, and what lets all of them come.
    seconds : float, optional
        After which the job ends, whatever the time-out is.
    """
    limits = [_limit or _of_environment() or _OFF, (seconds or 0.0, "abort")]
    seconds, action = min((limit for limit in limits if limit[0]), default=_OFF)
    if seconds == 0:
        yield
        return
    where = recorder.text_of_site(sites.caller())

    def report() -> None:
        rank, size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
        text = (
            f"\ndistsolve: rank {rank} of {size} has been in {what} at {where} for longer than the "
            f"time-out of {seconds:.1f} s. It needs all ranks of the communicator, and some have "
            f"not come: {remedy}.\n"
        )
        os.write(_STDERR, text.encode())
        faulthandler.dump_traceback(_STDERR)
        if action == "abort":
            native.end()

    timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), report)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _checked(
    seconds: Any, action: Any, name: str, action_name: str, none: str = "None"
) -> tuple[float, str]:
    _check_action(action, action_name)
    if seconds is None:
        return 0.0, action
    if isinstance(seconds, bool) or not isinstance(seconds, numbers.Real):
        raise TypeError(
            f"`{name}` is {seconds!r} of type {type(seconds).__name__}; expected a number of "
            "seconds, or None for no time-out."
        )
    seconds = float(seconds)
    if not 0 < seconds <= 1e9 or not math.isfinite(seconds):
        raise ValueError(
            f"`{name}` is {seconds!r}; expected a number of seconds from above 0 to 1e9, or "
            f"{none} for no time-out."
        )
    return seconds, action


def _check_action(action: Any, name: str) -> None:
    if action not in _ACTIONS:
        raise ValueError(f"`{name}` is {action!r}; expected one of {', '.join(_ACTIONS)}.")


def _of_environment() -> tuple[float, str] | None:
    action = os.environ.get("DISTSOLVE_TIMEOUT_ACTION", "") or "abort"
    _check_action(action, "DISTSOLVE_TIMEOUT_ACTION")
    text = os.environ.get("DISTSOLVE_TIMEOUT", "")
    if text == "" and agreement.get_checking():
        return _CHECK_SECONDS, "report"
    if text == "":
        return None
    try:
        seconds = float(text)
    except ValueError as error:
        raise ValueError(
            f"DISTSOLVE_TIMEOUT is {text!r}; expected a number of seconds, for instance 300, or 0 "
            "for no time-out."
        ) from error
    if seconds == 0:
        return None
    return _checked(seconds, action, "DISTSOLVE_TIMEOUT", "DISTSOLVE_TIMEOUT_ACTION", "0")


def _arm(MPI: Any, duplicate: Any) -> None:
    """Watch the calls of a communicator, whose ranks get to know where each other listens."""
    global _knows_all
    assert _limit is not None
    if not native.is_running():
        world = MPI.COMM_WORLD if MPI else None
        rank, size = (world.Get_rank(), world.Get_size()) if world else (0, 1)
        native.start(rank, size, secrets.randbits(64))
    if duplicate is not None and not _knows_all:
        _exchange_places(MPI, duplicate)
        _knows_all = _world is not None and duplicate is _world[1]
    native.set_limit(_limit[0], _limit[1] == "abort")


def _exchange_places(MPI: Any, comm: Any) -> None:
    rank = MPI.COMM_WORLD.Get_rank()
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    home = node.bcast(rank)
    node.Free()
    everyone = comm.allgather((rank, home, _own_address(), *native.own_place()))
    for other, there, address, port, token in everyone:
        if port is None:
            raise RuntimeError(
                f"rank {other} has no UDP socket for the watchdog: allow it, or run without a "
                "time-out."
            )
        host = socket.inet_aton("127.0.0.1" if there == home else address)
        native.add_place(other, int.from_bytes(host, sys.byteorder), port, token)


def _own_address() -> str:
    """The address that other machines reach this one by: that of its name, or of its way out."""
    found = []
    with contextlib.suppress(OSError):
        found.append(socket.gethostbyname(socket.gethostname()))
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(_ELSEWHERE)
        found.append(str(probe.getsockname()[0]))
    return next((host for host in found if not host.startswith("127.")), "127.0.0.1")

"""The time-out of MPI calls: a thread that reports where every rank is, and ends the job."""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import secrets
import signal
import socket
import sys
from typing import Any

from distsolve.mpi.native import agreement, recorder
from distsolve.mpi.native import watchdog as native

_ACTIONS = ("abort", "report")
_CHECK_SECONDS = 60.0
_STDERR = 2
# Of the network that is reserved for documentation: nothing is sent there.
_ELSEWHERE = ("192.0.2.1", 9)

_limit: tuple[float, str] | None = None
_world: tuple[Any, Any] | None = None  # mpi4py's module and our duplicate of the world


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
    where their watchdogs listen.
    """
    global _limit
    _limit = _checked(seconds, action, "seconds", "action")
    if _world is not None:
        _arm()


def of_world(MPI: Any, world: Any) -> None:
    """Take note of our duplicate of the world, which is a collective moment; None: no MPI.

    Ranks whose settings differ would exchange different messages from here on: they all raise.
    """
    global _limit, _world
    _world = MPI, world
    if _limit is None:
        _limit = _of_environment()
    if world is not None:
        settings = agreement.get_checking(), agreement.get_lines(), _limit
        _refuse_differences(world.allgather(settings))
    if _limit is not None:
        _arm()


def _refuse_differences(everyone: list[tuple]) -> None:
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            raise RuntimeError(
                f"DISTSOLVE_CHECK, DISTSOLVE_TIMEOUT or set_timeout differ between ranks 0 and "
                f"{rank} (checking, lines, time-out: {everyone[0]} and {theirs}). Set them equally "
                "on all ranks: `mpiexec -genv NAME VALUE` (MPICH), `mpiexec -x NAME` (Open MPI)."
            )


def _checked(seconds: Any, action: Any, name: str, action_name: str) -> tuple[float, str]:
    if action not in _ACTIONS:
        raise ValueError(f"`{action_name}` is {action!r}; expected one of {', '.join(_ACTIONS)}.")
    if seconds is None:
        return 0.0, action
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise TypeError(
            f"`{name}` is {seconds!r} of type {type(seconds).__name__}; expected a number of "
            "seconds, or None for no time-out."
        )
    if not 0 < seconds <= 1e9 or not math.isfinite(seconds):
        raise ValueError(
            f"`{name}` is {seconds!r}; expected a number of seconds from above 0 to 1e9, or None "
            "for no time-out."
        )
    return float(seconds), action


def _of_environment() -> tuple[float, str] | None:
    text = os.environ.get("DISTSOLVE_TIMEOUT", "")
    if text == "" and agreement.get_checking():
        return _CHECK_SECONDS, "report"
    if text in ("", "0"):
        return None
    try:
        seconds = float(text)
    except ValueError as error:
        raise ValueError(
            f"DISTSOLVE_TIMEOUT is {text!r}; expected a number of seconds, for instance 300, or 0 "
            "for no time-out."
        ) from error
    action = os.environ.get("DISTSOLVE_TIMEOUT_ACTION", "") or "abort"
    return _checked(seconds, action, "DISTSOLVE_TIMEOUT", "DISTSOLVE_TIMEOUT_ACTION")


def _arm() -> None:
    assert _limit is not None
    assert _world is not None
    if not native.is_running():
        _start(*_world)
    native.set_limit(_limit[0], _limit[1] == "abort")


def _start(MPI: Any, world: Any) -> None:
    """Let the ranks know where each other's watchdog listens, and start this one."""
    if MPI is None:
        native.start(0, [(0, 0)], 0)
        return
    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    home = node.bcast(world.Get_rank())
    node.Free()
    mine = home, _own_address(), native.open_channel(), secrets.randbits(64)
    homes, addresses, ports, tokens = zip(*world.allgather(mine), strict=True)
    if None in ports:
        raise RuntimeError(
            f"rank {ports.index(None)} has no UDP socket for the watchdog: allow it, or run "
            "without a time-out."
        )
    hosts = [
        "127.0.0.1" if there == home else address
        for there, address in zip(homes, addresses, strict=True)
    ]
    packed = [int.from_bytes(socket.inet_aton(host), sys.byteorder) for host in hosts]
    places = list(zip(packed, ports, strict=True))
    native.start(world.Get_rank(), places, tokens[0])


def _own_address() -> str:
    """The address that other machines reach this one by: that of its name, or of its way out."""
    found = []
    with contextlib.suppress(OSError):
        found.append(socket.gethostbyname(socket.gethostname()))
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(_ELSEWHERE)
        found.append(str(probe.getsockname()[0]))
    return next((host for host in found if not host.startswith("127.")), "127.0.0.1")

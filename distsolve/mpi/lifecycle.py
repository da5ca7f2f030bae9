"""The end of a job: after an exception on one rank, at normal exit, and at MPI_Finalize."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import traceback
from typing import Any

from distsolve.mpi._jaxcompat import wait_for_ordered
from distsolve.mpi.native import abi

_finalizing = False


def is_finalizing() -> bool:
    """Whether MPI_Finalize has begun."""
    return _finalizing


def start(MPI: Any) -> None:
    """Watch over the end of the job; called once, when MPI is first touched."""
    keyval = MPI.Comm.Create_keyval(delete_fn=_on_finalize)
    MPI.COMM_SELF.Set_attr(keyval, True)
    atexit.register(finish)
    if MPI.COMM_WORLD.Get_size() > 1 and _wants_abort():
        _abort_on_exception(MPI)


def finish() -> None:
    """Wait for queued MPI calls, before what they need goes away."""
    try:
        wait_for_ordered()
    except Exception:
        traceback.print_exc()


def _on_finalize(comm: Any, keyval: int, value: Any) -> None:
    """MPI_Finalize deletes the attributes of COMM_SELF first, while MPI still works."""
    global _finalizing
    finish()
    _finalizing = True
    abi.set_finalized()


def _wants_abort() -> bool:
    """An uncaught exception ends the job unless told otherwise, or a debugger is watching."""
    setting = os.environ.get("DISTSOLVE_ABORT", "")
    if setting:
        return setting != "0"
    return sys.gettrace() is None and not hasattr(sys, "ps1") and not sys.flags.interactive


def _abort_on_exception(MPI: Any) -> None:
    """Let an uncaught exception on one rank, in any thread, end the whole job.

    The other ranks wait in a collective that this rank will never enter.
    """
    rank, size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()

    def abort(kind: type[BaseException], value: BaseException | None, trace: Any) -> None:
        lines = traceback.format_exception(kind, value, trace)
        sys.stdout.flush()
        sys.stderr.write(f"rank {rank} of {size}: uncaught exception, ending the job\n")
        sys.stderr.write("".join(f"rank {rank}: {line}\n" for line in "".join(lines).splitlines()))
        sys.stderr.flush()
        if not MPI.Is_finalized():
            MPI.COMM_WORLD.Abort(1)

    def abort_from_thread(args: threading.ExceptHookArgs) -> None:
        if args.exc_type is not SystemExit:
            abort(args.exc_type, args.exc_value, args.exc_traceback)

    sys.excepthook = abort
    threading.excepthook = abort_from_thread

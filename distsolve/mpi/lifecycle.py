"""The end of a job: after an exception on one rank, at normal exit, and at MPI_Finalize."""

from __future__ import annotations

import atexit
import functools
import os
import sys
import threading
import time
import traceback
from typing import Any, NoReturn

from distsolve.mpi import launcher, sites
from distsolve.mpi._jaxcompat import wait_for_ordered
from distsolve.mpi.native import abi, nonblocking, recorder, watchdog
from distsolve.mpi.switches import is_on

_finalizing = False
_failure: tuple[int, str] | None = None  # status and line of the `sys.exit` that ends the program
# A launcher that is told to abort drops the output that it has not passed on yet.
OUTPUT_SECONDS = 0.5
EXIT_GRACE = 5.0


def is_finalizing() -> bool:
    """Whether MPI_Finalize has begun."""
    return _finalizing


def start(MPI: Any) -> None:
    """Watch over the end of the job; called once, when MPI is first touched."""
    keyval = MPI.Comm.Create_keyval(delete_fn=_on_finalize)
    MPI.COMM_SELF.Set_attr(keyval, True)
    atexit.register(finish)
    # MPICH no longer locks when it deletes attributes: a thread that is in MPI by then keeps its
    # lock for ever, and MPI_Finalize aborts.
    finalize = MPI.Finalize

    @functools.wraps(finalize)
    def finish_first() -> None:
        finish()
        finalize()

    MPI.Finalize = finish_first


def finish() -> None:
    """Wait for queued MPI calls before MPI goes away; a failed one makes the job fail."""
    watchdog.set_at_end()
    try:
        wait_for_ordered()
        nonblocking.finish()
    except Exception:
        MPI = _job_of_many_ranks()
        if MPI is not None:
            _abort(MPI, traceback.format_exc())
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def _on_finalize(comm: Any, keyval: int, value: Any) -> None:
    """MPI_Finalize, from wherever, deletes the attributes of COMM_SELF while MPI still works."""
    global _finalizing
    finish()
    _finalizing = True
    abi.set_finalized()


def abort_on_exception() -> None:
    """Let an uncaught exception on one rank, in any thread, end the whole job.

    The other ranks wait in a collective that this rank will never enter. Called at import, so that
    it holds before MPI is touched; jobs of one rank keep the hooks that they have.
    """
    hook, thread_hook = sys.excepthook, threading.excepthook

    def abort(kind: type[BaseException], value: Any, trace: Any) -> None:
        MPI = _job_of_many_ranks()
        if MPI is None:
            hook(kind, value, trace)
        else:
            _abort(MPI, "".join(traceback.format_exception(kind, value, trace)))

    def abort_from_thread(args: threading.ExceptHookArgs) -> None:
        if args.exc_type is SystemExit or _job_of_many_ranks() is None:
            thread_hook(args)
        else:
            abort(args.exc_type, args.exc_value, args.exc_traceback)

    sys.excepthook = abort
    threading.excepthook = abort_from_thread


def _wants_abort() -> bool:
    """Unless told otherwise, or a debugger or a person at a prompt is watching."""
    if is_on("DISTSOLVE_ABORT") or os.environ.get("DISTSOLVE_ABORT") == "0":
        return is_on("DISTSOLVE_ABORT")
    return sys.gettrace() is None and not hasattr(sys, "ps1") and not sys.flags.interactive


def _job_of_many_ranks() -> Any:
    """mpi4py's module, where an uncaught exception must end a job of more than one rank."""
    if not _wants_abort() or is_on("DISTSOLVE_NO_MPI"):
        return None
    if "mpi4py.MPI" not in sys.modules and launcher.started_by() is None:
        return None
    try:
        from mpi4py import MPI
    except ImportError:
        return None
    if not MPI.Is_initialized() or MPI.Is_finalized() or MPI.COMM_WORLD.Get_size() == 1:
        return None
    return MPI


class _Exit:
    """Tied to a SystemExit: if no Python runs any more when that goes, it ends the program."""

    def __init__(self, status: int) -> None:
        self.failure = status, recorder.text_of_site(sites.caller())

    def __del__(self) -> None:
        global _failure
        if sys is not None and sys._getframe().f_back is None:  # None: modules are gone, too
            _failure = self.failure


def end_after_failing_exit() -> None:
    """Let a failing `sys.exit` on one rank end the job, unless all ranks come to their end.

    Called at import. A SystemExit that is caught is no failure, nor is one in another thread.
    """
    plain = sys.exit

    def noticed(status: Any = None, /) -> NoReturn:
        try:
            plain(status)
        except SystemExit as error:
            number = _status_of(error.code)
            if number and threading.current_thread() is threading.main_thread():
                error._distsolve = _Exit(number)  # type: ignore[attr-defined]
            raise

    sys.exit = noticed
    atexit.register(_limit_finalize)


def _limit_finalize() -> None:
    """After a failure, give MPI_Finalize, which waits for all ranks, so many seconds only."""
    if _failure is None or (MPI := _job_of_many_ranks()) is None:
        return
    (status, line), seconds = _failure, _exit_grace()
    said = (
        f"rank {MPI.COMM_WORLD.Get_rank()} of {MPI.COMM_WORLD.Get_size()}: sys.exit with status "
        f"{status} at {line}, and after {seconds:g} s not all ranks have come to their end: ending "
        "the job\n"
    )
    watchdog.limit_finalize(seconds, status, said.encode())


def _exit_grace() -> float:
    """The seconds of DISTSOLVE_EXIT_GRACE; the default where they make no sense: all is over."""
    try:
        seconds = float(os.environ.get("DISTSOLVE_EXIT_GRACE", ""))
    except ValueError:
        return EXIT_GRACE
    return seconds if 0 <= seconds <= 1e6 else EXIT_GRACE


def _status_of(code: Any) -> int:
    """The exit status that Python makes of what SystemExit is given."""
    if code is None:
        return 0
    return code & 0xFF if isinstance(code, int) else 1


def _abort(MPI: Any, text: str) -> None:
    rank, size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
    report = f"rank {rank} of {size}: uncaught exception, ending the job\n"
    report += "".join(f"rank {rank}: {line}\n" for line in text.splitlines())
    try:
        for stream, words in ((sys.stdout, ""), (sys.stderr, report)):
            if stream is not None:
                stream.write(words)
                stream.flush()
        time.sleep(OUTPUT_SECONDS)
    finally:  # also where a stream is closed
        MPI.COMM_WORLD.Abort(1)

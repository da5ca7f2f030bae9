"""How a figure is taken: from a barrier on, slowest rank, median over repeats."""

import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from distsolve import mpi
from distsolve.commands.bench.cases import Work
from distsolve.commands.bench.memory import PeakGrowth

# Steps of all ranks whose calls are recorded one by one, and sent to one rank.
PROFILED_STEPS, FEWEST_PROFILED = 50_000, 50


class Stop:
    """Notes the first Ctrl-C, to stop between two repeats; the second one ends the job."""

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> "Stop":
        self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *exception: Any) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _note(self, *_):
        self.requested = True
        signal.signal(signal.SIGINT, self._before)


def measure(work: Work, repeats: int, stop: Stop, tick: Callable[[], Any]) -> dict[str, Any] | None:
    """Time a problem on all ranks.

    Parameters
    ----------
    work : Work
    repeats : int
        After one that warms up and does not count.
    stop : Stop
    tick : callable
        Called after each repeat.

    Returns
    -------
    dict or None
        Of numbers, as the attributes of `Point`, equal on all ranks; None on all of them where one
        is to stop.

    Communication
    -------------
    That of the work; a barrier and an allgather of two numbers for each repeat; an allgather; a
    profile.
    """
    steps, taken = work.run(), []
    for _ in range(repeats):
        mpi.barrier()
        begin = time.perf_counter()
        work.run()
        seconds = time.perf_counter() - begin
        everyone = np.asarray(mpi.allgather(np.array([seconds, stop.requested])))
        if everyone[:, 1].any():
            return None
        taken.append(everyone[:, 0] / max(steps, 1))
        tick()
    samples = np.array(taken)  # repeats, ranks
    lower, median, upper = np.percentile(samples.max(axis=1), (25, 50, 75)).tolist()
    # Apart from the repeats: memory that was given back to the system makes the next run slower.
    with PeakGrowth() as growth:
        work.run()
    peak = np.max(mpi.allgather(np.int64(growth.nbytes)))
    profiled = min(steps, max(PROFILED_STEPS // mpi.size(), FEWEST_PROFILED))
    shares, messages, sent = _profile(work, profiled)
    compute, wait, transfer = (median * shares).tolist()
    return {
        "steps": steps,
        "repeats": repeats,
        "seconds": median,
        "lower": lower,
        "upper": upper,
        "minimum": float(np.median(samples.min(axis=1))),
        "average": float(np.median(samples.mean(axis=1))),
        "compute": compute,
        "wait": wait,
        "transfer": transfer,
        "messages": messages,
        "sent": sent,
        "peak": int(peak),
    }


def _profile(work, steps):
    """Return the shares of computing, waiting and moving data, and a step's messages and bytes."""
    with mpi.profile() as profile:
        mpi.barrier()
        before, begin = _calls(), time.perf_counter()
        work.few(steps)
        mine = np.array([time.perf_counter() - begin, _calls() - before])
    whole, calls = np.asarray(mpi.allgather(mine)).mean(axis=0).tolist()
    lines = [line for line in profile.lines if line.name != "MPI_Barrier"]
    wait = sum(line.wait or 0.0 for line in lines)
    transfer = sum(line.transfer for line in lines)
    parts = np.array([max(whole - wait - transfer, 0.0), wait, transfer])
    sent = sum(line.calls * line.nbytes for line in lines if line.name != "MPI_Wait")
    return parts / parts.sum(), calls / max(steps, 1), sent / max(steps, 1)


def _calls():
    """Return how many messages this rank has taken part in."""
    return sum(n for name, n in mpi.call_count().items() if name != "MPI_Barrier")

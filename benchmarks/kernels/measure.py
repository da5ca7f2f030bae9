"""What kernels need: a clock for the slowest rank, a check, peak memory, and a JSON report.

Nothing of distsolve: kernels of other libraries run without it.
"""

import contextlib
import ctypes
import json
import math
import time
from pathlib import Path

from mpi4py import MPI

COMM = MPI.COMM_WORLD


def slowest(call):
    """Seconds that `call` takes on the slowest rank; all ranks start together."""
    COMM.Barrier()
    began = time.perf_counter()
    call()
    return COMM.allreduce(time.perf_counter() - began, MPI.MAX)


def expect(array, number):
    """Stop the job if any element is another number: a fast wrong answer is no figure."""
    low, high = float(array.min()), float(array.max())
    if not (math.isclose(low, number, rel_tol=1e-3) and math.isclose(high, number, rel_tol=1e-3)):
        print(f"rank {COMM.Get_rank()}: expected {number}, got {low} to {high}", flush=True)
        COMM.Abort(2)


def _status_mib(field):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {field!r}: peak memory needs Linux")


class PeakGrowth:
    """Growth in MiB of this process's peak resident memory inside a `with` block."""

    def __enter__(self):
        # Where the peak cannot be reset the earlier one stays: too large, never too small.
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
        self._before = _status_mib("VmRSS")
        return self

    def __exit__(self, *exception):
        self.mib = _status_mib("VmHWM") - self._before

    def largest(self):
        """The growth on the rank where it is largest."""
        return COMM.allreduce(self.mib, MPI.MAX)


def _simnet(function):
    """A counter of simnet; 0 where it is not preloaded."""
    counter = getattr(ctypes.CDLL(None), function, None)
    if counter is None:
        return 0
    counter.restype = ctypes.c_int64
    return counter()


class Traffic:
    """Collectives of this rank, and the bytes handed to them, inside a `with` block.

    Whoever calls them: simnet counts, and must be preloaded; without it both are 0.
    """

    def __enter__(self):
        self._before = _simnet("simnet_calls"), _simnet("simnet_bytes")
        return self

    def __exit__(self, *exception):
        self.collectives = _simnet("simnet_calls") - self._before[0]
        self.bytes = _simnet("simnet_bytes") - self._before[1]


def report(**figures):
    """Print the figures as one JSON line, on rank 0 only."""
    if COMM.Get_rank() == 0:
        library = MPI.Get_library_version().split("\n")[0].strip("\x00 ")
        print(json.dumps({**figures, "mpi": " ".join(library.split())}), flush=True)

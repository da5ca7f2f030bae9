"""The figures that asv keeps for each commit: those of jobs of ``python -m distsolve bench``.

asv calls each ``track_*`` in a process of its own, in the folder where `setup_cache` ran. The first
one that needs a job leaves its files there, and the others read them: a job measures all sizes, and
one launch serves all figures.
"""

import os
from pathlib import Path

from launch import TRANSPORTS, run_module


class _Job:
    """A case of the command; a subclass names it, its sizes and its methods.

    Never imports MPI: that is for the ranks.
    """

    case: str
    options: tuple = ()
    param_names = ["ranks", "size", "method", "transport"]  # noqa: RUF012 - asv takes lists only
    timeout = 600  # of a job, too

    def setup_cache(self):
        """Name the folder that benchmarks of one commit and environment share."""
        return os.getcwd()

    def setup(self, folder, ranks, size, method, transport):
        """Find the point with these parameters; start the job that measures it, if none did."""
        if ranks > len(os.sched_getaffinity(0)):
            raise NotImplementedError("ranks wait by spinning: each needs a core of its own")
        if ranks == 1 and transport != next(iter(TRANSPORTS)):
            raise NotImplementedError("one rank sends nothing")
        results = Path(folder) / "-".join([self.case, str(ranks), method, transport])
        if not results.exists():
            self._start(results, ranks, method, transport)
        self.point = self._read(results, size)

    def _start(self, results, ranks, method, transport):
        words = ["bench", self.case, "--quiet", *self.options, "--output", results]
        words += ["--sizes", *self.params[1], *(["--method", method] if method else [])]
        run_module(
            "distsolve", *words, np=ranks, variables=TRANSPORTS[transport], timeout=self.timeout
        )

    @staticmethod
    def _read(results, size):
        from distsolve.commands.bench import report

        (run,) = report.read(results)
        (point,) = (point for point in run.points if point.size == size)
        return point

    def track_time(self, *job):
        """Give the seconds of a step on the slowest rank, the median over repeats."""
        return self.point.seconds

    def track_messages(self, *job):
        """Give the MPI calls of a rank in a step."""
        return self.point.messages

    def track_sent(self, *job):
        """Give the bytes that a rank hands to them."""
        return self.point.sent

    def track_peak_memory(self, *job):
        """Give the bytes by which memory grows during the work, on the rank where it is most."""
        return self.point.peak

    track_time.unit = "seconds"
    track_messages.unit = "calls"
    track_sent.unit = track_peak_memory.unit = "bytes"


class _Solve(_Job):
    def track_iterations(self, *job):
        """Give the steps of a solve."""
        return self.point.steps

    track_iterations.unit = "iterations"


def _params(sizes, methods):
    return [[1, 2, 4], sizes, methods, list(TRANSPORTS)]


class Allreduce(_Job):
    """A sum over all ranks."""

    case = "allreduce"
    params = _params([8, 2**14, 2**22], [""])


class CG(_Solve):
    """A sparse matrix, of a grid in the plane."""

    case = "cg"
    params = _params([256], ["classic", "single_reduction", "pipelined"])


class Poisson(_Solve):
    """Poisson's equation in space."""

    case = "poisson"
    params = _params([48], ["classic", "single_reduction", "pipelined"])


class SR(_Solve):
    """Stochastic reconfiguration."""

    case = "sr"
    options = "--parameters", "1000"
    params = _params([1024], ["cg", "dense", "kernel"])

"""What a figure was measured on: hardware, versions, date, and what else ran meanwhile."""

import datetime
import os
import platform
import resource
import time
from importlib import metadata
from pathlib import Path

PACKAGES = ("distsolve", "mpi4jax", "lineax", "jax", "jaxlib", "mpi4py", "mpich", "numpy")


def _proc_field(path, field):
    for line in Path(path).read_text().splitlines():
        if line.startswith(field):
            return line.split(":", 1)[1].strip()
    return "unknown"


def _version(package):
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def describe():
    """Date, processor, memory, load and the versions of everything that is compared."""
    memory = int(_proc_field("/proc/meminfo", "MemTotal").split()[0]) / 2**20
    kernel = ".".join(platform.release().split(".")[:2])  # what follows is a builder's name
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "processor": _proc_field("/proc/cpuinfo", "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory, 1),
        "system": f"{platform.system()} {kernel}, {' '.join(platform.libc_ver())}, "
        f"{platform.machine()}",
        "python": platform.python_version(),
        "packages": {package: _version(package) for package in PACKAGES},
    }


class OtherLoad:
    """The share of all cores that other processes, or the hypervisor, took in a `with` block.

    Ranks wait by spinning, so that a single foreign process can double a latency. What the
    programs started inside the block used themselves is not counted.
    """

    def __enter__(self):
        self._before = self._used()
        return self

    def __exit__(self, *exception):
        used = zip(self._used(), self._before, strict=True)
        elapsed, busy, own = (after - before for after, before in used)
        self.share = round(max(0.0, busy - own) / (elapsed * os.cpu_count()), 3)

    @staticmethod
    def _used():
        # user, nice, system, idle, iowait, irq, softirq, steal
        ticks = [int(text) for text in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
        busy = (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")
        own = resource.getrusage(resource.RUSAGE_CHILDREN)
        return time.monotonic(), busy, own.ru_utime + own.ru_stime

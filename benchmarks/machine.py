"""What a figure was measured on: hardware, versions and date."""

import datetime
import os
import platform
from importlib import metadata
from pathlib import Path

PACKAGES = ("distsolve", "mpi4jax", "jax", "jaxlib", "mpi4py", "mpich", "numpy")


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
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "processor": _proc_field("/proc/cpuinfo", "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory, 1),
        "load_average": os.getloadavg()[0],
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": {package: _version(package) for package in PACKAGES},
    }

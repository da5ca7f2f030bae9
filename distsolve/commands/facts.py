"""What a rank knows about its versions, its MPI library and its machine."""

import os
import platform
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from distsolve import mpi
from distsolve.mpi import device
from distsolve.mpi.comm import default_chunk, resolve
from distsolve.mpi.launcher import started_by
from distsolve.mpi.library import THREAD_LEVELS, load

PACKAGES = ("distsolve", "jax", "jaxlib", "mpi4py", "numpy", "scipy")
# What XLA and OpenBLAS read for their number of threads; without any of them, the cores.
XLA_THREADS = ("PJRT_NPROC", "NPROC")
BLAS_THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")
LIBMPI = re.compile(r"\S*/libmpi[^/\s]*\.so[.\d]*$", re.MULTILINE)
VECTORS = re.compile(r"sse|ssse|avx|fma|f16c|amx|asimd|sve|neon")


def of_rank() -> dict[str, Any]:
    """Return what can be said without MPI.

    Returns
    -------
    dict
        Of numbers, texts and lists and dictionaries of them.
    """
    cores = sorted(os.sched_getaffinity(0))
    return {
        "versions": {"Python": platform.python_version()}
        | {name: metadata.version(name) for name in PACKAGES},
        "package": str(Path(mpi.__file__).parents[1]),
        "node": platform.node(),
        "cores": cores,
        "threads": {
            "XLA": _threads(XLA_THREADS, len(cores)),
            "BLAS": min(_threads(BLAS_THREADS, len(cores)), len(cores)),
        },
        **_cpu(),
        "driver": None
        if (found := device.find()) is None
        else " or ".join(device.DRIVERS[found].libraries),
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(("DISTSOLVE_", "JAX_", "XLA_", "MPI4PY_"))
            or name in (*XLA_THREADS, *BLAS_THREADS)
        },
    }


def of_mpi() -> dict[str, Any]:
    """Return what MPI says, loading it and making its communicators.

    Returns
    -------
    dict
        As from `of_rank`.

    Raises
    ------
    ImportError, RuntimeError, ValueError
        Where distsolve cannot use MPI, in a sentence that says why.

    Communication
    -------------
    That of the first use of a communicator.
    """
    comm, library = resolve(), load()
    MPI = library.MPI
    started = started_by()
    return {
        "library": library.name,
        "standard": MPI and ".".join(map(str, MPI.Get_version())),
        "file": sorted(set(LIBMPI.findall(Path("/proc/self/maps").read_text()))) if MPI else [],
        "chosen_by": _chosen_by() if MPI else "DISTSOLVE_NO_MPI",
        "thread_level": MPI and THREAD_LEVELS[MPI.Query_thread()],
        "launcher": started and f"{started[0].name}, {started[0].size}={started[1]}",
        "chunk": default_chunk(comm.id),
        "device_memory": device.road(probing=False).reason,
    }


def extras() -> dict[str, dict[str, str | None]]:
    """Return, for each extra of the package, the versions of what it needs; None: missing."""
    found: dict[str, dict[str, str | None]] = {
        name: {} for name in metadata.metadata("distsolve").get_all("Provides-Extra") or ()
    }
    for requirement in metadata.requires("distsolve") or ():
        name, extra = re.match(r"[\w.-]+", requirement), re.search(r"extra == .(\w+)", requirement)
        if name and extra:
            try:
                version = metadata.version(name[0])
            except metadata.PackageNotFoundError:
                version = None
            found[extra[1]][name[0]] = version
    return found


def gpu_plugins() -> list[str]:
    """Return the names of JAX's plugins for GPUs and other devices."""
    return sorted(entry.name for entry in metadata.entry_points(group="jax_plugins"))


def _threads(names, cores):
    """Return the first of some variables that is a positive number, or the number of cores."""
    values = (os.environ.get(name, "") for name in names)
    return next((int(text) for text in values if text.isdecimal() and int(text)), cores)


def _cpu():
    """Return the model, and the vector instructions that change what XLA compiles."""
    text = Path("/proc/cpuinfo").read_text()
    model = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*: (.*)$", text, re.MULTILINE)
    vectors = sorted(filter(VECTORS.match, flags[1].split())) if flags else []
    return {"cpu": model[1].strip() if model else platform.machine(), "vectors": vectors}


def _chosen_by():
    names = [name for name in ("MPI4PY_MPIABI", "MPI4PY_LIBMPI") if os.environ.get(name)]
    if names:
        return ", ".join(f"{name}={os.environ[name]}" for name in names)
    return f"mpi4py, which looks into {sys.prefix} first"

"""The driver of this process's GPUs: found at run time, and handed to the handlers.

No header, toolkit or library of a GPU is needed to build the package, and without a GPU plugin of
JAX none is looked for.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import os
import signal
import subprocess
import sys
import tempfile
from importlib.metadata import entry_points
from typing import Any

import jax

from distsolve.mpi import launcher
from distsolve.mpi.native import device as native

# Bytes in one half of the staging memory.
STAGING_BYTES = 16 << 20
# At least a tile of `moments.pyx`.
MIN_STAGING, MAX_STAGING = 64 << 10, 1 << 30
# Bytes from which MPI is given device memory: as the first calls of a size say, at any size, never.
AUTO, ALWAYS, NEVER = -1, 0, 2**62
PROBE_SECONDS = 120
LONGEST_REASON = 200  # characters that are shown of what the probe said last
ROADS = ("auto", "direct", "staged")


@dataclasses.dataclass(frozen=True)
class Driver:
    """A driver's library, XLA's name of its platform, and its functions by what they do.

    A library's names differ by release, and the one without a number is there for compilers only.
    """

    libraries: tuple[str, ...]
    platform: str
    functions: dict[str, str]


# JAX's names of the platforms. HIP has a current device where CUDA has a stack of contexts.
DRIVERS = {
    "cuda": Driver(
        ("libcuda.so.1",),
        "CUDA",
        {
            "copy_to_host": "cuMemcpyDtoHAsync_v2",
            "copy_to_device": "cuMemcpyHtoDAsync_v2",
            "copy_on_device": "cuMemcpyDtoDAsync_v2",
            "synchronize": "cuStreamSynchronize",
            "allocate": "cuMemHostAlloc",
            "event_create": "cuEventCreate",
            "event_record": "cuEventRecord",
            "event_synchronize": "cuEventSynchronize",
            "context_of_stream": "cuStreamGetCtx",
            "current_context": "",
            "enter_context": "cuCtxPushCurrent_v2",
            "leave_context": "cuCtxPopCurrent_v2",
            "error_text": "cuGetErrorString",
        },
    ),
    "rocm": Driver(
        ("libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"),
        "ROCM",
        {
            "copy_to_host": "hipMemcpyDtoHAsync",
            "copy_to_device": "hipMemcpyHtoDAsync",
            "copy_on_device": "hipMemcpyDtoDAsync",
            "synchronize": "hipStreamSynchronize",
            "allocate": "hipHostMalloc",
            "event_create": "hipEventCreateWithFlags",
            "event_record": "hipEventRecord",
            "event_synchronize": "hipEventSynchronize",
            "context_of_stream": "hipStreamGetDevice",
            "current_context": "hipGetDevice",
            "enter_context": "hipSetDevice",
            "leave_context": "",
            "error_text": "hipDrvGetErrorString",
        },
    ),
}


@dataclasses.dataclass(frozen=True)
class Road:
    """How device memory comes to MPI, and why: one line of the doctor's."""

    direct_from: int
    reason: str


open_library = ctypes.CDLL
_looked = False
_loaded: str | None = None
_road: Road | None = None


def gpu_platforms() -> list[str]:
    """Keys of `DRIVERS` that JAX's platforms, or its plugins where none are named, are for."""
    platforms = jax.config.jax_platforms  # type: ignore[attr-defined]
    named = platforms.split(",") if platforms else _plugins()
    return [key for key in DRIVERS if "gpu" in named or any(key in name for name in named)]


def _plugins() -> list[str]:
    return [plugin.name for plugin in entry_points(group="jax_plugins")]


def load(handlers: dict[str, Any]) -> None:
    """Register the handlers for the GPUs that JAX can use here, if there are any.

    Parameters
    ----------
    handlers : dict
        Capsules by target name.
    """
    found = find()
    if found is not None:
        for target, handler in handlers.items():
            jax.ffi.register_ffi_target(target, handler, platform=DRIVERS[found].platform)


def find() -> str | None:
    """The platform of the GPUs that JAX can use here, or None; the first call looks for it."""
    global _looked
    if not _looked:
        _looked = True
        for platform in gpu_platforms():
            if _open(platform):
                break
    return _loaded


def _open(platform: str) -> bool:
    for name in DRIVERS[platform].libraries:
        try:
            bind(platform, open_library(name))
        except (OSError, AttributeError):  # not there, or too old
            continue
        return True
    return False


def bind(platform: str, library: ctypes.CDLL) -> None:
    """Hand the functions of a driver to the handlers; creates no context.

    Parameters
    ----------
    platform : a key of `DRIVERS`
    library : the driver's library
    """
    global _loaded
    functions = DRIVERS[platform].functions
    native.bind(
        {use: (name, address_of(library, name)) for use, name in functions.items()},
        staging_bytes(),
    )
    _loaded = platform


def address_of(library: ctypes.CDLL, name: str) -> int | None:
    """The address of a function; None for one that a driver does without."""
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value if name else None


@functools.cache
def staging_bytes() -> int:
    """The bytes in one half of the staging memory, as the environment has them at first."""
    text = os.environ.get("DISTSOLVE_STAGING_BYTES") or str(STAGING_BYTES)
    if not text.isdecimal() or not MIN_STAGING <= int(text) <= MAX_STAGING:
        raise ValueError(
            f"DISTSOLVE_STAGING_BYTES is {text!r}; expected a number of bytes from {MIN_STAGING} "
            f"to {MAX_STAGING}, for instance {STAGING_BYTES}."
        )
    return int(text)


def road(probing: bool = True) -> Road:
    """How device memory comes to MPI, as far as this process knows.

    Parameters
    ----------
    probing : bool
        Whether this process is the one of its node that tries, in ``auto``.
    """
    wanted = os.environ.get("DISTSOLVE_GPU_MPI") or "auto"
    name, _, size = wanted.partition(":")
    if name not in ROADS or (":" in wanted and (name != "direct" or not size.isdecimal())):
        raise ValueError(
            f"DISTSOLVE_GPU_MPI is {wanted!r}; expected auto, staged, direct, or direct:BYTES for "
            "direct from that many bytes on."
        )
    if _loaded is None:
        return Road(AUTO, "no GPU")
    if name != "auto":
        reason = f"DISTSOLVE_GPU_MPI={wanted}"
        return Road(min(int(size or ALWAYS), NEVER) if name == "direct" else NEVER, reason)
    if _road is not None:
        return _road
    return probe() if probing else Road(AUTO, "another rank of this node tried")


def check_environment() -> None:
    """Raise where a variable makes no sense, before anything is sent."""
    staging_bytes()
    road(probing=False)


def keep(direct_from: int, reason: str) -> None:
    """Keep what all ranks have agreed on, so that nobody probes again."""
    global _road
    _road = Road(direct_from, reason)


def probe(command: tuple[str, ...] = (sys.executable, "-m", "distsolve.mpi.probe")) -> Road:
    """Try in a child process whether MPI takes device pointers: a crash there is an answer.

    Parameters
    ----------
    command : the child's; its exit code 0 means yes.
    """
    environment = launcher.without_job(os.environ)
    environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    environment["JAX_PLATFORMS"] = _loaded or ""  # and no other that JAX could fall back on
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        try:
            child = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # with all that MPI starts, to be ended together
            )
        except OSError as error:
            return Road(NEVER, f"MPI was not tried with device memory: {error}")
        try:
            code = child.wait(PROBE_SECONDS)
        except subprocess.TimeoutExpired:
            return Road(NEVER, f"MPI did not answer with device memory within {PROBE_SECONDS} s")
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        said.seek(0)
        lines = said.read().strip().splitlines()
    if code == 0:
        return Road(AUTO, "MPI moved 4 MiB of device memory right; by size, as first calls say")
    why = lines[-1][:LONGEST_REASON] if lines else "nothing said"
    return Road(NEVER, f"MPI does not take device memory (exit code {code}: {why})")

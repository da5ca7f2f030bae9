"""The reduction operations, and which dtypes each of them fits."""

from __future__ import annotations

import enum
import functools

import jax
import jax.numpy as jnp
import numpy as np


class Op(enum.IntEnum):
    """A predefined MPI reduction operation; the number is its place in the handlers' table."""

    SUM = 0
    PROD = 1
    MIN = 2
    MAX = 3
    LAND = 4
    LOR = 5
    LXOR = 6
    BAND = 7
    BOR = 8
    BXOR = 9

    def __repr__(self) -> str:
        return self.name

    __str__ = __repr__


SUM, PROD, MIN, MAX, LAND, LOR, LXOR, BAND, BOR, BXOR = Op

_LOGICAL = (LAND, LOR, LXOR)

_REMEDY = {
    "bool": "use LAND, LOR or LXOR, or cast to an integer",
    "integer": "use SUM, PROD, MIN, MAX, or a logical or bitwise operation",
    "floating": "use SUM, PROD, MIN or MAX",
    "complex": "use SUM or PROD, or reduce the real and imaginary parts apart",
}
_ALLOWED = {
    "bool": _LOGICAL,
    "integer": tuple(Op),
    "floating": (SUM, PROD, MIN, MAX),
    "complex": (SUM, PROD),
}

# dtype -> (number in XLA's FFI, name of the mpi4py datatype). 16-bit floats travel as float32.
DTYPES: dict[np.dtype, tuple[int, str | None]] = {
    np.dtype(np.bool_): (1, "C_BOOL"),
    np.dtype(np.int8): (2, "INT8_T"),
    np.dtype(np.int16): (3, "INT16_T"),
    np.dtype(np.int32): (4, "INT32_T"),
    np.dtype(np.int64): (5, "INT64_T"),
    np.dtype(np.uint8): (6, "UINT8_T"),
    np.dtype(np.uint16): (7, "UINT16_T"),
    np.dtype(np.uint32): (8, "UINT32_T"),
    np.dtype(np.uint64): (9, "UINT64_T"),
    np.dtype(np.float16): (10, None),
    np.dtype(np.float32): (11, "FLOAT"),
    np.dtype(np.float64): (12, "DOUBLE"),
    np.dtype(np.complex64): (15, "C_FLOAT_COMPLEX"),
    np.dtype(jnp.bfloat16): (16, None),
    np.dtype(np.complex128): (18, "C_DOUBLE_COMPLEX"),
}


def _kind(dtype: np.dtype) -> str:
    if dtype == np.bool_:
        return "bool"
    if jnp.issubdtype(dtype, jnp.integer):
        return "integer"
    return "complex" if jnp.issubdtype(dtype, jnp.complexfloating) else "floating"


@functools.cache
def check_op(op: Op, dtype: np.dtype, call: str) -> None:
    """Raise unless the operation is defined for the dtype."""
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        raise TypeError(
            f"`x` of {call} has dtype {dtype}, which cannot be reduced: use jax.random.key_data, "
            "or give one rank's keys to all with bcast."
        )
    if dtype not in DTYPES:
        raise TypeError(
            f"`x` of {call} has dtype {dtype}, which MPI cannot reduce: cast it to a wider dtype, "
            "for instance x.astype(jnp.float32)."
        )
    kind = _kind(dtype)
    if op not in _ALLOWED[kind]:
        raise TypeError(
            f"`op` of {call} is {op}, which does not fit dtype {dtype}: {_REMEDY[kind]}."
        )


def identity(op: Op, dtype: np.dtype) -> bytes:
    """The element that leaves the others as they are, as it lies in memory."""
    if op == BAND:
        return b"\xff" * dtype.itemsize
    if op in (MIN, MAX) and _kind(dtype) == "floating":
        value = np.inf if op == MIN else -np.inf
    elif op in (MIN, MAX):
        value = jnp.iinfo(dtype).max if op == MIN else jnp.iinfo(dtype).min
    else:
        value = 1 if op in (PROD, LAND) else 0
    return np.array(value).astype(dtype).tobytes()


def identities() -> dict[tuple[int, int], bytes]:
    """Every identity, by operation number and XLA dtype number."""
    return {
        (int(op), number): identity(op, dtype)
        for dtype, (number, _) in DTYPES.items()
        for op in _ALLOWED[_kind(dtype)]
    }

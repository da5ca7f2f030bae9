"""Checks of arguments: every wrong one raises while tracing, on every rank, and says the remedy."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from distsolve.mpi.library import load
from distsolve.mpi.native import abi
from distsolve.mpi.operations import Op
from distsolve.mpi.wildcards import ANY_SOURCE, ANY_TAG, PROC_NULL

if TYPE_CHECKING:
    from distsolve.mpi.comm import Comm

MAX_CHUNK = 1 << 30
MAX_COUNT = (1 << 63) - 1  # of rows: an array has no more


def as_int(value: Any, what: str) -> int:
    """An int, also from a NumPy or JAX scalar; `what` names the argument in the error."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise TypeError(
        f"{what} is {value!r} of type {type(value).__name__}; expected an int that is known while "
        "tracing."
    )


def as_flag(value: Any, what: str) -> bool:
    """A bool, also from NumPy; `what` names the argument in the error."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(
            f"{what} is {value!r} of type {type(value).__name__}; expected True or False."
        )
    return bool(value)


def check_chunk(nbytes: int, name: str) -> int:
    """Raise unless a chunk can hold an element and be counted by an int."""
    value = as_int(nbytes, f"`{name}`")
    if not 16 <= value <= MAX_CHUNK:
        raise ValueError(
            f"`{name}` is {value}; expected a number of bytes from 16 to {MAX_CHUNK}, the same "
            "on all ranks."
        )
    return value


def as_chunk(chunk_bytes: int | None) -> int:
    """The `chunk_bytes` of a call as programs carry it: 0 is the communicator's default."""
    return 0 if chunk_bytes is None else check_chunk(chunk_bytes, "chunk_bytes")


def check_root(root: Any, comm: Comm, call: str) -> int:
    """Raise unless `root` is a rank of the communicator."""
    value = as_int(root, f"`root` of {call}")
    if not 0 <= value < comm.size:
        raise ValueError(
            f"`root` of {call} is {value}; expected a rank from 0 to {comm.size - 1} of the "
            "communicator."
        )
    return value


def check_peer(peer: Any, comm: Comm, name: str, call: str) -> int:
    """A rank, or the canonical number of a wildcard; ``ANY_SOURCE`` only where it is a source."""
    value = as_int(peer, f"`{name}` of {call}")
    if 0 <= value < comm.size:
        return value
    library = load()
    if peer is ANY_TAG:  # in some MPI libraries the number of PROC_NULL
        value = comm.size
    if value == library.proc_null:
        return abi.PROC_NULL
    if value == library.any_source and name != "dest":
        return abi.ANY_SOURCE
    wildcards = "PROC_NULL" if name == "dest" else "ANY_SOURCE or PROC_NULL"
    raise ValueError(
        f"`{name}` of {call} is {peer}; expected a rank from 0 to {comm.size - 1} of the "
        f"communicator, or {wildcards}."
    )


def check_tag(tag: Any, name: str, call: str) -> int:
    """A tag, or the canonical number of ``ANY_TAG`` where the tag is one to receive."""
    value = as_int(tag, f"`{name}` of {call}")
    receives = name == "recvtag" or call == "recv"
    if receives and value == load().any_tag and not (tag is ANY_SOURCE or tag is PROC_NULL):
        return abi.ANY_TAG
    largest = load().max_tag
    if not 0 <= value <= largest:
        raise ValueError(
            f"`{name}` of {call} is {tag}; expected a number from 0 to {largest}"
            + (", or ANY_TAG." if receives else ".")
        )
    return value


def as_counts(counts: Sequence[int], comm: Comm, name: str, call: str) -> tuple[int, ...]:
    try:
        values = tuple(as_int(c, f"`{name}` of {call}") for c in counts)
    except TypeError as error:
        raise TypeError(
            f"`{name}` of {call} is {counts!r}; expected {comm.size} ints that are known while "
            "tracing."
        ) from error
    if len(values) != comm.size or min(values) < 0 or max(values) > MAX_COUNT:
        raise ValueError(
            f"`{name}` of {call} is {counts!r}; expected {comm.size} non-negative ints, one per "
            f"rank, of at most {MAX_COUNT}."
        )
    return values


def as_op(op: Any, call: str) -> Op:
    if isinstance(op, Op):
        return op
    library = load()
    if library.MPI is not None and isinstance(op, library.MPI.Op):
        known = library.op_of(op)
        if known is not None:
            return known
        raise ValueError(
            f"`op` of {call} is an MPI operation that compiled programs cannot use; expected one "
            f"of {', '.join(o.name for o in Op)}."
        )
    raise TypeError(
        f"`op` of {call} is {op!r} of type {type(op).__name__}; expected an operation such as "
        "distsolve.mpi.SUM or mpi4py.MPI.SUM."
    )


def check_leading(x: Any, wanted: int, call: str, why: str = "one entry per rank") -> None:
    """Raise unless the leading axis has the length that the communicator or the counts give."""
    if x.ndim == 0 or x.shape[0] != wanted:
        raise ValueError(
            f"`x` of {call} has shape {x.shape}; expected a leading axis of length {wanted}, {why}."
        )


def donated(x: Any, donate: bool, call: str) -> bool:
    """Whether to donate; raises, before anything is sent, where an array stands in `x` twice."""
    donate = as_flag(donate, f"`donate` of {call}")
    leaves = jax.tree.leaves(x) if donate else []
    if len({id(leaf) for leaf in leaves}) < len(leaves):
        raise ValueError(
            f"`donate=True` of {call}: an array is in `x` twice, and cannot be consumed twice. "
            "Pass a copy, or do not donate."
        )
    return donate

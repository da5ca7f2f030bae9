"""Shapes, aliases, batching and reasons, shared by the rows of ``table.py``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distsolve.mpi._jaxcompat import ShapedArray, batching
from distsolve.mpi.comm import of_id
from distsolve.mpi.operations import SUM, Op

# Bytes of a message in the background, as an operand.
MAX_REQUEST = 1 << 20

Avals = Sequence[ShapedArray]
Batched = tuple[list[Any], list[Any]]


def _size(operands: Sequence, dims: Sequence) -> int:
    return next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)


def each_apart(bind: Callable, operands: Sequence, dims: Sequence, params: dict) -> Batched:
    """Element by element: every operand keeps its batch axis where it is."""
    return bind(*operands, **params), list(dims)


def in_front(bind: Callable, operands: Sequence, dims: Sequence, params: dict) -> Batched:
    """The batch is one axis more of what the operand is a stack of."""
    (x,), (dim,) = operands, dims
    return bind(jnp.moveaxis(x, dim, 0), **params), [0]


def received(bind: Callable, operands: Sequence, dims: Sequence, params: dict) -> Batched:
    """Whole messages: all operands get a leading batch axis; the status has none."""
    size = _size(operands, dims)
    operands = [batching.bdim_at_front(x, d, size) for x, d in zip(operands, dims, strict=True)]
    results = bind(*operands, **params)
    return results, [0, None][: len(results)]


def behind_ranks(axis_in: int, axis_out: int) -> Callable[..., Batched]:
    """The batch axis goes behind the axis of ranks, so that the message stays one."""

    def batch(bind: Callable, operands: Sequence, dims: Sequence, params: dict) -> Batched:
        (x,), (dim,) = operands, dims
        return bind(jnp.moveaxis(x, dim, axis_in), **params), [axis_out]

    return batch


def batch_rooted(root_in: int, root_out: int) -> Callable[..., Batched]:
    """Where only the root's array has the axis of ranks, only its batch axis goes behind it."""
    at_root = behind_ranks(root_in, root_out)
    elsewhere = behind_ranks(0, 0)

    def batch(bind: Callable, xs: Sequence, dims: Sequence, params: dict) -> Batched:
        return (at_root if is_root(params) else elsewhere)(bind, xs, dims, params)

    return batch


def same_shapes(avals: Avals, params: dict) -> list[ShapedArray]:
    return [ShapedArray(a.shape, a.dtype) for a in avals]


def in_place(avals_in: Avals, avals_out: Avals, params: dict) -> dict[int, int]:
    """Every result lies where its operand lay."""
    return {i: i for i in range(len(avals_out))}


def given_back(avals_in: Avals, avals_out: Avals, params: dict) -> dict[int, int]:
    """On ranks that are not the root the operand comes back as the result."""
    return {} if is_root(params) else {0: 0}


def template_in_place(avals_in: Avals, avals_out: Avals, params: dict) -> dict[int, int]:
    """A message is received into its template, the last operand."""
    return {len(avals_in) - 1: 0}


def started(avals: Avals, params: dict) -> list[ShapedArray]:
    """The number of a request (64 bits in two words, also where JAX has 32), then every operand."""
    size = sum(a.size * a.dtype.itemsize for a in avals[: params["count"]])
    if size > MAX_REQUEST:
        raise ValueError(
            f"`x` of iallreduce has {size} bytes, but a message in the background is copied, and "
            f"may have {MAX_REQUEST} at most: use `allreduce`."
        )
    return [ShapedArray((2,), np.dtype(np.uint32)), *same_shapes(avals, params)]


def waited(bind: Callable, operands: Sequence, dims: Sequence, params: dict) -> Batched:
    """One message for the batch, so one number."""
    if dims[0] is not None:
        raise NotImplementedError(
            "wait under vmap got requests that differ along the batch: call `iallreduce` and "
            "`wait` in the same iteration of a loop whose condition depends on the batch."
        )
    return bind(*operands, **params), list(dims[1:])


def only_of_sums(call: str) -> Callable[[dict], str | None]:
    """The reason why an operation other than SUM has no derivative."""

    def reason(params: dict) -> str | None:
        if params["op"] == SUM:
            return None
        return (
            f"{call} with op={Op(params['op'])} has no derivative, only op=SUM has: wrap the "
            "argument in `jax.lax.stop_gradient` if it must not contribute."
        )

    return reason


def is_root(params: dict) -> bool:
    return of_id(params["comm"]).rank == params["root"]


def rooted_shapes(axis_at_root: Callable[[tuple, int], tuple]) -> Callable[..., list[ShapedArray]]:
    """Results that differ at the root; the others get their operand back."""

    def outputs(avals: Avals, params: dict) -> list[ShapedArray]:
        (x,) = avals
        if not is_root(params):
            return [ShapedArray(x.shape, x.dtype)]
        return [ShapedArray(axis_at_root(x.shape, of_id(params["comm"]).size), x.dtype)]

    return outputs


def leading_rows(counts: Callable[[dict], int]) -> Callable[..., list[ShapedArray]]:
    return lambda avals, params: [
        ShapedArray((counts(params), *avals[0].shape[1:]), avals[0].dtype)
    ]


def my_rows(params: dict) -> int:
    return params["counts"][of_id(params["comm"]).rank]


def message_and_status(avals: Avals, params: dict) -> list[ShapedArray]:
    """The received array, and (source, tag, count)."""
    integer = np.int64 if jax.config.read("jax_enable_x64") else np.int32
    return [ShapedArray(avals[-1].shape, avals[-1].dtype), ShapedArray((3,), np.dtype(integer))]


def no_derivative(call: str) -> Callable[[dict], str]:
    return lambda params: (
        f"{call} has no derivative, because one rank alone cannot reverse a message: use "
        "`sendrecv`, which has one."
    )


def zeros_like(aval: ShapedArray) -> Any:
    """Zeros of the same shape and dtype."""
    return jnp.zeros(aval.shape, aval.dtype)


def on_rank(condition: bool, x: Any) -> Any:
    """`x` on the ranks where the condition holds and zeros elsewhere; linear in `x` everywhere."""
    return jnp.where(condition, x, jnp.zeros_like(x))

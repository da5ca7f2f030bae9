"""Batching and transposition rules, shared by the rows of the table in ``ops.py``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from distsolve.mpi._jaxcompat import ShapedArray, batching

Batched = tuple[list[Any], list[Any]]


def _size(operands: Sequence, dims: Sequence) -> int:
    return next(
        x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None
    )


def each_apart(bind: Callable, operands: Sequence, dims: Sequence, params: dict) -> Batched:
    """Element by element: every operand keeps its batch axis where it is."""
    return bind(*operands, **params), list(dims)


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


def zeros_like(aval: ShapedArray) -> Any:
    """Zeros of the same shape and dtype."""
    return jnp.zeros(aval.shape, aval.dtype)


def on_rank(condition: bool, x: Any) -> Any:
    """`x` on the ranks where the condition holds and zeros elsewhere; linear in `x` everywhere."""
    return jnp.where(condition, x, jnp.zeros_like(x))

"""Symmetric matrices as half as many numbers, for memory that only XLA touches.

In host memory the handler of `allreduce_symmetric` sends the rows of the upper triangles from where
they lie. In device memory it cannot: there the program folds them, and sends what that gives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def through(total: Callable[..., list], S: jax.Array, **params: Any) -> list:
    """A sum over ranks, which gets and gives a list of arrays, of what is folded."""
    (folded,) = total(fold(S), **params)
    return [unfold(folded, S.shape[-1])]


def fold(S: jax.Array) -> jax.Array:
    """Upper triangles without gaps.

    Parameters
    ----------
    S : (..., n, n)

    Returns
    -------
    (..., h, n + 1) with h = ceil(n / 2). Row r is the row n - 1 - r of `S` up to its diagonal, from
    behind, and then row r from its diagonal on. Where n is odd, the last row has its own twice.
    """
    n = S.shape[-1]
    half = (n + 1) // 2
    rest = [(0, 0)] * (S.ndim - 1)
    bottom = jnp.pad(jnp.flip(S, (-2, -1))[..., :half, :], [*rest, (0, 1)])
    top = jnp.pad(S[..., :half, :], [*rest, (1, 0)])
    return jnp.where(jnp.tri(half, n + 1, dtype=bool), bottom, top)


def unfold(folded: jax.Array, n: int) -> jax.Array:
    """Hermitian matrices (..., n, n) from their folded upper triangles."""
    bottom = jnp.flip(folded[..., : n // 2, :-1], (-2, -1))
    upper = jnp.concatenate([folded[..., 1:], bottom], axis=-2)
    lower = jnp.conj(jnp.swapaxes(upper, -2, -1))
    return jnp.where(jnp.tri(n, k=-1, dtype=bool), lower, upper)

"""Centred sums of products over ranks: each rank's own, and how they merge.

Reference: Chan, Golub and LeVeque (1983), doi:10.1080/00031305.1983.10483115.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from distsolve.linalg import trees
from distsolve.linalg.space import Space

# Means and centred sums of all ranks are gathered up to this many bytes on each of them.
GATHERED_BYTES = 1 << 20

Arrays = Sequence[jax.Array]
Product = Callable[[jax.Array, jax.Array], jax.Array]


def sum_of_products(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return ``sum_k a_k b_k``."""
    return jnp.sum(a * b, 0)


def sum_of_outer_products(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return ``sum_k a_ki conj(b_kj)``."""
    return jnp.tensordot(a, b.conj(), axes=(0, 0), precision=trees.HIGHEST)


def centred_sums(
    groups: list[Arrays], product: Product, space: Space
) -> list[tuple[jax.Array, jax.Array]]:
    """Return the count and the centred sum of products of each group of arrays, over all ranks.

    A group is one array or two, of which the first and the last are multiplied. `reductions.var`
    says which messages are sent.
    """
    local = [_about_own_mean(arrays, product) for arrays in groups]
    flat, unravel = ravel_pytree(local)
    if space.ranks() * flat.nbytes <= GATHERED_BYTES:
        everyone = jax.vmap(unravel)(space.gather(flat))
        return [_merge(product, *one) for one in everyone]

    def sums(arrays: Arrays) -> Any:
        return [jnp.sum(a, 0) for a in arrays]

    counts, totals = space.sum(([one[0] for one in local], [sums(arrays) for arrays in groups]))
    centred = [
        [a - (total / count)[None] for a, total in zip(arrays, both, strict=True)]
        for arrays, count, both in zip(groups, counts, totals, strict=True)
    ]
    left, seconds = space.sum(
        ([sums(arrays) for arrays in centred], [product(d[0], d[-1]) for d in centred])
    )
    return [
        (count, second - product(both[0][None], both[-1][None]) / count)
        for count, both, second in zip(counts, left, seconds, strict=True)
    ]


def _about_own_mean(arrays: Arrays, product: Product) -> Any:
    """Return the count, the means in two parts, and the centred sum of this rank's samples."""
    count = jnp.asarray(len(arrays[0]), arrays[0].dtype)
    divisor = jnp.maximum(count.real, 1).astype(count.dtype)
    means = [jnp.sum(a, 0) / divisor for a in arrays]
    centred = [a - mean[None] for a, mean in zip(arrays, means, strict=True)]
    # What rounding has left of the means: nothing to a large mean, much to a small spread.
    rests = [jnp.sum(d, 0) / divisor for d in centred]
    total = product(centred[0], centred[-1])
    total -= product(count * rests[0][None], rests[-1][None])
    return count, means, rests, total


def _merge(
    product: Product, counts: jax.Array, means: Arrays, rests: Arrays, totals: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the count and the centred sum of all ranks from those of each: (P, ...)."""
    count, largest = jnp.sum(counts), jnp.argmax(counts.real)
    weights = [counts.reshape(-1, *[1] * (m.ndim - 1)) for m in means]
    # Differences of means first: they are small, and exact or nearly so.
    apart = [
        (m - m[largest][None]) + (rest - rest[largest][None])
        for m, rest in zip(means, rests, strict=True)
    ]
    apart = [d - (jnp.sum(w * d, 0) / count)[None] for w, d in zip(weights, apart, strict=True)]
    return count, jnp.sum(totals, 0) + product(weights[0] * apart[0], apart[-1])

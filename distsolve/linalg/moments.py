"""Counts, means and centred sums of products of the samples on all ranks, in one message.

Reference: Chan, Golub and LeVeque (1983), doi:10.1080/00031305.1983.10483115.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from distsolve.linalg import trees
from distsolve.linalg.space import Space
from distsolve.linalg.tiles import Moments, tilings

Group = tuple[jax.Array, ...]


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def of_groups(groups: list[Group], hermitian: bool, space: Space) -> list[Moments]:
    """Return the moments of each group of arrays, over all ranks.

    Parameters
    ----------
    groups : list of (x,) or of (x, y)
        Samples (n, p) and (n, q) of this rank, all groups of one kind and all of one dtype: real
        where a group is one array.
    hermitian : whether y is x
    space : where the samples are

    Returns
    -------
    list of Moments, replicated

    Communication: one `Space.merge_moments`; with its derivative one `sum` more.
    """
    found = [_here(group) for group in groups]
    if space.ranks() > 1:
        cuts = tilings([moments.total.shape for moments in found], hermitian)
        packed = [cut.pack(moments) for cut, moments in zip(cuts, found, strict=True)]
        merged = space.merge_moments(jnp.concatenate(packed), cuts[0].sides)
        pieces = jnp.split(merged, np.cumsum([len(tiles) for tiles in packed])[:-1])
        found = [cut.unpack(piece) for cut, piece in zip(cuts, pieces, strict=True)]
    if hermitian:
        found = [moments._replace(total=_mirrored(moments.total)) for moments in found]
    return found


@of_groups.defjvp
def _of_groups_jvp(hermitian: bool, space: Space, primals: Any, tangents: Any) -> Any:
    # d sum_k (x - m) conj(y - w) = sum_k dx conj(y - w) + (x - m) conj(dy), because the distances
    # from the means m and w add up to nothing; d m = sum_k dx / N.
    ((groups,), (t_groups,)) = primals, tangents
    found = of_groups(groups, hermitian, space)

    def here(group: Group, t_group: Group, moments: Moments) -> Any:
        product = _product(group)
        centred = _centred(_centred(group, moments.means), moments.rests)
        t_total = product(t_group[0], centred[-1]) + product(centred[0], t_group[-1])
        return [jnp.sum(part, 0) for part in t_group], t_total

    # One array, or in reverse mode a message of its own would sum the zeros of what has no tangent.
    flat, unravel = ravel_pytree(list(map(here, groups, t_groups, found)))
    sums = unravel(space.sum(flat))
    return found, [
        Moments(
            jnp.zeros_like(moments.n),
            [part / _divisor(moments.n, part.dtype) for part in t_means],
            [jnp.zeros_like(rest) for rest in moments.rests],
            t_total,
        )
        for moments, (t_means, t_total) in zip(found, sums, strict=True)
    ]


def _here(group: Group) -> Moments:
    """Return the moments of this rank's samples."""
    count = jnp.asarray(len(group[0]), group[0].real.dtype)
    divisor = _divisor(count, group[0].dtype)
    means = [jnp.sum(a, 0) / divisor for a in group]
    centred = _centred(group, means)
    rests = [jnp.sum(d, 0) / divisor for d in centred]
    product = _product(group)
    total = product(centred[0], centred[-1])
    total -= product(divisor * rests[0][None], rests[-1][None])
    return Moments(count, means, rests, total)


def _divisor(count: jax.Array, dtype: Any) -> jax.Array:
    return jnp.maximum(count, 1).astype(dtype)


def _centred(group: Any, means: list[jax.Array]) -> list[jax.Array]:
    return [a - mean[None] for a, mean in zip(group, means, strict=True)]


def _product(group: Group) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Return what is summed over the samples of a group."""
    return _sum_of_squares if len(group) == 1 else _sum_of_outer_products


def _sum_of_squares(x: jax.Array, same: jax.Array) -> jax.Array:
    return jnp.sum(x * same, 0)


def _sum_of_outer_products(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.tensordot(x, y.conj(), axes=(0, 0), precision=trees.HIGHEST)


def _mirrored(total: jax.Array) -> jax.Array:
    """Return the Hermitian matrix with the upper triangle of ``total``."""
    upper = jnp.triu(total, 1)
    return upper + upper.conj().T + jnp.diag(jnp.diagonal(total).real).astype(total.dtype)

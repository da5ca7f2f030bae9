"""Moments of samples cut into tiles, of which their message consists; no communication.

What lies where in a tile is said in `distsolve/mpi/native/moments.pyx`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from distsolve.linalg import trees

SIDE = 32  # rows or columns of a tile, at most: then its sums are many beside its means
HEAD = 3  # numbers of a tile before its means


class Moments(NamedTuple):
    """What is kept of samples x (n, p), or of x and y (n, q) taken together.

    Attributes
    ----------
    n : real scalar
        How many samples there are.
    means : [(p,)] or [(p,), (q,)]
    rests : alike
        What rounding has left of the means: nothing to a large mean, much to a small spread.
    total : (p,) or (p, q)
        ``sum_k d_ki^2`` or ``sum_k d_ki conj(e_kj)`` with the distances d and e from the means.
    """

    n: jax.Array
    means: list[jax.Array]
    rests: list[jax.Array]
    total: jax.Array


class Tiling(NamedTuple):
    """How moments are cut.

    Attributes
    ----------
    shape : (p,) or (p, q)
    sides : (rows,) or (rows, columns) of a tile
    hermitian : whether y is x, so that tiles on and above the diagonal say all
    """

    shape: tuple[int, ...]
    sides: tuple[int, ...]
    hermitian: bool

    def pack(self, moments: Moments) -> jax.Array:
        """Return the tiles of moments, padded with zeros: (tiles, length)."""
        places, dtype = np.nonzero(self._used()), moments.total.dtype
        sides = [*self.sides, 0][:2]
        head = jnp.stack([moments.n.astype(dtype), *(jnp.asarray(n, dtype) for n in sides)])
        pieces = [jnp.tile(head, (len(places[0]), 1))]
        for parts in (moments.means, moments.rests):
            for axis, part in enumerate(parts):
                pieces.append(self._blocks(part, [axis])[places[axis]])
        pieces.append(self._blocks(moments.total, range(len(self.shape)))[places])
        return jnp.concatenate([piece.reshape(len(piece), -1) for piece in pieces], axis=1)

    def unpack(self, tiles: jax.Array) -> Moments:
        """Return the moments in tiles; of a Hermitian total the upper triangle is right."""
        used, k = self._used(), len(self.shape)
        number = np.where(used, np.cumsum(used).reshape(used.shape) - 1, 0)
        # Where each block of rows and each block of columns has a tile.
        places = [number] if k == 1 else [number[:, -1], number[0]]
        head, *parts, total = jnp.split(tiles, np.cumsum([HEAD, *self.sides, *self.sides]), axis=1)
        vectors = [
            part[places[i % k]].reshape(-1)[: self.shape[i % k]] for i, part in enumerate(parts)
        ]
        blocks = total[number].reshape(*used.shape, *self.sides)
        blocks = blocks.transpose(np.arange(2 * k).reshape(2, k).T.ravel())
        whole = blocks.reshape([n * side for n, side in zip(used.shape, self.sides, strict=True)])
        total = whole[tuple(map(slice, self.shape))]
        return Moments(head[0, 0].real, vectors[:k], vectors[k:], total)

    def _used(self) -> np.ndarray:
        """Return which places of the grid of tiles have one; there is one at least."""
        grid = [max(-(-n // side), 1) for n, side in zip(self.shape, self.sides, strict=True)]
        return np.triu(np.ones(grid, bool)) if self.hermitian else np.ones(grid, bool)

    def _blocks(self, array: jax.Array, axes: Sequence[int]) -> jax.Array:
        """Return an array in blocks, of which each of its axes goes along one of the tiling's."""
        sides = [self.sides[axis] for axis in axes]
        grid = [self._used().shape[axis] for axis in axes]
        room = [n * side for n, side in zip(grid, sides, strict=True)]
        array = jnp.pad(array, [(0, m - n) for m, n in zip(room, array.shape, strict=True)])
        array = array.reshape([m for pair in zip(grid, sides, strict=True) for m in pair])
        return array.transpose(np.arange(2 * len(axes)).reshape(-1, 2).T.ravel())


def tilings(shapes: Sequence[tuple[int, ...]], hermitian: bool) -> list[Tiling]:
    """Return how moments of these shapes are cut into tiles that are all alike."""
    sides = tuple(max(map(_side, along)) for along in zip(*shapes, strict=True))
    return [Tiling(shape, sides, hermitian) for shape in shapes]


def _side(n: int) -> int:
    """Return the side of the fewest blocks that n entries fit into, without much padding."""
    return max(-(-n // max(-(-n // SIDE), 1)), 1)


def merge(tiles: jax.Array, sides: tuple[int, ...]) -> jax.Array:
    """Return the tiles that all ranks' tiles (ranks, tiles, length) merge into: (tiles, length)."""
    n = sum(sides)
    heads, means, rests, totals = jnp.split(tiles, [HEAD, HEAD + n, HEAD + 2 * n], axis=-1)
    counts = heads[..., :1]
    count = jnp.sum(counts, 0)
    largest = jnp.argmax(counts.real, 0)[None]
    mean, rest = (jnp.take_along_axis(part, largest, 0)[0] for part in (means, rests))
    # Differences of means first: they are small, and exact or nearly so.
    apart = (means - mean[None]) + (rests - rest[None])
    shift = jnp.sum(counts * apart, 0) / jnp.maximum(count.real, 1).astype(count.dtype)
    apart = apart - shift[None]
    x, y = jnp.split(apart, sides[:1], axis=-1)
    if len(sides) == 1:
        among = jnp.sum(counts * x * x, 0)
    else:
        among = jnp.einsum("ptr,ptc->trc", counts * x, y.conj(), precision=trees.HIGHEST)
    total = jnp.sum(totals, 0) + among.reshape(len(count), -1)
    return jnp.concatenate([count, heads[0, :, 1:], mean, rest + shift, total], axis=-1)

"""Metropolis sampling of the walkers that one rank holds. No communication."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .xyz import Molecule


class Walkers(NamedTuple):
    """The walkers of one rank: n of the N on all ranks."""

    x: jax.Array  # (n, n_electrons, 3) in bohr
    keys: jax.Array  # (n,) one random stream per walker
    moves: jax.Array  # scalar: how many moves the streams have served


def share(total: int, rank: int, size: int) -> range:
    """Indices of the walkers that a rank holds; the first ranks take the remainder.

    Parameters
    ----------
    total : int
        Walkers on all ranks.
    rank, size : int
        Of the communicator.

    Returns
    -------
    range
    """
    each, rest = divmod(total, size)
    start = rank * each + min(rank, rest)
    return range(start, start + each + (rank < rest))


def initial_walkers(key: jax.Array, molecule: Molecule, mine: range) -> Walkers:
    """Electrons near the nuclei, as many at each as its charge wants, the rest in turn.

    A walker's stream depends on its index among all walkers, not on the rank: the ranks draw
    different numbers, and a run draws the same numbers on any number of ranks.

    Parameters
    ----------
    key : PRNG key
        The same on all ranks.
    molecule : Molecule
        The nuclei.
    mine : range
        As from `share`.

    Returns
    -------
    Walkers
        Of this rank.
    """
    keys = jax.vmap(lambda index: jax.random.fold_in(key, index))(jnp.arange(mine.start, mine.stop))
    # Round by round, one electron to each nucleus that has charge left, heaviest first;
    # up and down electrons alternate so that an atom gets both.
    order = np.argsort(-molecule.numbers, kind="stable")
    rounds = [a for k in range(molecule.n_electrons) for a in order if molecule.numbers[a] > k]
    seats = (rounds * molecule.n_electrons)[: molecule.n_electrons]
    homes = molecule.positions[seats[::2] + seats[1::2]]

    def place(walker_key):
        noise = jax.random.normal(jax.random.fold_in(walker_key, 0), homes.shape)
        return homes + noise

    return Walkers(jax.vmap(place)(keys), keys, jnp.ones((), jnp.uint32))


def metropolis(
    log_psi: Callable, walkers: Walkers, step: jax.Array, n_moves: int
) -> tuple[Walkers, jax.Array]:
    """Move all electrons of each walker `n_moves` times; stationary for ``|psi|^2``.

    Parameters
    ----------
    log_psi : callable
        From ``(n_electrons, 3)`` to the logarithm of ``|psi|``.
    walkers : Walkers
        Of this rank.
    step : scalar
        Standard deviation of a move per coordinate, in bohr; the same on all ranks.
    n_moves : int
        Enough to forget: neighbouring measurements should be nearly independent.

    Returns
    -------
    walkers : Walkers
        After the moves.
    accepted : (n,) array
        Accepted fraction of each walker's moves.
    """
    batched = jax.vmap(log_psi)

    def move(k, carry):
        x, value, accepted = carry

        def draw(walker_key):
            stream = jax.random.fold_in(walker_key, walkers.moves + k)
            return jax.random.normal(stream, (x[0].size + 2,), x.dtype)

        normals = jax.vmap(draw)(walkers.keys)
        noise = normals[:, :-2].reshape(x.shape)
        # Half the squares of two normals are -log of a uniform number: one draw serves both.
        log_uniform = -jnp.sum(normals[:, -2:] ** 2, axis=1) / 2
        proposal = x + step * noise
        proposed = batched(proposal)
        accept = log_uniform < 2 * (proposed - value)
        x = jnp.where(accept[:, None, None], proposal, x)
        return x, jnp.where(accept, proposed, value), accepted + accept

    start = (walkers.x, batched(walkers.x), jnp.zeros(len(walkers.x), walkers.x.dtype))
    x, _, accepted = jax.lax.fori_loop(0, n_moves, move, start)
    moved = Walkers(x, walkers.keys, walkers.moves + jnp.uint32(n_moves))
    return moved, accepted / n_moves

"""Local energy of one walker, in hartree."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import jax
import jax.numpy as jnp
import numpy as np

from .xyz import Molecule


def gradient_and_laplacian(f: Callable, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """First derivatives and Laplacian of a scalar function, in forward mode.

    One Taylor expansion to second order per coordinate, all of them in one `vmap`: what does not
    depend on the direction is computed once, and nothing is stored for a backward pass.

    Parameters
    ----------
    f : callable
        From `x` to a scalar.
    x : array
        The point.

    Returns
    -------
    gradient : (x.size,) array
    laplacian : scalar
    """

    def second_order(direction):
        def slope(y):
            return jax.jvp(f, (y,), (direction,))[1]

        return jax.jvp(slope, (x,), (direction,))

    directions = jnp.eye(x.size, dtype=x.dtype).reshape(-1, *x.shape)
    first, second = jax.vmap(second_order)(directions)
    return first, jnp.sum(second)


def potential(x: jax.Array, molecule: Molecule) -> jax.Array:
    """Coulomb energy of electrons and nuclei.

    Parameters
    ----------
    x : (n_electrons, 3) array
        In bohr.
    molecule : Molecule
        The nuclei.

    Returns
    -------
    scalar
        In hartree.
    """
    r = jnp.linalg.norm(x[:, None] - molecule.positions, axis=-1)
    energy = -jnp.sum(molecule.numbers / r)
    for i, j in combinations(range(len(x)), 2):
        energy += 1 / jnp.linalg.norm(x[i] - x[j])
    for a, b in combinations(range(len(molecule.numbers)), 2):
        distance = np.linalg.norm(molecule.positions[a] - molecule.positions[b])
        energy += molecule.numbers[a] * molecule.numbers[b] / distance
    return energy


def local_energy(log_psi: Callable, x: jax.Array, molecule: Molecule) -> jax.Array:
    """Local energy ``(H psi)(x) / psi(x) = -(lap log psi + |grad log psi|^2) / 2 + V(x)``.

    Parameters
    ----------
    log_psi : callable
        From ``(n_electrons, 3)`` to the logarithm of ``|psi|``.
    x : (n_electrons, 3) array
        One walker in bohr.
    molecule : Molecule
        The nuclei.

    Returns
    -------
    scalar
        In hartree.
    """
    gradient, laplacian = gradient_and_laplacian(log_psi, x)
    return -(laplacian + jnp.sum(gradient**2)) / 2 + potential(x, molecule)

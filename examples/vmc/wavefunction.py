"""The trial wave function: s orbitals, exact cusps and a neural Jastrow factor.

    psi(x) = det[phi_k(x_i up)] det[phi_k(x_i down)] exp(C(x) + F(x))

Orbitals `phi` and the neural part `F` see distances only through functions that are smooth at
distance zero, so the cusps come from `C` alone and hold for all parameters:

    C = - sum_iA Z_A r_iA / (1 + b_A r_iA) + sum_i<j c_ij r_ij / (1 + d r_ij)

with c = 1/2 for electrons of opposite spin and 1/4 for equal spin (Kato 1957,
doi:10.1002/cpa.3160100201).
"""

from __future__ import annotations

from itertools import combinations

import jax
import jax.numpy as jnp
import numpy as np

from .xyz import Molecule


def initial_parameters(key: jax.Array, molecule: Molecule, width: int = 16) -> dict:
    """Parameters of the start, a simple molecular orbital picture without the neural part.

    Parameters
    ----------
    key : PRNG key
        The same on all ranks: parameters are replicated.
    molecule : Molecule
        Gives the sizes and the starting orbitals.
    width : int
        Hidden width of the two neural networks.

    Returns
    -------
    dict
        Pytree of parameters, replicated.
    """
    centres, exponents = _basis(molecule)
    n_atoms = len(molecule.numbers)
    one_key, pair_key = jax.random.split(key)
    parameters = {
        "log_exponent": jnp.log(exponents),
        "orbitals": jnp.asarray(_hueckel_orbitals(molecule, centres, exponents)),
        "log_nuclear_range": jnp.zeros(n_atoms),
        "one": _initial_network(one_key, 2 * n_atoms, width),
    }
    if molecule.n_electrons > 1:
        parameters["log_pair_range"] = jnp.zeros(())
        parameters["pair"] = _initial_network(pair_key, 2 + 4 * n_atoms, width)
    return parameters


def log_psi(parameters: dict, x: jax.Array, molecule: Molecule) -> jax.Array:
    """Logarithm of the absolute value of the wave function.

    Parameters
    ----------
    parameters : dict
        As from `initial_parameters`, replicated.
    x : (n_electrons, 3) array
        One walker in bohr; spin up first.
    molecule : Molecule
        The nuclei.

    Returns
    -------
    scalar
    """
    r2 = jnp.sum((x[:, None] - molecule.positions) ** 2, axis=-1)
    features = _smooth(r2)
    total = _log_determinants(parameters, r2, molecule) + _nuclear_cusps(parameters, r2, molecule)
    total += jnp.sum(_network(parameters["one"], features))
    if molecule.n_electrons == 1:
        return total
    i, j = np.array(list(combinations(range(molecule.n_electrons), 2))).T
    equal_spin = (i < molecule.n_up) == (j < molecule.n_up)
    r2_pair = jnp.sum((x[i] - x[j]) ** 2, axis=-1)
    r_pair = jnp.sqrt(r2_pair)
    cusp = jnp.where(equal_spin, 0.25, 0.5)
    total += jnp.sum(cusp * r_pair / (1 + jnp.exp(parameters["log_pair_range"]) * r_pair))
    # Sums and products over the two electrons: the same for both orders of the pair.
    symmetric = [_smooth(r2_pair[:, None]), features[i] + features[j], features[i] * features[j]]
    return total + jnp.sum(_network(parameters["pair"], jnp.concatenate(symmetric, axis=-1)))


def _smooth(r2: jax.Array) -> jax.Array:
    # Even in r and analytic at 0, so no cusp: one feature of long range and one of short range.
    return jnp.concatenate([jnp.sqrt(1 + r2) - 1, 1 / (1 + 4 * r2)], axis=-1)


def _basis(molecule: Molecule) -> tuple[np.ndarray, np.ndarray]:
    """Atom and exponent (1/bohr) of each s function: one per shell that the atom fills."""
    centres, exponents = [], []
    for a, z in enumerate(molecule.numbers):
        # Slater's screening rules, rounded: 0.3 within the first shell, 0.85 from it.
        shells = [z - 0.3 * (z > 1)]
        if z > 2:
            shells.append((z - 2 * 0.85 - 0.35 * (z - 3)) / 2)
        centres += [a] * len(shells)
        exponents += shells
    return np.array(centres), np.array(exponents)


def _hueckel_orbitals(molecule: Molecule, centres, exponents) -> np.ndarray:
    """Coefficients (n_basis, n_up) of the lowest orbitals of an extended Hueckel matrix."""
    positions = molecule.positions[centres]
    distance = np.linalg.norm(positions[:, None] - positions, axis=-1)
    level = -(exponents**2) / 2
    same_atom = centres[:, None] == centres
    overlap = np.where(same_atom, 0.0, np.exp(-distance))
    matrix = np.diag(level) + 0.9 * overlap * (level[:, None] + level) / 2
    coefficients = np.linalg.eigh(matrix)[1][:, : molecule.n_up]
    # The sign of an eigenvector is LAPACK's choice; fix it, so that all machines start alike.
    return coefficients * np.where(coefficients.sum(axis=0) < 0, -1.0, 1.0)


def _log_determinants(parameters: dict, r2: jax.Array, molecule: Molecule) -> jax.Array:
    centres, _ = _basis(molecule)
    exponents = jnp.exp(parameters["log_exponent"])
    basis = jnp.exp(-exponents * jnp.sqrt(1 + r2[:, centres]))
    orbitals = basis @ parameters["orbitals"]
    n_up = molecule.n_up
    up, down = orbitals[:n_up], orbitals[n_up:, : molecule.n_electrons - n_up]
    return _log_determinant(up) + _log_determinant(down)


def _log_determinant(matrix: jax.Array) -> jax.Array:
    # One LAPACK call per walker costs more than all the rest, so write small cases out.
    if matrix.shape[0] == 0:
        return jnp.zeros((), matrix.dtype)
    if matrix.shape[0] == 1:
        return jnp.log(jnp.abs(matrix[0, 0]))
    if matrix.shape[0] == 2:
        return jnp.log(jnp.abs(matrix[0, 0] * matrix[1, 1] - matrix[0, 1] * matrix[1, 0]))
    return jnp.linalg.slogdet(matrix)[1]


def _nuclear_cusps(parameters: dict, r2: jax.Array, molecule: Molecule) -> jax.Array:
    r = jnp.sqrt(r2)
    return -jnp.sum(molecule.numbers * r / (1 + jnp.exp(parameters["log_nuclear_range"]) * r))


def _initial_network(key: jax.Array, n_in: int, width: int) -> dict:
    first, second, third = jax.random.split(key, 3)
    return {
        "W1": jax.random.normal(first, (n_in, width)) / jnp.sqrt(n_in),
        "b1": jnp.zeros(width),
        "W2": jax.random.normal(second, (width, width)) / jnp.sqrt(width),
        "b2": jnp.zeros(width),
        # Small but not zero: zero would hide the other layers from the first gradients.
        "w3": 0.01 * jax.random.normal(third, (width,)),
    }


def _network(layers: dict, features: jax.Array) -> jax.Array:
    hidden = jnp.tanh(features @ layers["W1"] + layers["b1"])
    hidden = jnp.tanh(hidden @ layers["W2"] + layers["b2"])
    return hidden @ layers["w3"]

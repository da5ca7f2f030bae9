"""The energy of a finished wave function, with an error bar that counts autocorrelation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

import distsolve.mpi as mpi

from .hamiltonian import local_energy
from .sampler import Walkers, metropolis
from .xyz import Molecule


class Chains(NamedTuple):
    """Walkers of this rank and the sum of local energies that each has met."""

    walkers: Walkers
    sums: jax.Array  # (n,) of E_local - reference, in hartree
    measured: jax.Array  # scalar: measurements in each sum


def extend(
    chains: Chains,
    theta: jax.Array,
    step: jax.Array,
    reference: jax.Array,
    *,
    log_psi: Callable,
    molecule: Molecule,
    n_measurements: int,
    n_moves: int = 10,
) -> tuple[Chains, jax.Array, jax.Array]:
    """Measure on with frozen parameters and estimate from all that was measured.

    Parameters
    ----------
    chains : Chains
        Of this rank.
    theta : (P,) array
        Parameters, replicated.
    step : scalar
        Width of a Metropolis move in bohr, frozen as well.
    reference : scalar
        An energy near the mean, in hartree, replicated.
    log_psi : callable
        ``log_psi(theta, x)``.
    molecule : Molecule
        The nuclei.
    n_measurements, n_moves : int
        Measurements per walker, and moves before each.

    Returns
    -------
    chains : Chains
    energy, error : scalars
        Mean over all walkers and its standard error, in hartree, replicated.

    Notes
    -----
    Communication: one message of 3 numbers.
    """
    psi = partial(log_psi, theta)
    energy_of = jax.vmap(lambda x: local_energy(psi, x, molecule))

    def measure(_, carry):
        walkers, sums = carry
        walkers, _ = metropolis(psi, walkers, step, n_moves)
        return walkers, sums + energy_of(walkers.x) - reference

    walkers, sums = jax.lax.fori_loop(0, n_measurements, measure, (chains.walkers, chains.sums))
    chains = Chains(walkers, sums, chains.measured + n_measurements)
    energy, error = mean_and_error(sums / chains.measured)
    return chains, reference + energy, error


def mean_and_error(chain_means: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Mean over the chains of all ranks and its standard error.

    Each chain is one block. Measurements within a chain are correlated, chains are not, so the
    scatter of the chain means is an honest error whatever the autocorrelation time.

    Parameters
    ----------
    chain_means : (n,) array
        On this rank; ranks may hold different numbers of chains.

    Returns
    -------
    mean, error : scalars
        Replicated.
    """
    moments = [jnp.ones_like(chain_means), chain_means, chain_means**2]
    count, total, squares = mpi.allreduce(jnp.sum(jnp.stack(moments), axis=1))
    mean = total / count
    # Positive by definition, but not after rounding.
    variance = jnp.maximum(squares / count - mean**2, 0)
    return mean, jnp.sqrt(variance / (count - 1))

"""Stochastic reconfiguration (SR): the parameters follow imaginary time.

    S d = f,  S = J^T J / N + shift,  f = J^T e / N,  theta <- theta - rate d

`J` (n, P) holds the derivatives of ``log |psi|`` at the n walkers of this rank and `e` (n,) their
local energies, both minus their means over all N walkers; P parameters. `theta`, `d` and `f` are
replicated. `distsolve.natural_gradient` solves it, by any of its methods. Reference: Sorella, Phys.
Rev. Lett. 80, 4558 (1998), doi:10.1103/PhysRevLett.80.4558.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

import distsolve.mpi as mpi
from distsolve import center, jacobian, natural_gradient
from distsolve.linalg import UpdateInfo

from .hamiltonian import local_energy
from .sampler import Walkers, metropolis
from .xyz import Molecule

ACCEPTANCE = 0.5  # aim of the step width
CLIP = 5.0  # mean absolute deviations; beyond it a local energy counts as that far, in f only
LARGEST_CHANGE = 0.03  # of d^T S d rate^2: the squared distance between two wave functions
CG_TOLERANCE = 1e-3
CG_ITERATIONS = 100


class State(NamedTuple):
    """What one optimisation step hands to the next; all but `walkers` is replicated."""

    theta: jax.Array  # (P,) parameters
    walkers: Walkers  # of this rank
    step: jax.Array  # width of a Metropolis move, in bohr
    direction: jax.Array  # (P,) the last solution, where cg starts
    energy: jax.Array  # the last mean energy, in hartree
    deviation: jax.Array  # the last mean absolute deviation from it


class Report(NamedTuple):
    """What one optimisation step tells the user; replicated scalars."""

    energy: jax.Array  # hartree, over all walkers
    error: jax.Array  # its standard error; walkers are independent
    variance: jax.Array  # of the local energy
    acceptance: jax.Array
    update: UpdateInfo  # how the system was solved


def schedule(k: int, steps: int) -> tuple[float, float]:
    """Rate and shift of step `k`: large shifts while the start is far from the ground state.

    Parameters
    ----------
    k, steps : int
        This step and the number of steps.

    Returns
    -------
    rate : float
        Step in imaginary time, in 1/hartree.
    shift : float
        Added to the diagonal of S.
    """
    progress = k / max(steps - 1, 1)
    return 0.2 * (1 - progress) + 0.02 * progress, 1e-2 * 0.01**progress


def start(theta: jax.Array, walkers: Walkers, log_psi: Callable, molecule: Molecule) -> State:
    """Equilibrate the walkers and take the first energies.

    Parameters
    ----------
    theta : (P,) array
        Replicated.
    walkers : Walkers
        Of this rank.
    log_psi : callable
        ``log_psi(theta, x)``.
    molecule : Molecule
        The nuclei.

    Returns
    -------
    State

    Notes
    -----
    Communication: 12 messages of a few numbers.
    """
    psi = partial(log_psi, theta)

    def settle(_, carry):
        walkers, step = carry
        walkers, accepted = metropolis(psi, walkers, step, 20)
        total = mpi.allreduce(jnp.stack([jnp.sum(accepted), _count(accepted)]))
        return walkers, adapted(step, total[0] / total[1])

    walkers, step = jax.lax.fori_loop(0, 10, settle, (walkers, jnp.asarray(0.5, theta.dtype)))
    energies = jax.vmap(lambda x: local_energy(psi, x, molecule))(walkers.x)
    total = mpi.allreduce(jnp.stack([jnp.sum(energies), _count(energies)]))
    energy = total[0] / total[1]
    deviation = mpi.allreduce(jnp.sum(jnp.abs(energies - energy))) / total[1]
    return State(theta, walkers, step, jnp.zeros_like(theta), energy, deviation)


def improve(
    state: State,
    rate: jax.Array,
    shift: jax.Array,
    *,
    log_psi: Callable,
    molecule: Molecule,
    counts: tuple[int, ...],
    method: str = "cg",
    tolerance: float = CG_TOLERANCE,
    n_moves: int = 20,
) -> tuple[State, Report]:
    """One step of SR: sample, measure, solve, change the parameters.

    Parameters
    ----------
    state : State
        Before the step.
    rate, shift : scalars
        As from `schedule`.
    log_psi : callable
        ``log_psi(theta, x)``.
    molecule : Molecule
        The nuclei.
    counts : tuple of int
        Walkers on each rank.
    method : {"auto", "cg", "dense", "kernel"}
        Of `distsolve.natural_gradient`.
    tolerance : float
        Of cg.
    n_moves : int
        Metropolis moves before the measurement.

    Returns
    -------
    state : State
        After the step.
    report : Report

    Notes
    -----
    Communication: one message of 6 numbers for the averages, one of P + 1 to centre J, those of
    the solver, and one number.
    """
    psi = partial(log_psi, state.theta)
    walkers, accepted = metropolis(psi, state.walkers, state.step, n_moves)
    energies = jax.vmap(lambda x: local_energy(psi, x, molecule))(walkers.x)
    clipped, means = averages(energies, accepted, state.energy, state.deviation)
    J = center(jacobian(log_psi, state.theta, walkers.x))
    d, info = natural_gradient(
        J,
        clipped,
        shift=shift,
        method=method,
        x0=state.direction,
        counts=counts,
        tol=tolerance,
        maxiter=CG_ITERATIONS,
    )
    # d^T f = d^T S d up to the residual: how far this step would move the wave function.
    length = jnp.abs(mpi.allreduce((J @ d) @ clipped)) / means["count"]
    rate = jnp.minimum(rate, jnp.sqrt(LARGEST_CHANGE / (length + jnp.finfo(d.dtype).tiny)))
    state = State(
        theta=state.theta - rate * d,
        walkers=walkers,
        step=adapted(state.step, means["accepted"]),
        direction=d,
        energy=means["energy"],
        deviation=means["deviation"],
    )
    return state, _report(means, info)


def averages(
    energies: jax.Array, accepted: jax.Array, centre: jax.Array, deviation: jax.Array
) -> tuple[jax.Array, dict]:
    """Means over the walkers of all ranks, from sums that travel in one message.

    Sums and the count are added over ranks, so ranks may hold different numbers of walkers.

    Parameters
    ----------
    energies : (n,) array
        Local energies on this rank.
    accepted : (n,) array
        Accepted fractions on this rank.
    centre, deviation : scalars
        Replicated guesses of the mean and of the mean absolute deviation of the energies; they
        set the clip limits and keep the products of sums small.

    Returns
    -------
    clipped : (n,) array
        The clipped energies on this rank, minus their mean.
    means : dict
        ``count``, ``energy``, ``variance``, ``deviation`` and ``accepted``; replicated.
    """
    e = energies - centre
    clipped = jnp.clip(e, -CLIP * deviation, CLIP * deviation)
    sums = {
        "count": _count(energies),
        "e": jnp.sum(e),
        "e2": jnp.sum(e**2),
        "abs": jnp.sum(jnp.abs(e)),
        "clipped": jnp.sum(clipped),
        "accepted": jnp.sum(accepted),
    }
    sums = mpi.allreduce(sums)
    count = sums["count"]
    mean = {name: value / count for name, value in sums.items()}
    return clipped - mean["clipped"], {
        "count": count,
        "energy": centre + mean["e"],
        "variance": mean["e2"] - mean["e"] ** 2,
        "deviation": mean["abs"],
        "accepted": mean["accepted"],
    }


def adapted(step: jax.Array, acceptance: jax.Array) -> jax.Array:
    """Step width, nearer to the one that accepts half of the moves.

    Parameters
    ----------
    step : scalar
        In bohr.
    acceptance : scalar
        Over all ranks, so that all ranks keep the same width.

    Returns
    -------
    scalar
    """
    return step * jnp.exp(acceptance - ACCEPTANCE)


def _report(means: dict, info: UpdateInfo) -> Report:
    return Report(
        energy=means["energy"],
        error=jnp.sqrt(means["variance"] / means["count"]),
        variance=means["variance"],
        acceptance=means["accepted"],
        update=info,
    )


def _count(values: jax.Array) -> jax.Array:
    # A float, so that it shares the message of the sums.
    return jnp.asarray(len(values), values.dtype)

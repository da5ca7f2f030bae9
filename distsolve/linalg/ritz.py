"""Extreme Ritz values of the Lanczos matrix behind a conjugate gradient solve, as it runs.

CG's coefficients define a tridiagonal ``T = R' R``, where ``R`` is bidiagonal with diagonal
``1 / sqrt(alpha_k)`` and superdiagonal ``sqrt(beta_k / alpha_k)``; the extreme eigenvalues of ``T``
approach those of the (preconditioned) operator from within. The number of steps is not known when
a solve is compiled, so no coefficient is stored. Instead, each of a fixed grid of shifts ``mu``
carries the pivots of ``T - mu`` from step to step. They define the vector ``u`` for which
``(T - mu) u`` vanishes but for its last entry, and its Rayleigh quotient

    mu + delta_k c_k,   delta_k: the last pivot,   c_k = u_k^2 / ||u||^2,

is never outside the spectrum of ``T`` and close to an eigenvalue where ``mu`` is. The least and the
greatest over all shifts and steps are what this file keeps: work and memory of some hundred numbers
a step, no message.

References: Meurant and Tichy (2019), doi:10.1007/s11075-018-0634-8, for the idea of estimating
these values inside CG. Their estimates take one vector in place of the grid; on the spectrum of a
Laplacian that vector misses the smallest value by a factor of ten, the grid by its spacing.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

_SPACING = 0.08  # of the shifts, relative: the accuracy


class Ritz(NamedTuple):
    """What the steps so far say of the spectrum, in units of ``1 / unit``.

    One array, so that a step is one loop over it: solvers are compiled more often than they look.
    """

    rows: jax.Array  # (8, shifts), see `_Rows`


class _Rows(NamedTuple):
    """The rows of `Ritz`, each with one entry for each shift."""

    unit: jax.Array  # the first step length; 0 before it; the same for all shifts
    pivot: jax.Array  # 1 / alpha_k, the last pivot of T itself; the same for all shifts
    beta: jax.Array  # the same for all shifts
    excess: jax.Array  # last pivot of T - mu, less that of T
    delta: jax.Array  # last pivot of T - mu
    weight: jax.Array  # u_k^2 / ||u||^2
    least: jax.Array  # of the Rayleigh quotients at each shift
    greatest: jax.Array

    def pack(self):
        """Return the rows as one array."""
        return jnp.stack([jnp.broadcast_to(row, self.excess.shape) for row in self])


def start(dtype: DTypeLike) -> Ritz:
    """Return what is known before the first step, for coefficients of a real ``dtype``."""
    shifts = jnp.asarray(_shifts(dtype))
    zeros, ones = jnp.zeros_like(shifts), jnp.ones_like(shifts)
    # In these units the first Rayleigh quotient is 1.
    return Ritz(_Rows(zeros, zeros, zeros, -shifts, ones, ones, ones, ones).pack())


def update(ritz: Ritz, alpha: jax.Array, beta: jax.Array) -> Ritz:
    """Take in a step of length ``alpha``, whose next direction is ``z + beta p``.

    A step that was not taken (``alpha`` not positive) and coefficients that are not finite change
    nothing.
    """
    valid = (alpha > 0) & jnp.isfinite(alpha) & (beta >= 0) & jnp.isfinite(beta)
    alpha = jnp.where(valid, alpha, jnp.ones_like(alpha))
    shifts, old = jnp.asarray(_shifts(alpha.dtype)), _Rows(*ritz.rows)
    limits = jnp.finfo(alpha.dtype)

    unit = jnp.where(old.unit > 0, old.unit, alpha)
    pivot = unit / alpha
    coupling = old.beta * old.pivot  # beta / alpha of the step before: 0 at the first
    # What T - mu has less than T keeps the relative accuracy of small values; T - mu would not.
    excess = coupling * (old.excess / old.delta) - shifts
    delta = excess + pivot
    rounding = limits.eps * (pivot + coupling)
    delta = jnp.where(jnp.abs(delta) < rounding, rounding, delta)
    growth = old.beta * jnp.square(old.pivot / old.delta)  # (u_k / u_k+1)^2
    weight = jnp.maximum(old.weight / (old.weight + growth), limits.tiny)

    quotient = shifts + delta * weight
    # A quotient far below its shift is a difference of large numbers, and mostly rounding.
    sound = (quotient > 0.25 * shifts) & (quotient < limits.max)
    least = jnp.where(sound & (quotient < old.least), quotient, old.least)
    greatest = jnp.where(sound & (quotient > old.greatest), quotient, old.greatest)
    new = _Rows(unit, pivot, beta, excess, delta, weight, least, greatest).pack()
    return Ritz(jnp.where(valid, new, ritz.rows))


def widen(ritz: Ritz, value: jax.Array) -> Ritz:
    """Take in a value that lies between the extreme singular values, such as a pivot of R in QR.

    A value that is not positive and finite changes nothing.
    """
    old = _Rows(*ritz.rows)
    valid, first = (value > 0) & jnp.isfinite(value), old.unit == 0
    new = old._replace(
        unit=jnp.ones_like(old.unit),
        least=jnp.where(first | (value < old.least), value, old.least),
        greatest=jnp.where(first | (value > old.greatest), value, old.greatest),
    )
    return Ritz(jnp.where(valid, new.pack(), ritz.rows))


def largest(ritz: Ritz) -> jax.Array:
    """Return an estimate, from below, of the largest Ritz value; 0 before the first step."""
    return _in_units(ritz, jnp.max(_Rows(*ritz.rows).greatest))


def smallest(ritz: Ritz) -> jax.Array:
    """Return an estimate, from above, of the smallest Ritz value; 0 before the first step."""
    return _in_units(ritz, jnp.min(_Rows(*ritz.rows).least))


def condition(ritz: Ritz) -> jax.Array:
    """Return an estimate, from below, of the condition number; 1 before the first step."""
    rows = _Rows(*ritz.rows)
    return jnp.max(rows.greatest) / jnp.min(rows.least)


def _in_units(ritz: Ritz, value: jax.Array) -> jax.Array:
    unit = _Rows(*ritz.rows).unit[0]
    known = unit > 0
    divisor = jnp.where(known, unit, jnp.ones_like(unit))
    return jnp.where(known, value / divisor, jnp.zeros_like(value))


def _shifts(dtype: DTypeLike) -> np.ndarray:
    """Return the shifts, in units of the first Rayleigh quotient, which is inside the spectrum."""
    low, high = math.log(jnp.finfo(dtype).eps), math.log(1e8)
    return np.exp(np.linspace(low, high, round((high - low) / _SPACING))).astype(dtype)

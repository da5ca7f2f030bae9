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
    """What the steps so far say of the spectrum. Values are in units of ``1 / unit``."""

    unit: jax.Array  # the first step length; 0 before it
    pivot: jax.Array  # 1 / alpha_k, the last pivot of T itself
    beta: jax.Array
    excess: jax.Array  # (shifts,) last pivot of T - mu, less that of T
    delta: jax.Array  # (shifts,) last pivot of T - mu
    weight: jax.Array  # (shifts,) u_k^2 / ||u||^2
    least: jax.Array  # (shifts,) of the Rayleigh quotients at each shift
    greatest: jax.Array  # (shifts,)


def start(dtype: DTypeLike) -> Ritz:
    """Return what is known before the first step, for coefficients of a real ``dtype``."""
    zero = jnp.zeros((), dtype)
    shifts = jnp.asarray(_shifts(dtype))
    ones = jnp.ones_like(shifts)  # in these units the first Rayleigh quotient is 1
    return Ritz(zero, zero, zero, -shifts, ones, ones, ones, ones)


def update(ritz: Ritz, alpha: jax.Array, beta: jax.Array) -> Ritz:
    """Take in a step of length ``alpha``, whose next direction is ``z + beta p``.

    A step that was not taken (``alpha`` not positive) and coefficients that are not finite change
    nothing.
    """
    valid = (alpha > 0) & jnp.isfinite(alpha) & (beta >= 0) & jnp.isfinite(beta)
    alpha = jnp.where(valid, alpha, jnp.ones_like(alpha))
    shifts = jnp.asarray(_shifts(alpha.dtype))
    limits = jnp.finfo(alpha.dtype)

    unit = jnp.where(ritz.unit > 0, ritz.unit, alpha)
    pivot = unit / alpha
    coupling = ritz.beta * ritz.pivot  # beta / alpha of the step before: 0 at the first
    # What T - mu has less than T keeps the relative accuracy of small values; T - mu would not.
    excess = coupling * (ritz.excess / ritz.delta) - shifts
    delta = excess + pivot
    rounding = limits.eps * (pivot + coupling)
    delta = jnp.where(jnp.abs(delta) < rounding, rounding, delta)
    growth = ritz.beta * jnp.square(ritz.pivot / ritz.delta)  # (u_k / u_k+1)^2
    weight = jnp.maximum(ritz.weight / (ritz.weight + growth), limits.tiny)

    quotient = shifts + delta * weight
    # A quotient far below its shift is a difference of large numbers, and mostly rounding.
    sound = (quotient > 0.25 * shifts) & (quotient < limits.max)
    least = jnp.where(sound & (quotient < ritz.least), quotient, ritz.least)
    greatest = jnp.where(sound & (quotient > ritz.greatest), quotient, ritz.greatest)

    new = Ritz(unit, pivot, beta, excess, delta, weight, least, greatest)
    return Ritz(*(jnp.where(valid, after, before) for after, before in zip(new, ritz, strict=True)))


def widen(ritz: Ritz, value: jax.Array) -> Ritz:
    """Take in a value that lies between the extreme singular values, such as a pivot of R in QR.

    A value that is not positive and finite changes nothing.
    """
    valid = (value > 0) & jnp.isfinite(value)
    first = ritz.unit == 0
    least = jnp.where(first | (value < ritz.least), value, ritz.least)
    greatest = jnp.where(first | (value > ritz.greatest), value, ritz.greatest)
    return ritz._replace(
        unit=jnp.where(valid, 1, ritz.unit),
        least=jnp.where(valid, least, ritz.least),
        greatest=jnp.where(valid, greatest, ritz.greatest),
    )


def largest(ritz: Ritz) -> jax.Array:
    """Return an estimate, from below, of the largest Ritz value; 0 before the first step."""
    return _in_units(ritz, jnp.max(ritz.greatest))


def smallest(ritz: Ritz) -> jax.Array:
    """Return an estimate, from above, of the smallest Ritz value; 0 before the first step."""
    return _in_units(ritz, jnp.min(ritz.least))


def condition(ritz: Ritz) -> jax.Array:
    """Return an estimate, from below, of the condition number; 1 before the first step."""
    return jnp.max(ritz.greatest) / jnp.min(ritz.least)


def _in_units(ritz: Ritz, value: jax.Array) -> jax.Array:
    known = ritz.unit > 0
    divisor = jnp.where(known, ritz.unit, jnp.ones_like(ritz.unit))
    return jnp.where(known, value / divisor, jnp.zeros_like(value))


def _shifts(dtype: DTypeLike) -> np.ndarray:
    """Return the shifts, in units of the first Rayleigh quotient, which is inside the spectrum."""
    low, high = math.log(jnp.finfo(dtype).eps), math.log(1e8)
    return np.exp(np.linspace(low, high, round((high - low) / _SPACING))).astype(dtype)

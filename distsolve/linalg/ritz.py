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
a step, no message. On CPUs a compiled handler takes the step: XLA's form would take a third of a
second to compile, in each program that solves anything.

References: Meurant and Tichy (2019), doi:10.1007/s11075-018-0634-8, for the idea of estimating
these values inside CG. Their estimates take one vector in place of the grid; on the spectrum of a
Laplacian that vector misses the smallest value by a factor of ten, the grid by its spacing.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import batching
from jax.typing import DTypeLike

from distsolve.linalg import handlers, trees
from distsolve.linalg.native import ritz as _native

_SPACING = 0.08  # of the shifts, relative: the accuracy


class Ritz(NamedTuple):
    """What the steps so far say of the spectrum, in units of ``1 / unit``.

    One array, to be one operand of the handler.
    """

    state: jax.Array  # (..., 5 + 3 shifts), see `_State`


class _State(NamedTuple):
    """The parts of a `Ritz`: numbers, and rows with one entry for each shift."""

    unit: jax.Array  # the first step length; 0 before it
    pivot: jax.Array  # 1 / alpha_k, the last pivot of T itself
    beta: jax.Array
    least: jax.Array  # of the Rayleigh quotients
    greatest: jax.Array
    excess: jax.Array  # last pivot of T - mu, less that of T
    delta: jax.Array  # last pivot of T - mu
    weight: jax.Array  # u_k^2 / ||u||^2

    @classmethod
    def of(cls, ritz):
        """Return the parts of a `Ritz`; numbers keep an axis of length 1, to broadcast."""
        numbers, rows = jnp.split(ritz.state, [len(cls._fields) - 3], axis=-1)
        return cls(*jnp.split(numbers, numbers.shape[-1], axis=-1), *jnp.split(rows, 3, axis=-1))

    def pack(self):
        """Return the `Ritz` of these parts."""
        return Ritz(jnp.concatenate(self, axis=-1))


def start(dtype: DTypeLike) -> Ritz:
    """Return what is known before the first step, for coefficients of a real ``dtype``."""
    shifts = jnp.asarray(_shifts(dtype))
    zero, one, ones = jnp.zeros(1, dtype), jnp.ones(1, dtype), jnp.ones_like(shifts)
    # In these units the first Rayleigh quotient is 1.
    return _State(zero, zero, zero, one, one, -shifts, ones, ones).pack()


def update(ritz: Ritz, alpha: jax.Array, beta: jax.Array) -> Ritz:
    """Take in a step of length ``alpha``, whose next direction is ``z + beta p``.

    A step that was not taken (``alpha`` not positive) and coefficients that are not finite change
    nothing.
    """
    shifts = jnp.asarray(_shifts(alpha.dtype))
    state = update_p.bind(ritz.state, alpha, beta, shifts)
    return Ritz(trees.vary_like(state, (ritz, alpha, beta)))


def widen(ritz: Ritz, value: jax.Array) -> Ritz:
    """Take in a value that lies between the extreme singular values, such as a pivot of R in QR.

    A value that is not positive and finite changes nothing.
    """
    old = _State.of(ritz)
    valid, first = (value > 0) & jnp.isfinite(value), old.unit == 0
    new = old._replace(
        unit=jnp.ones_like(old.unit),
        least=jnp.where(first | (value < old.least), value, old.least),
        greatest=jnp.where(first | (value > old.greatest), value, old.greatest),
    )
    return Ritz(jnp.where(valid, new.pack().state, ritz.state))


def largest(ritz: Ritz) -> jax.Array:
    """Return an estimate, from below, of the largest Ritz value; 0 before the first step."""
    state = _State.of(ritz)
    return trees.safe_ratio(state.greatest, state.unit)[0]


def smallest(ritz: Ritz) -> jax.Array:
    """Return an estimate, from above, of the smallest Ritz value; 0 before the first step."""
    state = _State.of(ritz)
    return trees.safe_ratio(state.least, state.unit)[0]


def condition(ritz: Ritz) -> jax.Array:
    """Return an estimate, from below, of the condition number; 1 before the first step."""
    state = _State.of(ritz)
    return (state.greatest / state.least)[0]


def plain(states, alpha, beta, shifts):
    """Compute `update` in XLA's operations; arrays may have more axes in front."""
    old, alpha, beta = _State.of(Ritz(states)), alpha[..., None], beta[..., None]
    valid = (alpha > 0) & jnp.isfinite(alpha) & (beta >= 0) & jnp.isfinite(beta)
    alpha = jnp.where(valid, alpha, jnp.ones_like(alpha))
    shifts, limits = jnp.broadcast_to(shifts, old.excess.shape), jnp.finfo(alpha.dtype)

    unit = jnp.where(old.unit > 0, old.unit, alpha)
    pivot = unit / alpha
    coupling = old.beta * old.pivot  # beta / alpha of the step before: 0 at the first
    # What T - mu has less than T keeps the relative accuracy of small values; T - mu would not.
    excess = coupling * (old.excess / old.delta) - shifts
    delta = excess + pivot
    rounding = limits.eps * (pivot + coupling)
    delta = jnp.where(jnp.abs(delta) < rounding, rounding, delta)
    growth = old.beta * jnp.square(old.pivot / old.delta)  # (u_k / u_k+1)^2
    weight = old.weight / (old.weight + growth)
    weight = jnp.where(weight > limits.tiny, weight, limits.tiny)

    quotient = shifts + delta * weight
    # A quotient far below its shift is a difference of large numbers, and mostly rounding.
    sound = (quotient > 0.25 * shifts) & (quotient < limits.max)
    quotient = jnp.where(sound, quotient, old.least)
    least = jnp.minimum(old.least, quotient.min(-1, keepdims=True))
    greatest = jnp.maximum(old.greatest, quotient.max(-1, keepdims=True))
    new = _State(unit, pivot, beta, least, greatest, excess, delta, weight).pack()
    return jnp.where(valid, new.state, states)


update_p = Primitive("ritz_update")


@update_p.def_abstract_eval
def _abstract(states, alpha, beta, shifts):
    return jax.core.ShapedArray(states.shape, states.dtype)


def _batch(operands, axes):
    """Give states and coefficients the new axis in front: the handler takes them in turn."""
    *mapped, shifts = operands
    size = next(x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None)
    mapped = [
        jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(mapped, axes[:-1], strict=True)
    ]
    return update_p.bind(*mapped, shifts), 0


batching.primitive_batchers[update_p] = _batch
handlers.register(
    update_p,
    _native.HANDLERS,
    plain,
    jax.ffi.ffi_lowering("distsolve_ritz_update", operand_output_aliases={0: 0}),
)


def _shifts(dtype: DTypeLike) -> np.ndarray:
    """Return the shifts, in units of the first Rayleigh quotient, which is inside the spectrum."""
    low, high = math.log(jnp.finfo(dtype).eps), math.log(1e8)
    # A multiple of 16: the handler takes that many at a time.
    return np.exp(np.linspace(low, high, 16 * math.ceil((high - low) / _SPACING / 16))).astype(
        dtype
    )

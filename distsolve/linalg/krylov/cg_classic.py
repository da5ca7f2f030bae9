"""Classic conjugate gradients: two small reductions a step.

Reference: Hestenes and Stiefel (1952), doi:10.6028/jres.049.044, in the preconditioned form of
Saad (2003), Iterative Methods for Sparse Linear Systems, algorithm 9.1. Ours: the search direction
is kept at size 1 by powers of two, and no step is taken on a product that is not positive.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from distsolve.linalg import driver, order, ritz, trees
from distsolve.linalg.info import Reason
from distsolve.linalg.loop import first_of
from distsolve.linalg.space import Space

# A step: products with A, reductions of inner products (for vectors in pieces), agreements on
# whether to stop (for replicated vectors; one tiny message, none at one rank), and vectors held.
COST = {"matvec": 1, "reductions": 2, "agreements": 1, "vectors": 4}


class State(NamedTuple):
    """All that CG carries from one iteration to the next. ``M`` is divided by ``unit_of_m``."""

    x: Any
    r: Any
    p: Any  # the search direction, divided by `unit`
    unit: jax.Array
    unit_of_m: jax.Array
    rz: jax.Array  # <r, M r>
    rr: jax.Array  # <r, r>
    event: jax.Array
    breakdown: jax.Array
    ritz: ritz.Ritz


def init(A: Any, M: Any, r: Any, aim: driver.Aim, space: Space) -> State:
    """Return the state at the zero vector, whose residual is ``r``."""
    z = r if M is None else M(r)
    rz, rr = space.dot((r, z), (r, r))
    event, one = jnp.full((), Reason.RUNNING, jnp.int32), jnp.ones_like(rr)
    unit_of_m, breakdown = one, rz
    if M is not None:
        event, rz, rr = decide(space, judge(one, rz, rr, rr, aim), rz, rr)
        unit_of_m, breakdown = size_of(z, rz, rr), rz
        z, rz = trees.scale(1 / unit_of_m, z), rz / unit_of_m
    estimates = ritz.start(rr.dtype)
    return State(trees.zeros_like(r), r, z, one, unit_of_m, rz, rr, event, breakdown, estimates)


def step(A: Any, M: Any, aim: driver.Aim, space: Space, state: State) -> State:
    """Take one step, unless that would move nothing for the better."""
    x, r, p, unit, unit_of_m, rz, rr, _, _, estimates = state
    Ap = A(p)
    (pAp,) = space.dot((p, Ap))
    alpha = jnp.where(rr > aim.floor, trees.safe_ratio(rz, unit * pAp), 0)
    r = trees.axpy(-alpha, Ap, r)
    z = r if M is None else trees.scale(1 / unit_of_m, M(r))
    rz_new, rr_new = space.dot((r, z), (r, r))

    # Agree before x moves: a step that fails on one rank must move nothing on any. The products
    # travel, too: ranks whose units differ by a factor of two would not add up in A.
    event, rz_new, rr_new = decide(space, judge(pAp, rz_new, rr, rr_new, aim), rz_new, rr_new)
    x = trees.axpy(jnp.where(event < Reason.INDEFINITE_OPERATOR, alpha, 0), p, x)
    p = order.after(x, p)

    beta, unit_new = trees.safe_ratio(rz_new, rz), size_of(z, rz_new, rr_new)
    p = trees.axpy(beta * (unit / unit_new), p, trees.scale(1 / unit_new, z))
    breakdown = jnp.where(pAp > 0, rz_new, pAp * unit * unit * unit_of_m) * unit_of_m
    estimates = ritz.update(estimates, alpha / unit, beta)
    return State(x, r, p, unit_new, unit_of_m, rz_new, rr_new, event, breakdown, estimates)


def decide(space: Space, event: jax.Array, *products: jax.Array) -> list[jax.Array]:
    """Return an event and the products that decide of the next step, equal on all ranks."""
    dtype = products[0].dtype
    code, *agreed = space.decide(jnp.stack([event.astype(dtype), *products]))
    return [code.astype(jnp.int32), *agreed]


def judge(
    pAp: jax.Array, rz: jax.Array, rr_old: jax.Array, rr: jax.Array, aim: driver.Aim
) -> jax.Array:
    """Return what a step has come to, in the order of the codes: the worst that applies.

    Products that vanish with the residual prove nothing, hence the comparisons with the floor.
    """
    finite = jnp.isfinite(pAp) & jnp.isfinite(rz) & jnp.isfinite(rr)
    return first_of(
        (~finite, Reason.NONFINITE),
        ((pAp <= 0) & (rr_old > aim.floor), Reason.INDEFINITE_OPERATOR),
        (rr <= aim.target, Reason.CONVERGED),
        ((rz <= 0) & (rr > aim.floor), Reason.INDEFINITE_PRECONDITIONER),
    )


def size_of(z: Any, rz: jax.Array, rr: jax.Array) -> jax.Array:
    """Return a power of two near the size of ``z = M r``, from products that are at hand."""
    return trees.power_of_two(rz / jnp.sqrt(jnp.where(rr > 0, rr, jnp.ones_like(rr))), z)


METHOD = driver.Method("cg", init, step, COST)

"""Conjugate gradients whose one reduction a step is hidden behind the products with M and A.

All vectors follow recurrences, with ``u = M r``, ``w = A u``, ``s = A p``, ``q = M s``, ``z = A q``.
The products with ``r``, ``u`` and ``w`` are begun, ``M w`` and ``A M w`` are computed while they
travel, and the next directions need both.

Reference: Ghysels and Vanroose (2014), doi:10.1016/j.parco.2013.06.001. More recurrences gather
more rounding, so now and then the vectors are replaced by what they stand for, as in Cools, Yetkin,
Agullo, Giraud and Vanroose (2018), doi:10.1137/17M1117872. Ours: when that is done, and the scaling
and the trust in differences that this method shares with the one with a single reduction.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from distsolve.linalg import driver, trees
from distsolve.linalg.info import Reason
from distsolve.linalg.krylov import ritz
from distsolve.linalg.krylov.cg_classic import judge
from distsolve.linalg.krylov.cg_single_reduction import Units, answer, conjugate, units_of
from distsolve.linalg.space import Space

# Beyond the steps' own, a cycle takes two more products with A, and a replacement four.
COST = {"matvec": 1, "reductions": 1, "agreements": 1, "vectors": 9}

STEPS_TO_REPLACE = 50  # so replacements add 8 % to the products with A


class State(NamedTuple):
    """All that the method carries from one iteration to the next, scaled by ``units``."""

    x: Any
    r: Any
    p: Any
    w: Any
    s: Any
    z: Any
    u: Any  # None without M: then it is r
    q: Any  # None without M: then it is s
    start: Any  # the residual at x = 0
    units: Units
    rz: jax.Array  # <r, M r>
    pAp: jax.Array
    rr: jax.Array  # <r, r>
    replaced: "Replaced"
    event: jax.Array
    breakdown: jax.Array
    ritz: ritz.Ritz


class Replaced(NamedTuple):
    """When the vectors were last what they stand for."""

    due: jax.Array  # whether the next step is to replace them
    age: jax.Array  # steps since
    rr: jax.Array  # <r, r> then


def init(A: Any, M: Any, r: Any, aim: driver.Aim, space: Space) -> State:
    """Return the state at the zero vector, whose residual is ``r``."""
    u = r if M is None else M(r)
    w = A(u)
    # Copies of a replicated vector may differ in their last bits, and units must not.
    rz, uAu, rr = space.decide(space.dot((r, u), (u, w), (r, r)))
    event = judge(jnp.ones_like(rz), rz, rr, rr, aim)
    units = units_of(u, M, rz, uAu, rr)
    u, w = trees.scale(units.M, u), trees.scale(units.A * units.M, w)
    rz, pAp = rz * units.M, (uAu * units.M) * (units.A * units.M)
    A, apply_M = units.scaled(A, M)
    q = apply_M(w)
    z = A(q)
    return State(
        trees.zeros_like(r),
        r,
        p=u,
        w=w,
        s=w,
        z=z,
        u=None if M is None else u,
        q=None if M is None else q,
        start=r,
        units=units,
        rz=rz,
        pAp=pAp,
        rr=rr,
        replaced=Replaced(jnp.zeros((), bool), jnp.zeros((), jnp.int32), rr),
        event=event,
        breakdown=units.breakdown(pAp, rz),
        ritz=ritz.start(rr.dtype),
    )


def step(A: Any, M: Any, aim: driver.Aim, space: Space, state: State) -> State:
    """Take one step, unless that would move nothing for the better."""
    x, r, p, w, s, z, u, q, start, units, rz, pAp, rr, replaced, _, _, estimates = state
    A, apply_M = units.scaled(A, M)
    alpha = jnp.where(rr > aim.floor, trees.safe_ratio(rz, pAp), 0)
    r, w = trees.axpy(-alpha, s, r), trees.axpy(-alpha, z, w)
    u = None if M is None else trees.axpy(-alpha, q, u)

    def replacement(_):
        r = trees.subtract(start, A(trees.axpy(alpha, p, x)))
        u, s = apply_M(r), A(p)
        q = apply_M(s)
        return jnp.zeros((), bool), (r, A(u), s, A(q), *((None, None) if M is None else (u, q)))

    # Not a cond: under vmap it would do both, for every step.
    vectors = jax.lax.while_loop(
        lambda carry: carry[0], replacement, (replaced.due, (r, w, s, z, u, q))
    )
    r, w, s, z, u, q = vectors[1]

    residual = r if M is None else u
    pending, w = space.begin([(r, residual), (residual, w), (r, r)], through=w)
    m = apply_M(w)
    n = A(m)
    (rz_new, uAu, rr_new), n = space.finish(pending, after=n)

    # Agree before x moves: a step that fails on one rank must move nothing on any.
    event = judge(pAp, rz_new, rr, rr_new, aim)
    age = jnp.where(replaced.due, 0, replaced.age) + 1
    rr_then = jnp.where(replaced.due, rr_new, replaced.rr)
    event, due = space.decide(jnp.stack([event, is_due(age, rr_then, rr_new).astype(event.dtype)]))
    x = trees.axpy(jnp.where(event < Reason.INDEFINITE_OPERATOR, alpha, 0), p, x)

    beta, pAp_new = conjugate(trees.safe_ratio(rz_new, rz), uAu, pAp)
    p, s, z = trees.axpy(beta, p, residual), trees.axpy(beta, s, w), trees.axpy(beta, z, n)
    return State(
        x,
        r,
        p,
        w,
        s,
        z,
        u,
        None if M is None else trees.axpy(beta, q, m),
        start,
        units,
        rz_new,
        pAp_new,
        rr_new,
        Replaced(due > 0, age, rr_then),
        event,
        units.breakdown(pAp, rz_new),
        ritz.update(estimates, alpha * units.A * units.M, beta),
    )


def is_due(age: jax.Array, rr_then: jax.Array, rr: jax.Array) -> jax.Array:
    """Return whether the vectors should be replaced in the next step.

    Near the end they should not: what A x rounds to would disturb the directions more than the
    recurrences still can.
    """
    eps = jnp.finfo(rr.dtype).eps
    return ((age >= STEPS_TO_REPLACE) | (rr <= eps * rr_then)) & (rr > eps**1.5)


METHOD = driver.Method("pipelined", init, step, COST, answer)

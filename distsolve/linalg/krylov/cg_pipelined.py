"""Conjugate gradients whose one reduction a step is hidden behind the products with M and A.

Next to ``r``, ``p`` and ``s = A p`` there are ``w = A M r`` and ``z = A M s``, and M times all but
``p``. One recurrence gives the next ``w`` without a product, so that the next ``s`` is there before
the reduction begins; ``z``, the one product, and ``M z`` are computed while it travels. What the
next ``<r, M r>`` will be, and with it beta, is predicted,

    <r+, M r+> = <r, M r> - 2 alpha <M r, s> + alpha^2 <s, M s>   for   r+ = r - alpha s.

The pipeline is that of Ghysels and Vanroose (2014), doi:10.1016/j.parco.2013.06.001. They predict
``<p, A p>`` and not beta, which needs one recurrence more; the choice made here is that of Chen and
Carson (2020), doi:10.1137/19M1276856, and loses fewer digits: ``<p, A p>`` is measured. Recurrences
gather rounding, so now and then vectors are replaced by what they stand for, as in Cools, Yetkin,
Agullo, Giraud and Vanroose (2018), doi:10.1137/17M1117872. Ours: in a step that is ``M r``, ``w``
and ``s``, which are as exact as ``r`` at any time. ``r = b - A x`` rounds to what A x does and would
disturb the directions; the driver replaces it, where it has drifted away, between cycles.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from distsolve.linalg import driver, ritz, trees
from distsolve.linalg.info import Reason
from distsolve.linalg.krylov.cg_classic import judge
from distsolve.linalg.krylov.cg_single_reduction import Units, answer, attainable, units_of
from distsolve.linalg.space import Space

# Without M it is 6 vectors. Beyond the steps' own, a cycle takes two more products with A and with
# M, and a replacement two with A and three with M.
COST = {"matvec": 1, "reductions": 1, "agreements": 1, "vectors": 10}

STEPS_TO_REPLACE = 25


class Chain(NamedTuple):
    """Vectors that follow the same recurrences."""

    r: Any
    w: Any  # A M r
    s: Any  # A p
    z: Any  # A M s


class Products(NamedTuple):
    """The inner products of a step, over all ranks."""

    rz: jax.Array  # <r, M r>
    pAp: jax.Array  # noqa: N815
    rs: jax.Array  # <M r, s>
    ss: jax.Array  # <s, M s>
    rr: jax.Array  # <r, r>


class Replacement(NamedTuple):
    """When vectors were last replaced, and whether they are to be."""

    due: jax.Array  # in the next step
    age: jax.Array  # steps since
    rr: jax.Array  # <r, r> then


class State(NamedTuple):
    """All that the method carries from one iteration to the next, scaled by ``units``."""

    x: Any
    p: Any
    chains: tuple[Chain, ...]  # one, and with M another one of M times each vector
    products: Products
    units: Units
    replacement: Replacement
    rr: jax.Array
    event: jax.Array
    breakdown: jax.Array
    ritz: ritz.Ritz


def init(A: Any, M: Any, r: Any, aim: driver.Aim, space: Space) -> State:
    """Return the state at the zero vector, whose residual is ``r``."""
    u = r if M is None else M(r)
    w = A(u)
    m = w if M is None else M(w)
    # The units are not known yet and a square of w may overflow, so it is taken at three scales.
    dtype = trees.scalar_dtype(r)
    step = 2.0 ** (jnp.finfo(dtype).maxexp // 2)
    scales = jnp.asarray([1 / step, 1, step], dtype)
    squares = [(trees.scale(scale, w), trees.scale(scale, m)) for scale in scales]
    # Copies of a replicated vector may differ in their last bits, and units must not.
    dots = space.decide(space.dot((r, u), (u, w), (r, r), *squares))
    rz, uAu, rr = dots[:3]
    event = judge(jnp.ones_like(rz), rz, rr, rr, attainable(aim))
    units = units_of(u, M, rz, uAu, rr)

    both = units.A * units.M
    nearest = jnp.argmin(jnp.abs(jnp.log(scales) - jnp.log(both)))
    ss = dots[3:][nearest] * jnp.square(both / scales[nearest]) * units.M
    rz, pAp = rz * units.M, (uAu * units.M) * both
    p, s, q = trees.scale(units.M, u), trees.scale(both, w), trees.scale(both * units.M, m)
    A, M = units.scaled(A, M)
    z = A(q)
    return State(
        trees.zeros_like(r),
        p,
        (Chain(r, s, s, z),) if M is None else (Chain(r, s, s, z), Chain(p, q, q, M(z))),
        Products(rz, pAp, pAp, ss, rr),
        units,
        Replacement(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32), rr),
        rr,
        event,
        units.breakdown(pAp, rz),
        ritz.start(rr.dtype),
    )


def step(A: Any, M: Any, aim: driver.Aim, space: Space, state: State) -> State:
    """Take one step, unless that would move nothing for the better."""
    units, (rz, pAp, rs, ss, rr) = state.units, state.products
    aim = attainable(aim)
    A, M = units.scaled(A, M)
    alpha = jnp.where(rr > aim.floor, trees.safe_ratio(rz, pAp), 0)
    beta = jnp.maximum(trees.safe_ratio(rz - alpha * (2 * rs - alpha * ss), rz), 0)
    x = trees.axpy(alpha, state.p, state.x)
    chains = tuple(moved(alpha, chain) for chain in state.chains)
    chains = replace(A, M, chains, state)
    p = trees.axpy(beta, state.p, chains[-1].r)
    chains = tuple(turned(beta, chain) for chain in chains)

    r, u, s, q = chains[0].r, chains[-1].r, chains[0].s, chains[-1].s
    pending, q = space.begin([(r, u), (p, s), (u, s), (s, q), (r, r)], through=q)
    z = A(q)
    last = (z,) if M is None else (z, M(z))
    dots, last = space.finish(pending, after=last)
    products = Products(*dots)

    # Agree before x moves: a step that fails on one rank must move nothing on any.
    event = trusted(judge(pAp, products.rz, rr, products.rr, aim), rr, aim)
    replacement = review(state.replacement, products.rr)
    event, due = space.decide(jnp.stack([event, replacement.due]))
    return State(
        trees.select(event < Reason.INDEFINITE_OPERATOR, x, state.x),
        p,
        tuple(chain._replace(z=z) for chain, z in zip(chains, last, strict=True)),
        products,
        units,
        replacement._replace(due=due),
        products.rr,
        event,
        units.breakdown(pAp, products.rz),
        ritz.update(state.ritz, alpha * units.A * units.M, beta),
    )


def moved(alpha: jax.Array, chain: Chain) -> Chain:
    """Return the vectors after a step of length ``alpha``."""
    r, w = trees.axpy(-alpha, (chain.s, chain.z), (chain.r, chain.w))
    return Chain(r, w, chain.s, chain.z)


def turned(beta: jax.Array, chain: Chain) -> Chain:
    """Return the vectors that go with the next direction, but for ``z``."""
    return chain._replace(s=trees.axpy(beta, chain.s, chain.w))


def replace(A: Any, M: Any, chains: tuple[Chain, ...], state: State) -> tuple[Chain, ...]:
    """Return the vectors, computed from ``r`` and ``p`` anew if that is due."""

    def anew(carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        due, chains = carry
        plain = chains[0]
        u = plain.r if M is None else M(plain.r)
        plain = plain._replace(w=A(u), s=A(state.p))
        if M is None:
            return jnp.zeros_like(due), (plain,)
        conditioned = chains[1]._replace(r=u, w=M(plain.w), s=M(plain.s))
        return jnp.zeros_like(due), (plain, conditioned)

    # A loop of one round at most, not a cond: under vmap that would do both, in every step.
    carry = state.replacement.due, chains
    return jax.lax.while_loop(lambda carry: carry[0] > 0, anew, carry)[1]


def review(replacement: Replacement, rr: jax.Array) -> Replacement:
    """Return whether vectors are to be replaced after a step that ended with ``rr``.

    What they lost was a part of their size at the last time, so also where the residual has fallen.
    """
    due, age, rr_replaced = replacement
    age = jnp.where(due > 0, 0, age) + 1
    rr_replaced = jnp.where(due > 0, rr, rr_replaced)
    fallen = rr <= math.sqrt(jnp.finfo(rr.dtype).eps) * rr_replaced
    return Replacement((fallen | (age >= STEPS_TO_REPLACE)).astype(jnp.int32), age, rr_replaced)


def trusted(event: jax.Array, rr: jax.Array, aim: driver.Aim) -> jax.Array:
    """Return the event, unless it blames an operator for what may be rounding.

    Vectors are not quite what they stand for, and less so the smaller they are. With half of the
    digits spent, a product that is not positive ends the cycle; the next one measures it exactly.
    """
    blames = (event == Reason.INDEFINITE_OPERATOR) | (event == Reason.INDEFINITE_PRECONDITIONER)
    instead = jnp.where(aim.target < 0, Reason.RUNNING, Reason.STAGNATED).astype(event.dtype)
    return jnp.where(blames & (rr <= jnp.finfo(rr.dtype).eps), instead, event)


METHOD = driver.Method("pipelined", init, step, COST, answer)

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
Agullo, Giraud and Vanroose (2018), doi:10.48550/arXiv.1601.07068. Ours: in a step that is ``M r``,
``w`` and ``s``, which are as exact as ``r`` at any time. ``r = b - A x`` rounds to what A x does,
and would disturb the directions; the driver replaces it, if it has drifted away, between cycles.
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


class Upkeep(NamedTuple):
    """What keeps the vectors close to what they stand for."""

    due: jax.Array  # whether the next step replaces vectors
    age: jax.Array  # steps since that was done
    rr: jax.Array  # <r, r> then
    least: jax.Array  # the smallest <r, r>
    over: jax.Array  # whether further steps would only follow rounding errors


class State(NamedTuple):
    """All that the method carries from one iteration to the next, scaled by ``units``."""

    x: Any
    p: Any
    chains: tuple[Chain, ...]  # one, and with M another one of M times each vector
    products: Products
    units: Units
    upkeep: Upkeep
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
    # Of one entry, XLA would make the square of w by the square of the scale.
    squares = jax.lax.optimization_barrier(squares)
    # Copies of a replicated vector may differ in their last bits, and units must not.
    dots = space.decide(space.dot((r, u), (u, w), (r, r), *squares))
    rz, uAu, rr = dots[:3]
    aim = attainable(aim)
    event = judge(jnp.ones_like(rz), rz, rr, rr, aim)
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
        Upkeep(*(jnp.zeros((), jnp.int32),) * 2, rr, rr, (rr <= aim.floor).astype(jnp.int32)),
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
    alpha = jnp.where(state.upkeep.over == 0, trees.safe_ratio(rz, pAp), 0)
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
    event, upkeep = review(judge(pAp, products.rz, rr, products.rr, aim), state, products, aim)
    event, due, over = space.decide(jnp.stack([event, upkeep.due, upkeep.over]))
    return State(
        trees.select(event < Reason.INDEFINITE_OPERATOR, x, state.x),
        p,
        tuple(chain._replace(z=z) for chain, z in zip(chains, last, strict=True)),
        products,
        units,
        upkeep._replace(due=due, over=over),
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
    carry = state.upkeep.due, chains
    return jax.lax.while_loop(lambda carry: carry[0] > 0, anew, carry)[1]


def review(
    event: jax.Array, state: State, products: Products, aim: driver.Aim
) -> tuple[jax.Array, Upkeep]:
    """Return what a step has come to, and what is to be done about rounding.

    What vectors lost was a part of their size when they were last exact, so they are replaced also
    where the residual has fallen. With half of the digits spent, a product that is not positive
    need not be the fault of an operator, and a residual that grows back is not CG's. Then the cycle
    ends, and the next one begins with what is measured; or no step moves, if they are only counted.
    """
    rr, eps = products.rr, float(jnp.finfo(products.rr.dtype).eps)
    due, age, rr_exact, least, over = state.upkeep
    age = jnp.where(due > 0, 0, age) + 1
    rr_exact = jnp.where(due > 0, rr, rr_exact)
    due = (rr <= math.sqrt(eps) * rr_exact) | (age >= STEPS_TO_REPLACE)

    blames = (event == Reason.INDEFINITE_OPERATOR) | (event == Reason.INDEFINITE_PRECONDITIONER)
    lost = (least <= eps) & (blames | (rr > 1e4 * least))
    counted = aim.target < 0
    instead = jnp.where(counted, Reason.RUNNING, Reason.STAGNATED).astype(event.dtype)
    over = over | ((lost & counted) | (rr <= aim.floor)).astype(over.dtype)
    upkeep = Upkeep(due.astype(jnp.int32), age, rr_exact, jnp.minimum(least, rr), over)
    return jnp.where(lost, instead, event), upkeep


METHOD = driver.Method("pipelined", init, step, COST, answer)

"""Conjugate gradients with all inner products of a step in one reduction.

A is applied to ``z = M r``, and what the next step divides by follows from products with it:

    <p+, A p+> = <z, A z> + 2 beta <z, A p> + beta^2 <p, A p>   for   p+ = z + beta p,

and ``A p+ = A z + beta A p``. By conjugacy the second term is -2 beta^2 <p, A p>; measured, it
leaves no other error than rounding, so that a sum below zero shows an indefinite operator.

Reference: Chronopoulos and Gear (1989), doi:10.1016/0377-0427(89)90045-9. Ours: the second term, M
and A are scaled by powers of two to a size of 1, no step is taken on a product that is not
positive, and where the sum is lost in rounding the method begins anew from ``p+ = z``.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from distsolve.linalg import driver, order, ritz, trees
from distsolve.linalg.info import Reason
from distsolve.linalg.krylov.cg_classic import decide, judge, size_of
from distsolve.linalg.space import Space

# Beyond the steps' own, a cycle takes one more product with A.
COST = {"matvec": 1, "reductions": 1, "agreements": 1, "vectors": 5}


class State(NamedTuple):
    """All that the method carries from one iteration to the next, scaled by ``units``."""

    x: Any
    r: Any
    p: Any
    s: Any  # A p
    units: "Units"
    rz: jax.Array  # <r, M r>
    pAp: jax.Array  # noqa: N815
    rr: jax.Array  # <r, r>
    event: jax.Array
    breakdown: jax.Array
    ritz: ritz.Ritz


class Units(NamedTuple):
    """Square roots, powers of two, of what brings the operators of a cycle to a size of 1."""

    root_A: jax.Array  # noqa: N815
    root_M: jax.Array  # noqa: N815

    @property
    def A(self) -> jax.Array:
        """What A is multiplied by."""
        return jnp.square(self.root_A)

    @property
    def M(self) -> jax.Array:
        """What M is multiplied by."""
        return jnp.square(self.root_M)

    def scaled(self, A: Any, M: Any) -> tuple[Any, Any]:
        """Return both operators, scaled: half before and half after, so that nothing vanishes."""

        def between(root: jax.Array, operator: Any) -> Any:
            return lambda v: trees.scale(root, operator(trees.scale(root, v)))

        return between(self.root_A, A), M and between(self.root_M, M)

    def breakdown(self, pAp: jax.Array, rz: jax.Array) -> jax.Array:
        """Return the product that was not positive, in the user's units."""
        return jnp.where(pAp > 0, rz / self.M, pAp / (self.A * self.M) / self.M)


def init(A: Any, M: Any, r: Any, aim: driver.Aim, space: Space) -> State:
    """Return the state at the zero vector, whose residual is ``r``."""
    z = r if M is None else M(r)
    w = A(z)
    # Copies of a replicated vector may differ in their last bits, and units must not.
    rz, zAz, rr = space.decide(space.dot((r, z), (z, w), (r, r)))
    event = judge(jnp.ones_like(rz), rz, rr, rr, attainable(aim))
    units = units_of(z, M, rz, zAz, rr)
    p, s = trees.scale(units.M, z), trees.scale(units.A * units.M, w)
    rz, pAp = rz * units.M, (zAz * units.M) * (units.A * units.M)
    x, breakdown, estimates = trees.zeros_like(r), units.breakdown(pAp, rz), ritz.start(rr.dtype)
    return State(x, r, p, s, units, rz, pAp, rr, event, breakdown, estimates)


def step(A: Any, M: Any, aim: driver.Aim, space: Space, state: State) -> State:
    """Take one step, unless that would move nothing for the better."""
    x, r, p, s, units, rz, pAp, rr, _, _, estimates = state
    aim = attainable(aim)
    A, M = units.scaled(A, M)
    alpha = jnp.where(rr > aim.floor, trees.safe_ratio(rz, pAp), 0)
    r = trees.axpy(-alpha, s, r)
    z = r if M is None else M(r)
    w = A(z)
    rz_new, zAz, zAp, rr_new = space.dot((r, z), (z, w), (z, s), (r, r))

    # Agree before x moves: a step that fails on one rank must move nothing on any. The products
    # travel, too: `conjugate` begins anew or not, and all ranks must do the same.
    event = judge(pAp, rz_new, rr, rr_new, aim)
    event, rz_new, zAz, zAp, rr_new = decide(space, event, rz_new, zAz, zAp, rr_new)
    x = trees.axpy(jnp.where(event < Reason.INDEFINITE_OPERATOR, alpha, 0), p, x)

    beta, pAp_new = conjugate(trees.safe_ratio(rz_new, rz), zAz, zAp, pAp)
    p, s = trees.axpy(beta, order.after(x, p), z), trees.axpy(beta, s, w)
    breakdown = units.breakdown(pAp, rz_new)
    estimates = ritz.update(estimates, alpha * units.A * units.M, beta)
    return State(x, r, p, s, units, rz_new, pAp_new, rr_new, event, breakdown, estimates)


def units_of(z: Any, M: Any, rz: jax.Array, zAz: jax.Array, rr: jax.Array) -> Units:
    """Return the units of a cycle from the products at its start, where ``z = M r``."""
    size = jnp.ones_like(rr) if M is None else size_of(z, rz, rr)
    length = jnp.abs(rz / zAz) * size
    return Units(*(trees.power_of_two(jnp.sqrt(unit), z) for unit in (length, 1 / size)))


def attainable(aim: driver.Aim) -> driver.Aim:
    """Return an aim that recurrences can meet: 8 units of rounding, rather than one.

    Further steps would follow rounding errors, into the null space of a singular A for one.
    """
    floor = 64 * aim.floor
    target = jnp.where(aim.target < 0, aim.target, jnp.maximum(aim.target, floor))
    return aim._replace(target=target, floor=floor)


def conjugate(
    beta: jax.Array, zAz: jax.Array, zAp: jax.Array, pAp: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return ``beta`` and ``<p+, A p+>`` for ``p+ = z + beta p``, with ``beta`` 0 in case of doubt.

    A sum within the rounding of its terms says neither how long the step is nor that the operator
    is indefinite. The product of ``z`` alone, which was measured, may.
    """
    terms = jnp.stack([zAz, 2 * beta * zAp, beta * beta * pAp])
    total = terms.sum(0)
    doubtful = jnp.abs(total) <= 64 * jnp.finfo(zAz.dtype).eps * jnp.abs(terms).sum(0)
    beta = jnp.where(doubtful, jnp.zeros_like(beta), beta)
    return beta, jnp.where(doubtful, zAz, total)


def answer(M: Any, space: Space, state: State) -> Any:
    """Return the correction in the user's units."""
    return trees.scale(state.units.A, state.x)


METHOD = driver.Method("single_reduction", init, step, COST, answer)

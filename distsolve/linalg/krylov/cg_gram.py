"""Conjugate gradients for the matrix of stochastic reconfiguration: one message a step, in all.

The product with S is a reduction anyway. ``<p, S p>`` travels in it, as do the things on which
replicated vectors have to agree: b, x0 and the limits in the first message. After it every rank
computes the same from the same numbers, so that nothing else is sent. Near the end x travels too:

    b - S (x + alpha p) = b - S x - alpha S p

is then the true residual after a step, from products that are both fresh. So k steps take k
messages, and the answer is still judged by its true residual.

Reference: as `cg_classic`. Ours: what travels together, and that a residual which drifted away is
replaced in place.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from distsolve.linalg import driver, order, ritz, trees
from distsolve.linalg.info import Info, Reason
from distsolve.linalg.krylov.cg_classic import judge, size_of
from distsolve.linalg.loop import Limits, Seen, Stop, Watch, report
from distsolve.linalg.space import Space

NAME = "cg"

COST = {"matvec": 1, "reductions": 0, "agreements": 0, "vectors": 6}

# Up to so many unknowns x travels in every message: latency outweighs what it adds.
SMALL = 2048
# Beyond, it travels once the residual norm is within this factor of the threshold.
NEAR = 10.0


class State(NamedTuple):
    """All that a step hands to the next; vectors are divided by a common power of two."""

    x: Any
    r: Any
    p: Any  # the search direction, divided by `unit`
    unit: jax.Array
    rz: jax.Array  # <r, M r>
    rr: jax.Array  # <r, r>
    true_norm: jax.Array  # ||b - S x||, where it is known
    checked: jax.Array  # whether it is
    kept: Any  # x when r was last the true residual
    kept_norm: jax.Array  # its norm
    margin: jax.Array  # how far below the threshold r is to get
    event: jax.Array
    breakdown: jax.Array
    ritz: ritz.Ritz
    iterations: jax.Array
    seen: Seen


class Problem(NamedTuple):
    """What all steps share."""

    product: Any  # V, from which end J is read -> S V, V^H S V
    M: Any  # divided by a power of two near its size
    r: Any  # the residual at the start, which is to be reduced, divided by `unit`
    unit: jax.Array
    limits: Limits
    wanted: Watch

    def aim(self, margin: jax.Array) -> driver.Aim:
        """Return what the recurrence is to reach."""
        eps = jnp.asarray(trees.epsilon(self.r), self.unit.dtype)
        target = jnp.maximum(margin * (self.limits.threshold / self.unit), eps)
        squared = jnp.where(self.limits.fixed, -1, target * target)
        return driver.Aim(squared, eps * eps, jnp.zeros_like(eps))


def run(
    space: Space,
    wanted: Watch,
    S: Any,
    M: Any,
    S_consts: Any,
    M_consts: Any,
    b: Any,
    x0: Any,
    stop: Stop,
    watched: bool = True,
) -> tuple[Any, Info]:
    """Solve and report, as `driver.drive` asks of a loop; ``S`` holds an `SRMatrix`."""
    matrix = S.held(S_consts)
    # A constant of the user's program stays a value, for the reason that `driver.drive` tells.
    b, shaped = ravel_pytree(jax.lax.optimization_barrier(b))

    def apply_M(r: Any) -> Any:
        return r if M is None else ravel_pytree(M(M_consts, shaped(r)))[0]

    start = None if x0 is None else ravel_pytree(x0)[0]
    packed, (b, x, r), fault, Cp, pCp = open_together(matrix, apply_M, b, start, stop)
    rhs_norm, residual_norm = trees.norm(b), trees.norm(r)
    zero_rhs = rhs_norm == 0  # its solution is zero
    x, r = trees.select(zero_rhs, (jnp.zeros_like(x), b), (x, r))
    residual_norm = jnp.where(zero_rhs, 0, residual_norm) + fault
    limits = Limits.agreed(packed, rhs_norm, len(b), stop)
    unit = trees.power_of_two(residual_norm, r)
    r = trees.scale(1 / unit, r)
    p, unit_M, rz = direction(apply_M, r, trees.vdot(r, r))
    none = jnp.zeros(0, matrix.real_dtype)
    problem = Problem(
        # Ranks agree because they compute the same from the same: what a user's function is
        # compiled to, for other shapes on each rank, must not reach into it.
        lambda V, backward: matrix.product(jax.lax.optimization_barrier(V), none, backward)[:2],
        lambda r: trees.scale(1 / unit_M, apply_M(r)),
        r,
        unit,
        limits,
        wanted if watched else Watch(),
    )
    reason = limits.at_start(rhs_norm, residual_norm)
    state = init(problem, p, rz / unit_M, reason, residual_norm)
    (Sp,), (pSp,) = matrix.damped(state.p[None], Cp, pCp)
    first = step(problem, state, Sp, pSp, jnp.zeros_like(b))
    end = iterate(problem, trees.select(state.event == Reason.RUNNING, first, state))
    reason = jnp.where(end.event == Reason.RUNNING, limits.at_limit(), end.event)
    broken = (reason > Reason.STAGNATED) & (reason < Reason.NONFINITE)
    scales = jnp.where(reason == Reason.INDEFINITE_OPERATOR, unit_M * unit_M, unit_M) * unit * unit
    return shaped(trees.axpy(unit, end.x, x)), report(
        NAME,
        problem.wanted,
        space,
        limits,
        end.seen,
        reason=reason,
        iterations=end.iterations,
        residual_norm=unit * end.true_norm,
        reductions=0,
        rhs_norm=rhs_norm,
        breakdown=jnp.where(broken, end.breakdown * scales, 0),
        condition_estimate=ritz.condition(end.ritz),
    )


def open_together(
    matrix: Any, apply_M: Any, b: jax.Array, x0: jax.Array | None, stop: Stop
) -> tuple[jax.Array, list[jax.Array], jax.Array, jax.Array, jax.Array]:
    """Return what all ranks start from, rank 0's, with the first product; one message.

    One more with ``x0``. The scalars of `Stop.pack`; b, x and the residual; 0, or NaN if any rank's
    is not finite; and C p and p^H C p for the first direction p.

    The first product is of J with this rank's own copy of b: where copies differ in their last
    bits, that is rounding.
    """
    x, r = jnp.zeros_like(b), b
    if x0 is not None:
        x, none = x0, jnp.zeros(0, matrix.real_dtype)
        r = b - matrix.product(x[None], none)[0][0]
    norm = trees.norm(r)
    scaled = trees.scale(1 / trees.power_of_two(norm, r), r)
    p, _, _ = direction(apply_M, scaled, trees.vdot(scaled, scaled))
    vectors = [b] if x0 is None else [b, x, r]
    parts = [trees.real_parts(v) for v in vectors]
    ours, unpack = ravel_pytree((stop.pack(matrix.real_dtype), parts))
    nan_anywhere = jnp.where(jnp.isfinite(norm), 0, jnp.full_like(norm, jnp.nan))
    extra = jnp.append(jnp.where(stop.here, ours, 0), nan_anywhere)
    Cp, pCp, agreed = matrix.undamped_product(p[None], extra)
    packed, vectors = unpack(agreed[:-1])
    b, *more = [trees.from_real_parts(parts, b) for parts in vectors]
    return packed, [b, *(more or (x, b))], agreed[-1], Cp, pCp


def iterate(problem: Problem, state: State) -> State:
    """Take steps until the true residual says that it is enough, or something that it is not."""
    limits = problem.limits

    def far(state: State) -> jax.Array:
        last = state.iterations + 1 >= limits.maxiter
        near = state.rr <= NEAR**2 * problem.aim(state.margin).target
        return (state.event == Reason.RUNNING) & ~last & ~near

    def go_on(state: State) -> jax.Array:
        unchecked = (state.event == Reason.CONVERGED) & ~state.checked
        running = (state.event == Reason.RUNNING) | unchecked
        return running & (state.iterations < limits.maxiter)

    def blind_step(state: State) -> State:
        (Sp,), (pSp,) = problem.product(state.p[None], turned(state))
        return step(problem, state, Sp, pSp, None)

    def checked_step(state: State) -> State:
        (Sp, Sx), (pSp, _) = problem.product(jnp.stack([state.p, state.x]), turned(state))
        return step(problem, state, Sp, pSp, Sx)

    def check(state: State) -> State:
        (Sx,), _ = problem.product(state.x[None], turned(state))
        return state._replace(true_norm=trees.norm(problem.r - Sx), checked=~state.checked)

    if len(state.x) > SMALL:
        state = jax.lax.while_loop(far, blind_step, state)
    state = jax.lax.while_loop(go_on, checked_step, state)
    # After a blind step that broke down. No cond: batched, it would send for every solve.
    return jax.lax.while_loop(lambda state: ~state.checked, check, state)


def turned(state: State) -> jax.Array:
    """Return whether this product reads J from its last rows on: every other one does."""
    return state.iterations % 2 == 1


def init(
    problem: Problem, p: Any, rz: jax.Array, reason: jax.Array, residual_norm: jax.Array
) -> State:
    """Return the state at the zero correction, with a ``reason`` that may end the solve here.

    ``p`` is ``M r``, and ``rz`` is ``<r, M r>``.
    """
    r, norm = problem.r, residual_norm / problem.unit
    rr, ones = norm * norm, jnp.ones_like(norm)
    fault = judge(ones, rz, rr, rr, problem.aim(ones))
    return State(
        x=jnp.zeros_like(r),
        r=r,
        p=p,
        unit=ones,
        rz=rz,
        rr=rr,
        true_norm=norm,
        checked=jnp.ones((), bool),
        kept=jnp.zeros_like(r),
        kept_norm=norm,
        margin=ones,
        event=jnp.where((reason == Reason.RUNNING) & (fault > Reason.STAGNATED), fault, reason),
        breakdown=rz,
        ritz=ritz.start(rr.dtype),
        iterations=jnp.zeros((), jnp.int32),
        seen=Seen.nothing(problem.wanted, residual_norm),
    )


def step(problem: Problem, state: State, Sp: Any, pSp: jax.Array, Sx: Any) -> State:
    """Take one step; ``Sx`` is S times the x before it, or None where x has not travelled."""
    aim, ones = problem.aim(state.margin), jnp.ones_like(state.rr)
    alpha = jnp.where(state.rr > aim.floor, trees.safe_ratio(state.rz, state.unit * pSp), 0)
    r = trees.axpy(-alpha, Sp, state.r)
    rr = trees.vdot(r, r)
    event = judge(pSp, ones, state.rr, rr, aim)
    moved = event < Reason.INDEFINITE_OPERATOR
    taken = jnp.where(moved, alpha, 0)
    x = trees.axpy(taken, state.p, state.x)
    moved_state = state._replace(x=x, r=r, rr=rr, event=event, checked=jnp.zeros((), bool))
    if Sx is None:
        restarts = jnp.zeros((), bool)
    else:
        true = trees.axpy(-taken, Sp, problem.r - Sx)
        moved_state, restarts = settle(problem, moved_state, true)
    r, rr, event = moved_state.r, moved_state.rr, moved_state.event

    p, unit, rz = direction(problem.M, r, rr)
    fault = judge(ones, rz, state.rr, rr, aim)
    event = jnp.where((event == Reason.RUNNING) & (fault > Reason.STAGNATED), fault, event)
    beta = jnp.where(restarts, 0, trees.safe_ratio(rz, state.rz))
    iterations = state.iterations + (event < Reason.INDEFINITE_OPERATOR).astype(jnp.int32)
    norm = problem.unit * jnp.sqrt(rr)
    return moved_state._replace(
        p=trees.axpy(beta * (state.unit / unit), order.after(x, state.p), p),
        unit=unit,
        rz=rz,
        event=event,
        breakdown=jnp.where(pSp > 0, rz, pSp * state.unit * state.unit),
        ritz=ritz.update(state.ritz, alpha / state.unit, beta),
        iterations=iterations,
        seen=state.seen.after(NAME, problem.wanted, problem.limits, iterations, norm),
    )


def settle(problem: Problem, state: State, true: Any) -> tuple[State, jax.Array]:
    """Decide by the true residual, and return whether the recurrence goes on from it.

    It does where its own residual met the aim and the true one has not, unless that has not even
    halved since it did the last time: then rounding prevents more, and the better x is kept.
    """
    norm = trees.norm(true)
    moved = state.event < Reason.INDEFINITE_OPERATOR
    met = problem.limits.reached(problem.unit * norm) & moved
    lied = (state.event == Reason.CONVERGED) & ~met
    hopeless = lied & (norm > 0.5 * state.kept_norm)
    restarts, worse = lied & ~hopeless, hopeless & (norm > state.kept_norm)
    cases = [met, hopeless, restarts]
    event = jnp.select(cases, [Reason.CONVERGED, Reason.STAGNATED, Reason.RUNNING], state.event)
    x = jnp.where(worse, state.kept, state.x)
    settled = state._replace(
        x=x,
        r=jnp.where(restarts, true, state.r),
        rr=jnp.where(restarts, norm * norm, state.rr),
        true_norm=jnp.where(worse, state.kept_norm, norm),
        checked=jnp.ones((), bool),
        kept=jnp.where(restarts, x, state.kept),
        kept_norm=jnp.where(restarts, norm, state.kept_norm),
        margin=jnp.where(restarts, 0.5, state.margin),
        event=event.astype(jnp.int32),
    )
    return settled, restarts


def direction(M: Any, r: Any, rr: jax.Array) -> tuple[Any, jax.Array, jax.Array]:
    """Return ``z = M r`` divided by a power of two near its size, that, and ``<r, z>``."""
    z = M(r)
    rz = trees.vdot(r, z)
    unit = size_of(z, rz, rr)
    return trees.scale(1 / unit, z), unit, rz


METHOD = driver.Method(NAME, None, None, COST, run=run)

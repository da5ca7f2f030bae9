"""What all solvers share: the arguments, the loop, the decision to stop.

Parameters of every solver
--------------------------
A : callable, array, or object that supports ``@``
    The operator: a function of one vector (and of ``args``), a matrix, or an object that is
    callable or supports ``@``. It may communicate. A matrix has the shape (n, n) for replicated
    vectors; for sharded ones every rank passes its rows of it, (its entries of ``b``, all entries).
    Arrays that ``A`` closes over are differentiated and never compiled in.
b : pytree, as ``space`` says: every rank holds all of it, or its own piece
    The right-hand side; leaves are real or complex floats, and keep their dtypes in the answer.
    With a matrix ``A``, ``b`` may be a stack of columns, (n, k): one loop and one message serve
    all. For other operators ``jax.vmap`` does the same.
x0 : pytree like ``b``, optional
    Where to start; zero by default, which saves one product. The answer does not depend on it, so
    its derivative is zero.
tol, atol : float
    Stop at a true residual ``||b - A x|| <= max(tol ||b||, atol)``, in the 2-norm over all leaves
    and ranks. With both 0, exactly ``maxiter`` steps are taken and none is a failure.
maxiter : int, optional
    The most steps; ten times the global number of unknowns by default.
M : like ``A``, optional
    A preconditioner that approximates the inverse of ``A``.
space : Space
    Where vectors live: `Replicated` on the world by default.
args : tuple of pytrees of arrays
    Data handed to ``A`` behind the vector: new values never compile again, and are differentiated.
history : int
    How many residual norms ``info.residual_history`` keeps: of the start and the first steps.
progress : bool
    Show a live line on rank 0.
callback : callable, optional
    Called as ``callback(iteration, residual_norm)`` after every step, on the ranks that pass one.
    It cannot stop the solve; the residual is the method's own.

A solve runs in cycles. A cycle scales the residual to about 1 by a power of two, lets the method
reduce it, adds the correction, and computes the residual anew. Almost always one cycle is enough;
another follows where the method's own residual met the threshold and the true one did not, and
where a method restarts.
"""

import collections
import functools
import threading
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from distsolve.linalg import arguments, derivative, operators, ritz, trees
from distsolve.linalg.info import Reason
from distsolve.linalg.loop import Counting, Limits, Seen, Stop, Watch, first_of, report

GROWTH = 10  # of the residual, beyond which a solve that ran out of steps keeps its start


class Method(NamedTuple):
    """A solver: ``init(A, M, r, aim, space)`` and ``step(A, M, aim, space, state)``.

    ``init`` returns the state at the zero correction, whose residual is ``r``, of a norm of about
    1. A state has the fields ``x`` (the correction), ``event`` (a `Reason`, equal on all ranks;
    CONVERGED means that the method's own residual met the aim), ``breakdown``, ``rr`` (the method's
    own squared residual norm) and ``ritz``; if the method minimises the residual, also ``largest``,
    the size of A M.
    """

    name: str
    init: Any
    step: Any
    cost: dict[str, int]  # of a step
    answer: Any = lambda M, space, state: state.x  # the correction
    symmetric: bool = True  # whether A is, and so is its own adjoint
    minimises: bool = False  # whether no step makes the residual larger, but for rounding
    restart: int | None = None  # steps after which the driver begins a new cycle
    run: Any = None  # a loop of its own, for one kind of operator that it takes as it is


class Aim(NamedTuple):
    """What a cycle is to reach, for a residual whose norm is about 1 at its start."""

    target: jax.Array  # squared norm that counts as reached; negative: never
    floor: jax.Array  # squared norm below which a step would only add rounding
    size: jax.Array  # of A M as the cycles before saw it; 0 at first


class _Cycle(NamedTuple):
    """All that one cycle hands to the next."""

    x: Any
    r: Any  # b - A x, computed from x
    residual_norm: jax.Array
    iterations: jax.Array
    steps: jax.Array  # with one that broke down, which is no iteration
    cycles: jax.Array
    reason: jax.Array
    breakdown: jax.Array
    condition: jax.Array
    size: jax.Array  # of A M, for methods that minimise the residual
    margin: jax.Array  # how far below the threshold the method is to aim
    seen: Seen


def drive(
    method,
    A,
    b,
    x0,
    *,
    tol,
    atol,
    maxiter,
    M,
    space,
    args=(),
    history=0,
    progress=False,
    callback=None,
):
    """Check the arguments, solve, and return ``(x, info)``; see the head of this file."""
    b = arguments.as_vector(b)
    if x0 is not None:
        # A start that is a constant of the user's program, such as zeros, stays a value: XLA's CPU
        # compiler (jaxlib 0.10.2 to 0.12.0.1) fuses products with constants into wrong answers.
        x0 = jax.lax.optimization_barrier(arguments.like_b(x0, b, "x0"))
    if operators.is_matrix(A) and getattr(b, "ndim", 0) == 2:
        stopping = {"tol": tol, "atol": atol, "maxiter": maxiter}
        showing = {"history": history, "progress": progress, "callback": callback}
        shared = {"M": M, "space": space, "args": args, **stopping, **showing}

        def column(b, x0):
            return drive(method, A, b, x0, **shared)

        return jax.vmap(column, in_axes=(1, None if x0 is None else 1), out_axes=(1, 0))(b, x0)
    wanted = Watch(
        arguments.history(history),
        arguments.flag(progress, "progress"),
        arguments.callback(callback),
    )
    dtype = trees.scalar_dtype(b)
    tol, atol = arguments.tolerance(tol, "tol", dtype), arguments.tolerance(atol, "atol", dtype)
    maxiter = arguments.step_limit(maxiter)
    A_program, A_consts = _trace("A", A, b, space, arguments.data(args))
    M_program, M_consts = (None, []) if M is None else _trace("M", M, b, space)
    if method.run is not None:
        A_program, A_consts = operators.hold(A)
        space = A.rows  # over whose ranks the products are
    stop = Stop(tol, atol, maxiter, space.rank_zero())
    values = A_consts, M_consts, b, x0, stop
    traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(values))
    return _compiled(method, space, wanted, A_program, M_program, traced)(*values)


def _trace(name, operator, b, space, args=()):
    program, consts, out = operators.trace(operators.as_function(operator, name, b, space, args), b)
    remedy = f"`{name}` must map a vector like `b` to a vector like `b`."
    arguments.require_same(out, b, f"`{name}(b)`", remedy)
    return program, consts


_programs: collections.OrderedDict[Any, Any] = collections.OrderedDict()
_programs_lock = threading.Lock()
_PROGRAMS_KEPT = 32


def _compiled(method, space, wanted, A, M, traced):
    """Return the jitted solve, the same one for programs that are equal."""
    run = functools.partial(method.run or functools.partial(_run, method), space, wanted)
    solve = jax.jit(functools.partial(derivative.solve, run, method.symmetric, A, M))
    try:
        key = (
            method.name,
            method.run,
            method.restart,
            space,
            wanted,
            A.key(traced),
            M and M.key(traced),
        )
    except operators.Incomparable:
        return solve
    with _programs_lock:
        solve = _programs.pop(key, solve)
        _programs[key] = solve
        if len(_programs) > _PROGRAMS_KEPT:
            _programs.popitem(last=False)
    return solve


def _run(method, space, wanted, A, M, A_consts, M_consts, b, x0, stop, watched=True):
    """Run cycles until the true residual or the method says why to end."""
    A = functools.partial(A, A_consts)
    M = M and functools.partial(M, M_consts)
    space = Counting(space)
    wanted = wanted if watched else Watch()
    x = trees.zeros_like(b) if x0 is None else x0
    r = b if x0 is None else trees.subtract(b, A(x))
    packed = stop.pack(trees.scalar_dtype(b))
    (rhs_norm, residual_norm), packed, size = space.open((b, r), packed, stop.here)
    limits = Limits.agreed(packed, rhs_norm, size, stop)
    if x0 is not None:  # the solution of a zero system is zero
        zero_rhs = rhs_norm == 0
        x, r = trees.select(zero_rhs, (trees.zeros_like(x), b), (x, r))
        residual_norm = jnp.where(zero_rhs, 0, residual_norm)
    opening, zero = space.taken(), jnp.zeros((), jnp.int32)
    start = _Cycle(
        x,
        r,
        residual_norm,
        iterations=zero,
        steps=zero,
        cycles=zero,
        reason=limits.at_start(rhs_norm, residual_norm),
        breakdown=jnp.zeros_like(rhs_norm),
        condition=jnp.ones_like(rhs_norm),
        size=jnp.zeros_like(rhs_norm),
        margin=jnp.ones_like(rhs_norm),
        seen=Seen.nothing(wanted, residual_norm),
    )
    cost: dict[str, int] = {}
    cycle = functools.partial(_cycle, method, A, M, b, limits, space, wanted, cost)
    end = jax.lax.while_loop(lambda s: s.reason == Reason.RUNNING, cycle, start)
    return end.x, report(
        method.name,
        wanted,
        space,
        limits,
        end.seen,
        reason=end.reason,
        iterations=end.iterations,
        residual_norm=end.residual_norm,
        reductions=opening + cost["cycle"] * end.cycles + cost["step"] * end.steps,
        rhs_norm=rhs_norm,
        breakdown=end.breakdown,
        condition_estimate=end.condition,
    )


def _cycle(method, A, M, b, limits, space, wanted, cost, s):
    """Reduce the residual, add the correction, and see what has become of the residual."""
    unit = trees.power_of_two(s.residual_norm, b)
    eps = jnp.asarray(trees.epsilon(b), unit.dtype)
    target = jnp.maximum(s.margin * (limits.threshold / unit), eps)
    squared = jnp.where(limits.fixed, -1.0, target * target).astype(unit.dtype)
    aim = Aim(squared, eps * eps, s.size)

    space.taken()
    first = method.init(A, M, trees.scale(1 / unit, s.r), aim, space)
    opening = space.taken()
    advance = functools.partial(method.step, A, M, aim, space)
    state, iterations, seen = _iterate(method, advance, first, s, unit, limits, space, wanted, cost)
    x = trees.axpy(unit, method.answer(M, space, state), s.x)
    r = trees.subtract(b, A(x))
    # Ranks agree on the largest of each, and of a breakdown the smallest counts: only some of the
    # ranks that hold copies may have met one.
    numbers = jnp.stack([space.norm(r), -state.breakdown, ritz.condition(state.ritz)])
    residual_norm, opposite, condition = space.decide(numbers)
    cost["cycle"] = opening + space.taken()

    # Either the method restarts, or it has done what it can and the true residual is not there.
    restarts, lied = state.event == Reason.RUNNING, state.event == Reason.CONVERGED
    progress = jnp.where(restarts, 1 - 10 * eps, 0.5).astype(unit.dtype) * s.residual_norm
    reason = first_of(
        (limits.reached(residual_norm), Reason.CONVERGED),
        (state.event > Reason.STAGNATED, state.event),
        (~jnp.isfinite(residual_norm), Reason.NONFINITE),
        (iterations >= limits.maxiter, limits.at_limit()),
        ((residual_norm > progress) & ~limits.fixed, Reason.STAGNATED),
    )
    broken = (reason == Reason.INDEFINITE_OPERATOR) | (reason == Reason.INDEFINITE_PRECONDITIONER)
    failed = (first.event == Reason.RUNNING) & (state.event >= Reason.INDEFINITE_OPERATOR)
    # A cycle whose steps were all rounding can make the residual worse: keep the better. That of
    # CG may also grow on its way, if not by much.
    worse = residual_norm > s.residual_norm
    if not method.minimises:
        grown = (reason == Reason.MAXITER) & (residual_norm > GROWTH * s.residual_norm)
        worse &= (reason >= Reason.STAGNATED) | grown
    worse |= ~jnp.isfinite(residual_norm)
    x, r = trees.select(worse, (s.x, s.r), (x, r))
    return _Cycle(
        x,
        r,
        jnp.where(worse, s.residual_norm, residual_norm),
        iterations,
        s.steps + (iterations - s.iterations) + failed.astype(jnp.int32),
        s.cycles + 1,
        reason,
        jnp.where(broken, -opposite * unit * unit, jnp.zeros_like(opposite)),
        jnp.maximum(s.condition, condition),
        state.largest if method.minimises else s.size,
        jnp.where(lied, 0.5, s.margin).astype(unit.dtype),
        seen,
    )


def _iterate(method, advance, state, s, unit, limits, space, wanted, cost):
    """Take steps until the method, the limit or a restart ends them."""
    end = limits.maxiter
    if method.restart is not None:
        end = jnp.minimum(end, s.iterations + method.restart)

    def go_on(carry):
        state, iterations, _ = carry
        return (state.event == Reason.RUNNING) & (iterations < end)

    def step(carry):
        state, iterations, seen = carry
        space.taken()
        state = advance(state)
        cost["step"] = space.taken()
        iterations += (state.event < Reason.INDEFINITE_OPERATOR).astype(jnp.int32)
        norm = unit * jnp.sqrt(state.rr)
        seen = seen.after(method.name, wanted, limits, iterations, norm)
        return state, iterations, seen

    return jax.lax.while_loop(go_on, step, (state, s.iterations, s.seen))

"""What all solvers share: the loop, the decision to stop, the derivative rule.

Parameters of every solver
--------------------------
A : callable, (n, n) array, or object that supports ``@``
    The operator, Hermitian over ``Re <x, y>``. It may communicate. Arrays that it closes over are
    differentiated and never compiled in.
b : pytree, replicated
    The right-hand side; leaves are real or complex floats, and keep their dtypes in the answer.
x0 : pytree like ``b``, optional
    Where to start; zero by default, which saves one product. The answer does not depend on it, so
    its derivative is zero.
tol, atol : float
    Stop at a true residual ``||b - A x|| <= max(tol ||b||, atol)``, in the 2-norm over all leaves.
    With both 0, exactly ``maxiter`` steps are taken and none is a failure.
maxiter : int, optional
    The most steps; ten times the global number of unknowns by default.
M : like ``A``, optional
    A preconditioner that approximates the inverse of ``A``.

A solve runs in cycles. A cycle scales the residual to about 1 by a power of two, lets the method
reduce it, adds the correction, and computes the residual anew. Almost always one cycle is enough;
another follows where the method's own residual met the threshold and the true one did not.
"""

import collections
import functools
import threading
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from distsolve.linalg import arguments, operators, trees
from distsolve.linalg.info import Info, Reason


class Method(NamedTuple):
    """A solver: ``init(M, r, aim, space)`` and ``step(A, M, aim, space, state)``.

    The state has the fields ``x`` (the correction), ``event`` (a `Reason`, agreed over the ranks;
    CONVERGED means that the method's own residual met the aim) and ``breakdown``.
    """

    name: str
    init: Any
    step: Any


class Stop(NamedTuple):
    """When to stop: scalars, traced, so that other values do not compile again."""

    tol: jax.Array
    atol: jax.Array
    maxiter: jax.Array


class Aim(NamedTuple):
    """What a cycle is to reach, for a residual whose norm is about 1 at its start."""

    target: jax.Array  # squared norm that counts as reached; negative: never
    floor: jax.Array  # squared norm below which a step would only add rounding


class _Cycle(NamedTuple):
    """All that one cycle hands to the next."""

    x: Any
    r: Any  # b - A x, computed from x
    residual_norm: jax.Array
    iterations: jax.Array
    reason: jax.Array
    breakdown: jax.Array


def drive(method, A, b, x0, *, tol, atol, maxiter, M, space):
    """Check the arguments, solve, and return ``(x, info)``; see the head of this file."""
    b = arguments.as_vector(b)
    if x0 is not None:
        x0 = arguments.like_b(x0, b, "x0")
    dtype = trees.scalar_dtype(b)
    stop = Stop(
        arguments.tolerance(tol, "tol", dtype),
        arguments.tolerance(atol, "atol", dtype),
        arguments.step_limit(maxiter, space.size(b)),
    )
    A_program, A_consts = _trace("A", A, b)
    M_program, M_consts = (None, []) if M is None else _trace("M", M, b)
    values = A_consts, M_consts, b, x0, stop
    traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(values))
    return _compiled(method, space, A_program, M_program, traced)(*values)


def _trace(name, operator, b):
    program, consts, out = operators.trace(operators.as_function(operator, name, b), b)
    remedy = f"`{name}` must map a vector like `b` to a vector like `b`."
    arguments.require_same(out, b, f"`{name}(b)`", remedy)
    return program, consts


_programs: collections.OrderedDict[Any, Any] = collections.OrderedDict()
_programs_lock = threading.Lock()
_PROGRAMS_KEPT = 32


def _compiled(method, space, A, M, traced):
    """Return the jitted solve, the same one for programs that are equal."""
    solve = jax.jit(functools.partial(_solve, method, space, A, M))
    try:
        key = method.name, space, A.key(traced), M and M.key(traced)
    except operators.Incomparable:
        return solve
    with _programs_lock:
        solve = _programs.pop(key, solve)
        _programs[key] = solve
        if len(_programs) > _PROGRAMS_KEPT:
            _programs.popitem(last=False)
    return solve


def _solve(method, space, A, M, *values):
    """Solve, differentiably in the consts of ``A`` and in ``b``."""

    @jax.custom_jvp
    def solve(A_consts, M_consts, b, x0, stop):
        apply_M = M and functools.partial(M, M_consts)
        return _run(method, functools.partial(A, A_consts), apply_M, b, x0, stop, space)

    @functools.partial(solve.defjvp, symbolic_zeros=True)
    def _(primals, tangents):
        A_consts, M_consts, _, _, stop = primals
        t_A_consts, _, t_b, _, _ = tangents
        x, info = solve(*primals)
        # A x = b  =>  A x' = b' - A' x: one more solve. The preconditioner, the start and the
        # tolerances do not move the solution.
        t_rhs = jax.tree.map(_instantiate, t_b, is_leaf=_is_zero)
        varied = [i for i, t in enumerate(t_A_consts) if not _is_zero(t)]
        if varied:

            def product(moved):
                consts = list(A_consts)
                for i, const in zip(varied, moved, strict=True):
                    consts[i] = const
                return A(consts, x)

            moved = [A_consts[i] for i in varied], [t_A_consts[i] for i in varied]
            _, t_A_x = jax.jvp(product, (moved[0],), (moved[1],))
            t_rhs = trees.subtract(t_rhs, t_A_x)
        relative = trees.safe_ratio(info.threshold, info.rhs_norm)
        t_stop = Stop(jnp.maximum(stop.tol, relative), jnp.zeros_like(stop.atol), stop.maxiter)
        t_x = _linear_solve(
            lambda v: A(A_consts, v),
            lambda rhs: solve(A_consts, M_consts, rhs, None, t_stop)[0],
            t_rhs,
        )
        return (x, info), (t_x, jax.tree.map(_no_tangent, info))

    return solve(*values)


def _linear_solve(A, solve, rhs):
    """Solve with a function that is linear in ``rhs`` and has a transpose.

    Over the real numbers a Hermitian operator is symmetric and its own transpose, at every order of
    differentiation and for any mixture of leaves; over the complex ones it is neither.
    """

    def over_reals(function):
        return lambda parts: trees.real_parts(function(trees.from_real_parts(parts, rhs)))

    matvec, real_solve = over_reals(A), over_reals(solve)
    parts = jax.lax.custom_linear_solve(
        matvec,
        trees.real_parts(rhs),
        solve=lambda _, parts: real_solve(parts),
        transpose_solve=lambda _, parts: real_solve(parts),
        symmetric=True,
    )
    return trees.from_real_parts(parts, rhs)


def _is_zero(tangent):
    return isinstance(tangent, SymbolicZero)


def _instantiate(tangent):
    return jnp.zeros(tangent.shape, tangent.dtype) if _is_zero(tangent) else tangent


def _no_tangent(x):
    floating = jnp.issubdtype(x.dtype, jnp.floating)
    return jnp.zeros_like(x) if floating else np.zeros(x.shape, jax.dtypes.float0)


def _run(method, A, M, b, x0, stop, space):
    """Run cycles until the true residual or the method says why to end."""
    x, r = _start(A, b, x0)
    rhs_norm, residual_norm, threshold, fixed, maxiter = _agree_to_stop(b, r, stop, space)
    limit = jnp.where(fixed, Reason.FIXED_STEPS, Reason.MAXITER)
    running = jnp.where(maxiter > 0, Reason.RUNNING, limit)
    met = (residual_norm <= threshold) & ~fixed
    reason = jnp.where(met, Reason.CONVERGED, running)
    finite = jnp.isfinite(residual_norm) & jnp.isfinite(rhs_norm)
    start = _Cycle(
        x,
        r,
        residual_norm,
        iterations=jnp.zeros((), jnp.int32),
        reason=jnp.where(finite, reason, Reason.NONFINITE).astype(jnp.int32),
        breakdown=jnp.zeros_like(rhs_norm),
    )
    cycle = functools.partial(_cycle, method, A, M, b, threshold, fixed, maxiter, space)
    end = jax.lax.while_loop(lambda s: s.reason == Reason.RUNNING, cycle, start)
    return end.x, Info(
        converged=(end.residual_norm <= threshold) & (end.reason != Reason.NONFINITE),
        reason=end.reason,
        iterations=end.iterations,
        residual_norm=end.residual_norm,
        rhs_norm=rhs_norm,
        threshold=threshold,
        breakdown=end.breakdown,
    )


def _agree_to_stop(b, r, stop, space):
    """Return what the loop compares with, equal on all ranks, for one message.

    Tolerances and limits may be traced values that differ between ranks, if only in the last bit.
    The limit travels as two small numbers that every float holds exactly.
    """
    rhs_norm, residual_norm = space.norm(b), space.norm(r)
    threshold = jnp.maximum(stop.tol * rhs_norm, stop.atol)
    wants_less = (stop.tol != 0) | (stop.atol != 0)
    numbers = [rhs_norm, residual_norm, threshold, wants_less]
    numbers += [stop.maxiter >> 15, stop.maxiter & 0x7FFF]
    agreed = space.agree(jnp.stack([n.astype(rhs_norm.dtype) for n in numbers]))
    high, low = agreed[4].astype(jnp.int32), agreed[5].astype(jnp.int32)
    return agreed[0], agreed[1], agreed[2], agreed[3] == 0, (high << 15) + low


def _start(A, b, x0):
    """Return the first iterate and its residual. The solution of a zero system is zero."""
    if x0 is None:
        return trees.zeros_like(b), b
    zero_rhs = trees.max_abs(b) == 0
    x = trees.select(zero_rhs, trees.zeros_like(x0), x0)
    return x, trees.subtract(b, A(x))


def _cycle(method, A, M, b, threshold, fixed, maxiter, space, s):
    unit = trees.power_of_two(s.residual_norm, b)
    # A second cycle follows a gap between the method's residual and the true one: aim lower.
    margin = jnp.where(s.iterations == 0, 1.0, 0.5).astype(unit.dtype)
    eps = jnp.asarray(trees.epsilon(b), unit.dtype)
    target = jnp.maximum(margin * (threshold / unit), eps)
    aim = Aim(jnp.where(fixed, -1.0, target * target).astype(unit.dtype), eps * eps)

    def go_on(carry):
        state, iterations = carry
        return (state.event == Reason.RUNNING) & (iterations < maxiter)

    def step(carry):
        state, iterations = carry
        state = method.step(A, M, aim, space, state)
        return state, iterations + (state.event < Reason.INDEFINITE_OPERATOR).astype(jnp.int32)

    first = method.init(M, trees.scale(1 / unit, s.r), aim, space)
    state, iterations = jax.lax.while_loop(go_on, step, (first, s.iterations))
    x = trees.axpy(unit, state.x, s.x)
    r = trees.subtract(b, A(x))
    residual_norm, breakdown = space.agree(jnp.stack([space.norm(r), state.breakdown]))
    limit = jnp.where(fixed, Reason.FIXED_STEPS, Reason.MAXITER)
    reason = jnp.select(
        [
            (residual_norm <= threshold) & ~fixed,
            state.event > Reason.STAGNATED,
            ~jnp.isfinite(residual_norm),
            iterations >= maxiter,
            residual_norm > 0.5 * s.residual_norm,
        ],
        [Reason.CONVERGED, state.event, Reason.NONFINITE, limit, Reason.STAGNATED],
        Reason.RUNNING,
    ).astype(jnp.int32)
    broken = (reason == Reason.INDEFINITE_OPERATOR) | (reason == Reason.INDEFINITE_PRECONDITIONER)
    # Restarting from a residual that is all rounding can make it worse: keep the better.
    worse = (reason == Reason.STAGNATED) & (residual_norm > s.residual_norm)
    return _Cycle(
        trees.select(worse, s.x, x),
        r,
        jnp.where(worse, s.residual_norm, residual_norm),
        iterations,
        reason,
        jnp.where(broken, breakdown * unit * unit, jnp.zeros_like(breakdown)),
    )

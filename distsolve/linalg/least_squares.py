"""What a solver of least-squares problems needs around it: arguments, loop, stopping, derivative.

The counterpart of `distsolve.linalg.driver` for operators that are not square: the vectors that
they act on and the results live in two spaces. The loop runs the method until its own estimates
meet the rules, looks at the true residuals, and if these do not meet them lets the method go on
with a lower aim, as long as that helps.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from distsolve.linalg import arguments, derivative, driver, operators, trees
from distsolve.linalg.info import Reason
from distsolve.linalg.krylov import minres
from distsolve.linalg.loop import Counting, Limits, Seen, Stop, Watch, first_of, report


class Problem(NamedTuple):
    """Minimise ``||A x - b||^2 + damp^2 ||x - x0||^2``."""

    A: Any
    adjoint: Any
    damp: jax.Array
    rows: Any  # the space of b
    columns: Any  # the space of x

    @property
    def deciding(self):
        """The space in which ranks agree on what follows from the products of both."""
        return self.rows if self.rows.is_whole else self.columns

    def decide(self, x):
        """Return a value equal on all ranks, for one message or none."""
        return self.deciding.decide(x)

    def scaled(self, size):
        """Return the problem whose solution is ``size x``, for a power of two ``size``.

        Half of the factor before a product and half after it keeps the products in range.
        """
        before = 1 / trees.power_of_two(jnp.sqrt(size), size)
        after = 1 / (before * size)

        def times(function):
            return lambda v: trees.scale(after, function(trees.scale(before, v)))

        return self._replace(A=times(self.A), adjoint=times(self.adjoint), damp=self.damp / size)

    def taken(self):
        """Return the number of messages in both spaces since the last time; see `Counting`."""
        return self.rows.taken() + self.columns.taken()


class Aim(NamedTuple):
    """What is to be reached, for ``||b||`` about 1; negative: nothing."""

    residual: jax.Array  # of ||r||
    normal: jax.Array  # of ||A^H r||, relative to ||A|| ||r||


class Method(NamedTuple):
    """A solver: ``init(r, beta, gradient, normal, like)`` and ``step(problem, aim, state)``.

    ``init`` returns the state at the zero vector like ``like``, from the residual ``r``, its
    product with the adjoint, and the norms of both. A state has the fields ``x``, ``event``,
    ``norm`` (of A), ``condition`` and ``damped``, the norm that the method minimises:
    ``sqrt(||r||^2 + damp^2 ||x||^2)``.
    """

    name: str
    init: Any
    step: Any
    cost: dict[str, int]  # of a step


class _Look(NamedTuple):
    """The state, and what the last look at the true residuals has shown."""

    state: Any
    iterations: jax.Array
    steps: jax.Array  # with those that broke down, which are no iterations
    looks: jax.Array
    margin: jax.Array  # how far below the rules the method is to aim
    residual: jax.Array  # ||b - A x||
    normal: jax.Array  # ||A^H r||, with the damping
    condition: jax.Array
    reason: jax.Array
    seen: Seen


class _Scales(NamedTuple):
    """Powers of two by which a problem of about 1 is made of the user's."""

    unit: jax.Array  # of the residual
    size: jax.Array  # of A, or of the damping if that is larger

    @property
    def back(self):
        """What takes the unknowns of the scaled problem to the user's."""
        return self.unit / self.size


class _Operators:
    """The programs of a solve; equal ones compute the same, so that `jax.jit` knows them."""

    def __init__(self, method, rows, columns, A, adjoint, traced):
        self.method, self.rows, self.columns = method, rows, columns
        self.A, self.adjoint = A, adjoint
        try:
            given = adjoint and adjoint.key(traced)
            self.key: Any = method.name, rows, columns, A.key(traced), given
        except operators.Incomparable:
            self.key = object()

    def __eq__(self, other):
        return isinstance(other, _Operators) and self.key == other.key

    def __hash__(self):
        return hash(self.key)

    def problem(self, A_consts, adjoint_consts, damp, like):
        """Return the problem on these data; without data for the adjoint it is the transpose."""
        A = functools.partial(self.A, A_consts)
        if self.adjoint is None or adjoint_consts is None:
            adjoint = transpose(A, like)
        else:
            adjoint = functools.partial(self.adjoint, adjoint_consts)
        # Not the spaces that `_run` counts with: this sum is a part of the product.
        if self.columns.is_whole and not self.rows.is_whole:
            # Each rank's rows give a share of A^H u.
            return Problem(A, lambda u: self.rows.sum(adjoint(u)), damp, self.rows, self.columns)
        return Problem(A, adjoint, damp, self.rows, self.columns)


def transpose(A, like):
    """Return the adjoint over ``Re <x, y>`` of a function of vectors like ``like``."""

    def parts_of_product(parts):
        return trees.real_parts(A(trees.from_real_parts(parts, like)))

    def adjoint(u):
        transposed = jax.linear_transpose(parts_of_product, trees.real_parts(like))
        return trees.from_real_parts(transposed(trees.real_parts(u))[0], like)

    return adjoint


def drive(
    method,
    A,
    b,
    x0,
    *,
    adjoint,
    damp,
    tol,
    atol,
    maxiter,
    rows,
    columns,
    args,
    history,
    progress,
    callback,
):
    """Check the arguments, solve, and return ``(x, info)``."""
    wanted = Watch(
        arguments.history(history),
        arguments.flag(progress, "progress"),
        arguments.callback(callback),
    )
    b, args = arguments.as_vector(b), arguments.data(args)
    # Constants of the user's program stay values, for the reason that `driver.drive` tells.
    x0 = None if x0 is None else jax.lax.optimization_barrier(arguments.as_vector(x0, "x0"))
    if operators.is_matrix(A):
        A, adjoint, like = _matrix(A, b, adjoint, columns)
    else:
        A, like = operators.as_function(A, "A", b, rows, args), _unknowns(x0, adjoint, b)
    start = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)
    if x0 is not None:
        arguments.require_same(x0, like, "`x0`", "Here `b` stands for a vector that `A` acts on.")
        start = x0
    program, consts, out = operators.trace(A, start)
    arguments.require_same(out, b, "`A(x)`", "`A` must map a vector like `x0` to one like `b`.")
    adjoint_program, adjoint_consts = None, []
    if adjoint is not None:
        adjoint_program, adjoint_consts, out = operators.trace(adjoint, b)
        remedy = "`adjoint` must map a vector like `b` to one like `x0`, which `b` stands for here."
        arguments.require_same(out, like, "`adjoint(b)`", remedy)
    dtype = trees.scalar_dtype(b)
    stop = Stop(
        arguments.tolerance(tol, "tol", dtype),
        arguments.tolerance(atol, "atol", dtype),
        arguments.step_limit(maxiter),
        rows.rank_zero(),
    )
    values = consts, adjoint_consts, b, start, arguments.tolerance(damp, "damp", dtype), stop
    traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(values))
    programs = _Operators(method, rows, columns, program, adjoint_program, traced)
    return _solve(programs, wanted, x0 is not None, *values)


def _matrix(A, b, adjoint, columns):
    """Return a matrix as a function, its adjoint, and what it acts on."""
    A = arguments.array(A, "A")
    leaf = b if isinstance(b, jax.Array) else None
    if leaf is None or leaf.ndim != 1 or A.ndim != 2 or A.shape[0] != leaf.shape[0]:
        found = "a pytree" if leaf is None else f"one array of shape {leaf.shape}"
        raise ValueError(
            "`A`: expected a function, or for one array `b` of shape (m,) a matrix of shape (m, n)"
            f": got an array of shape {A.shape}, and `b` is {found}. Pass this rank's rows, or a "
            "function of one vector."
        )
    arguments.require_dtype_of_b(A, leaf)
    if not columns.is_whole or adjoint is not None:
        raise ValueError(
            "`A` is a matrix, which knows its adjoint and acts on vectors that every rank holds: "
            f"got columns_space={columns!r} and adjoint={adjoint!r}. Leave both out, or pass a "
            "function."
        )
    multiply = functools.partial(jnp.matmul, precision=trees.HIGHEST)
    # The rows are read as they lie: a product with the transposed matrix is slow on CPUs.
    like = jax.ShapeDtypeStruct(A.shape[1:], A.dtype)
    return (lambda p: multiply(A, p)), (lambda u: multiply(u.conj(), A).conj()), like


def _unknowns(x0, adjoint, b):
    if x0 is not None:
        return x0
    if adjoint is None:
        raise ValueError(
            "`x0` and `adjoint` are both missing: a function `A` does not say what it acts on. "
            "Pass x0=jnp.zeros(n), or the adjoint."
        )
    return jax.eval_shape(adjoint, b)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _solve(programs, wanted, started, A_consts, adjoint_consts, b, x0, damp, stop):
    """Solve, differentiably in the consts of ``A``, in ``b``, and with damping in ``x0``."""

    @jax.custom_jvp
    def solution(A_consts, adjoint_consts, b, x0, damp, stop):
        problem = programs.problem(A_consts, adjoint_consts, damp, x0)
        return _run(programs.method, problem, b, x0, stop, started, wanted)

    @solution.defjvp
    def _(primals, tangents):
        A_consts, adjoint_consts, b, x0, damp, stop = primals
        t_A_consts, _, t_b, t_x0, t_damp, _ = tangents
        x, info, size = solution(*primals)

        # N x = A^H b + damp^2 x0, where N = A^H A + damp^2  =>  N x' = the derivative of
        # A^H (b - A x) - damp^2 (x - x0) at fixed x, which is zero at the solution. In units of
        # `size` neither N nor its square root leaves the range of the floats.
        def normal_residual(A_consts, b, x0, damp):
            problem = programs.problem(A_consts, None, damp, like=x)
            r = trees.scale(1 / size, trees.subtract(b, problem.A(x)))
            pull = damp / size * damp
            return trees.axpy(-pull, trees.subtract(x, x0), problem.adjoint(r))

        moved = (A_consts, b, x0, damp), (t_A_consts, t_b, t_x0, t_damp)
        _, rhs = jax.jvp(normal_residual, *moved)
        scaled = programs.problem(A_consts, adjoint_consts, damp, x0).scaled(size)
        tol = stop.relative(info).tol

        def N(v):
            return trees.axpy(scaled.damp * scaled.damp, v, scaled.adjoint(scaled.A(v)))

        def solve(rhs):
            options = {"tol": tol, "atol": 0.0, "maxiter": None, "M": None}
            # N may be singular, and rhs not in its range: minres leaves out what cannot be met.
            return driver.drive(minres.METHOD, N, rhs, None, space=programs.columns, **options)[0]

        t_x = trees.scale(1 / size, derivative.linear_solve(N, solve, solve, rhs, symmetric=True))
        unmoved = jax.tree.map(derivative.no_tangent, (info, size))
        return (x, info, size), (t_x, *unmoved)

    x, info, _ = solution(A_consts, adjoint_consts, b, x0, damp, stop)
    return x, info


def _run(method, problem, b, x0, stop, started, wanted):
    """Run the method until the true residuals or the method say why to end."""
    b = jax.lax.optimization_barrier(b)  # the first product with the adjoint is of b
    r = trees.subtract(b, problem.A(x0)) if started else b
    rows, columns = Counting(problem.rows), Counting(problem.columns)
    problem = problem._replace(rows=rows, columns=columns)
    damp = problem.damp.astype(trees.scalar_dtype(b))
    packed = jnp.append(stop.pack(damp.dtype), damp)
    (rhs_norm, residual_norm), packed, _ = rows.open((b, r), packed, stop.here)
    problem = problem._replace(damp=packed[-1])
    # The size that `open` tells is that of b; x is another one.
    size = columns.size(x0) if stop.maxiter is None else None
    # Next to a zero right-hand side nothing is small: with damping the start is the measure.
    measure = jnp.where(rhs_norm == 0, residual_norm, rhs_norm)
    limits = Limits.agreed(packed[:-1], measure, size, stop)
    if started:  # without damping the solution of a zero system is zero
        zero_rhs = (rhs_norm == 0) & (problem.damp == 0)
        x0, r = trees.select(zero_rhs, (trees.zeros_like(x0), b), (x0, r))
        residual_norm = jnp.where(zero_rhs, 0, residual_norm)
    scales, state = _scale(method, problem, r, residual_norm, x0)
    opening = problem.taken()
    zero = jnp.zeros((), jnp.int32)
    first = _Look(
        state,
        iterations=zero,
        steps=zero,
        looks=zero,
        margin=jnp.ones_like(rhs_norm),
        residual=residual_norm,
        normal=jnp.full_like(rhs_norm, jnp.inf),
        condition=jnp.ones_like(rhs_norm),
        reason=limits.at_start(rhs_norm, residual_norm),
        seen=Seen.nothing(wanted, residual_norm),
    )
    cost: dict[str, int] = {}
    look = functools.partial(_look, method, problem, b, x0, scales, limits, wanted, cost)
    end = jax.lax.while_loop(lambda s: s.reason == Reason.RUNNING, look, first)
    # An x that its dtype cannot hold is no better than the start.
    lost = ~jnp.isfinite(end.residual)
    x = trees.select(lost, x0, trees.axpy(scales.back, end.state.x, x0))
    info = report(
        method.name,
        wanted,
        problem.deciding,
        limits,
        end.seen,
        converged=end.reason == Reason.CONVERGED,
        reason=end.reason,
        iterations=end.iterations,
        residual_norm=jnp.where(lost, residual_norm, end.residual),
        rhs_norm=rhs_norm,
        breakdown=jnp.zeros_like(rhs_norm),
        condition_estimate=end.condition,
        reductions=opening + cost["step"] * end.steps + cost["look"] * end.looks,
    )
    return x, info, scales.size


def _scale(method, problem, r, residual_norm, x0):
    """Return the `_Scales` of a problem, equal on all ranks, and the method's first state."""
    unit = trees.power_of_two(residual_norm, r)
    r = trees.scale(1 / unit, r)
    gradient = problem.adjoint(r)
    normal = problem.decide(problem.columns.norm(gradient))
    larger = jnp.hypot(normal, problem.damp)
    size = trees.power_of_two(larger, larger)
    norms = residual_norm / unit, normal / size
    state = method.init(r, norms[0], trees.scale(1 / size, gradient), norms[1], x0)
    return _Scales(unit, size), state


def _look(method, problem, b, x0, scales, limits, wanted, cost, before):
    """Let the method run until it thinks that it is done, and look at the true residuals."""
    unit, scaled = scales.unit, problem.scaled(scales.size)
    eps = jnp.asarray(trees.epsilon(b), unit.dtype)
    goals = before.margin * limits.threshold / unit, before.margin * limits.tol
    aim = Aim(*(jnp.where(limits.fixed, -1, jnp.maximum(goal, eps)) for goal in goals))

    def runs(carry):
        state, iterations, *_ = carry
        return (state.event == Reason.RUNNING) & (iterations < limits.maxiter)

    def step(carry):
        state, iterations, steps, seen = carry
        problem.taken()
        state = method.step(scaled, aim, state)
        iterations += (state.event < Reason.INDEFINITE_OPERATOR).astype(jnp.int32)
        if any(wanted):
            norm = unit * _undamped(scaled, state)
            seen = seen.after(method.name, wanted, limits, iterations, norm)
        cost["step"] = problem.taken()
        return state, iterations, steps + 1, seen

    start = before.state._replace(event=jnp.full((), Reason.RUNNING, jnp.int32))
    carry = start, before.iterations, before.steps, before.seen
    state, iterations, steps, seen = jax.lax.while_loop(runs, step, carry)

    x = trees.axpy(scales.back, state.x, x0)
    r = trees.scale(1 / unit, trees.subtract(b, problem.A(x)))
    gradient = trees.axpy(-scaled.damp * scaled.damp, state.x, scaled.adjoint(r))
    norms = problem.rows.norm(r), problem.columns.norm(gradient), problem.columns.norm(state.x)
    numbers = jnp.stack([*norms, state.norm, state.condition])
    residual, normal, moved, norm, condition = problem.decide(numbers)
    cost["look"] = problem.taken()

    damped, residual = jnp.hypot(residual, scaled.damp * moved), unit * residual
    optimal = (normal <= limits.tol * norm * damped) & jnp.isfinite(normal)  # NaN travels as inf
    met = (residual <= limits.threshold) | optimal
    helps = (residual < 0.9 * before.residual) | (normal < 0.9 * before.normal)
    reason = first_of(
        (met & ~limits.fixed, Reason.CONVERGED),
        (state.event > Reason.STAGNATED, state.event),
        (~jnp.isfinite(residual + normal), Reason.NONFINITE),
        (iterations >= limits.maxiter, limits.at_limit()),
        ((state.event == Reason.STAGNATED) | ~helps, Reason.STAGNATED),
    )
    margin, looks = before.margin / 2, before.looks + 1
    return _Look(state, iterations, steps, looks, margin, residual, normal, condition, reason, seen)


def _undamped(problem, state):
    """Return ``||r||`` from the norm that the method minimises."""
    damping = problem.damp * problem.columns.norm(state.x)
    share = jnp.minimum(trees.safe_ratio(damping, state.damped), 1)
    return state.damped * jnp.sqrt((1 - share) * (1 + share))

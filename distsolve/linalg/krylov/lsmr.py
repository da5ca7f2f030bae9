"""Least squares, of any shape and rank, by minimal residuals of the normal equations.

Reference: Fong and Saunders (2011), doi:10.1137/10079687X, with the stopping rules of its section
on convergence. Ours: the true residuals decide in the end, quotients are ordered such that no
square of the size of ``A`` appears, and vectors live in two spaces, which is why the loop is here.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from distsolve.linalg import arguments, least_squares, trees
from distsolve.linalg.info import Info, Reason
from distsolve.linalg.least_squares import Aim, Problem
from distsolve.linalg.loop import ROUNDING, agree_to_move, first_of
from distsolve.linalg.space import Replicated, Sharded, Space

# A step: as in `cg`, and a product with the adjoint. The two reductions are a norm in each space.
COST = {"matvec": 1, "adjoint": 1, "reductions": 2, "agreements": 1, "vectors": 5}


class State(NamedTuple):
    """All that LSMR carries from one iteration to the next. Names are those of the paper."""

    x: Any
    u: Any  # (rows) A v_k = alpha u_k + beta u_(k+1)
    v: Any
    h: Any
    h_bar: Any
    alpha: jax.Array
    alpha_bar: jax.Array
    rho: jax.Array
    rho_bar: jax.Array
    c_bar: jax.Array
    s_bar: jax.Array
    zeta: jax.Array
    zeta_bar: jax.Array  # its size is || A^H r ||
    estimate: "Estimate"
    norm: jax.Array  # of A
    pivots: tuple[jax.Array, jax.Array]  # the extreme ones
    event: jax.Array

    @property
    def damped(self) -> jax.Array:
        """The norm of the residual, with what the damping adds."""
        return self.estimate.norm

    @property
    def condition(self) -> jax.Array:
        """An estimate of the condition of A; 1 before the first step."""
        least, most = self.pivots
        return jnp.where(most > 0, trees.safe_ratio(most, least), 1)


class Estimate(NamedTuple):
    """The norm of the residual, from rotations of the scalars alone."""

    norm: jax.Array
    beta: jax.Array  # beta double dot
    beta_dot: jax.Array
    rho_dot: jax.Array
    tau: jax.Array
    theta: jax.Array
    damped: jax.Array  # what the damping adds


def init(r: Any, beta: jax.Array, gradient: Any, normal: jax.Array, like: Any) -> State:
    """Return the state at the zero vector like ``like``, for ``gradient = A^H r`` and the norms."""
    alpha, v = trees.safe_ratio(normal, beta), trees.scale(_inverse(normal), gradient)
    zero, one, nothing = jnp.zeros_like(beta), jnp.ones_like(beta), trees.zeros_like(like)
    return State(
        x=nothing,
        u=trees.scale(_inverse(beta), r),
        v=v,
        h=v,
        h_bar=nothing,
        alpha=alpha,
        alpha_bar=alpha,
        rho=one,
        rho_bar=one,
        c_bar=one,
        s_bar=zero,
        zeta=zero,
        zeta_bar=normal,
        estimate=Estimate(beta, beta, zero, one, zero, zero, zero),
        norm=alpha,
        pivots=(jnp.full_like(beta, jnp.inf), zero),
        event=jnp.full((), Reason.RUNNING, jnp.int32),
    )


def step(problem: Problem, aim: Aim, s: State) -> State:
    """Extend the bidiagonalisation by one row and one column, and move."""
    u = trees.axpy(-s.alpha, s.u, problem.A(s.v))
    beta = problem.rows.norm(u)
    u = trees.scale(_inverse(beta), u)
    v = trees.axpy(-beta, s.v, problem.adjoint(u))
    alpha = problem.columns.norm(v)

    # Three rotations: of the damping, of beta, and of what the second leaves above the diagonal.
    c_hat, s_hat, alpha_hat = _rotation(s.alpha_bar, problem.damp)
    cosine, sine, rho = _rotation(alpha_hat, beta)
    theta, alpha_bar = sine * alpha, cosine * alpha
    theta_bar = s.s_bar * rho
    c_bar, s_bar, rho_bar = _rotation(s.c_bar * rho, theta)
    zeta, zeta_bar = c_bar * s.zeta_bar, -s_bar * s.zeta_bar
    estimate = _residual(s, (c_hat, s_hat), (cosine, sine), theta_bar, rho_bar, zeta)
    norm = jnp.hypot(jnp.hypot(s.norm, alpha), jnp.hypot(beta, problem.damp))

    eps = jnp.finfo(norm.dtype).eps
    dependent = rho_bar <= ROUNDING * eps * norm
    event = judge(estimate.norm, jnp.abs(zeta_bar), norm, dependent, aim)
    # Beyond this a step only adds rounding: nothing moves, now and ever after, and on no rank.
    useful = ~dependent & (jnp.abs(s.zeta_bar) > eps * s.norm * s.estimate.norm)
    event, useful = agree_to_move(problem, event, useful)
    useful &= event < Reason.INDEFINITE_PRECONDITIONER

    back = trees.safe_ratio(theta_bar, s.rho_bar) * trees.safe_ratio(rho, s.rho)
    h_bar = trees.axpy(jnp.where(useful, -back, 0), s.h_bar, s.h)
    move = trees.safe_ratio(jnp.where(useful, zeta, 0), rho_bar)
    x = trees.axpy(move * _inverse(rho), h_bar, s.x)
    v = trees.scale(jnp.where(useful, _inverse(alpha), 0), v)
    h = trees.axpy(jnp.where(useful, -theta * _inverse(rho), 0), s.h, v)
    alpha, alpha_bar, zeta_bar = (jnp.where(useful, a, 0) for a in (alpha, alpha_bar, zeta_bar))
    pivots = jnp.minimum(s.pivots[0], rho_bar), jnp.maximum(s.pivots[1], rho_bar)
    keep = functools.partial(jax.tree.map, functools.partial(jnp.where, useful))
    return State(
        x=x,
        u=u,
        v=v,
        h=h,
        h_bar=h_bar,
        alpha=alpha,
        alpha_bar=alpha_bar,
        rho=rho,
        rho_bar=rho_bar,
        c_bar=c_bar,
        s_bar=s_bar,
        zeta=zeta,
        zeta_bar=zeta_bar,
        estimate=keep(estimate, s.estimate),
        norm=norm,
        pivots=keep(pivots, s.pivots),
        event=event,
    )


def judge(residual: Any, normal: Any, norm: Any, dependent: Any, aim: Aim) -> jax.Array:
    """Return what a step has come to: the rules of the paper, in the order of the codes."""
    return first_of(
        (~jnp.isfinite(residual + normal + norm), Reason.NONFINITE),
        (residual <= aim.residual, Reason.CONVERGED),
        ((normal <= aim.normal * norm * residual) & (aim.normal >= 0), Reason.CONVERGED),
        (dependent & (aim.normal >= 0), Reason.STAGNATED),
    )


def _residual(
    s: State, damping: Any, rotation: Any, theta_bar: jax.Array, rho_bar: jax.Array, zeta: jax.Array
) -> Estimate:
    """Return the next `Estimate`: section 5.1 of the paper."""
    e = s.estimate
    (c_hat, s_hat), (cosine, sine) = damping, rotation
    acute, check = c_hat * e.beta, -s_hat * e.beta
    beta_hat, beta = cosine * acute, -sine * acute
    c_tilde, s_tilde, rho_tilde = _rotation(e.rho_dot, theta_bar)
    theta, rho_dot = s_tilde * rho_bar, c_tilde * rho_bar
    beta_dot = -s_tilde * e.beta_dot + c_tilde * beta_hat
    tau = _quotient(s.zeta - e.theta * e.tau, rho_tilde)
    tau_dot = _quotient(zeta - theta * tau, rho_dot)
    damped = jnp.hypot(e.damped, check)
    norm = jnp.hypot(damped, jnp.hypot(beta_dot - tau_dot, beta))
    return Estimate(norm, beta, beta_dot, rho_dot, tau, theta, damped)


def _rotation(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return cosine, sine and length of the rotation that takes (a, b) to (length, 0)."""
    length = jnp.hypot(a, b)
    return jnp.where(length > 0, _quotient(a, length), 1), _quotient(b, length), length


def _quotient(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return ``a / b``, and 0 where b is 0."""
    return jnp.where(b == 0, 0, a / jnp.where(b == 0, 1, b))


def _inverse(a: jax.Array) -> jax.Array:
    return trees.safe_ratio(jnp.ones_like(a), a)


METHOD = least_squares.Method("lsmr", init, step, COST)


def lsmr(
    A: Any,
    b: Any,
    x0: Any = None,
    *,
    adjoint: Any = None,
    damp: ArrayLike = 0.0,
    tol: ArrayLike = 1e-5,
    atol: ArrayLike = 0.0,
    maxiter: ArrayLike | None = None,
    space: Space | None = None,
    columns_space: Space | None = None,
    args: tuple[Any, ...] = (),
    history: int = 0,
    progress: bool = False,
    callback: Callable[[int, float], Any] | None = None,
) -> tuple[Any, Info]:
    """Solve a least-squares problem of any shape and rank by LSMR.

    The equation is ``A^H (A x - b) + damp^2 (x - x0) = 0``: x minimises
    ``||A x - b||^2 + damp^2 ||x - x0||^2``, over ``Re <x, y>``. Of all solutions it is the one
    nearest to ``x0``; but for ``b = 0`` without damping it is 0.

    Parameters
    ----------
    A : callable, (m, n) array, or object that supports ``@``
        The operator, from vectors in ``columns_space`` to vectors in ``space``. A matrix, and a
        function of whole vectors with results in pieces, are this rank's rows alone: the shares
        that the ranks have of ``A^H u`` are summed here, so such a function needs no ``pvary``.
    b : pytree, in ``space``
        The right-hand side.
    x0 : pytree, in ``columns_space``, optional
        Where to start; zero by default. A function ``A`` without ``adjoint`` needs it to know what
        to act on.
    adjoint : callable, optional
        ``u -> A^H u``, from this rank's rows where ``A`` has these. By default JAX transposes
        ``A``.
    damp : float
        Weight of ``||x - x0||``.
    tol, atol : float
        Stop, as converged, at ``||b - A x|| <= max(tol ||b||, atol)``, or where the equation above
        holds to ``tol ||A|| ||b - A x||``; for ``b = 0`` with damping ``||A x0||`` stands for
        ``||b||``. With both 0, exactly ``maxiter`` steps are taken.
    maxiter : int, optional
        The most steps; ten times the global number of unknowns by default.
    space : Space
        Where ``b`` lives: `Sharded` by default, as each rank has its own rows.
    columns_space : Space
        Where ``x`` lives: `Replicated` by default.
    args : tuple of pytrees of arrays
        Data handed to ``A`` behind the vector.
    history, progress, callback
        As for all solvers: see the head of `distsolve.linalg.driver`. The norm that they get is
        ``||b - A x||``, without the damping, from the recurrence of the method; that of
        ``info.residual_norm`` is computed from x.

    Returns
    -------
    x : pytree, in ``columns_space``
    info : Info
        Why the solve ended, equal on all ranks. A problem without an exact solution converges with
        a ``residual_norm`` above the ``threshold``.

    Raises
    ------
    TypeError, ValueError
        While tracing, before any message is sent, for arguments that cannot work.

    Notes
    -----
    Derivatives with respect to ``b``, ``args``, ``damp`` and all that ``A`` closes over cost one
    solve of the normal equations by `minres` each, forward and reverse. Those with respect to
    ``A`` are right where it has full column rank, or damping.

    Communication
    -------------
    One product with ``A``, one with its adjoint and one reduction in each space in each step. With
    the default spaces: one small reduction, one of the size of ``x`` and one tiny message in which
    the ranks agree. With columns in pieces, `history`, `progress` and `callback` take one more
    reduction in each step.

    References
    ----------
    Fong and Saunders (2011), doi:10.1137/10079687X.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from distsolve.linalg import lsmr
    >>> x, info = lsmr(jnp.array([[1.0], [1.0]]), jnp.array([1.0, 3.0]))
    >>> info.reason_name, round(float(x[0]), 4)
    ('converged', 2.0)
    """
    return least_squares.drive(
        METHOD,
        A,
        b,
        x0,
        adjoint=adjoint,
        damp=damp,
        tol=tol,
        atol=atol,
        maxiter=maxiter,
        rows=arguments.space(space, Sharded),
        columns=arguments.space(columns_space, Replicated, "columns_space"),
        args=args,
        history=history,
        progress=progress,
        callback=callback,
    )

"""Minimal residuals for Hermitian operators that may be indefinite or singular.

Reference: Paige and Saunders (1975), doi:10.1137/0712047. Ours: the preconditioner is brought to
size 1 by a power of two, and the unpreconditioned residual, which decides, is followed through its
own recurrence (r_k = s^2 r_{k-1} - phi c v_{k+1}) at the price of no message.

Where a singular system has no solution, the recurrence ends at rounding that grows into the null
space: its residual falls on, while that of x, of at least eps ||A|| ||x||, does not. So the solve
ends where the second is the larger, with the x for which their sum was least.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from distsolve.linalg import arguments, driver, ritz, trees
from distsolve.linalg.info import Info, Reason
from distsolve.linalg.krylov.cg_classic import decide
from distsolve.linalg.loop import ROUNDING, agree_to_move, first_of
from distsolve.linalg.space import Space

# As in `cg`. With a preconditioner two vectors more are held: its products, and the residual.
COST = {"matvec": 1, "reductions": 2, "agreements": 1, "vectors": 6}


class State(NamedTuple):
    """All that MINRES carries from one iteration to the next."""

    x: Any
    kept: Any  # the x of the least error
    error: jax.Array  # of that: the residual that it can be said to have
    r: Any  # the residual; None without a preconditioner, where its norm is known from `phi`
    v_old: Any  # Lanczos vectors, orthonormal over M
    v: Any
    z: Any  # M v
    w_old: Any  # directions of the solution
    w: Any
    beta: jax.Array  # couples v_old and v
    rotation: tuple[jax.Array, jax.Array]  # cosine and sine that remove beta
    delta: jax.Array  # what the rotations left of the next column, above its diagonal
    epsilon: jax.Array
    phi: jax.Array  # norm of the residual over M
    largest: jax.Array  # largest column of the tridiagonal matrix: the size of A
    unit: jax.Array  # a power of two near the size of M
    rr: jax.Array  # <r, r>
    event: jax.Array
    breakdown: jax.Array
    ritz: ritz.Ritz


def init(A: Any, M: Any, r: Any, aim: driver.Aim, space: Space) -> State:
    """Return the state at the zero vector, whose residual is ``r``."""
    z = r if M is None else M(r)
    rz, rr = space.dot((r, z), (r, r))
    event = jnp.full((), Reason.RUNNING, jnp.int32)
    unit = jnp.ones_like(rr)
    if M is not None:
        indefinite = (rz <= 0) & (rr > aim.floor)
        # The products travel, too: units that differ by a factor of two would not add up in A.
        event = judge(jnp.isfinite(rz + rr), indefinite, rr, False, aim)
        event, rz, rr = decide(space, event, rz, rr)
        unit = trees.power_of_two(trees.safe_ratio(rz, rr), r)
    phi = jnp.sqrt(jnp.maximum(rz / unit, 0))
    zero, one, nothing = jnp.zeros_like(rr), jnp.ones_like(rr), trees.zeros_like(r)
    inverse = trees.safe_ratio(one, phi)
    v = trees.scale(inverse, r)
    return State(
        x=nothing,
        kept=nothing,
        error=jnp.full_like(rr, jnp.inf),
        r=None if M is None else r,
        v_old=nothing,
        v=v,
        z=v if M is None else trees.scale(inverse / unit, z),
        w_old=nothing,
        w=nothing,
        beta=zero,
        rotation=(-one, zero),
        delta=zero,
        epsilon=zero,
        phi=phi,
        largest=aim.size,
        unit=unit,
        rr=rr,
        event=event,
        breakdown=rz,
        ritz=ritz.start(rr.dtype),
    )


def step(A: Any, M: Any, aim: driver.Aim, space: Space, state: State) -> State:
    """Take one step, unless that would move nothing for the better."""
    s = state
    y = trees.axpy(-s.beta, s.v_old, trees.scale(s.unit, A(s.z)))
    # Times the size of A, x is about as large as r, whatever the scale of A.
    Ax = trees.scale(s.largest / s.unit, s.x)
    alpha, xx = space.dot((s.z, y), (Ax, Ax))
    y = trees.axpy(-alpha, s.v, y)
    y, My, beta, size, yMy, products = _extend(M, space, s, y, alpha)

    # The last rotation acts on the new column (beta_old, alpha, beta), then a new one removes beta.
    cosine, sine = s.rotation
    delta, gamma_bar = cosine * s.delta + sine * alpha, sine * s.delta - cosine * alpha
    gamma, delta_new = jnp.hypot(gamma_bar, beta), -cosine * beta
    largest = jnp.maximum(s.largest, jnp.hypot(jnp.hypot(s.beta, alpha), beta))

    # || A r || / || A || || r || is no more than rounding: r is all that A cannot reach. A step
    # would divide by gamma, which is next to nothing, and never again can a step be of use.
    eps = trees.epsilon(s.x)
    least, rounding = ROUNDING * eps * largest, eps * jnp.sqrt(xx)
    unreachable = (jnp.minimum(jnp.hypot(gamma_bar, delta_new), gamma) <= least) | (s.phi == 0)
    unreachable |= rounding > s.phi
    error = s.phi + rounding
    useful = ~unreachable & (s.rr > aim.floor)
    inverse = trees.safe_ratio(jnp.ones_like(gamma), gamma)
    cosine_new, sine_new = gamma_bar * inverse, beta * inverse
    phi = sine_new * s.phi
    rr = jnp.where(useful, _residual(products, beta / size, cosine_new, sine_new, phi), s.rr)

    finite = jnp.isfinite(alpha) & jnp.isfinite(beta) & jnp.isfinite(rr) & jnp.isfinite(gamma)
    indefinite = yMy < -jnp.square(least / size)
    event = judge(finite, indefinite, rr, unreachable, aim)

    # Agree before x moves: a step that fails or is of no use on one rank must move nothing on any.
    event, useful, better = agree_to_move(space, event, useful, error <= s.error)
    kept = trees.select(better, s.x, s.kept)
    phi, rr = jnp.where(useful, phi, 0), jnp.where(useful, rr, s.rr)
    good = event < Reason.INDEFINITE_PRECONDITIONER
    inverse = jnp.where(good, inverse, 0)
    w = trees.axpy(-jnp.where(good, s.epsilon * inverse, 0), s.w_old, trees.scale(inverse, s.z))
    w = trees.axpy(-jnp.where(good, delta * inverse, 0), s.w, w)
    x = trees.axpy(jnp.where(good & useful, s.unit * cosine_new * s.phi, 0), w, s.x)
    x = trees.select(useful, x, kept)
    shrink = trees.safe_ratio(size, beta)
    r = s.r
    if M is not None:
        r = trees.axpy(-phi * cosine_new * shrink, y, trees.scale(sine_new * sine_new, r))
        r = trees.select(useful, r, s.r)
    return State(
        x=x,
        kept=kept,
        error=jnp.where(better, error, s.error),
        r=r,
        v_old=s.v,
        v=trees.scale(shrink, y),
        z=trees.scale(shrink, My),
        w_old=s.w,
        w=w,
        beta=beta,
        rotation=(cosine_new, sine_new),
        delta=delta_new,
        epsilon=sine * beta,
        phi=phi,
        largest=largest,
        unit=s.unit,
        rr=rr,
        event=event,
        breakdown=yMy * size * size * s.unit,
        ritz=ritz.widen(s.ritz, jnp.where(good & useful, gamma, 0)),
    )


def _extend(
    M: Any, space: Space, s: State, y: Any, alpha: jax.Array
) -> tuple[Any, Any, jax.Array, jax.Array, jax.Array, tuple[jax.Array, ...] | None]:
    """Return ``y`` and ``M y`` divided by a size, the norm of ``y`` over M, and that size.

    Also ``<y, M y>`` and products with the residual, all of the divided ``y``. One message. Without
    a preconditioner the norm is safe at any scale of ``A``; with one, the size makes it so.
    """
    if M is None:
        beta = space.norm(y)
        return y, y, beta, jnp.ones_like(beta), jnp.zeros_like(beta), None
    size = trees.power_of_two(jnp.maximum(s.largest, jnp.hypot(s.beta, alpha)), y)
    y = trees.scale(1 / size, y)
    My = trees.scale(1 / s.unit, M(y))
    yMy, yy, ry, rr = space.dot((y, My), (y, y), (s.r, y), (s.r, s.r))
    return y, My, size * jnp.sqrt(jnp.maximum(yMy, 0)), size, yMy, (yy, ry, rr)


def _residual(
    products: tuple[jax.Array, ...] | None,
    beta: jax.Array,
    cosine: jax.Array,
    sine: jax.Array,
    phi: jax.Array,
) -> jax.Array:
    """Return ``<r, r>`` after a step, from products of the old residual and the new vector."""
    if products is None:
        return phi * phi
    yy, ry, rr = products
    # r_k = sine^2 r_{k-1} - along y
    along = trees.safe_ratio(phi * cosine, beta)
    shrink = sine * sine
    return jnp.maximum(shrink * shrink * rr - 2 * shrink * along * ry + along * along * yy, 0)


def judge(
    finite: Any, indefinite: Any, rr: jax.Array, unreachable: Any, aim: driver.Aim
) -> jax.Array:
    """Return what a step has come to: the worst that applies, unless it got there."""
    fixed = aim.target < 0
    return first_of(
        (~finite, Reason.NONFINITE),
        (indefinite, Reason.INDEFINITE_PRECONDITIONER),
        (rr <= aim.target, Reason.CONVERGED),
        (unreachable & ~fixed, Reason.STAGNATED),
    )


METHOD = driver.Method("minres", init, step, COST, minimises=True)


def minres(
    A: Any,
    b: Any,
    x0: Any = None,
    *,
    tol: ArrayLike = 1e-5,
    atol: ArrayLike = 0.0,
    maxiter: ArrayLike | None = None,
    M: Any = None,
    space: Space | None = None,
    args: tuple[Any, ...] = (),
    history: int = 0,
    progress: bool = False,
    callback: Callable[[int, float], Any] | None = None,
) -> tuple[Any, Info]:
    """Solve ``A x = b`` for a Hermitian ``A``, which may be indefinite or singular.

    The equation is ``A x = b`` over all leaves of ``b`` together, with the inner product
    ``Re <x, y>``; of all vectors in the Krylov space, x has the smallest residual. If ``A`` is
    singular and the system has no solution, x minimises ``||b - A x||`` as far as rounding lets it,
    and the solve ends as "stagnated".

    Parameters
    ----------
    A, b, x0, tol, atol, maxiter, M, space, args, history, progress, callback
        As for all solvers: see the head of `distsolve.linalg.driver`. ``b``: pytree, in ``space``.
        ``M`` must be positive definite, although ``A`` need not be.

    Returns
    -------
    x : pytree like ``b``, in ``space``
    info : Info
        Why the solve ended, equal on all ranks; ``info.raise_if_failed()`` outside jit.

    Raises
    ------
    TypeError, ValueError
        While tracing, before any message is sent, for arguments that cannot work.

    Communication
    -------------
    One product with ``A`` and two reductions in each step; replicated vectors reduce locally, and
    agree in one tiny message a step instead. One product at the end, for the true residual.

    References
    ----------
    Paige and Saunders (1975), doi:10.1137/0712047.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from distsolve.linalg import minres
    >>> diagonal = jnp.array([1.0, -2.0, 3.0])
    >>> x, info = minres(lambda p: diagonal * p, jnp.ones(3))
    >>> info.reason_name, int(info.iterations)
    ('converged', 3)
    """
    return driver.drive(
        METHOD,
        A,
        b,
        x0,
        tol=tol,
        atol=atol,
        maxiter=maxiter,
        M=M,
        space=arguments.space(space),
        args=args,
        history=history,
        progress=progress,
        callback=callback,
    )

"""Generalised minimal residuals for any operator, restarted.

Reference: Saad and Schultz (1986), doi:10.1137/0907058, with the classical Gram-Schmidt process
taken twice, which is orthogonal to rounding (Giraud, Langou, Rozloznik and van den Eshof (2005),
doi:10.1007/s00211-005-0615-4) and takes one message for a projection where the modified process
takes one for every vector. Preconditioned from the right, so that the residual is the true one.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from distsolve.linalg import arguments, driver, ritz, trees
from distsolve.linalg.info import Info, Reason
from distsolve.linalg.loop import ROUNDING, agree_to_move, first_of
from distsolve.linalg.space import Space

# As in `cg`. The vectors held are the basis, of one more than `restart`, and one to work in.
COST = {"matvec": 1, "reductions": 3, "agreements": 1, "vectors": 32}


class State(NamedTuple):
    """All that GMRES carries from one iteration to the next: A M V = V' H, and Q H = R."""

    V: Any  # the basis, (restart + 1, ...) in each leaf; vectors not yet made are zero
    Q: jax.Array  # unitary, (restart + 1, restart + 1), the product of all rotations
    R: jax.Array  # upper triangular, (restart, restart); that of the identity in columns to come
    norm: jax.Array  # of the first residual
    steps: jax.Array  # columns made
    largest: jax.Array  # largest column of H: the size of A M
    rr: jax.Array  # <r, r>
    event: jax.Array
    breakdown: jax.Array
    ritz: ritz.Ritz


def init(restart: int, A: Any, M: Any, r: Any, aim: driver.Aim, space: Space) -> State:
    """Return the state at the zero vector, whose residual is ``r``."""
    norm = space.norm(r)
    first = trees.scale(trees.safe_ratio(jnp.ones_like(norm), norm), r)
    V = jax.tree.map(
        lambda leaf: jnp.zeros((restart + 1, *leaf.shape), leaf.dtype).at[0].set(leaf), first
    )
    dtype = trees.project(V, r).dtype  # complex if all leaves are
    zero = jnp.zeros_like(norm)
    return State(
        V,
        Q=jnp.eye(restart + 1, dtype=dtype),
        R=jnp.eye(restart, dtype=dtype),
        norm=norm,
        steps=jnp.zeros((), jnp.int32),
        largest=aim.size,
        rr=norm * norm,
        event=jnp.full((), Reason.RUNNING, jnp.int32),
        breakdown=zero,
        ritz=ritz.start(norm.dtype),
    )


def step(A: Any, M: Any, aim: driver.Aim, space: Space, state: State) -> State:
    """Add one vector to the basis."""
    V, Q, R, norm, j, *_ = state
    v = jax.tree.map(lambda rows: rows[j], V)
    w = A(v if M is None else M(v))
    h = space.project(V, w)
    w = trees.subtract(w, trees.combine(V, h))
    again = space.project(V, w)
    w = trees.subtract(w, trees.combine(V, again))
    below = space.norm(w)

    # The rotations so far act on the new column (h, below), and a new one removes `below`. Where
    # there is nothing to divide by, A V_j depends on earlier columns: it is of no use. A vector of
    # rounding alone does not extend the basis: it would not be orthogonal.
    column = jnp.matmul(Q, h + again, precision=trees.HIGHEST)
    column_norm = trees.norm(column)
    largest = jnp.maximum(state.largest, jnp.hypot(column_norm, below))
    length = jnp.hypot(jnp.abs(column[j]), below)
    least = ROUNDING * jnp.finfo(length.dtype).eps * largest
    useful, extends = length > least, (length > least) & (below > least)

    def turn(useful: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        cosine, sine, pivot = rotation(column[j], below, length, useful)
        above, under = cosine * Q[j] + sine * Q[j + 1], cosine * Q[j + 1] - sine.conj() * Q[j]
        return jnp.stack([above, under]), pivot, jnp.square(norm * jnp.abs(under[0]))

    # A step that fails or is of no use on one rank must move nothing on any.
    finite = jnp.isfinite(below) & jnp.isfinite(length) & jnp.isfinite(column_norm)
    event = judge(finite, useful, turn(useful)[2], aim)
    event, useful, extends = agree_to_move(space, event, useful, extends)
    turned, pivot, rr = turn(useful)
    good = event < Reason.INDEFINITE_PRECONDITIONER
    made = jnp.arange(R.shape[0], dtype=j.dtype)
    column = jnp.where(made < j, column[:-1], jnp.where(made == j, pivot, 0))
    w = trees.scale(trees.safe_ratio(jnp.ones_like(below), below), w)
    w = trees.select(good & extends, w, trees.zeros_like(w))
    return State(
        V=jax.tree.map(lambda rows, leaf: rows.at[j + 1].set(leaf), V, w),
        Q=jnp.where(good, jax.lax.dynamic_update_slice_in_dim(Q, turned, j, 0), Q),
        R=jnp.where(good, R.at[:, j].set(column), R),
        norm=norm,
        steps=j + good.astype(j.dtype),
        largest=largest,
        rr=rr,
        event=event,
        breakdown=state.breakdown,
        ritz=ritz.widen(state.ritz, jnp.where(good & useful, length, 0)),
    )


def answer(M: Any, space: Space, state: State) -> Any:
    """Return the correction with the smallest residual in the space of the basis: M V y.

    Of as many columns as are of use: where a singular system has no solution, the last ones grow
    into the null space, and the residual of the correction, of at least eps ||A M|| ||y||, with
    them, although that of the method falls on.
    """
    made = jnp.arange(state.R.shape[0], dtype=state.steps.dtype) < state.steps
    g = jnp.where(made, state.norm.astype(state.Q.dtype) * state.Q[:-1, 0], 0)
    # Column k of `ys` is the y of the first k + 1 columns, and `left` the residuals, squared.
    ys = jnp.cumsum(jax.scipy.linalg.solve_triangular(state.R, jnp.diag(g)), axis=1)
    left = state.rr + jnp.cumsum(trees.squared(g)[::-1])[::-1] - trees.squared(g)
    # Times the size of A M, y is about as large as r, whatever the scale of A.
    rounding = trees.epsilon(state.V) * jnp.linalg.norm(state.largest.astype(ys.dtype) * ys, axis=0)
    error = jnp.where(made, jnp.sqrt(jnp.maximum(left, 0)) + rounding, jnp.inf)
    y = ys[:, space.decide(jnp.argmin(error).astype(jnp.int32))]
    u = trees.combine(jax.tree.map(lambda rows: rows[:-1], state.V), y)
    return u if M is None else trees.select(state.steps > 0, M(u), u)


def rotation(
    top: jax.Array, below: jax.Array, length: jax.Array, useful: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return cosine, sine and pivot: ``[c, s; -s*, c] (top, below) = (pivot, 0)``.

    A column that is of no use gets the coefficient zero: the rotation swaps the residual past it.
    """
    size, one = jnp.abs(top), jnp.ones_like(top)
    phase = jnp.where(size > 0, top / jnp.where(size > 0, size, 1).astype(top.dtype), one)
    cosine = jnp.where(useful, trees.safe_ratio(size, length), 0).astype(top.dtype)
    sine = jnp.where(useful, phase * trees.safe_ratio(below, length).astype(top.dtype), one)
    return cosine, sine, jnp.where(useful, phase * length.astype(top.dtype), one)


def judge(finite: Any, useful: Any, rr: jax.Array, aim: driver.Aim) -> jax.Array:
    """Return what a step has come to: the worst that applies, unless it got there."""
    return first_of(
        (~finite, Reason.NONFINITE),
        (rr <= aim.target, Reason.CONVERGED),
        (~useful & (aim.target >= 0), Reason.STAGNATED),
    )


@functools.cache
def method(restart: int) -> driver.Method:
    """Return GMRES with restarts after so many steps."""
    return driver.Method(
        "gmres",
        functools.partial(init, restart),
        step,
        COST | {"vectors": restart + 2},
        answer,
        symmetric=False,
        minimises=True,
        restart=restart,
    )


def gmres(
    A: Any,
    b: Any,
    x0: Any = None,
    *,
    restart: int = 30,
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
    """Solve ``A x = b`` for any linear ``A`` by generalised minimal residuals.

    The equation is ``A x = b`` over all leaves of ``b`` together; of all vectors in the Krylov
    space since the last restart, x has the smallest residual. If all leaves are complex, the space
    is complex and ``A`` must be linear over the complex numbers; otherwise the inner product is
    ``Re <x, y>`` and real linearity is enough.

    Parameters
    ----------
    restart : int
        Steps after which the basis is thrown away; ``restart + 1`` vectors are held. A short basis
        may stagnate where a longer one converges.
    A, b, x0, tol, atol, maxiter, M, space, args, history, progress, callback
        As for all solvers: see the head of `distsolve.linalg.driver`. ``b``: pytree, in ``space``.
        ``maxiter`` counts steps, not restarts. ``M`` acts from the right and need not be Hermitian.

    Returns
    -------
    x : pytree like ``b``, in ``space``
    info : Info
        Why the solve ended, equal on all ranks; ``info.raise_if_failed()`` outside jit.

    Raises
    ------
    TypeError, ValueError
        While tracing, before any message is sent, for arguments that cannot work.

    Notes
    -----
    The derivative in reverse solves with the adjoints of ``A`` and ``M``, which JAX makes by
    transposing them.

    Communication
    -------------
    One product with ``A`` and three reductions in each step, however long the basis; replicated
    vectors reduce locally, and agree in one tiny message a step instead. One product at the end of
    every ``restart`` steps, for the true residual, and one more agreement of replicated vectors.

    References
    ----------
    Saad and Schultz (1986), doi:10.1137/0907058. Giraud, Langou, Rozloznik and van den Eshof
    (2005), doi:10.1007/s00211-005-0615-4.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from distsolve.linalg import gmres
    >>> x, info = gmres(jnp.array([[1.0, 2.0], [0.0, 3.0]]), jnp.array([1.0, 3.0]))
    >>> info.reason_name, int(info.iterations)
    ('converged', 2)
    """
    return driver.drive(
        method(_checked(restart)),
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


def _checked(restart: Any) -> int:
    if not arguments.is_int(restart):
        raise TypeError(
            f"`restart` must be an int, known while tracing: got {restart!r}. It is the shape of "
            "the basis, so other values compile again."
        )
    if restart < 1:
        raise ValueError(f"`restart` must be at least 1: got {restart}. The default is 30.")
    return int(restart)

"""Conjugate gradients for Hermitian positive definite operators.

Reference: Hestenes and Stiefel (1952), doi:10.6028/jres.049.044, in the preconditioned form of
Saad (2003), Iterative Methods for Sparse Linear Systems, algorithm 9.1. Ours: the search direction
is kept at size 1 by powers of two, and no step is taken on a product that is not positive.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from distsolve.linalg import driver, trees
from distsolve.linalg.info import Info, Reason
from distsolve.linalg.space import Replicated

# A step: products with A, reductions of inner products (local for replicated vectors), agreements
# on whether to stop (one tiny message; none at one rank), and vectors held.
COST = {"matvec": 1, "reductions": 2, "agreements": 1, "vectors": 4}


class State(NamedTuple):
    """All that CG carries from one iteration to the next."""

    x: Any
    r: Any
    p: Any  # the search direction, divided by `unit`
    unit: jax.Array
    rz: jax.Array  # <r, M r>
    rr: jax.Array  # <r, r>
    event: jax.Array
    breakdown: jax.Array


def init(M: Any, r: Any, aim: driver.Aim, space: Replicated) -> State:
    """Return the state at the zero vector, whose residual is ``r``."""
    z = r if M is None else M(r)
    rz, rr = space.dot((r, z), (r, r))
    event = jnp.full((), Reason.RUNNING, jnp.int32)
    if M is not None:
        event = space.agree(judge(jnp.ones_like(rz), rz, rr, rr, aim))
    unit = size_of(z, rz, rr)
    return State(trees.zeros_like(r), r, trees.scale(1 / unit, z), unit, rz, rr, event, rz)


def step(A: Any, M: Any, aim: driver.Aim, space: Replicated, state: State) -> State:
    """Take one step, unless that would move nothing for the better."""
    x, r, p, unit, rz, rr, _, _ = state
    Ap = A(p)
    (pAp,) = space.dot((p, Ap))
    alpha = jnp.where(rr > aim.floor, trees.safe_ratio(rz, unit * pAp), 0)
    r = trees.axpy(-alpha, Ap, r)
    z = r if M is None else M(r)
    rz_new, rr_new = space.dot((r, z), (r, r))

    # Agree before x moves: a step that fails on one rank must move nothing on any.
    event = space.agree(judge(pAp, rz_new, rr, rr_new, aim))
    x = trees.axpy(jnp.where(event < Reason.INDEFINITE_OPERATOR, alpha, 0), p, x)

    beta, unit_new = trees.safe_ratio(rz_new, rz), size_of(z, rz_new, rr_new)
    p = trees.axpy(beta * (unit / unit_new), p, trees.scale(1 / unit_new, z))
    breakdown = jnp.where(pAp > 0, rz_new, pAp * unit * unit)
    return State(x, r, p, unit_new, rz_new, rr_new, event, breakdown)


def judge(
    pAp: jax.Array, rz: jax.Array, rr_old: jax.Array, rr: jax.Array, aim: driver.Aim
) -> jax.Array:
    """Return what a step has come to, in the order of the codes: the worst that applies.

    Products that vanish with the residual prove nothing, hence the comparisons with the floor.
    """
    finite = jnp.isfinite(pAp) & jnp.isfinite(rz) & jnp.isfinite(rr)
    return jnp.select(
        [
            ~finite,
            (pAp <= 0) & (rr_old > aim.floor),
            rr <= aim.target,
            (rz <= 0) & (rr > aim.floor),
        ],
        [
            jnp.full((), reason, jnp.int32)
            for reason in (
                Reason.NONFINITE,
                Reason.INDEFINITE_OPERATOR,
                Reason.CONVERGED,
                Reason.INDEFINITE_PRECONDITIONER,
            )
        ],
        jnp.full((), Reason.RUNNING, jnp.int32),
    )


def size_of(z: Any, rz: jax.Array, rr: jax.Array) -> jax.Array:
    """Return a power of two near the size of ``z = M r``, from products that are at hand."""
    return trees.power_of_two(rz / jnp.sqrt(jnp.where(rr > 0, rr, jnp.ones_like(rr))), z)


METHOD = driver.Method("cg", init, step)


def cg(
    A: Any,
    b: Any,
    x0: Any = None,
    *,
    tol: ArrayLike = 1e-5,
    atol: ArrayLike = 0.0,
    maxiter: ArrayLike | None = None,
    M: Any = None,
) -> tuple[Any, Info]:
    """Solve ``A x = b`` for a Hermitian positive definite ``A`` by conjugate gradients.

    The equation is ``A x = b`` over all leaves of ``b`` together, with the inner product
    ``Re <x, y>``; vectors are replicated: every rank of the world holds all of ``b`` and ``x``.

    Parameters
    ----------
    A, b, x0, tol, atol, maxiter, M
        As for all solvers: see the head of `distsolve.linalg.driver`. ``b``: pytree, replicated.

    Returns
    -------
    x : pytree like ``b``, replicated
    info : Info
        Why the solve ended, equal on all ranks; ``info.raise_if_failed()`` outside jit.

    Raises
    ------
    TypeError, ValueError
        While tracing, before any message is sent, for arguments that cannot work.

    Notes
    -----
    Derivatives with respect to ``b`` and all that ``A`` closes over cost one more solve each,
    forward and reverse. Called outside jit, it compiles once for each program that ``A`` and ``M``
    amount to; other data, tolerances and limits run the same compiled code.

    Communication
    -------------
    One product with ``A`` in each step and one at the end, for the true residual; one more if
    ``x0`` is given. At more than one rank also one tiny allreduce in each step, and two or three
    more in all, in which the ranks agree to stop.

    References
    ----------
    Hestenes and Stiefel (1952), doi:10.6028/jres.049.044.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from distsolve.linalg import cg
    >>> diagonal = jnp.array([1.0, 2.0, 3.0])
    >>> x, info = cg(lambda p: diagonal * p, jnp.ones(3))
    >>> info.reason_name, int(info.iterations)
    ('converged', 3)
    """
    return driver.drive(
        METHOD, A, b, x0, tol=tol, atol=atol, maxiter=maxiter, M=M, space=Replicated()
    )

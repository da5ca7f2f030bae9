"""Steepest descent for Hermitian positive definite operators."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from distsolve.linalg import arguments, driver, ritz, trees
from distsolve.linalg.info import Reason
from distsolve.linalg.krylov.cg_classic import judge

COST = {"matvec": 1, "reductions": 2, "agreements": 1, "vectors": 2}


class State(NamedTuple):
    """All that steepest descent carries from one iteration to the next."""

    x: Any
    r: Any
    rr: jax.Array
    event: jax.Array
    breakdown: jax.Array
    ritz: ritz.Ritz


def init(A, M, r, aim, space):
    """Return the state at the zero vector, whose residual is ``r``."""
    (rr,) = space.dot((r, r))
    running = jnp.full((), Reason.RUNNING, jnp.int32)
    return State(trees.zeros_like(r), r, rr, running, rr, ritz.start(rr.dtype))


def step(A, M, aim, space, state):
    """Move along the residual to where the error is smallest."""
    x, r, rr, _, _, estimates = state
    Ar = A(r)
    (rAr,) = space.dot((r, Ar))
    alpha = jnp.where(rr > aim.floor, trees.safe_ratio(rr, rAr), 0)
    r = trees.axpy(-alpha, Ar, r)
    (rr_new,) = space.dot((r, r))
    event = space.decide(judge(rAr, rr_new, rr, rr_new, aim))
    x = trees.axpy(jnp.where(event < Reason.INDEFINITE_OPERATOR, alpha, 0), state.r, x)
    return State(x, r, rr_new, event, rAr, estimates)


METHOD = driver.Method("descent", init, step, COST)


def descent(A, b, x0=None, *, tol=1e-5, atol=0.0, maxiter=None, space=None, **more):
    """Solve ``A x = b`` for a Hermitian positive definite ``A`` by steepest descent.

    Parameters, results and derivatives as for all solvers: see the head of
    `distsolve.linalg.driver`.
    """
    space = arguments.space(space)
    return driver.drive(
        METHOD, A, b, x0, tol=tol, atol=atol, maxiter=maxiter, M=None, space=space, **more
    )


if __name__ == "__main__":
    from distsolve import Sharded, mpi

    diagonal = jnp.arange(2.0, 5.0 + mpi.rank())  # pieces of different lengths
    x, info = descent(lambda p: diagonal * p, diagonal**2, space=Sharded())
    info.raise_if_failed()
    assert jnp.allclose(x, diagonal, rtol=1e-3)
    if mpi.rank() == 0:
        print(f"{mpi.size()} ranks: {info.message}")

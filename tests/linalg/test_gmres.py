"""GMRES: the trajectory, restarts, arguments."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse.linalg
from linalg.solves import check
from spmd import agree, assert_allclose

from distsolve.linalg import gmres

pytestmark = pytest.mark.few_ranks


def general(dtype=np.float64, n=16):
    """Return a matrix without symmetry whose eigenvalues surround a point, and a vector."""
    random = np.random.default_rng(7)
    shape = (n + 1, n)
    entries = random.standard_normal(shape)
    if np.issubdtype(dtype, np.complexfloating):
        entries = entries + 1j * random.standard_normal(shape)
    return (entries[:n] / 4 + 2 * np.eye(n)).astype(dtype), entries[n].astype(dtype)


@pytest.mark.once
@pytest.mark.parametrize("preconditioned", [False, True])
@pytest.mark.parametrize("dtype", [np.float64, np.complex128])
def test_trajectory_is_that_of_scipy(dtype, preconditioned):
    A, b = general(dtype)
    M = general(dtype)[0].conj().T if preconditioned else None
    for k in (1, 3, 6):  # six steps are two cycles
        right = A if M is None else A @ M
        options = {"restart": min(k, 3), "maxiter": max(1, k // 3)}
        want, _ = scipy.sparse.linalg.gmres(right, b, rtol=1e-300, **options)
        x, info = gmres(A, b, restart=3, tol=0, maxiter=k, M=M)
        assert_allclose(x, want if M is None else M @ want, rtol=1e-11)
        assert_allclose(info.residual_norm, np.linalg.norm(b - A @ np.asarray(x)), rtol=1e-11)


@pytest.mark.once
def test_restarts_until_it_is_there():
    A, b = general()
    x, info = gmres(A, b, restart=3, tol=1e-10, maxiter=200)
    check((x, info), np.linalg.solve(A, b), "converged", rtol=1e-8)
    agree(int(info.iterations) > 3, info.message)


@pytest.mark.once
def test_a_cycle_that_gains_nothing_is_the_last():
    # The cyclic shift: no step but the last of n reduces the residual.
    shift = np.roll(np.eye(8), 1, axis=0)
    x, info = gmres(shift, np.eye(8)[0], restart=4, tol=1e-10)
    check((x, info), np.zeros(8), "stagnated", atol=1e-14)
    agree(int(info.iterations) == 4 and "raise `restart`" in info.message, info.message)
    check(gmres(shift, np.eye(8)[0], restart=8, tol=1e-10), np.eye(8)[7], "converged", atol=1e-14)


@pytest.mark.once
def test_basis_is_orthonormal_to_rounding():
    from distsolve.linalg import Replicated, driver
    from distsolve.linalg.krylov import gmres as module

    matrix = jnp.vander(jnp.linspace(0.1, 1, 16), increasing=True)  # a condition of 1e12
    method = module.method(12)
    aim = driver.Aim(jnp.asarray(-1.0), jnp.asarray(0.0), jnp.asarray(0.0))
    A = functools.partial(jnp.matmul, matrix)
    state = method.init(A, None, jnp.ones(16), aim, Replicated())
    for _ in range(12):
        state = method.step(A, None, aim, Replicated(), state)
    V, Q, R = (np.asarray(part) for part in (state.V, state.Q, state.R))
    assert_allclose(V @ V.T, np.eye(13), atol=1e-13)
    # A V = V' H, and Q H = R.
    H = Q.T @ np.vstack([R, np.zeros(12)])
    assert_allclose(matrix @ V[:-1].T, V.T @ H, atol=1e-12)


@pytest.mark.parametrize(("restart", "error"), [(0, ValueError), (2.5, TypeError)])
def test_restart_is_checked(restart, error):
    with pytest.raises(error, match="`restart` must be"):
        gmres(np.eye(2), np.ones(2), restart=restart)

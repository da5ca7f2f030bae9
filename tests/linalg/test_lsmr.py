"""LSMR: least squares of any shape, whole and spread over ranks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse.linalg
from linalg.solves import check, layout, same_everywhere
from spmd import agree, assert_allclose, ranks

from distsolve.linalg import Replicated, Sharded, lsmr

M, N = 20, 8


def tall(dtype=np.float64, shape=(M, N)):
    """Return a matrix and a right-hand side that is not in its range."""
    random = np.random.default_rng(9)
    entries = random.standard_normal((shape[0], shape[1] + 1))
    if np.issubdtype(dtype, np.complexfloating):
        entries = entries + 1j * random.standard_normal(entries.shape)
    return entries[:, :-1].astype(dtype), entries[:, -1].astype(dtype)


def best(A, b, damp=0.0):
    """The solution, by singular values."""
    rows = np.concatenate([A, damp * np.eye(A.shape[1])])
    return np.linalg.lstsq(rows, np.concatenate([b, np.zeros(A.shape[1])]), rcond=None)[0]


@pytest.mark.once
@pytest.mark.parametrize(
    ("dtype", "shape"), [(np.float64, (M, N)), (np.complex128, (M, N)), (np.float64, (N, M))]
)
def test_trajectory_is_that_of_scipy(dtype, shape):
    A, b = tall(dtype, shape)
    for damp in (0.0, 0.5):
        for k in (1, 3, 6):
            options = {"damp": damp, "atol": 0, "btol": 0, "conlim": 0, "maxiter": k}
            want = scipy.sparse.linalg.lsmr(A, b, **options)[0]
            x, info = lsmr(A, b, damp=damp, tol=0, maxiter=k, space=Replicated())
            # Entries that all but cancel keep the rounding of the large ones.
            assert_allclose(x, want, rtol=0, atol=1e-10 * np.abs(want).max())
            assert_allclose(info.residual_norm, np.linalg.norm(b - A @ np.asarray(x)), rtol=1e-11)
        result = lsmr(A, b, damp=damp, tol=1e-11, maxiter=99, space=Replicated())
        check(result, best(A, b, damp), "converged", rtol=1e-8)


def test_named_problems():
    A, b = tall()
    dependent = A.copy()
    dependent[:, 3] = A[:, 2]
    for matrix, rhs, tol, reason in [
        (A, np.zeros(M), 1e-10, "converged"),
        (A, A @ np.arange(8.0), 1e-10, "converged"),
        (dependent, b, 1e-10, "converged"),
        (dependent, b, 1e-30, "stagnated"),
        (dependent, b, 0, "fixed_steps"),
        (np.zeros_like(A), b, 1e-10, "converged"),
    ]:
        result = lsmr(matrix, rhs, tol=tol, maxiter=99, space=Replicated())
        check(result, best(matrix, rhs), reason, rtol=0, atol=1e-9)
    bad = b.copy()
    bad[ranks().size % M] = np.nan
    x, info = lsmr(A, bad, tol=1e-10, maxiter=99, space=Replicated())
    agree(info.reason_name == "nonfinite" and bool(jnp.isfinite(x).all()), info.message)


@pytest.mark.once
def test_scale_does_not_matter():
    A, b = (part.astype(np.float32) for part in tall())
    want = best(*tall())
    for factor in (np.float32(1e-25), np.float32(1e25)):
        x, info = lsmr(A, b * factor, maxiter=99, space=Replicated())
        check((np.asarray(x, float) / float(factor), info), want, "converged", atol=1e-4)
        x, info = lsmr(A * factor, b, maxiter=99, space=Replicated())
        check((np.asarray(x, float) * float(factor), info), want, "converged", atol=1e-4)


def test_rows_spread_over_ranks():
    A, b = tall()
    mine = layout("uneven", M).mine
    x, info = lsmr(A[mine], b[mine], tol=1e-11, maxiter=99)
    same_everywhere(info)
    check((x, info), best(A, b), "converged", rtol=1e-8)
    _, whole = lsmr(A, b, tol=1e-11, maxiter=99, space=Replicated())
    agree(abs(int(info.iterations) - int(whole.iterations)) <= 1, f"{info} {whole}")


def test_a_function_of_rows_is_transposed():
    A, b = tall()
    mine = layout("uneven", M).mine
    rows, start = jnp.asarray(A[mine]), np.ones(N)
    x, _ = lsmr(lambda p: rows @ p, b[mine], start, damp=0.5, tol=1e-11)
    assert_allclose(x, start + best(A, b - A @ start, 0.5), rtol=1e-8)


def test_both_spaces_in_pieces():
    mine = layout("uneven", M).mine
    weights, b = np.linspace(1, 3, M), tall()[1]
    x, info = lsmr(
        lambda p: jnp.asarray(weights[mine]) * p,
        b[mine],
        np.zeros(M)[mine],
        tol=1e-11,
        columns_space=Sharded(),
    )
    same_everywhere(info)
    check((x, info), (b / weights)[mine], "converged", rtol=1e-8)


@pytest.mark.once
@pytest.mark.parametrize("damp", [0.0, 0.3])
def test_derivatives(damp):
    A, b = map(jnp.asarray, tall())

    def solve(A, b):
        return lsmr(A, b, tol=1e-13, damp=damp, space=Replicated())[0]

    def normal_equations(A, b):
        return jnp.linalg.solve(A.T @ A + damp * damp * jnp.eye(N), A.T @ b)

    move = (jnp.cos(A), jnp.sin(b))
    want = jax.jvp(normal_equations, (A, b), move)[1]
    assert_allclose(jax.jvp(solve, (A, b), move)[1], want, rtol=1e-9)
    cotangent = jnp.arange(1.0, N + 1)
    found = jax.vjp(solve, A, b)[1](cotangent)
    for ours, theirs in zip(found, jax.vjp(normal_equations, A, b)[1](cotangent), strict=True):
        assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.once
@pytest.mark.parametrize("shape", [(3, 5, 3), (6, 4, 2)])
def test_gradient_in_b_at_any_rank(shape):
    rows, columns, rank = shape
    random = np.random.default_rng(0)
    A = random.normal(size=(rows, rank)) @ random.normal(size=(rank, columns))
    solve = functools.partial(lsmr, jnp.asarray(A), tol=1e-12, space=Replicated())
    found = jax.grad(lambda b: solve(b)[0].sum())(jnp.ones(rows))
    assert_allclose(found, np.linalg.pinv(A).sum(0), rtol=1e-8, atol=1e-10)


def test_arguments_are_checked():
    A, b = tall()
    for arguments, options, error, text in [
        ((lambda p: A @ p, b), {}, ValueError, "`x0` and `adjoint` are both missing"),
        ((A.T, b), {}, ValueError, r"a matrix of shape \(m, n\)"),
        ((A.astype(np.float32), b), {}, TypeError, "not cast silently"),
        ((A, b), {"columns_space": Sharded()}, ValueError, "knows its adjoint"),
        ((A, b, np.ones(3)), {}, ValueError, "`x0`"),
        ((A, b), {"damp": -1.0}, ValueError, "`damp` must be at least 0"),
    ]:
        with pytest.raises(error, match=text):
            lsmr(*arguments, **options)

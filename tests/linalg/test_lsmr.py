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

pytestmark = pytest.mark.few_ranks

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
@pytest.mark.parametrize(
    ("of_A", "of_b", "of_damp"),
    [
        (1, 1e-25, 1),
        (1, 1e25, 1),
        (1e-25, 1, 1e-25),
        (1e25, 1, 1e25),
        (1e25, 1e25, 1e-25),  # hardly any damping
        (1, 1e25, 1e25),  # hardly anything else
        (1, 1e-25, 1e25),  # x is below the smallest float
    ],
)
def test_scale_does_not_matter(of_A, of_b, of_damp):
    A, b = (part.astype(np.float32) for part in tall())
    A, b, damp = A * np.float32(of_A), b * np.float32(of_b), np.float32(0.5 * of_damp)
    options = {"damp": 0.5 * of_damp / of_A, "atol": 1e-14, "btol": 1e-14, "conlim": 0}
    want = scipy.sparse.linalg.lsmr(*tall(), **options)[0] * (of_b / of_A)
    result = lsmr(A, b, damp=damp, maxiter=99, space=Replicated())
    check(result, want, "converged", rtol=0, atol=1e-4 * np.abs(want).max() + 1e-37)


@pytest.mark.once
def test_an_answer_that_no_float_holds_is_no_nan():
    A, b = (part.astype(np.float32) for part in tall())
    solve = functools.partial(lsmr, maxiter=99, space=Replicated())
    graded = np.diag([1, 1e-4]).astype(np.float32)
    for matrix, rhs, of_A, of_b in [(A, b, 1e-25, 1e25), (graded, b[:2], 1e-19, 1e18)]:
        x, info = solve(matrix * np.float32(of_A), rhs * np.float32(of_b))
        agree(bool(jnp.isfinite(x).all()) and not info.converged, info.message)
        agree(float(info.residual_norm) <= float(info.rhs_norm), info.message)


@pytest.mark.once
def test_derivative_where_squares_overflow():
    A, b = (jnp.asarray(part, jnp.float32) for part in tall())

    def slope(factor):
        def solve(b, damp):
            return lsmr(factor * A, b, damp=damp, tol=1e-6, space=Replicated())[0]

        return jax.jvp(solve, (factor * b, factor * 0.5), (factor * b, factor))[1]

    large = jnp.float32(1e25)
    assert_allclose(slope(large), slope(jnp.float32(1)), rtol=1e-3)


@pytest.mark.parametrize("damp", [0.0, 1e-9, 0.5])
def test_right_hand_side_of_zeros(damp):
    A, _ = tall()
    mine, start = layout("uneven", M).mine, np.arange(1.0, N + 1)
    for tol in (1e-5, 1e-10):
        result = lsmr(A[mine], np.zeros(M)[mine], start, damp=damp, tol=tol)
        want = start + best(A, -A @ start, damp) if damp else np.zeros(N)
        check(result, want, "converged", rtol=0, atol=50 * tol * bool(damp))
    x, info = lsmr(A[mine], np.zeros(M)[mine], start, damp=damp, tol=0, maxiter=3)
    agree(info.reason_name == "fixed_steps", info.message)
    agree(bool(damp) or not np.any(x), f"{x}")


@pytest.mark.parametrize("damp", [0.0, 0.5])
def test_history_is_of_the_residual_without_damping(damp):
    A, b = tall()
    mine, start, told = layout("uneven", M).mine, np.arange(1.0, N + 1), []
    solve = functools.partial(lsmr, A[mine], b[mine], start, damp=damp, tol=0, maxiter=3)
    _, info = solve(history=5, callback=lambda iteration, residual: told.append(residual))
    jax.effects_barrier()
    same_everywhere(info)
    want = [solve(maxiter=k)[1].residual_norm for k in range(4)]
    assert_allclose(info.residual_history[:4], want, rtol=1e-10)
    assert_allclose(told, want[1:], rtol=1e-10)
    agree(bool(jnp.isnan(info.residual_history[4])))


def test_rows_spread_over_ranks():
    A, b = tall()
    mine = layout("uneven", M).mine
    x, info = lsmr(A[mine], b[mine], tol=1e-11, maxiter=99)
    same_everywhere(info)
    check((x, info), best(A, b), "converged", rtol=1e-8)
    _, whole = lsmr(A, b, tol=1e-11, maxiter=99, space=Replicated())
    agree(abs(int(info.iterations) - int(whole.iterations)) <= 1, f"{info} {whole}")


@pytest.mark.parametrize("where", ["uneven", "replicated"])
def test_nan_on_one_rank(where):
    A, b = tall()
    space, mine = layout(where, M)
    for value in (np.nan, np.inf):
        rows = jnp.asarray(A[mine]).at[:1, 1].set(value if ranks().rank == 0 else 1)
        x, info = lsmr(rows, b[mine], space=space)
        same_everywhere(info)
        agree(info.reason_name == "nonfinite" and not np.any(x), f"{x} {info.message}")


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
        ((A, b), {"history": -1}, ValueError, "`history` must be the number of residual norms"),
        ((A, b), {"callback": 3}, TypeError, "`callback` must be a function"),
    ]:
        with pytest.raises(error, match=text):
            lsmr(*arguments, **options)

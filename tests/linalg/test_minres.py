"""MINRES: the trajectory, and what it says of its preconditioner."""

import numpy as np
import pytest
import scipy.sparse.linalg
from linalg import problems
from linalg.solves import check, same_everywhere
from spmd import agree, assert_allclose, ranks

from distsolve.linalg import Replicated, gmres, lsmr, minres

pytestmark = pytest.mark.few_ranks


def indefinite(dtype=np.float64, n=16):
    """Return a system with eigenvalues of both signs."""
    system = problems.random_spd(n, dtype)
    return system._replace(matrix=(system.matrix - 20 * np.eye(n)).astype(dtype))


@pytest.mark.once
@pytest.mark.parametrize("size", [1e-13, 1e13])
def test_scale_of_a_preconditioned_operator_does_not_matter(size):
    diagonal = np.float32(size) * np.array([1, 10, -3], np.float32)
    M = np.float32(1e6 if size > 1 else 1e-6)
    b = np.ones(3, np.float32)
    x, info = minres(lambda p: diagonal * p, b, M=lambda p: M * p, tol=1e-5)
    check((np.asarray(x) * diagonal, info), np.ones(3), "converged", 3, rtol=1e-4)


@pytest.mark.once
@pytest.mark.parametrize("preconditioned", [False, True])
def test_trajectory_is_that_of_scipy(preconditioned):
    system = indefinite()
    M = problems.random_spd(16, condition=5.0, seed=1).matrix if preconditioned else None
    for k in (1, 2, 5):
        want, _ = scipy.sparse.linalg.minres(system.matrix, system.b, rtol=0, maxiter=k, M=M)
        x, info = minres(system.matrix, system.b, tol=0, maxiter=k, M=M)
        assert_allclose(x, want, rtol=1e-10)
        residual = np.linalg.norm(system.b - system.matrix @ np.asarray(x))
        assert_allclose(info.residual_norm, residual, rtol=1e-11)


@pytest.mark.once
@pytest.mark.parametrize("preconditioned", [False, True])
def test_own_residuals_are_the_true_ones(preconditioned):
    system = indefinite(np.complex128)
    M = None
    if preconditioned:
        M = problems.random_spd(16, np.complex128, condition=5.0, seed=1).matrix
    _, info = minres(system.matrix, system.b, tol=1e-9, maxiter=99, M=M, history=12)
    for k in (3, 7, 11):
        x, _ = minres(system.matrix, system.b, tol=0, maxiter=k, M=M)
        residual = np.linalg.norm(system.b - system.matrix @ np.asarray(x))
        assert_allclose(info.residual_history[k], residual, rtol=1e-9)
    if M is None:  # the smallest of all residuals in the Krylov space
        powers = [np.linalg.matrix_power(system.matrix, j) @ system.b for j in range(1, 12)]
        powers = np.stack([p / np.linalg.norm(p) for p in powers], axis=1)
        gap = np.linalg.lstsq(powers, system.b, rcond=None)[0]
        assert_allclose(residual, np.linalg.norm(system.b - powers @ gap), rtol=1e-6)


@pytest.mark.once
def test_indefinite_preconditioner_moves_nothing():
    result = minres(np.eye(2), np.array([1.0, 2]), M=-np.eye(2))
    check(result, [0, 0], "indefinite_preconditioner")
    agree("-5" in result[1].message, result[1].message)


@pytest.mark.once
def test_preconditioner_that_turns_out_to_be_indefinite():
    M = np.diag([1.0, 1.0, -1e-3])
    x, info = minres(np.diag([1.0, 2, 3]), np.array([1.0, 1, 0.1]), M=M, tol=1e-12)
    agree(info.reason_name == "indefinite_preconditioner", info.message)
    agree(bool(np.isfinite(x).all()), x)


@pytest.mark.once
def test_condition_is_estimated_from_below():
    system = indefinite()
    _, info = minres(system.matrix, system.b, tol=1e-12, maxiter=99)
    true = np.linalg.cond(system.matrix)
    agree(0.05 * true < float(info.condition_estimate) <= 1.01 * true, f"{info}")


@pytest.mark.parametrize(
    ("solver", "tol", "reason"),
    [(minres, 0.0, "fixed_steps"), (gmres, 1e-30, "stagnated"), (lsmr, 1e-30, "stagnated")],
)
def test_copies_that_differ_in_the_last_bit_move_together(solver, tol, reason):
    matrix, b = problems.periodic_laplacian()
    mine = np.where(np.arange(16) % 3 < ranks().rank, np.nextafter(b, np.inf), b)
    solutions = []
    for rhs in (b, mine):
        x, info = solver(matrix, rhs, tol=tol, maxiter=40, space=Replicated())
        same_everywhere(info)
        agree(info.reason_name == reason, info.message)
        solutions.append(x)
    assert_allclose(*solutions, rtol=0, atol=1e-9)

"""Conjugate gradients on replicated vectors: values, trajectories, reasons, ranks."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse.linalg
from linalg import problems
from linalg.problems import Product
from linalg.solves import check, counted, same_everywhere
from spmd import agree, assert_allclose, ranks

from distsolve import mpi
from distsolve.linalg import Reason, SolveError, cg
from distsolve.linalg.krylov.cg_classic import COST


def sr_operator(system):
    """Return S as a function with one allreduce, from this rank's rows only."""
    rows = jnp.asarray(system.pieces[ranks().rank])

    def S(v):
        product = ((rows @ v).conj() @ rows).conj()
        return mpi.allreduce(product) / system.total + system.shift * v

    return S


def test_three_steps_solve_three_unknowns():
    result = cg(jnp.diag(jnp.arange(1.0, 4)), jnp.ones(3), tol=1e-10)
    check(result, [1, 1 / 2, 1 / 3], "converged", 3)


def test_two_steps_are_not_enough():
    x, info = cg(jnp.diag(jnp.arange(1.0, 4)), jnp.ones(3), tol=1e-10, maxiter=2)
    check((x, info), [0.9, 0.6, 0.3], "maxiter", 2)
    assert_allclose(info.residual_norm / info.rhs_norm, np.sqrt(0.02), rtol=1e-12)
    agree("maxiter" in info.message and "0.244949" in info.message, info.message)
    with pytest.raises(SolveError, match="Raise `maxiter`"):
        info.raise_if_failed()


@pytest.mark.once
@pytest.mark.parametrize("method", ["classic", "single_reduction", "pipelined"])
def test_a_system_without_a_solution_gives_no_worse_than_the_start(method):
    n = 20
    neumann = 2 * np.eye(n) - np.eye(n, k=1) - np.eye(n, k=-1)
    neumann[0, 0] = neumann[-1, -1] = 1
    for A, b in ((np.diag([1.0, 2, 0]), np.ones(3)), (neumann, np.arange(1.0, n + 1))):
        x, info = cg(jnp.asarray(A), jnp.asarray(b), method=method)
        agree(not info.converged, info.message)
        residual = np.linalg.norm(b - A @ np.asarray(x))
        agree(residual <= 10 * np.linalg.norm(b), f"{residual} {x}")
        assert_allclose(info.residual_norm, residual, rtol=1e-8)


@pytest.mark.once
def test_a_derivative_that_has_no_solution_is_nan():
    diagonal = jnp.array([1.0, 2, 0])
    gradient = jax.grad(lambda b: cg(lambda p: diagonal * p, b)[0].sum())(jnp.array([1.0, 1, 0]))
    agree(bool(jnp.isnan(gradient).all()), f"{gradient}")


def test_pieces_taken_for_copies_do_not_part_the_ranks():
    mine = 6 + ranks().rank  # the space is forgotten
    _, info = cg(lambda p: p + 3 * jnp.roll(p, 1), jnp.cos(jnp.arange(mine)))
    same_everywhere(info.reason)
    same_everywhere(info.iterations)


@pytest.mark.parametrize("k", [0, 1, 2, 8])
def test_fixed_steps(k):
    x, info = cg(jnp.diag(jnp.arange(1.0, 4)), jnp.ones(3), tol=0, atol=0, maxiter=k)
    want = {0: [0, 0, 0], 1: [0.5] * 3, 2: [0.9, 0.6, 0.3], 8: [1, 1 / 2, 1 / 3]}[k]
    assert_allclose(x, want, rtol=1e-12)
    agree(info.reason_name == "fixed_steps" and int(info.iterations) == k, info.message)
    info.raise_if_failed()


@pytest.mark.parametrize("name", ["diagonal", "periodic", "zero"])
def test_many_fixed_steps_do_no_harm(name):
    system = {
        "diagonal": problems.diagonal([1, 2, 3]),
        "periodic": problems.periodic_laplacian(),
        "zero": problems.diagonal([1, 2, 3], [0, 0, 0]),
    }[name]
    x, info = cg(system.matrix, system.b, tol=0, maxiter=500)
    agree(info.reason_name == "fixed_steps", info.message)
    assert_allclose(system.matrix @ np.asarray(x), system.b, rtol=0, atol=1e-13)


# Each of the three both ways; the other combinations are the same on any number of ranks.
TRAJECTORIES = [(np.float64, False, True), (np.complex128, True, False)]
TRAJECTORIES += [
    pytest.param(*case, marks=pytest.mark.once)
    for case in itertools.product((np.float64, np.complex128), (False, True), (False, True))
    if case not in TRAJECTORIES
]


@pytest.mark.parametrize(("dtype", "start", "preconditioned"), TRAJECTORIES)
def test_trajectory_is_that_of_scipy(dtype, start, preconditioned):
    system = problems.random_spd(dtype=dtype)
    x0 = np.linspace(-1, 1, len(system.b)).astype(dtype) if start else None
    M = np.diag(1 / np.diag(system.matrix)) if preconditioned else None
    for k in (1, 3):
        want, _ = scipy.sparse.linalg.cg(system.matrix, system.b, x0, rtol=0, maxiter=k, M=M)
        x, info = cg(system.matrix, system.b, x0, tol=0, maxiter=k, M=M)
        assert_allclose(x, want, rtol=1e-11)
        residual = np.linalg.norm(system.b - system.matrix @ np.asarray(x))
        assert_allclose(info.residual_norm, residual, rtol=1e-11)


def test_indefinite_operator_moves_nothing():
    x, info = cg(jnp.diag(jnp.array([1.0, -1])), jnp.array([1.0, 2]))
    check((x, info), [0, 0], "indefinite_operator", 0)
    agree("-3" in info.message and "reduction over ranks" in info.message, info.message)


def test_indefinite_on_one_rank_is_told_by_its_product():
    sign = -1.0 if ranks().rank == ranks().size - 1 else 1.0
    _, info = cg(sign * jnp.eye(2), jnp.array([1.0, 2]))
    same_everywhere(info)
    agree(info.reason_name == "indefinite_operator" and "= -5 on" in info.message, info.message)


def test_indefinite_preconditioner_moves_nothing():
    x, info = cg(jnp.eye(2), jnp.array([1.0, 2]), M=-jnp.eye(2))
    check((x, info), [0, 0], "indefinite_preconditioner", 0)
    agree("-5" in info.message, info.message)


def test_indefinite_later_keeps_the_last_good_iterate():
    x, info = cg(jnp.diag(jnp.array([4.0, 1, -0.1])), jnp.array([1.0, 1, 0.1]), tol=1e-10)
    agree(info.reason_name == "indefinite_operator" and int(info.iterations) > 0, info.message)
    assert_allclose(jnp.isfinite(x), [True] * 3)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("where", ["b", "x0", "A"])
def test_nonfinite_input_is_reported(bad, where):
    values = {"b": np.ones(3), "x0": np.ones(3), "A": np.arange(1.0, 4)}
    values[where][ranks().size // 2] = bad
    _, info = cg(jnp.diag(values["A"]), values["b"], values["x0"])
    agree(info.reason_name == "nonfinite" and not bool(info.converged), info.message)


def test_nan_on_one_rank_at_the_third_iteration():
    system = problems.laplacian()
    matrix = jnp.asarray(system.matrix)
    last = ranks().rank == ranks().size - 1

    def A(p):  # a delta spreads by one entry each step, so p[2] is nonzero from the third on
        return jnp.where((p[2] != 0) & last, jnp.nan, matrix @ p)

    for solve in (cg, jax.jit(functools.partial(cg, A))):
        x, info = solve(A, system.b) if solve is cg else solve(system.b)
        same_everywhere(info)
        agree(info.reason_name == "nonfinite" and int(info.iterations) == 2, info.message)
        want, _ = scipy.sparse.linalg.cg(system.matrix, system.b, rtol=0, maxiter=2)
        assert_allclose(x, want, atol=1e-14)


@pytest.mark.parametrize(
    "tol",
    [1e-3, 1e-30, *(pytest.param(tol, marks=pytest.mark.once) for tol in (1e-6, 1e-7, 1e-12))],
)
def test_single_precision_never_claims_more_than_it_reached(tol):
    entries = np.logspace(0, 6, 400).astype(np.float32)
    b = np.ones(400, np.float32)
    x, info = cg(lambda p: jnp.asarray(entries) * p, b, tol=tol)
    residual = np.linalg.norm(b - entries.astype(float) * np.asarray(x, float))
    if bool(info.converged):
        agree(residual <= 1.05 * tol * 20, f"{residual / 20}: {info.message}")
    else:
        agree(info.reason_name in ("stagnated", "maxiter"), info.message)
    assert_allclose(info.residual_norm, residual, rtol=0.1, atol=2e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_tolerance_below_the_precision_stagnates(dtype):
    system = problems.random_spd(dtype=dtype)
    x, info = cg(system.matrix, system.b, tol=1e-30)
    agree(info.reason_name == "stagnated", info.message)
    assert_allclose(x, system.x, rtol=0, atol=2e3 * np.finfo(dtype).eps)
    agree("precision" in info.message or "rounding" in info.message, info.message)


@pytest.mark.parametrize("factor", [1e-25, 1.0, 1e25])
@pytest.mark.parametrize("start", [False, True])
def test_scale_of_the_right_hand_side_does_not_matter(factor, start):
    system = problems.random_spd(dtype=np.float32)
    b = (system.b * np.float32(factor)).astype(np.float32)
    x0 = b if start else None
    x, info = cg(system.matrix, b, x0, tol=1e-5)
    check((np.asarray(x, float) / factor, info), system.x, "converged", rtol=0, atol=1e-4)
    _, info_one = cg(system.matrix, system.b, system.b if start else None, tol=1e-5)
    agree(abs(int(info.iterations) - int(info_one.iterations)) <= 1, f"{info} {info_one}")


@pytest.mark.parametrize("factor", [1e-30, 1e30])
def test_scale_of_the_operator_does_not_matter(factor):
    system = problems.random_spd(dtype=np.float32)
    x, info = cg(system.matrix * np.float32(factor), system.b, tol=1e-5)
    check((np.asarray(x, float) * factor, info), system.x, "converged", rtol=0, atol=1e-4)


@pytest.mark.once
@pytest.mark.parametrize("factor", [1e-30, 1e30])
def test_scale_of_the_preconditioner_does_not_matter(factor):
    """Neither that of the operator together with it: ``<r, M r>`` must not underflow."""
    entries = jnp.logspace(0, 2, 40, dtype=jnp.float32)
    b = jnp.sin(jnp.arange(40, dtype=jnp.float32))
    small = jnp.asarray(1 / factor, jnp.float32)
    for A_scale in (1.0, factor):
        A = entries * jnp.asarray(A_scale, jnp.float32)
        x, info = cg(lambda p, A=A: A * p, b, M=lambda r: small * r, tol=1e-5)
        agree(info.reason_name == "converged", info.message)
        assert_allclose(x * A, b, rtol=0, atol=1e-4)


def test_zero_right_hand_side():
    for x0 in (None, jnp.ones(3)):
        check(cg(jnp.eye(3), jnp.zeros(3), x0), [0, 0, 0], "converged", 0)


def test_exact_start_takes_no_step():
    system = problems.diagonal([1, 2, 4])
    check(cg(system.matrix, system.b, system.x), system.x, "converged", 0)


def test_no_unknowns():
    check(cg(lambda p: p, jnp.zeros(0)), np.zeros(0), "converged", 0)


def test_residual_is_not_preconditioned():
    for factor in (1.0, 1e6, 1e-6):
        M = factor * jnp.eye(2)
        check(cg(jnp.diag(jnp.array([1.0, 10])), jnp.ones(2), M=M), [1, 0.1], "converged", 2)


def test_either_tolerance_is_enough():
    system = problems.random_spd()
    for options in ({"tol": 1e-3}, {"tol": 0, "atol": 1e-3}, {"tol": 1e-3, "atol": 1e-9}):
        x, info = cg(system.matrix, system.b, **options)
        norm = np.linalg.norm(system.b)
        threshold = max(options["tol"] * norm, options.get("atol", 0))
        assert_allclose(info.threshold, threshold)
        residual = np.linalg.norm(system.b - system.matrix @ np.asarray(x))
        agree(residual <= threshold and bool(info.converged), info.message)


def test_default_limit_is_ten_times_the_size():
    _, info = cg(lambda p: p * jnp.logspace(0, 14, 4), jnp.ones(4), tol=0)
    agree(int(info.iterations) == 40 and info.reason_name == "fixed_steps", info.message)


@pytest.mark.once
def test_tree_of_real_and_complex_leaves():
    system = problems.real_and_complex()
    x, info = jax.jit(functools.partial(cg, system.A, tol=1e-12))(system.b)
    agree(bool(info.converged), info.message)
    for leaf in system.x:
        assert_allclose(x[leaf], system.x[leaf], rtol=1e-9)
    agree(x["real"].dtype == np.float64 and x["complex"].dtype == np.complex128)


@pytest.mark.once
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision(dtype):
    x, info = cg(lambda p: p * jnp.asarray([1, 2, 4], dtype), jnp.ones(3, dtype), tol=0.05)
    agree(bool(info.converged) and x.dtype == dtype, info.message)


@pytest.mark.once
def test_kinds_of_operator():
    system = problems.diagonal([1, 2, 3])
    matrix = jnp.asarray(system.matrix)
    for A in (matrix, system.matrix, Product(matrix), functools.partial(jnp.matmul, matrix)):
        check(cg(A, system.b, M=A, tol=1e-12), system.x, "converged", 3, rtol=1e-9)


@pytest.mark.parametrize(("dtype", "jit"), [(np.float64, True), (np.complex128, False)])
def test_samples_spread_over_ranks(dtype, jit):
    system = problems.samples(ranks().size, dtype=dtype)
    S = sr_operator(system)
    solve = functools.partial(cg, S, tol=1e-13)
    x, info = (jax.jit(solve) if jit else solve)(system.b)
    same_everywhere(info)
    check((x, info), np.linalg.solve(system.dense(), system.b), "converged", rtol=1e-10)
    _, serial = cg(system.dense(), system.b, tol=1e-13)
    agree(abs(int(info.iterations) - int(serial.iterations)) <= 2, f"{info} {serial}")


def test_reduction_in_the_operator():
    b = jnp.arange(1.0, 25)
    check(cg(mpi.allreduce, b), b / ranks().size, "converged", 1)
    check(jax.jit(functools.partial(cg, mpi.allreduce))(b), b / ranks().size, "converged", 1)


def test_last_bit_differences_do_not_part_the_ranks():
    system = problems.samples(ranks().size)
    S = sr_operator(system)
    for step in range(8):
        b = system.b.copy()
        if ranks().rank == ranks().size - 1:
            b[step] = np.nextafter(b[step], np.inf)
        x, info = cg(S, b, tol=10.0 ** -(2 + 2 * step), maxiter=60)
        same_everywhere(info)
        assert_allclose(x, np.linalg.solve(system.dense(), b), rtol=0, atol=10.0 ** -(1 + step))


def test_two_runs_are_equal_in_every_bit():
    system = problems.samples(ranks().size)
    first, second = (cg(sr_operator(system), system.b, tol=1e-12) for _ in range(2))
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        agree(np.asarray(a).tobytes() == np.asarray(b).tobytes(), f"{a} {b}")


def test_cost_in_products_and_messages():
    marked = "cosh"  # a function that no solver calls marks the operator in the program's text
    program = str(jax.make_jaxpr(lambda b: cg(lambda p: p + 0 * jnp.cosh(p), b))(jnp.ones(3)))
    # In the loop as often as COST says, and once for the true residual.
    agree(program.count(marked) == COST["matvec"] + 1, program)
    agree(("allreduce" in program) == (ranks().size > 1), program)


def test_messages_of_a_solve():
    system = problems.samples(ranks().size)
    (_, info), made = counted(lambda: cg(sr_operator(system), system.b, tol=1e-10))
    steps, agreements = int(info.iterations), COST["agreements"] if ranks().size > 1 else 0
    # The operator reduces at any size. Beyond the steps: the true residual, and the two norms.
    expected = steps * (COST["matvec"] + agreements) + 1 + 2 * agreements
    agree(made == expected, f"{made} messages in {steps} steps, expected {expected}")


@pytest.mark.once
def test_report_inside_jit():
    seen = []

    @jax.jit
    def solve(b):
        x, info = cg(lambda p: 2 * p, b)
        try:
            seen.append(info.reason_name)
        except TypeError as error:
            seen.append(str(error))
        return x, info.reason == Reason.CONVERGED

    agree(bool(solve(jnp.ones(2))[1]))
    agree("inside jit compare `info.reason`" in seen[0], seen[0])

"""What holds for every solver of systems that need not be definite: one table of problems."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from linalg import problems
from linalg.solves import check, layout, same_everywhere
from spmd import agree, assert_allclose, ranks

from distsolve.linalg import gmres, minres

pytestmark = pytest.mark.few_ranks

N = 16
SOLVERS = {"minres": minres, "gmres": functools.partial(gmres, restart=20)}
periodic, spd = problems.periodic_laplacian(N), problems.random_spd(N)
shifted = spd.matrix - 20 * np.eye(N)
PROBLEMS = {  # matrix, right-hand side, tolerance, reason
    "zero_rhs": (shifted, np.zeros(N), 1e-10, "converged"),
    "indefinite": (shifted, spd.b, 1e-10, "converged"),
    "consistent_singular": (periodic.matrix, periodic.b, 1e-10, "converged"),
    "inconsistent": (periodic.matrix, periodic.b + 1, 1e-10, "stagnated"),
    "zero_operator": (np.zeros((N, N)), spd.b, 1e-10, "stagnated"),
    "below_precision": (shifted, spd.b, 1e-30, "stagnated"),
    "fixed_steps": (shifted, spd.b, 0.0, "fixed_steps"),
    "fixed_steps_singular": (periodic.matrix, periodic.b, 0.0, "fixed_steps"),
}


@pytest.fixture(params=SOLVERS)
def solver(request):
    """Give each solver."""
    return SOLVERS[request.param]


@pytest.mark.parametrize("name", PROBLEMS)
def test_named_problems(solver, name):
    A, b, tol, reason = PROBLEMS[name]
    x, info = solver(A, b, tol=tol, maxiter=200)
    same_everywhere(info)
    want = np.linalg.lstsq(A, b, rcond=None)[0]
    # A singular system leaves the null space open: compare what A makes of it.
    check((A @ np.asarray(x), info), A @ want, reason, rtol=0, atol=1e-8)
    assert_allclose(info.residual_norm, np.linalg.norm(b - A @ np.asarray(x)), atol=1e-13)
    if name == "zero_rhs":
        agree(int(info.iterations) == 0, info.message)


@pytest.mark.once
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("seed", range(4))
def test_inconsistent_systems_of_any_spectrum(solver, seed, dtype):
    """Rounding must not carry x into the null space, however many steps are taken."""
    random = np.random.default_rng(seed)
    Q = np.linalg.qr(random.standard_normal((20, 20)))[0]
    spectrum = np.sort(random.standard_normal(20)) * 10.0 ** random.uniform(-2, 2)
    spectrum = np.abs(spectrum) if seed % 2 else spectrum
    spectrum[: 1 + seed] = 0
    A = ((Q * spectrum) @ Q.T).astype(dtype)
    A, b = (A + A.T) / 2, random.standard_normal(20).astype(dtype)
    rounding = {np.float64: 1e-12, np.float32: 1e-4}[dtype]
    want = np.linalg.lstsq(A.astype(float), b, rcond=rounding)[0]
    least = np.linalg.norm(b - A @ want)
    for steps in (60, 300):
        for tol in (1e-10, 0.0):
            x, info = solver(A, b, tol=tol, maxiter=steps)
            x = np.asarray(x, float)
            found = np.linalg.norm(b - A.astype(float) @ x)
            agree(found <= (1 + rounding) * least, f"{found} {least} {info.message}")
            agree(np.linalg.norm(x) < 1e3 * np.linalg.norm(want), f"{x}")


@pytest.mark.once
@pytest.mark.parametrize("where", ["b", "A"])
def test_scale_does_not_matter(solver, where):
    A, b = shifted.astype(np.float32), spd.b.astype(np.float32)
    want = np.linalg.solve(shifted, spd.b)
    for factor in (np.float32(1e-25), np.float32(1e25)):
        if where == "b":
            x, info = solver(A, b * factor, tol=1e-5, maxiter=200)
            x = np.asarray(x, float) / float(factor)
        else:
            x, info = solver(A * factor, b, tol=1e-5, maxiter=200)
            x = np.asarray(x, float) * float(factor)
        check((x, info), want, "converged", rtol=0, atol=2e-4)


def test_pieces_give_what_the_whole_gives(solver):
    space, mine = layout("uneven", N)
    scale = jnp.asarray(np.linspace(0.5, 2, N)[mine])
    solve = functools.partial(
        solver, b=spd.b[mine], M=lambda p: scale * p, tol=1e-11, maxiter=200, space=space
    )
    x, info = solve(shifted[mine])
    same_everywhere(info)
    check((x, info), np.linalg.solve(shifted, spd.b)[mine], "converged", rtol=0, atol=1e-9)

    bad = shifted.copy()
    bad[-1, -1] = np.nan  # in one piece
    x, info = solve(bad[mine])
    same_everywhere(info)
    agree(info.reason_name == "nonfinite" and int(info.iterations) == 0, info.message)
    agree(bool(jnp.isfinite(x).all()), f"{x}")


def test_nan_on_one_rank_at_the_third_step(solver):
    system = problems.laplacian()
    matrix = jnp.asarray(system.matrix)
    last = ranks().rank == ranks().size - 1

    def A(p):  # a delta spreads by one entry each step, so p[2] is nonzero from the third on
        return jnp.where((p[2] != 0) & last, jnp.nan, matrix @ p)

    x, info = solver(A, system.b)
    same_everywhere(info)
    agree(info.reason_name == "nonfinite" and int(info.iterations) == 2, info.message)
    agree(bool(jnp.isfinite(x).all()) and float(x[0]) > 0, f"{x}")


@pytest.mark.once
def test_start(solver):
    want = np.linalg.solve(shifted, spd.b)
    x, info = solver(shifted, spd.b, want, tol=1e-10, maxiter=200)
    check((x, info), want, "converged")
    agree(int(info.iterations) == 0, info.message)
    check(solver(shifted, spd.b, spd.b, tol=1e-10, maxiter=200), want, "converged", rtol=1e-6)


@pytest.mark.once
def test_tree_of_real_and_complex_leaves(solver):
    system, tol = problems.real_and_complex(), 1e-6
    b = {**system.b, "single": np.float32([1, 2])}
    want = {**system.x, "complex": -system.x["complex"], "single": np.float32([1, -1])}

    def A(p):
        y = system.A(p)
        single = p["single"] * jnp.asarray([1, -2], jnp.float32)
        return {**y, "complex": -y["complex"], "single": single}

    x, info = solver(A, b, tol=tol)
    agree(bool(info.converged), info.message)
    # No eigenvalue is below 1 in size: the error is no larger than the residual.
    for leaf in want:
        assert_allclose(x[leaf], want[leaf], rtol=0, atol=tol * float(info.rhs_norm))
    agree(all(jax.tree.leaves(jax.tree.map(lambda u, v: u.dtype == v.dtype, x, b))), f"{x}")


@pytest.mark.once
@pytest.mark.parametrize("dtype", [np.float64, np.complex128])
def test_derivatives(solver, dtype):
    symmetric = solver is minres
    random = np.random.default_rng(8)

    def draw(*shape):
        entries = random.standard_normal(shape)
        if dtype is np.complex128:
            entries = entries + 1j * random.standard_normal(shape)
        return jnp.asarray(entries)

    A = jnp.asarray(problems.random_spd(6, dtype).matrix - 20 * np.eye(6), dtype)
    A = A if symmetric else A + draw(6, 6)
    dA = draw(6, 6)
    point, move = (A, draw(6)), (dA + dA.conj().T if symmetric else dA, draw(6))
    solve = jax.jit(lambda A, b: solver(A, b, tol=1e-13)[0])
    x, t_x = jax.jvp(solve, point, move)
    assert_allclose(t_x, np.linalg.solve(A, move[1] - move[0] @ x), rtol=1e-8)
    # JAX pairs cotangents without conjugation: A^T u = ct, and the cotangent of A is -u x^T.
    _, pull = jax.vjp(solve, *point)
    cotangent = draw(6)
    ct_A, ct_b = pull(cotangent)
    u = np.linalg.solve(np.asarray(A).T, cotangent)
    assert_allclose(ct_b, u, rtol=1e-8)
    if not symmetric:
        assert_allclose(ct_A, -np.outer(u, x), rtol=1e-8, atol=1e-10)


@pytest.mark.once
def test_a_stack_of_columns_is_one_solve(solver):
    b = np.stack([spd.b, np.roll(spd.b, 1)], axis=1)
    x, info = solver(shifted, b, tol=1e-10, maxiter=200)
    assert_allclose(x, np.linalg.solve(shifted, b), rtol=1e-6)
    agree(bool(info.converged.all()), f"{info}")

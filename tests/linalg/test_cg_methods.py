"""The arrangements of CG with one reduction a step, against the classic one and SciPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse.linalg
from linalg import problems
from linalg.solves import check, counted, layout, same_everywhere
from spmd import agree, assert_allclose, ranks

from distsolve import mpi
from distsolve.linalg import Reason, Sharded, cg
from distsolve.linalg.krylov import cg_pipelined, cg_single_reduction

pytestmark = pytest.mark.few_ranks

METHODS = {"single_reduction": cg_single_reduction.COST, "pipelined": cg_pipelined.COST}
N = 12


@pytest.fixture(params=METHODS)
def method(request):
    """Give each method."""
    return request.param


@functools.cache
def spd(dtype=np.float64, condition=100.0, n=N):
    return problems.random_spd(n, dtype, condition)


# Three unknowns and a given limit throughout: all of these run one compiled program, or two.
def test_known_values(method):
    solve = functools.partial(cg, tol=1e-10, maxiter=9, method=method)
    A, b = jnp.diag(jnp.arange(1.0, 4)), jnp.ones(3)
    for rhs, want, steps in ((b, [1, 1 / 2, 1 / 3], 3), (0 * b, [0, 0, 0], 0)):
        x, info = solve(A, rhs)
        check((x, info), want, "converged")
        agree(int(info.iterations) == steps, info.message)
    x, info = solve(A, b, maxiter=2)
    check((x, info), [0.9, 0.6, 0.3], "maxiter")
    assert_allclose(info.residual_norm / info.rhs_norm, np.sqrt(0.02))
    x, info = solve(jnp.diag(jnp.array([1.0, -1, 1])), jnp.array([1.0, 2, 0]))
    check((x, info), [0, 0, 0], "indefinite_operator")
    agree(int(info.iterations) == 0 and "-3" in info.message, info.message)
    x, info = solve(jnp.diag(jnp.array([4.0, 1, -0.1])), jnp.array([1.0, 1, 0.1]))
    agree(info.reason_name == "indefinite_operator" and int(info.iterations) > 0, info.message)
    agree(bool(jnp.isfinite(x).all()), f"{x}")


@pytest.mark.once
def test_an_indefinite_operator_is_seen(method):
    random, count, n = np.random.default_rng(6), 60, 8
    basis, _ = np.linalg.qr(random.standard_normal((count, n, n)))
    values = 10 ** random.uniform(-3, 0, (count, n))
    values[:, 0] *= -(10 ** -random.uniform(0, 2, count))  # one of many, mostly small
    values[: count // 2, :6] *= -1  # or most, so that the first product tells
    A = np.einsum("kij,kj,klj->kil", basis, values, basis)
    b = random.standard_normal((count, n))

    @jax.vmap
    def solve(A, b, scale):  # M brings back a scale that leaves no room for squares
        return cg(A, b, M=lambda r: scale * r, tol=1e-6, maxiter=200, method=method)

    for factor in (1.0, 1e25, 1e-15):
        scale = jnp.full(count, 1 / factor, jnp.float32)
        x, info = solve(jnp.float32(A * factor), jnp.float32(b / factor), scale)
        agree(bool((info.reason == Reason.INDEFINITE_OPERATOR).all()), f"{info.reason}")
        agree(bool(jnp.isfinite(x).all()), f"{x}")


def test_preconditioner(method):
    solve = functools.partial(cg, tol=1e-10, maxiter=9, method=method)
    A, b = jnp.diag(jnp.array([1.0, 10, 10])), jnp.ones(3)
    for factor in (1e6, 1e-6):
        x, info = solve(A, b, M=factor * jnp.eye(3))
        check((x, info), [1, 0.1, 0.1], "converged")
        agree(int(info.iterations) == 2, info.message)
    x, info = solve(jnp.eye(3), jnp.array([1.0, 2, 0]), M=-jnp.eye(3))
    check((x, info), [0, 0, 0], "indefinite_preconditioner")
    agree(int(info.iterations) == 0 and "-5" in info.message, info.message)


@pytest.mark.once
def test_exact_start_takes_no_step(method):
    want = 1 / np.arange(1.0, 4)
    x, info = cg(jnp.diag(jnp.arange(1.0, 4)), jnp.ones(3), want, method=method)
    check((x, info), want, "converged")
    agree(int(info.iterations) == 0, info.message)


@pytest.mark.parametrize(
    ("where", "dtype", "start", "preconditioned"),
    [
        ("empty", np.float64, False, False),
        ("uneven", np.complex128, True, True),
        pytest.param("replicated", np.float64, False, True, marks=pytest.mark.once),
        pytest.param("replicated", np.complex128, True, False, marks=pytest.mark.once),
    ],
)
def test_trajectory_is_that_of_scipy(method, where, dtype, start, preconditioned):
    A, b = spd(dtype)
    space, mine = layout(where, N)
    x0 = np.linspace(-1, 1, N).astype(dtype) if start else None
    scale = 1 / np.diag(A)
    M = np.diag(scale) if preconditioned else None

    @jax.jit
    def solve(k):
        options = {"tol": 0, "maxiter": k, "space": space, "method": method}
        if preconditioned:
            options["M"] = lambda p: jnp.asarray(scale[mine]) * p
        return cg(A[mine], b[mine], x0[mine] if start else None, **options)

    for k in (1, 3, 9):
        want, _ = scipy.sparse.linalg.cg(A, b, x0, rtol=0, maxiter=k, M=M)
        x, info = solve(k)
        same_everywhere(info)
        check((x, info), want[mine], "fixed_steps", rtol=1e-10 if k < 9 else 1e-7)
        assert_allclose(info.residual_norm, np.linalg.norm(b - A @ want), rtol=1e-6)


@pytest.mark.once
def test_accuracy_is_that_of_the_classic_method(method):
    @functools.partial(jax.jit, static_argnames="method")
    def solve(A, b, tol, method="classic"):
        return cg(A, b, tol=tol, maxiter=2000, method=method)

    # How many more steps rounding costs at 1e6 depends on the order of each sum: 1.5 times as many
    # have been seen for the pipelined method.
    for condition, more in ((1e4, 1.3), (1e6, 2.0)):
        A, b = spd(condition=condition, n=30)
        for tol in (1e-6, 1e-9):
            _, classic = solve(A, b, tol)
            x, info = solve(A, b, tol, method=method)
            agree(info.reason_name == classic.reason_name == "converged", info.message)
            residual = np.linalg.norm(b - A @ np.asarray(x))
            agree(residual <= 1.001 * tol * np.linalg.norm(b), info.message)
            steps = int(classic.iterations)
            agree(int(info.iterations) <= more * steps + 3, f"{info} {classic}")
            assert_allclose(info.condition_estimate, condition, rtol=0.15)


@pytest.mark.once
def test_scale_does_not_matter(method):
    A, b = spd(np.float32)
    want = spd().x
    for factor in (1e-25, 1.0, 1e25):
        x, info = cg(A, (b * np.float32(factor)).astype(np.float32), method=method)
        check((np.asarray(x, float) / factor, info), want, "converged", rtol=0, atol=1e-4)
    for factor in (np.float32(1e-30), np.float32(1e30)):
        for M in (None, np.eye(N, dtype=np.float32) / factor):
            x, info = cg(A * factor, b, M=M, method=method)
            found = np.asarray(x, float) * float(factor)
            check((found, info), want, "converged", rtol=0, atol=1e-4)
        # XLA multiplies a single unknown's factors in an order of its own.
        x, info = cg(jnp.full((1, 1), factor), jnp.ones(1, np.float32), tol=0, method=method)
        agree(info.reason_name == "fixed_steps", info.message)
        assert_allclose(x * factor, [1.0], rtol=1e-6)


@pytest.mark.once
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_below_the_precision(method, dtype):
    A, b = spd(dtype)
    x, info = cg(A, b, tol=1e-30, method=method)
    check((x, info), spd().x, "stagnated", rtol=0, atol=2e3 * np.finfo(dtype).eps)


@pytest.mark.once
@pytest.mark.parametrize("n", [16, 32])
def test_many_fixed_steps_do_no_harm(method, n):
    A, b = problems.periodic_laplacian(n)
    x, info = cg(A, b, tol=0, maxiter=500, method=method)
    agree(info.reason_name == "fixed_steps" and int(info.iterations) == 500, info.message)
    assert_allclose(A @ np.asarray(x), b, rtol=0, atol=1e-10)
    assert_allclose(np.mean(x), 0, atol=1e-8)


def test_pieces(method):
    b = spd().b
    space, mine = layout("empty", N)

    def solve(diagonal):
        pieces = jnp.asarray(diagonal[mine])
        return cg(lambda p: pieces * p, b[mine], tol=1e-8, space=space, method=method)

    (x, info), made = counted(solve, np.arange(1.0, N + 1))
    check((x, info), (b / np.arange(1.0, N + 1))[mine], "converged", rtol=0, atol=1e-7)
    expected = int(info.iterations) + 3 if ranks().size > 1 else 0
    agree(made == expected == int(info.reductions), f"{made} messages, {info}")

    x, info = solve(np.append(np.arange(1.0, N), np.nan))  # in one piece
    same_everywhere(info)
    agree(info.reason_name == "nonfinite" and int(info.iterations) == 0, info.message)
    assert_allclose(x, np.zeros(len(x)))


@pytest.mark.once
def test_cost_in_products(method):
    marked = "cosh"  # a function that no solver calls marks the operator in the program's text
    program = jax.make_jaxpr(lambda b: cg(lambda p: p + 0 * jnp.cosh(p), b, method=method))
    text = str(program(jnp.ones(3)))
    # In the loop as often as COST says, at the start of a cycle, for the true residual, and for the
    # vectors that are replaced now and then.
    start, now_and_then = {"single_reduction": (1, 0), "pipelined": (2, 2)}[method]
    agree(text.count(marked) == METHODS[method]["matvec"] + start + 1 + now_and_then, text)


def test_nan_on_one_rank_at_the_third_step(method):
    A, b = problems.laplacian()
    matrix = jnp.asarray(A)
    last = ranks().rank == ranks().size - 1

    def product(p):  # a delta spreads by one entry each step, so p[2] is nonzero from the third on
        return jnp.where((p[2] != 0) & last, jnp.nan, matrix @ p)

    x, info = cg(product, b, method=method)
    same_everywhere(info)
    agree(info.reason_name == "nonfinite" and int(info.iterations) <= 2, info.message)
    want, _ = scipy.sparse.linalg.cg(A, b, rtol=0, maxiter=int(info.iterations))
    assert_allclose(x, want, atol=1e-14)


def test_reduction_in_the_operator(method):
    system = problems.samples(ranks().size)
    rows = jnp.asarray(system.pieces[ranks().rank])

    def S(v):
        return mpi.allreduce((rows @ v) @ rows) / system.total + system.shift * v

    x, info = cg(S, system.b, tol=1e-12, method=method)
    same_everywhere(info)
    check((x, info), np.linalg.solve(system.dense(), system.b), "converged", rtol=1e-9)
    agree(int(info.iterations) <= N + 3, info.message)


def test_stack_shares_one_loop(method):
    b = spd().b
    space, mine = layout("uneven", N)
    B = np.stack([b, 2 * b[::-1], np.zeros(N)], axis=1)
    diagonal = np.linspace(1, 20, N)
    operator = jnp.asarray(diagonal[mine])
    solve = functools.partial(
        cg, lambda p: operator * p, tol=1e-10, space=space, method=method, maxiter=60
    )
    (x, info), made = counted(jax.vmap(solve, in_axes=1, out_axes=(1, 0)), jnp.asarray(B[mine]))
    assert_allclose(x, (B / diagonal[:, None])[mine], rtol=0, atol=1e-9)
    agree(bool(info.converged.all()), f"{info}")
    steps = int(info.iterations.max())
    agree(made <= steps + 3, f"{made} messages in {steps} steps")


@pytest.mark.once
def test_tree_of_real_and_complex_leaves(method):
    system = problems.real_and_complex()
    M = functools.partial(jax.tree.map, lambda leaf: 3 * leaf)
    x, info = cg(system.A, system.b, tol=1e-12, M=M, method=method)
    agree(bool(info.converged), info.message)
    for leaf in system.x:
        assert_allclose(x[leaf], system.x[leaf], rtol=1e-9)


@pytest.mark.once
def test_derivative(method):
    A, b = spd()

    def value(b, shift):
        solution, _ = cg(lambda p: A @ p + shift * p, b, tol=1e-13, method=method)
        return jnp.sum(solution**2)

    found = jax.grad(value, argnums=(0, 1))(jnp.asarray(b), jnp.asarray(0.5))
    inverse = np.linalg.inv(A + 0.5 * np.eye(N))
    x = inverse @ b
    assert_allclose(found[0], 2 * inverse @ x, rtol=1e-8)
    assert_allclose(found[1], -2 * x @ inverse @ x, rtol=1e-8)


def test_pipelined_reduces_while_it_multiplies():
    A, b = spd()
    space, mine = layout("uneven", N)
    solve = jax.jit(lambda b: cg(A[mine], b, space=space, method="pipelined")[0])
    text = solve.lower(b[mine]).as_text()
    agree(("iallreduce" in text) == (ranks().size > 1 and isinstance(space, Sharded)), text)

"""Derivatives of a solve: against elimination, which JAX differentiates by itself."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from linalg import problems
from spmd import agree, assert_allclose, ranks

from distsolve import mpi
from distsolve.linalg import cg

pytestmark = pytest.mark.few_ranks

solve = functools.partial(cg, tol=1e-13)


def sr_solution(rows, shift, b, total):
    """Solve with S from this rank's rows; one allreduce in each product."""

    def S(v):
        return mpi.allreduce(((rows @ v).conj() @ rows).conj()) / total + shift * v

    return solve(S, b)[0]


def dense_solution(pieces, shift, b, total):
    """The same by elimination, from all rows."""
    rows = jnp.concatenate(pieces)
    S = rows.conj().T @ rows / total + shift * jnp.eye(len(b), dtype=b.dtype)
    return jnp.linalg.solve(S, b)


def weigh(x):
    weights = jnp.linspace(1.0, 2.0, len(x)).astype(x.dtype)
    return jnp.vdot(weights * (1j if jnp.iscomplexobj(x) else 1), x).real + jnp.sum(abs(x) ** 2)


@pytest.mark.parametrize(("dtype", "jit"), [(np.float64, False), (np.complex128, True)])
def test_gradient_over_ranks(dtype, jit):
    system = problems.samples(ranks().size, dtype=dtype)
    pieces = [jnp.asarray(rows) for rows in system.pieces]
    b, shift = jnp.asarray(system.b), jnp.asarray(0.1, dtype)
    ours = jax.grad(lambda *a: weigh(sr_solution(*a, system.total)), (0, 1, 2))
    if jit:
        ours = jax.jit(ours)
    dense = jax.jit(jax.grad(lambda *a: weigh(dense_solution(*a, system.total)), (0, 1, 2)))
    d_rows, d_shift, d_b = ours(pieces[ranks().rank], shift, b)
    want_rows, want_shift, want_b = dense(pieces, shift, b)
    # The rows belong to a rank, shift and b to all: each rank gets the whole of each.
    assert_allclose(d_rows, want_rows[ranks().rank], rtol=1e-8, atol=1e-10)
    assert_allclose(d_shift, want_shift, rtol=1e-8)
    assert_allclose(d_b, want_b, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("dtype", [np.float64, np.complex128])
def test_forward_derivative_over_ranks(dtype):
    system = problems.samples(ranks().size, dtype=dtype)
    pieces = [jnp.asarray(rows) for rows in system.pieces]
    b, shift = jnp.asarray(system.b), jnp.asarray(0.1, dtype)
    t_pieces, t_shift, t_b = [jnp.cos(rows) for rows in pieces], jnp.ones_like(shift), jnp.sin(b)
    mine = ranks().rank
    _, t_x = jax.jit(
        lambda primals, tangents: jax.jvp(
            lambda *a: sr_solution(*a, system.total), primals, tangents
        )
    )((pieces[mine], shift, b), (t_pieces[mine], t_shift, t_b))
    _, want = jax.jvp(
        lambda *a: dense_solution(*a, system.total), (pieces, shift, b), (t_pieces, t_shift, t_b)
    )
    assert_allclose(t_x, want, rtol=1e-9, atol=1e-11)


def test_reduction_in_the_operator_under_grad():
    b = jnp.arange(1.0, 25)
    for transform in (lambda f: f, jax.jit):
        grad = transform(jax.grad(lambda b: jnp.sum(cg(mpi.allreduce, b)[0] ** 2)))
        assert_allclose(grad(b), 2 * b / ranks().size ** 2)


def second_order(f, point, direction):
    """Return the derivative along ``direction`` of the gradient of ``f``, by both modes."""
    grad = jax.grad(f, (0, 1))

    def forward(*point):
        return jax.jvp(grad, point, direction)[1]

    def reverse(*point):
        def slope(*point):
            pairs = zip(grad(*point), direction, strict=True)
            flat = [jax.tree.leaves(pair) for pair in pairs]
            return sum(
                jnp.sum(u * v).real
                for leaves in flat
                for u, v in zip(leaves[: len(leaves) // 2], leaves[len(leaves) // 2 :], strict=True)
            )

        return jax.grad(slope, (0, 1))(*point)

    return jax.jit(forward)(*point), jax.jit(reverse)(*point)


@pytest.mark.once
@pytest.mark.watchdog(180)
@pytest.mark.parametrize("dtype", [np.float64, np.complex128])
def test_second_derivatives(dtype):
    system = problems.random_spd(5, dtype, condition=10)
    point = jnp.asarray(np.linalg.cholesky(system.matrix)), jnp.asarray(system.b)

    def ours(root, b):
        return weigh(solve(lambda v: root @ (root.conj().T @ v), b)[0])

    def dense(root, b):
        return weigh(jnp.linalg.solve(root @ root.conj().T, b))

    direction = jnp.cos(point[0]), jnp.sin(point[1])
    found, want = (second_order(f, point, direction) for f in (ours, dense))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        assert_allclose(a, b, rtol=1e-7, atol=1e-8)


@pytest.mark.once
@pytest.mark.watchdog(180)
def test_tree_of_real_and_complex_leaves():
    """An operator that is symmetric over Re <x, y> and not linear over the complex numbers."""
    real, complex_ = problems.random_spd(3, seed=4), problems.random_spd(2, np.complex128, seed=5)
    coupling = jnp.asarray(np.random.default_rng(6).standard_normal((3, 2)))
    b = {"r": jnp.asarray(real.b), "c": jnp.asarray(complex_.b)}

    def A(coupling, p):
        imaginary = p["r"] @ coupling
        return {
            "r": jnp.asarray(real.matrix) @ p["r"] * 9 + coupling @ p["c"].imag,
            "c": jnp.asarray(complex_.matrix) @ p["c"] * 9
            + jax.lax.complex(jnp.zeros_like(imaginary), imaginary),
        }

    def pack(p):
        return jnp.concatenate([p["r"], p["c"].real, p["c"].imag])

    def unpack(v):
        return {"r": v[:3], "c": jax.lax.complex(v[3:5], v[5:])}

    def ours(coupling, b):
        return weigh(pack(solve(lambda p: A(coupling, p), b)[0]))

    def dense(coupling, b):
        matrix = jax.vmap(lambda v: pack(A(coupling, unpack(v))))(jnp.eye(7))
        return weigh(jnp.linalg.solve(matrix.T, pack(b)))

    found, want = (jax.jit(jax.grad(f, (0, 1)))(coupling, b) for f in (ours, dense))
    for a, b_ in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        assert_allclose(a, b_, rtol=1e-9, atol=1e-10)
    direction = jnp.cos(coupling), jax.tree.map(jnp.sin, b)
    found, want = (second_order(f, (coupling, b), direction) for f in (ours, dense))
    for a, b_ in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        assert_allclose(a, b_, rtol=1e-7, atol=1e-8)


@pytest.mark.once
def test_start_and_preconditioner_do_not_count():
    system = problems.random_spd(6)
    matrix, b = jnp.asarray(system.matrix), jnp.asarray(system.b)

    def f(x0, diagonal):
        return weigh(solve(matrix, b, x0, M=lambda r: r / diagonal)[0])

    x0, diagonal = jnp.ones(6), jnp.diag(matrix)
    for found in jax.grad(f, (0, 1))(x0, diagonal):
        assert_allclose(found, np.zeros(6))
    want = jax.grad(lambda b: weigh(jnp.linalg.solve(matrix, b)))(b)
    warm = jax.grad(lambda b: weigh(solve(matrix, b, jnp.ones(6), M=jnp.eye(6))[0]))(b)
    assert_allclose(warm, want, rtol=1e-9)


def test_steps_of_a_derivative():
    """The product's derivative is left out where the operator does not move."""
    system = problems.random_spd(6)
    matrix = jnp.asarray(system.matrix)

    def products(f, *args):
        return str(jax.make_jaxpr(f)(*args)).count("cosh")

    def x(b, scale):
        return cg(lambda v: scale * (matrix @ v) + 0 * jnp.cosh(v), b)[0]

    b, one = jnp.asarray(system.b), jnp.asarray(1.0)
    once = products(x, b, one)
    moved = products(lambda b, s: jax.jvp(x, (b, s), (b, s)), b, one)
    still = products(lambda b: jax.jvp(lambda b: x(b, one), (b,), (b,)), b)
    agree(once < still < moved, f"{once} {still} {moved}")


def test_batch():
    system = problems.samples(ranks().size)
    rows = jnp.asarray(system.pieces[ranks().rank])
    b = jnp.asarray(np.random.default_rng(7).standard_normal((4, 12)))

    def S(v):
        return mpi.allreduce((rows @ v) @ rows) / system.total + system.shift * v

    x, info = jax.jit(jax.vmap(lambda b: solve(S, b)))(b)
    assert_allclose(x, np.linalg.solve(system.dense(), b.T).T, rtol=1e-9)
    agree(bool(info.converged.all()))
    with pytest.raises(TypeError, match="take one of them first"):
        info.message  # noqa: B018
    first = jax.tree.map(lambda leaf: leaf[0], info)
    agree(first.reason_name == "converged", first.message)

"""The SR matrix on ranks with uneven and empty parts, against a dense one; messages counted."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from linalg.solves import messages
from spmd import agree, assert_allclose, ranks

from distsolve import Gram, GramOnTheFly, Sharded, center, cg, jacobian

COUNTS = [7, 0, 4]
SHIFT, DIAG_SCALE = 0.1, 0.2
P = 8


def real_model(p, x):
    return jnp.sum(jnp.tanh(p["a"] @ x + p["b"]))


def complex_model(p, x):
    y = jnp.tanh(p["a"] @ x + p["b"])
    return jax.lax.complex(jnp.sum(y), jnp.sum(y**2 * p["b"]))


def holomorphic_model(p, x):
    return jnp.sum(jnp.log(jnp.cosh(p["a"] @ x.astype(p["a"].dtype))) + p["b"] ** 2)


MODELS = {"real": real_model, "complex": complex_model, "holomorphic": holomorphic_model}


@functools.cache
def case(mode):
    """Return the operators of both forms here, the matrix, and two vectors."""
    weighted = mode != "real"
    size, rank = ranks().size, ranks().rank
    random = np.random.default_rng(4)
    start, N = sum(COUNTS[:rank]), sum(COUNTS[:size])
    mine = slice(start, start + COUNTS[rank])
    samples, weights = random.standard_normal((N, 3)), random.uniform(0.5, 2, N)

    def draw(*shape):
        values = random.standard_normal(shape)
        return values + 1j * random.standard_normal(shape) if mode == "holomorphic" else values

    params = {"a": jnp.asarray(draw(2, 3)), "b": jnp.asarray(draw(2))}
    V = draw(2, P)
    whole = np.asarray(jacobian(MODELS[mode], params, jnp.asarray(samples), mode=mode))
    own = jnp.asarray(weights[mine]) if weighted else None
    weights = weights if weighted else np.ones(N)
    whole = whole - weights @ whole / weights.sum()
    C = whole.conj().T @ (weights[:, None] * whole) / weights.sum()
    C = C.real if mode == "complex" else C
    S = C + SHIFT * np.eye(P) + DIAG_SCALE * np.diag(np.diag(C))
    x = jnp.asarray(samples[mine])

    @jax.jit
    def operators(params, x, own):
        J = center(jacobian(MODELS[mode], params, x, mode=mode), own)
        both = {"shift": SHIFT, "diag_scale": DIAG_SCALE, "weights": own}
        return {
            "stored": Gram(J, **both),
            "on the fly": GramOnTheFly(MODELS[mode], params, x, mode=mode, chunk_size=3, **both),
        }

    return operators(params, x, own), S, V


product = jax.jit(lambda S, V, extra: S.product(V, extra))
parts = jax.jit(lambda S, v: (S.diag(), S.dense(v.dtype)))


@pytest.mark.parametrize("form", ["stored", "on the fly"])
@pytest.mark.parametrize("mode", MODELS)
def test_product_is_the_dense_one_and_one_message(mode, form):
    operators, S, V = case(mode)
    operator = operators[form]
    extra = jnp.asarray([1.0, ranks().rank])
    (SV, quadratic, total), sent = messages(product, operator, jnp.asarray(V), extra)
    assert_allclose(SV, V @ S.T, rtol=1e-12, atol=1e-12)
    assert_allclose(quadratic, np.einsum("ci,ij,cj->c", V.conj(), S, V).real, rtol=1e-12)
    size = ranks().size
    assert_allclose(total, [size, size * (size - 1) / 2])
    agree(sent == (size > 1), f"{sent} messages")


@pytest.mark.parametrize("form", ["stored", "on the fly"])
@pytest.mark.parametrize("mode", MODELS)
def test_diagonal_and_matrix(mode, form):
    operators, S, V = case(mode)
    diagonal, dense = parts(operators[form], jnp.asarray(V[0]))
    assert_allclose(diagonal, np.diag(S).real, rtol=1e-12)
    assert_allclose(dense, S, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("form", ["stored", "on the fly"])
def test_vectors_may_be_trees(form):
    operators, S, V = case("complex")
    v = jnp.asarray(V[0])
    tree = {"a": v[:6].reshape(2, 3), "b": v[6:]}
    want = S @ V[0]
    flat, found = jax.jit(lambda S, v, tree: (S @ v, S(tree)))(operators[form], v, tree)
    assert_allclose(flat, want, rtol=1e-12, atol=1e-12)
    assert_allclose(found["a"], want[:6].reshape(2, 3), rtol=1e-12, atol=1e-12)
    assert_allclose(found["b"], want[6:], rtol=1e-12, atol=1e-12)


def test_new_data_compiles_nothing():
    rows = jnp.ones((COUNTS[ranks().rank], 3))
    compiled = jax.jit(lambda S, v: S @ v)
    for shift in [0.5, np.float32(1.0), jnp.asarray(2.0)]:
        compiled(Gram(rows, shift), jnp.ones(3))
    agree(compiled._cache_size() == 1, f"{compiled._cache_size()} programs")


def test_diagonal_costs_one_message_at_construction():
    rows = jnp.asarray(np.random.default_rng(ranks().rank).standard_normal((4, 3)))
    _, free = messages(lambda: Gram(rows, 0.1))
    _, scaled = messages(lambda: Gram(rows, 0.1, 0.5))
    agree(free == 0 and scaled == (ranks().size > 1), f"{free} and {scaled} messages")


def test_no_samples_at_all():
    S = Gram(jnp.zeros((0, 3)), jnp.asarray([1.0, 2.0, 3.0]))
    assert_allclose(S @ jnp.ones(3), [1.0, 2.0, 3.0])


def test_a_large_mean_does_not_cancel():
    x = np.random.default_rng(9).standard_normal((20, 3))
    whole = x + 1e6
    mine = np.array_split(whole, ranks().size)[ranks().rank]
    exact = x - x.mean(0)
    v = np.array([1.0, -1.0, 0.5])
    product = jax.jit(lambda x, v: GramOnTheFly(jnp.vdot, jnp.ones(3), x) @ v)
    found = product(jnp.asarray(mine), jnp.asarray(v))
    assert_allclose(found, exact.T @ (exact @ v) / 20, rtol=1e-8)


def test_derivatives():
    """Forward in J and v; in reverse S is its own transpose, on every rank."""
    operators, S, V = case("complex")
    stored, v, t = operators["stored"], *map(jnp.asarray, V)

    @jax.jit
    def tangent_and_cotangent(stored, v, t):
        J, treedef = stored.J, jax.tree.structure(stored)

        def scaled(scale, v):
            leaves = [scale.astype(J.dtype) * J, *jax.tree.leaves(stored)[1:]]
            return jax.tree.unflatten(treedef, leaves) @ v

        one = jnp.ones(())
        _, tangent = jax.jvp(scaled, (one, v), (one, t))
        return tangent, jax.vjp(lambda v: stored @ v, v)[1](t)[0]

    # The damping that is stored does not move with J.
    tangent, cotangent = tangent_and_cotangent(stored, v, t)
    damping = SHIFT + DIAG_SCALE * np.asarray(stored.diagonal)
    want = S @ V[1] + 2 * (S - np.diag(damping)) @ V[0]
    assert_allclose(tangent, want, rtol=1e-11, atol=1e-12)
    assert_allclose(cotangent, S @ V[1], rtol=1e-11, atol=1e-12)


def test_wrong_arguments():
    J = jnp.ones((4, 3))
    with pytest.raises(TypeError, match=r"`J` must have shape \(n, P\).*got float64 of shape \(3,"):
        Gram(J[:3, 0])
    with pytest.raises(TypeError, match=r"`J`.*got int32"):
        Gram(J.astype(jnp.int32))
    with pytest.raises(ValueError, match=r"`shift` must be real, of shape \(\) or \(3,\)"):
        Gram(J, jnp.ones(2))
    for pytree in ({"w": J}, {"w": J, "b": J[:, 0]}, [J[:, 0], J[:, 1]], {}):
        with pytest.raises(TypeError, match=r"`J` must be one array.*distsolve\.jacobian\("):
            Gram(pytree)
    with pytest.raises(TypeError, match=r"`rows`.*Did you mean Sharded\(\)\?"):
        Gram(J, rows=Sharded)
    with pytest.raises(ValueError, match=r"`weights`.*got float32 of shape \(4,\)"):
        Gram(J, weights=jnp.ones(4, jnp.float32))
    with pytest.raises(TypeError, match=r"dtype float64, .* got float32\. Convert it to float64"):
        Gram(J) @ jnp.ones(3, jnp.float32)
    with pytest.raises(ValueError, match="as many entries as there are parameters, 3: got 4"):
        Gram(J) @ jnp.ones(4)
    with pytest.raises(ValueError, match=r"`b` must have as many .* 3: got 4\..*J\^H e / N"):
        cg(Gram(J), jnp.ones(4))
    with pytest.raises(TypeError, match=r"`b`.*float64.*got complex128\..* the real part of `b`"):
        cg(Gram(J), jnp.ones(3, complex))
    with pytest.raises(TypeError, match="leaves of one dtype"):
        Gram(J) @ [jnp.ones(2), jnp.ones(1, jnp.float32)]

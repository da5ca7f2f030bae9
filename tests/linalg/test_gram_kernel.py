"""The product that reads J once, against NumPy: every instruction set, dtype and awkward size."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from distsolve.linalg import gram_product as gram
from distsolve.linalg.native import gram as native

pytestmark = pytest.mark.once

DTYPES = [np.dtype(name) for name in gram.DTYPES]
BEST = 2


@pytest.fixture(params=["baseline", "avx2", "avx512"])
def instructions(request):
    """Limit the handler to an instruction set; skip one that this machine does not have."""
    level = ["baseline", "avx2", "avx512"].index(request.param)
    if native.limit_instructions(level) != level:
        native.limit_instructions(BEST)
        pytest.skip(f"this machine has no {request.param}")
    yield
    native.limit_instructions(BEST)


def numbers(random, shape, dtype):
    values = random.standard_normal(shape)
    if dtype.kind == "c":
        values = values + 1j * random.standard_normal(shape)
    return values.astype(dtype)


def problem(n, P, k, dtype, real_vectors=False, weighted=False):
    """Return J, V, tail and weights."""
    random = np.random.default_rng(n + 7 * P + 31 * k)
    real = np.finfo(dtype).dtype
    J = numbers(random, (n, P), dtype)
    V = numbers(random, (k, P), real if real_vectors else dtype)
    weights = random.uniform(0.1, 2, n).astype(real) if weighted else None
    return J, V, random.standard_normal(2).astype(real), weights


def oracle(J, V, tail, weights):
    """Return U, the squared norms and the tail, in double precision."""
    wide = np.complex128 if J.dtype.kind == "c" else np.float64
    J, W = J.astype(wide), V.astype(wide) @ J.astype(wide).T
    weights = np.ones(len(J)) if weights is None else weights.astype(float)
    U = (W * weights) @ J.conj()
    return U if V.dtype.kind == "c" else U.real, (abs(W) ** 2) @ weights, tail


def check(packed, J, V, tail, weights):
    want = oracle(J, V, tail, weights)
    rtol = 1e-12 if np.finfo(J.dtype).bits == 64 else 2e-4
    found = gram.unpack(packed, len(V), J.shape[1], V.dtype)
    assert found[0].dtype == V.dtype
    for got, wanted in zip(found, want, strict=True):
        scale = np.abs(wanted).max(initial=0)
        np.testing.assert_allclose(got, wanted, rtol=0, atol=rtol * scale)


@functools.cache
def compiled(function):
    return jax.jit(function)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [0, 9])
@pytest.mark.parametrize(("P", "k"), [(1, 1), (7, 2), (40, 3), (100, 1)])
def test_numpy(instructions, dtype, n, P, k):
    weighted = n == 9
    for real_vectors in [False, True][: 1 + (dtype.kind == "c")]:
        J, V, tail, weights = problem(n, P, k, dtype, real_vectors, weighted)
        check(compiled(gram.gram_product)(J, V, tail, weights), J, V, tail, weights)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_plain_operations(dtype):
    for k, n in [(1, 3), (2, 3), (1, 0)]:
        for real_vectors in [False, True][: 1 + (dtype.kind == "c")]:
            J, V, tail, weights = problem(n, 7, k, dtype, real_vectors, weighted=True)
            check(compiled(gram.plain)(J, V, weights, tail), J, V, tail, weights)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_backward_takes_the_last_rows_first(instructions, dtype):
    """Blocks of four rows in turn: the bits are those of the blocks in the other order."""
    J, V, tail, weights = problem(40, 33, 2, dtype, weighted=True)
    turned = J.reshape(10, 4, 33)[::-1].reshape(40, 33)
    weights_turned = weights.reshape(10, 4)[::-1].ravel()
    forward, backward = (
        np.asarray(compiled(gram.gram_product)(*operands))
        for operands in [(turned, V, tail, weights_turned), (J, V, tail, weights, True)]
    )
    np.testing.assert_array_equal(forward, backward)
    assert (np.asarray(compiled(gram.gram_product)(J, V, tail, weights)) != backward).any()
    J, V, tail, weights = problem(9, 33, 1, dtype, weighted=True)
    check(compiled(gram.gram_product)(J, V, tail, weights, True), J, V, tail, weights)


def test_eager_and_without_copies():
    args = [None if x is None else jnp.asarray(x) for x in problem(5, 6, 1, DTYPES[1])]
    check(gram.gram_product(*args), *map(np.asarray, args[:3]), None)
    lowered = jax.jit(gram.gram_product).lower(*args)
    assert lowered.compile().as_text().count("custom-call(") == 1
    assert lowered.compile().memory_analysis().temp_size_in_bytes < 200


def test_derivatives():
    J, V, tail, weights = map(jnp.asarray, problem(3, 2, 2, DTYPES[3], weighted=True))

    @jax.jit
    def value(*args):
        return jnp.sum(jnp.sin(gram.gram_product(*args)))

    check_grads(value, (0.3 * J, 0.3 * V, tail, weights), order=1)


def test_many_vectors_are_one_call():
    J, V, tail, _ = problem(5, 4, 6, DTYPES[3])
    stack = jnp.asarray(V.reshape(3, 2, 4).transpose(1, 0, 2))
    text = jax.jit(jax.vmap(gram.gram_product, in_axes=(None, 1, None))).lower(J, stack, tail)
    assert text.as_text().count("@distsolve_gram_product(") == 1
    found = jax.vmap(gram.gram_product, in_axes=(None, 1, None))(J, stack, tail)
    for packed, v in zip(found, V.reshape(3, 2, 4), strict=True):
        check(packed, J, v, tail, None)


def test_many_matrices():
    J, V, tail, _ = problem(6, 4, 1, DTYPES[1])
    stack = J.reshape(2, 3, 4)
    tails = np.stack([tail, 2 * tail])
    found = jax.vmap(gram.gram_product, in_axes=(0, None, 0))(stack, V, tails)
    for packed, rows, t in zip(found, stack, tails, strict=True):
        check(packed, rows, V, t, None)


def test_wrong_arguments():
    J, V, tail, _ = problem(3, 4, 1, DTYPES[1])
    with pytest.raises(TypeError, match=r"dtype of `J`, float64.*got float32"):
        gram.gram_product(J, V.astype(np.float32), tail)
    with pytest.raises(ValueError, match=r"shape \(k, 4\), got \(1, 3\)"):
        gram.gram_product(J, V[:, :3], tail)
    with pytest.raises(ValueError, match=r"`weights` must be float64 of shape \(3,\)"):
        gram.gram_product(J, V, tail, np.ones(2))


def test_other_platforms_multiply_at_full_precision():
    args = problem(4, 3, 2, DTYPES[0])[:3]
    text = jax.jit(gram.gram_product).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert "distsolve" not in text
    assert text.count("dot_general") == text.count("HIGHEST, HIGHEST") == 2
    assert "transpose" not in text

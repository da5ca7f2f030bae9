"""Vector algebra on one rank, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from distsolve.linalg import trees

pytestmark = pytest.mark.once


def vector(seed):
    random = np.random.default_rng(seed)
    return {
        "r": jnp.asarray(random.standard_normal((3, 2))),
        "c": jnp.asarray(random.standard_normal(4) + 1j * random.standard_normal(4)),
    }


def flat(tree):
    return np.concatenate([np.ravel(part) for part in trees.real_parts(tree)])


def test_inner_product_is_real_and_conjugates_its_first_argument():
    x, y = vector(0), vector(1)
    want = np.vdot(x["c"], y["c"]).real + np.vdot(x["r"], y["r"])
    np.testing.assert_allclose(trees.vdot(x, y), want, rtol=1e-14)
    np.testing.assert_allclose(trees.vdot(x, y), flat(x) @ flat(y), rtol=1e-14)
    assert trees.vdot(x, y).dtype == jnp.float64


def test_axpy_and_scale_keep_dtypes():
    x, y = vector(0), vector(1)
    alpha = jnp.asarray(0.25)
    for out, want in (
        (trees.axpy(alpha, x, y), 0.25 * flat(x) + flat(y)),
        (trees.scale(alpha, x), 0.25 * flat(x)),
        (trees.subtract(x, y), flat(x) - flat(y)),
    ):
        np.testing.assert_allclose(flat(out), want, rtol=1e-15)
        assert jax.tree.map(lambda leaf: leaf.dtype, out) == jax.tree.map(lambda v: v.dtype, x)


def test_half_precision_is_summed_in_single():
    ones = jnp.ones(4096, jnp.float16)
    assert trees.vdot(ones, ones) == 4096
    assert trees.vdot(ones, ones).dtype == jnp.float32
    assert trees.axpy(jnp.float32(2), ones, ones).dtype == jnp.float16


def test_real_parts_and_back():
    x = vector(0)
    y = trees.from_real_parts(trees.real_parts(x), x)
    assert all(bool((a == b).all()) for a, b in zip(*map(jax.tree.leaves, (x, y)), strict=True))


@pytest.mark.parametrize("exponent", [-37, -25, 0, 25, 37])
def test_norm_is_safe_in_single_precision(exponent):
    x = {"a": jnp.asarray([3.0, 0.0], jnp.float32), "b": jnp.asarray([4.0], jnp.float32)}
    x = jax.tree.map(lambda leaf: leaf * jnp.float32(10.0**exponent), x)
    np.testing.assert_allclose(float(trees.norm(x)), 5 * 10.0**exponent, rtol=1e-6)


def test_norm_of_nothing_and_of_zero():
    assert trees.norm(jnp.zeros(0)) == 0
    assert trees.norm(jnp.zeros(3)) == 0


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64])
def test_powers_of_two_are_exact_and_normal(dtype):
    x = jnp.ones(1, dtype)
    for value in (0.0, jnp.inf, jnp.nan):
        assert trees.power_of_two(jnp.asarray(value, trees.scalar_dtype(x)), x) == 1
    for value in (1e-38, 3e-7, 1.0, 5.0, 1e38):
        unit = trees.power_of_two(jnp.asarray(value, trees.scalar_dtype(x)), x)
        assert float(unit) == 2.0 ** round(np.log2(float(unit)))
        for factor in (unit, 1 / unit):
            assert float(jnp.finfo(dtype).tiny) <= float(factor.astype(dtype)) < np.inf


def test_ratio_by_nothing_positive_is_zero():
    one, zero = jnp.asarray(1.0), jnp.asarray(0.0)
    assert trees.safe_ratio(one, zero) == 0
    assert trees.safe_ratio(one, -one) == 0
    assert trees.safe_ratio(one, 2 * one) == 0.5


def test_precision_of_a_mixture_is_that_of_its_least_precise_leaf():
    x = {"a": jnp.ones(2, jnp.float32), "b": jnp.ones(2, jnp.complex128)}
    assert trees.epsilon(x) == float(jnp.finfo(jnp.float32).eps)
    assert trees.scalar_dtype(x) == jnp.float64
    assert trees.size(x) == 4

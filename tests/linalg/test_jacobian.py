"""Log-derivatives in chunks against formulas, the modes, and the global mean."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from linalg.solves import counted, several
from spmd import agree, assert_allclose, ranks

from distsolve import center, jacobian, mpi

COUNTS = [5, 0, 3]


def real_model(p, x):
    return jnp.vdot(p["a"], x**2) + jnp.sin(p["b"][0])


def complex_model(p, x):
    return jax.lax.complex(real_model(p, x), jnp.vdot(p["a"], x) * p["b"][0])


def holomorphic_model(p, x):
    return jnp.sum(p["a"] ** 2 * x.astype(p["a"].dtype)) + jnp.exp(p["b"][0])


def params(dtype=float):
    return {"a": jnp.asarray([1.0, -2.0], dtype), "b": jnp.asarray([0.5], dtype)}


def samples(count):
    return np.random.default_rng(count).standard_normal((count, 2))


def want(model, x):
    """Columns a_0, a_1, b: the order of the tree's leaves."""
    b = np.full((len(x), 1), 0.5)
    if model is holomorphic_model:
        return np.hstack([2 * x * [1.0, -2.0], np.exp(b)]) + 0j
    rows = np.hstack([x**2, np.cos(b)])
    return rows + 1j * np.hstack([x * 0.5, x @ [[1.0], [-2.0]]]) if model is complex_model else rows


MODELS = [(real_model, "real", float), (complex_model, "complex", float)]
MODELS += [(holomorphic_model, "holomorphic", complex)]


@pytest.mark.once
@pytest.mark.parametrize(("model", "mode", "dtype"), MODELS, ids=["real", "complex", "holomorphic"])
def test_rows(model, mode, dtype):
    for n, chunk_size in [(5, None), (5, 2), (4, 2), (0, 2), (3, 8)]:
        x = samples(n)
        J = jax.jit(lambda p, x, c=chunk_size: jacobian(model, p, x, mode=mode, chunk_size=c))(
            params(dtype), x
        )
        assert_allclose(J, want(model, x), rtol=1e-13)
    if mode != "holomorphic":
        assert_allclose(jacobian(model, params(), samples(2)), want(model, samples(2)), rtol=1e-13)


@pytest.mark.once
def test_samples_may_be_trees_and_single_precision():
    x = samples(3).astype(np.float32)
    p = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params())
    J = jacobian(
        lambda p, s: complex_model(p, s["x"] + s["y"]), p, {"x": x, "y": 0 * x}, chunk_size=2
    )
    agree(J.dtype == jnp.complex64, str(J.dtype))
    assert_allclose(J, want(complex_model, x.astype(float)), rtol=1e-5, atol=1e-5)


@pytest.mark.once
@pytest.mark.parametrize(
    ("model", "dtype", "mode", "message"),
    [
        (real_model, float, "complex", r"'complex'.*float64.*float64.*use mode='real'"),
        (complex_model, float, "real", r"'real'.*float64.*complex128.*use mode='complex'"),
        (real_model, float, "holomorphic", r"'holomorphic'.*use mode='real'"),
        (holomorphic_model, complex, "complex", r"complex128.*use mode='holomorphic' if"),
        (
            holomorphic_model,
            complex,
            None,
            r"^`mode` is needed for .*complex128.*: use mode='holomorphic' if",
        ),
        (lambda p, x: p["a"][0].real, complex, "holomorphic", r"real and imaginary parts as real"),
    ],
)
def test_wrong_mode(model, dtype, mode, message):
    with pytest.raises(TypeError, match=message):
        jacobian(model, params(dtype), samples(3), mode=mode)


@pytest.mark.once
def test_wrong_arguments():
    with pytest.raises(ValueError, match=r"`mode` must be one of.*got 'fast'"):
        jacobian(real_model, params(), samples(3), mode="fast")
    with pytest.raises(ValueError, match="`chunk_size` must be a positive integer or None: got 0"):
        jacobian(real_model, params(), samples(3), chunk_size=0)
    with pytest.raises(IndexError, match=r"`log_psi\(params, x\)` failed .*shape \(\).*x\[None\]"):
        jacobian(lambda p, x: p["a"][0] * x.shape[0], params(), jnp.ones(3))
    with pytest.raises(ValueError, match=r"a scalar for one sample `x`: got float64 of shape \("):
        jacobian(lambda p, x: p["a"] * x, params(), samples(3))
    mixed = {"a": jnp.ones(2), "b": jnp.ones(1, complex)}
    with pytest.raises(TypeError, match=r"one dtype: got complex128, float64"):
        jacobian(real_model, mixed, samples(3))
    with pytest.raises(ValueError, match=r"`samples`.*got shapes"):
        jacobian(real_model, params(), {"x": samples(3), "y": samples(2)})
    with pytest.raises(ValueError, match=r"`weights`.*float64 of shape \(3,\)"):
        center(jnp.ones((3, 2)), jnp.ones(2))
    with pytest.raises(TypeError, match=r"`J` must be one array.*got a dict of 1"):
        center({"a": jnp.ones((3, 2))})


def spread(array):
    """Give this rank's rows: COUNTS of them."""
    starts = np.cumsum([0, *COUNTS])
    return jnp.asarray(array[starts[ranks().rank] : starts[ranks().rank + 1]])


@pytest.mark.parametrize("dtype", [np.float64, np.complex128])
def test_center(dtype):
    random = np.random.default_rng(1)
    J = random.standard_normal((sum(COUNTS[: ranks().size]), 4)).astype(dtype) + 3
    J = J * (1 + 2j) if dtype == np.complex128 else J
    weights = random.uniform(0.5, 2, len(J))
    found, made = counted(jax.jit(center), spread(J))
    agree(made == several(), f"{made} messages")
    assert_allclose(found, spread(J - J.mean(0)), rtol=1e-12)
    mean = weights @ J / weights.sum()
    assert_allclose(center(spread(J), spread(weights)), spread(J - mean), rtol=1e-12)


def test_center_is_in_place():
    mpi.assert_in_place(center, jnp.ones((400 + ranks().rank, 20)))


@pytest.mark.once
def test_center_without_samples():
    assert_allclose(center(jnp.zeros((0, 3))), np.zeros((0, 3)))

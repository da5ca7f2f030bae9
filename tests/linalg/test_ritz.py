"""Running estimates of extreme Ritz values, against the eigenvalues of the Lanczos matrix."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.linalg import eigvalsh_tridiagonal
from spmd import agree, assert_allclose

from distsolve.linalg import ritz

pytestmark = pytest.mark.once
random = np.random.default_rng(0)
LENGTH = 640  # all runs are padded to it, to compile once a dtype

SPECTRA = {
    "three": (np.array([1.0, 2, 3]), np.ones(3)),
    "logarithmic": (np.logspace(0, 4, 100), np.ones(100)),
    "linear": (np.linspace(1, 1000, 200), random.standard_normal(200)),
    "laplacian": (2 - 2 * np.cos(np.pi * np.arange(1, 101) / 101), random.standard_normal(100)),
    "large_outlier": (np.append(np.linspace(1, 2, 99), 1e5), random.standard_normal(100)),
    "small_outlier": (np.append(np.linspace(1, 2, 99), 1e-5), random.standard_normal(100)),
    "smooth_start": (2 - 2 * np.cos(np.pi * np.arange(1, 101) / 101), np.arange(1, 101.0) ** -3),
}


def coefficients(spectrum, b, tol=1e-8):
    """Return CG's step lengths and its ratios of squared residual norms."""
    r, p, alphas, betas = b.copy(), b.copy(), [], []
    rr = start = b @ b
    while rr > tol**2 * start and len(alphas) < LENGTH:
        alphas.append(rr / (p @ (spectrum * p)))
        r -= alphas[-1] * spectrum * p
        betas.append(r @ r / rr)
        rr, p = r @ r, r + betas[-1] * p
    return np.array(alphas), np.array(betas)


@jax.jit
def run(alphas, betas):
    return jax.lax.scan(
        lambda state, step: (ritz.update(state, *step), None),
        ritz.start(alphas.dtype),
        (alphas, betas),
    )[0]


def estimate(alphas, betas, dtype=np.float64):
    """Return what the steps say, padded by ones that were not taken."""
    padding = np.zeros(LENGTH - len(alphas))
    steps = (np.append(values, padding).astype(dtype) for values in (alphas, betas))
    return run(*map(jnp.asarray, steps))


@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_extremes_of_the_lanczos_matrix(name, dtype):
    spectrum, b = SPECTRA[name]
    alphas, betas = coefficients(spectrum, b)
    diagonal = 1 / alphas + np.append(0, betas[:-1] / alphas[:-1])
    values = eigvalsh_tridiagonal(diagonal, np.sqrt(betas[:-1]) / alphas[:-1])
    state = estimate(alphas, betas, dtype)
    low, high = float(ritz.smallest(state)), float(ritz.largest(state))
    rounding = 30 * np.finfo(dtype).eps
    agree(values[0] * (1 - rounding) <= low <= 1.08 * values[0], f"{low} {values[0]}")
    agree(values[-1] / 1.08 <= high <= values[-1] * (1 + rounding), f"{high} {values[-1]}")
    true = spectrum.max() / spectrum.min()
    found = float(ritz.condition(state))
    agree(0.85 * true <= found <= (1 + rounding) * true, f"{found} {true}")


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_scale_does_not_matter(scale):
    alphas, betas = coefficients(*SPECTRA["logarithmic"])
    one, scaled = estimate(alphas, betas, np.float32), estimate(alphas * scale, betas, np.float32)
    assert_allclose(ritz.condition(scaled), ritz.condition(one), rtol=1e-3)
    assert_allclose(ritz.largest(scaled) * scale, ritz.largest(one), rtol=1e-3)


def test_no_steps_and_one_step():
    for steps, low, high, condition in (([], 0, 0, 1), ([4.0], 0.25, 0.25, 1)):
        state = estimate(np.array(steps), np.zeros(len(steps)))
        found = ritz.smallest(state), ritz.largest(state), ritz.condition(state)
        assert_allclose(jnp.stack(found), [low, high, condition])


def test_steps_that_broke_down_change_nothing():
    alphas, betas = coefficients(*SPECTRA["three"])
    want = estimate(alphas, betas)
    for alpha, beta in ((0.0, 1.0), (-1.0, 1.0), (np.nan, 1.0), (1.0, np.nan), (np.inf, 1.0)):
        found = estimate(np.insert(alphas, 1, alpha), np.insert(betas, 1, beta))
        assert_allclose(ritz.condition(found), ritz.condition(want))


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_the_handler_is_the_plain_form(dtype):
    names = ("linear", "logarithmic")
    shifts = jnp.asarray(ritz._shifts(dtype))
    steps = [np.array(coefficients(*SPECTRA[name]))[:, :60].astype(dtype) for name in names]
    states = jnp.stack([ritz.start(dtype).state] * len(names))
    compiled = jax.jit(jax.vmap(ritz.update, in_axes=(0, 0, 0)))
    plain = jax.jit(ritz.plain)
    for k in range(60):
        alpha, beta = jnp.asarray(np.stack([pair[:, k] for pair in steps], axis=1))
        if k == 7:
            alpha = alpha.at[1].set(0)
        found = compiled(ritz.Ritz(states), alpha, beta).state
        want = plain(states, alpha, beta, shifts)
        # The handler rounds each operation; XLA may fuse two.
        assert_allclose(found, want, rtol=1e3 * np.finfo(dtype).eps, atol=16 * np.finfo(dtype).eps)
        states = found

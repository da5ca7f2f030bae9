"""Draw how CG converges: its three arrangements, and what float32 can reach.

    python convergence.py FILE.svg

Second differences on a square grid, solved on one rank.
"""

import sys

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import distsolve

EDGE, STEPS = 64, 250
METHODS = {"classic": "-", "single_reduction": "--", "pipelined": ":"}


def laplacian(u):
    """Return 4 u less its four neighbours, with zeros around the grid."""
    p = jnp.pad(u, 1)
    return 4 * u - p[:-2, 1:-1] - p[2:, 1:-1] - p[1:-1, :-2] - p[1:-1, 2:]


def residuals(dtype, method):
    """Return the norm of the residual before each step, relative to that of the right-hand side."""
    b = jax.random.normal(jax.random.key(0), (EDGE, EDGE)).astype(dtype)
    _, info = distsolve.cg(laplacian, b, tol=1e-12, maxiter=STEPS, method=method, history=STEPS + 1)
    return np.asarray(info.residual_history) / float(info.rhs_norm)


def draw(path):
    """Solve, and write the picture."""
    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for method, line in METHODS.items():
        axes.semilogy(residuals(jnp.float64, method), line, label=f"{method}, float64")
    axes.semilogy(residuals(jnp.float32, "classic"), "k-", lw=1, label="classic, float32")
    axes.set(xlabel="iteration", ylabel="residual / right-hand side")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)
    plt.close(figure)


if __name__ == "__main__":
    with jax.enable_x64(True):
        draw(sys.argv[1])

"""The Poisson example: its operator against the Kronecker sum, its solves, its command line."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from spmd import agree, assert_allclose, load_example, ranks

pytestmark = pytest.mark.above_mpi

N = 12


@pytest.fixture(scope="module")
def poisson3d():
    return load_example("poisson3d")


def slab_of(poisson3d, n=N):
    return poisson3d.Slab.of_rank(n, ranks().rank, ranks().size)


def test_operator_is_the_kronecker_sum(poisson3d):
    n = 5  # on two ranks 2 and 3 planes
    slab = slab_of(poisson3d, n)
    second = 2 * np.eye(n) - np.eye(n, k=1) - np.eye(n, k=-1)
    u = np.random.default_rng(1).standard_normal((n, n, n))
    want = sum(
        np.moveaxis(np.tensordot(second, np.moveaxis(u, axis, 0), 1), 0, axis) for axis in range(3)
    )
    planes = slice(slab.start, slab.stop)
    got = jax.jit(partial(poisson3d.laplacian, slab))(jnp.asarray(u[planes]))
    assert_allclose(got, want[planes], atol=1e-13)


def test_exact_solution_solves_the_system(poisson3d):
    slab = slab_of(poisson3d)
    b, u = poisson3d.manufactured(slab)
    product = jax.jit(partial(poisson3d.laplacian, slab))(jnp.asarray(u))
    assert_allclose(product, b, rtol=0, atol=1e-12 * np.abs(b).max())


@pytest.mark.parametrize("method", ["classic", "pipelined"])
def test_solve(poisson3d, method):
    report = poisson3d.solve(slab_of(poisson3d), method, tol=1e-9, dtype="float64")
    agree(report.info.converged, report.info.message)
    agree(report.error < 1e-9, f"error {report.error}")
    # Functions that are symmetric under exchange of the axes: far fewer than n**3 steps.
    agree(20 < int(report.info.iterations) < 60, f"{int(report.info.iterations)} iterations")


@pytest.mark.once
def test_faults(poisson3d, capsys):
    agree(poisson3d.parse_arguments(["--dtype", "float32"]).tol == 1e-4)
    for wrong in (["--n", "0"], ["--n", "many"], ["--tol", "-1"], ["--tol", "nan"]):
        with pytest.raises(SystemExit) as caught:
            poisson3d.parse_arguments(wrong)
        agree(caught.value.code == 2)
        agree(wrong[0] in capsys.readouterr().err)
    with pytest.raises(ValueError, match="`n` is 2, but 3 ranks"):
        poisson3d.Slab.of_rank(2, 0, 3)

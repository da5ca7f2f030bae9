"""NetKet hands its systems to `distsolve.cg`: each kind of tensor, and the example's energy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from spmd import agree, assert_allclose, load_example, ranks

import distsolve

pytestmark = [pytest.mark.once, pytest.mark.watchdog(240)]

SOLVER = partial(distsolve.cg, tol=1e-10)  # one object: NetKet compiles again for another
CASES = [
    pytest.param(float, "QGTOnTheFly", {}, id="real-on-the-fly"),
    pytest.param(float, "QGTJacobianDense", {"diag_scale": 0.02}, id="real-dense-scaled"),
    pytest.param(complex, "QGTOnTheFly", {"holomorphic": True}, id="complex-on-the-fly"),
    pytest.param(complex, "QGTJacobianPyTree", {"holomorphic": True}, id="complex-tree"),
]


@pytest.fixture(autouse=True, scope="module")
def default_promotion():
    """Run NetKet under the rules that a user has."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="module")
def example(default_promotion):
    """The program itself; NetKet takes seconds to import, so not at the head of this file."""
    return load_example("netket_sr")


@pytest.mark.parametrize(("dtype", "kind", "options"), CASES)
def test_each_tensor_is_taken(example, dtype, kind, options):
    nk = example.nk
    hilbert = nk.hilbert.Spin(0.5, 4)
    hamiltonian = nk.operator.IsingJax(hilbert, graph=nk.graph.Chain(4), h=1.0)
    model = nk.models.RBM(param_dtype=dtype, kernel_init=jax.nn.initializers.normal(0.3))
    state = nk.vqs.MCState(nk.sampler.ExactSampler(hilbert), model, n_samples=96, seed=3)
    force = state.expect_and_grad(hamiltonian)[1]
    S = getattr(nk.optimizer.qgt, kind)(state, diag_shift=0.01, **options)
    want = np.linalg.solve(S.to_dense(), ravel_pytree(force)[0])
    # Without a start the tensor on the fly passes zeros, constants of NetKet's program. Products
    # with those are what XLA's CPU compiler gets wrong now and then: once is not enough.
    start = None if kind == "QGTOnTheFly" else jax.tree.map(jnp.ones_like, force)
    for _ in range(20):
        x, info = S.solve(SOLVER, force, x0=start)
        agree(info.converged, info.message)
        assert_allclose(ravel_pytree(x)[0], want, rtol=0, atol=1e-7 * np.abs(want).max())


def test_energy_is_exact_within_its_error_bar(example):
    # As NetKet's `solver=`; ranks have chains of their own.
    solver = SOLVER if ranks().size == 1 else example.over_ranks(SOLVER)
    run = example.prepare(6, 1.0, 512, solver=solver, density=2, seed=1)
    run.driver.run(80, out=None, show_progress=False)
    agree(run.reconfiguration.info.converged, run.reconfiguration.info.message)
    energy, error = example.measure(run, 4096)
    exact = -2 / np.sin(np.pi / 12)  # free fermions, at the critical field
    agree(error < 2e-3, f"error bar {error}")
    agree(abs(energy - exact) < 4 * error + 1e-4, example.summary(6, 1.0, energy, error, exact))


def test_over_ranks_of_equal_systems_is_the_solver_itself(example):
    A, b = jnp.diag(jnp.asarray([1.0, 2.0, 4.0])), jnp.ones(3)
    x, info = jax.jit(example.over_ranks(SOLVER))(A, b)
    agree(info.converged, info.message)
    assert_allclose(x, [1, 0.5, 0.25], rtol=1e-9)


def test_options(example, capsys):
    options = example.parse_arguments(["--sites", "6", "--method", "pipelined"])
    agree((options.sites, options.field, options.method) == (6, 1.0, "pipelined"))
    for wrong in (["--sites", "2"], ["--sites", "40"], ["--field", "nan"], ["--steps", "0"]):
        with pytest.raises(SystemExit) as caught:
            example.parse_arguments(wrong)
        agree(caught.value.code == 2)
        agree(wrong[0] in capsys.readouterr().err)
    line = example.summary(6, 1.0, -7.7271, 0.0003, -7.7274)
    agree(line.endswith("difference +0.000300 = +1.0 error bars"), line)

"""What a solve shows while it runs: history, callback, live line, condition, messages."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from linalg.solves import counted, layout
from spmd import agree, assert_allclose, ranks

from distsolve.linalg import Sharded, cg, gmres, lsmr, minres, watch

pytestmark = pytest.mark.few_ranks

DIAGONAL = np.linspace(1.0, 50.0, 30)


def square_lsmr(A, b, *, space, **options):
    """Solve with a Hermitian operator by `lsmr`."""
    return lsmr(A, b, adjoint=A, space=space, columns_space=space, **options)


SOLVERS = [cg, minres, gmres, square_lsmr]


@pytest.fixture(params=["replicated", "uneven"])
def home(request):
    """Give a space, and this rank's part of the diagonal system."""
    space, mine = layout(request.param, len(DIAGONAL))
    return space, jnp.asarray(DIAGONAL[mine])


@pytest.mark.parametrize("solve", SOLVERS)
def test_history_and_callback_tell_of_every_step(solve, home):
    space, diagonal = home
    told = []
    options = {"space": space, "tol": 1e-8, "maxiter": 25}
    _, info = solve(
        lambda p: diagonal * p,
        jnp.ones_like(diagonal),
        history=20,
        callback=lambda iteration, residual: told.append((iteration, residual)),
        **options,
    )
    jax.effects_barrier()
    steps = int(info.iterations)
    history = np.asarray(info.residual_history)
    agree(history.shape == (20,), f"{history.shape}")
    kept = min(steps + 1, 20)
    agree(np.all(np.isfinite(history[:kept])) and np.all(np.isnan(history[kept:])), f"{history}")
    assert_allclose(history[0], info.rhs_norm)
    agree([iteration for iteration, _ in told] == list(range(1, steps + 1)), f"{told}")
    assert_allclose([residual for _, residual in told][: kept - 1], history[1:kept], rtol=1e-6)
    for k in (1, 3):
        _, short = solve(
            lambda p: diagonal * p, jnp.ones_like(diagonal), space=space, tol=0, maxiter=k
        )
        assert_allclose(short.residual_norm, history[k], rtol=1e-8)


def test_line_is_shown_on_rank_0_alone(home, capfd):
    space, diagonal = home
    for solve in (cg, square_lsmr):
        solve(lambda p: diagonal * p, jnp.ones_like(diagonal), space=space, progress=True)
    right = jnp.ones((3, len(diagonal)))
    jax.vmap(lambda b: cg(lambda p: diagonal * p, b, space=space, progress=True))(right)
    text = capfd.readouterr().err
    agree(text.count("to reach") >= 3 if ranks().rank == 0 else not text, text)
    for said in ("iterations/s", "residual", "cg: ", "lsmr: "):
        agree(said in text if ranks().rank == 0 else True, text)


@pytest.mark.once
def test_line_tells_no_rate_after_one_report(capsys):
    line = watch.Line()
    agree(line.update("cg", 1, 1.0, 0.1) == 2)
    line.close()
    text = capsys.readouterr().err
    agree("? iterations/s" in text and "1 iterations" in text, text)
    agree(not re.search(r"\d iterations/s", text), text)


def test_messages_are_counted(home):
    space, diagonal = home
    for solve in (cg, functools.partial(cg, method="single_reduction"), square_lsmr):
        options = {"space": space, "history": 5}
        shown = functools.partial(solve, lambda p: diagonal * p, **options)
        (_, info), made = counted(shown, jnp.ones_like(diagonal))
        agree(int(info.reductions) == made, f"{info.reductions} reported, {made} made")


def test_condition_is_estimated(home):
    space, diagonal = home
    _, info = cg(lambda p: diagonal * p, jnp.ones_like(diagonal), space=space, tol=1e-12)
    agree(45 < float(info.condition_estimate) < 50.1, f"{info.condition_estimate}")
    _, info = cg(
        lambda p: diagonal * p,
        jnp.ones_like(diagonal),
        space=space,
        M=lambda r: r / diagonal,
    )
    agree(0.99 < float(info.condition_estimate) < 1.01, f"{info.condition_estimate}")


def test_data_in_args_compile_once_and_are_differentiated(home):
    space, diagonal = home
    traces = []

    def A(p, diagonal, shift):
        traces.append(None)
        return diagonal * p + shift * p

    @jax.jit
    def solve(diagonal, shift, tol, maxiter):
        b = jnp.ones_like(diagonal)
        return cg(A, b, args=(diagonal, shift), tol=tol, maxiter=maxiter, space=space)

    x, _ = solve(diagonal, 1.0, 1e-12, 100)
    count = len(traces)
    for shift, tol, maxiter in ((2.0, 1e-10, 50), (0.5, 1e-12, 60)):
        x, _ = solve(diagonal * 1.5, shift, tol, maxiter)
        assert_allclose(x, 1 / (diagonal * 1.5 + shift), rtol=1e-8)
    agree(len(traces) == count, f"{len(traces)} traces")
    slope = jax.jvp(lambda s: solve(diagonal, s, 1e-12, 100)[0], (1.0,), (1.0,))[1]
    assert_allclose(slope, -1 / (diagonal + 1) ** 2, rtol=1e-7)


def test_matrix_of_rows_and_stack_of_columns():
    n = 7
    random = np.random.default_rng(0)
    A = random.normal(size=(n, n))
    A = A @ A.T + n * np.eye(n)
    b = random.normal(size=(n, 2))
    for name in ("replicated", "uneven", "gap"):
        space, mine = layout(name, n)
        rows = jnp.asarray(A[mine])
        x, info = cg(rows, jnp.asarray(b[mine, 0]), tol=1e-12, space=space)
        assert_allclose(x, np.linalg.solve(A, b)[mine, 0], rtol=1e-8)
        solve = functools.partial(cg, rows, tol=1e-12, space=space)
        (x, info), made = counted(solve, jnp.asarray(b[mine]))
        assert_allclose(x, np.linalg.solve(A, b)[mine], rtol=1e-8)
        agree(info.iterations.shape == (2,), f"{info}")
        # One loop and one message for both columns: as many as the slower one takes.
        agree(made <= 4 * int(info.iterations.max()) + 6, f"{made} messages, {info.iterations}")


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"method": "fast"}, ValueError, "`method` must be one of 'classic', 'single_reduction'"),
        ({"history": -1}, ValueError, "`history` must be the number of residual norms"),
        ({"history": True}, ValueError, "`history` must be the number of residual norms"),
        ({"callback": 3}, TypeError, "`callback` must be a function"),
        ({"space": "sharded"}, TypeError, "`space` must be"),
        ({"space": Sharded}, TypeError, r"Did you mean Sharded\(\)\?"),
        ({"args": 3.0}, TypeError, "`args` must be a tuple"),
    ],
)
def test_wrong_options_are_named(options, error, match):
    with pytest.raises(error, match=match):
        cg(lambda p: p, jnp.ones(3), **options)

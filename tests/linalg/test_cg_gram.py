"""CG on the matrix of stochastic reconfiguration: one message a step, whatever else is asked."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse.linalg
from linalg.solves import counted, same_everywhere
from spmd import agree, assert_allclose, ranks

from distsolve.linalg import Gram, Replicated, cg
from distsolve.linalg.krylov import cg_gram

SAMPLES, PARAMETERS = 40, 24


@functools.cache
def system(dtype=np.float64, shift=1e-3):
    """Return this rank's rows, S as a matrix, and a right-hand side; the last rank has no rows."""
    random = np.random.default_rng(3)
    J = random.normal(size=(SAMPLES, PARAMETERS)).astype(dtype)
    if np.iscomplexobj(J):
        J += 1j * random.normal(size=J.shape)
    J *= np.logspace(0, -1.5, PARAMETERS)
    J -= J.mean(0)
    holders = max(1, ranks().size - 1)
    bounds = [0, *(SAMPLES * (np.arange(holders) + 1) // holders), SAMPLES]
    mine = J[bounds[ranks().rank] : bounds[ranks().rank + 1]]
    S = J.conj().T @ J / SAMPLES + shift * np.eye(PARAMETERS)
    b = (J.conj().T @ random.normal(size=SAMPLES) / SAMPLES).astype(dtype)
    return jnp.asarray(mine), S, b


@pytest.fixture(params=["x travels", "x travels near the end"])
def travels(request, monkeypatch):
    """Let x travel in every message, or near the end only."""
    if request.param != "x travels":
        monkeypatch.setattr(cg_gram, "SMALL", 0)
        # Programs are kept by what they do, which this changes.
        monkeypatch.setattr(cg_gram, "METHOD", cg_gram.METHOD._replace(name="near"))


@pytest.mark.parametrize("dtype", [np.float64, np.complex128])
def test_k_steps_take_k_messages(dtype, travels):
    J, S, b = system(dtype)
    (x, info), messages = counted(lambda: cg(Gram(J, shift=1e-3), b, tol=1e-10))
    agree(info.reason_name == "converged", info.message)
    assert_allclose(x, np.linalg.solve(S, b), rtol=0, atol=1e-8 * np.abs(x).max())
    true = np.linalg.norm(b - S @ np.asarray(x))
    assert_allclose(info.residual_norm, true, rtol=0, atol=1e-14 * np.linalg.norm(b))
    agree(messages == (int(info.iterations) if ranks().size > 1 else 0), f"{messages}, {info}")
    same_everywhere(info)


def test_fixed_steps_follow_scipy_and_take_k_messages(travels):
    J, S, b = system()
    for k in (1, 7):
        solve = functools.partial(cg, Gram(J, shift=1e-3), b, tol=0, maxiter=k)
        (x, info), messages = counted(solve)
        want, _ = scipy.sparse.linalg.cg(S, b, rtol=0, maxiter=k)
        assert_allclose(x, want, rtol=1e-9)
        agree(info.reason_name == "fixed_steps" and int(info.iterations) == k, info.message)
        agree(messages == (k if ranks().size > 1 else 0), f"{messages} messages in {k} steps")


def test_start_costs_one_message_more():
    J, S, b = system()
    solve = functools.partial(cg, Gram(J, shift=1e-3), b, jnp.ones(PARAMETERS), tol=1e-10)
    (x, info), messages = counted(solve)
    assert_allclose(x, np.linalg.solve(S, b), rtol=0, atol=1e-8 * np.abs(x).max())
    agree(messages == (int(info.iterations) + 1 if ranks().size > 1 else 0), f"{messages}, {info}")
    exact = jnp.asarray(np.linalg.solve(S, b))
    _, info = cg(Gram(J, shift=1e-3), b, exact, tol=1e-8)
    agree(info.reason_name == "converged" and int(info.iterations) == 0, info.message)


def test_drifted_recurrence_is_replaced_or_the_solve_stagnates(travels):
    J, S, b = system(np.float32, 1e-6)
    for tol in (1e-5, 1e-8):
        x, info = cg(Gram(J, shift=1e-6), b, tol=tol)
        true = np.linalg.norm(b - S @ np.asarray(x, np.float64)) / np.linalg.norm(b)
        claimed = float(info.residual_norm / info.rhs_norm)
        agree(abs(true - claimed) < 5e-7, f"{true} {claimed}")
        agree(bool(info.converged) == (claimed <= tol), info.message)
        same_everywhere(info)
    agree(info.reason_name == "stagnated", info.message)


def test_breakdowns_are_those_of_the_classic_method(travels):
    J, _, b = system()
    for shift, M, reason in (
        (-0.1, None, "indefinite_operator"),
        (1e-3, lambda r: -r, "indefinite_preconditioner"),
    ):
        G = Gram(J, shift=shift)
        x, info = cg(G, b, M=M)
        want, classic = cg(lambda v, G=G: G @ v, b, M=M)
        agree(info.reason_name == reason, info.message)
        agree(int(info.iterations) == int(classic.iterations), f"{info} {classic}")
        assert_allclose(x, want, rtol=1e-9)
        assert_allclose(info.residual_norm, classic.residual_norm, rtol=1e-9)
        assert_allclose(info.breakdown, classic.breakdown, rtol=1e-6)


def test_rows_that_every_rank_holds():
    J = jnp.asarray(np.random.default_rng(4).normal(size=(9, 5)))
    S = np.asarray(J.T @ J) / 9 + 0.1 * np.eye(5)
    x, info = cg(Gram(J, shift=0.1, rows=Replicated()), np.ones(5), tol=1e-12)
    same_everywhere(info)
    agree(info.reason_name == "converged", info.message)
    assert_allclose(x, np.linalg.solve(S, np.ones(5)), rtol=1e-9)


def test_nothing_to_do():
    J, _, b = system()
    x, info = cg(Gram(J, shift=1e-3), np.zeros_like(b))
    assert_allclose(x, np.zeros_like(b))
    agree(info.reason_name == "converged" and int(info.iterations) == 0, info.message)
    x, info = cg(Gram(J, shift=1e-3), b, maxiter=0)
    agree(info.reason_name == "maxiter", info.message)
    assert_allclose(info.residual_norm, np.linalg.norm(b))


@pytest.mark.parametrize("scale", [2.0**-83, 2.0**83])
def test_scale_of_the_right_hand_side_does_not_matter(scale):
    J, _, b = system(np.float32)
    G = Gram(J, shift=1e-3)
    x, info = cg(G, b)
    scaled, same = cg(G, b * np.float32(scale))
    agree(int(info.iterations) == int(same.iterations), f"{info} {same}")
    assert_allclose(scaled / np.float32(scale), x, rtol=1e-7)


@pytest.mark.parametrize("difference", [1e-15, 1e-3, np.nan])
def test_ranks_with_other_copies_of_the_right_hand_side_stay_together(difference):
    J, S, b = system()
    mine = b * (1 + difference) if ranks().rank else b
    x, info = cg(Gram(J, shift=1e-3), mine, tol=1e-8)
    same_everywhere((x, info))
    if np.isnan(difference):
        agree(info.reason_name == ("nonfinite" if ranks().size > 1 else "converged"), info.message)
    else:
        assert_allclose(np.linalg.norm(b - S @ x), info.residual_norm, rtol=1e-5)
        agree(bool(info.converged), info.message)


def test_nan_in_the_rows_of_one_rank():
    J, _, b = system()
    J = J.at[:1, 0].set(jnp.nan) if ranks().rank == 0 else J
    x, info = cg(Gram(J, shift=1e-3), b)
    agree(info.reason_name == "nonfinite" and int(info.iterations) == 0, info.message)
    same_everywhere(info)
    assert_allclose(x, np.zeros_like(b))


def test_preconditioner_tree_and_jit():
    J, S, b = system()
    diagonal = jnp.asarray(np.diag(S))

    @jax.jit
    def solve(J, shift, tree):
        scales = {"a": diagonal[:4].reshape(2, 2), "b": diagonal[4:]}
        M = lambda r: jax.tree.map(jnp.divide, r, scales)  # noqa: E731
        return cg(Gram(J, shift=shift), tree, M=M, tol=1e-10, space=Replicated())

    x, info = solve(J, 1e-3, {"a": b[:4].reshape(2, 2), "b": b[4:]})
    x = np.concatenate([x["a"].ravel(), x["b"]])
    assert_allclose(x, np.linalg.solve(S, b), rtol=0, atol=1e-8 * np.abs(x).max())
    plain = cg(Gram(J, shift=1e-3), b, tol=1e-10)[1]
    agree(int(info.iterations) < int(plain.iterations), f"{info} {plain}")


def test_derivatives_reach_the_shift_and_the_right_hand_side():
    J, S, b = system()
    c = np.linspace(1, 2, PARAMETERS)

    def loss(shift, b):
        return jnp.vdot(c, cg(Gram(J, shift=shift), b, tol=1e-13)[0])

    (value, slope) = jax.jvp(loss, (1e-3, jnp.asarray(b)), (1.0, jnp.asarray(c)))
    x, y = np.linalg.solve(S, b), np.linalg.solve(S, c)
    assert_allclose(value, c @ x, rtol=1e-9)
    assert_allclose(slope, -y @ x + c @ y, rtol=1e-7)
    assert_allclose(jax.grad(loss, 1)(1e-3, jnp.asarray(b)), y, rtol=0, atol=1e-6 * abs(y).max())


def test_batch_shares_the_messages():
    J, S, b = system()
    right = jnp.stack([jnp.asarray(b), jnp.zeros(PARAMETERS), jnp.ones(PARAMETERS)])
    solve = jax.jit(jax.vmap(lambda b: cg(Gram(J, shift=1e-3), b, tol=1e-10)))
    (x, info), messages = counted(lambda: solve(right))
    assert_allclose(x, np.linalg.solve(S, right.T).T, rtol=0, atol=1e-7 * np.abs(x).max())
    steps = int(info.iterations.max())
    agree(messages == (steps if ranks().size > 1 else 0), f"{messages} messages, {steps} steps")

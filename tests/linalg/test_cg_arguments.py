"""Faults of arguments raise while tracing, on every rank, before any message."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from spmd import agree

from distsolve import mpi
from distsolve.linalg import Sharded, cg

pytestmark = pytest.mark.few_ranks

ONES = jnp.ones(3)
TREE = {"w": jnp.ones((2, 2)), "z": jnp.ones(2, jnp.complex128)}


def identity(p):
    return p


# What is passed, the exception, and words that its text must hold.
FAULTS = {
    "integer b": (
        (identity, jnp.arange(3)),
        {},
        TypeError,
        ["`b`", "int64", "real or complex floats", "dtype=float"],
    ),
    "boolean leaf": (
        (identity, {"w": ONES, "mask": jnp.ones(2, bool)}),
        {},
        TypeError,
        ["`b` at ['mask']", "bool"],
    ),
    "leaf of b that is no array": ((identity, {"w": "x"}), {}, TypeError, ["`b` at ['w']", "str"]),
    "empty b": ((identity, {}), {}, ValueError, ["`b`", "no leaves"]),
    "A of another shape": (
        (lambda p: p[:2], ONES),
        {},
        ValueError,
        ["`A(b)`", "(3,)", "(2,)", "must map"],
    ),
    "A without a return": ((lambda v: None, ONES), {}, TypeError, ["`A(b)` is None", "`return`"]),
    "A of another structure": (
        (lambda p: [p], ONES),
        {},
        TypeError,
        ["`A(b)`", "structure", "expected", "got"],
    ),
    "A that drops the imaginary part": (
        (lambda p: {"w": p["w"], "z": p["z"].real}, TREE),
        {},
        TypeError,
        ["`A(b)` at ['z']", "complex128", "float64"],
    ),
    "A that makes complex": (
        (lambda p: p.astype(complex), ONES),
        {},
        TypeError,
        ["`A(b)`", "complex128", "Make `b` complex, or take the real part of `A(b)`"],
    ),
    "whole matrix for pieces": (
        (jnp.eye(4), ONES),
        {"space": Sharded()},
        ValueError,
        ["`A`", "(4, 4)", "this rank's rows", "distsolve.DistributedCSR.from_whole"],
    ),
    "whole preconditioner for pieces": (
        (identity, ONES),
        {"space": Sharded(), "M": jnp.eye(4)},
        ValueError,
        ["`M`", "(4, 4)", "this rank's rows", "distsolve.DistributedCSR.from_whole"],
    ),
    "SciPy matrix": (
        (scipy.sparse.eye_array(3), ONES),
        {},
        TypeError,
        ["`A`", "`distsolve.DistributedCSR`"],
    ),
    "A that widens": (
        (lambda p: p.astype(jnp.float64), ONES.astype(jnp.float32)),
        {},
        TypeError,
        ["`A(b)`", "float32", "float64"],
    ),
    "A that holds an allreduce": (
        (lambda p: mpi.allreduce(p)[:2], ONES),
        {},
        ValueError,
        ["`A(b)`", "(2,)"],
    ),
    "A of another kind": ((3.0, ONES), {}, TypeError, ["`A`", "float", "callable"]),
    "matrix of another size": ((jnp.eye(4), ONES), {}, ValueError, ["`A`", "(4, 4)", "(3,)"]),
    "matrix that is not square": (
        (jnp.ones((3, 4)), ONES),
        {},
        ValueError,
        ["`A`", "(3, 4)", "(n, n)", "rows of a larger matrix", "space=distsolve.Sharded()"],
    ),
    "whole b for pieces": (
        (jnp.ones((2, 3)), ONES),
        {"space": Sharded()},
        ValueError,
        ["(2, 3)", "`b` looks whole", "piece of it, 2 entries"],
    ),
    "matrix for a tree": ((jnp.eye(3), TREE), {}, ValueError, ["`A`", "pytree", "function"]),
    "vector as matrix": ((ONES, ONES), {}, ValueError, ["`A`", "(3,)", "(n, n)"]),
    "real matrix, complex b": (
        (jnp.eye(3), ONES.astype(complex)),
        {},
        TypeError,
        ["`A`", "float64", "complex128", "A.astype(complex128)."],
    ),
    "complex matrix, real b": (
        (jnp.eye(3, dtype=complex), ONES),
        {},
        TypeError,
        ["`A`", "complex128", "float64", "wider one: b.astype(complex128)."],
    ),
    "narrow complex matrix, wide real b": (
        (jnp.eye(3, dtype=jnp.complex64), ONES),
        {},
        TypeError,
        ["A.astype(complex128) and b.astype(complex128)"],
    ),
    "narrow matrix": (
        (np.eye(3, dtype=np.float32), ONES),
        {},
        TypeError,
        ["`A`", "float32", "wider one: A.astype(float64)."],
    ),
    "x0 of another shape": (
        (identity, ONES, jnp.ones(4)),
        {},
        ValueError,
        ["`x0`", "(3,)", "(4,)"],
    ),
    "x0 of another structure": ((identity, ONES, [ONES]), {}, TypeError, ["`x0`", "structure"]),
    "x0 of another dtype": (
        (identity, TREE, {"w": TREE["w"], "z": jnp.ones(2)}),
        {},
        TypeError,
        ["`x0` at ['z']", "complex128", "float64"],
    ),
    "M of another shape": (
        (identity, ONES),
        {"M": lambda r: r[:2]},
        ValueError,
        ["`M(b)`", "(3,)", "(2,)"],
    ),
    "M of another kind": ((identity, ONES), {"M": 2.0}, TypeError, ["`M`", "float"]),
    "negative tol": ((identity, ONES), {"tol": -1e-3}, ValueError, ["`tol`", "-0.001", "0"]),
    "tol that is not a number": ((identity, ONES), {"tol": float("nan")}, ValueError, ["`tol`"]),
    "tol as text": ((identity, ONES), {"tol": "1e-3"}, TypeError, ["`tol`", "'1e-3'", "float"]),
    "tol for each entry": (
        (identity, ONES),
        {"tol": ONES},
        TypeError,
        ["`tol`", "one real number"],
    ),
    "complex atol": ((identity, ONES), {"atol": 1j}, TypeError, ["`atol`", "1j", "real"]),
    "negative atol": ((identity, ONES), {"atol": -1}, ValueError, ["`atol`", "-1"]),
    "negative maxiter": (
        (identity, ONES),
        {"maxiter": -1},
        ValueError,
        ["`maxiter`", "-1", "None"],
    ),
    "maxiter that is no integer": (
        (identity, ONES),
        {"maxiter": 10.0},
        TypeError,
        ["`maxiter`", "10.0", "integer"],
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        name if "allreduce" in name else pytest.param(name, marks=pytest.mark.once)
        for name in FAULTS
    ],
)
@pytest.mark.parametrize("jit", [False, True])
def test_fault(name, jit):
    args, options, kind, words = FAULTS[name]
    jax.effects_barrier()  # nothing that is under way counts
    sent = dict(mpi.call_count())
    solve = functools.partial(cg, *args, **options)
    with pytest.raises(kind) as error:
        (jax.jit(solve) if jit else solve)()
    text = str(error.value)
    agree(type(error.value) is kind, repr(error.value))
    agree(all(word in text for word in words), text)
    agree(mpi.call_count() == sent, f"messages before {text}")


@pytest.mark.once
def test_numbers_and_numpy_arrays_are_vectors():
    def double(p):
        return jax.tree.map(lambda leaf: 2 * leaf, p)

    for b in (2.0, np.full(3, 2.0), {"a": 2.0, "b": np.full((2, 2), 2.0)}):
        x, info = cg(double, b)
        agree(all(bool((leaf == 1).all()) for leaf in jax.tree.leaves(x)), f"{x}")
        agree(bool(info.converged), info.message)


def test_limits_may_be_traced():
    @jax.jit
    def solve(b, tol, atol, maxiter):
        return cg(jnp.diag(jnp.arange(1.0, 4)), b, tol=tol, atol=atol, maxiter=maxiter)

    for maxiter, reason in ((2, "maxiter"), (5, "converged"), (0, "maxiter")):
        _, info = solve(ONES, 1e-8, 0.0, maxiter)
        agree(info.reason_name == reason, info.message)
    agree(solve._cache_size() == 1)


@pytest.mark.once
def test_tolerances_may_be_integers():
    _, info = cg(identity, ONES, tol=0, atol=1)
    agree(info.reason_name == "converged", info.message)

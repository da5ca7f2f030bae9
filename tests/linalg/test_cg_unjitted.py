"""Solves outside jit: what is compiled, what is kept, and what is not taken for the same."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from linalg import problems
from linalg.problems import Product
from spmd import agree, assert_allclose

from distsolve.linalg import cg

pytestmark = pytest.mark.few_ranks


@pytest.fixture
def compilations():
    """Count what XLA compiles."""
    names = []

    def listen(name, *_, **__):
        if name.endswith("backend_compile_duration"):
            names.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)


def by_lambda(matrix):
    return lambda p: matrix @ p


def by_jit(matrix):
    return jax.jit(lambda p: matrix @ p)


def by_custom_rule(matrix):
    return lambda p: matrix @ p + 0 * jax.nn.relu(p)


def by_bound_method(matrix):
    return Product(matrix).__matmul__


@pytest.mark.parametrize("make", [by_lambda, by_jit, by_custom_rule, by_bound_method])
def test_unjitted_calls_leave_nothing_and_compile_once(make, compilations):
    system = problems.random_spd()
    counts = []
    gc.collect()
    gc.disable()
    try:
        for call in range(200):
            matrix = jnp.asarray(system.matrix) * (1.0 + call)
            x, info = cg(make(matrix), system.b, tol=1e-3 / (1 + call), maxiter=100 + call)
            info.raise_if_failed()
            del x, info, matrix
            if call in (5, 199):
                counts.append((len(jax.live_arrays()), len(compilations)))
    finally:
        gc.enable()
    agree(counts[0] == counts[1], f"arrays alive and compilations after 5 and 200 calls: {counts}")


def test_unjitted_gradients_compile_once(compilations):
    counts = []
    for call in range(6):
        factor = jnp.asarray(2.0 + call)
        grad = jax.grad(lambda d: jnp.sum(cg(lambda p: d * p, jnp.ones(3))[0]))(factor)
        assert_allclose(grad, -3 / (2.0 + call) ** 2)
        counts.append(len(compilations))
    agree(0 < counts[2] == counts[-1], f"compilations after each call: {counts}")


@pytest.mark.once
def test_callback_in_the_operator():
    def A(p):
        return jax.pure_callback(lambda p: 2 * np.asarray(p), p, p)

    for _ in range(2):
        assert_allclose(cg(A, jnp.ones(2))[0], [0.5, 0.5])


@pytest.mark.once
def test_rule_of_the_operator_is_its_own():
    """Two operators that differ only in a derivative rule are not taken for one another."""

    def gradient(factor):
        @jax.custom_jvp
        def weight(d):
            return d

        weight.defjvp(lambda primals, tangents: (primals[0], factor * tangents[0]))
        loss = jax.grad(lambda d: jnp.sum(cg(lambda p: weight(d) * p, jnp.ones(3))[0]))
        return loss(jnp.asarray(2.0))

    for factor in (1.0, 5.0):
        assert_allclose(gradient(factor), -0.75 * factor)


@pytest.mark.once
def test_attribute_that_changes_is_seen():
    class Scaled:
        factor = 2.0

        def __call__(self, p):
            return self.factor * p

    A = Scaled()
    assert_allclose(cg(A, jnp.ones(2))[0], [0.5, 0.5])
    A.factor = 4.0
    assert_allclose(cg(A, jnp.ones(2))[0], [0.25, 0.25])

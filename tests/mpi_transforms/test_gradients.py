"""Derivatives: one stated convention, the full gradient with `pvary`, no factor of the ranks."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from mpi_transforms.cases import BY_NAME, CASES
from spmd import agree, assert_allclose, ranks

from distsolve import mpi

pytestmark = pytest.mark.above_mpi

REVERSIBLE = [case.name for case in CASES if not case.refusal("grad")]


def calls() -> int:
    """Give the number of MPI calls made so far."""
    return sum(mpi.call_count().values())


def counted(function, *arguments):
    """Run a function twice, the first time to compile; give its result and its MPI calls."""
    jax.block_until_ready(function(*arguments))
    before = calls()
    result = jax.block_until_ready(function(*arguments))
    return result, calls() - before


def mine(arrays):
    """Give this rank's array."""
    return jnp.asarray(arrays[ranks().rank])


def test_two_rank_example(road):
    size = ranks().size
    s = ranks().rank + 1.0
    share = road(jax.grad(lambda p: mpi.allreduce(p * s) / size))
    full = road(jax.grad(lambda p: mpi.allreduce(mpi.pvary(p) * s) / size))
    assert_allclose(share(3.0), s / size)
    assert_allclose(full(3.0), (size + 1) / 2)


def test_two_rank_example_in_figures():
    if ranks().size != 2:
        pytest.skip("figures for 2 ranks")
    s = ranks().rank + 1.0
    assert_allclose(jax.grad(lambda p: mpi.allreduce(p * s) / 2)(1.0), [0.5, 1.0][ranks().rank])
    assert_allclose(jax.grad(lambda p: mpi.allreduce(mpi.pvary(p) * s) / 2)(1.0), 1.5)


def test_transpose_of_allreduce_is_the_identity_and_its_transpose_an_allreduce():
    ones = jnp.ones(3)

    def once(ct):
        return jax.linear_transpose(mpi.allreduce, ones)(ct)[0]

    def twice(x):
        return jax.linear_transpose(once, ones)(x)[0]

    for function, expected in ((once, ones), (twice, ranks().size * ones)):
        assert_allclose(function(ones), expected)
        assert_allclose(jax.jit(function)(ones), expected)


@pytest.mark.parametrize("name", REVERSIBLE)
def test_vjp_outside_jit_is_the_transposed_global_matrix(name):
    case = BY_NAME[name]
    y, back = jax.vjp(case.apply, mine(case.arrays()))
    assert_allclose(y, mine(case.reference(case.arrays())))
    (x_ct,) = back(mine(case.cotangents()))
    assert_allclose(x_ct, mine(case.transposed(case.cotangents())), rtol=1e-13)


@pytest.mark.parametrize("name", REVERSIBLE)
def test_twice_transposed_is_the_original(name):
    case = BY_NAME[name]
    x, ct = mine(case.arrays()), mine(case.cotangents())

    def once(ct):
        return jax.linear_transpose(case.apply, x)(ct)[0]

    twice = jax.jit(lambda x: jax.linear_transpose(once, ct)(x)[0])
    assert_allclose(twice(x), mine(case.reference(case.arrays())), rtol=1e-13)


# N samples on all ranks, n of them here: rank r holds r + 1, so a factor of the ranks shows.
# loss(p) = sum_i (f(p, x_i) - y_i)^2 / N,  p (2,) replicated.


def samples(rank):
    """Give the samples of one rank."""
    rng = np.random.default_rng(rank)
    return rng.uniform(0.2, 1.0, rank + 1), rng.uniform(-1.0, 1.0, rank + 1)


def squares(p, x, y):
    """Give the sum of squares over some samples."""
    return jnp.sum((jnp.tanh(p[0] * x) * p[1] - y) ** 2)


def loss(p):
    """Give the loss over the samples of all ranks."""
    x, y = samples(ranks().rank)
    total, N = mpi.allreduce((squares(mpi.pvary(p), x, y), jnp.asarray(float(x.size))))
    return total / N


def serial_loss(p):
    """Give the same without MPI: every rank makes the samples of all."""
    parts = [samples(rank) for rank in range(ranks().size)]
    x, y = (np.concatenate(part) for part in zip(*parts, strict=True))
    return squares(p, x, y) / x.size


P0 = np.array([0.7, -1.3])


def in_scan(p):
    total, _ = jax.lax.scan(lambda c, s: (c + s * loss(p * s), None), 0.0, jnp.arange(1.0, 4.0))
    return total


def in_scan_serially(p):
    return sum(s * serial_loss(p * s) for s in (1.0, 2.0, 3.0))


def in_cond(p):
    return jax.lax.cond(jnp.sum(p) > 100.0, lambda p: jnp.sum(p), lambda p: jnp.sin(loss(p)), p)


VARIANTS = {
    "plain": (loss, serial_loss),
    "scan": (in_scan, in_scan_serially),
    "cond": (in_cond, lambda p: jnp.sin(serial_loss(p))),
    "checkpoint": (jax.checkpoint(loss), serial_loss),
    "vmap": (
        lambda p: jnp.sum(jax.vmap(loss)(jnp.stack([p, 2.0 * p]))),
        lambda p: serial_loss(p) + serial_loss(2.0 * p),
    ),
    "jit in jit": (lambda p: jax.jit(loss)(p) ** 2, lambda p: serial_loss(p) ** 2),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_full_gradient_with_unequal_samples(variant):
    parallel, serial = VARIANTS[variant]
    p = jnp.asarray(P0)
    value, gradient = jax.jit(jax.value_and_grad(parallel))(p)
    serial_value, serial_gradient = jax.jit(jax.value_and_grad(serial))(p)
    assert_allclose(value, serial_value, rtol=1e-12)
    assert_allclose(gradient, serial_gradient, rtol=1e-11)
    h = 1e-6
    f = jax.jit(parallel)
    steps = [(f(p + h * e) - f(p - h * e)) / (2 * h) for e in np.eye(2)]
    assert_allclose(gradient, np.stack(steps), rtol=1e-7, message="finite differences")


SECOND = {
    "reverse over reverse": lambda f: jax.jacrev(jax.grad(f)),
    "forward over reverse": lambda f: jax.jacfwd(jax.grad(f)),
    "reverse over forward": lambda f: jax.jacrev(jax.jacfwd(f)),
    "forward over forward": lambda f: jax.jacfwd(jax.jacfwd(f)),
}


@functools.cache
def hessian(variant):
    """Give the serial second derivatives."""
    return jax.jit(jax.hessian(VARIANTS[variant][1]))(jnp.asarray(P0))


# Each order and each variant; the other combinations are the same on any number of ranks.
ORDERS = [("plain", order) for order in SECOND]
ORDERS += [("scan", "reverse over reverse"), ("checkpoint", "forward over reverse")]
ORDERS += [
    pytest.param(*pair, marks=pytest.mark.once)
    for pair in itertools.product(("scan", "checkpoint"), SECOND)
    if pair not in ORDERS
]


@pytest.mark.parametrize(("variant", "order"), ORDERS)
def test_second_derivatives(variant, order):
    found = jax.jit(SECOND[order](VARIANTS[variant][0]))(jnp.asarray(P0))
    assert_allclose(found, hessian(variant), rtol=1e-10)


def test_gradient_and_hessian_times_vector_outside_jit():
    p, v = jnp.asarray(P0), jnp.asarray([0.3, 2.0])
    gradient, product = jax.jvp(jax.grad(loss), (p,), (v,))
    assert_allclose(gradient, jax.jit(jax.grad(serial_loss))(p), rtol=1e-11)
    assert_allclose(product, hessian("plain") @ v, rtol=1e-10)


def test_forward_mode_through_a_while_loop():
    def power(p):
        body = lambda state: (state[0] + 1, mpi.allreduce(mpi.pvary(state[1])) * 0.5)  # noqa: E731
        return jax.lax.while_loop(lambda state: state[0] < 3, body, (0, p))[1]

    factor = (0.5 * ranks().size) ** 3
    value, tangent = jax.jit(lambda p, t: jax.jvp(power, (p,), (t,)))(jnp.ones(2), jnp.ones(2))
    assert_allclose(value, factor * np.ones(2))
    assert_allclose(tangent, factor * np.ones(2))


def test_own_check_of_jax_accepts_the_loss():
    check_grads(jax.jit(loss), (jnp.asarray(P0),), order=1, modes=("fwd", "rev"), rtol=1e-4)


def test_complex_parameters():
    weight = 1.0 + ranks().rank

    def total(p):
        return jnp.real(mpi.allreduce(jnp.vdot(mpi.pvary(p), weight * mpi.pvary(p))))

    p = jnp.asarray([1.0 + 2.0j, -0.5 + 0.25j])
    weights = sum(range(1, ranks().size + 1))
    assert_allclose(jax.jit(jax.grad(total))(p), 2.0 * weights * np.conj(p))


def test_complex_transposes_are_not_conjugated():
    ct = jnp.asarray([1.0 + 2.0j, 3.0j])
    (back,) = jax.linear_transpose(mpi.allreduce, ct)(ct)
    assert_allclose(back, ct)
    (back,) = jax.linear_transpose(mpi.pvary, ct)(ct * (ranks().rank + 1.0))
    assert_allclose(back, ct * sum(range(1, ranks().size + 1)))


def test_value_and_tangent_travel_together():
    x = jnp.full((3,), ranks().rank + 1.0)
    for function in (mpi.allreduce, mpi.reduce, mpi.scan, mpi.exscan, mpi.bcast):
        push = jax.jit(lambda x, t, f=function: jax.jvp(f, (x,), (t,)))
        (value, tangent), made = counted(push, x, 2.0 * x)
        agree(made == 1, f"{function.__name__}: {made} MPI calls")
        assert_allclose(tangent, 2.0 * value)
    (_, slope), made = counted(jax.jit(jax.value_and_grad(lambda x: mpi.allreduce(x).sum())), x)
    agree(made == 1, f"value and gradient: {made} MPI calls")
    assert_allclose(slope, np.ones(3))


def test_vmap_is_one_call():
    y, made = counted(jax.jit(jax.vmap(mpi.allreduce)), jnp.ones((4, 3)))
    agree(made == 1, f"{made} MPI calls")
    assert_allclose(y, ranks().size * np.ones((4, 3)))


def test_pvary_communicates_in_reverse_only():
    x = {"a": jnp.ones(3), "b": jnp.ones((2, 2)), "c": jnp.ones(1, jnp.float32)}
    y, made = counted(jax.jit(jax.vmap(mpi.pvary)), {"a": x["a"]})
    agree(made == 0, f"{made} MPI calls")
    assert_allclose(y["a"], x["a"])

    def back(x):
        return jax.vjp(mpi.pvary, x)[1](x)[0]

    summed, made = counted(jax.jit(back), x)
    agree(made == 2, f"{made} MPI calls for two dtypes")
    for name in x:
        assert_allclose(summed[name], ranks().size * np.ones(x[name].shape))


def test_integers_beside_floats_have_zero_tangents():
    def total(p):
        y = mpi.allreduce({"p": p, "n": jnp.asarray(3), "flag": jnp.asarray(2.0)})
        return y["p"] * y["n"].astype(float) * y["flag"]

    size = ranks().size
    assert_allclose(jax.jit(jax.grad(total))(1.5), 6.0 * size * size)


def test_symmetric_matrices_along_symmetric_directions():
    case = BY_NAME["allreduce_symmetric"]
    S, t = mine(case.arrays()), mine(case.arrays(seed=3))
    w = jnp.asarray(np.random.default_rng(0).normal(size=(3, 3)))
    w = w + w.T
    _, slope = jax.jvp(lambda S: jnp.vdot(w, mpi.allreduce_symmetric(S)), (S,), (t,))
    gradient = jax.grad(lambda S: jnp.vdot(w, mpi.allreduce_symmetric(S)))(S)
    from mpi4py import MPI

    assert_allclose(slope, MPI.COMM_WORLD.allreduce(float(jnp.vdot(gradient, t))), rtol=1e-12)


@pytest.mark.once
@pytest.mark.parametrize("op", [mpi.PROD, mpi.MIN, mpi.MAX])
@pytest.mark.parametrize("name", ["allreduce", "reduce", "scan", "exscan", "reduce_scatter"])
def test_derivative_of_other_operations_names_call_and_operation(name, op):
    x = jnp.ones((ranks().size, 2))
    function = getattr(mpi, name)
    words = f"{name} with op={op!r} has no derivative.*only op=SUM"
    for transform in (
        lambda f: jax.grad(lambda x: jnp.sum(f(x))),
        lambda f: lambda x: jax.jvp(f, (x,), (x,)),
        lambda f: lambda x: jax.linear_transpose(f, x)(f(x)),
    ):
        with pytest.raises(NotImplementedError, match=words):
            jax.jit(transform(lambda x: function(x, op))).trace(x)


def test_transpose_of_a_lone_send_is_refused():
    def function(x):
        mpi.send(x, mpi.PROC_NULL)
        return 2.0 * x

    with pytest.raises(NotImplementedError, match="send has no derivative"):
        jax.linear_transpose(function, jnp.ones(3))(jnp.ones(3))


def test_reverse_mode_from_any_source_is_refused():
    x = jnp.ones(2)

    def function(x):
        return jnp.sum(mpi.sendrecv(x, x, mpi.ANY_SOURCE, mpi.PROC_NULL))

    with pytest.raises(NotImplementedError, match="name the source"):
        jax.jit(jax.grad(function)).trace(x)

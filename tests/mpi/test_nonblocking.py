"""iallreduce and wait: the order of calls, requests in loops, progress, and what is refused."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi import oracle
from mpi.test_sizes import counted
from spmd import ROADS, agree, assert_allclose, assert_equal, on, ranks

from distsolve import mpi
from distsolve.mpi.native import nonblocking

STEPS = 50


def mine(shape=(3,), dtype=np.float64, seed=0):
    return jnp.asarray(oracle.data(ranks().rank, shape, dtype, seed))


def everyones(shape=(3,), dtype=np.float64, seed=0):
    return [oracle.data(r, shape, dtype, seed) for r in range(ranks().size)]


def shifted(x, comm):
    """Send to the next rank, receive from the one before."""
    before, after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    return mpi.sendrecv(x, jnp.zeros_like(x), before, after, comm=comm)


def calls_made(before):
    """The calls since then, by name, without those that were not made."""
    return {name: n - before[name] for name, n in mpi.call_count().items() if n != before[name]}


def test_a_loop_with_blocking_calls_between_start_and_wait(world):
    def body(i, state):
        total, p = state
        request, p = mpi.iallreduce(p.sum() + i, through=p)
        p = shifted(p, world)
        largest = mpi.allreduce(p.max(), mpi.MAX)
        y, p = mpi.wait(request, after=p + largest)
        return total + y, p - largest

    function = jax.jit(lambda p: jax.lax.fori_loop(0, STEPS, body, (0.0, p)))
    before = mpi.call_count()
    total, p = jax.block_until_ready(function(mine()))
    made = calls_made(before)
    xs = everyones()
    assert_equal(p, xs[(world.rank - STEPS) % world.size])
    assert_equal(total, np.float64(sum(x.sum() + i for x in xs for i in range(STEPS))))
    names = ("MPI_Iallreduce", "MPI_Sendrecv", "MPI_Allreduce")
    agree(made == dict.fromkeys(names, STEPS), f"{made}")


@on("world", "halves")
def test_two_requests_are_waited_for_in_the_other_order(comm, road):
    world = oracle.members(comm)
    xs = [oracle.data(who, (3,)) for who in world]

    def program(x):
        first, p = mpi.iallreduce(x, through=x, comm=comm)
        second, p = mpi.iallreduce({"a": 2 * p, "b": p[0]}, mpi.MAX, through=p, comm=comm)
        largest, p = mpi.wait(second, after=p + 1)
        between = mpi.allreduce(p, comm=comm)
        return mpi.wait(first), largest, between

    total, largest, between = road(program)(jnp.asarray(xs[comm.rank]))
    assert_equal(total, sum(xs))
    assert_equal(largest["a"], 2 * np.max(xs, axis=0))
    assert_equal(largest["b"], np.max(xs, axis=0)[0])
    assert_equal(between, sum(xs) + comm.size)


def test_a_loop_carries_a_request():
    """The message of one step is waited for in the next."""

    def body(i, state):
        request, total = state
        y, total = mpi.wait(request, after=total)
        return mpi.iallreduce(y / mpi.size() + 1), total + y

    def program(x):
        request, total = jax.lax.fori_loop(0, 5, body, (mpi.iallreduce(x), jnp.zeros(3)))
        return total + mpi.wait(request)

    start = sum(everyones())
    want = sum(start + mpi.size() * i for i in range(6))
    assert_allclose(jax.jit(program)(mine()), want)


def test_a_request_outlives_its_program():
    total = sum(everyones())
    start, finish = jax.jit(mpi.iallreduce), jax.jit(mpi.wait)
    assert_equal(finish(start(mine())), total)
    assert_equal(mpi.wait(start(mine())), total)
    assert_equal(finish(mpi.iallreduce(mine())), total)


def test_what_passes_is_given_back(road):
    tree = {"key": jax.random.key(3), "flag": np.bool_(True), "x": jnp.arange(3.0), "none": None}

    def program(x, tree):
        request, tree = mpi.iallreduce(x, through=tree)
        y, (tree, number) = mpi.wait(request, after=(tree, 4.0))
        return y, tree, number

    y, got, number = road(program)(mine(), tree)
    assert_equal(y, sum(everyones()))
    assert_equal(jax.random.key_data(got["key"]), jax.random.key_data(tree["key"]))
    assert_equal(np.asarray(got["x"]), np.arange(3.0))
    agree(bool(got["flag"]) and got["none"] is None and float(number) == 4.0, f"{got}")


def test_nothing_is_copied():
    def program(s, p):
        def body(i, state):
            s, p = state
            request, p = mpi.iallreduce(s, through=p)
            return mpi.wait(request, after=p * 0.5)

        return jax.lax.fori_loop(0, 3, body, (s, p))

    mpi.assert_in_place(program, jnp.ones(512), jnp.ones(1 << 16), donate_argnums=(0, 1))


def test_a_tree_is_one_message(road):
    tree = {"a": mine(), "b": [mine((2, 2), seed=1)], "empty": jnp.zeros((0, 2)), "none": None}
    y, calls = counted(lambda: road(lambda x: mpi.wait(mpi.iallreduce(x)))(tree), "iallreduce")
    assert_equal(y["a"], sum(everyones()))
    assert_equal(y["b"][0], sum(everyones((2, 2), seed=1)))
    agree(y["empty"].shape == (0, 2) and y["none"] is None and calls == 1, f"{y}, {calls} calls")


@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16, np.float32, np.complex128, np.int8])
def test_the_same_bits_as_of_allreduce(dtype, world):
    numbers = np.random.default_rng(world.rank).standard_normal(100) * 50
    x = jnp.asarray(numbers.astype(dtype))
    x = x * jnp.where(jnp.arange(100) < 50, 1, 1e-6).astype(dtype)  # subnormal in float16
    y, want = jax.jit(lambda x: (mpi.wait(mpi.iallreduce(x)), mpi.allreduce(x)))(x)
    # At three ranks another algorithm may sum in another order.
    rtol = 0 if world.size < 3 else 4 * float(jnp.finfo(dtype).eps) if dtype != np.int8 else 0
    assert_allclose(y, want, rtol=rtol, atol=rtol)


def test_subnormal_numbers_are_kept(world):
    tiny = np.float64(5e-324)
    y = jax.jit(lambda x: mpi.wait(mpi.iallreduce(x)))(jnp.full(3, tiny))
    agree(bool(np.all(np.asarray(y) == world.size * tiny)), f"{np.asarray(y)}")


def test_the_largest_message():
    n = (1 << 20) // 8
    y = mpi.wait(mpi.iallreduce(mine((n,))))
    assert_equal(y, sum(everyones((n,))))


def test_it_goes_on_while_the_program_sleeps(world):
    """No call of MPI's is made until the message is there; the watchdog ends the test if not."""
    x = mine((1000,))

    def nap(i):
        while nonblocking.pending():
            time.sleep(0.01)
        return i

    @jax.jit
    def program(x, i):
        request, i = mpi.iallreduce(x, through=i)
        i = jax.pure_callback(nap, jax.ShapeDtypeStruct((), jnp.int32), i)
        return mpi.wait(request, after=i)[0]

    assert_equal(program(x, jnp.int32(0)), sum(everyones((1000,))))
    world.Barrier()
    request = jax.block_until_ready(jax.jit(mpi.iallreduce)(x))
    while nonblocking.pending():
        time.sleep(0.01)
    assert_equal(mpi.wait(request), sum(everyones((1000,))))


@pytest.mark.parametrize("again", ["waited for", "never started"])
def test_a_request_that_is_not_outstanding(again, road):
    request = road(mpi.iallreduce)(mine())
    assert_equal(mpi.wait(request), sum(everyones()))
    if again == "never started":
        request = jax.tree.map(jnp.zeros_like, request)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"request \d+ is not outstanding"):
        jax.block_until_ready(road(mpi.wait)(request))
    agree(True)
    for again_road in ROADS.values():
        assert_equal(again_road(mpi.allreduce)(mine()), sum(everyones()))


def test_a_request_of_another_size(road):
    request = mpi.iallreduce(mine())
    wrong = mpi.Request(request.number, jnp.zeros(4), request.comm, request.op)
    with pytest.raises(jax.errors.JaxRuntimeError, match="is for 3 elements, its template has 4"):
        jax.block_until_ready(road(mpi.wait)(wrong))
    agree(True)
    assert_equal(mpi.wait(mpi.iallreduce(mine())), sum(everyones()))


@pytest.mark.parametrize("failed", [False, True], ids=["", "after a program that failed"])
def test_a_communicator_that_is_freed_before_the_wait(failed, world, monkeypatch):
    """One rank is late, so the others free the communicator while the message is on its way."""

    def fail():
        raise RuntimeError("this error is expected in the output: a program failed")

    for late in range(world.size):
        comm = world.Dup()
        mpi.prepare(comm)
        if world.rank == late:
            time.sleep(0.05)
        request = mpi.iallreduce(mine((3000,)), comm=comm)
        with monkeypatch.context() as patch:
            if failed:
                patch.setattr("distsolve.mpi.comm.wait_for_ordered", fail)
            comm.Free()
        pending = nonblocking.pending()
        agree(pending == 0, f"{pending} requests are pending after the communicator was freed")
        with pytest.raises(jax.errors.JaxRuntimeError, match="has been freed"):
            mpi.wait(request)
        agree(True)
    world.Dup().Free()  # where Open MPI crashed after a request had been left pending
    assert_equal(mpi.wait(mpi.iallreduce(mine())), sum(everyones()))


@pytest.mark.once
def test_requests_that_differ_along_a_batch_are_refused():
    def body(state):
        i, request = state
        return i + 1, mpi.iallreduce(mpi.wait(request))

    def program(n, x):
        return jax.lax.while_loop(lambda s: s[0] < n, body, (0, mpi.iallreduce(x)))

    before = mpi.call_count()
    with pytest.raises(NotImplementedError, match="requests that differ along the batch"):
        jax.make_jaxpr(jax.vmap(program))(jnp.arange(3), jnp.zeros((3, 2)))
    agree(mpi.call_count() == before)


def test_a_linear_map_reduces_the_tangent():
    """The part for the tangents runs after the values, and another time."""
    f = lambda x: mpi.wait(mpi.iallreduce(jnp.sin(x)))  # noqa: E731
    y, forward = jax.linearize(f, mine())
    t = mine(seed=1)
    xs, ts = everyones(), everyones(seed=1)
    assert_allclose(y, sum(np.sin(x) for x in xs), atol=1e-14)
    want = sum(np.cos(x) * t for x, t in zip(xs, ts, strict=True))
    for _ in range(2):
        assert_allclose(jax.jit(forward)(t), want, atol=1e-13)

"""MPI calls happen in program order, all of them, once, and never while tracing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import dispatch
from spmd import agree, assert_allclose, ranks

from distsolve import mpi


def calls() -> int:
    """Give the number of MPI calls made so far."""
    return sum(mpi.call_count().values())


def partner():
    """Give the other rank of a pair; the last of an odd number has none."""
    other = ranks().rank ^ 1
    return other if other < ranks().size else mpi.PROC_NULL


def expected_from_partner(value_of):
    """Give what the partner sent, or this rank's template where there is none."""
    other = ranks().rank ^ 1
    return value_of(other if other < ranks().size else ranks().rank)


@pytest.mark.parametrize(("second", "repeats"), [("world", 200), ("dup", 50)])
def test_uneven_work_before_two_reductions(second, repeats):
    """One order for all ranks, whichever operand is ready first (netket issue 1479)."""
    other = ranks().communicators[second]
    size = ranks().size

    @jax.jit
    def both(matrix):
        late = jnp.zeros(())
        if ranks().rank % 2:
            late = 0.0 * jnp.sum(matrix @ matrix)
        a = mpi.allreduce(jnp.ones(3) + late)
        b = mpi.allreduce(jnp.full(5, 2.0), comm=other)
        return a, b

    matrix = jnp.ones((500, 500), jnp.float64)
    right = True
    for _ in range(repeats):
        a, b = both(matrix)
        right &= bool(jnp.all(a == size)) and bool(jnp.all(b == 2 * size))
    agree(right)


def test_unused_results_are_still_computed():
    @jax.jit
    def quiet(x):
        mpi.barrier()
        mpi.allreduce(x)
        mpi.barrier()
        mpi.barrier()
        return x

    for _ in range(2):
        before = mpi.call_count()
        jax.block_until_ready(quiet(jnp.ones(3)))
        jax.effects_barrier()
        made = {name: n - before[name] for name, n in mpi.call_count().items() if n != before[name]}
        agree(made == {"MPI_Barrier": 3, "MPI_Allreduce": 1}, str(made))


def test_equal_calls_are_not_merged():
    before = calls()
    a, b = jax.block_until_ready(jax.jit(lambda x: (mpi.allreduce(x), mpi.allreduce(x)))(1.0))
    agree(calls() - before == 2)
    assert_allclose(a, b)


@pytest.mark.parametrize("count", [128, 1 << 16], ids=["1 KiB", "512 KiB"])
@pytest.mark.parametrize("programs", ["one jit", "two jits", "jit and eager", "eager and jit"])
def test_send_then_receive_meets_receive_then_send(programs, count):
    """Across programs nothing blocks in between (jax issue 3976)."""
    x = jnp.full(count, ranks().rank + 1.0)
    send = lambda x: mpi.send(x, partner())  # noqa: E731
    receive = lambda x: mpi.recv(x, partner())  # noqa: E731
    if ranks().rank % 2:

        def both(first, second, x):
            y = first(receive)(x)
            second(send)(x)
            return y
    else:

        def both(first, second, x):
            first(send)(x)
            return second(receive)(x)

    plain = lambda f: f  # noqa: E731
    run = {
        "one jit": jax.jit(functools.partial(both, plain, plain)),
        "two jits": functools.partial(both, jax.jit, jax.jit),
        "jit and eager": functools.partial(both, jax.jit, plain),
        "eager and jit": functools.partial(both, plain, jax.jit),
    }[programs]
    for _ in range(3):
        assert_allclose(run(x), np.full(count, expected_from_partner(lambda r: r + 1.0)))


def test_messages_of_one_pair_do_not_overtake():
    """Jitted, jitted in flight, then eager, all with one tag: received in the order of sending."""
    numbers = range(10)
    slow = jnp.ones((300, 300))

    @jax.jit
    def send_late(i, matrix):
        mpi.send(i + 0.0 * jnp.sum(matrix @ matrix), partner())

    receive = jax.jit(lambda: mpi.recv(jnp.zeros(()), partner()))
    received = []

    def send_all():
        for i in numbers:
            send_late(2.0 * i, slow)
            mpi.send(2.0 * i + 1.0, partner())

    def receive_all():
        for _ in numbers:
            received.append(receive())
            received.append(mpi.recv(jnp.zeros(()), partner()))

    turns = [receive_all, send_all] if ranks().rank % 2 else [send_all, receive_all]
    for turn in turns:
        turn()
    order = np.arange(2.0 * len(numbers)) if partner() is not mpi.PROC_NULL else np.zeros(20)
    assert_allclose(np.stack(received), order)


def test_one_rank_compiles_again_and_the_other_does_not():
    @functools.partial(jax.jit, static_argnums=1)
    def total(x, version):
        return mpi.allreduce(x) + 0.0 * version

    for step in range(5):
        version = step if ranks().rank == 0 else 0
        assert_allclose(total(jnp.ones(3), version), ranks().size * np.ones(3))


def test_other_shapes_on_other_ranks():
    """Rank 0 sees a new shape at every step, the others one shape only (netket issue 655)."""

    @jax.jit
    def mean(x):
        total, n = mpi.allreduce((jnp.sum(x), jnp.asarray(float(x.size))))
        return total / n

    for step in range(1, 5):
        n = step if ranks().rank == 0 else 2
        assert_allclose(mean(jnp.full(n, 3.0)), 3.0)


def test_many_in_flight_between_python_messages():
    """Our duplicate keeps the messages apart; XLA's threads and this one are both inside MPI."""
    from mpi4py import MPI

    add = jax.jit(lambda x: mpi.allreduce(x))
    results, objects = [], []
    for i in range(100):
        results.append(add(jnp.full(16, float(i * (ranks().rank + 1)))))
        word = {"step": i, "text": "x" * i} if ranks().rank == 0 else None
        objects.append(MPI.COMM_WORLD.bcast(word))
    agree(objects == [{"step": i, "text": "x" * i} for i in range(100)])
    weight = sum(range(1, ranks().size + 1))
    assert_allclose(np.stack(results)[:, 0], weight * np.arange(100.0))


def test_programs_in_flight_keep_their_order():
    """A chain that depends on nothing but the order of its own messages."""
    size = ranks().size
    gather = jax.jit(lambda x: mpi.allgather(x))
    reduce = jax.jit(lambda x: mpi.allreduce(x, mpi.MAX))
    results = [(gather(float(i)), reduce(float(i))) for i in range(50)]
    for i, (gathered, largest) in enumerate(results):
        agree(bool(jnp.all(gathered == i)) and gathered.shape == (size,) and largest == i)


def test_the_token_of_a_program_is_that_of_the_next(monkeypatch):
    """JAX would put a new one onto the device for each, which takes as long as all the rest."""
    add = jax.jit(lambda x: mpi.allreduce(x))
    add(1.0)
    with monkeypatch.context() as patched:
        patched.setattr(dispatch.api, "device_put", None)
        y = add(2.0)
    assert_allclose(y, 2.0 * ranks().size)


@pytest.mark.parametrize("has_result", [True, False])
@pytest.mark.parametrize("teller", ["program", "eager call", "chunk", "profile"])
def test_a_failure_in_the_background_does_not_last(world, has_result, teller):
    """The next call raises it, as it follows the failed one; those after that work."""
    comm = world.Dup()
    add = jax.jit(lambda x: mpi.allreduce(x))
    tell = {
        "program": lambda: add(1.0),
        "eager call": lambda: mpi.allreduce(1.0),
        "chunk": lambda: mpi.set_chunk_bytes(None),
        "profile": lambda: mpi.profile().__enter__(),
    }[teller]

    @jax.jit
    def fail_late(matrix):
        x = jnp.sum(matrix @ matrix)
        return mpi.allreduce(x, comm=comm) if has_result else mpi.send(x, mpi.PROC_NULL, comm=comm)

    matrix = jnp.ones((500, 500))
    jax.block_until_ready(fail_late(matrix))
    jax.block_until_ready(add(1.0))
    comm.Free()
    told = False
    try:
        fail_late(matrix)
        tell()
    except jax.errors.JaxRuntimeError as error:
        told = "has been freed" in str(error)
    agree(told)
    for x in (2.0, 3.0):
        assert_allclose(add(x), x * ranks().size)


def test_checkpoint_does_not_repeat_a_call():
    f = jax.checkpoint(lambda x: jnp.sum(jnp.sin(mpi.allreduce(jnp.sin(mpi.pvary(x))))))
    x = jnp.arange(3.0)
    gradient = jax.jit(jax.grad(f))
    for _ in range(2):
        before = calls()
        slope = jax.block_until_ready(gradient(x))
        # One call forward, and one in reverse that belongs to `pvary`.
        agree(calls() - before == 2, f"{calls() - before} MPI calls")
    size = ranks().size
    assert_allclose(slope, size * np.cos(size * np.sin(x)) * np.cos(x))

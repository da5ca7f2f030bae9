"""Communicators: equal numbers on all ranks, no communication while tracing, clear refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from spmd import agree, assert_allclose, ranks

from distsolve import mpi
from distsolve.mpi import comm as communicators
from distsolve.mpi.library import load

FREED = "communicator that has been freed: keep it alive"


@pytest.fixture
def duplications(monkeypatch):
    """Count how often a communicator is duplicated."""
    made = []
    duplicate = communicators._duplicate

    def counting(MPI, comm):
        made.append(comm)
        return duplicate(MPI, comm)

    monkeypatch.setattr(communicators, "_duplicate", counting)
    return made


def number(comm):
    """Give the number that programs carry for a communicator."""
    return communicators.resolve(comm).id


def calls():
    """Give the number of MPI calls made so far."""
    return sum(mpi.call_count().values())


def test_rank_and_size(comm):
    agree((mpi.rank(comm), mpi.size(comm)) == (comm.rank, comm.size))
    agree(type(mpi.rank(comm)) is int and type(mpi.size(comm)) is int)
    agree((mpi.rank(), mpi.size()) == (ranks().rank, ranks().size))


def test_reduction_stays_within_the_communicator(comm):
    total = comm.allreduce(ranks().rank + 1.0)
    x = jnp.full(3, ranks().rank + 1.0)
    assert_allclose(mpi.allreduce(x, comm=comm), np.full(3, total))
    assert_allclose(jax.jit(lambda x: mpi.allreduce(x, comm=comm))(x), np.full(3, total))


def test_numbers_are_equal_on_all_ranks_and_never_used_again(world):
    seen = []
    for _ in range(3):
        dup = world.Dup()
        seen.append(number(dup))
        agree(world.allgather(seen[-1]) == [seen[-1]] * world.size, f"numbers {seen}")
        dup.Free()
    agree(len(set(seen)) == 3, f"numbers {seen}")


def test_numbers_of_halves_are_equal_on_their_ranks(world):
    # Only the even ranks use a communicator more, so the two halves count differently.
    half = world.Split(world.rank % 2)
    if world.rank % 2 == 0:
        mpi.prepare(extra := half.Dup())
        extra.Free()
    agree(half.allgather(number(half)) == [number(half)] * half.size)
    later = world.Dup()
    agree(later.allgather(number(later)) == [number(later)] * later.size)
    agree(number(later) != number(half))
    for comm in (half, later):
        comm.Free()


def test_numbers_differ_where_another_communicator_is_used_meanwhile(world):
    """What two threads of a rank may do by chance, done by one; the other ranks have one only."""
    from mpi4py import MPI

    meanwhile = [MPI.COMM_SELF.Dup()] if world.rank == 0 else []
    both = [*meanwhile]

    class Interrupted(MPI.Intracomm):
        def allreduce(self, sendobj, op=MPI.SUM):
            result = super().allreduce(sendobj, op)
            if meanwhile:
                mpi.prepare(meanwhile.pop())
            return result

    both.append(Interrupted(world.Dup()))
    mpi.prepare(both[-1])
    numbers = [number(comm) for comm in both]
    agree(len(set(numbers)) == len(both), f"{numbers}")
    agree(world.allgather(numbers[-1]) == [numbers[-1]] * world.size, f"{numbers}")
    right = []
    for comm in both:
        y = mpi.allreduce(jnp.ones(3), comm=comm)
        right.append(np.array_equal(y, np.full(3, comm.size)))
        comm.Free()
    agree(all(right), f"{right}")


def test_same_communicator_is_duplicated_once(world, duplications):
    dup = world.Dup()
    for _ in range(3):
        mpi.prepare(dup)
        mpi.allreduce(1.0, comm=dup)
    agree(len(duplications) == 1)
    dup.Free()


def test_none_and_the_world_are_one(world, duplications):
    mpi.prepare()
    made = len(duplications)
    agree(number(None) == number(world))
    y = jax.jit(lambda x: (mpi.allreduce(x), mpi.allreduce(2.0 * x, comm=world)))(1.0)
    agree(len(duplications) == made)
    assert_allclose(np.stack(y), ranks().size * np.array([1.0, 2.0]))


def test_only_the_first_duplication_communicates_while_tracing(world):
    """Rank 0 alone traces and compiles: any communication would wait for ever."""
    dup = world.Dup()
    mpi.prepare(dup)

    def program(x):
        y = mpi.allreduce(x, comm=dup)
        mpi.barrier()
        y = mpi.bcast(mpi.scan(y), ranks().size - 1)
        return jax.lax.fori_loop(0, 3, lambda i, y: mpi.sendrecv(y, y, 0, 0), y)

    before = calls()
    if world.rank == 0:
        jax.jit(program).lower(jnp.ones(3)).compile()
        jax.jit(jax.grad(lambda x: jnp.sum(mpi.allreduce(x)))).lower(jnp.ones(5)).compile()
        jax.eval_shape(program, jnp.ones(3))
        jax.make_jaxpr(jax.vmap(program))(jnp.ones((2, 3)))
    agree(calls() == before)
    world.barrier()
    dup.Free()


def test_first_use_while_tracing_is_the_duplication(world):
    dup = world.Dup()
    lowered = jax.jit(lambda x: mpi.allreduce(x, comm=dup)).lower(jnp.ones(3))
    before = calls()
    assert_allclose(lowered.compile()(jnp.ones(3)), np.full(3, world.size))
    agree(calls() == before + 1)
    dup.Free()


def test_lowered_text_is_equal_on_all_ranks(world):
    dup = world.Dup()

    def program(x):
        y = mpi.allreduce({"a": x, "b": x[0]}, comm=dup)
        z = mpi.allgather(mpi.bcast(y["a"], 0))
        w = mpi.alltoall(mpi.allgatherv(x, [3] * world.size).reshape(world.size, 3))
        mpi.barrier(comm=world)
        total = jax.lax.scan(lambda c, v: (mpi.allreduce(c + v), None), 0.0, x)[0]
        return z, w, total, mpi.scan(x), mpi.recv(x, mpi.ANY_SOURCE)

    derivative = jax.grad(lambda x: jnp.sum(mpi.allreduce(mpi.pvary(x) ** 2)))
    for function in (program, derivative):
        text = jax.jit(function).lower(jnp.ones(3)).as_text()
        agree("custom_call" in text)
        agree(text == world.bcast(text), "the text of this rank differs from that of rank 0")
    dup.Free()


def test_compiled_function_raises_after_free(world):
    dup = world.Dup()
    compiled = jax.jit(lambda x: mpi.allreduce(x, comm=dup)).lower(jnp.ones(3)).compile()
    assert_allclose(compiled(jnp.ones(3)), np.full(3, world.size))
    dup.Free()
    before = calls()
    with pytest.raises(jax.errors.JaxRuntimeError, match=FREED):
        jax.block_until_ready(compiled(jnp.ones(3)))
    agree(calls() == before)
    # What failed leaves nothing behind: eager and jitted calls go on.
    assert_allclose(mpi.allreduce(jnp.ones(3)), np.full(3, world.size))
    assert_allclose(jax.jit(mpi.allreduce)(jnp.ones(3)), np.full(3, world.size))


def test_jitted_function_raises_after_free(world):
    dup = world.Dup()
    function = jax.jit(lambda x: mpi.allreduce(x, comm=dup))
    jax.block_until_ready(function(jnp.ones(3)))
    dup.Free()
    for _ in range(2):
        with pytest.raises(jax.errors.JaxRuntimeError, match=FREED):
            jax.block_until_ready(function(jnp.ones(3)))
    assert_allclose(jax.jit(mpi.allreduce)(jnp.ones(4)), np.full(4, world.size))


def test_free_waits_for_queued_work(world):
    """Without that, a rank that is late would refuse the call that another is already in."""
    dup = world.Dup()
    matrix = jnp.ones((700, 700))

    @jax.jit
    def function(x, matrix):
        if world.rank % 2:
            for _ in range(5):
                matrix = matrix @ matrix / 700.0
        return mpi.allreduce(x + matrix[0, 0], comm=dup)

    y = function(jnp.zeros(3), matrix)
    dup.Free()
    assert_allclose(y, np.full(3, world.size))


def test_eager_call_after_free_is_refused(world):
    dup = world.Dup()
    mpi.allreduce(1.0, comm=dup)
    dup.Free()
    for wrap in (lambda f: f, jax.jit):
        with pytest.raises(ValueError, match="COMM_NULL: it was freed"):
            wrap(lambda x: mpi.allreduce(x, comm=dup))(1.0)


def test_members_only(world):
    """A rank outside of a communicator holds COMM_NULL."""
    from mpi4py import MPI

    first = world.Split(0 if world.rank == 0 else MPI.UNDEFINED)
    if world.rank == 0:
        assert float(mpi.allreduce(3.0, comm=first)) == 3.0
        first.Free()
    else:
        with pytest.raises(ValueError, match="this rank is not one of its members"):
            mpi.allreduce(3.0, comm=first)
    with pytest.raises(ValueError, match="`comm` is COMM_NULL"):
        mpi.barrier(comm=MPI.COMM_NULL)


def test_cartesian_communicator(world):
    cart = world.Create_cart([world.size], periods=[True])
    source, dest = cart.Shift(0, 1)
    y = mpi.sendrecv(jnp.asarray(1.0 * cart.rank), jnp.zeros(()), source, dest, comm=cart)
    assert_allclose(y, 1.0 * source)
    cart.Free()


def test_own_messages_do_not_match_those_of_the_user(world):
    """Same peers, same tag: the user's message and ours stay apart."""
    rank, size = world.rank, world.size
    request = world.isend("from mpi4py", dest=(rank + 1) % size, tag=5)
    shifted = mpi.sendrecv(
        jnp.asarray(float(rank)),
        jnp.zeros(()),
        (rank - 1) % size,
        (rank + 1) % size,
        sendtag=5,
        recvtag=5,
    )
    text = world.recv(source=(rank - 1) % size, tag=5)
    request.wait()
    assert_allclose(shifted, float((rank - 1) % size))
    agree(text == "from mpi4py")


def test_library_is_that_of_mpi4py():
    from mpi4py import MPI

    agree(load().version == MPI.Get_library_version())
    agree(load().MPI is MPI)

"""send, recv and sendrecv: values, statuses, wildcards, PROC_NULL, lengths and failures."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi import oracle
from mpi4py import MPI
from spmd import ROADS, agree, assert_equal, on

from distsolve import mpi

KIB = 1024


def neighbours(comm):
    """The ranks before and after this one; there is none beyond the ends."""
    before = comm.rank - 1 if comm.rank > 0 else mpi.PROC_NULL
    after = comm.rank + 1 if comm.rank + 1 < comm.size else mpi.PROC_NULL
    return before, after


def ring(comm):
    """The ranks before and after this one in a ring."""
    return (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size


def numbers(status):
    return [int(value) for value in status]


def check_chain(road, comm, shape=(4,), dtype=np.float32):
    """Assert that every rank gets its neighbour's array; odd ranks receive first."""
    world = oracle.members(comm)
    before, after = neighbours(comm)
    template = oracle.data(99, shape, dtype)

    def program(x, template):
        if comm.rank % 2 == 0:
            mpi.send(x, after, comm=comm)
            return mpi.recv(template, before, comm=comm)
        y = mpi.recv(template, before, comm=comm)
        mpi.send(x, after, comm=comm)
        return y

    mine = jnp.asarray(oracle.data(world[comm.rank], shape, dtype))
    y = road(program)(mine, jnp.asarray(template))
    first = comm.rank == 0
    assert_equal(y, template if first else oracle.data(world[comm.rank - 1], shape, dtype))


@pytest.mark.parametrize("shape", [(), (4,), (0,), (2, 3), (5000,)], ids=str)
def test_chain_of_messages(shape, world, road):
    check_chain(road, world, shape)


@on("self", "dup", "halves")
def test_chain_of_messages_on_every_communicator(comm, road):
    check_chain(road, comm)


def test_two_functions_one_after_the_other_without_blocking(world):
    before, after = neighbours(world)
    send = jax.jit(lambda x: mpi.send(x, after) or x)
    recv = jax.jit(lambda x: mpi.recv(x, before))
    mine = jnp.full(100, world.rank + 1.0)
    results = []
    for _ in range(20):
        if world.rank % 2 == 0:
            send(mine)
            results.append(recv(mine))
        else:
            results.append(recv(mine))
            send(mine)
    jax.effects_barrier()
    want = np.full(100, float(world.rank) if world.rank else 1.0)
    assert_equal(np.stack(results), np.stack(20 * [want]))


@pytest.mark.parametrize("nbytes", [KIB, 32 * KIB * KIB])
def test_exchange_of_small_and_large_messages(nbytes, road, world):
    source, dest = ring(world)
    n = nbytes // 4
    mine = jnp.arange(n, dtype=jnp.float32) + 10 * world.rank
    y = road(lambda x: mpi.sendrecv(x, jnp.zeros_like(x), source, dest))(mine)
    assert_equal(y, np.arange(n, dtype=np.float32) + 10 * source)


@pytest.mark.parametrize("nbytes", [KIB, 32 * KIB * KIB])
def test_large_messages_in_a_chain(nbytes, world):
    check_chain(jax.jit, world, (nbytes // 4,))


def test_the_two_sides_may_differ(comm, road):
    source, dest = ring(comm)
    dtypes = (np.int16, np.complex64, jnp.bfloat16)
    world = oracle.members(comm)
    xs = [oracle.data(who, (r + 1, 2), dtypes[r % 3]) for r, who in enumerate(world)]
    template = jnp.zeros(xs[source].shape, xs[source].dtype)
    y, status = road(lambda x, t: mpi.sendrecv(x, t, source, dest, comm=comm, return_status=True))(
        jnp.asarray(xs[comm.rank]), template
    )
    assert_equal(y, xs[source])
    agree(numbers(status) == [source, 0, xs[source].size], f"{status}")


def test_a_tree_is_one_message_per_leaf(road, world):
    before, after = neighbours(world)
    tree = {"a": jnp.full(3, world.rank), "b": (jnp.full((2, 2), 1.5 * world.rank),)}
    calls = mpi.call_count()

    def program(tree):
        mpi.send(tree, after)
        return mpi.recv(tree, before)

    y = jax.block_until_ready(road(program)(tree))
    sender = max(world.rank - 1, 0)
    assert_equal(y["a"], np.full(3, sender))
    assert_equal(y["b"][0], np.full((2, 2), 1.5 * sender))
    made = {name: mpi.call_count()[name] - calls[name] for name in ("MPI_Send", "MPI_Recv")}
    agree(made == {"MPI_Send": 2, "MPI_Recv": 2}, f"{made}")


def test_scalars_and_numpy_arrays(road, world):
    before, after = neighbours(world)
    mpi.send(2.5 + world.rank, after)
    y = road(lambda: mpi.recv(0.5, before))()
    assert_equal(y, np.float64(1.5 + world.rank if world.rank else 0.5))
    mpi.send(np.arange(3) + world.rank, after)
    y = road(lambda x: mpi.recv(x, before))(np.zeros(3, int))
    assert_equal(y, np.arange(3) + world.rank - 1 if world.rank else np.zeros(3, int))


@pytest.mark.parametrize("own", [True, False], ids=["ours", "mpi4py's"])
def test_no_peer_gives_the_template_back(own, road, world):
    from mpi4py import MPI

    nobody = mpi.PROC_NULL if own else MPI.PROC_NULL
    x, template = jnp.arange(3.0), jnp.arange(5) + world.rank

    def program(x, template):
        mpi.send(x, nobody)
        return (
            mpi.recv(template, nobody, return_status=True),
            mpi.sendrecv(x, template, nobody, nobody, return_status=True),
        )

    for y, status in road(program)(x, template):
        assert_equal(y, np.arange(5) + world.rank)
        agree(numbers(status) == [MPI.PROC_NULL, MPI.ANY_TAG, 0], f"{status}")


def test_one_side_without_a_peer(road, world):
    before, after = neighbours(world)
    y = road(lambda x: mpi.sendrecv(x, -x, before, after))(jnp.full(2, world.rank + 1.0))
    assert_equal(y, np.full(2, float(world.rank) if world.rank else -1.0))


@pytest.mark.parametrize("own", [True, False], ids=["ours", "mpi4py's"])
def test_messages_from_anybody_with_any_tag(own, comm, road):
    from mpi4py import MPI

    source, tag = (mpi.ANY_SOURCE, mpi.ANY_TAG) if own else (MPI.ANY_SOURCE, MPI.ANY_TAG)
    world = oracle.members(comm)
    xs = [oracle.data(who, (6,)) for who in world]
    seen = []
    if comm.rank == 0:
        receive = road(lambda x: mpi.recv(x, source, tag=tag, comm=comm, return_status=True))
        for _ in range(comm.size - 1):
            y, status = receive(jnp.zeros(6))
            seen.append((*numbers(status), np.array_equal(y, xs[int(status.source)])))
    else:
        road(lambda x: mpi.send(x, 0, tag=10 + comm.rank, comm=comm))(jnp.asarray(xs[comm.rank]))
    jax.effects_barrier()
    want = [(r, 10 + r, 6, True) for r in range(1, comm.size)]
    agree(sorted(seen) == (want if comm.rank == 0 else []), f"{seen}")


def test_wildcards_are_the_defaults(world):
    if world.rank:
        mpi.send(jnp.full(2, float(world.rank)), 0, tag=world.rank)
        agree(True)
    else:
        total = sum(float(mpi.recv(jnp.zeros(2))[0]) for _ in range(world.size - 1))
        agree(total == sum(range(world.size)), f"{total}")


def test_tags_choose_the_message(road, world):
    last = world.size - 1
    y = z = jnp.zeros(1)
    if world.size > 1 and world.rank == 0:
        # One element each: every MPI buffers as little as that.
        road(lambda x: mpi.send(x, last, tag=1))(jnp.full(1, 1.0))
        road(lambda x: mpi.send(x, last, tag=32767))(jnp.full(1, 2.0))
    if world.size > 1 and world.rank == last:
        y, z = road(lambda x: [mpi.recv(x, 0, tag=tag) for tag in (32767, 1)])(jnp.zeros(1))
    jax.effects_barrier()
    agree([y[0], z[0]] == ([2, 1] if world.size > 1 and world.rank == last else [0, 0]))


def test_tags_of_an_exchange(comm, road):
    source, dest = ring(comm)
    y, status = road(
        lambda x: mpi.sendrecv(
            x,
            -x,
            source,
            dest,
            sendtag=40 + comm.rank,
            recvtag=40 + source,
            comm=comm,
            return_status=True,
        )
    )(jnp.full(3, comm.rank))
    assert_equal(y, np.full(3, source))
    agree(numbers(status) == [source, 40 + source, 3], f"{status}")


def test_a_short_message_leaves_the_rest_of_the_template(comm, road):
    source, dest = ring(comm)
    x, template = jnp.full(3, comm.rank + 1.0), jnp.full(5, -7.0)
    y, status = road(lambda x, t: mpi.sendrecv(x, t, source, dest, comm=comm, return_status=True))(
        x, template
    )
    assert_equal(y, np.array(3 * [source + 1.0] + 2 * [-7.0]))
    agree(numbers(status) == [source, 0, 3], f"{status}")
    assert_equal(template, np.full(5, -7.0), "the template")


def test_statuses_of_trees_are_those_of_the_last_leaf(road, world):
    source, dest = ring(world)
    _, status = road(lambda x: mpi.sendrecv(x, x, source, dest, sendtag=5, return_status=True))(
        (jnp.zeros(2), jnp.zeros((3, 4)))
    )
    agree(isinstance(status, mpi.Status) and numbers(status) == [source, 5, 12], f"{status}")


def test_status_objects_are_filled_when_the_call_runs(comm, road):
    from mpi4py import MPI

    source, dest = ring(comm)
    status = MPI.Status()
    function = road(
        lambda x, t: mpi.sendrecv(x, t, source, dest, sendtag=7, comm=comm, status=status)
    )
    for n in (3, 2):
        status.Set_source(77)
        status.Set_tag(78)
        y = function(jnp.zeros(n, jnp.float32), jnp.ones(4, jnp.float32))
        y.block_until_ready()
        got = (status.Get_source(), status.Get_tag(), status.Get_count(MPI.BYTE))
        agree(got == (source, 7, 4 * n), f"{got}")
        agree(status.Get_elements(MPI.BYTE) == 4 * n)


def test_a_status_object_of_recv(road, world):
    from mpi4py import MPI

    before, after = neighbours(world)
    status = MPI.Status()
    mpi.send(jnp.zeros(3, jnp.int16), after, tag=9)
    y = road(lambda x: mpi.recv(x, before, status=status))(jnp.zeros(8, jnp.int16))
    y.block_until_ready()
    got = (status.Get_source(), status.Get_tag(), status.Get_count(MPI.BYTE))
    want = (world.rank - 1, 9, 6) if world.rank else (MPI.PROC_NULL, MPI.ANY_TAG, 0)
    agree(got == want, f"{got} instead of {want}")


def test_a_status_object_and_arrays_together(road, world):
    from mpi4py import MPI

    source, dest = ring(world)
    status = MPI.Status()
    _, arrays = road(lambda x: mpi.sendrecv(x, x, source, dest, status=status, return_status=True))(
        jnp.zeros(3)
    )
    agree(numbers(arrays) == [source, 0, 3], f"{arrays}")
    agree(status.Get_source() == source and status.Get_count(MPI.BYTE) == 24)


def too_long(comm, road):
    """Send five elements from the first of two ranks to the other, who has room for three."""
    last = comm.rank == comm.size - 1
    if comm.rank == 0 and not last:
        road(lambda x: mpi.send(x, 1, comm=comm))(jnp.zeros(5))
        jax.effects_barrier()
    if not last or comm.size == 1:
        return None
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        jax.block_until_ready(road(lambda x: mpi.recv(x, 0, comm=comm))(jnp.zeros(3)))
    return str(error.value)


def pairs(world):
    """Communicators of two ranks, and of one where a rank is left over."""
    return world.Split(world.rank // 2, world.rank)


@pytest.fixture
def pair(world):
    comm = pairs(world)
    yield comm
    comm.Free()


def assert_all_is_well(comm):
    """Communicate on every road, twice, after a failure."""
    for road in (ROADS["jitted"], ROADS["eager"], ROADS["jitted"]):
        y = road(lambda x: mpi.allreduce(x, comm=comm))(jnp.ones(3) * (comm.rank + 1))
        assert_equal(y, np.full(3, float(sum(range(1, comm.size + 1)))))


def test_a_message_that_is_too_long_names_call_peer_and_count(pair, road):
    error = too_long(pair, road)
    words = ("MPI_Recv", "rank 1 of 2", "peer 0", "3 elements")
    agree(error is None or all(word in error for word in words), f"{error}")
    agree((error is not None) == (pair.rank == 1), f"{error}")


def test_the_job_goes_on_after_a_message_that_was_too_long(pair, road, world):
    too_long(pair, road)
    assert_all_is_well(pair)
    assert_all_is_well(world)


def test_an_exchange_that_is_too_long(road, world):
    if world.size == 1 and "Open MPI" in MPI.Get_library_version():
        pytest.skip("Open MPI 5.0.11 cuts a message to oneself to length and reports no error")
    source, dest = ring(world)
    with pytest.raises(
        jax.errors.JaxRuntimeError,
        match=rf"MPI_Sendrecv failed on rank {world.rank} of {world.size}.*peer {source}",
    ):
        jax.block_until_ready(road(lambda x: mpi.sendrecv(x, x[:3], source, dest))(jnp.zeros(5)))
    agree(True)
    assert_all_is_well(world)

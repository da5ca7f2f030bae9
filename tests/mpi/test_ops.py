"""Every primitive against a serial oracle, on every rank, on every kind of communicator."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi import oracle
from spmd import ROADS, agree, assert_allclose, assert_equal, on, ranks

from distsolve import mpi

COLLECTIVES = tuple(oracle.SERIAL)
DONATING = ("allreduce", "reduce", "scan", "exscan", "bcast")


def check(name, comm, road, arguments_list, dtype=np.float64, row=oracle.ROW, **keywords):
    """Run all argument lists in one program and compare each result with the oracle's."""
    world = oracle.members(comm)
    operands = [oracle.operands(name, world, more, dtype, row) for more in arguments_list]

    def program(xs):
        return [
            oracle.invoke(name, x, comm, more, **keywords)
            for x, more in zip(xs, arguments_list, strict=True)
        ]

    mine = [jnp.asarray(xs[comm.rank]) for xs in operands]
    wrong = oracle.compare(name, road(program)(mine), arguments_list, operands, comm.rank)
    if not keywords.get("donate"):
        kept = [oracle.difference(x, xs[comm.rank]) for x, xs in zip(mine, operands, strict=True)]
        wrong += [f"the operand of {name} became {text}" for text in kept if text]
    agree(not wrong, "; ".join(wrong))


@on("self", "dup", "halves")
@pytest.mark.parametrize("name", COLLECTIVES)
def test_every_root_and_every_count(name, comm):
    check(name, comm, jax.jit, oracle.variants(name, comm.size))


@pytest.mark.parametrize("name", COLLECTIVES)
def test_every_root_and_every_count_eagerly(name):
    comm = ranks().communicators["halves"]
    check(name, comm, ROADS["eager"], oracle.variants(name, comm.size))


@on("world", "halves")
@pytest.mark.parametrize("name", oracle.REDUCTIONS)
def test_every_operation(name, comm):
    check(name, comm, jax.jit, every_operation(name, comm.size), np.int32)


@pytest.mark.parametrize("name", oracle.REDUCTIONS)
def test_every_operation_eagerly(name):
    comm = ranks().communicators["halves"]
    check(name, comm, ROADS["eager"], every_operation(name, comm.size), np.int32)


def every_operation(name, size):
    """The argument lists of a reduction, with the last root only."""
    found = oracle.variants(name, size, oracle.fitting(np.int32))
    return [more for more in found if name != "reduce" or more[-1] == size - 1]


@on("world", "halves")
@pytest.mark.parametrize("name", DONATING)
def test_donated_operands(name, comm):
    check(name, comm, ROADS["eager"], oracle.variants(name, comm.size), donate=True)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_rows_without_axes(name, road):
    comm = ranks().communicators["world"]
    check(name, comm, road, oracle.variants(name, comm.size), row=())


def test_operations_of_mpi4py(road):
    from mpi4py import MPI

    comm = ranks().communicators["world"]
    xs = [oracle.data(r, (7,), np.int32) for r in range(comm.size)]
    ops = oracle.fitting(np.int32)
    results = road(lambda x: [mpi.allreduce(x, getattr(MPI, op.name)) for op in ops])(
        jnp.asarray(xs[comm.rank])
    )
    for y, op in zip(results, ops, strict=True):
        assert_equal(y, oracle.fold(op, xs), str(op))


def test_defaults_are_sum_root_zero_and_the_world(road):
    xs = [oracle.data(r, (4,)) for r in range(ranks().size)]
    me = ranks().rank
    names = ("allreduce", "reduce", "scan", "exscan", "bcast", "gather", "allgather")
    results = road(lambda x: [getattr(mpi, name)(x) for name in names])(jnp.asarray(xs[me]))
    for y, name in zip(results, names, strict=True):
        arguments = (mpi.SUM,) if name in oracle.REDUCTIONS else ()
        arguments += (0,) if name in oracle.WITH_ROOT else ()
        assert_equal(y, oracle.SERIAL[name](xs, *arguments)[me], name)


def test_several_communicators_in_one_program(road):
    kinds = ranks().communicators
    x = jnp.asarray(oracle.data(ranks().rank, (5,)))

    def program(x):
        for comm in kinds.values():
            x = mpi.allreduce(x, comm=comm) - x
        return x

    want = [oracle.data(r, (5,)) for r in range(ranks().size)]
    halves = [range(r % 2, ranks().size, 2) for r in range(ranks().size)]
    groups = {"self": [[r] for r in range(ranks().size)], "halves": halves}
    for kind in kinds:
        everyone = [range(ranks().size)] * ranks().size
        want = [
            sum(want[k] for k in group) - want[r]
            for r, group in enumerate(groups.get(kind, everyone))
        ]
    assert_equal(road(program)(x), want[ranks().rank])


@on("world", "halves")
def test_sums_of_any_numbers_are_the_same_bits_on_all_ranks(comm, road):
    world = oracle.members(comm)
    scales = np.logspace(-3, 3, 1000)
    numbers = [np.random.default_rng(who).standard_normal(1000) * scales for who in world]
    dtypes = (np.float32, np.float64, np.complex128)
    operands = [[x.astype(dtype) for x in numbers] for dtype in dtypes]
    results = road(lambda xs: [mpi.allreduce(x, comm=comm) for x in xs])(
        [jnp.asarray(xs[comm.rank]) for xs in operands]
    )
    for y, xs, dtype in zip(results, operands, dtypes, strict=True):
        epsilon = float(np.finfo(dtype).eps)
        bound = len(xs) * epsilon * float(np.max(np.sum(np.abs(xs), axis=0)))
        assert_allclose(y, np.sum(np.asarray(xs, np.complex128), axis=0), rtol=0, atol=bound)
        mine = np.asarray(y).tobytes()
        agree(comm.bcast(mine) == mine, f"the sum of {dtype} differs from that of the first rank")


@on("world", "halves")
def test_trees_keep_their_structure(comm, road):
    world = oracle.members(comm)

    def tree(who):
        return {
            "a": oracle.data(who, (3,), np.float32),
            "b": [oracle.data(who, (2, 2), np.int32, 1), (oracle.data(who, (), np.float32, 2),)],
            "none": None,
        }

    trees = [tree(who) for who in world]
    names = ("allreduce", "bcast", "allgather", "gather", "scan")
    results = road(lambda x: [getattr(mpi, name)(x, comm=comm) for name in names])(
        jax.tree.map(jnp.asarray, trees[comm.rank])
    )
    for y, name in zip(results, names, strict=True):
        arguments = (mpi.SUM,) if name in oracle.REDUCTIONS else ()
        arguments += (0,) if name in oracle.WITH_ROOT else ()
        agree(jax.tree.structure(y) == jax.tree.structure(trees[0]), f"{name}: {y}")
        for i, leaf in enumerate(jax.tree.leaves(y)):
            xs = [jax.tree.leaves(t)[i] for t in trees]
            assert_equal(leaf, oracle.SERIAL[name](xs, *arguments)[comm.rank], name)


def test_trees_move_leaf_by_leaf(road):
    comm = ranks().communicators["world"]
    size, rank = comm.size, comm.rank
    for name in ("alltoall", "reduce_scatter", "sendrecv"):
        arguments = oracle.variants(name, size)[-1]
        xs, more = (
            [oracle.data(r, oracle.shape(name, r, size, arguments), dtype) for r in range(size)]
            for dtype in (np.float32, np.int16)
        )
        got = road(lambda x, name=name, a=arguments: oracle.invoke(name, x, comm, a))(
            (jnp.asarray(xs[rank]), jnp.asarray(more[rank]))
        )
        assert_equal(got[0], oracle.SERIAL[name](xs, *arguments)[rank], name)
        assert_equal(got[1], oracle.SERIAL[name](more, *arguments)[rank], name)


def check_barrier(road):
    """Assert that no rank leaves a barrier before the last one has come to it."""
    from mpi4py import MPI

    world = ranks().communicators["world"]
    function = road(lambda: mpi.barrier())
    function()
    jax.effects_barrier()
    world.Barrier()
    if world.rank == world.size - 1:
        time.sleep(0.2)
    came = time.monotonic()
    function()
    jax.effects_barrier()
    left = time.monotonic()
    agree(left >= world.allreduce(came, op=MPI.MAX), "left a barrier before all ranks came")


def test_barrier_waits_for_the_last_rank(road):
    check_barrier(road)


def test_barrier_on_every_communicator(comm, road):
    before = mpi.call_count()["MPI_Barrier"]
    function = road(lambda: mpi.barrier(comm=comm))
    agree(function() is None)
    jax.effects_barrier()
    agree(mpi.call_count()["MPI_Barrier"] == before + 1)


def test_pvary_is_the_identity_and_makes_no_call(comm, road):
    x = {"a": jnp.arange(3.0), "b": jnp.arange(4, dtype=jnp.int32)}
    before = mpi.call_count()
    y = road(lambda x: mpi.pvary(x, comm=comm))(x)
    agree(mpi.call_count() == before)
    assert_equal(y["a"], np.arange(3.0))
    assert_equal(y["b"], np.arange(4, dtype=np.int32))

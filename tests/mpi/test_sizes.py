"""Any size: chunks, packing, empty and scalar operands, the large-count road, triangles."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi import oracle
from spmd import ROADS, agree, assert_equal, on, ranks

from distsolve import mpi
from distsolve.mpi.native import abi

pytestmark = pytest.mark.below_jax

INT_MAX = 2**31 - 1
KIB = 1024
CHUNKED = ("allreduce", "reduce", "scan", "exscan", "bcast")
MPI_NAMES = {"reduce_scatter": "MPI_Reduce_scatter_block", "allreduce_symmetric": "MPI_Allreduce"}


@pytest.fixture
def chunk():
    """Set the chunk of all communicators; the default comes back afterwards."""
    yield mpi.set_chunk_bytes
    mpi.set_chunk_bytes(None)


@pytest.fixture
def count_limit():
    """Pretend that MPI's counts end early; the true end comes back afterwards."""
    yield abi.set_count_limit
    abi.set_count_limit(INT_MAX)


def counted(function, name):
    """Run a function; return its result and the number of MPI calls of a primitive."""
    key = MPI_NAMES.get(name, f"MPI_{name.capitalize()}")
    before = mpi.call_count()
    result = jax.block_until_ready(function())
    jax.effects_barrier()
    after = mpi.call_count()
    others = {k: after[k] - before[k] for k in after if k != key and after[k] != before[k]}
    agree(not others, f"{name} made other calls: {others}")
    return result, after[key] - before[key]


def run(name, road, world, length, dtype=np.float32, expected=None, **keywords):
    """Run a primitive on rows of one length, and compare values and the number of MPI calls."""
    more = oracle.variants(name, world.size)[-1]
    xs = oracle.operands(name, oracle.members(world), more, dtype, (length,))
    function = road(lambda x: oracle.invoke(name, x, world, more, **keywords))
    x = jnp.asarray(xs[world.rank])
    y, calls = counted(lambda: function(x), name)
    assert_equal(y, oracle.SERIAL[name](xs, *more)[world.rank], name)
    if expected is not None:
        agree(calls == expected, f"{name} of {length}: {calls} calls, expected {expected}")


@pytest.mark.parametrize("name", CHUNKED)
def test_two_and_a_half_thousand_elements_in_chunks_of_a_thousand(name, road, chunk, world):
    chunk(4 * 1000)
    run(name, road, world, 2500, expected=3)


@pytest.mark.parametrize("name", CHUNKED)
def test_chunks_of_one_call_only(name, road, world):
    run(name, road, world, 2500, chunk_bytes=4 * 1000, expected=3)
    run(name, road, world, 2500, expected=1)


@pytest.mark.parametrize(
    ("length", "calls"), [(999, 1), (1000, 1), (1001, 2), (2000, 2), (2001, 3)]
)
def test_the_last_chunk_may_be_short(length, calls, road, chunk, world):
    chunk(4 * 1000)
    run("allreduce", road, world, length, expected=calls)


@pytest.mark.parametrize("dtype", [np.int8, np.float16, jnp.bfloat16, np.complex128])
def test_chunks_hold_whole_elements(dtype, world):
    wire = {1: 1, 2: 4, 16: 16}[np.dtype(dtype).itemsize]  # 16-bit floats travel as float32
    for name in CHUNKED:
        per_chunk = 50 // (np.dtype(dtype).itemsize if name == "bcast" else wire)
        expected = math.ceil(130 / per_chunk)
        run(name, jax.jit, world, 130, dtype, chunk_bytes=50, expected=expected)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int64])
def test_reduce_scatter_in_chunks(dtype, road, chunk, world):
    run("reduce_scatter", road, world, 1001, dtype)
    chunk(100)
    run("reduce_scatter", road, world, 1001, dtype)
    chunk(16)
    run("reduce_scatter", road, world, 5, dtype)


def test_ones_of_behaviour(chunk, world):
    chunk(4 * 1000)
    y, calls = counted(lambda: mpi.allreduce(np.ones(2500, np.float32)), "allreduce")
    assert_equal(y, np.full(2500, world.size, np.float32))
    agree(calls == 3, f"{calls} calls")


@pytest.mark.parametrize("name", oracle.SERIAL)
def test_empty_arrays(name, world):
    more = oracle.variants(name, world.size)[-1]
    operands = [
        oracle.operands(name, oracle.members(world), more, np.float32, row)
        for row in ((0,), (3, 0), (0, 2))
    ]

    def program(xs):
        return [oracle.invoke(name, x, world, more) for x in xs]

    mine = [jnp.asarray(xs[world.rank]) for xs in operands]
    for road in ROADS.values():
        for y, xs in zip(road(program)(mine), operands, strict=True):
            assert_equal(y, oracle.SERIAL[name](xs, *more)[world.rank], name)


def test_empty_leaves_and_empty_trees(road, world):
    tree = {"a": jnp.zeros((0,)), "b": jnp.arange(3.0) + world.rank, "c": jnp.zeros((0, 4))}
    y, calls = counted(lambda: road(mpi.allreduce)(tree), "allreduce")
    total = sum(range(world.size)) + world.size * np.arange(3.0)
    assert_equal(y["a"], np.zeros(0))
    assert_equal(y["b"], total)
    assert_equal(y["c"], np.zeros((0, 4)))
    agree(calls == 1, f"{calls} calls")
    y, calls = counted(lambda: road(mpi.allreduce)({"a": (), "b": None}), "allreduce")
    agree(y == {"a": (), "b": None} and calls == 0, f"{y}, {calls} calls")


SCALARS = {
    "int": lambda r: 3 + r,
    "float": lambda r: 2.5 - r,
    "bool": lambda r: r == 0,
    "complex": lambda r: 1 + 2j * r,
    "float32": lambda r: np.float32(1.5 + r),
    "int16": lambda r: np.int16(7 - r),
}


@pytest.mark.parametrize("kind", SCALARS)
def test_scalars(kind, road, world):
    op = mpi.LOR if kind == "bool" else mpi.SUM
    xs = [np.asarray(SCALARS[kind](r)) for r in range(world.size)]
    mine = SCALARS[kind](world.rank)
    arguments = {"allreduce": (op,), "bcast": (0,), "allgather": (), "scan": (op,)}
    results = road(lambda x: [getattr(mpi, name)(x, *more) for name, more in arguments.items()])(
        mine
    )
    for y, (name, more) in zip(results, arguments.items(), strict=True):
        assert_equal(y, oracle.SERIAL[name](xs, *more)[world.rank], name)


@pytest.mark.parametrize("name", oracle.SERIAL)
def test_numpy_arrays_are_read_and_left_alone(name, world):
    more = oracle.variants(name, world.size)[-1]
    xs = oracle.operands(name, oracle.members(world), more, np.float64)
    for order in "CF":
        x = np.array(xs[world.rank], order=order)
        y = oracle.invoke(name, x, world, more)
        agree(isinstance(y, jax.Array), type(y).__name__)
        assert_equal(y, oracle.SERIAL[name](xs, *more)[world.rank], f"{name} {order}")
        assert_equal(x, xs[world.rank], f"the operand of {name}")


def test_views_and_transposes_are_sent_in_row_major_order(road, world):
    xs = [oracle.data(r, (4, 6)) for r in range(world.size)]
    mine = jnp.asarray(xs[world.rank])
    got = road(lambda x: mpi.allgather(x.T[::-1, 1:]))(mine)
    assert_equal(got, np.stack([x.T[::-1, 1:] for x in xs]))
    got = road(lambda x: mpi.bcast(x.T, world.size - 1).T)(mine)
    assert_equal(got, xs[-1])


LARGE = tuple(name for name in oracle.SERIAL if name not in oracle.REDUCTIONS and name != "bcast")


@on("self", "world", "halves")
@pytest.mark.parametrize("name", LARGE)
def test_the_large_count_road_of_data_movement(name, comm, count_limit):
    world = oracle.members(comm)
    cases = oracle.variants(name, comm.size)
    operands = [oracle.operands(name, world, more, np.float32, (7,)) for more in cases]
    function = jax.jit(
        lambda xs: [oracle.invoke(name, x, comm, m) for x, m in zip(xs, cases, strict=True)]
    )
    for limit in (5, 64):
        count_limit(limit)
        results = jax.block_until_ready(function([jnp.asarray(xs[comm.rank]) for xs in operands]))
        wrong = oracle.compare(name, results, cases, operands, comm.rank)
        agree(not wrong, f"from {limit} elements: {'; '.join(wrong)}")


def test_the_large_count_road_is_taken(count_limit, world):
    x = jnp.arange(12.0).reshape(world.size, -1) if 12 % world.size == 0 else jnp.ones(world.size)
    before = mpi.call_count()["MPI_Alltoallw"]
    mpi.alltoall(x)
    agree(mpi.call_count()["MPI_Alltoallw"] == before, "no count was large")
    count_limit(5)
    for call in (mpi.alltoall, mpi.allgather, mpi.gather):
        call(x)
    agree(mpi.call_count()["MPI_Alltoallw"] == before + 3, "a large count went to a small call")


@pytest.mark.parametrize("limit", [5, 27])
def test_the_large_count_road_of_messages(limit, road, count_limit, world):
    size, rank = world.size, world.rank
    xs = [oracle.data(r, (9,), np.float32) for r in range(size)]
    template = jnp.zeros(9, jnp.float32)

    def program(x):
        y, status = mpi.sendrecv(
            x, template, (rank - 1) % size, (rank + 1) % size, return_status=True
        )
        if size > 1 and rank == 0:
            mpi.send(x * 2, size - 1, tag=3)
        if size > 1 and rank == size - 1:
            return y, status, mpi.recv(template, 0, return_status=True)
        return y, status, (x, status)

    count_limit(limit)
    y, status, (z, second) = jax.block_until_ready(road(program)(jnp.asarray(xs[rank])))
    assert_equal(y, xs[(rank - 1) % size])
    agree([int(v) for v in status] == [(rank - 1) % size, 0, 9], f"{status}")
    last = size > 1 and rank == size - 1
    assert_equal(z, 2 * xs[0] if last else xs[rank])
    agree(int(second.count) == 9 and int(second.tag) == (3 if last else 0), f"{second}")


def test_a_short_message_on_the_large_count_road(count_limit, world):
    peer = world.rank
    count_limit(5)
    y, status = mpi.sendrecv(jnp.arange(3.0), jnp.full(8, 9.0), peer, peer, return_status=True)
    assert_equal(y, np.array([0.0, 1, 2, 9, 9, 9, 9, 9]))
    agree(int(status.count) == 3, f"{status}")


@pytest.mark.parametrize("name", [*CHUNKED, "reduce_scatter"])
@pytest.mark.parametrize(
    ("dtype", "road"),
    [(np.float64, "eager"), (np.float16, "jitted"), (np.int32, "jitted")],
    indirect=["road"],
)
def test_without_in_place(name, dtype, road, world, without_in_place):
    run(name, road, world, 700, dtype)
    run(name, road, world, 700, dtype, chunk_bytes=96)


@pytest.mark.parametrize("n", [0, 3, 100_000])
def test_without_in_place_a_donated_operand_is_right(n, world, without_in_place):
    numbers = np.arange(float(n))
    total = world.size * numbers + sum(range(world.size))
    for function, want in ((mpi.allreduce, total), (mpi.bcast, numbers)):
        x = jnp.arange(float(n)) + world.rank
        assert_equal(function(x, donate=True), want)
        agree(x.is_deleted())


def test_without_in_place_trees_and_triangles(road, world, without_in_place):
    xs = [
        {"a": oracle.data(r, (3,)), "b": oracle.data(r, (9000,), seed=1)} for r in range(world.size)
    ]
    y = road(mpi.allreduce)(jax.tree.map(jnp.asarray, xs[world.rank]))
    for key in "ab":
        assert_equal(y[key], sum(x[key] for x in xs))
    S = [symmetric(r, (33, 33), np.float64) for r in range(world.size)]
    assert_equal(road(mpi.allreduce_symmetric)(jnp.asarray(S[world.rank])), sum(S))


@pytest.mark.parametrize("nbytes", [64 * KIB - 4, 64 * KIB, 64 * KIB + 4, 128 * KIB])
@pytest.mark.parametrize("name", ["allreduce", "bcast", "scan", "exscan", "reduce"])
def test_leaves_around_the_size_from_which_they_go_alone(name, nbytes, world):
    more = oracle.variants(name, world.size)[-1]
    lengths = {"a": 5, "b": nbytes // 4, "c": 7}
    xs = [
        {key: oracle.data(r, (n,), np.float32, n) for key, n in lengths.items()}
        for r in range(world.size)
    ]
    tree = jax.tree.map(jnp.asarray, xs[world.rank])
    function = jax.jit(lambda x: oracle.invoke(name, x, world, more))
    y, calls = counted(lambda: function(tree), name)
    for key in lengths:
        want = oracle.SERIAL[name]([x[key] for x in xs], *more)[world.rank]
        assert_equal(y[key], want, f"{name} {key}")
    agree(calls == (1 if nbytes < 64 * KIB else 2), f"{calls} calls")


@pytest.mark.parametrize("name", ["allreduce", "bcast", "reduce", "scan", "exscan"])
def test_one_message_per_dtype(name, road, world):
    more = oracle.variants(name, world.size)[-1]
    dtypes = (np.float32, np.int16, np.complex64, jnp.bfloat16)
    shapes = [(), (3,), (2, 5), (0,), (17,), (1, 1, 4)]
    xs = [
        [oracle.data(r, shape, dtypes[i % 4], i) for i, shape in enumerate(6 * shapes)]
        for r in range(world.size)
    ]
    mine = [jnp.asarray(x) for x in xs[world.rank]]
    function = road(lambda x: oracle.invoke(name, x, world, more))
    y, calls = counted(lambda: function(mine), name)
    for i, leaf in enumerate(y):
        want = oracle.SERIAL[name]([x[i] for x in xs], *more)[world.rank]
        assert_equal(leaf, want, f"{name} of leaf {i}")
    agree(calls == len(dtypes), f"{calls} calls for {len(dtypes)} dtypes")


def test_messages_of_a_small_tree(road):
    tree = {"a": jnp.ones(3), "b": jnp.ones(5), "c": jnp.ones(2, jnp.float32)}
    for leaves, messages in (("ab", 1), ("abc", 2)):
        x = {name: tree[name] * (ranks().rank + 1.0) for name in leaves}
        y, calls = counted(lambda x=x: road(mpi.allreduce)(x), "allreduce")
        agree(calls == messages, f"{calls} calls")
        for name in leaves:
            assert_equal(y[name], sum(range(1, ranks().size + 1)) * tree[name])


def test_packed_leaves_cross_chunks(chunk, road, world):
    lengths = (1, 250, 3, 999, 40, 1)
    xs = [[oracle.data(r, (n,), np.float32, n) for n in lengths] for r in range(world.size)]
    chunk(4 * 100)
    y, calls = counted(
        lambda: road(mpi.allreduce)([jnp.asarray(x) for x in xs[world.rank]]), "allreduce"
    )
    for i, leaf in enumerate(y):
        assert_equal(leaf, sum(x[i] for x in xs), f"leaf {i}")
    agree(calls == math.ceil(sum(lengths) / 100), f"{calls} calls")


def symmetric(rank, shape, dtype):
    """A symmetric or Hermitian matrix of whole numbers."""
    x = oracle.data(rank, shape, dtype)
    return np.triu(x) + np.swapaxes(np.triu(x, 1), -1, -2).conj() - _imaginary_diagonal(x)


def _imaginary_diagonal(x):
    if not np.iscomplexobj(x):
        return np.zeros_like(x)
    return (x * np.eye(x.shape[-1], dtype=x.dtype)).imag.astype(x.dtype) * x.dtype.type(1j)


TRIANGLES = [
    np.float32,
    np.float64,
    np.complex64,
    np.complex128,
    np.float16,
    jnp.bfloat16,
    np.int32,
]


@pytest.mark.parametrize(
    ("dtype", "comm"),
    [
        *((dtype, "world") for dtype in TRIANGLES),
        *((np.complex128, kind) for kind in ("self", "dup", "halves")),
    ],
    indirect=["comm"],
)
def test_symmetric_matrices(dtype, comm):
    shapes = [(0, 0), (1, 1), (2, 2), (31, 31), (32, 32), (65, 65), (2, 3, 5, 5), (0, 4, 4)]
    world = oracle.members(comm)
    xs = [[symmetric(who, shape, np.dtype(dtype)) for shape in shapes] for who in world]
    mine = [jnp.asarray(x) for x in xs[comm.rank]]
    results = jax.jit(lambda x: mpi.allreduce_symmetric(x, comm=comm))(mine)
    for i, y in enumerate(results):
        assert_equal(y, oracle.fold(mpi.SUM, [x[i] for x in xs]), f"shape {shapes[i]}")


@pytest.mark.parametrize("donate", [False, True])
def test_symmetric_matrices_eagerly(donate, world):
    xs = [symmetric(r, (37, 37), np.complex128) for r in range(world.size)]
    mine = jnp.asarray(xs[world.rank])
    assert_equal(mpi.allreduce_symmetric(mine, donate=donate), sum(xs))
    agree(mine.is_deleted() == donate)
    if not donate:
        assert_equal(mine, xs[world.rank], "the operand")


def test_symmetric_matrices_are_read_above_the_diagonal_only(road, world):
    xs = [symmetric(r, (9, 9), np.float64) for r in range(world.size)]
    spoilt = xs[world.rank] + np.tril(np.full((9, 9), np.nan), -1)
    got = road(mpi.allreduce_symmetric)(jnp.asarray(np.where(np.tri(9, k=-1), np.nan, spoilt)))
    assert_equal(got, sum(xs))


def test_symmetric_matrices_send_half_the_bytes(road, chunk, world):
    n = 100
    xs = [symmetric(r, (n, n), np.float32) for r in range(world.size)]
    chunk(4 * 1000)
    y, calls = counted(
        lambda: road(mpi.allreduce_symmetric)(jnp.asarray(xs[world.rank])), "allreduce_symmetric"
    )
    assert_equal(y, sum(xs))
    agree(calls == math.ceil(n * (n + 1) / 2 / 1000), f"{calls} calls")

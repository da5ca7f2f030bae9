"""Device memory, on a driver without a GPU: the values of every call.

Every handler is called with a call frame made by hand, on operands that are still being computed.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu.calls import check, check_ring, numbers, on_host, reduction
from spmd import agree, ranks

from distsolve.mpi import table, triangles
from distsolve.mpi.comm import resolve
from distsolve.mpi.operations import DTYPES, Op

pytestmark = [pytest.mark.few_ranks, pytest.mark.below_jax]

FLOATS = [np.float32, np.float64, np.complex64, np.complex128, np.float16, jnp.bfloat16]
# Elements of float64: none, one, a piece more or less or exactly, and several halves.
SIZES = [0, 1, 511, 512, 513, 5000]
REDUCTIONS = [table.allreduce, table.reduce, table.scan, table.exscan, table.bcast]
NAMES = [made.spec.name for made in REDUCTIONS]


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "apart"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("made", REDUCTIONS, ids=NAMES)
def test_reductions_at_the_ends_of_pieces(gpu, made, size, in_place):
    check(gpu, made, [numbers(size)], in_place, **reduction(made))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reductions_of_every_dtype(gpu, dtype):
    op = Op.LOR if dtype == np.bool_ else Op.SUM
    for made in (table.allreduce, table.exscan):
        check(gpu, made, [numbers(3000, dtype)], **reduction(made, op=int(op)))


@pytest.mark.parametrize("made", REDUCTIONS, ids=NAMES)
def test_reductions_of_narrow_floats(gpu, made):
    check(gpu, made, [numbers(3000, jnp.bfloat16)], **reduction(made))


@pytest.mark.parametrize("op", [Op.SUM, Op.PROD, Op.MIN, Op.MAX], ids=str)
def test_every_operation(gpu, op):
    for made in (table.allreduce, table.exscan):
        check(gpu, made, [numbers(700, np.int64)], **reduction(made, op=int(op)))


@pytest.mark.parametrize("made", REDUCTIONS, ids=NAMES)
def test_many_arrays_in_one_call(gpu, made):
    operands = [numbers(size, np.float32, size) for size in (3, 0, 1500, 1, 2000, 7)]
    check(gpu, made, operands, **reduction(made))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_reduce_scatter(gpu, dtype):
    for columns in (0, 1, 600):
        operand = numbers((ranks().size, columns), dtype)
        check(gpu, table.reduce_scatter, [operand], op=int(Op.SUM), chunk=0)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.complex64], ids=str)
def test_only_the_upper_triangle_is_read(gpu, dtype):
    # The oracle is the handler for host memory, which folds nothing.
    params = {"comm": resolve().id, **reduction(table.allreduce)}
    for n in (0, 1, 6, 9):
        matrices = numbers((2, n, n), dtype)  # not symmetric at all
        folded = np.asarray(jax.jit(triangles.fold)(matrices))
        agree(folded.size <= (n + 1) ** 2)  # of two matrices
        (summed,) = gpu.run(table.allreduce.spec, [folded], **params)
        found = np.asarray(jax.jit(triangles.unfold, static_argnums=1)(summed, n))
        (expected,) = on_host(table.allreduce_symmetric, [matrices], params)
        agree(found.dtype == dtype and np.array_equal(found, expected), f"{n}: {found} {expected}")


@pytest.mark.parametrize("dtype", [np.float32, np.complex128], ids=str)
def test_moments_are_cut_between_tiles(gpu, dtype):
    tiles = numbers((300, 3 + 2 * 5 + 6), dtype)
    tiles[:, :3] = 1 + ranks().rank, 3, 2  # samples, rows, columns
    check(gpu, table.merge_moments, [tiles], chunk=0)


@pytest.mark.parametrize("columns", [0, 1, 100, 2000])
@pytest.mark.parametrize("name", ["gather", "scatter", "allgather", "alltoall"])
def test_blocks(gpu, name, columns):
    made, size, root = getattr(table, name), ranks().size, ranks().size - 1
    params = {"root": root} if name in ("gather", "scatter") else {}
    many = name == "alltoall" or (name == "scatter" and ranks().rank == root)
    check(gpu, made, [numbers((size, columns) if many else columns, np.float32)], **params)


@pytest.mark.parametrize("rows", [3, 900])
@pytest.mark.parametrize("name", ["gatherv", "scatterv", "allgatherv"])
def test_uneven_blocks(gpu, name, rows):
    made, size = getattr(table, name), ranks().size
    counts = tuple(rows * ((r + 1) % 3) for r in range(size))
    params = {"counts": counts} | ({} if name == "allgatherv" else {"root": 0})
    n = sum(counts) if name == "scatterv" and ranks().rank == 0 else counts[ranks().rank]
    check(gpu, made, [numbers((n, 2))], **params)


@pytest.mark.parametrize("rows", [2, 700])
def test_alltoallv(gpu, rows):
    # A rank alone has a long message: all must make as many rounds.
    size, rank = ranks().size, ranks().rank
    sent = [[rows * (2 * a + b) for b in range(size)] for a in range(size)]
    params = {
        "send_counts": tuple(sent[rank]),
        "recv_counts": tuple(sent[a][rank] for a in range(size)),
    }
    check(gpu, table.alltoallv, [numbers(sum(sent[rank]))], **params)


@pytest.mark.parametrize("size", [0, 3, 512, 513, 1024, 4000])
def test_ring(gpu, size):
    # Messages of a whole number of halves end with an empty piece.
    check_ring(gpu, size)


def test_nobody_to_talk_to(gpu):
    params = {"dest": -2, "source": -2, "sendtag": 0, "recvtag": 0, "status": 0}
    check(gpu, table.sendrecv, [numbers(4), numbers(6, seed=1)], **params)


def test_messages_of_unequal_lengths(gpu):
    # From any source and with any tag, 0 sends more than it gets.
    if ranks().size == 1:
        return
    comm, rank, other = resolve().id, ranks().rank, {0: 1, 1: 0}.get(ranks().rank)
    sizes = {0: 3000, 1: 10}
    if other is not None:
        params = {"comm": comm, "dest": other, "sendtag": 3 + rank, "status": 0}
        params |= {"source": -1, "recvtag": -1}
        operands = [numbers(sizes[rank]), numbers(sizes[other], seed=1)]
        found, status = gpu.run_on_one_rank(table.sendrecv.spec, operands, **params)
        theirs = np.random.default_rng([0, other]).integers(1, 4, sizes[other])
        assert np.array_equal(found, theirs)
        assert status.tolist() == [other, 3 + other, sizes[other]]
    agree(True)


def test_send_and_receive(gpu):
    if ranks().size == 1:
        return
    comm, rank = resolve().id, ranks().rank
    if rank == 0:
        gpu.run_on_one_rank(table.send.spec, [numbers(1300)], comm=comm, dest=1, tag=4)
    elif rank == 1:
        params = {"comm": comm, "source": 0, "tag": 4, "status": 0}
        found, status = gpu.run_on_one_rank(table.recv.spec, [numbers(1300, seed=1)], **params)
        assert np.array_equal(found, np.random.default_rng([0, 0]).integers(1, 4, 1300))
        assert status.tolist() == [0, 4, 1300]
    agree(True)


@pytest.mark.parametrize("dtype", [np.float64, np.float16], ids=str)
def test_reduction_in_the_background(gpu, dtype):
    comm = resolve().id
    operands = [numbers(900, dtype), numbers(3, dtype, 1), numbers(4, np.int32, 2)]
    started = gpu.run(table.iallreduce.spec, operands, comm=comm, count=2, op=int(Op.SUM))
    for passed, operand in zip(started[1:], operands, strict=True):
        agree(np.array_equal(passed, operand))
    waited = gpu.run(table.wait.spec, [*started[:1], *operands], comm=comm, count=2)
    sums = on_host(table.allreduce, operands[:2], {"comm": comm, **reduction(table.allreduce)})
    for mine, theirs in zip(waited, [*sums, operands[2]], strict=True):
        agree(np.array_equal(mine, theirs), f"{mine} {theirs}")


def test_barrier_comes_after_what_is_computed(gpu):
    values = numbers(50)
    read = gpu.consume(gpu.produce(values))
    gpu.call(table.barrier.spec, [], comm=resolve().id)
    agree(np.array_equal(read, values))  # without a wait of the test's own

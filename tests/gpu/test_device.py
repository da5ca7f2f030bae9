"""Device memory, on a driver without a GPU that checks how it is used: values, order, errors.

Every handler is called with a call frame made by hand, on operands that are still being computed.
The oracle is the same call on host memory, which the tests of `tests/mpi` compare with NumPy.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from gpu.fake import DELAY_US, STAGING, Device, bind, run_on_host, streams
from spmd import agree, ranks

from distsolve import mpi
from distsolve.mpi import device, table
from distsolve.mpi.comm import resolve
from distsolve.mpi.native import abi, agreement, nonblocking
from distsolve.mpi.operations import DTYPES, Op

STAGED, DIRECT = device.NEVER, device.ALWAYS
FLOATS = [np.float32, np.float64, np.complex64, np.complex128, np.float16, jnp.bfloat16]
# Elements of float64: none, one, a piece more or less or exactly, and several halves.
SIZES = [0, 1, 511, 512, 513, 5000]


@pytest.fixture
def gpu():
    """Device memory, with small staging memory and small chunks; nothing broken at the end."""
    bind()
    road(STAGED)
    made = Device()
    yield made
    for made.stream in streams():
        made.set_delay(DELAY_US)
    road(STAGED)
    agree(not made.violations(), made.violations())


@pytest.fixture(autouse=True)
def small_chunks():
    """Chunks of which a piece is several."""
    mpi.set_chunk_bytes(1000)
    yield
    mpi.set_chunk_bytes(None)


def road(direct_from):
    """Set how device memory comes to MPI on the world."""
    abi.set_road(resolve().id, direct_from, STAGING)


def numbers(shape, dtype=np.float64, seed=0):
    """Small whole numbers that differ by rank, so that sums are exact in every order."""
    random = np.random.default_rng([seed, ranks().rank])
    values = random.integers(1, 4, shape)
    if np.dtype(dtype).kind == "c":
        return (values + 1j * random.integers(1, 4, shape)).astype(dtype)
    return (values > 1 if dtype == np.bool_ else values).astype(dtype)


def on_host(made, operands, params):
    """The same call on host memory."""
    return run_on_host(made.spec, operands, **params)


def check(gpu, made, operands, in_place=True, **params):
    """Compare a call on device memory with the same call on host memory, in every element."""
    params = {"comm": resolve().id} | params
    found = gpu.run(made.spec, operands, in_place, **params)
    expected = on_host(made, operands, params)
    for mine, theirs in zip(found, expected, strict=True):
        agree(mine.dtype == theirs.dtype and np.array_equal(mine, theirs), f"{mine} {theirs}")


def reduction(made, **more):
    """The parameters of a reduction."""
    named = {"op": int(Op.SUM), "chunk": 0, "root": ranks().size - 1} | more
    return {name: named[name] for name in made.spec.attributes if name != "comm"}


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


@pytest.mark.parametrize("dtype", [np.float64, np.complex64], ids=str)
def test_symmetric(gpu, dtype):
    matrix = numbers((2, 20, 20), dtype)
    matrix = matrix + np.swapaxes(matrix, 1, 2).conj()
    check(gpu, table.allreduce_symmetric, [matrix], op=int(Op.SUM), chunk=0)


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
    # Messages of a whole number of halves end with an empty piece; templates are longer by 5.
    right, left = (ranks().rank + 1) % ranks().size, (ranks().rank - 1) % ranks().size
    params = {"dest": right, "source": left, "sendtag": 7, "recvtag": -1, "status": 0}
    check(gpu, table.sendrecv, [numbers(size), numbers(size + 5, seed=1)], **params)


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


def test_stale_tails(gpu):
    # What mpi4jax#229 got wrong: calls one after the other, each on the result of the one before.
    x = numbers(3000)
    buffer = gpu.produce(x)
    params = {"comm": resolve().id, **reduction(table.allreduce)}
    for _ in range(10):
        (buffer,), error = gpu.call(table.allreduce.spec, [buffer], **params)
        agree(error is None, str(error))
    read = gpu.consume(buffer)
    gpu.drain()
    (total,) = on_host(table.allreduce, [x], params)
    agree(np.array_equal(read, total * float(ranks().size) ** 9))


def test_two_streams_share_staging_memory(gpu):
    # The second call must not overwrite what the first has still to copy to the device.
    params = {"comm": resolve().id, **reduction(table.allreduce)}
    first, second = numbers(400), numbers(400, seed=1)
    gpu.set_delay(30_000)
    waiting, _ = gpu.call(table.allreduce.spec, [gpu.produce(first)], **params)
    read_first = gpu.consume(waiting[0])
    gpu.stream = streams()[1]
    gpu.set_delay(0)
    (read_second,) = gpu.run(table.allreduce.spec, [second], **params)
    agree(np.array_equal(read_first, on_host(table.allreduce, [first], params)[0]))
    agree(np.array_equal(read_second, on_host(table.allreduce, [second], params)[0]))


def test_two_devices_in_one_process(gpu):
    for gpu.stream in (*streams(), *streams()):
        check(gpu, table.allreduce, [numbers(400)], **reduction(table.allreduce))


def test_host_memory_is_bounded(gpu):
    for size in (100, 2_000):
        check(gpu, table.allreduce, [numbers(size)], **reduction(table.allreduce))
    before = gpu.library.fake_pinned_bytes()
    check(gpu, table.allreduce, [numbers(20_000)], **reduction(table.allreduce))
    agree(gpu.library.fake_pinned_bytes() == before)


def copies_of(gpu, made, operands, in_place=True, **params):
    """Compare a call with that on host memory, and return how often memory was copied for it."""
    before = gpu.library.fake_copies()
    check(gpu, made, operands, in_place, **params)
    return gpu.library.fake_copies() - before


def test_device_memory_for_an_mpi_that_takes_it(gpu):
    sums = reduction(table.allreduce)
    gpu.library.fake_unprotect(1)
    road(DIRECT)
    direct, staged = [], []
    try:
        for made in (table.allreduce, table.reduce, table.scan, table.bcast):
            for in_place in (True, False):
                direct.append(copies_of(gpu, made, [numbers(700)], in_place, **reduction(made)))
        direct.append(copies_of(gpu, table.allgather, [numbers(9)]))
        staged.append(copies_of(gpu, table.exscan, [numbers(9)], **reduction(table.exscan)))
        staged.append(copies_of(gpu, table.allreduce, [numbers(70, np.float16)], **sums))
        staged.append(copies_of(gpu, table.allreduce, [numbers(9), numbers(8)], **sums))
        test_ring(gpu, 700)
        road(10 * 8)  # bytes from which it is worth while
        staged.append(copies_of(gpu, table.allreduce, [numbers(9)], **sums))
        direct.append(copies_of(gpu, table.allreduce, [numbers(10)], **sums))
    finally:
        gpu.library.fake_unprotect(0)
    agree(not any(direct) and all(staged), f"{direct} {staged}")


def test_the_quicker_road_is_taken(gpu):
    # Six calls of a kind and size are timed, in turn. One rank is slow with copies: all go direct.
    gpu.library.fake_unprotect(1)
    road(device.AUTO)
    gpu.set_delay(2000 if ranks().rank == 0 else 0)
    try:
        copies = []
        for seed in range(9):
            params = reduction(table.allreduce)
            copies.append(copies_of(gpu, table.allreduce, [numbers(100, seed=seed)], **params))
            check(gpu, table.bcast, [numbers(90, seed=seed)], **reduction(table.bcast))
    finally:
        gpu.library.fake_unprotect(0)
    agree(copies == [0, 2, 0, 2, 0, 2, 0, 0, 0], str(copies))
    timed = abi.trials(resolve().id)
    agree(set(timed) == {("MPI_Allreduce", 1024), ("MPI_Bcast", 1024)}, str(timed))
    everyone = ranks().reporting.allgather(timed)
    direct, staged = timed["MPI_Allreduce", 1024]
    agree(0 < direct < staged and everyone == [timed] * ranks().size, str(everyone))


def test_a_call_that_is_not_made_is_not_timed(gpu):
    if ranks().size == 1:
        return
    road(device.AUTO)
    agreement.set_checking(True)
    try:
        size = 100 + ranks().rank
        operand = gpu.produce(numbers(size))
        params = {"comm": resolve().id, **reduction(table.allreduce)}
        _, error = gpu.call(table.allreduce.spec, [operand], **params)
        gpu.drain()
    finally:
        agreement.set_checking(False)
    agree("different MPI calls" in str(error), str(error))
    agree(abi.trials(resolve().id) == {}, str(abi.trials(resolve().id)))


FAILING = [
    "cuStreamGetCtx",
    "cuCtxPushCurrent_v2",
    "cuStreamSynchronize",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuEventSynchronize",
    "cuEventRecord",
]


def failing_calls(comm):
    """Calls on one rank that use all of `FAILING`: rows, operands and parameters."""
    mine = {"comm": comm, **reduction(table.allreduce, root=0)}
    ring = {"comm": comm, "dest": 0, "source": 0, "sendtag": 1, "recvtag": 1, "status": 0}
    tiles = numbers((4, 3 + 2 * 5 + 6))
    tiles[:, :3] = 1, 3, 2
    yield table.allreduce, [numbers(20)], mine
    yield table.allgather, [numbers(20)], {"comm": comm}
    yield table.reduce_scatter, [numbers((1, 20))], mine
    yield table.merge_moments, [tiles], {"comm": comm, "chunk": 0}
    yield table.sendrecv, [numbers(20), numbers(20, seed=1)], ring
    yield table.iallreduce, [numbers(20)], {"comm": comm, "count": 1, "op": 0}


@pytest.mark.parametrize("function", FAILING)
def test_errors_of_the_driver(gpu, function):
    # On a communicator of one rank, so that no other rank waits for what this one cannot send.
    comm = resolve(ranks().communicators["self"]).id
    abi.set_road(comm, STAGED, STAGING)
    for made, operands, params in failing_calls(comm):
        gpu.run(made.spec, operands, **params)
        made_of = [gpu.produce(x) for x in operands]
        gpu.library.fake_fail(function.encode(), 1)
        _, error = gpu.call(made.spec, made_of, **params)
        gpu.drain()
        agree(
            f"{function} of the GPU's driver failed with code 700 (as ordered)" in str(error)
            and "rank 0 of 1" in str(error),
            f"{made.spec.name}: {error}",
        )
        gpu.run(made.spec, operands, **params)  # as if nothing had been
    nonblocking.complete_all(comm)


def test_a_wait_whose_number_cannot_be_read(gpu):
    comm = resolve(ranks().communicators["self"]).id
    abi.set_road(comm, STAGED, STAGING)
    (number, x), _ = gpu.call(
        table.iallreduce.spec, [gpu.produce(numbers(5))], comm=comm, count=1, op=int(Op.SUM)
    )
    gpu.library.fake_fail(b"cuMemcpyDtoHAsync_v2", 1)
    _, error = gpu.call(table.wait.spec, [number, x], comm=comm, count=1)
    agree("cuMemcpyDtoHAsync_v2" in str(error), str(error))
    (y,), error = gpu.call(table.wait.spec, [number, x], comm=comm, count=1)
    read = gpu.consume(y)
    gpu.drain()
    agree(error is None and np.array_equal(read, numbers(5)), str(error))


@pytest.mark.parametrize("function", ["cuMemHostAlloc", "cuEventCreate"])
def test_no_staging_memory(gpu, function):
    bind(STAGING + 8)  # none is there yet
    comm = resolve(ranks().communicators["self"]).id
    abi.set_road(comm, STAGED, STAGING)
    params = {"comm": comm, **reduction(table.allreduce)}
    gpu.library.fake_fail(function.encode(), 1)
    _, error = gpu.call(table.allreduce.spec, [gpu.produce(numbers(5))], **params)
    gpu.drain()
    agree(f"{function} of the GPU's driver failed" in str(error), str(error))
    gpu.run(table.allreduce.spec, [numbers(5)], **params)


# A function that breaks one rule, in place of the driver's own.
MUTANTS = {
    "mutant_synchronize": "synchronize",
    "mutant_event_synchronize": "event_synchronize",
    "mutant_event_record": "event_record",
    "mutant_copy_to_host": "copy_to_host",
    "mutant_copy_to_device": "copy_to_device",
    "mutant_copy_on_device": "copy_on_device",
    "mutant_block": "copy_to_host",
    "mutant_other_stream": "copy_to_device",
    "mutant_allocate": "allocate",
    "mutant_enter_context": "enter_context",
    "mutant_leave_context": "leave_context",
}


@pytest.mark.parametrize("mutant", [None, *MUTANTS])
def test_a_broken_rule_is_noticed(mutant):
    bind(mutants={MUTANTS[mutant]: mutant} if mutant else {})
    road(STAGED)
    gpu, comm = Device(), resolve().id
    calls = []
    for number in range(4):  # on a slow and a quick stream in turn, and nobody waits in between
        gpu.stream = streams()[number % 2]
        gpu.set_delay(30_000 if number % 2 == 0 else 0)
        made, in_place = (table.allreduce, True) if number < 2 else (table.bcast, False)
        params = {"comm": comm, **reduction(made, root=0)}
        operand = numbers(400 + 700 * (number % 2), seed=number)
        (result,), error = gpu.call(made.spec, [gpu.produce(operand)], in_place, **params)
        calls.append((made, operand, params, gpu.consume(result), error))
    gpu.drain()
    right = [
        np.array_equal(found, on_host(made, [operand], params)[0])
        for made, operand, params, found, _ in calls
    ]
    for stream in streams():
        gpu.stream = stream
        gpu.set_delay(DELAY_US)
    noticed = bool(gpu.violations()) or not all(right)
    agree(all(error is None for *_, error in calls))
    if mutant == "mutant_synchronize" and ranks().size == 1:
        return  # MPI moves nothing, so nothing can be too early
    agree(noticed or ranks().rank != 0 if mutant else not noticed, mutant or gpu.violations())

"""What a GPU's driver is asked to do, on one without a GPU that checks it: order, roads, errors."""

import numpy as np
import pytest
from gpu.calls import (
    DIRECT,
    STAGED,
    check,
    check_ring,
    numbers,
    on_host,
    reduction,
    road,
)
from gpu.fake import DELAY_US, STAGING, Device, bind, call_on_host, streams
from spmd import agree, ranks

from distsolve.mpi import device, table
from distsolve.mpi.comm import _agree_on_road, resolve
from distsolve.mpi.library import load
from distsolve.mpi.native import abi, agreement, nonblocking
from distsolve.mpi.operations import Op

pytestmark = [pytest.mark.few_ranks, pytest.mark.below_jax]


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
        check_ring(gpu, 700)
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
    gpu.set_delay(15_000 if ranks().rank == 0 else 0)  # far beyond a busy machine
    try:
        copies = []
        for seed in range(7):
            params = reduction(table.allreduce)
            copies.append(copies_of(gpu, table.allreduce, [numbers(100, seed=seed)], **params))
            check(gpu, table.bcast, [numbers(90, seed=seed)], **reduction(table.bcast))
    finally:
        gpu.library.fake_unprotect(0)
    agree(copies == [0, 2, 0, 2, 0, 2, 0], str(copies))
    timed = abi.trials(resolve().id)
    agree(set(timed) == {("MPI_Allreduce", 1024), ("MPI_Bcast", 1024)}, str(timed))
    everyone = ranks().reporting.allgather(timed)
    direct, staged = timed["MPI_Allreduce", 1024]
    agree(0 < direct < staged and everyone == [timed] * ranks().size, str(everyone))


def test_all_take_the_road_that_none_forbids(monkeypatch):
    # MPI passed on all nodes but the last, whose halves are larger, too.
    last = device.Road(STAGED, "it crashed")
    rank, is_last = ranks().rank, ranks().rank == ranks().size - 1
    monkeypatch.setattr(device, "_looked", True)
    monkeypatch.setattr(device, "_loaded", "cuda")
    monkeypatch.setattr(device, "_road", last if is_last else device.Road(device.AUTO, "passed"))
    monkeypatch.setattr(device, "staging_bytes", lambda: 65536 + rank)
    monkeypatch.delenv("DISTSOLVE_GPU_MPI", raising=False)
    agreed = _agree_on_road(load().MPI, ranks().agreeing, probing=True)
    agree(agreed == (STAGED, 65536) and device.road() == last, f"{agreed} {device.road()}")


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


@pytest.mark.parametrize(
    ("function", "number"),
    [("cuMemcpyHtoDAsync_v2", 3), ("cuMemcpyDtoHAsync_v2", 3), ("cuMemcpyDtoHAsync_v2", 5)],
)
def test_roads_stay_equal_where_a_call_fails_on_one_rank(gpu, function, number):
    """Behind MPI all count it; before MPI nobody does, and it is repeated."""
    gpu.library.fake_unprotect(1)
    own = ranks().communicators["world"].Dup()  # what fails is counted as a call of its own
    comm = resolve(own).id
    abi.set_road(comm, device.AUTO, STAGING)
    params = {"comm": comm, **reduction(table.allreduce)}

    def call(operand):
        ((result,), error) = gpu.call(table.allreduce.spec, [gpu.produce(operand)], **params)
        read = gpu.consume(result)
        gpu.drain()
        return read, str(error)

    try:
        for index in range(8):
            operand = numbers(100, seed=index)
            fails = index == number and ranks().rank == ranks().size - 1
            if fails:  # a staged one
                gpu.library.fake_fail(function.encode(), 1)
            read, error = call(operand)
            is_told = "as ordered" in error
            if fails and function == "cuMemcpyDtoHAsync_v2":  # the others are in the call
                read, error = call(operand)
            (total,) = on_host(table.allreduce, [operand], params)
            is_lost = fails and function == "cuMemcpyHtoDAsync_v2"
            is_right = error == "None" and np.array_equal(read, total)
            agree(is_told == fails and is_right != is_lost, error)
    finally:
        gpu.library.fake_unprotect(0)
    timed = abi.trials(comm)
    everyone = ranks().reporting.allgather(timed)
    agree(len(timed) == 1 and everyone == [timed] * ranks().size, str(everyone))
    own.Free()


@pytest.fixture
def checking():
    """Check mode."""
    agreement.set_checking(True, lines=False)
    yield
    agreement.set_checking(False)


def test_ranks_on_a_gpu_and_without_one_are_told(gpu, checking):
    if ranks().size == 1:
        return
    params = {"comm": resolve().id, **reduction(table.allreduce)}
    if ranks().rank == 0:
        _, error = call_on_host(table.allreduce.spec, [numbers(5)], **params)
    else:
        _, error = gpu.call(table.allreduce.spec, [gpu.produce(numbers(5))], **params)
        gpu.drain()
    others = "1" if ranks().size == 2 else f"1-{ranks().size - 1}"
    agree(
        "different MPI calls" in str(error)
        and "rank 0: MPI_Allreduce float64[5] SUM (communicator" in error
        and f"rank {others}: MPI_Allreduce float64[5] SUM, in device memory (comm" in error,
        str(error),
    )


@pytest.mark.parametrize("dtype", [np.float32, np.complex128, np.int64], ids=str)
def test_elements_on_the_device_are_checked(gpu, checking, dtype):
    for made in (table.allreduce, table.reduce, table.bcast):
        check(gpu, made, [numbers(3000, dtype)], **reduction(made))
    if ranks().size == 1:
        return  # check mode has nothing to compare
    bind(mutants={"copy_to_device": "mutant_lose"})
    operand = gpu.produce(numbers(30, dtype) + dtype(ranks().rank))
    params = {"comm": resolve().id, **reduction(table.allreduce)}
    _, error = gpu.call(table.allreduce.spec, [operand], **params)
    gpu.drain()
    agree("result of an MPI call is wrong" in str(error), str(error))


@pytest.mark.parametrize("function", ["cuMemcpyDtoHAsync_v2", "cuStreamSynchronize"])
def test_elements_that_cannot_be_read(gpu, checking, function):
    if ranks().size == 1:
        return
    params = {"comm": resolve().id, **reduction(table.allreduce)}
    operand = gpu.produce(numbers(30))
    first = 2 if function == "cuStreamSynchronize" else 1  # behind that of the call's beginning
    gpu.library.fake_fail(function.encode(), first)
    _, error = gpu.call(table.allreduce.spec, [operand], **params)
    gpu.drain()
    agree(f"{function} of the GPU's driver failed" in str(error), str(error))


@pytest.mark.parametrize("mutants", [None, {"current_context": "mutant_current_device"}])
def test_amds_current_device_is_put_back(gpu, mutants):
    bind(mutants=mutants, platform="rocm")
    for gpu.stream in streams():
        check(gpu, table.allreduce, [numbers(700)], **reduction(table.allreduce))
    told = gpu.violations()
    gpu.library.fake_reset()
    agree(bool(told) == bool(mutants), told)


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
        before = gpu.library.fake_pinned_bytes()
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
        agree(gpu.library.fake_pinned_bytes() == before, "host memory was lost")
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


@pytest.mark.usefixtures("small_chunks")
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

"""Check mode: what does not fit raises on every rank, with all sides in the text."""

import contextlib
import ctypes

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI
from spmd import agree, ranks

import distsolve
from distsolve import mpi
from distsolve.mpi import library, programs
from distsolve.mpi._jaxcompat import mlir
from distsolve.mpi.native import abi, agreement

pytestmark = pytest.mark.below_jax


@pytest.fixture(autouse=True)
def checking():
    """Turn check mode on for a test."""
    agreement.set_checking(True)
    yield
    agreement.set_checking(False)


@pytest.fixture
def comm():
    """Give a communicator of its own: after a fault its ranks count differently."""
    made = MPI.COMM_WORLD.Dup()
    mpi.prepare(made)
    yield made
    made.Free()


def lines(comm, rank, size, call=mpi.allreduce):
    """Make one collective from two lines."""
    if rank == size - 1:
        return call(jnp.ones(3), comm=comm)
    return call(jnp.ones(3), comm=comm)


def swapped(comm, rank, size):
    """Make two collectives in another order on the last rank."""
    calls = [lambda: mpi.barrier(comm=comm), lambda: mpi.allreduce(jnp.ones(3), comm=comm)]
    for call in reversed(calls) if rank == size - 1 else calls:
        call()


def missing(comm, rank, size):
    """Leave a collective out on the last rank."""
    if rank < size - 1:
        mpi.allreduce(jnp.ones(3), comm=comm)
    mpi.allreduce(jnp.ones(3), comm=comm)


def extra(comm, rank, size):
    """Make a collective more on the last rank; the others are at the next one."""
    if rank == size - 1:
        mpi.bcast(jnp.ones(2), 0, comm=comm)
    mpi.allreduce(jnp.ones(3), comm=comm)


def amounts(comm, rank, size):
    """Send to oneself, on the last rank, what the first one expects: the sums agree."""
    ones = np.ones(comm.size, int)
    moved = (rank == size - 1) * (np.arange(comm.size) == rank).astype(int)
    mpi.alltoallv(jnp.ones(comm.size), ones + moved - np.roll(moved, 1), ones, comm=comm)


# What differs by rank, and a word of each side.
FAULTS = {
    "count": (lambda c, r, n: mpi.allreduce(jnp.ones(4 + (r == n - 1)), comm=c), "[4]", "[5]"),
    "size of a later leaf": (
        lambda c, r, n: mpi.allreduce([jnp.ones(4), jnp.ones(2 + (r == n - 1))], comm=c),
        "[6]",
        "[7]",
    ),
    "dtype": (
        lambda c, r, n: mpi.allreduce(
            jnp.ones(4, jnp.int32 if r == n - 1 else jnp.float32), comm=c
        ),
        "float32[4]",
        "int32[4]",
    ),
    "operation": (
        lambda c, r, n: mpi.allreduce(jnp.ones(4), mpi.MAX if r == n - 1 else mpi.SUM, comm=c),
        "SUM",
        "MAX",
    ),
    "root": (lambda c, r, n: mpi.bcast(jnp.ones(4), int(r == n - 1), comm=c), "peer 0", "peer 1"),
    "call": (
        lambda c, r, n: (mpi.scan if r == n - 1 else mpi.allreduce)(jnp.ones(4), comm=c),
        "MPI_Allreduce",
        "MPI_Scan",
    ),
    "symmetric": (
        lambda c, r, n: (mpi.allreduce_symmetric if r == n - 1 else mpi.allreduce)(
            jnp.ones((2, 3, 3)), comm=c
        ),
        "[18]",
        "[12]",
    ),
    "order": (swapped, "MPI_Barrier", "MPI_Allreduce"),
    "missing": (missing, "different lines", f"{__file__}:"),
    "lines": (lines, "different lines", f"{__file__}:"),
    "extra": (extra, "MPI_Allreduce", "MPI_Bcast"),
    "amounts": (amounts, "`send_counts[j]` of rank i must equal", ", send_counts "),
}


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jitted"])
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_raises_on_every_rank(name, jitted, comm):
    fault, *words = FAULTS[name]
    me, size = ranks().rank, ranks().size
    if size == 1:
        fault(comm, 0, 2)  # nobody to differ from
        return
    run = (
        jax.jit(lambda _: (fault(comm, me, size), 0)[1])
        if jitted
        else lambda _: fault(comm, me, size)
    )
    text = ""
    try:
        jax.block_until_ready(run(0))
        jax.effects_barrier()
    except jax.errors.JaxRuntimeError as error:
        text = str(error)
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        mpi.barrier(comm=MPI.COMM_SELF)  # what is left of the program must not disturb the next
    others = "0" if size == 2 else f"0-{size - 2}"
    agree("DISTSOLVE_CHECK" in text and all(word in text for word in words), text)
    agree(f"rank {others}: " in text and f"rank {size - 1}: " in text, text)
    agree(text.count(f" at {__file__}:") == 2, text)


def test_lines_need_not_be_compared(comm):
    agreement.set_checking(True, lines=False)
    size = ranks().size
    agree(lines(comm, ranks().rank, size)[0] == size)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "complex64", "bfloat16"])
def test_right_results_pass(dtype, comm):
    me, size = ranks().rank, ranks().size
    x = (jnp.arange(1000) % 7 + me).astype(dtype)
    total = mpi.allreduce(x, comm=comm)
    agree(total[3] == 3 * size + size * (size - 1) // 2)
    agree(jnp.all(mpi.bcast(x, size - 1, comm=comm) == x - me + size - 1))
    agree(mpi.reduce(x, root=0, comm=comm)[0] == (size * (size - 1) // 2 if me == 0 else me))
    agree(jnp.all(jnp.isnan(mpi.allreduce(jnp.full(5, jnp.nan), comm=comm))))


def test_ranks_may_send_different_amounts(comm):
    """Also nothing at all, and reductions in the background may be started one after the other."""
    me, size = ranks().rank, ranks().size
    counts = [3 if me == 0 else 0] * size
    rows = jnp.arange(sum(counts), dtype=jnp.float32)
    received = mpi.alltoallv(rows, counts, [3] + [0] * (size - 1), comm=comm)
    agree(received.tolist() == [3.0 * me, 3.0 * me + 1, 3.0 * me + 2])
    request = mpi.iallreduce(jnp.ones(2), comm=comm)
    agree(jnp.all(mpi.wait(request) == size))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_numbers_that_XLA_takes_for_zero_pass(dtype, comm):
    me, size = ranks().rank, ranks().size
    small = float(np.finfo(dtype).smallest_subnormal)
    x = np.full(5, 700 * small * (1 + me), dtype)
    total = np.asarray(mpi.allreduce(x, comm=comm))
    agree(np.all(total == 700 * small * (size * (size + 1) // 2)), str(total))


# Reductions in the background, and a word of each side.
STARTED = {
    "dtype": (
        lambda c, r, n: mpi.iallreduce(
            jnp.ones(4, jnp.int32 if r == n - 1 else jnp.float32), comm=c
        ),
        ("float32[4]", "int32[4]"),
    ),
    "operation": (
        lambda c, r, n: mpi.iallreduce(jnp.ones(4), mpi.MAX if r == n - 1 else mpi.SUM, comm=c),
        ("SUM", "MAX"),
    ),
    "line": (
        lambda c, r, n: lines(c, r, n, mpi.iallreduce),
        ("different lines", "different lines"),
    ),
}


@pytest.mark.parametrize("name", STARTED)
def test_a_reduction_in_the_background_raises_where_it_is_waited_for(name):
    start, words = STARTED[name]
    me, size = ranks().rank, ranks().size
    comm = MPI.COMM_WORLD.Dup()  # not freed: nobody waits for what does not match
    right = mpi.iallreduce(jnp.ones(3), comm=comm)
    wrong = start(comm, me, size)
    agree(mpi.wait(right)[0] == size)
    text = ""
    try:
        jax.block_until_ready(mpi.wait(wrong))
    except jax.errors.JaxRuntimeError as error:
        text = str(error)
    if size == 1:
        agree(text == "")
        return
    agree("DISTSOLVE_CHECK" in text and words[me == size - 1] in text, text)
    agree(f"rank {me}: MPI_Iallreduce" in text and f" at {__file__}:" in text, text)
    agree(mpi.allreduce(1.0, comm=comm) == size)


FUNCTION = ctypes.CFUNCTYPE(
    ctypes.c_int, *[ctypes.c_void_p] * 2, ctypes.c_int, *[ctypes.c_uint64] * 3
)
FAULTY = {"stale": lambda value: 0.5, "doubled": lambda value: 2 * value}


@pytest.mark.parametrize("kind", FAULTY)
def test_wrong_data_are_caught(kind, comm):
    """An MPI that forgets the last element, or counts it twice."""
    if ranks().size == 1:
        return  # nothing is compared
    addresses = library._addresses(library.load().MPI)
    real = FUNCTION(addresses["MPI_Allreduce"])

    def broken(send, recv, count, dtype, op, handle):
        code = real(send, recv, count, dtype, op, handle)
        if count == 1000:
            last = (ctypes.c_float * count).from_address(recv)
            last[count - 1] = FAULTY[kind](last[count - 1])
        return code

    function = FUNCTION(broken)
    abi.bind(addresses | {"MPI_Allreduce": ctypes.cast(function, ctypes.c_void_p).value})
    try:
        mpi.allreduce(jnp.ones(1000, jnp.float32), comm=comm)
        text = ""
    except jax.errors.JaxRuntimeError as error:
        text = str(error)
    finally:
        abi.bind(addresses)
    agree("number 999 is" in text and "stale or doubled" in text, text)
    agree(f"{__file__}:" in text and f"rank {ranks().rank} of" in text, text)


def test_programs_that_differ_are_a_warning(comm, monkeypatch, capfd):
    """Once for each way in which they do; shapes and constants may differ."""
    monkeypatch.setattr(mlir, "lower_jaxpr_to_module", mlir.lower_jaxpr_to_module)  # put back
    programs.compare_programs()
    me, size = ranks().rank, ranks().size

    @jax.jit
    def alike(x):
        x = jax.lax.fori_loop(0, 2, lambda i, x: mpi.allreduce(x, comm=comm) / (i + 2), x)
        return mpi.allreduce(jnp.sum(jnp.zeros(3 + me) + x[0] + me), comm=comm)

    @jax.jit
    def different(x):
        return mpi.allreduce(jnp.sin(x) if me == size - 1 else x, comm=comm)

    jax.block_until_ready(alike(jnp.ones(3)))
    shown = capfd.readouterr().err
    agree("different programs" not in shown, shown)
    for n in (3, 3, 4):
        jax.block_until_ready(different(jnp.ones(n)))
    shown = capfd.readouterr().err
    told = size > 1 and me == 0
    agree(shown.count("ranks run different programs") == told, shown)
    agree((f"rank {size - 1}: %0 = stablehlo.sine" in shown) == told, shown)
    agree((f" at {__file__}:" in shown) == told, shown)


def test_copies_in_a_sharded_space_are_a_warning(capfd):
    me, size = ranks().rank, ranks().size
    distsolve.cg(lambda v: 2 * v, jnp.arange(1.0, 9.0) + me, space=distsolve.Sharded())
    jax.effects_barrier()
    agree("equal on all ranks" not in capfd.readouterr().err)
    distsolve.cg(lambda v: 2 * v, jnp.arange(1.0, 9.0), space=distsolve.Sharded())
    jax.effects_barrier()
    shown = capfd.readouterr().err
    agree(("equal on all ranks" in shown) == (size > 1 and me == 0), shown)
    agree(("Replicated" in shown) == (size > 1 and me == 0), shown)

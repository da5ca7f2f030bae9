"""What `doctor` computes on all ranks, and compares with what it must be.

A check yields what it looked at, what came, and what was expected. It communicates the same way
whether or not these agree, so that all ranks reach its end.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distsolve import linalg, mpi

Comparison = tuple[str, Any, Any]

# Around packing, vector registers and chunks, and larger than what goes in one message.
AWKWARD = (
    (jnp.float32, 0),
    (jnp.int8, 1),
    (jnp.complex64, 3),
    (jnp.float64, 1001),
    (jnp.bfloat16, 4097),
    (jnp.float32, 1_500_001),
)
CHUNK = 1000  # elements of float32
ROUNDS = 50


def _weights(size: int) -> np.ndarray:
    """Return a number for each rank, small: their sums are exact in every dtype."""
    return 1 + np.arange(size) % 3


def in_place(rank: int, size: int) -> Iterator[Comparison]:
    """Compare donated reductions with those that keep their operand."""
    reduce = jax.jit(mpi.allreduce)
    reduce_donated = jax.jit(mpi.allreduce, donate_argnums=0)
    weights = _weights(size)
    for dtype, length in AWKWARD:
        what = f"allreduce of {jnp.dtype(dtype).name}[{length}]"
        entries = 1 + np.arange(length) % 5
        # Integers wrap around, and 16-bit floats are summed in 32 bits: both as a cast does.
        total = (entries * weights.sum()).astype(dtype)
        mine = (entries * weights[rank]).astype(dtype)
        x = jnp.array(mine)
        yield what, reduce(x), total
        yield f"the operand of {what}", x, mine
        place = x.unsafe_buffer_pointer() if length else 0
        y = reduce_donated(x)
        yield f"{what}, donated", y, total
        yield f"the place of {what}, donated", y.unsafe_buffer_pointer() if length else 0, place


def order(rank: int, size: int) -> Iterator[Comparison]:
    """Make independent calls that ranks reach at different times."""
    left, right = (rank - 1) % size, (rank + 1) % size
    work = jnp.ones((300, 300) if rank % 2 else (1, 1))

    @jax.jit
    def program(work, x):
        late = x + 0 * jnp.sum(work @ work)
        passed = mpi.sendrecv(x, x, left, right)
        return mpi.allreduce(late), mpi.allreduce(jnp.full(5, 2.0)), passed

    results = [program(work, jnp.full(3, rank + float(k))) for k in range(ROUNDS)]
    for k, (late, early, passed) in enumerate(results):
        ranks = np.arange(size)
        yield f"the first allreduce of round {k}", late, np.full(3, float(np.sum(ranks + k)))
        yield f"the second allreduce of round {k}", early, np.full(5, 2.0 * size)
        yield f"the sendrecv of round {k}", passed, np.full(3, left + float(k))


def large_counts(rank: int, size: int) -> Iterator[Comparison]:
    """Cut reductions into chunks, as those that no int can count."""
    for length in (CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 500):
        x = np.arange(length, dtype=np.float32) % 7
        before = mpi.call_count()["MPI_Allreduce"]
        y = mpi.allreduce(x * np.float32(rank % 3), chunk_bytes=4 * CHUNK)
        calls = mpi.call_count()["MPI_Allreduce"] - before
        what = f"allreduce of {length} elements in chunks of {CHUNK}"
        yield what, y, x * np.float32(np.sum(np.arange(size) % 3))
        yield f"MPI calls of the {what}", calls, -(-length // CHUNK)


def gradients(rank: int, size: int) -> Iterator[Comparison]:
    """Differentiate a loss that ends in a sum over the ranks, both ways."""
    scale = 2.0 ** (rank % 3)
    whole = np.sum(2.0 ** (np.arange(size) % 3))

    def share(p):
        return mpi.allreduce(scale * p)

    def full(p):
        return share(mpi.pvary(p))

    yield "the gradient on each rank", jax.grad(share)(1.0), scale
    yield "the gradient with pvary", jax.grad(full)(1.0), whole
    value, tangent = jax.jvp(share, (3.0,), (1.0,))
    yield "the value of jvp", value, 3.0 * whole
    yield "the tangent of jvp", tangent, whole


def cg(rank: int, size: int) -> Iterator[Comparison]:
    """Solve a diagonal system, each rank with a piece of its own length."""
    lengths = 2 + np.arange(size) % 3
    start = lengths[:rank].sum()
    d = 1.0 + np.arange(start, start + lengths[rank]) % 3  # three eigenvalues: three steps
    x, info = linalg.cg(lambda p: d * p, jnp.ones(lengths[rank]), tol=1e-12, space=linalg.Sharded())
    yield "the reason why cg ended", info.reason_name, "converged"
    yield "more than 3 iterations of cg", int(info.iterations) > 3, False
    yield "x of cg, to 10 digits", np.round(x * d, 10), np.ones(lengths[rank])


CHECKS = {
    "in place": in_place,
    "order": order,
    "large counts": large_counts,
    "gradients": gradients,
    "cg": cg,
}


def fault(check: Callable[[int, int], Iterator[Comparison]], rank: int, size: int) -> str:
    """Run a check to its end.

    Parameters
    ----------
    check : callable
        Of `CHECKS`.
    rank, size : int

    Returns
    -------
    str
        The first thing that was wrong on this rank, or nothing.

    Communication
    -------------
    That of the check. After an exception this rank leaves it early.
    """
    found = ""
    try:
        with jax.disable_jit(False), jax.debug_nans(False), jax.debug_infs(False):
            for what, got, want in check(rank, size):
                found = found or _difference(what, np.asarray(got), np.asarray(want))
    except Exception as error:
        found = found or f"{type(error).__name__}: {error}"
    return found


def _difference(what, got, want):
    if got.shape != want.shape or got.dtype.kind != want.dtype.kind:
        return f"{what}: {got.dtype}{list(got.shape)}, expected {want.dtype}{list(want.shape)}"
    wrong = np.flatnonzero(got != want)
    if not wrong.size:
        return ""
    place = f"entry {wrong[0]} is " if want.ndim else ""
    values = (x.ravel()[wrong[0]].item() for x in (got, want))
    return "{}: {}{}, expected {}".format(what, place, *values)

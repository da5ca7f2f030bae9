"""Moments of samples merged by one reduction, against NumPy on all samples with more digits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI
from spmd import agree, assert_allclose, on, ranks

from distsolve import mpi
from distsolve.mpi.native import agreement
from distsolve.mpi.ops import merge_moments

FAR = 1e4  # from zero are all samples
# Of each tile the spread of the samples, and how many each rank has.
TILES = [(1e-2, (3, 4, 0, 5)), (1.0, (4, 4, 4, 4)), (1e3, (3, 0, 2, 5))]
SIDES = {"squares": (3, 0), "products": (3, 2)}
CASES = [("float32", "squares"), ("float64", "squares"), ("float32", "products")]
CASES += [("float64", "products"), ("complex64", "products"), ("complex128", "products")]


def wide(x):
    """Return numbers with all the digits that NumPy has."""
    return x.astype(np.clongdouble if np.iscomplexobj(x) else np.longdouble)


def samples(dtype, width, tile):
    """Return the samples of each rank that one tile is made of."""
    spread, counts = TILES[tile]
    x = np.random.default_rng(tile).standard_normal((2, sum(counts), width))
    x = FAR + spread * (x[0] + 1j * x[1] if np.dtype(dtype).kind == "c" else x[0])
    return np.split(x.astype(dtype), np.cumsum(counts)[:-1])


def moments(x, rows):
    """Return how many samples there are, their mean beyond `FAR`, and their centred sums."""
    x = wide(x) - FAR  # exactly
    mean = x.mean(0) if len(x) else np.full(x.shape[1:], -FAR, x.dtype)
    d = x - mean
    if rows == d.shape[1]:
        return len(x), mean, np.sum(d * d, 0)
    return len(x), mean, np.einsum("ki,kj->ij", d[:, :rows], d[:, rows:].conj()).ravel()


def problem(dtype, kind):
    """Return this rank's tiles, and the moments that those of all ranks merge into."""
    rows, columns = SIDES[kind]
    mine, wanted = [], []
    for tile in range(len(TILES)):
        parts = samples(dtype, rows + columns, tile)
        n, mean, sums = moments(parts[ranks().rank], rows)
        large = (FAR + mean).astype(dtype)
        head = np.asarray([n, rows, columns], dtype)
        rest = (mean - (wide(large) - FAR)).astype(dtype)
        mine.append(np.concatenate([head, large, rest, sums.astype(dtype)]))
        wanted.append(moments(np.concatenate(parts[: ranks().size]), rows))
    return jnp.asarray(np.stack(mine)), wanted


def check(found, wanted, kind, dtype):
    """Compare merged tiles with what is wanted, and with those of the other ranks bit by bit."""
    width, eps = sum(SIDES[kind]), np.finfo(dtype).eps
    found = np.asarray(found)
    assert_allclose(found[:, 0], [n for n, _, _ in wanted], rtol=0)
    for tile, (_, mean, sums), (spread, _) in zip(found, wanted, TILES, strict=True):
        means = (wide(tile[3 : 3 + width]) - FAR) + wide(tile[3 + width : 3 + 2 * width])
        distance = np.max(np.abs(means - mean)) / spread
        agree(distance < 4 * eps, f"means that are wrong by {distance} of the spread")
        error = np.max(np.abs(wide(tile[3 + 2 * width :]) - sums)) / np.max(np.abs(sums))
        agree(error < 8 * eps, f"sums that are wrong by {error}")
    everyone = MPI.COMM_WORLD.allgather(found.tobytes())
    agree(len(set(everyone)) == 1, "the ranks have other bits")


def calls(function, *args):
    """Return a result, and the number of MPI calls that it took."""
    before = sum(mpi.call_count().values())
    result = jax.block_until_ready(function(*args))
    return result, sum(mpi.call_count().values()) - before


@pytest.fixture
def chunk():
    """Set the chunk of all communicators; the default comes back afterwards."""
    yield mpi.set_chunk_bytes
    mpi.set_chunk_bytes(None)


@pytest.mark.parametrize(("dtype", "kind"), CASES)
def test_moments_are_those_of_all_samples(dtype, kind, road, chunk):
    x, wanted = problem(dtype, kind)
    found, count = calls(road(merge_moments), x)
    agree(count == 1, f"{count} calls")
    check(found, wanted, kind, dtype)
    chunk(16)  # less than a tile
    found, count = calls(road(merge_moments), x)
    agree(count == len(TILES), f"{count} calls")
    check(found, wanted, kind, dtype)


def test_moments_without_in_place(chunk, without_in_place):
    x, wanted = problem("float64", "products")
    check(merge_moments(x), wanted, "products", "float64")
    chunk(2 * x[0].nbytes)
    check(merge_moments(x), wanted, "products", "float64")


@on("self", "halves")
def test_only_the_ranks_of_a_communicator_are_merged(comm):
    x, _ = problem("float64", "squares")
    counts = comm.allgather(float(x[0, 0]))
    agree(merge_moments(x, comm=comm)[0, 0] == sum(counts), f"not the samples of {counts}")


def test_moments_of_a_batch_are_one_message():
    x, wanted = problem("float64", "products")
    batch = jnp.stack([x, x[::-1]], 2)
    found, count = calls(jax.jit(jax.vmap(merge_moments, in_axes=2)), batch)
    agree(count == 1, f"{count} calls")
    check(found[0], wanted, "products", "float64")
    check(found[1, ::-1], wanted, "products", "float64")


def test_moments_in_check_mode():
    x, wanted = problem("float32", "products")
    agreement.set_checking(True)
    try:
        check(merge_moments(x), wanted, "products", "float32")
    finally:
        agreement.set_checking(False)


def test_moments_have_no_derivative_of_their_own():
    x, _ = problem("float64", "squares")
    with pytest.raises(NotImplementedError, match="merge_moments has no derivative"):
        jax.jvp(merge_moments, (x,), (x,))

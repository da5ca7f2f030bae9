"""Every dtype: what is reduced, how 16-bit floats round, what only moves, and what is refused."""

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from mpi import oracle
from spmd import agree, assert_equal, ranks

from distsolve import mpi

REDUCED = tuple(
    np.dtype(name)
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", ml_dtypes.bfloat16, "float32", "float64", "complex64", "complex128"),
    )
)
# JAX has names for these, but XLA's CPU client can make no array of them.
WITHOUT_ARRAYS = ("int1", "uint1", "float6_e2m3fn", "float6_e3m2fn")
# Every other scalar type that JAX has a name for: float8, float4, int4 and int2 among them.
NAMED = {value.dtype for value in vars(jnp).values() if isinstance(value, type(jnp.float32))}
EVERY = sorted((dtype for dtype in NAMED if str(dtype) not in WITHOUT_ARRAYS), key=str)
ONLY_MOVED = tuple(dtype for dtype in EVERY if dtype not in REDUCED)
NARROW = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
PICKY = [dtype for dtype in REDUCED if len(oracle.fitting(dtype)) < len(mpi.Op)]
MOVEMENTS = tuple(name for name in oracle.SERIAL if name not in oracle.REDUCTIONS)


def reduce_all(comm, dtype, road):
    """Run every operation that fits, each reduction among them, and compare."""
    world = oracle.members(comm)
    ops = oracle.fitting(dtype)
    cases = [(name, (op,)) for name in ("allreduce", "exscan") for op in ops]
    cases += [("scan", ops[-1:]), ("reduce_scatter", ops[:1]), ("reduce", (ops[0], 0))]
    operands = [oracle.operands(name, world, more, dtype) for name, more in cases]
    results = road(
        lambda xs: [
            oracle.invoke(name, x, comm, more) for x, (name, more) in zip(xs, cases, strict=True)
        ]
    )([jnp.asarray(xs[comm.rank]) for xs in operands])
    for y, xs, (name, more) in zip(results, operands, cases, strict=True):
        assert_equal(y, oracle.SERIAL[name](xs, *more)[comm.rank], f"{name}{more}")


@pytest.mark.parametrize("dtype", REDUCED, ids=str)
def test_every_operation_that_fits(dtype):
    reduce_all(ranks().communicators["world"], dtype, jax.jit)


@pytest.mark.parametrize("dtype", [np.bool_, np.uint16, jnp.bfloat16, np.complex64])
def test_every_operation_that_fits_eagerly(dtype):
    reduce_all(ranks().communicators["world"], np.dtype(dtype), lambda f: f)


@pytest.mark.once
@pytest.mark.parametrize("dtype", PICKY, ids=str)
def test_operations_that_do_not_fit_raise_while_tracing(dtype):
    before = mpi.call_count()
    x = jnp.zeros((ranks().size, 2), dtype)
    unfit = [op for op in mpi.Op if op not in oracle.fitting(dtype)]
    for name, op in itertools.product(oracle.REDUCTIONS, unfit):
        for road in (jax.make_jaxpr, lambda f: f):
            with pytest.raises(TypeError, match=rf"`op` of {name} is {op}.*{dtype}: use"):
                road(lambda x, name=name, op=op: getattr(mpi, name)(x, op))(x)
    agree(mpi.call_count() == before, "a refused operation reached MPI")


@pytest.mark.once
@pytest.mark.parametrize("dtype", ONLY_MOVED, ids=str)
def test_dtypes_that_mpi_cannot_reduce_are_refused(dtype):
    before = mpi.call_count()
    x = jnp.zeros((ranks().size, 2), dtype)
    for name in oracle.REDUCTIONS:
        for road in (jax.make_jaxpr, lambda f: f):
            with pytest.raises(TypeError, match=f"`x` of {name} has dtype {dtype}.*cast"):
                road(getattr(mpi, name))(x)
    agree(mpi.call_count() == before, "a refused dtype reached MPI")


@pytest.mark.once
@pytest.mark.parametrize("name", oracle.REDUCTIONS)
def test_random_keys_cannot_be_reduced(name):
    keys = jax.random.split(jax.random.key(ranks().rank), (ranks().size, 2))
    for road in (jax.make_jaxpr, lambda f: f):
        with pytest.raises(TypeError, match=f"`x` of {name} has dtype key"):
            road(getattr(mpi, name))(keys)


def bits(rank, shape, dtype):
    """An array of any bits: NaNs with payloads among them."""
    random = np.random.default_rng([7, rank])
    if dtype == np.bool_:
        return random.random(shape) < 0.5
    if is_packed(dtype):
        return random.integers(0, 2, shape).astype(dtype)
    raw = random.integers(0, 256, (*shape, dtype.itemsize), np.uint8)
    return raw.view(dtype)[..., 0]


def is_packed(dtype):
    """Whether XLA holds several elements in a byte."""
    kinds = {jnp.integer: jnp.iinfo, jnp.floating: jnp.finfo}
    return any(jnp.issubdtype(dtype, kind) and info(dtype).bits < 8 for kind, info in kinds.items())


def assert_same_bits(got, want, message):
    got = np.asarray(got)
    same = got.dtype == want.dtype and got.shape == want.shape and got.tobytes() == want.tobytes()
    agree(same, f"{message}: {got!r} instead of {want!r}")


def move_all(dtype, road):
    """Move any bits through every movement, and compare."""
    comm = ranks().communicators["world"]
    cases = [(name, oracle.variants(name, comm.size)[-1]) for name in MOVEMENTS]
    operands = [
        [bits(r, oracle.shape(name, r, comm.size, more), dtype) for r in range(comm.size)]
        for name, more in cases
    ]
    results = road(
        lambda xs: [
            oracle.invoke(name, x, comm, more) for x, (name, more) in zip(xs, cases, strict=True)
        ]
    )([jnp.asarray(xs[comm.rank]) for xs in operands])
    for y, xs, (name, more) in zip(results, operands, cases, strict=True):
        assert_same_bits(y, oracle.SERIAL[name](xs, *more)[comm.rank], name)


@pytest.mark.parametrize("dtype", EVERY, ids=str)
def test_pure_data_movement_keeps_every_bit(dtype):
    move_all(dtype, jax.jit)


@pytest.mark.parametrize("dtype", [np.bool_, jnp.float8_e5m2, jnp.int4, np.complex128])
def test_pure_data_movement_keeps_every_bit_eagerly(dtype):
    move_all(np.dtype(dtype), lambda f: f)


@pytest.mark.parametrize("road", [jax.jit, lambda f: f], ids=["jitted", "eager"])
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_random_keys_move(impl, road):
    comm = ranks().communicators["world"]
    size = comm.size
    words = jax.random.key_data(jax.random.key(0, impl=impl)).shape[-1]

    def keys(raw):
        return jax.random.wrap_key_data(jnp.asarray(raw), impl=impl)

    cases = [(name, oracle.variants(name, size)[-1]) for name in MOVEMENTS]
    cases = [case for case in cases if case[0] != "sendrecv"]
    operands = [
        [
            bits(r, (*oracle.shape(name, r, size, more), words), np.dtype(np.uint32))
            for r in range(size)
        ]
        for name, more in cases
    ]
    results = road(
        lambda xs: [
            oracle.invoke(name, x, comm, more) for x, (name, more) in zip(xs, cases, strict=True)
        ]
    )([keys(raw[comm.rank]) for raw in operands])
    for y, raw, (name, more) in zip(results, operands, cases, strict=True):
        agree(y.dtype == keys(raw[0]).dtype, f"{name}: {y.dtype}")
        assert_equal(jax.random.key_data(y), oracle.SERIAL[name](raw, *more)[comm.rank], name)


def test_a_random_key_is_exchanged_with_a_neighbour():
    comm = ranks().communicators["world"]
    neighbours = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    mine, template = jax.random.key(comm.rank), jax.random.key(99)
    for road in (jax.jit, lambda f: f):
        got = road(lambda x, y: mpi.sendrecv(x, y, *neighbours))(mine, template)
        want = jax.random.key_data(jax.random.key(neighbours[0]))
        assert_equal(jax.random.key_data(got), want)


def patterns(dtype):
    """All 65,536 elements of a 16-bit dtype."""
    return np.arange(1 << 16, dtype=np.uint16).view(dtype)


def other_operand(kind, dtype):
    """What the second rank adds to each pattern."""
    everything = patterns(dtype)
    if kind == "zero":
        return np.zeros(1 << 16, dtype)
    if kind == "any":
        return np.random.default_rng(0).permutation(everything)
    # Half of the distance to the next pattern: the sum lies in the middle, and ties go to even.
    following = (everything.view(np.uint16) + np.uint16(1)).view(dtype)
    with np.errstate(all="ignore"):
        return ((following.astype(np.float32) - everything.astype(np.float32)) / 2).astype(dtype)


def assert_same_numbers(got, want, message):
    """Compare bits; any NaN is as good as another."""
    got = np.asarray(got)
    nan = np.isnan(want.astype(np.float32))
    wrong = (got.view(np.uint16) != want.view(np.uint16)) & ~nan
    wrong |= np.isnan(got.astype(np.float32)) != nan
    where = np.flatnonzero(wrong)
    agree(
        where.size == 0,
        f"{message}: {where.size} wrong, the first at {where[:4]}: {got[where[:4]]} instead of "
        f"{want[where[:4]]}",
    )


@pytest.mark.parametrize("kind", ["zero", "any", "tie"])
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_all_patterns_of_16_bit_floats_round_once(dtype, kind):
    comm = ranks().communicators["world"]
    mine = {0: patterns(dtype), 1: other_operand(kind, dtype)}
    x = mine.get(comm.rank, np.full(1 << 16, -0.0).astype(dtype))  # +0 would change a -0
    with np.errstate(all="ignore"):
        want = mine[0].astype(np.float32)
        if comm.size > 1:
            want = want + mine[1].astype(np.float32)
        want = want.astype(dtype)
    assert_same_numbers(mpi.allreduce(jnp.asarray(x)), want, f"{dtype} {kind}")
    assert_same_numbers(jax.jit(mpi.allreduce)(jnp.asarray(x)), want, f"{dtype} {kind}, jitted")


@pytest.mark.parametrize("op", oracle.ARITHMETIC, ids=str)
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_all_finite_patterns_under_every_operation(dtype, op):
    comm = ranks().communicators["world"]
    random = np.random.default_rng(1)
    finite = patterns(dtype)
    finite = finite[np.isfinite(finite.astype(np.float32))]
    neutral = oracle.identity(op, finite)
    mine = {0: finite, 1: random.permutation(finite)}
    with np.errstate(all="ignore"):
        want = oracle.fold(op, [mine[r] for r in range(min(comm.size, 2))])
    got = mpi.allreduce(jnp.asarray(mine.get(comm.rank, neutral)), op)
    zeros = want.astype(np.float32) == 0  # the sign of a zero is MPI's own choice in MIN and MAX
    agree(bool(np.all(np.asarray(got).astype(np.float32)[zeros] == 0)), "a zero is not zero")
    assert_same_numbers(np.where(zeros, want, np.asarray(got)), want, f"{dtype} {op}")


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_16_bit_floats_are_rounded_once_at_any_number_of_ranks(dtype, comm):
    tiny = np.float32(jnp.finfo(dtype).eps) / 4
    xs = [np.ones(3, dtype)] + [np.full(3, tiny, dtype)] * (comm.size - 1)
    want = (np.ones(3, np.float32) + (comm.size - 1) * tiny).astype(dtype)
    got = mpi.allreduce(jnp.asarray(xs[comm.rank]), comm=comm)
    assert_equal(got, want, "1 and several quarters of its epsilon")

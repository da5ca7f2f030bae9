"""In place where promised, bounded elsewhere, and nothing kept from call to call."""

import functools
import gc
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from spmd import agree, assert_allclose, assert_equal, ranks

from distsolve import mpi

pytestmark = [pytest.mark.few_ranks, pytest.mark.above_mpi]

MIB = 1 << 20
compilations = 0


def _count_compilations(event: str, seconds: float, **_: object) -> None:
    global compilations
    compilations += event == "/jax/core/compile/backend_compile_duration"


jax.monitoring.register_event_duration_secs_listener(_count_compilations)


def memory(field: str) -> int:
    """Give `VmRSS` or `VmHWM` of this process, in bytes."""
    text = Path("/proc/self/status").read_text()
    return int(text.partition(field + ":")[2].split()[0]) * 1024


def peak_growth(function, *arguments):
    """Run a compiled function; give its result and by how much memory grew while it ran."""
    jax.block_until_ready(arguments)
    Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM back to VmRSS
    before = memory("VmRSS")
    result = jax.block_until_ready(function(*arguments))
    return result, memory("VmHWM") - before


def numbered(shape, dtype=jnp.float64):
    """Give an array full of this rank's number, from 1."""
    return jnp.full(shape, ranks().rank + 1, dtype)


def total():
    """Give the sum of all ranks' numbers."""
    return float(sum(range(1, ranks().size + 1)))


IN_PLACE = {
    "jit": lambda: jax.jit(mpi.allreduce, donate_argnums=0),
    "eager": lambda: functools.partial(mpi.allreduce, donate=True),
    "loop": lambda: jax.jit(
        lambda x: (
            jax.lax.fori_loop(0, 3, lambda i, x: mpi.allreduce(x) * (1.0 / ranks().size), x)
            * float(ranks().size)
        ),
        donate_argnums=0,
    ),
}


@pytest.mark.parametrize("shape", [8, (3, 5), 100_000])
@pytest.mark.parametrize("road", IN_PLACE)
def test_donated_array_keeps_its_address(road, shape):
    function = IN_PLACE[road]()
    for _ in range(2):
        x = numbered(shape)
        address = x.unsafe_buffer_pointer()
        y = function(x)
        agree(y.unsafe_buffer_pointer() == address, "another buffer")
        agree(x.is_deleted(), "the operand was not consumed")
        assert_allclose(y, np.full(shape, total()))


@pytest.mark.parametrize("name", ["reduce", "scan", "exscan", "bcast", "allreduce_symmetric"])
def test_other_reductions_donate_too(name):
    function = getattr(mpi, name)
    for donating in (
        jax.jit(function, donate_argnums=0),
        functools.partial(function, donate=True),
    ):
        x = numbered((4, 4))
        address = x.unsafe_buffer_pointer()
        y = donating(x)
        agree(y.unsafe_buffer_pointer() == address, "another buffer")


def test_array_that_is_not_donated_stays(road):
    x = numbered(8)
    y = road(mpi.allreduce)(x)
    assert_allclose(y, np.full(8, total()))
    assert_allclose(x, np.full(8, ranks().rank + 1.0))
    agree(y.unsafe_buffer_pointer() != x.unsafe_buffer_pointer())


def test_numpy_operand_stays():
    x = np.full(8, ranks().rank + 1.0)
    for function in (jax.jit(mpi.allreduce), mpi.allreduce):
        assert_allclose(function(x), np.full(8, total()))
        assert_allclose(x, np.full(8, ranks().rank + 1.0))


@pytest.mark.parametrize("shape", [(0,), (3, 0)])
def test_empty_array(shape):
    for function in (
        jax.jit(mpi.allreduce, donate_argnums=0),
        functools.partial(mpi.allreduce, donate=True),
        mpi.allreduce,
    ):
        assert_equal(function(jnp.zeros(shape)), np.zeros(shape))


def test_thousand_eager_calls():
    x = numbered(16)
    y = mpi.allreduce(x)
    gc.collect()
    before, live, rss = compilations, len(jax.live_arrays()), memory("VmRSS")
    for _ in range(1000):
        y = mpi.allreduce(x)
    agree(compilations == before, f"{compilations - before} compilations")
    agree(len(jax.live_arrays()) <= live, f"{len(jax.live_arrays()) - live} arrays more")
    agree(memory("VmRSS") - rss < 20e6, f"{memory('VmRSS') - rss} bytes more")
    assert_allclose(y, np.full(16, total()))


def test_eager_call_compiles_once_per_shape():
    arrays = {n: jnp.full(n, 1.0) for n in (21, 22)}
    before = compilations
    for n in (21, 22, 21, 22, 21):
        mpi.allreduce(arrays[n], mpi.MAX)
    agree(compilations - before == 2, f"{compilations - before} compilations for two shapes")


# 64 MiB on every rank: what is measured does not grow with the array, and three ranks fit.
LARGE = 64 * MIB


def large_reduction():
    """Give the compiled in-place reduction of a large array, and the array."""
    x = numbered(LARGE // 4, jnp.float32)
    return jax.jit(mpi.allreduce, donate_argnums=0).lower(x).compile(), x


def test_scratch_of_a_large_reduction():
    function, x = large_reduction()
    y, grown = peak_growth(function, x)
    agree(bool(jnp.all(y == total())))
    agree(grown <= 8 * MIB, f"{grown / MIB:.1f} MiB of scratch")


def test_scratch_of_a_large_reduction_without_in_place(without_in_place):
    function, x = large_reduction()
    address = x.unsafe_buffer_pointer()
    y, grown = peak_growth(function, x)
    agree(bool(jnp.all(y == total())))
    agree(y.unsafe_buffer_pointer() == address)
    agree(grown <= 8 * MIB, f"{grown / MIB:.1f} MiB of scratch")


def test_programs_in_place_pass():
    x = numbered((64, 64))

    def loop(x):
        return jax.lax.fori_loop(0, 5, lambda i, x: mpi.allreduce(x) * 0.5, x)

    mpi.assert_in_place(mpi.allreduce, x)
    mpi.assert_in_place(jax.jit(loop), x)
    mpi.assert_in_place(lambda x, n: mpi.allreduce(2.0 * x) / n, x, 3.0)
    mpi.assert_in_place(
        lambda n, tree: mpi.allreduce(tree), 1.0, {"a": x, "b": x[0]}, donate_argnums=1
    )
    mpi.assert_in_place(mpi.allreduce, jax.ShapeDtypeStruct((10**9,), jnp.float32))
    agree(not x.is_deleted())


def test_loop_of_reductions_needs_no_temporary():
    x = jax.ShapeDtypeStruct((1 << 20,), jnp.float32)
    loop = jax.jit(
        lambda x: jax.lax.fori_loop(0, 5, lambda i, x: mpi.allreduce(x), x), donate_argnums=0
    )
    found = loop.lower(x).compile().memory_analysis()
    agree(found.alias_size_in_bytes >= 4 * MIB, f"{found.alias_size_in_bytes} bytes aliased")
    agree(found.temp_size_in_bytes < 4096, f"{found.temp_size_in_bytes} bytes of temporaries")


# 1,000 float64 on each rank: 8,000 bytes.
NOT_IN_PLACE = {
    "dtype": (lambda x: mpi.allreduce(x.astype(jnp.float32)), "8000 .*cast"),
    "shape": (lambda x: mpi.allreduce(x.reshape(10, 100)), "8000 .*reshape"),
    "slice": (lambda x: mpi.allreduce(x[1:]), r"8000 .*\(1000,\) and dtype float64"),
    "still referenced": (lambda x: mpi.allreduce(x) + jnp.sin(x), "8000 .*still used"),
    "reduced twice": (lambda x: mpi.allreduce(x) + mpi.allreduce(x, mpi.MAX), "8000 .*used twice"),
}


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("reason", NOT_IN_PLACE)
def test_lost_donation_is_reported(reason):
    function, words = NOT_IN_PLACE[reason]
    x = numbered(1000)
    with pytest.raises(AssertionError, match=words):
        mpi.assert_in_place(function, x)
    # The values are right all the same.
    a, b = jax.jit(function)(x), jax.jit(function, donate_argnums=0)(x + 0.0)
    assert_allclose(b, a)


def test_lost_donation_because_of_debug_nans():
    with jax.debug_nans(True), pytest.raises(AssertionError, match=r"8000 .*jax_debug_nans"):
        mpi.assert_in_place(lambda x: mpi.allreduce(x), numbered(1000))

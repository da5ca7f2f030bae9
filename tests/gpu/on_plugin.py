"""Programs that JAX's plugin for CUDA compiles and runs, on the driver without a GPU.

`mpiexec -n 2 python on_plugin.py CHECK... USE=FUNCTION...`, where `libcuda.so.1` is that driver
(`tests/jobs/test_plugin.py`); functions that break a rule may take the place of the driver's. It
has no kernels: between MPI calls a program scales by `fake_scale`, late and on its stream, and all
else is copies. Numbers differ by rank and are compared with NumPy's.
"""

import ctypes
import functools
import sys
from pathlib import Path

import jax

jax.config.update("jax_enable_x64", True)

import ml_dtypes  # noqa: E402
import numpy as np  # noqa: E402
from jax.experimental import topologies  # noqa: E402

import distsolve  # noqa: E402
from distsolve import mpi  # noqa: E402
from distsolve.mpi import device  # noqa: E402

CUDA = ctypes.CDLL("libcuda.so.1")
CUDA.fake_violations.restype = ctypes.c_char_p
H100 = Path(__file__).with_name("h100.textproto")
HALF = device.staging_bytes()
SIZES = (0, 1, 3, HALF // 8, 3 * HALF // 8 + 5)


def scaled(x, factor):
    """Return `factor * x`, which the program computes on its stream."""
    call = jax.ffi.ffi_call("fake_scale", jax.ShapeDtypeStruct(x.shape, x.dtype))
    return call(x, factor=np.float64(factor))


def numbers(rank, shape, dtype=np.float64):
    """Return small whole numbers that differ by rank and element: their sums are exact."""
    return (np.arange(np.prod(shape, dtype=int)).reshape(shape) % 7 + rank + 1).astype(dtype)


def equal(found, expected, what):
    """Raise unless every element is equal."""
    np.testing.assert_array_equal(np.asarray(found), expected, err_msg=str(what))


def check_import():
    """Neither an import nor looking for the driver makes a context; the handlers are there."""
    assert CUDA.fake_contexts_made() == 0
    assert device.find() == "cuda"
    mpi.prepare()
    assert CUDA.fake_contexts_made() == 0, "a context was made before JAX made one"
    assert jax.devices()[0].platform == "gpu"
    assert CUDA.fake_contexts_made() > 0


# By name: the call, what its operand's shape is for n elements and P ranks, and its result on rank
# r from all operands; None where there is none to compare.
CALLS = {
    "allreduce": (mpi.allreduce, lambda n, P: n, lambda xs, r: sum(xs)),
    "allreduce MAX": (
        lambda x: mpi.allreduce(x, mpi.MAX),
        lambda n, P: n,
        lambda xs, r: np.max(xs, axis=0),
    ),
    "reduce": (
        lambda x: mpi.reduce(x, root=mpi.size() - 1),
        lambda n, P: n,
        lambda xs, r: sum(xs) if r == len(xs) - 1 else xs[r],
    ),
    "scan": (mpi.scan, lambda n, P: n, lambda xs, r: sum(xs[: r + 1])),
    "exscan": (mpi.exscan, lambda n, P: n, lambda xs, r: sum(xs[:r], np.zeros_like(xs[0]))),
    "reduce_scatter": (mpi.reduce_scatter, lambda n, P: (P, n), lambda xs, r: sum(xs)[r]),
    "bcast": (
        lambda x: mpi.bcast(x, mpi.size() - 1),
        lambda n, P: n,
        lambda xs, r: xs[-1],
    ),
    "gather": (mpi.gather, lambda n, P: n, lambda xs, r: np.stack(xs) if r == 0 else xs[r]),
    "gatherv": (
        lambda x: mpi.gatherv(x, [x.shape[0]] * mpi.size()),
        lambda n, P: n,
        lambda xs, r: np.concatenate(xs) if r == 0 else xs[r],
    ),
    "scatter": (
        lambda x: mpi.scatter(x if mpi.rank() == 0 else x[0], 0),
        lambda n, P: (P, n),
        lambda xs, r: xs[0][r],
    ),
    "scatterv": (
        lambda x: mpi.scatterv(x, [x.shape[0] // mpi.size()] * mpi.size()),
        lambda n, P: n * P,
        lambda xs, r: np.split(xs[0], len(xs))[r],
    ),
    "allgather": (mpi.allgather, lambda n, P: n, lambda xs, r: np.stack(xs)),
    "alltoall": (mpi.alltoall, lambda n, P: (P, n), lambda xs, r: np.stack([x[r] for x in xs])),
    "allgatherv": (
        lambda x: mpi.allgatherv(x, [x.shape[0]] * mpi.size()),
        lambda n, P: (n, 2),
        lambda xs, r: np.concatenate(xs),
    ),
    "alltoallv": (
        lambda x: mpi.alltoallv(x, *2 * [[x.shape[0] // mpi.size()] * mpi.size()]),
        lambda n, P: n * P,
        lambda xs, r: np.concatenate([np.split(x, len(xs))[r] for x in xs]),
    ),
    "sendrecv": (
        lambda x: mpi.sendrecv(x, x, (mpi.rank() - 1) % mpi.size(), (mpi.rank() + 1) % mpi.size()),
        lambda n, P: n,
        lambda xs, r: xs[r - 1],
    ),
    "send": (
        lambda x: mpi.send(x, mpi.size() - 1) if mpi.rank() == 0 and mpi.size() > 1 else None,
        lambda n, P: n,
        lambda xs, r: None,
    ),
    "recv": (
        lambda x: mpi.recv(x, 0) if mpi.rank() == mpi.size() - 1 > 0 else x,
        lambda n, P: n,
        lambda xs, r: xs[0] if r == len(xs) - 1 else xs[r],
    ),
    "wait": (
        lambda x: mpi.wait(mpi.iallreduce(x)),
        lambda n, P: n,
        lambda xs, r: sum(xs),
    ),
}
DTYPES = {
    "allreduce": (np.float32, np.complex128, np.int32, ml_dtypes.bfloat16, np.float16),
    "allgather": (np.bool_, np.int8),
}


def check_calls():
    """Each function inside jit, donated and not, with several sizes and dtypes."""
    for name, (call, shape_of, expected) in CALLS.items():
        for dtype in (np.float64, *DTYPES.get(name, ())):
            for n in SIZES:
                shape = shape_of(n, mpi.size())
                xs = [numbers(r, shape, dtype) for r in range(mpi.size())]
                mine = xs[mpi.rank()]
                right = expected(xs, mpi.rank())
                for donated in ((), 0):
                    x = jax.device_put(mine)
                    made = jax.jit(call, donate_argnums=donated)(x)
                    if right is None:
                        jax.block_until_ready(made)
                    else:
                        equal(made, right.astype(dtype), (name, dtype, n, donated))
                    if donated == ():
                        equal(x, mine, ("the operand of", name))


def check_slices():
    """Calls on slices, and into them: XLA would like to make one piece of both."""
    xs = [numbers(r, (2, 8192)) for r in range(mpi.size())]
    x, total = jax.device_put(xs[mpi.rank()]), sum(xs)
    equal(jax.jit(lambda x: mpi.allreduce(x[1]))(x), total[1], "a slice")
    equal(jax.jit(lambda x: mpi.allgather(x[1]))(x), np.stack(xs)[:, 1], "a slice")
    for made, row in zip(jax.jit(lambda x: mpi.allreduce((x[0], x[1])))(x), total, strict=True):
        equal(made, row, "two slices")
    into = jax.jit(lambda x: x.at[0].set(mpi.allreduce(x[1])))(x)
    equal(into, np.stack([total[1], xs[mpi.rank()][1]]), "into a slice")


def check_eager():
    """Outside jit, where a call is compiled for itself."""
    xs = [numbers(r, SIZES[-1]) for r in range(mpi.size())]
    x = jax.device_put(xs[mpi.rank()])
    equal(mpi.allreduce(x), sum(xs), "a copy")
    equal(x, xs[mpi.rank()], "the operand")
    equal(mpi.allreduce(x, donate=True), sum(xs), "in place")
    assert x.is_deleted()
    mpi.barrier()
    both = mpi.allreduce({"a": jax.device_put(xs[mpi.rank()]), "b": 2.0})
    equal(both["a"], sum(xs), "a tree")
    equal(both["b"], 2.0 * mpi.size(), "a tree")


def check_stale_tail():
    """100 calls of one program, each on what the program computed from the one before."""
    P = mpi.size()

    @functools.partial(jax.jit, donate_argnums=0)
    def program(x):
        for _ in range(100):
            x = scaled(mpi.allreduce(x), 0.99 / P)
        return x

    for n in (3, 2 * HALF // 8, 100_001):
        y = np.asarray(program(jax.device_put(np.ones(n))))
        assert (y == y[0]).all(), f"n = {n}: {(y != y[0]).sum()} elements differ"
        np.testing.assert_allclose(y[0], 0.99**100, rtol=1e-12)


def check_programs():
    """Two programs in turns that nobody waits for in between: what one makes, the other gets."""
    xs = [numbers(r, SIZES[-1]) for r in range(mpi.size())]
    add = jax.jit(lambda x: mpi.allreduce(scaled(x, 0.5)))
    last = jax.jit(lambda x: scaled(mpi.bcast(x, mpi.size() - 1), 2.0))
    x = jax.device_put(xs[mpi.rank()])
    expected = xs
    for _ in range(5):
        x = last(add(x))
        expected = [sum(expected)] * mpi.size()
    equal(x, expected[0], "programs in turns")


def check_derivatives():
    """A derivative, whose reduction is that of the cotangent."""
    xs = [numbers(r, SIZES[-1]) for r in range(mpi.size())]
    x = jax.device_put(xs[mpi.rank()])
    pull = jax.jit(lambda x, ct: jax.vjp(lambda x: mpi.allreduce(mpi.pvary(x)), x)[1](ct)[0])
    total = jax.jit(lambda x, t: jax.jvp(mpi.allreduce, (x,), (t,)))
    found, tangent = total(x, x)
    equal(found, sum(xs), "jvp")
    equal(tangent, sum(xs), "jvp")
    equal(pull(x, jax.device_put(xs[0])), mpi.size() * xs[0], "vjp")


def check_memory():
    """In place: what XLA's allocator has given out at most does not grow."""
    reduce = jax.jit(mpi.allreduce, donate_argnums=0)
    size = 1 << 22
    x = jax.device_put(np.full(size, mpi.rank() + 1.0))
    x.block_until_ready()
    before = jax.devices()[0].memory_stats()["peak_bytes_in_use"]
    for _ in range(3):
        x = reduce(x)
    x.block_until_ready()
    grown = jax.devices()[0].memory_stats()["peak_bytes_in_use"] - before
    assert grown < 4096, f"{grown} bytes beside an operand of {8 * size}"
    mpi.assert_in_place(mpi.allreduce, x)
    assert CUDA.fake_pinned_bytes() <= 4 * HALF, "staging memory grew with the operand"
    P = mpi.size()
    equal(x, np.full(size, P * (P + 1) / 2 * P**2), "in place")


def _solvers():
    """Return what is compiled for the device, by name: functions of J, r (a row each) and b."""
    sharded = distsolve.Sharded()

    def gram(J):
        return distsolve.Gram(J, shift=0.1)

    def natural(method):
        counts = (400,) * mpi.size() if method == "kernel" else None
        return lambda J, r, b: distsolve.natural_gradient(
            J, r, shift=0.1, method=method, counts=counts
        )

    def on_the_fly(J, r, b):
        S = distsolve.GramOnTheFly(lambda p, x: jax.numpy.tanh(x @ p), b, J, shift=0.1)
        return distsolve.cg(S, b)

    def preconditioned(J, r, b):
        key = jax.random.key(0)
        return distsolve.cg(gram(J), b, M=distsolve.nystrom(gram(J), 5, key, shift=0.1))

    return {
        "cg": lambda J, r, b: distsolve.cg(lambda v: r * v, r, space=sharded),
        "cg Gram": lambda J, r, b: distsolve.cg(gram(J), b),
        "cg history": lambda J, r, b: distsolve.cg(gram(J), b, history=10),
        "cg nystrom": preconditioned,
        "cg on the fly": on_the_fly,
        "minres": lambda J, r, b: distsolve.minres(lambda v: r * v, r, space=sharded),
        "gmres": lambda J, r, b: distsolve.gmres(lambda v: r * v, r, space=sharded),
        "lsmr": lambda J, r, b: distsolve.lsmr(J, r),
        "natural cg": natural("cg"),
        "natural dense": natural("dense"),
        "natural kernel": natural("kernel"),
        "center": lambda J, r, b: distsolve.center(J),
        "covariance": lambda J, r, b: distsolve.covariance(J),
        "var": lambda J, r, b: distsolve.var(J),
        "symmetric": lambda J, r, b: mpi.allreduce_symmetric(J.T @ J),
    }


def check_compiled():
    """What XLA makes of all solvers for the device: they run kernels, so they are only compiled."""
    # For a device that is described: XLA then tries no kernel.
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=H100.read_text(), topology="1x1x1"
    )
    there = jax.sharding.SingleDeviceSharding(topology.devices[0])
    J, r, b = (
        jax.ShapeDtypeStruct(shape, np.float64, sharding=there)
        for shape in ((400, 30), (400,), (30,))
    )
    for name, solve in _solvers().items():
        text = jax.jit(solve).lower(J, r, b).compile().as_text()
        calls = [line for line in text.splitlines() if 'custom_call_target="distsolve_' in line]
        assert calls, f"{name} makes no MPI call"
        for line in calls:
            # In the order of the program.
            assert "token[]" in line, line
            assert "xla_device = 1" in line, line


def error_of(call):
    """Return the text of the error that a call raises, then or where its result is waited for."""
    try:
        jax.block_until_ready(call())
    except jax.errors.JaxRuntimeError as error:
        return str(error)
    return ""


def check_errors():
    """On one rank: JAX raises an error of the driver, there and at the next call, and not again."""
    x = jax.device_put(np.ones(SIZES[-1]))
    reduce = jax.jit(mpi.allreduce)
    for function in ("cuMemcpyHtoDAsync_v2", "cuCtxPushCurrent_v2", "cuStreamGetCtx"):
        equal(reduce(x), np.ones(SIZES[-1]), "before")
        CUDA.fake_fail(function.encode(), 1)
        told = f"{function} of the GPU's driver failed with code 700 (as ordered)"
        for _ in range(2):
            assert told in (found := error_of(lambda: reduce(x))), found or function
    equal(reduce(x), np.ones(SIZES[-1]), "afterwards")


def check_road():
    """How device memory comes to MPI, which the probe or a variable says."""
    mpi.prepare()
    print(f"road: {device.road(probing=False).reason}", flush=True)


CHECKS = {
    name.removeprefix("check_"): check
    for name, check in globals().items()
    if name.startswith("check_")
}


def main():
    """Run the checks that are asked for; the first that fails ends the job."""
    mutants = dict(text.split("=") for text in sys.argv[1:] if "=" in text)
    device.DRIVERS["cuda"].functions.update(mutants)
    asked = [text for text in sys.argv[1:] if "=" not in text]
    jax.ffi.register_ffi_target("fake_scale", jax.ffi.pycapsule(CUDA.fake_scale), platform="CUDA")
    for name in asked:
        CHECKS[name]()
        print(f"{name}: rank {mpi.rank()}", flush=True)
    violations = CUDA.fake_violations().decode()
    assert not violations, violations
    print("no rule was broken", flush=True)


if __name__ == "__main__":
    main()

"""Checks that need a GPU: `mpiexec -n 2 python tests/gpu/on_gpu.py --output gpu-2.json`.

Prints a line for each check, and writes what ran, what failed and what did not run, with the
hardware, as JSON: before the first check and after each, so that the file of a job that was ended
says how far it came. Without a GPU nothing runs, and the file says so; `--rehearse` runs on CPU
what can run there, to try the script itself, and the file says that, too.
"""

import argparse
import contextlib
import ctypes
import json
import sys
import time
import traceback
from datetime import UTC, datetime
from pathlib import Path

import jax

jax.config.update("jax_enable_x64", True)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import distsolve  # noqa: E402
from distsolve import mpi  # noqa: E402
from distsolve.mpi import device  # noqa: E402
from distsolve.mpi.comm import resolve  # noqa: E402
from distsolve.mpi.native import abi  # noqa: E402

GIB = 1 << 30
MIB = 1 << 20


class NotHereError(Exception):
    """Why a check cannot run on this machine."""


def operand(rank, size, dtype=np.float64):
    """Small whole numbers that differ by rank: their sums are exact."""
    return (np.arange(size) % 7 + rank + 1).astype(dtype)


def check_reductions():
    """Sums at awkward sizes, in place and not, of several dtypes."""
    rank, ranks = mpi.rank(), mpi.size()
    for dtype in (np.float32, np.float64, np.complex64, np.int32, jnp.bfloat16):
        for size in (0, 1, 1000, 16 * MIB // 4 + 3):
            expected = sum(operand(r, size, np.complex128) for r in range(ranks))
            mine = jnp.asarray(operand(rank, size, dtype))
            for made in (mpi.allreduce(mine), mpi.allreduce(mine + 0, donate=True)):
                assert made.dtype == mine.dtype
                np.testing.assert_array_equal(np.asarray(made).astype(np.complex128), expected)
    return {}


def check_other_primitives():
    """Each of the others once, in one jitted program."""
    rank, ranks = mpi.rank(), mpi.size()

    @jax.jit
    def program(x):
        block = jnp.stack([x * (k + 1) for k in range(ranks)])
        ring = mpi.sendrecv(x, x, (rank - 1) % ranks, (rank + 1) % ranks)
        waited, _ = mpi.wait(mpi.iallreduce(x[:1000]), after=x)
        gathered = mpi.gather(x, 0)
        matrix = jnp.outer(x[:999], x[:999])
        return {
            "symmetric": mpi.allreduce_symmetric(jnp.triu(matrix)),
            "bcast": mpi.bcast(x, ranks - 1),
            "scan": mpi.scan(x),
            "allgather": mpi.allgather(x),
            "alltoall": mpi.alltoall(block),
            "reduce_scatter": mpi.reduce_scatter(block),
            "ring": ring,
            "wait": waited,
            "gather": gathered if rank == 0 else mpi.pvary(x),
        }

    for size in (3, 5 * MIB):
        all_of_them = [operand(r, size) for r in range(ranks)]
        found = jax.tree.map(np.asarray, program(jnp.asarray(all_of_them[rank])))
        expected = {
            "symmetric": sum(np.outer(x[:999], x[:999]) for x in all_of_them),
            "bcast": all_of_them[-1],
            "scan": sum(all_of_them[: rank + 1]),
            "allgather": np.stack(all_of_them),
            "alltoall": np.stack([x * (rank + 1) for x in all_of_them]),
            "reduce_scatter": sum(all_of_them) * (rank + 1),
            "ring": all_of_them[(rank - 1) % ranks],
            "wait": sum(all_of_them)[:1000],
            "gather": np.stack(all_of_them) if rank == 0 else all_of_them[rank],
        }
        for name, values in expected.items():
            np.testing.assert_array_equal(found[name], values, err_msg=name)
    return {}


def check_cg():
    """A system whose solution is known."""
    n, space = 2000, distsolve.Sharded()
    rank = mpi.rank()
    diagonal = jnp.linspace(1.0, 50.0, n) + rank
    x = jnp.asarray(operand(rank, n))
    found, info = distsolve.cg(lambda v: diagonal * v, diagonal * x, tol=1e-10, space=space)
    info.raise_if_failed()
    np.testing.assert_allclose(np.asarray(found), np.asarray(x), rtol=1e-6)
    return {"iterations": int(info.iterations)}


def check_stale_tail():
    """Each of 100 calls on the result of the one before: every element equal."""
    ranks = mpi.size()

    @jax.jit
    def program(x):
        return jax.lax.fori_loop(0, 100, lambda _, x: 0.99 * mpi.allreduce(x) / ranks, x)

    for n in (1000, 100_000, 5_000_000):
        y = np.asarray(program(jnp.ones(n, jnp.float32)))
        assert np.all(y == y[0]), f"n = {n}: {np.sum(y != y[0])} elements differ"
        np.testing.assert_allclose(y[0], 0.99**100, rtol=1e-4)
    return {}


@contextlib.contextmanager
def cuda():
    """CUDA's driver, with the device's primary context current on this thread."""
    if device.find() != "cuda":
        raise NotHereError("the driver is not CUDA's")
    library, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
    require(library.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
    require(library.cuCtxPushCurrent_v2(context))
    try:
        yield library
    finally:
        require(library.cuCtxPopCurrent_v2(ctypes.byref(context)))
        require(library.cuDevicePrimaryCtxRelease_v2(0))


def require(code):
    """Raise unless the driver is content."""
    assert code == 0, f"the driver answered {code}"


def free_bytes():
    """Device memory that the driver has left."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    with cuda() as library:
        require(library.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)))
    return free.value


def check_memory():
    """4 GiB in place: what the device's memory grows by."""
    comm, before_any = world(), free_bytes()
    reduce = jax.jit(mpi.allreduce, donate_argnums=0)
    x = jnp.ones(4 * GIB // 4, jnp.float32)
    x.block_until_ready()
    comm.Barrier()  # ranks may share the device, and with it what the driver has left
    stats = jax.devices()[0].memory_stats()
    free, peak = free_bytes(), stats["peak_bytes_in_use"]
    x = reduce(x)
    x.block_until_ready()
    after = jax.devices()[0].memory_stats()["peak_bytes_in_use"]
    comm.Barrier()
    growth = {"allocator": after - peak, "driver": free - free_bytes()}
    comm.Barrier()
    assert float(x[0]) == mpi.size() == float(x[-1])
    assert max(growth.values()) < 64 * MIB, growth
    return {"operand": 4 * GIB, "free_before": before_any, "growth_bytes": growth}


def seconds(call, repeats=5):
    """The lowest of several times, of the slowest rank."""
    comm = world()
    times = []
    for _ in range(repeats + 1):
        comm.Barrier()
        start = time.perf_counter()
        call()
        times.append(comm.allreduce(time.perf_counter() - start, op=_mpi4py().MAX))
    return min(times[1:])


def check_bandwidth():
    """1 GiB in place through staging, against a pinned copy and MPI's reduction on the host."""
    if jax.devices()[0].platform == "cpu":
        raise NotHereError("no GPU")
    reduce = jax.jit(mpi.allreduce, donate_argnums=0)
    box = [jnp.ones(GIB // 4, jnp.float32)]

    def on_device():
        box[0] = reduce(box[0])
        box[0].block_until_ready()

    host = np.ones(GIB // 4, np.float32)
    comm, MPI = world(), _mpi4py()

    def on_host():
        step = MIB  # elements: 4 MiB
        for at in range(0, host.size, step):
            comm.Allreduce(MPI.IN_PLACE, host[at : at + step])

    record = resolve()
    abi.set_road(record.id, device.NEVER, device.staging_bytes())
    staged, reduced = seconds(on_device), seconds(on_host, 3)
    abi.set_road(record.id, device.road(probing=False).direct_from, device.staging_bytes())
    copied = comm.allreduce(pinned_copy_seconds(box[0]), op=MPI.MAX)
    slower = max(reduced, copied)
    return {
        "road": "staged",
        "GiB_per_s": {"staged": 1 / staged, "mpi_on_host": 1 / reduced, "pinned_copy": 1 / copied},
        "of_the_slower": slower / staged,
        "aim": 0.7,
    }


def pinned_copy_seconds(x):
    """Time of a copy of 1 GiB to pinned memory and back, on a stream of its own."""
    size, pinned, stream = 64 * MIB, ctypes.c_void_p(), ctypes.c_void_p()
    with cuda() as library:
        require(library.cuMemHostAlloc(ctypes.byref(pinned), ctypes.c_size_t(size), 1))
        require(library.cuStreamCreate(ctypes.byref(stream), 1))
        world().Barrier()
        start, address = time.perf_counter(), x.unsafe_buffer_pointer()
        for at in range(0, x.nbytes, size):
            memory, length = ctypes.c_uint64(address + at), ctypes.c_size_t(size)
            require(library.cuMemcpyDtoHAsync_v2(pinned, memory, length, stream))
            require(library.cuMemcpyHtoDAsync_v2(memory, pinned, length, stream))
        require(library.cuStreamSynchronize(stream))
        seconds = time.perf_counter() - start
        require(library.cuStreamDestroy_v2(stream))
        require(library.cuMemFreeHost(pinned))
    return seconds / 2  # one way


def check_latency():
    """A sum of one number, in a loop inside one program."""
    n = 1000
    loop = jax.jit(lambda x: jax.lax.fori_loop(0, n, lambda _, x: mpi.allreduce(x) / mpi.size(), x))
    x = jnp.ones(1)

    def run():
        loop(x).block_until_ready()

    return {"us_per_call": seconds(run) / n * 1e6}


CHECKS = {
    "reductions": check_reductions,
    "other primitives": check_other_primitives,
    "cg": check_cg,
    "stale tail": check_stale_tail,
    "memory": check_memory,
    "bandwidth": check_bandwidth,
    "latency": check_latency,
}


def _mpi4py():
    from mpi4py import MPI

    return MPI


def world():
    """The world, for messages of the checks themselves."""
    return _mpi4py().COMM_WORLD


def outcome(name, check):
    """Run a check on all ranks; its figures, or what was wrong on the first rank that says so."""
    start, fault, skipped, figures = time.perf_counter(), None, None, {}
    try:
        figures = check()
    except NotHereError as reason:
        skipped = str(reason)
    except Exception:
        fault = traceback.format_exc()
    everyone = world().allgather((fault, skipped))
    fault = next((f"rank {r}: {f}" for r, (f, _) in enumerate(everyone) if f), None)
    skipped = next((s for _, s in everyone if s), None)
    status = "failed" if fault else "not run" if skipped else "passed"
    if mpi.rank() == 0:
        print(f"{name:18} {status} {fault or skipped or figures or ''}", flush=True)
    return {
        "name": name,
        "status": status,
        "why": fault or skipped,
        "seconds": round(time.perf_counter() - start, 2),
        "figures": figures,
    }


def main():
    """Run all checks; the exit code is 0 only if all ran, or could not on a CPU, and passed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--only", choices=CHECKS, action="append")
    options = parser.parse_args()
    checks = {name: CHECKS[name] for name in options.only or CHECKS}
    hardware = jax.devices()[0]
    report = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "ranks": mpi.size(),
        "platform": hardware.platform,
        "device": hardware.device_kind,
        "jax": jax.__version__,
        "mpi": _mpi4py().Get_library_version().split("\n")[0].strip(),
        "device_memory": device.road(probing=False).reason,
        "ran_on_a_gpu": hardware.platform != "cpu",
        "checks": [],
    }
    runs = report["ran_on_a_gpu"] or options.rehearse
    why = "the job was ended before this check, or in it" if runs else "no GPU"
    report["checks"] = [{"name": name, "status": "not run", "why": why} for name in checks]
    write(report, options.output)
    if runs:
        for index, (name, check) in enumerate(checks.items()):
            report["checks"][index] = outcome(name, check)
            write(report, options.output)
    found = {check["status"] for check in report["checks"]}
    good = {"passed"} if report["ran_on_a_gpu"] else {"passed", "not run"}
    sys.exit(0 if runs and found <= good else 1)


def write(report, path):
    """Write the file, on one rank."""
    if mpi.rank() == 0:
        path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

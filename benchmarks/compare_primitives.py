"""The speed and memory of one allreduce: distsolve beside mpi4jax, mpi4py, a C loop and gloo.

usage: python benchmarks/compare_primitives.py [--rows 1,5] [--quick] [--json FILE] ...
"""

import sys

from table import Contender, Row, Target, compare

MIB = 2**20 // 4  # float32 elements
CHUNK = {"chunk_elements": MIB}
CHUNKS = {"64 KiB": 2**16, "256 KiB": 2**18, "1 MiB": 2**20, "4 MiB": 2**22, "16 MiB": 2**24}
DEFAULT = "4 MiB"  # of ranks on one node


def jax(library, quick, **options):
    """A contender that runs through kernels/allreduce.py."""
    peer = "" if library == "distsolve" else library
    return Contender(
        "kernels/allreduce.py", library, {"library": library, **options}, quick, peer=peer
    )


def chunks(quick, **options):
    """Contenders that differ in the bytes that a reduction hands to MPI at a time."""
    options = {"library": "distsolve", **options}
    return {
        name: Contender(
            "kernels/allreduce.py",
            "distsolve",
            options,
            quick,
            {"variables": {"DISTSOLVE_CHUNK_BYTES": str(nbytes)}},
        )
        for name, nbytes in CHUNKS.items()
    }


def numpy(quick, **options):
    """A contender that runs mpi4py on NumPy buffers."""
    return Contender("kernels/numpy_allreduce.py", "mpi4py", options, quick, peer="mpi4py")


def c(quick, **options):
    """A contender that runs the C program."""
    return Contender("c/allreduce.c", "mpicc", options, quick, peer="c")


def psum(quick, needs="jax", **options):
    """A contender that runs `psum` through JAX's own collectives."""
    return Contender("kernels/psum.py", needs, options, quick, peer="shard-map")


def measurements():
    """Contenders by measurement; rows 3 and 4 read two figures of the same runs."""
    short, large, huge = {"iterations": 2000}, {"elements": 64 * 1024}, {"elements": MIB}
    few = {"iterations": 2}
    tiny = {"elements": 1, "iterations": 100_000, "scale": 1}
    loop = {"elements": 32 * MIB, "iterations": 20, "scale": 0}
    one = {"elements": 1024 * MIB, "iterations": 1}
    return {
        "tiny": {
            "distsolve": jax("distsolve", short, case="loop", **tiny),
            "mpi4jax": jax("mpi4jax", short, case="loop", **tiny),
            "mpi4py": numpy(short, case="loop", **tiny),
            "C": c(short, **tiny),
            "C, MPI_THREAD_SINGLE": c(short, threads=0, **tiny),
        },
        "loop": {
            "distsolve": jax("distsolve", large, case="loop", **loop),
            "mpi4jax": jax("mpi4jax", large, case="loop", **loop),
            "mpi4py": numpy(large, case="loop", **loop),
            "C": c(large, **loop),
            "C in 1 MiB chunks": c(large, **CHUNK, **loop),
            "C, MPI_THREAD_SINGLE": c(large, threads=0, **loop),
        },
        "huge": {
            "distsolve": jax("distsolve", huge, case="single", **one),
            "mpi4jax": jax("mpi4jax", huge, case="single", **one),
            "mpi4py": numpy(huge, case="single", **one),
            "C": c(huge, **one),
            "C in 1 MiB chunks": c(huge, **CHUNK, **one),
            "C, MPI_THREAD_SINGLE": c(huge, threads=0, **one),
        },
        "eager": {
            "distsolve": jax("distsolve", few, case="eager", elements=4, iterations=10_000),
            "mpi4jax": jax("mpi4jax", few, case="eager", elements=4, iterations=10),
            "mpi4py": numpy(few, case="eager", elements=4, iterations=10_000),
        },
        "jit": {
            "distsolve": jax("distsolve", few, case="jit", elements=4, iterations=2000),
            "mpi4jax": jax("mpi4jax", few, case="jit", elements=4, iterations=2000),
        },
        "gloo": {
            "distsolve": jax("distsolve", short, case="loop", **tiny),
            "shard_map + psum, gloo": psum({"iterations": 200}, elements=1, iterations=5000),
            "shard_map + psum, MPI": psum({}, needs="mpiwrapper"),
        },
        "chunks, loop": chunks(large, case="loop", **loop),
        "chunks, huge": chunks(huge, case="single", **one),
    }


ROWS = {
    1: Row(
        "1 element, in fori_loop, per iteration",
        "tiny",
        "seconds",
        (
            Target("<= 0.9 x mpi4jax", "mpi4jax", factor=0.9),
            Target("<= C + 0.3 us", "C", excess=0.3e-6),
        ),
    ),
    2: Row(
        "32 MiB donated, in fori_loop, per iteration",
        "loop",
        "seconds",
        (
            Target("<= 0.5 x mpi4jax", "mpi4jax", factor=0.5),
            Target("<= 0.6 x one C call", "C", factor=0.6),
        ),
    ),
    3: Row(
        "1 GiB donated, one call: peak memory growth",
        "huge",
        "peak_growth_mib",
        (Target("<= 16 MiB", limit=16),),
    ),
    4: Row(
        "1 GiB donated, one call: time",
        "huge",
        "seconds",
        (Target("<= 0.1 x mpi4jax", "mpi4jax", factor=0.1),),
    ),
    5: Row(
        "eager call, 4 elements",
        "eager",
        "seconds",
        (
            Target("<= 25 us", limit=25e-6),
            Target("<= mpi4jax / 300", "mpi4jax", factor=1 / 300),
        ),
    ),
    6: Row(
        "jitted function with one allreduce, 4 elements, per call",
        "jit",
        "seconds",
        (Target("<= 1.05 x mpi4jax", "mpi4jax", factor=1.05),),
    ),
    7: Row(
        "1 element, in fori_loop, against gloo, per iteration",
        "gloo",
        "seconds",
        (Target("<= gloo / 20", "shard_map + psum, gloo", factor=1 / 20),),
    ),
    8: Row("as row 2, in chunks of these sizes", "chunks, loop", "seconds", (), ours=DEFAULT),
    9: Row("as row 4, in chunks of these sizes", "chunks, huge", "seconds", (), ours=DEFAULT),
}


if __name__ == "__main__":
    sys.exit(compare(__doc__.splitlines()[0], ROWS, measurements()))

"""The solvers beside what codes use today: jax.scipy and mpi4jax, lineax, NumPy and PETSc.

usage: python benchmarks/compare_solvers.py [--rows 1,5] [--quick] [--json FILE] ...
"""

import os
import sys

from table import Contender, Row, Target, compare

OURS, RIVAL = "distsolve", "jax.scipy cg, mpi4jax"
BOUND = "bound to cores"
NUMPY, PETSC = "NumPy (J @ v) @ J", "PETSc KSPCG"
# What kernels/sr_solve.py calls each, the package that it needs, and the peer that it is.
SOLVERS = {
    OURS: ("distsolve", "distsolve", ""),
    RIVAL: ("jax.scipy", "mpi4jax", "jax-scipy"),
    "lineax": ("lineax", "lineax", "lineax"),
}
COUNTED = {"simnet": {}}
QUICK_SOLVE = {"samples": 64, "parameters": 500, "iterations": 10}


def sr_solve(samples, parameters, iterations, names=(OURS, RIVAL)):
    """Contenders of one size of the SR system."""
    size = {"samples": samples, "parameters": parameters, "iterations": iterations}

    def solver(name, needs, peer):
        options = {"solver": name, **size}
        return Contender("kernels/sr_solve.py", needs, options, QUICK_SOLVE, COUNTED, peer)

    return {name: solver(*SOLVERS[name]) for name in names}


def product(form, needs):
    """A contender of `S v` on one rank."""
    options = {"form": form, "samples": 2048, "parameters": 20_000, "iterations": 20}
    return Contender("kernels/gram_product.py", needs, options, QUICK_SOLVE, {"np": 1})


def poisson(kernel, needs, peer="", **started):
    """A contender of CG on the Poisson equation."""
    quick = {"n": 12, "iterations": 10}
    return Contender(kernel, needs, {"n": 64, "iterations": 100}, quick, started, peer)


def delayed(method, delay_us, unknowns):
    """A method of CG on a slow network."""
    options = {"method": method, "delay_us": delay_us, "unknowns": unknowns, "iterations": 100}
    quick = {"unknowns": 50, "iterations": 10}
    return Contender("kernels/delayed_cg.py", "distsolve", options, quick, COUNTED)


def dense(library):
    """A contender of the dense sum."""
    options = {"library": library, "parameters": 16_384}
    peer = "" if library == "distsolve" else library
    return Contender("kernels/dense_s.py", library, options, {"parameters": 256}, COUNTED, peer)


def measurements():
    """Contenders by measurement; rows 9 and 10 read two figures of the same runs."""
    return {
        "large": sr_solve(2048, 20_000, 20),
        "short": sr_solve(256, 9_245, 100),
        "wide": sr_solve(512, 43_300, 50),
        "counted": sr_solve(256, 2000, 200, names=SOLVERS),
        "product": {
            OURS: product("distsolve", "distsolve"),
            NUMPY: product("numpy", "numpy"),
            "XLA J.T @ (J @ v)": product("xla", "jax"),
        },
        "poisson": {
            OURS: poisson("kernels/poisson.py", "distsolve"),
            PETSC: poisson("kernels/petsc_poisson.py", "petsc", "petsc", mpi="debian"),
        },
        "bound": {
            BOUND: poisson("kernels/poisson.py", "distsolve"),
            "free, one thread a rank": poisson("kernels/poisson.py", "distsolve", bind=False),
            "free, all threads": poisson(
                "kernels/poisson.py",
                "distsolve",
                bind=False,
                variables={"PJRT_NPROC": str(os.cpu_count())},
            ),
        },
        "pipelined": {name: delayed(name, 2000, 2600) for name in ("pipelined", "classic")},
        "single": {name: delayed(name, 5000, 100) for name in ("single_reduction", "classic")},
        "dense": {OURS: dense("distsolve"), "mpi4jax allreduce": dense("mpi4jax")},
    }


ROWS = {
    1: Row(
        "SR iteration, 2048 samples a rank, 20,000 parameters, float32",
        "large",
        "seconds",
        (Target("<= 0.25 x jax.scipy, mpi4jax", RIVAL, factor=0.25),),
    ),
    2: Row(
        "SR iteration, 256 samples a rank, 9,245 parameters, float32",
        "short",
        "seconds",
        (Target("<= 0.3 x jax.scipy, mpi4jax", RIVAL, factor=0.3),),
    ),
    3: Row(
        "SR iteration, 512 samples a rank, 43,300 parameters, float32",
        "wide",
        "seconds",
        (Target("<= 0.6 x jax.scipy, mpi4jax", RIVAL, factor=0.6),),
    ),
    4: Row(
        "S v, one rank, 2048 samples, 20,000 parameters, float32",
        "product",
        "seconds",
        (Target("<= 0.7 x NumPy", NUMPY, factor=0.7),),
    ),
    5: Row(
        "collectives in an SR solve of 200 iterations, x0 = None",
        "counted",
        "collectives",
        (Target("200", equals=200),),
    ),
    6: Row(
        "sharded CG on 64^3 Poisson, float64, per iteration",
        "poisson",
        "seconds",
        (Target("<= 0.35 x PETSc", PETSC, factor=0.35),),
    ),
    7: Row(
        "CG step, every reduction delayed by 2 ms, matvec of about 2 ms",
        "pipelined",
        "seconds",
        (Target("<= 0.6 x classic", "classic", factor=0.6),),
        ours="pipelined",
        beside={"matvec_seconds": "matvec"},
    ),
    8: Row(
        "CG step, every reduction delayed by 5 ms, small matvec",
        "single",
        "seconds",
        (Target("<= 0.6 x classic", "classic", factor=0.6),),
        ours="single_reduction",
        beside={"matvec_seconds": "matvec"},
    ),
    9: Row(
        "dense S of 1 GiB summed in place: peak memory growth over S",
        "dense",
        "peak_growth_mib",
        (Target("<= 16 MiB", limit=16),),
    ),
    10: Row(
        "dense S of 1 GiB summed in place: bytes sent / bytes of S",
        "dense",
        "sent_fraction",
        (Target("<= 0.51", limit=0.51),),
    ),
    11: Row(
        "as row 6, with ranks that may or may not change cores", "bound", "seconds", (), ours=BOUND
    ),
}


if __name__ == "__main__":
    sys.exit(compare(__doc__.splitlines()[0], ROWS, measurements()))

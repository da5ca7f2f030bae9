"""Many solves in one job: nothing grows, and the ranks agree on the end of each of them.

    mpiexec -n 2 python tests/jobs/soak.py 10000

Every rank has another number of threads, so its local sums may round differently. A handful of
programs is compiled; each solve takes one of them, and data of its own: a system that converges,
one that is indefinite, or one with a NaN on a single rank.
"""

import collections
import os
import sys
import time

from mpi4py import MPI

world = MPI.COMM_WORLD.Dup()
os.environ["OMP_NUM_THREADS"] = os.environ["PJRT_NPROC"] = str(1 + world.rank)

import jax  # noqa: E402 - the threads are set first
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import distsolve as ds  # noqa: E402
from distsolve import mpi  # noqa: E402
from distsolve.mpi import comm  # noqa: E402

jax.config.update("jax_enable_x64", True)
n = 20 + 5 * world.rank  # entries of a piece, and rows of J here
P = 64  # of a replicated vector
PIECES = ds.Sharded()
CHECKS = 10
GROWTH = 20 << 20  # bytes of memory that are no leak
DATA = ("converges", "converges", "indefinite", "nan")


def split(data, solver=ds.cg, **options):
    """Solve with a diagonal and a matrix of rank one, in pieces."""
    d, u, b = data["d"], data["u"], data["b"]
    return solver(lambda p: d * p + u * mpi.allreduce(u @ p), b, space=PIECES, tol=1e-8, **options)


def whole(data):
    """Solve with ``J^T J + D``, J spread over the ranks."""
    J, D, f = data["J"], data["D"], data["f"]
    return ds.cg(lambda p: mpi.allreduce((J @ p) @ J) + D * p, f, tol=1e-8)


def gram(data):
    """Solve with an operator of the library; what makes it indefinite is its shift."""
    return ds.cg(ds.Gram(data["J"], shift=data["D"]), data["f"], tol=1e-8)


def least_squares(data):
    """Solve in pieces by the normal equations."""
    d, b = data["d"], data["b"]
    spaces = {"space": PIECES, "columns_space": PIECES}
    return ds.lsmr(lambda p: d * p, b, adjoint=lambda r: d * r, tol=1e-8, **spaces)


SOLVES = {
    "classic, pieces": split,
    "single reduction, pieces": lambda data: split(data, method="single_reduction"),
    "pipelined, pieces": lambda data: split(data, method="pipelined"),
    "minres, pieces": lambda data: split(data, solver=ds.minres),
    "lsmr, pieces": least_squares,
    "classic, replicated": whole,
    "Gram": gram,
}
PROGRAMS = {name: jax.jit(solve) for name, solve in SOLVES.items()}
PROGRAMS["classic, not jitted"] = split
DEFINITE = [name for name in PROGRAMS if not name.startswith(("minres", "lsmr"))]


def draw(number):
    """Data of a solve, and what they are like; the random numbers are those of all ranks."""
    random = np.random.default_rng(number)
    kind = DATA[random.integers(len(DATA))]
    faulty = random.integers(world.size)
    f, D = random.standard_normal(P), random.uniform(1, 10, P)
    if kind == "indefinite":
        D[::7] = -100
    mine = np.random.default_rng([number, world.rank])
    d, u, b = mine.uniform(1, 10, n), mine.standard_normal(n), mine.standard_normal(n)
    d = np.where(np.arange(n) % 7 == 0, -d, d) if kind == "indefinite" else d
    J = mine.standard_normal((n, P)) / 8
    if kind == "nan" and world.rank == faulty:
        d[3] = J[3, 3] = np.nan
    data = {"d": d, "u": u / 8, "b": b, "J": J, "D": D, "f": f}
    return kind, jax.tree.map(jnp.asarray, data)


def expected(name, kind):
    """Why a solve of these data ends."""
    if kind == "nan":
        return "nonfinite"
    return "indefinite_operator" if kind == "indefinite" and name in DEFINITE else "converged"


def state():
    """What must not grow: arrays, communicators, and bytes of memory."""
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return len(jax.live_arrays()), len(comm._by_id), resident


def agreed(rows):
    """Assert that the reports of these solves are the same on all ranks."""
    for rank, theirs in enumerate(world.allgather(rows)):
        wrong = [(a, b) for a, b in zip(rows, theirs, strict=True) if a != b]
        assert not wrong, f"rank {world.rank} and rank {rank} differ: {wrong[:3]}"


def main(solves):
    """Solve, compare, and print what was seen."""
    seen: collections.Counter = collections.Counter()
    rows, states, names, begin = [], [], list(PROGRAMS), time.perf_counter()
    for number in range(solves):
        name = names[number % len(names)]
        kind, data = draw(number)
        _, info = PROGRAMS[name](data)
        rows.append((number, name, kind, info.reason_name, int(info.iterations)))
        seen[kind, info.reason_name] += 1
        assert info.reason_name == expected(name, kind), (rows[-1], info.message)
        del info, data, _
        if (number + 1) % (solves // CHECKS) == 0:
            agreed(rows)
            rows = []
            states.append(state())
    agreed(rows)
    settled, end = states[1], states[-1]
    assert end[:2] == settled[:2], f"(arrays, communicators): {settled[:2]}, in the end {end[:2]}"
    grown = end[2] - settled[2]
    assert grown < GROWTH, f"{grown} bytes more than after {2 * (solves // CHECKS)} solves"
    grown = world.gather(grown / 2**20)
    if world.rank == 0:
        print(f"{solves} solves on {world.size} ranks in {time.perf_counter() - begin:.0f} s")
        print(f"{end[0]} live arrays, {end[1]} communicators; after a fifth of them memory grew by")
        print(", ".join(f"{mib:.1f} MiB on rank {rank}" for rank, mib in enumerate(grown)))
        for (kind, reason), count in sorted(seen.items()):
            print(f"{kind}: {count} {reason}")


if __name__ == "__main__":
    main(int(sys.argv[1]))

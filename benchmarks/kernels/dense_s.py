"""The sum of a dense symmetric matrix over ranks, in place; prints one JSON line.

Memory is what the call needs beyond the matrix, which is donated. Bytes are those handed to MPI on
one rank, as a fraction of the matrix: simnet must be preloaded.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
from measure import COMM, PeakGrowth, Traffic, report, slowest

RANK, SIZE = COMM.Get_rank(), COMM.Get_size()
CHECKED_ROWS = 64


def load(library):
    """The sum over all ranks, as a function of the matrix."""
    if library == "distsolve":
        from distsolve import mpi

        return mpi.allreduce_symmetric
    import mpi4jax
    from mpi4py import MPI

    return lambda S: mpi4jax.allreduce(S, op=MPI.SUM)


@jax.jit
def matrix(u):
    """A symmetric matrix of rank one that differs on each rank."""
    return u[:, None] * u


def entries(n):
    """The vector whose outer product is this rank's matrix: halves and integers, exact in sums."""
    return lambda rank: ((np.arange(n) + rank) % 7).astype(np.float32) / 2


def check(S, u):
    """Stop the job if a row is wrong, above or below the diagonal."""
    n = S.shape[0]
    for i in range(0, n, max(1, n // CHECKED_ROWS)):
        if not np.array_equal(S[i], sum(u(rank)[i] * u(rank) for rank in range(SIZE))):
            print(f"rank {RANK}: row {i} is wrong", flush=True)
            COMM.Abort(2)


def main():
    """Sum a small matrix first, so that connections exist, then a large one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", choices=["distsolve", "mpi4jax"], required=True)
    parser.add_argument("--parameters", type=int, required=True)
    options = parser.parse_args()
    reduce = jax.jit(load(options.library), donate_argnums=0)
    n = options.parameters
    compiled = reduce.lower(jax.ShapeDtypeStruct((n, n), jnp.float32)).compile()
    reduce(matrix(jnp.ones(2, jnp.float32))).block_until_ready()
    u = entries(n)
    S = matrix(jnp.asarray(u(RANK))).block_until_ready()
    bytes_of_S, traffic, result = S.nbytes, Traffic(), []

    def run():
        with traffic:
            result.append(compiled(S).block_until_ready())

    COMM.Barrier()
    with PeakGrowth() as growth:
        seconds = slowest(run)
    check(result[0], u)
    report(
        seconds=seconds,
        peak_growth_mib=growth.largest(),
        sent_fraction=traffic.bytes / bytes_of_S,
    )


if __name__ == "__main__":
    main()

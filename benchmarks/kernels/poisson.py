"""Sharded CG on the 3D Poisson equation of examples/poisson3d.py; prints one JSON line."""

import argparse
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from measure import COMM, report, slowest

sys.path.append(str(Path(__file__).parents[2] / "examples"))
import poisson3d

import distsolve


def main():
    """Take a fixed number of steps to measure; solve to check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, required=True, help="inner points along each edge")
    parser.add_argument("--iterations", type=int, required=True)
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    slab = poisson3d.Slab.of_rank(options.n, COMM.Get_rank(), COMM.Get_size())
    b, solution = map(jnp.asarray, poisson3d.manufactured(slab))
    space = distsolve.Sharded()
    solve = partial(distsolve.cg, partial(poisson3d.laplacian, slab), space=space)
    steps = jax.jit(lambda b: solve(b, tol=0.0, maxiter=options.iterations)[0])
    steps(b).block_until_ready()
    seconds = slowest(lambda: steps(b).block_until_ready())
    u, info = jax.jit(lambda b: solve(b, tol=1e-8))(b)
    error = COMM.allreduce(float(jnp.sum((u - solution) ** 2)))
    if not (info.converged and error <= 1e-12 * COMM.allreduce(float(jnp.sum(solution**2)))):
        print(f"squared error {error}: {info}", flush=True)
        COMM.Abort(2)
    report(seconds=seconds / options.iterations)


if __name__ == "__main__":
    main()

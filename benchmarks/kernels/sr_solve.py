"""A fixed number of CG iterations on the SR system of random data; prints one JSON line.

S x = b with S = J^T J / N + shift, J (n, P) on each rank, N rows in all, b = J^T e / N for random
e. distsolve solves with `Gram`. The others are written as VMC codes publish it: `J.T @ (J @ x)`,
an allreduce by mpi4jax, and the CG of jax.scipy. That of lineax does not take mpi4jax's ordered
effect: its allreduce is mpi4py's, in a callback, and its time says nothing. Columns of J have
scales from 1 to 1e-3, so that no CG converges within the iterations.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
from measure import COMM, Traffic, report, slowest
from mpi4py import MPI

SHIFT = 1e-4


def distsolve(iterations):
    """The solve of this library, as a function of J and b."""
    import distsolve

    def solve(J, b):
        S = distsolve.Gram(J, shift=SHIFT)
        return distsolve.cg(S, b, tol=0.0, maxiter=iterations)[0]

    return solve


def _published(J, allreduce):
    count = J.shape[0] * COMM.Get_size()
    return lambda x: allreduce(J.T @ (J @ x)) / count + SHIFT * x


def jax_scipy(iterations):
    """The solve of jax.scipy, as a function of J and b."""
    import mpi4jax

    def allreduce(x):
        return mpi4jax.allreduce(x, op=MPI.SUM)

    def solve(J, b):
        S = _published(J, allreduce)
        return jax.scipy.sparse.linalg.cg(S, b, tol=0.0, maxiter=iterations)[0]

    return solve


def lineax(iterations):
    """The solve of lineax, as a function of J and b."""
    import lineax

    cg = lineax.CG(rtol=0.0, atol=0.0, max_steps=iterations)

    def on_host(x):
        total = np.empty_like(x)
        COMM.Allreduce(np.asarray(x), total)
        return total

    def solve(J, b):
        structure = jax.ShapeDtypeStruct(b.shape, b.dtype)
        product = _published(J, lambda x: jax.pure_callback(on_host, structure, x))
        S = lineax.FunctionLinearOperator(product, structure, lineax.positive_semidefinite_tag)
        return lineax.linear_solve(S, b, cg, throw=False).value

    return solve


def problem(samples, parameters):
    """Return this rank's J and the right-hand side, which is the same on all ranks."""
    generator = np.random.default_rng(COMM.Get_rank())
    scales = np.logspace(0, -3, parameters, dtype=np.float32)
    J = generator.standard_normal((samples, parameters), dtype=np.float32) * scales
    b = generator.standard_normal(samples, dtype=np.float32) @ J / (samples * COMM.Get_size())
    return J, COMM.allreduce(b)


def check(J, b, x):
    """Stop the job unless x is closer to the solution than zero is, in the norm of S."""
    x = np.asarray(x, np.float64)
    part = np.float64(COMM.allreduce(float(np.sum((J @ x) ** 2)))) / COMM.allreduce(len(J))
    # (x - s)^T S (x - s) - s^T S s = x^T S x - 2 x^T b for the solution s
    change = part + SHIFT * x @ x - 2 * x @ b
    if not change < 0:
        print(f"rank {COMM.Get_rank()}: no solution, x changes the error by {change}", flush=True)
        COMM.Abort(2)


def main():
    """Solve once to compile, once to measure."""
    solvers = {"distsolve": distsolve, "jax.scipy": jax_scipy, "lineax": lineax}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--solver", choices=solvers, required=True)
    parser.add_argument("--samples", type=int, required=True, help="on each rank")
    parser.add_argument("--parameters", type=int, required=True)
    parser.add_argument("--iterations", type=int, required=True)
    options = parser.parse_args()
    host_J, host_b = problem(options.samples, options.parameters)
    J, b = jnp.asarray(host_J), jnp.asarray(host_b)
    solve = jax.jit(solvers[options.solver](options.iterations))
    solve(J, b).block_until_ready()
    traffic, result = Traffic(), []

    def run():
        with traffic:
            result.append(solve(J, b).block_until_ready())

    seconds = slowest(run)
    check(host_J, host_b, result[0])
    if 0 < traffic.collectives < options.iterations:
        print(f"{traffic.collectives} collectives: the solver stopped early", flush=True)
        COMM.Abort(2)
    report(seconds=seconds / options.iterations, collectives=traffic.collectives)


if __name__ == "__main__":
    main()

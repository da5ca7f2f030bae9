"""Sharded CG on a network that simnet slows down; prints one JSON line.

The operator is a dense symmetric block on each rank, so that its product takes time but sends
nothing, and all messages are CG's own.
"""

import argparse
import ctypes

import jax
import jax.numpy as jnp
from measure import COMM, report, slowest

import distsolve

DIAGONAL = (20.0, 2000.0)


def block(n):
    """A positive definite matrix: its diagonal is larger than the sum of what stands beside it."""
    i = jnp.arange(n, dtype=float)
    return 1 / (1 + abs(i[:, None] - i)) + jnp.diag(jnp.linspace(*DIAGONAL, n))


def matvec_seconds(K, v, iterations):
    """Seconds of one product, all ranks at the same time."""
    chain = jax.jit(lambda K, v: jax.lax.fori_loop(0, iterations, lambda _, v: K @ v * 1e-3, v))
    chain(K, v).block_until_ready()
    return slowest(lambda: chain(K, v).block_until_ready()) / iterations


def set_delay(alpha_us):
    """Slow every later collective of this rank down."""
    simnet = ctypes.CDLL(None)
    simnet.simnet_delay.argtypes = [ctypes.c_double, ctypes.c_double]
    simnet.simnet_delay(alpha_us, 0.0)


def main():
    """Take a fixed number of steps to compile, then to measure with the delay."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--method", required=True, help="of distsolve.cg")
    parser.add_argument("--unknowns", type=int, required=True, help="on each rank")
    parser.add_argument("--iterations", type=int, required=True)
    parser.add_argument("--delay-us", type=float, required=True)
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    K = block(options.unknowns)
    b = jax.random.normal(jax.random.key(COMM.Get_rank()), (options.unknowns,))
    space = distsolve.Sharded()

    @jax.jit
    def steps(K, b):
        settings = {"tol": 0.0, "maxiter": options.iterations, "method": options.method}
        x, _ = distsolve.cg(lambda v: K @ v, b, space=space, **settings)
        return x, jnp.linalg.norm(b - K @ x) / jnp.linalg.norm(b)

    jax.block_until_ready(steps(K, b))
    product = matvec_seconds(K, b, options.iterations)
    result = []
    set_delay(options.delay_us)
    seconds = slowest(lambda: result.append(jax.block_until_ready(steps(K, b))))
    set_delay(0.0)
    _, residual = result[0]
    if not residual < 0.5:
        print(f"rank {COMM.Get_rank()}: relative residual {residual}", flush=True)
        COMM.Abort(2)
    report(seconds=seconds / options.iterations, matvec_seconds=product)


if __name__ == "__main__":
    main()

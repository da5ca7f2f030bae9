"""Stochastic reconfiguration in three steps: from a code's own CG to `natural_gradient`.

    mpiexec -n 2 python sr.py

N samples on all ranks, n of them here, P parameters; J (n, P) log-derivatives, E (n,) local
energies, neither of them centred. All three solve (J^T J / N + shift) x = J^T E / N.
"""

import time

import jax
import jax.numpy as jnp

import distsolve
from distsolve import mpi


@jax.jit
def by_hand(J, E, shift):
    """Return what many VMC codes compute: S as a function with an allreduce, the CG of JAX."""
    n = jnp.asarray(len(J), J.dtype)
    N, J_sum, E_sum = mpi.allreduce((n, J.sum(axis=0), E.sum()))
    J, E = J - J_sum / N, E - E_sum / N
    f = mpi.allreduce(J.T @ E) / N

    def S(v):
        return mpi.allreduce(J.T @ (J @ v)) / N + shift * v

    x, _ = jax.scipy.sparse.linalg.cg(S, f, tol=1e-5)
    return x


@jax.jit
def with_gram(J, E, shift):
    """Return the same from distsolve's matrix and its CG, and why the solve ended."""
    J = distsolve.center(J)
    f = distsolve.mean(J * E[:, None])  # a mean that is left in E makes no difference
    return distsolve.cg(distsolve.Gram(J, shift=shift), f, tol=1e-5)


def in_one_call(J, E, shift):
    """Return the same by the method that is predicted to be fastest."""
    J = distsolve.center(J)
    return distsolve.natural_gradient(J, E, shift=shift, tol=1e-5, counts=counts)


n, P = 60 + 20 * mpi.rank(), 12
key = jax.random.fold_in(jax.random.key(0), mpi.rank())  # other samples on each rank
J = jax.random.normal(key, (n, P)) + jnp.arange(P)
E = 2 * J[:, 0] + jnp.sin(J[:, 1])
counts = distsolve.Sharded().counts(n)  # the samples of every rank: once, outside jit
distsolve.plan(sum(counts), P)  # measures this machine: once, outside jit


def measured(name, update):
    """Run a compiled update again, print its time and its messages, and return its result."""
    result = jax.block_until_ready(update(J, E, 0.01))
    before = mpi.call_count().get("MPI_Allreduce", 0)
    mpi.barrier()
    start = time.perf_counter()
    jax.block_until_ready(update(J, E, 0.01))
    milliseconds = 1e3 * float(mpi.allreduce(time.perf_counter() - start, mpi.MAX))
    messages = mpi.call_count().get("MPI_Allreduce", 0) - before - 1
    if mpi.rank() == 0:
        print(f"{name}: {messages} allreduces, {milliseconds:.2f} ms")
    return result


x = measured("jax.scipy cg    ", by_hand)
y, info = measured("distsolve.cg    ", with_gram)
z, update_info = measured("natural_gradient", jax.jit(in_one_call))
if mpi.rank() == 0:
    print(f"distsolve.cg: {info.message}")
    print(f"natural_gradient: {update_info.message}")
info.raise_if_failed()
update_info.raise_if_failed()
assert jnp.allclose(x, y, atol=1e-3)
assert jnp.allclose(x, z, atol=1e-3)

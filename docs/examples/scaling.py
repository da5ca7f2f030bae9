"""Time per step of a reduction, for a scaling run.

for n in 1 2; do mpiexec -n $n python scaling.py; done
"""

import time

import jax
import jax.numpy as jnp

import distsolve.mpi as mpi

step = jax.jit(lambda x: mpi.allreduce(x) / mpi.size(), donate_argnums=0)
x = step(jnp.ones(1 << 20)).block_until_ready()  # compiled here, and not timed
mpi.barrier()
start = time.perf_counter()
for _ in range(20):
    x = step(x)
x.block_until_ready()
slowest = mpi.allreduce((time.perf_counter() - start) / 20, mpi.MAX)
if mpi.rank() == 0:
    print(f"P = {mpi.size()}: {1e3 * float(slowest):.2f} ms per step")

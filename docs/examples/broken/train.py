import jax
import jax.numpy as jnp

import distsolve.mpi as mpi

rank = mpi.rank()


@jax.jit
def step(p):
    return p - 0.1 * mpi.allreduce(p * (rank + 1))


p = jnp.ones(1000)
for _ in range(100):
    loss = jnp.sum(p) / (rank + 1)  # of this rank alone
    if loss < 400:
        break  # wrong: the others go on
    p = step(p)
mpi.barrier()

"""The gradient of a mean over ranks, with and without `pvary`.

    mpiexec -n 2 python gradients.py

Rank r holds one sample, s = r + 1, and the loss is p times the mean of the samples.
"""

import jax
import jax.numpy as jnp

import distsolve.mpi as mpi

rank, size = mpi.rank(), mpi.size()
s = jnp.asarray(rank + 1.0)


def loss(p):
    return mpi.allreduce(p * s) / size


def loss_with_pvary(p):
    return mpi.allreduce(mpi.pvary(p) * s) / size


p = jnp.asarray(1.0)
share = jax.grad(loss)(p)
full = jax.grad(loss_with_pvary)(p)
print(f"rank {rank} of {size}: its share {share}, the full gradient {full}")

assert jnp.allclose(share, (rank + 1) / size)
assert jnp.allclose(full, (size + 1) / 2)
# Forward mode needs no pvary: every rank moves p, and the tangents are added.
assert jnp.allclose(jax.jvp(loss, (p,), (jnp.ones_like(p),))[1], full)

"""Things that surprise, each with what to write instead.

mpiexec -n 2 python sharp_bits.py
"""

import jax
import jax.numpy as jnp

import distsolve
from distsolve import mpi

rank, size = mpi.rank(), mpi.size()


def calls():
    """Return how many reductions this rank has made."""
    return mpi.call_count().get("MPI_Allreduce", 0)


# One key on all ranks: size copies of the same samples.
same = jax.random.normal(jax.random.key(0), (4,))
distsolve.check_replicated(same)
# A key of its own for each rank.
own = jax.random.normal(jax.random.fold_in(jax.random.key(0), rank), (4,))

# Ranks hold different numbers of samples: the mean of their means is another number.
samples = jnp.full(1 + rank, float(rank))
mean_of_means = mpi.allreduce(samples.mean()) / size
mean = distsolve.mean(samples)
assert size == 1 or mean > mean_of_means

# The result is unused, and the call is made all the same.
before = calls()
jax.jit(lambda x: (mpi.allreduce(x), x + 1)[1])(samples[:1]).block_until_ready()
assert calls() == before + 1


# Under vmap both branches of a cond run, with their calls, whatever the conditions are.
def maybe(condition, x):
    return jax.lax.cond(condition, lambda x: mpi.allreduce(x), lambda x: x, x)


before = calls()
jax.block_until_ready(jax.vmap(maybe)(jnp.asarray([False, False]), jnp.ones((2, 3))))
assert calls() == before + 1

# Ranks that are not the root get their own operand back.
total = mpi.reduce(jnp.asarray(rank + 1.0), root=0)
assert total == (size * (size + 1) / 2 if rank == 0 else rank + 1)

# Integers wrap around, as everywhere in JAX.
most = mpi.allreduce(jnp.asarray(jnp.iinfo(jnp.int32).max, jnp.int32))
assert size == 1 or most < jnp.iinfo(jnp.int32).max
if rank == 0:
    print(f"{size} ranks: the mean is {mean:.3f}, the mean of the means {mean_of_means:.3f}")

"""A first program: one system of stochastic reconfiguration, its samples spread over the ranks.

mpiexec -n 2 python first.py
"""

import jax

import distsolve
from distsolve import mpi

key = jax.random.fold_in(jax.random.key(0), mpi.rank())  # other samples on each rank
J = distsolve.center(jax.random.normal(key, (1000, 50)))  # its log-derivatives, 50 parameters
E = 2 * J[:, 0] + 1  # its local energies
f = distsolve.mean(J * (E - distsolve.mean(E))[:, None])
x, info = distsolve.cg(distsolve.Gram(J, shift=0.01), f)
info.raise_if_failed()
if mpi.rank() == 0:
    print(f"{mpi.size()} ranks, x[0] = {x[0]:.3f}: {info.message}")

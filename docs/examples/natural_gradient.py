"""The linear system of stochastic reconfiguration, solved by CG and checked against dense algebra.

    mpiexec -n 2 python natural_gradient.py

N samples on all ranks, n of them here; J (n, P) log-derivatives; e (n,) local energies.
S = J^T J / N + shift (P, P), never formed; f = J^T e / N (P,); both centred by means over N.
"""

import jax
import jax.numpy as jnp

import distsolve
import distsolve.mpi as mpi


@jax.jit
def natural_gradient(J, e, shift):
    """Solve S d = f: one allreduce for all means, then one per product with S."""
    n = jnp.asarray(len(J), J.dtype)
    N, J_sum, e_sum, eJ = mpi.allreduce((n, J.sum(axis=0), e.sum(), e @ J))
    J = J - J_sum / N
    f = eJ / N - (e_sum / N) * (J_sum / N)

    def S(v):
        return mpi.allreduce((J @ v) @ J) / N + shift * v

    return distsolve.cg(S, f, tol=1e-5)


n, P = 30 + 5 * mpi.rank(), 8
key = jax.random.key(mpi.rank())
J = jax.random.normal(key, (n, P))
e = 2 * J[:, 0] + jnp.sin(J[:, 1])
d, info = natural_gradient(J, e, 1e-2)

counts = [30 + 5 * r for r in range(mpi.size())]
J, e = mpi.allgatherv(J, counts), mpi.allgatherv(e, counts)
J, e = J - J.mean(axis=0), e - e.mean()
S = J.T @ J / len(J) + 1e-2 * jnp.eye(P, dtype=J.dtype)
assert jnp.allclose(d, jnp.linalg.solve(S, e @ J / len(J)), atol=1e-4)
if mpi.rank() == 0:
    print(f"{mpi.size()} ranks, {len(J)} samples: {info.message}")

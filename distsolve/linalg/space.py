"""Where vectors live: the products and the decisions that solvers need, over the ranks.

A solver sees only a `Space`. This is the one file of `distsolve.linalg` that knows of MPI.
"""

from typing import Any

import jax
import jax.numpy as jnp

from distsolve import mpi
from distsolve.linalg import trees


class Replicated:
    """Vectors of which every rank holds all entries: inner products are local.

    Parameters
    ----------
    comm : mpi4py intracommunicator, optional
        The ranks that hold the vectors; the world by default.
    """

    def __init__(self, comm: Any = None) -> None:
        self.comm = comm

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Replicated) and self.comm == other.comm

    def __hash__(self) -> int:
        return hash(type(self))

    def dot(self, *pairs: tuple[Any, Any]) -> jax.Array:
        """Return ``Re <x, y>`` of each pair ``(x, y)``, stacked: (k,) replicated.

        Communication: none.
        """
        return jnp.stack([trees.vdot(x, y) for x, y in pairs])

    def norm(self, x: Any) -> jax.Array:
        """Return the 2-norm of ``x``, safe against overflow and underflow.

        Communication: none.
        """
        return trees.norm(x)

    def sum(self, x: jax.Array) -> jax.Array:
        """Return the sum over the pieces of a vector of ``x``: ``x``, as there is one piece.

        Communication: none.
        """
        return x

    def size(self, x: Any) -> int:
        """Return the number of entries of the whole vector, as a Python int.

        Communication: none.
        """
        return trees.size(x)

    def agree(self, x: jax.Array) -> jax.Array:
        """Return the entrywise maximum of ``x`` over the ranks, equal on all of them.

        Every decision of a loop passes through here: copies of a replicated vector may differ in
        their last bits, and ranks that leave a loop at different times wait for each other for
        ever. NaN compares with nothing, so it is sent as infinity.

        Communication: one allreduce of ``x``; none at one rank.
        """
        if mpi.size(self.comm) == 1:
            return x
        if jnp.issubdtype(x.dtype, jnp.floating):
            x = jnp.where(jnp.isnan(x), jnp.full_like(x, jnp.inf), x)
        return mpi.allreduce(x, mpi.MAX, comm=self.comm)

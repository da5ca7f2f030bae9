"""MPI inside ``jax.jit``, in place, and distributed solvers on top of it."""

from distsolve import mpi

__all__ = ["mpi"]

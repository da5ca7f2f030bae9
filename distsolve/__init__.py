"""MPI inside ``jax.jit``, in place, and distributed solvers on top of it."""

from importlib.metadata import version

from distsolve import mpi
from distsolve.linalg import cg

__version__ = version("distsolve")

__all__ = ["cg", "mpi"]

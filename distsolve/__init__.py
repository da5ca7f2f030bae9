"""MPI inside ``jax.jit``, in place, and distributed solvers on top of it."""

from importlib.metadata import version

from distsolve import linalg, mpi
from distsolve.linalg import *  # noqa: F403 - one list of names serves both

__version__ = version("distsolve")

__all__ = ["mpi"]
__all__ += linalg.__all__

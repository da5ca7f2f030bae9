"""MPI inside ``jax.jit``, in place, and distributed solvers on top of it."""

from importlib.metadata import version

from distsolve import linalg, mpi
from distsolve.initialize import initialize, local_rank, select_device
from distsolve.linalg import *  # noqa: F403 - one list of names serves both

__version__ = version("distsolve")

__all__ = ["initialize", "local_rank", "mpi", "select_device"]
__all__ += linalg.__all__

"""MPI inside ``jax.jit``, in place, and distributed solvers on top of it."""

from importlib.metadata import version

from distsolve import mpi
from distsolve.linalg import (
    DistributedCSR,
    Gram,
    GramOnTheFly,
    MeshAxis,
    Replicated,
    Sharded,
    center,
    cg,
    check_replicated,
    covariance,
    gmres,
    jacobian,
    lsmr,
    mean,
    minres,
    natural_gradient,
    norm,
    plan,
    var,
    vdot,
    weighted_mean,
)

__version__ = version("distsolve")

__all__ = [
    "DistributedCSR",
    "Gram",
    "GramOnTheFly",
    "MeshAxis",
    "Replicated",
    "Sharded",
    "center",
    "cg",
    "check_replicated",
    "covariance",
    "gmres",
    "jacobian",
    "lsmr",
    "mean",
    "minres",
    "mpi",
    "natural_gradient",
    "norm",
    "plan",
    "var",
    "vdot",
    "weighted_mean",
]

"""Linear algebra on vectors that are spread over ranks: solvers and what they stand on."""

from distsolve.linalg.gram import Gram
from distsolve.linalg.gram_on_the_fly import GramOnTheFly
from distsolve.linalg.info import Info, Reason, SolveError
from distsolve.linalg.jacobian import center, jacobian
from distsolve.linalg.krylov.cg import cg
from distsolve.linalg.krylov.gmres import gmres
from distsolve.linalg.krylov.lsmr import lsmr
from distsolve.linalg.krylov.minres import minres
from distsolve.linalg.mesh import MeshAxis
from distsolve.linalg.natural_gradient import natural_gradient
from distsolve.linalg.nystrom import Nystrom, nystrom
from distsolve.linalg.plan import Plan, plan
from distsolve.linalg.preconditioners import block_jacobi, jacobi
from distsolve.linalg.reductions import covariance, mean, norm, var, vdot, weighted_mean
from distsolve.linalg.replication import check_replicated
from distsolve.linalg.space import Replicated, Sharded
from distsolve.linalg.sparse import DistributedCSR
from distsolve.linalg.update import UpdateInfo

__all__ = [
    "DistributedCSR",
    "Gram",
    "GramOnTheFly",
    "Info",
    "MeshAxis",
    "Nystrom",
    "Plan",
    "Reason",
    "Replicated",
    "Sharded",
    "SolveError",
    "UpdateInfo",
    "block_jacobi",
    "center",
    "cg",
    "check_replicated",
    "covariance",
    "gmres",
    "jacobi",
    "jacobian",
    "lsmr",
    "mean",
    "minres",
    "natural_gradient",
    "norm",
    "nystrom",
    "plan",
    "var",
    "vdot",
    "weighted_mean",
]

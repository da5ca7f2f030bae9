"""Linear algebra on vectors that are spread over ranks: solvers and what they stand on."""

from distsolve.linalg.info import Info, Reason, SolveError
from distsolve.linalg.krylov.cg import cg
from distsolve.linalg.space import Replicated

__all__ = ["Info", "Reason", "Replicated", "SolveError", "cg"]

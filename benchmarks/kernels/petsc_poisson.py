"""PETSc's KSPCG on the 3D Poisson equation, as an assembled matrix; prints one JSON line.

The equation is that of examples/poisson3d.py: 7-point operator, float64, rows split over ranks in
the same slabs. CG runs without preconditioner and stops on the residual itself, as ours does.
"""

import argparse
import sys

import numpy as np
import petsc4py
from measure import COMM, report, slowest

petsc4py.init(sys.argv[:1])
from petsc4py import PETSc  # noqa: E402 - needs the call above


def laplacian(n):
    """Assemble this rank's planes of the 7-point operator on n**3 points."""
    rank, size = COMM.Get_rank(), COMM.Get_size()
    start, stop = (n * r // size * n * n for r in (rank, rank + 1))
    rows = np.arange(start, stop)
    at = np.unravel_index(rows, (n, n, n))
    diagonal = rows, rows, np.full(len(rows), 6.0)
    entries = [diagonal]
    for axis, stride in enumerate((n * n, n, 1)):
        for step, inside in ((-1, at[axis] > 0), (1, at[axis] < n - 1)):
            entries.append(
                (rows[inside], rows[inside] + step * stride, np.full(inside.sum(), -1.0))
            )
    row, column, value = map(np.concatenate, zip(*entries, strict=True))
    order = np.lexsort((column, row))
    pointers = np.concatenate([[0], np.cumsum(np.bincount(row - start, minlength=len(rows)))])
    local = len(rows)
    csr = [array.astype(PETSc.IntType) for array in (pointers, column[order])]
    matrix = PETSc.Mat().createAIJ(
        ((local, n**3), (local, n**3)), csr=(*csr, value[order]), comm=COMM
    )
    matrix.assemble()
    return matrix


def solver(matrix, *, tol, iterations):
    """A CG without preconditioner whose norm is that of the residual."""
    ksp = PETSc.KSP().create(COMM)
    ksp.setOperators(matrix)
    ksp.setType(PETSc.KSP.Type.CG)
    ksp.getPC().setType(PETSc.PC.Type.NONE)
    ksp.setNormType(PETSc.KSP.NormType.UNPRECONDITIONED)
    ksp.setTolerances(rtol=tol, atol=0.0, max_it=iterations)
    ksp.setUp()
    return ksp


def main():
    """Take a fixed number of steps to measure; solve to check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, required=True, help="inner points along each edge")
    parser.add_argument("--iterations", type=int, required=True)
    options = parser.parse_args()
    matrix = laplacian(options.n)
    b, u, solution = matrix.createVecRight(), matrix.createVecLeft(), matrix.createVecRight()
    solution.setRandom()
    matrix.mult(solution, b)
    steps = solver(matrix, tol=1e-50, iterations=options.iterations)
    steps.solve(b, u)
    if steps.getIterationNumber() != options.iterations:
        print(f"took {steps.getIterationNumber()} steps", flush=True)
        COMM.Abort(2)
    seconds = slowest(lambda: steps.solve(b, u))
    whole = solver(matrix, tol=1e-10, iterations=10 * options.n**3)
    whole.solve(b, u)
    u.axpy(-1.0, solution)
    if not u.norm() <= 1e-6 * solution.norm():
        print(f"error {u.norm()} of {solution.norm()}", flush=True)
        COMM.Abort(2)
    version = ".".join(map(str, PETSc.Sys.getVersion()))
    report(seconds=seconds / options.iterations, petsc=f"PETSc {version}")


if __name__ == "__main__":
    main()

"""The Poisson equation in a cube, split into slabs over any number of MPI ranks.

    mpiexec -n 2 python examples/poisson3d.py --n 64

``-u_xx - u_yy - u_zz = f`` with ``u = 0`` on the boundary, on a grid of ``n**3`` inner points, by
`distsolve.cg` on sharded vectors. Each rank holds consecutive planes of the grid; a product with
the operator takes two `sendrecv`, one plane each. The source consists of all discrete
eigenfunctions, whose eigenvalues are known, and so does the exact solution.
"""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import distsolve
import distsolve.mpi as mpi


class Slab(NamedTuple):
    """The planes ``start`` to ``stop`` of a cube of ``n`` planes, and the ranks on both sides."""

    n: int
    start: int
    stop: int
    below: int
    above: int

    @classmethod
    def of_rank(cls, n: int, rank: int, size: int) -> Slab:
        """Return the slab of a rank: sizes differ by one plane at most.

        Parameters
        ----------
        n : int
            Planes of the cube, at least ``size``: a rank without planes could pass none on.
        rank, size : int

        Returns
        -------
        Slab
        """
        if n < size:
            raise ValueError(
                f"`n` is {n}, but {size} ranks need at least one plane each: expected n >= {size}. "
                "Use fewer ranks or a finer grid."
            )
        return cls(
            n,
            n * rank // size,
            n * (rank + 1) // size,
            rank - 1 if rank > 0 else mpi.PROC_NULL,
            rank + 1 if rank < size - 1 else mpi.PROC_NULL,
        )

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of this rank's piece of a vector."""
        return self.stop - self.start, self.n, self.n


def laplacian(slab: Slab, u: jax.Array) -> jax.Array:
    """Multiply by the 7-point operator.

    ``(A u)_ijk = 6 u_ijk - u_(i-1)jk - u_(i+1)jk - u_i(j-1)k - ...``, which is ``-h**2`` times the
    Laplacian on a grid of spacing h, with zero boundary values.

    Parameters
    ----------
    slab : Slab
    u : (planes, n, n) sharded

    Returns
    -------
    (planes, n, n) sharded

    Communication
    -------------
    Two sendrecv, of one plane each.
    """
    outside = jnp.zeros_like(u[:1])  # what stays where there is no neighbour
    before = mpi.sendrecv(u[-1:], outside, source=slab.below, dest=slab.above)
    after = mpi.sendrecv(u[:1], outside, source=slab.above, dest=slab.below)
    if len(u) == 1:
        return between(before, u, after)
    parts = between(before, u[:1], u[1:2]), inside(u), between(u[-2:-1], u[-1:], after)
    # Without the barriers XLA fuses the parts into loops that ask at each point where it is.
    return jax.lax.optimization_barrier(jnp.concatenate(jax.lax.optimization_barrier(parts)))


def between(before: jax.Array, planes: jax.Array, after: jax.Array) -> jax.Array:
    """Multiply planes, given their neighbours on both sides.

    Parameters
    ----------
    before, planes, after : (planes, n, n)

    Returns
    -------
    (planes, n, n)
    """
    padded = jnp.pad(planes, ((0, 0), (1, 1), (1, 1)))
    rows = padded[:, :-2, 1:-1] + padded[:, 2:, 1:-1]
    columns = padded[:, 1:-1, :-2] + padded[:, 1:-1, 2:]
    return 6 * planes - before - after - rows - columns


def inside(u: jax.Array) -> jax.Array:
    """Multiply all planes but the first and the last, whose neighbours are all at hand.

    In memory each neighbour lies at a fixed distance, so this is one loop with seven contiguous
    reads, and no padded copy. What a read finds beyond an edge is of another row: it counts 0.

    Parameters
    ----------
    u : (planes, n, n)

    Returns
    -------
    (planes - 2, n, n)
    """
    planes, n, _ = u.shape
    flat, shape, k = u.ravel(), (planes - 2, n, n), jnp.arange(n)

    def neighbour(distance: int) -> jax.Array:
        first = n * n + distance
        return flat[first : first + (planes - 2) * n * n].reshape(shape)

    edges = (k > 0).astype(u.dtype), (k < n - 1).astype(u.dtype)
    low, high = (edge[None, None, :] for edge in jax.lax.optimization_barrier(edges))
    return (
        6 * neighbour(0)
        - neighbour(-n * n)
        - neighbour(n * n)
        - low.mT * neighbour(-n)
        - high.mT * neighbour(n)
        - low * neighbour(-1)
        - high * neighbour(1)
    )


def manufactured(slab: Slab) -> tuple[np.ndarray, np.ndarray]:
    """Return a right-hand side and its exact solution, from the eigenfunctions of the operator.

    ``b = sum_klm c_k c_l c_m s_k s_l s_m`` with ``c_k = 1 / k`` and ``(s_k)_i = sin(pi k i h)``;
    the solution has these coefficients divided by the eigenvalues
    ``4 (sin(pi k h / 2)**2 + sin(pi l h / 2)**2 + sin(pi m h / 2)**2)``.

    Parameters
    ----------
    slab : Slab

    Returns
    -------
    b, solution : (planes, n, n) sharded
        In double precision.
    """
    k = np.arange(1, slab.n + 1)
    h = 1 / (slab.n + 1)
    sines = np.sin(np.pi * h * np.outer(k, k))
    eigenvalues = 4 * np.sin(np.pi * h * k / 2) ** 2
    coefficients = 1 / k
    profile = sines @ coefficients
    planes = slice(slab.start, slab.stop)
    b = np.einsum("i,j,k->ijk", profile[planes], profile, profile)
    solution = np.zeros(slab.shape)
    # One mode of the split axis at a time: no rank ever holds the coefficients of the whole cube.
    for c, eigenvalue, sine in zip(coefficients, eigenvalues, sines, strict=True):
        weights = c * np.outer(coefficients, coefficients)
        weights /= eigenvalue + eigenvalues[:, None] + eigenvalues
        solution += sine[planes, None, None] * (sines @ weights @ sines)
    return b, solution


class Report(NamedTuple):
    """What came out, equal on all ranks but for the time."""

    info: distsolve.linalg.Info
    error: float  # in the 2-norm, relative to the exact solution's
    seconds: float  # of the solve, once compiled


def solve(slab: Slab, method: str, tol: float, dtype: str, progress: bool = False) -> Report:
    """Solve the equation on all ranks of the world, and compare with the exact solution.

    Parameters
    ----------
    slab : Slab
        This rank's.
    method : str
        Of `distsolve.cg`.
    tol : float
        Relative to the norm of the right-hand side.
    dtype : str
        ``float32`` or ``float64``.
    progress : bool
        Whether rank 0 shows a live line.

    Returns
    -------
    Report
    """
    space = distsolve.Sharded()
    b, exact = (jnp.asarray(array, dtype) for array in manufactured(slab))
    run = jax.jit(
        partial(
            distsolve.cg,
            partial(laplacian, slab),
            tol=tol,
            space=space,
            method=method,
            progress=progress,
        )
    )
    compiled = run.lower(b).compile()
    mpi.barrier()
    begin = time.perf_counter()
    u, info = jax.block_until_ready(compiled(b))
    seconds = time.perf_counter() - begin
    difference, whole = jax.jit(lambda u, exact: (space.norm(u - exact), space.norm(exact)))(
        u, exact
    )
    return Report(info, float(difference / whole), seconds)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line.

    Parameters
    ----------
    arguments : list of str, optional
        Instead of the command line.

    Returns
    -------
    argparse.Namespace
    """
    parser = argparse.ArgumentParser(
        description="Solve the Poisson equation in a cube and compare with the exact solution.",
        epilog="Start it with `mpiexec -n RANKS python` to split the cube over ranks.",
    )
    parser.add_argument("--n", type=int, default=64, help="inner points along each edge (64)")
    parser.add_argument(
        "--method", choices=["classic", "single_reduction", "pipelined"], default="classic"
    )
    parser.add_argument("--tol", type=float, help="of the residual (1e-8, in float32 1e-4)")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float64")
    parser.add_argument("--quiet", action="store_true", help="no progress line")
    options = parser.parse_args(arguments)
    if options.n < 1:
        parser.error(f"--n {options.n}: expected a positive number of points")
    if options.tol is None:
        options.tol = 1e-8 if options.dtype == "float64" else 1e-4
    if not 0 < options.tol < 1:
        parser.error(f"--tol {options.tol}: expected a number between 0 and 1, such as 1e-8")
    return options


def main(arguments: list[str] | None = None) -> None:
    """Run the program.

    Parameters
    ----------
    arguments : list of str, optional
        Instead of the command line.
    """
    options = parse_arguments(arguments)
    jax.config.update("jax_enable_x64", True)
    lead = mpi.rank() == 0
    try:
        slab = Slab.of_rank(options.n, mpi.rank(), mpi.size())
    except ValueError as error:  # on all ranks or on none
        if lead:
            print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    info, error, seconds = solve(
        slab, options.method, options.tol, options.dtype, progress=not options.quiet
    )
    if lead:
        steps = int(info.iterations)
        print(
            f"{options.n}^3 = {options.n**3} unknowns in {options.dtype} on {mpi.size()} "
            f"rank{'s'[: mpi.size() > 1]}, method {options.method}"
        )
        print(
            f"{steps} iterations in {seconds:.3f} s, {1000 * seconds / max(steps, 1):.3f} ms each"
        )
        print(
            f"residual {float(info.residual_norm / info.rhs_norm):.3e} relative to the right-hand "
            f"side, error {error:.3e} relative to the exact solution"
        )
        if not info.converged:
            print(f"error: {info.message}", file=sys.stderr)
    raise SystemExit(0 if info.converged else 1)


if __name__ == "__main__":
    main()

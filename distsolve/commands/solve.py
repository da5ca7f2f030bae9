"""``python -m distsolve solve FILE.mtx``: a sparse system, rows split over the ranks."""

import argparse
import importlib.util
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.io

from distsolve import linalg, mpi
from distsolve.commands.matrix_market import read_system
from distsolve.commands.options import number, positive
from distsolve.commands.together import InputError, agreed, agreed_on_rank_0
from distsolve.linalg.trees import DTYPES

METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "cg": (linalg.cg, {"method": "classic"}),
    "single_reduction": (linalg.cg, {"method": "single_reduction"}),
    "pipelined": (linalg.cg, {"method": "pipelined"}),
    "minres": (linalg.minres, {}),
    "gmres": (linalg.gmres, {}),
}
PRECONDITIONERS = ("none", "jacobi", "block_jacobi")
BLOCK = 32  # rows of a block of block_jacobi
MOST_HISTORY = 1_000_000  # residual norms kept for a plot

FEW_RANKS = 16  # whose rows are listed one by one
# What to change on the command line, by the name of the reason.
ADVICE = {
    "maxiter": "raise --maxiter, loosen --tol, or use another --preconditioner",
    "stagnated": "loosen --tol, or use a wider --dtype",
    "indefinite_operator": "--method minres or gmres takes such a matrix",
    "indefinite_preconditioner": "--preconditioner none, or --method gmres",
    "nonfinite": "the matrix is probably singular: --method minres takes such a one if it is "
    "Hermitian",
}


class Outcome(NamedTuple):
    """What a solve left on this rank."""

    x: jax.Array
    info: linalg.Info
    seconds: float
    compile_seconds: float


def add(subparsers: Any) -> None:
    """Add this command to the command line.

    Parameters
    ----------
    subparsers : as from ``ArgumentParser.add_subparsers``
    """
    parser = subparsers.add_parser(
        "solve",
        help="solve a sparse system from a Matrix Market file",
        description="Solve A x = b for a sparse matrix from a Matrix Market file, rows split over "
        "the ranks. Exit status: 0 converged, 1 not converged, 2 unusable input.",
        epilog="Start it with `mpiexec -n RANKS python -m distsolve solve FILE.mtx`.",
    )
    parser.add_argument("file", type=Path, help="Matrix Market file of the matrix")
    parser.add_argument("--rhs", type=Path, help="Matrix Market file of b (A @ ones)")
    parser.add_argument("--method", choices=METHODS, default="cg", help="(cg)")
    parser.add_argument("--preconditioner", choices=PRECONDITIONERS, default="none", help="(none)")
    parser.add_argument(
        "--block-size", type=positive, default=BLOCK, help=f"rows of block_jacobi ({BLOCK})"
    )
    parser.add_argument("--tol", type=_tolerance, default=1e-8, help="relative residual (1e-8)")
    parser.add_argument("--maxiter", type=positive, help="most iterations (10 times the rows)")
    parser.add_argument("--dtype", choices=DTYPES, help="(float64, or complex128 where needed)")
    parser.add_argument("--output", type=Path, help="Matrix Market file to write x to")
    parser.add_argument("--plot", type=Path, help="picture of the residual, e.g. FILE.png")
    parser.add_argument("--quiet", action="store_true", help="no live line, no report")
    parser.set_defaults(run=run)


def _tolerance(text: str) -> float:
    expected = "a number from 0 to 1, such as 1e-8"
    return number(text, float, lambda value: 0 <= value < 1, expected)


def run(options: argparse.Namespace) -> int:
    """Solve the system that the options name, on all ranks.

    Parameters
    ----------
    options : argparse.Namespace
        As `add` describes them, the same on all ranks.

    Returns
    -------
    int
        0 if the solve converged, 1 if not.

    Raises
    ------
    SystemExit
        With status 2 on all ranks, for input that cannot be used.
    """
    jax.config.update("jax_enable_x64", True)
    agreed_on_rank_0(_check_targets, options)
    # One rank reads: a job of many would read the file as many times, and hold as many copies.
    system = agreed_on_rank_0(
        read_system, options.file, options.rhs, options.dtype, options.method != "gmres"
    )
    A = linalg.DistributedCSR.scatter(system and system.matrix)
    b = mpi.scatterv(system.b if system else np.zeros((), A.dtype), A.counts)
    M = agreed(_preconditioner, options, A)
    outcome = solve(options, A, b, M)
    x = np.asarray(mpi.gatherv(outcome.x, A.counts))
    agreed_on_rank_0(_write, options, x, outcome.info)
    if system and not options.quiet:
        print(report(options, system, A, x, outcome))
    elif system and not outcome.info.converged:
        info = outcome.info
        advice = ADVICE.get(info.reason_name, "")
        print(f"{options.file}: {info.outcome}{advice and f' Advice: {advice}.'}", file=sys.stderr)
    return 0 if outcome.info.converged else 1


def _check_targets(options):
    """Find out before the work whether its results can be written."""
    for name in ("output", "plot"):
        path = getattr(options, name)
        if path and path.is_dir():
            raise InputError(f"--{name} {path}: is a folder. Name a file in it.")
        if path and not path.parent.is_dir():
            raise InputError(
                f"--{name} {path}: the folder {path.parent} does not exist. Make it first."
            )
    if not options.plot:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError(
            "--plot needs matplotlib, which is not installed: pip install 'distsolve[examples]'."
        )
    from matplotlib.figure import Figure

    kinds = Figure().canvas.get_supported_filetypes()
    if _picture_format(options.plot) not in kinds:
        raise InputError(
            f"--plot {options.plot}: its ending {options.plot.suffix} is no picture that "
            f"matplotlib can write. Use one of .{', .'.join(sorted(kinds))}."
        )


def _picture_format(path):
    return path.suffix[1:].lower() or "png"


def _write(options, x, info):
    try:
        if options.output:
            scipy.io.mmwrite(options.output, x[:, None])
        if options.plot:
            plot(options, info)
    except (OSError, RuntimeError) as error:  # some pictures need programs that may be missing
        raise InputError(f"the results cannot be written: {error}.") from error


def _preconditioner(options, A):
    try:
        if options.preconditioner == "jacobi":
            return linalg.jacobi(jnp.real(A.diag()))
        if options.preconditioner == "block_jacobi":
            return linalg.block_jacobi(A.local_block(), options.block_size)
    except ValueError as error:
        raise InputError(
            f"{options.file}: --preconditioner {options.preconditioner} cannot be used on rank "
            f"{mpi.rank()}, rows {A.rows.start + 1} to {A.rows.stop} of the matrix: {error}"
        ) from error
    return None


def solve(options: argparse.Namespace, A: Any, b: Any, M: Any) -> Outcome:
    """Compile and run the solver.

    Parameters
    ----------
    options : argparse.Namespace
    A : DistributedCSR
    b : (n,) sharded
    M : preconditioner or None

    Returns
    -------
    Outcome

    Communication
    -------------
    That of the solver.
    """
    solver, choice = METHODS[options.method]
    history = 0
    if options.plot:
        history = min(options.maxiter or 10 * A.shape[0], MOST_HISTORY) + 1

    @jax.jit
    def program(A, b, M):
        return solver(
            A,
            b,
            tol=options.tol,
            maxiter=options.maxiter,
            M=M,
            space=A.layout.space,
            history=history,
            progress=not options.quiet,
            **choice,
        )

    begin = time.perf_counter()
    compiled = program.lower(A, b, M).compile()
    mpi.barrier()
    start = time.perf_counter()
    x, info = jax.block_until_ready(compiled(A, b, M))
    return Outcome(x, info, time.perf_counter() - start, start - begin)


def report(
    options: argparse.Namespace, system: Any, A: Any, x: np.ndarray, outcome: Outcome
) -> str:
    """Return what to print in the end.

    Parameters
    ----------
    options : argparse.Namespace
    system : System
    A : DistributedCSR
    x : (N,) array
        The whole solution.
    outcome : Outcome

    Returns
    -------
    str
    """
    info, n = outcome.info, A.shape[0]
    rhs_norm = float(info.rhs_norm)
    relative = float(info.residual_norm) / rhs_norm if rhs_norm else float(info.residual_norm)
    method = options.method
    if options.preconditioner != "none":
        method += f" with {options.preconditioner}"
    steps = int(info.iterations)
    lines = {
        "matrix": f"{options.file}, {n} x {n}, {system.matrix.nnz} entries, {A.dtype}",
        "note": system.note,
        "right-hand side": options.rhs or "A @ ones, so that the solution is 1 everywhere",
        "rows per rank": _counts(A.counts),
        "method": method,
        "result": info.outcome,
        "advice": ADVICE.get(info.reason_name),
        "iterations": steps,
        "true residual": f"{float(info.residual_norm):.6g}, relative {relative:.3g}",
        "error": "" if options.rhs else f"{np.abs(x - 1).max():.3g} at most",
        "condition": _condition(info) if steps else "",
        "time": f"{outcome.seconds:.3f} s"
        + (f", {1000 * outcome.seconds / steps:.3f} ms per iteration" if steps else "")
        + f"; compilation {outcome.compile_seconds:.1f} s",
        "solution": options.output,
        "plot": options.plot,
    }
    return "\n".join(f"{name:16} {text}" for name, text in lines.items() if text not in ("", None))


def _counts(counts):
    if len(counts) <= FEW_RANKS:
        return ", ".join(map(str, counts))
    return f"{min(counts)} to {max(counts)} on {len(counts)} ranks"


def _condition(info):
    estimate = float(info.condition_estimate)
    return f"about {estimate:.3g} at least" if np.isfinite(estimate) and estimate > 0 else ""


def plot(options: argparse.Namespace, info: linalg.Info) -> None:
    """Draw the residual over the iterations.

    Parameters
    ----------
    options : argparse.Namespace
    info : Info
        With its history.
    """
    from matplotlib.figure import Figure

    norms = np.asarray(info.residual_history)
    norms = norms[: int(info.iterations) + 1] / (float(info.rhs_norm) or 1.0)
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    axes.semilogy(np.arange(len(norms)), norms)
    axes.axhline(options.tol, color="gray", linestyle="--", label=f"tolerance {options.tol:g}")
    axes.set_xlabel("iteration")
    axes.set_ylabel("residual / norm of the right-hand side")
    axes.set_title(f"{options.file.name}, {options.method}")
    axes.legend()
    figure.savefig(options.plot, format=_picture_format(options.plot), dpi=150)

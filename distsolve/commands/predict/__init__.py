"""``python -m distsolve predict``: what more ranks will buy, before they are asked for."""

import argparse
import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from distsolve.commands.bench import report
from distsolve.commands.options import positive
from distsolve.commands.predict import chart, tables
from distsolve.commands.predict.crossings import Problem
from distsolve.commands.predict.fitting import Fit, fit, samples
from distsolve.commands.together import BAD_INPUT, InputError
from distsolve.linalg.machine import Machine
from distsolve.linalg.plan import ITERATIONS
from distsolve.mpi.comm import CHUNK_ACROSS_NODES
from distsolve.mpi.launcher import is_first

DTYPES = ("float32", "float64", "complex64", "complex128")
MEMORY = Machine.memory / 1e9


def add(subparsers: Any) -> None:
    """Add this command to the command line.

    Parameters
    ----------
    subparsers : as from ``ArgumentParser.add_subparsers``
    """
    parser = subparsers.add_parser(
        "predict",
        help="predict the time of an SR step on more ranks, from what `bench` measured",
        description="Predict the time of a step of stochastic reconfiguration on numbers of ranks "
        "that were not measured, for each method, and where one overtakes another. Starts no MPI. "
        "Exit status: 0, or 2 for unusable input.",
        epilog="Measure first: `python -m distsolve bench --output RUNS` on several numbers of "
        "ranks.",
    )
    parser.add_argument(
        "--ranks", type=positive, nargs="+", required=True, help="numbers of ranks to predict for"
    )
    parser.add_argument("--samples", type=positive, required=True, help="on all ranks together")
    parser.add_argument("--parameters", type=positive, required=True)
    parser.add_argument(
        "--runs", type=Path, metavar="DIR", help="what `distsolve bench --output DIR` measured"
    )
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help=f"of J ({DTYPES[0]})")
    parser.add_argument(
        "--iterations", type=positive, default=ITERATIONS, help=f"of cg ({ITERATIONS})"
    )
    parser.add_argument(
        "--chunk",
        type=positive,
        default=CHUNK_ACROSS_NODES,
        metavar="BYTES",
        help=f"that a sum hands to MPI at a time ({CHUNK_ACROSS_NODES})",
    )
    parser.add_argument(
        "--memory", type=float, default=MEMORY, metavar="GB", help=f"of a rank ({MEMORY:g})"
    )
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder for JSON and a picture")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the prediction, on rank 0 if there are several.

    Parameters
    ----------
    options : argparse.Namespace
        As `add` describes them.

    Returns
    -------
    int
        0, or 2 for runs that cannot be read, or files that cannot be written.
    """
    if not is_first():
        return 0
    try:
        _predict(options)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    return 0


def _predict(options):
    if not 0 < options.memory < math.inf:
        raise InputError(f"--memory {options.memory:g}: expected a positive number of GB.")
    fitted = _fit(options)
    problem = Problem(
        options.samples,
        options.parameters,
        np.dtype(options.dtype),
        options.iterations,
        1e9 * options.memory,
        fitted.machine,
    )
    ranks = sorted(set(options.ranks))
    print("\n".join([*tables.of_fit(fitted), *tables.of_prediction(problem, ranks)]))
    if options.output:
        try:
            print("", _write(options.output, problem, ranks, fitted), sep="\n")
        except OSError as error:
            raise InputError(
                f"--output {options.output}: the prediction cannot be written: {error}."
            ) from error


def _fit(options) -> Fit:
    machine = Machine(chunk=options.chunk)
    if options.runs and not options.runs.is_dir():
        raise InputError(f"--runs {options.runs}: no such folder. Name the --output of `bench`.")
    found = samples(report.read(options.runs)) if options.runs else []
    if options.runs and not found:
        raise InputError(
            f"--runs {options.runs}: there is no run of allreduce on several ranks, or of sr. Make "
            f"some: `mpiexec -n 2 python -m distsolve bench --output {options.runs}`."
        )
    return fit(found, machine)


def _write(folder, problem, ranks, fitted):
    content = {
        "format": "distsolve prediction 1",
        "predicted": [asdict(problem.plan(p)) for p in ranks],
        "assumed": fitted.assumed,
        "residuals": [
            {"modelled": r.modelled, "error": r.error, **asdict(r.sample.point)}
            for r in fitted.residuals
        ],
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "prediction.json").write_text(json.dumps(content, indent=1) + "\n")
    try:
        picture = chart.draw(problem, ranks, folder).name
    except ImportError:
        picture = "and no picture, which needs matplotlib: pip install 'distsolve[examples]'"
    return f"{folder}: prediction.json, {picture}"

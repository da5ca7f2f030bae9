"""``python -m distsolve bench``: how fast a message and the solvers are, on this many ranks."""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from distsolve import mpi
from distsolve.commands.bench import report, tables
from distsolve.commands.bench.cases import CASES
from distsolve.commands.bench.measure import Stop, measure
from distsolve.commands.bench.points import Key, Point
from distsolve.commands.options import positive
from distsolve.commands.together import BAD_INPUT, InputError, agreed_on_rank_0
from distsolve.mpi.launcher import is_first

REPEATS = 10
PARAMETERS = 1000
INTERRUPTED = 130  # the exit status of programs that Ctrl-C ended


def add(subparsers: Any) -> None:
    """Add this command to the command line.

    Parameters
    ----------
    subparsers : as from ``ArgumentParser.add_subparsers``
    """
    parser = subparsers.add_parser(
        "bench",
        help="measure a reduction and the solvers on these ranks, and how they scale",
        description="Time allreduce and solves on all ranks; with --output also as JSON, CSV and "
        "pictures, in which runs on different numbers of ranks come together. Exit status: 0, 2 "
        "for unusable input, 130 after Ctrl-C, which keeps what is done.",
        epilog="Start it with `mpiexec -n RANKS python -m distsolve bench --output DIR`, on "
        "several numbers of ranks.",
    )
    parser.add_argument("case", nargs="?", choices=CASES, help="what to measure (all)")
    scaling = parser.add_mutually_exclusive_group()
    scaling.add_argument(
        "--strong",
        dest="scaling",
        action="store_const",
        const="strong",
        help="of solves: a size is that of the whole problem (the default)",
    )
    scaling.add_argument(
        "--weak",
        dest="scaling",
        action="store_const",
        const="weak",
        help="of solves: a size is that of each rank's part",
    )
    parser.add_argument(
        "--sizes",
        type=positive,
        nargs="+",
        metavar="SIZE",
        help="; ".join(
            f"{name}: {case.unit} ({' '.join(map(str, case.sizes[:2]))}"
            f"{' ...' if len(case.sizes) > 2 else ''})"
            for name, case in CASES.items()
        ),
    )
    parser.add_argument(
        "--repeats", type=positive, default=REPEATS, help=f"whose median counts ({REPEATS})"
    )
    parser.add_argument(
        "--method",
        choices=dict.fromkeys(method for case in CASES.values() for method in case.methods),
        help="; ".join(
            f"{name}: {', '.join(case.methods)}" for name, case in CASES.items() if case.methods
        )
        + "; the first by default",
    )
    parser.add_argument("--parameters", type=positive, help=f"of sr ({PARAMETERS})")
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="folder for JSON, CSV and pictures"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.add_argument(
        "--merge",
        type=Path,
        metavar="DIR",
        help="measure nothing, and join the runs in this folder",
    )
    parser.set_defaults(run=run, scaling="strong")


def run(options: argparse.Namespace) -> int:
    """Measure what the options name, on all ranks, or join what was measured.

    Parameters
    ----------
    options : argparse.Namespace
        As `add` describes them, the same on all ranks.

    Returns
    -------
    int
        0, 2 for a folder that cannot be merged, or 130 after Ctrl-C.

    Raises
    ------
    SystemExit
        With status 2 on all ranks, for input that cannot be used.
    """
    if options.merge:
        return _merge(options) if is_first() else 0
    jax.config.update("jax_enable_x64", True)
    agreed_on_rank_0(_check, options, mpi.size())
    plan, omitted = _plan(options, mpi.size())
    lead = mpi.rank() == 0
    results = report.Run(report.conditions(), [])
    bar = tqdm(
        total=len(plan) * options.repeats,
        unit=" repeats",
        disable=options.quiet or not lead,
        leave=False,
    )

    def say(*lines):
        if lead:
            with bar.external_write_mode():
                print("\n".join(lines), flush=True)

    say(*tables.title(results.conditions), *(f"left out: {fault}" for fault in omitted))
    with Stop() as stop, bar:
        for name, size in plan:
            bar.set_description(f"{name} {size}")
            point = _take(name, size, options, stop, bar.update)
            if point is None:
                break
            if name not in {other.case for other in results.points}:
                say(*tables.head(point))
            say(tables.row(point))
            results.points.append(point)
            if options.output:
                agreed_on_rank_0(report.write, options.output, results)
    if options.output and results.points:
        mine = {point.key for point in results.points}
        say(*(agreed_on_rank_0(report.merge, options.output, mine) or ()))
    if len(results.points) < len(plan):
        if lead:
            print(f"stopped after {len(results.points)} of {len(plan)} sizes", file=sys.stderr)
        return INTERRUPTED
    return 0


def _take(name, size, options, stop, tick):
    """Return a point, or None where it was stopped."""
    case, ranks = CASES[name], mpi.size()
    method = case.method(options.method)
    parameters = (options.parameters or PARAMETERS) if case.has_parameters else 0
    total = size * ranks if options.scaling == "weak" else size
    work = case.make(total, size, method, parameters)
    figures = measure(work, options.repeats, stop, tick)
    scaling = options.scaling if case.is_solve else ""
    key = Key(name, scaling, size, method, parameters, work.settings)
    return figures and Point(*key, ranks, **figures)


def _plan(options, ranks):
    """Return the benchmarks with their sizes, and what is wrong with those that do not fit."""
    plan, faults = [], []
    for name in [options.case] if options.case else CASES:
        for size in options.sizes or CASES[name].sizes:
            if fault := CASES[name].fault(size, ranks, options.scaling):
                faults.append(f"size {size} of {name}: {fault}")
            else:
                plan.append((name, size))
    return plan, faults


def _check(options, ranks):
    """Find out before the work what is wrong with the options, and whether files can be written."""
    if options.sizes and not options.case:
        raise InputError(
            f"--sizes {' '.join(map(str, options.sizes))}: sizes of what? Name one of "
            f"{', '.join(CASES)} in front of it."
        )
    if options.case and options.method and options.method not in CASES[options.case].methods:
        raise InputError(
            f"--method {options.method}: expected a method of {options.case}: "
            f"{', '.join(CASES[options.case].methods) or 'it has none, so leave it out'}."
        )
    if options.case and options.parameters and not CASES[options.case].has_parameters:
        raise InputError(
            f"--parameters {options.parameters}: {options.case} has none, so leave it out."
        )
    if options.case and options.scaling == "weak" and not CASES[options.case].is_solve:
        raise InputError(f"--weak: of solves; {options.case} is of a size on each rank anyway.")
    plan, faults = _plan(options, ranks)
    if faults and (options.sizes or not plan):
        raise InputError(f"--sizes: {faults[0]}.")
    if options.output:
        try:
            options.output.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=options.output):
                pass
        except OSError as error:
            raise InputError(
                f"--output {options.output}: expected a folder that can be written: {error}."
            ) from error
        report.read(options.output)


def _merge(options):
    try:
        if options.case or options.sizes or options.output or options.method or options.parameters:
            raise InputError(
                f"--merge {options.merge}: measures nothing, and takes no benchmark, --sizes, "
                "--method, --parameters or --output. Leave these out."
            )
        print("\n".join(report.merge(options.merge)))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    return 0

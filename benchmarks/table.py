"""A comparison: contenders that take turns, rows that read their figures, targets to reach.

Every figure is the median over repeats of the slowest rank's. In each repeat the contenders of a
row run one after the other, each in fresh processes, so that noise hits all of them alike.
"""

import argparse
import importlib.util
import json
import shlex
import signal
import statistics
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from launch import THREAD_LIMITS, LaunchError, build, debian_petsc, launch, tool
from machine import OtherLoad, describe
from report import (
    figure_text,
    head_lines,
    markdown,
    print_row,
    print_table,
    ratio_text,
    run_lines,
    seconds_text,
)

RANKS = 2
REPEATS = 5


@dataclass(frozen=True)
class Contender:
    """One program to run; `needs` is the package or tool that it cannot run without.

    `quick` replaces options in a quick run. `started` are further arguments of `launch`. `peer` is
    what `compare.py` calls it; "" for what is ours, or no other library's.
    """

    kernel: str
    needs: str
    options: dict
    quick: dict = field(default_factory=dict)
    started: dict = field(default_factory=dict)
    peer: str = ""


@dataclass(frozen=True)
class Target:
    """An upper limit for our figure, alone or against a rival's figure.

    `factor` compares the ratio to the rival, `excess` the difference, `limit` the figure itself;
    `equals` is no limit but the figure.
    """

    text: str
    against: str | None = None
    factor: float | None = None
    excess: float | None = None
    limit: float | None = None
    equals: float | None = None

    def judge(self, ours, theirs):
        """The compared value as text, and whether the target is reached."""
        if self.factor is not None:
            return ratio_text(ours / theirs), ours / theirs <= self.factor
        if self.excess is not None:
            excess = ours - theirs
            return ("+" if excess > 0 else "") + seconds_text(excess), excess <= self.excess
        if self.equals is not None:
            return f"{ours - self.equals:+g}", ours == self.equals
        return ratio_text(ours / self.limit), ours <= self.limit


@dataclass(frozen=True)
class Row:
    """One line of the table: which figure of which measurement, and what it must reach.

    `ours` is the contender that must reach it. `beside` names further figures, shown in brackets.
    """

    title: str
    measurement: str
    figure: str
    targets: tuple[Target, ...]
    ours: str = "distsolve"
    beside: dict = field(default_factory=dict)


def missing(contender):
    """Why a contender cannot run here, or None. Looks packages up without importing them."""
    if contender.needs == "mpiwrapper":
        return "not here: it needs MPIwrapper, which no package on PyPI brings"
    if contender.needs == "mpicc":
        found = tool("mpicc")
    elif contender.needs == "petsc":
        found = debian_petsc()
        if found is None:
            return "PETSc not installed (Debian: python3-petsc4py, python3-mpi4py, openmpi-bin)"
    else:
        found = importlib.util.find_spec(contender.needs)
    return "not installed" if found is None else None


def measure(contenders, *, repeats, quick, folder):
    """Run the contenders in turn, `repeats` times; samples or a reason, by contender."""
    results = {}
    programs = {}
    for name, contender in contenders.items():
        reason = missing(contender)
        if reason:
            results[name] = {"missing": reason}
            continue
        results[name] = {"samples": []}
        programs[name] = contender.kernel
        if contender.kernel.endswith(".c"):
            programs[name] = build(contender.kernel, folder)
    for _ in range(repeats):
        for name, program in list(programs.items()):
            contender = contenders[name]
            options = {**contender.options, **(contender.quick if quick else {})}
            try:
                with OtherLoad() as others:
                    figures = launch(program, **{"np": RANKS, **contender.started}, **options)
                figures["other_load"] = others.share
                results[name]["samples"].append(figures)
            except LaunchError as error:
                print(f"{name}: {error}", file=sys.stderr)
                results[name] = {"missing": "failed"}
                del programs[name]
    return results


def medians(figure, results):
    """The figure by contender: a number, or the reason why there is none."""
    found = {}
    for name, result in results.items():
        if "missing" in result:
            found[name] = result["missing"]
        else:
            found[name] = statistics.median(sample[figure] for sample in result["samples"])
    return found


def describe_figures(row, results):
    """The row's figures as text, by contender."""
    texts = {name: figure_text(row.figure, x) for name, x in medians(row.figure, results).items()}
    for figure, label in row.beside.items():
        for name, value in medians(figure, results).items():
            if not isinstance(value, str):
                texts[name] += f" ({label} {figure_text(figure, value)})"
    return texts


def judge(row, found, quick):
    """For each target: its text, the compared value, and whether it is reached."""
    verdicts = []
    for target in row.targets:
        ours, theirs = found[row.ours], found.get(target.against)
        if isinstance(ours, str) or isinstance(theirs, str):
            value, reached = "-", "not measured"
        else:
            value, kept = target.judge(ours, theirs)
            reached = "quick run" if quick else "yes" if kept else "no"
        verdicts.append({"target": target.text, "value": value, "reached": reached})
    return verdicts


def selection(rows):
    """A parser of rows in a comma-separated list."""

    def parse(text):
        chosen = set(text.split(","))
        known = list(map(str, rows))
        if not chosen <= set(known):
            raise argparse.ArgumentTypeError(
                f"`--rows` takes rows out of {','.join(known)}; got {text!r}"
            )
        return [row for row in rows if str(row) in chosen]

    return parse


def parse_arguments(title, rows, words):
    """The options of a comparison's command line."""
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--rows", type=selection(rows), default=list(rows), help="for example 1,5")
    parser.add_argument("--quick", action="store_true", help="small sizes, one repeat")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there")
    return parser.parse_args(words)


def command():
    """What was typed, with names that do not depend on the machine."""
    return shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])


def compare(title, rows, measurements, words=None):
    """Measure the chosen rows, print them, and return 1 if a contender failed.

    Parameters
    ----------
    title : str
        One sentence for ``--help``.
    rows : dict of int or str to Row
    measurements : dict of str to dict of str to Contender
        Contenders by measurement and name. Rows may share a measurement, which runs once.
    words : list of str, optional
        The options; those of the command line by default.
    """
    options = parse_arguments(title, rows, words)
    # As an exception, so that the ranks of the run in progress are ended too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    repeats = 1 if options.quick else REPEATS
    conditions = {"command": command(), "ranks": RANKS, "repeats": repeats}
    conditions |= {"quick": options.quick}
    conditions |= {"machine": describe(), "environment": THREAD_LIMITS}
    print(*head_lines(conditions), sep="\n")
    table, samples = [], {}
    with tempfile.TemporaryDirectory() as folder:
        for number in options.rows:
            row = rows[number]
            if row.measurement not in samples:
                samples[row.measurement] = measure(
                    measurements[row.measurement],
                    repeats=repeats,
                    quick=options.quick,
                    folder=folder,
                )
            found = medians(row.figure, samples[row.measurement])
            texts = describe_figures(row, samples[row.measurement])
            entry = {"row": number, "title": row.title, "ours": row.ours, "figure": row.figure}
            entry |= {"medians": found, "texts": texts}
            table.append({**entry, "targets": judge(row, found, options.quick)})
            print_row(table[-1])
    print_table(table)
    groups = [result for group in samples.values() for result in group.values()]
    print("", *run_lines(samples), sep="\n")
    if options.markdown:
        options.markdown.write_text(markdown(table))
    if options.json:
        text = json.dumps({**conditions, "rows": table, "samples": samples}, indent=1)
        options.json.write_text(text + "\n")
    return 1 if any(result.get("missing") == "failed" for result in groups) else 0

"""The speed and memory of one allreduce: distsolve beside mpi4jax, a C loop and gloo.

Every figure is the median over repeats of the slowest rank's time. In each repeat the contenders
of a row run one after the other, each in fresh processes, so that noise hits all of them alike.

usage: python benchmarks/compare_primitives.py [--rows 1,5] [--quick] [--json FILE] ...
"""

import argparse
import importlib.util
import json
import signal
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from launch import LaunchError, build, launch, thread_limits, tool
from machine import OtherLoad, describe
from report import (
    markdown,
    print_head,
    print_load,
    print_row,
    print_table,
    ratio_text,
    seconds_text,
)

RANKS = 2
MIB = 2**20 // 4  # float32 elements
CHUNK = {"chunk_elements": MIB}


@dataclass(frozen=True)
class Contender:
    """One program to run; `needs` is the package or tool that it cannot run without."""

    kernel: str
    needs: str
    options: dict
    quick: dict


@dataclass(frozen=True)
class Target:
    """An upper limit for distsolve's figure `ours`, alone or against a rival's figure.

    `factor` compares the ratio to the rival, `excess` the difference, `limit` the figure itself.
    """

    text: str
    against: str | None = None
    factor: float | None = None
    excess: float | None = None
    limit: float | None = None

    def judge(self, ours, theirs):
        """The compared value as text, and whether the target is reached."""
        if self.factor is not None:
            return ratio_text(ours / theirs), ours / theirs <= self.factor
        if self.excess is not None:
            excess = ours - theirs
            return ("+" if excess > 0 else "") + seconds_text(excess), excess <= self.excess
        return ratio_text(ours / self.limit), ours <= self.limit


@dataclass(frozen=True)
class Row:
    """One line of the table: which figure of which measurement, and what it must reach."""

    title: str
    measurement: str
    figure: str
    targets: tuple[Target, ...]


def jax(library, quick, **options):
    """A contender that runs through kernels/allreduce.py."""
    return Contender("kernels/allreduce.py", library, {"library": library, **options}, quick)


def c(quick, **options):
    """A contender that runs the C program."""
    return Contender("c/allreduce.c", "mpicc", options, quick)


def gloo(quick, **options):
    """A contender that runs `psum` through gloo."""
    return Contender("kernels/psum.py", "jax", options, quick)


def measurements():
    """Contenders by measurement; rows 3 and 4 read two figures of the same runs."""
    short, large, huge = {"iterations": 2000}, {"elements": 64 * 1024}, {"elements": MIB}
    few = {"iterations": 2}
    tiny = {"elements": 1, "iterations": 100_000, "scale": 1}
    loop = {"elements": 32 * MIB, "iterations": 20, "scale": 0}
    one = {"elements": 1024 * MIB, "iterations": 1}
    return {
        "tiny": {
            "distsolve": jax("distsolve", short, case="loop", **tiny),
            "mpi4jax": jax("mpi4jax", short, case="loop", **tiny),
            "C": c(short, **tiny),
            "C, MPI_THREAD_SINGLE": c(short, threads=0, **tiny),
        },
        "loop": {
            "distsolve": jax("distsolve", large, case="loop", **loop),
            "mpi4jax": jax("mpi4jax", large, case="loop", **loop),
            "C": c(large, **loop),
            "C in 1 MiB chunks": c(large, **CHUNK, **loop),
            "C, MPI_THREAD_SINGLE": c(large, threads=0, **loop),
        },
        "huge": {
            "distsolve": jax("distsolve", huge, case="single", **one),
            "mpi4jax": jax("mpi4jax", huge, case="single", **one),
            "C": c(huge, **one),
            "C in 1 MiB chunks": c(huge, **CHUNK, **one),
            "C, MPI_THREAD_SINGLE": c(huge, threads=0, **one),
        },
        "eager": {
            "distsolve": jax("distsolve", few, case="eager", elements=4, iterations=10_000),
            "mpi4jax": jax("mpi4jax", few, case="eager", elements=4, iterations=10),
        },
        "jit": {
            "distsolve": jax("distsolve", few, case="jit", elements=4, iterations=2000),
            "mpi4jax": jax("mpi4jax", few, case="jit", elements=4, iterations=2000),
        },
        "gloo": {
            "distsolve": jax("distsolve", short, case="loop", **tiny),
            "shard_map + psum, gloo": gloo({"iterations": 200}, elements=1, iterations=5000),
        },
    }


ROWS = {
    1: Row(
        "1 element, in fori_loop, per iteration",
        "tiny",
        "seconds",
        (
            Target("<= 0.9 x mpi4jax", "mpi4jax", factor=0.9),
            Target("<= C + 0.3 us", "C", excess=0.3e-6),
        ),
    ),
    2: Row(
        "32 MiB donated, in fori_loop, per iteration",
        "loop",
        "seconds",
        (
            Target("<= 0.5 x mpi4jax", "mpi4jax", factor=0.5),
            Target("<= 0.6 x one C call", "C", factor=0.6),
        ),
    ),
    3: Row(
        "1 GiB donated, one call: peak memory growth",
        "huge",
        "peak_growth_mib",
        (Target("<= 16 MiB", limit=16),),
    ),
    4: Row(
        "1 GiB donated, one call: time",
        "huge",
        "seconds",
        (Target("<= 0.1 x mpi4jax", "mpi4jax", factor=0.1),),
    ),
    5: Row(
        "eager call, 4 elements",
        "eager",
        "seconds",
        (
            Target("<= 25 us", limit=25e-6),
            Target("<= mpi4jax / 300", "mpi4jax", factor=1 / 300),
        ),
    ),
    6: Row(
        "jitted function with one allreduce, 4 elements, per call",
        "jit",
        "seconds",
        (Target("<= 1.05 x mpi4jax", "mpi4jax", factor=1.05),),
    ),
    7: Row(
        "1 element, in fori_loop, against gloo, per iteration",
        "gloo",
        "seconds",
        (Target("<= gloo / 20", "shard_map + psum, gloo", factor=1 / 20),),
    ),
}


def installed(contender):
    """Whether the contender's package or tool is there; looks it up without importing it."""
    if contender.needs == "mpicc":
        return tool("mpicc") is not None
    return importlib.util.find_spec(contender.needs) is not None


def measure(contenders, *, repeats, quick, folder):
    """Run the contenders in turn, `repeats` times; samples or a reason, by contender."""
    results = {}
    programs = {}
    for name, contender in contenders.items():
        if not installed(contender):
            results[name] = {"missing": "not installed"}
            continue
        results[name] = {"samples": []}
        programs[name] = contender.kernel
        if contender.kernel.endswith(".c"):
            programs[name] = build(contender.kernel, folder)
    for _ in range(repeats):
        for name, program in list(programs.items()):
            options = {**contenders[name].options, **(contenders[name].quick if quick else {})}
            try:
                with OtherLoad() as others:
                    figures = launch(program, np=RANKS, **options)
                figures["other_load"] = others.share
                results[name]["samples"].append(figures)
            except LaunchError as error:
                print(f"{name}: {error}", file=sys.stderr)
                results[name] = {"missing": "failed"}
                del programs[name]
    return results


def medians(row, results):
    """The row's figure by contender: a number, or the reason why there is none."""
    found = {}
    for name, result in results.items():
        if "missing" in result:
            found[name] = result["missing"]
        else:
            found[name] = statistics.median(sample[row.figure] for sample in result["samples"])
    return found


def judge(row, found, quick):
    """For each target: its text, the compared value, and whether it is reached."""
    verdicts = []
    for target in row.targets:
        ours, theirs = found["distsolve"], found.get(target.against)
        if isinstance(ours, str) or isinstance(theirs, str):
            value, reached = "-", "not measured"
        else:
            value, kept = target.judge(ours, theirs)
            reached = "quick run" if quick else "yes" if kept else "no"
        verdicts.append({"target": target.text, "value": value, "reached": reached})
    return verdicts


def selection(text):
    """Row numbers from a comma-separated list."""
    try:
        rows = [int(part) for part in text.split(",")]
    except ValueError:
        rows = []
    if not rows or not set(rows) <= set(ROWS):
        known = ",".join(map(str, ROWS))
        raise argparse.ArgumentTypeError(f"`--rows` takes numbers out of {known}; got {text!r}")
    return sorted(set(rows))


def main():
    """Measure the chosen rows, print them, and return 1 if a contender failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=selection, default=list(ROWS), help="for example 1,5")
    parser.add_argument("--quick", action="store_true", help="small sizes, one repeat")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there")
    options = parser.parse_args()
    # As an exception, so that the ranks of the run in progress are ended too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    repeats = 1 if options.quick else 5
    conditions = {"ranks": RANKS, "repeats": repeats, "quick": options.quick}
    conditions |= {"machine": describe(), "environment": thread_limits()}
    print_head(conditions)
    table, samples, known = [], {}, measurements()
    with tempfile.TemporaryDirectory() as folder:
        for number in options.rows:
            row = ROWS[number]
            if row.measurement not in samples:
                samples[row.measurement] = measure(
                    known[row.measurement], repeats=repeats, quick=options.quick, folder=folder
                )
            found = medians(row, samples[row.measurement])
            entry = {"row": number, "title": row.title, "figure": row.figure, "medians": found}
            table.append({**entry, "targets": judge(row, found, options.quick)})
            print_row(table[-1])
    print_table(table)
    groups = [result for group in samples.values() for result in group.values()]
    print_load([x["other_load"] for result in groups for x in result.get("samples", ())])
    if options.markdown:
        options.markdown.write_text(markdown(table))
    if options.json:
        text = json.dumps({**conditions, "rows": table, "samples": samples}, indent=1)
        options.json.write_text(text + "\n")
    return 1 if any(result.get("missing") == "failed" for result in groups) else 0


if __name__ == "__main__":
    sys.exit(main())

"""What `distsolve predict` says beside what is measured, on a slow network that is simulated.

The model is fitted to runs on 2 and 4 ranks, and judged by runs on 3 and 8 and by other sizes,
which it has not seen. With more ranks than cores, what they compute takes longer in proportion.
Ranks that wait sleep, so that they leave their core to others. The numbers of ranks take turns, so
that a slow minute of the machine hits all of them; a point's figure is the middle one of its turns.

usage: python benchmarks/compare_prediction.py [--quick] [--json FILE]
"""

import argparse
import collections
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from launch import THREAD_LIMITS, LaunchError, launch
from machine import describe
from report import head_lines, seconds_text
from table import command

from distsolve.commands.bench import report
from distsolve.commands.predict import tables
from distsolve.commands.predict.fitting import Residual, fit, modelled, samples
from distsolve.linalg.machine import Machine

# An allreduce of B bytes on p ranks: 2 ms for each stage of a tree, and 5 us for each 1000 bytes.
NETWORK = {"SIMNET_ALPHA_US": "2000", "SIMNET_BETA_US_PER_MB": "5000", "SIMNET_TREE": "1"}
FITTED_RANKS = (2, 4)
RANKS = (2, 3, 4, 8)
SUMS = (8, 65536, 1048576)
HELD_OUT_SUMS = (4096, 262144)
SR = ((480, 800), (240, 1600))  # samples, parameters
HELD_OUT_SR = ((600, 1200),)
LIMIT = 0.2
COLUMNS = ["held out", "ranks", "predicted", "measured", "error"]


def turns(quick):
    """How often each number of ranks runs."""
    return 1 if quick else 3


def repeats(quick):
    """How often each run repeats; the median counts."""
    return 1 if quick else 5


def runs(quick):
    """The arguments of `distsolve bench`, for each run of a job."""
    sums, problems = (SUMS[:2], SR[:1]) if quick else (SUMS + HELD_OUT_SUMS, SR + HELD_OUT_SR)
    each = f"--repeats {repeats(quick)}"
    yield f"allreduce {each} --sizes {' '.join(map(str, sums))}"
    for N, P in problems:
        for method in ("cg", "dense", "kernel"):
            yield f"sr {each} --method {method} --sizes {N} --parameters {P}"


def is_fitted(point):
    """Whether the model is fitted to a point."""
    known = point.size in SUMS if point.case == "allreduce" else _problem(point) in SR
    return known and point.ranks in FITTED_RANKS


def _problem(point):
    return point.size, point.parameters


def judge(found):
    """Fit the model, print how far it is from what it was fitted to, and return the rest."""
    fitted = fit([sample for sample in found if is_fitted(sample.point)], Machine())
    print("\n".join(tables.of_fit(fitted)))
    rest = [sample for sample in found if not is_fitted(sample.point)]
    return [Residual(sample, modelled(sample, fitted.machine)) for sample in rest]


def rows_of(residuals):
    """What each held-out point is, its ranks, the predicted and the measured time, the error."""
    for residual in residuals:
        point = residual.sample.point
        size = f"{point.size} bytes"
        if point.case == "sr":
            size = f"{point.method}, {point.size} samples, {point.parameters} parameters"
        times = seconds_text(residual.modelled), seconds_text(point.seconds)
        yield [f"{point.case}, {size}", str(point.ranks), *times, f"{residual.error:+.1%}"]


def measure(quick):
    """The sample of each point on each number of ranks: of all turns, the one in the middle."""
    found = collections.defaultdict(list)
    for np in turns(quick) * (RANKS[:2] if quick else RANKS):
        with tempfile.TemporaryDirectory() as folder:
            arguments = {"runs": ",".join(runs(quick)), "output": folder}
            launch(
                "kernels/bench_runs.py",
                np=np,
                simnet=NETWORK,
                bind=False,  # ranks that are bound spin: 2 and 8 would wait in different ways
                timeout=600,
                **arguments,
            )
            for sample in samples(report.read(Path(folder))):
                found[sample.point.key, np].append(sample)
    return [
        sorted(turn, key=lambda sample: sample.point.seconds)[len(turn) // 2]
        for turn in found.values()
    ]


def main():
    """Measure, fit, and compare; return 1 if a run failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few ranks and sizes, one repeat")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    options = parser.parse_args()
    conditions = {
        "command": command(),
        "quick": options.quick,
        "ranks": " to ".join(map(str, (RANKS[0], RANKS[-1]))),
        "repeats": repeats(options.quick),
        "turns": turns(options.quick),
        "machine": describe(),
        "environment": THREAD_LIMITS | NETWORK,
    }
    print(*head_lines(conditions), sep="\n")
    try:
        found = measure(options.quick)
    except LaunchError as error:
        print(error, file=sys.stderr)
        return 1
    residuals = judge(found)
    rows = list(rows_of(residuals))
    print()
    for row in [COLUMNS, *rows]:
        print("{:48} {:>5} {:>10} {:>10} {:>8}".format(*row))
    worst = max(abs(residual.error) for residual in residuals)
    print(f"\nworst error of {len(residuals)} held-out points: {worst:.1%}; limit {LIMIT:.0%}")
    if options.json:
        results = {**conditions, "columns": COLUMNS, "rows": rows, "worst": worst, "limit": LIMIT}
        results["points"] = [asdict(sample.point) for sample in found]
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

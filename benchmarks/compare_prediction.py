"""What `distsolve predict` says beside what is measured, on a slow network that is simulated.

The model is fitted to runs on 2 and 4 ranks, and judged by runs on 3 and 8 and by other sizes,
which it has not seen. With more ranks than cores, what they compute takes longer in proportion.

usage: python benchmarks/compare_prediction.py [--quick] [--json FILE]
"""

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from launch import LaunchError, launch
from machine import describe

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


def runs(quick):
    """The arguments of `distsolve bench`, for each run of a job."""
    sums, problems = (SUMS[:2], SR[:1]) if quick else (SUMS + HELD_OUT_SUMS, SR + HELD_OUT_SR)
    repeats = f"--repeats {1 if quick else 5}"
    yield f"allreduce {repeats} --sizes {' '.join(map(str, sums))}"
    for N, P in problems:
        for method in ("cg", "dense", "kernel"):
            yield f"sr {repeats} --method {method} --sizes {N} --parameters {P}"


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


def show(residuals):
    """Print each held-out point."""
    print(f"\n{'held out':18} {'ranks':>5} {'predicted':>11} {'measured':>11} {'error':>7}")
    for residual in residuals:
        point = residual.sample.point
        size = point.size if point.case == "allreduce" else f"{point.size}x{point.parameters}"
        print(
            f"{point.case} {point.method:6} {size!s:8} {point.ranks:>5} "
            f"{1e3 * residual.modelled:8.2f} ms {1e3 * point.seconds:8.2f} ms "
            f"{residual.error:>+7.1%}"
        )


def main():
    """Measure, fit, and compare; return 1 if a run failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="2 ranks, one repeat; compare nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all points there")
    options = parser.parse_args()
    found = []
    for np in RANKS[:2] if options.quick else RANKS:
        with tempfile.TemporaryDirectory() as folder:
            arguments = {"runs": ",".join(runs(options.quick)), "output": folder}
            try:
                launch("kernels/bench_runs.py", np=np, simnet=NETWORK, timeout=600, **arguments)
            except LaunchError as error:
                print(error, file=sys.stderr)
                return 1
            found += samples(report.read(Path(folder)))
    print(" ".join(f"{name}={text}" for name, text in NETWORK.items()))
    residuals = judge(found)
    show(residuals)
    worst = max(abs(residual.error) for residual in residuals)
    print(f"\nworst error of {len(residuals)} held-out points: {worst:.1%}; limit {LIMIT:.0%}")
    if options.json:
        content = {
            "machine": describe(),
            "network": NETWORK,
            "worst": worst,
            "held out": [asdict(r.sample.point) | {"modelled": r.modelled} for r in residuals],
            "fitted to": [asdict(s.point) for s in found if is_fitted(s.point)],
        }
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The model, its residuals and its predictions as lines of text."""

import functools
from collections.abc import Iterable, Iterator

import numpy as np

from distsolve.commands.findings import plural
from distsolve.commands.predict.crossings import METHODS, Crossing, Problem, around, axis, crossings
from distsolve.commands.predict.fitting import Fit, Residual

PIPELINED = (
    "pipelined cg does not apply: parameters are on all ranks, so its dot products need no message "
    "that could hide behind a product. It serves vectors in pieces."
)


def of_fit(fitted: Fit) -> Iterator[str]:
    """Describe the machine, and how far the model is from what was measured."""
    m = fitted.machine
    values = {
        "overhead": f"{1e6 * m.overhead:.3g} us for each sum",
        "latency": f"{1e6 * m.latency:.3g} us for each of log2(ranks) stages",
        "bandwidth": f"{m.bandwidth / 1e9:.3g} GB/s of a large sum",
        "memory_bandwidth": f"{m.memory_bandwidth / 1e9:.3g} GB/s of memory in a product",
        "flops": f"{m.flops / 1e9:.3g} GFLOP/s of products of matrices, in float32",
        "factor_flops": f"{m.factor_flops / 1e9:.3g} GFLOP/s of factorisations, in float32",
        "skew": f"{m.skew:.1%} of the time to compute, as a standard deviation over ranks",
    }
    for name, text in values.items():
        origin = "assumed" if name in fitted.assumed else "fitted"
        yield f"{name.replace('_', ' '):17} {text} ({origin})"
    groups: dict[str, list[Residual]] = {}
    for residual in fitted.residuals:
        point = residual.sample.point
        groups.setdefault(f"{point.case} {point.method}".strip(), []).append(residual)
    if groups:
        yield ""
        yield "how far the model is from what was measured:"
        yield f"{'':12} {'points':>7} {'median':>8} {'worst':>8}  at"
    for name, residuals in groups.items():
        worst = max(residuals, key=lambda residual: abs(residual.error))
        median = float(np.median([abs(residual.error) for residual in residuals]))
        yield (
            f"{name:12} {len(residuals):>7} {median:>8.0%} {worst.error:>+8.0%}  "
            f"size {worst.sample.point.size}, {plural(worst.sample.point.ranks, 'rank')}"
        )


def of_prediction(problem: Problem, ranks: list[int]) -> Iterator[str]:
    """Write the time of each method on each number of ranks, and where they cross."""
    plans = [problem.plan(p) for p in ranks]
    yield ""
    yield (
        f"PREDICTED: seconds of an SR step, {plural(problem.samples, 'sample')} in all, "
        f"{plural(problem.parameters, 'parameter')}, {problem.dtype}, "
        f"{plural(plans[0].iterations, 'cg step')}"
    )
    yield f"{'ranks':>9} " + " ".join(f"{name:>12}" for name in METHODS) + "  of cg: sums, waiting"
    for predicted in plans:
        cells = (
            f"{predicted[name].seconds:.4g}{'' if predicted[name].fits else ' !'}"
            for name in METHODS
        )
        fits = any(p.fits for p in predicted.predictions)
        choice = f"{predicted.method} is chosen" if fits else "none fits"
        cg = predicted["cg"]
        yield (
            f"{predicted.ranks:>9} " + " ".join(f"{cell:>12}" for cell in cells) + f"  "
            f"{cg.sending / cg.seconds:.0%}, {cg.waiting / cg.seconds:.0%}; {choice}"
        )
    if not all(p.fits for predicted in plans for p in predicted.predictions):
        yield f"! needs more than the {problem.memory / 1e9:g} GB of a rank"
    yield PIPELINED
    yield ""
    highest = max(*ranks, 2)
    yield f"between 1 and {highest} ranks:"
    yield from _told(crossings(problem.plan, axis(1, highest)), "ranks")
    sizes = around(problem.parameters)
    for p in ranks:
        yield f"on {plural(p, 'rank')}, between {sizes[0]} and {sizes[-1]} parameters:"
        yield from _told(crossings(functools.partial(problem.plan, p), sizes), "parameters")


def _told(found: Iterable[Crossing], what: str) -> Iterator[str]:
    lines = [f"  {c.faster} overtakes {c.slower} at {c.at} {what}" for c in found]
    yield from lines or ["  no method overtakes another"]

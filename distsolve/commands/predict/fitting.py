"""From the points of `distsolve bench` to a `Machine`, and how far it is from each of them."""

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls

from distsolve.commands.bench.points import Point
from distsolve.commands.bench.report import Run
from distsolve.linalg.machine import Machine, largest_of, stages
from distsolve.linalg.plan import predict

DTYPE = np.dtype(np.float64)  # of the solves of `distsolve bench`
# The numbers of a machine that are fitted, and which of them to the computing of which methods.
NAMES = ("overhead", "latency", "bandwidth", "memory_bandwidth", "flops", "factor_flops", "skew")
RATES = ((["memory_bandwidth"], ["cg"]), (["flops", "factor_flops"], ["dense", "kernel"]))


class Sample(NamedTuple):
    """A point, and what of its run the model must know."""

    point: Point
    crowd: float  # ranks that share a core, at least 1
    chunk: int  # bytes that a sum hands to MPI at a time


class Residual(NamedTuple):
    """A measured time beside that of the model, in seconds."""

    sample: Sample
    modelled: float

    @property
    def error(self) -> float:
        """The relative error of the model."""
        return self.modelled / self.sample.point.seconds - 1


class Fit(NamedTuple):
    """The machine, its numbers that no point told of, and the residuals."""

    machine: Machine
    assumed: list[str]
    residuals: list[Residual]


def samples(runs: Iterable[Run]) -> list[Sample]:
    """Return the points that the model knows of: sums on several ranks, and SR.

    Of two points of the same problem on the same number of ranks the later one counts. A solve that
    took no step, as of one sample, tells nothing of a step.
    """
    latest = {}
    for run in runs:
        nodes = run.conditions["nodes"]
        crowd = max(1.0, *(len(node["ranks"]) / len(node["cores"]) for node in nodes))
        chunk = run.conditions["mpi"]["chunk"]
        for point in run.points:
            is_sum = point.case == "allreduce" and point.ranks > 1
            if is_sum or (point.case == "sr" and point.steps > 0):
                latest[point.key, point.ranks] = Sample(point, crowd, chunk)
    return list(latest.values())


def fit(found: list[Sample], machine: Machine) -> Fit:
    """Fit the model by least squares of relative errors, with no number below zero.

    Parameters
    ----------
    found : list of Sample
    machine : Machine
        Whose numbers stand where no sample tells of them.

    Returns
    -------
    Fit
    """
    sums = [sample for sample in found if sample.point.case == "allreduce"]
    known = _network(sums) | _products([sample for sample in found if sample.point.case == "sr"])
    assumed = [name for name in NAMES if name not in known]
    machine = dataclasses.replace(machine, measured=bool(known), **known)
    return Fit(machine, assumed, [Residual(s, modelled(s, machine)) for s in found])


def modelled(sample: Sample, machine: Machine) -> float:
    """Return the seconds that the model gives for what was measured: a step, or a call."""
    point, crowd, chunk = sample
    machine = dataclasses.replace(
        machine,
        memory_bandwidth=machine.memory_bandwidth / crowd,
        flops=machine.flops / crowd,
        factor_flops=machine.factor_flops / crowd,
        chunk=chunk,
    )
    if point.case == "allreduce":
        return machine.summed(point.size, point.ranks)
    n, N = _samples(point)
    steps = point.steps if point.method == "cg" else 1
    sizes = point.ranks, n, N, point.parameters
    return predict(*sizes, DTYPE, DTYPE, steps, None, machine)[point.method].seconds / steps


# Machines that take time for one thing only, a second for each unit of it.
FREE = Machine(
    latency=0.0,
    bandwidth=np.inf,
    memory_bandwidth=np.inf,
    flops=np.inf,
    factor_flops=np.inf,
)
UNITS = {
    "latency": dataclasses.replace(FREE, latency=1.0),
    "overhead": dataclasses.replace(FREE, overhead=1.0),
    "bandwidth": dataclasses.replace(FREE, bandwidth=1.0),
    "memory_bandwidth": dataclasses.replace(FREE, memory_bandwidth=1.0),
    "flops": dataclasses.replace(FREE, flops=1.0),
    "factor_flops": dataclasses.replace(FREE, factor_flops=1.0),
}


def _network(sums: list[Sample]) -> dict[str, float]:
    """Fit what a sum costs: for each stage of a tree, for each byte, and always."""
    if not sums:
        return {}
    # For one number of stages, or one size, two of them cannot be told apart: the latency counts.
    names = ["latency"]
    if len({stages(sample.point.ranks) for sample in sums}) > 1:
        names.append("overhead")
    if len({sample.point.size for sample in sums}) > 1:
        names.append("bandwidth")
    costs = _least_squares(names, sums, [sample.point.seconds for sample in sums])
    known = dict(zip(names, costs, strict=True))
    if per_byte := known.pop("bandwidth", 0.0):
        known["bandwidth"] = 1 / per_byte
    return known


def _products(found: list[Sample]) -> dict[str, float]:
    """Fit how fast memory is read, matrices are multiplied, and how unevenly."""
    known: dict[str, float] = {}
    found = [sample for sample in found if sample.point.compute > 0]  # else too short to be seen
    for names, methods in RATES:
        mine = [sample for sample in found if sample.point.method in methods]
        if mine:
            costs = _least_squares(names, mine, [s.point.compute for s in mine])
            known |= {name: 1 / cost for name, cost in zip(names, costs, strict=True) if cost}
    parallel = [p for p, _, _ in found if p.ranks > 1]
    if parallel:
        expected = np.array([p.compute * largest_of(p.ranks) / p.seconds for p in parallel])
        waited = np.array([p.wait / p.seconds for p in parallel])
        known["skew"] = float(expected @ waited / (expected @ expected))
    return known


def _least_squares(names: list[str], found: list[Sample], seconds: list[float]) -> list[float]:
    """Fit the costs of these units to some times of the samples; none is negative."""
    rows = [[modelled(sample, UNITS[name]) for name in names] for sample in found]
    scaled = np.array(rows) / np.array(seconds)[:, None]
    largest = scaled.max(0)
    largest = np.where(largest > 0, largest, 1.0)
    costs = nnls(scaled / largest, np.ones(len(scaled)))[0] / largest
    return [float(cost) for cost in costs]


def _samples(point: Point) -> tuple[int, int]:
    """Return the samples on the rank that has most, and on all."""
    if point.scaling == "weak":
        return point.size, point.size * point.ranks
    return -(-point.size // point.ranks), point.size

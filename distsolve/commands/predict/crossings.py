"""The predicted problem, and where one method overtakes another."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any, NamedTuple

import numpy as np

from distsolve.linalg.machine import Machine
from distsolve.linalg.plan import Plan, predict

METHODS = ("cg", "dense", "kernel")
STEPS = 200  # of the search for crossings, on a logarithmic axis
AROUND = 30  # factor below and above in which numbers of parameters are looked at


class Crossing(NamedTuple):
    """From `at` on one method is faster than another."""

    at: int
    faster: str
    slower: str


@dataclass(frozen=True)
class Problem:
    """An SR step, but for its number of ranks."""

    samples: int
    parameters: int
    dtype: Any
    iterations: int
    memory: float  # bytes of a rank
    machine: Machine

    def plan(self, ranks: int, parameters: int | None = None) -> Plan:
        """Return the prediction for so many ranks, or with so many parameters."""
        P = parameters or self.parameters
        steps = min(self.iterations, self.samples, P)
        most = -(-self.samples // ranks)
        return predict(
            ranks,
            most,
            self.samples,
            P,
            self.dtype,
            self.dtype,
            steps,
            self.memory,
            self.machine,
        )


def axis(lowest: int, highest: int) -> list[int]:
    """Return whole numbers between two, evenly in their logarithms, each once."""
    return np.unique(np.geomspace(lowest, highest, STEPS).round().astype(int)).tolist()


def around(parameters: int) -> list[int]:
    """Return numbers of parameters below and above one."""
    return axis(max(1, parameters // AROUND), parameters * AROUND)


def crossings(plan_at: Callable[[int], Plan], values: list[int]) -> list[Crossing]:
    """Find where the order of two methods changes.

    Parameters
    ----------
    plan_at : callable
        The plan at a whole number.
    values : list of int
        Ascending, between which to look; a pair that changes twice between two of them is missed.

    Returns
    -------
    list of Crossing
        In ascending order.
    """
    plans = {value: plan_at(value) for value in values}
    found = []
    for one, other in combinations(METHODS, 2):

        def ahead(plan, one=one, other=other):
            return plan[one].seconds < plan[other].seconds

        for low, high in pairwise(values):
            before = ahead(plans[low])
            if before == ahead(plans[high]):
                continue
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if ahead(plan_at(middle)) == before else (low, middle)
            found.append(Crossing(high, *((other, one) if before else (one, other))))
    return sorted(found)

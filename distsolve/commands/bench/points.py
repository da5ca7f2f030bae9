"""What is measured: points, and the series that they make over numbers of ranks. No MPI here."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


class Key(NamedTuple):
    """What points of one series have in common."""

    case: str
    scaling: str  # "strong", "weak", or "" for messages
    size: int  # of the whole problem, or of each rank's part in weak scaling; bytes of a message
    method: str  # "" where there is one way only, as for messages
    parameters: int  # 0 where there are none
    settings: str  # all else that makes the problem, in words

    @property
    def words(self) -> str:
        """What makes the problem, besides its size."""
        parameters = f"{self.parameters} parameters" if self.parameters else ""
        return ", ".join(filter(None, (self.method, parameters, self.settings)))


@dataclass(frozen=True)
class Point:
    """One problem on one number of ranks; times, messages and bytes sent are those of a step.

    Attributes
    ----------
    case, scaling, size, method, parameters, settings
        As in `Key`.
    ranks : int
    steps : int
        Iterations of a solve, 1 of a direct one; calls in the loop of a message.
    repeats : int
    seconds, lower, upper : float
        Median and quartiles over the repeats, of the slowest rank in each.
    minimum, average : float
        Medians of the fastest rank and of the mean over ranks.
    compute, wait, transfer : float
        The parts of ``seconds``, in the proportions that a profile found.
    messages, sent : float
        MPI calls, and bytes handed to them, of a rank, on average.
    peak : int
        Bytes by which memory grew in one run, at most, on the rank where it was most.
    """

    case: str
    scaling: str
    size: int
    method: str
    parameters: int
    settings: str
    ranks: int
    steps: int
    repeats: int
    seconds: float
    lower: float
    upper: float
    minimum: float
    average: float
    compute: float
    wait: float
    transfer: float
    messages: float
    sent: float
    peak: int

    @property
    def key(self) -> Key:
        """The series that this point belongs to."""
        return Key(*(getattr(self, name) for name in Key._fields))

    @property
    def shares(self) -> tuple[float, float, float]:
        """The parts of the time as fractions of 1: compute, wait, transfer."""
        parts = self.compute, self.wait, self.transfer
        whole = sum(parts)
        compute, wait, transfer = (part / whole if whole else 0.0 for part in parts)
        return compute, wait, transfer


def series(points: Iterable[Point]) -> dict[Key, list[Point]]:
    """Sort points into series, each by its number of ranks.

    Parameters
    ----------
    points : iterable of Point
        Of two for the same problem and the same number of ranks the later one counts.

    Returns
    -------
    dict of Key to list of Point
    """
    latest = {(*point.key, point.ranks): point for point in points}
    found: dict[Key, list[Point]] = {}
    for _, point in sorted(latest.items()):
        found.setdefault(point.key, []).append(point)
    return found


def ideal(first: Point, ranks: int) -> float:
    """Return the seconds of a step on some ranks if nothing were lost since ``first``."""
    return first.seconds * (first.ranks / ranks if first.scaling == "strong" else 1.0)


def efficiency(first: Point, point: Point) -> float:
    """Return the ideal time of a step as a fraction of the measured one.

    ``E(P) = P0 t(P0) / (P t(P))`` in strong scaling and ``t(P0) / t(P)`` in weak scaling, t being
    the time of a step and P0 the fewest ranks.
    """
    return ideal(first, point.ranks) / point.seconds

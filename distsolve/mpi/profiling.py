"""Where the time of MPI calls goes: waiting for late ranks, or moving data, line by line."""

from __future__ import annotations

import functools
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from distsolve.mpi._jaxcompat import follow_ordered, is_tracing
from distsolve.mpi.comm import duplicate_of, resolve
from distsolve.mpi.native import abi, recorder
from distsolve.mpi.operations import DTYPES

_ITEMS = {number: dtype.itemsize for dtype, (number, _) in DTYPES.items()}
_ROUNDS = 10  # of which the fastest tells the offset of a clock


class _Event(NamedTuple):
    """One call on one rank; times in seconds on rank 0's clock."""

    rank: int
    key: tuple[int, int, int] | None  # the collective: communicator, its first rank, number
    ranks: int
    name: str
    where: str
    nbytes: int
    entered: float
    left: float


@dataclass(frozen=True)
class Line:
    """The calls of one MPI function at one line of the program.

    Attributes
    ----------
    name, where : str
        The MPI function; file and line.
    calls : int
        Of one rank, on average.
    nbytes : int
        That a rank hands to a call, on average.
    wait : float or None
        Seconds of a rank, on average, until the last rank had entered. None for messages, where
        waiting and moving cannot be told apart.
    transfer : float
        Seconds of a rank, on average, from there to the end of the call.
    latest : int or None
        The rank of the world that entered last most often.
    share : float
        Of the collectives, in which that rank was last.
    """

    name: str
    where: str
    calls: int
    nbytes: int
    wait: float | None
    transfer: float
    latest: int | None
    share: float


@dataclass
class Profile:
    """What `profile` gives; filled in at the end of its block, equally on all ranks."""

    lines: list[Line] = field(default_factory=list)
    seconds: float = 0.0
    ranks: int = 1

    @property
    def _size(self) -> str:
        return f"{self.ranks} rank{'s'[: self.ranks > 1]}"

    def __str__(self) -> str:
        head = f"{self._size}, {self.seconds:.3f} s; seconds of a rank, on average"
        names = ("call", "calls", "bytes", "wait s", "transfer s", "latest rank", "where")
        rows = [names, *map(_cells, self.lines)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        texts = [
            "  ".join(
                cell.ljust(width) if i in (0, 6) else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        return "\n".join([head, *texts])

    def plot(self, path: str | Path) -> None:
        """Draw the lines as bars of waiting and moving, into a picture file.

        Parameters
        ----------
        path : str or Path
            Its ending says the format, such as ``.png``. Call it on one rank.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError(
                "`Profile.plot` needs matplotlib: pip install 'distsolve[examples]'"
            ) from error
        labels = [f"{line.name[4:]}, {Path(line.where).name}" for line in self.lines]
        waits = [line.wait or 0.0 for line in self.lines]
        figure = Figure(figsize=(8, 1.5 + 0.4 * len(labels)), layout="constrained")
        axes = figure.add_subplot()
        axes.barh(labels, waits, color="tab:orange", label="waiting for late ranks")
        moving = [line.transfer for line in self.lines]
        axes.barh(labels, moving, left=waits, color="tab:blue", label="moving data")
        axes.set_xlabel("seconds of a rank, on average")
        axes.set_title(f"{self._size}, {self.seconds:.3g} s")
        axes.invert_yaxis()
        axes.legend()
        figure.savefig(path)


class profile:  # noqa: N801 - used as a function is
    """Measure the MPI calls of a block: ``with distsolve.mpi.profile() as p: ...; print(p)``.

    The time of a collective is split at the moment when the last rank has entered it: what a rank
    spends before is waiting, what comes after is moving data. Clocks of different nodes are
    compared at both ends of the block. A line that waits much has late ranks, and `Line.latest`
    says which; a line that moves much has much data or a slow network.

    Communication: all ranks of the world must enter and leave the block. Some small messages at
    both ends, and a gather of what was recorded; none for a call.

    Returns
    -------
    Profile
        From ``with``; complete after the block.
    """

    def __enter__(self) -> Profile:
        if is_tracing():
            raise RuntimeError(
                "profile inside a jitted function would measure its compilation: put the block "
                "around the call of that function."
            )
        if recorder.is_profiling():
            raise RuntimeError(
                "A profile is being taken already: leave its block before another one begins."
            )
        self._record = resolve()
        follow_ordered()  # a communicator is not duplicated while a program reduces on it
        self._world = _own_world(self._record.id)
        self._offset = _offset_to_rank_0(self._world)
        recorder.start_profile()
        self._begin = time.monotonic()
        self._profile = Profile(ranks=self._record.size)
        return self._profile

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        try:
            follow_ordered()
        finally:
            end = time.monotonic()
            entries = recorder.end_profile()
        if kind is not None:  # the other ranks may never come
            return
        offset = _offset_to_rank_0(self._world)
        drift = (offset - self._offset) / max(end - self._begin, 1e-9)

        def on_rank_0(nanoseconds: int) -> float:
            seconds = nanoseconds * 1e-9
            return seconds - self._offset - drift * (seconds - self._begin)

        events = [_event(entry, self._record.rank, on_rank_0) for entry in entries]
        answer = None
        if self._world is None:
            answer = _lines(events), end - self._begin
        else:
            gathered = self._world.gather((events, end - self._begin))
            if gathered is not None:
                everything = [event for theirs, _ in gathered for event in theirs]
                answer = _lines(everything), max(seconds for _, seconds in gathered)
            answer = self._world.bcast(answer)
        self._profile.lines, self._profile.seconds = answer


@functools.cache
def _own_world(comm_id: int) -> Any:
    """The world once more: messages here must not meet those of the program. Collective, once."""
    world = duplicate_of(comm_id)
    return None if world is None else world.Dup()


def _offset_to_rank_0(world: Any) -> float:
    """Return how much this rank's clock is ahead of rank 0's, in seconds; collective."""
    if world is None:
        return 0.0
    rank, size = world.Get_rank(), world.Get_size()
    if rank == 0:
        for other in range(1, size):
            for _ in range(_ROUNDS):
                world.recv(source=other)
                world.send(time.monotonic(), dest=other)
        return 0.0
    best = (float("inf"), 0.0)
    for _ in range(_ROUNDS):
        begin = time.monotonic()
        world.send(None, dest=0)
        theirs = world.recv(source=0)
        end = time.monotonic()
        best = min(best, (end - begin, (begin + end) / 2 - theirs))
    return best[1]


def _event(entry: dict, rank: int, on_rank_0: Any) -> _Event:
    members = abi.world_of(entry["comm"])
    collective = entry["number"] > 0
    return _Event(
        rank,
        (entry["comm"], members[0], entry["number"]) if collective else None,
        len(members) if collective else 1,
        abi.NAMES[entry["call"]],
        recorder.text_of_site(entry["where"]),
        entry["count"] * _ITEMS.get(entry["dtype"], 1),
        on_rank_0(entry["entered"]),
        on_rank_0(entry["left"]),
    )


def _lines(events: Iterable[_Event]) -> list[Line]:
    """Join the calls of all ranks by function and line, those that take longest first."""
    collectives: dict[Any, list[_Event]] = defaultdict(list)
    lines: dict[tuple[str, str], list[tuple[_Event, float | None, float]]] = defaultdict(list)
    latest: dict[tuple[str, str], Counter[int]] = defaultdict(Counter)
    for event in events:
        if event.key is None:
            took = event.left - event.entered
            lines[event.name, event.where].append((event, None, took))
        else:
            collectives[event.key].append(event)
    for together in collectives.values():
        if len(together) < together[0].ranks:
            continue  # some ranks were in it before the block began
        last = max(together, key=lambda event: event.entered)
        latest[last.name, last.where][last.rank] += 1
        for event in together:
            wait = min(last.entered, event.left) - event.entered
            moving = event.left - event.entered - wait
            lines[event.name, event.where].append((event, wait, moving))
    found = [_line(*place, parts, latest[place]) for place, parts in lines.items()]
    return sorted(found, key=lambda line: -(line.transfer + (line.wait or 0.0)))


def _line(name: str, where: str, parts: list, latest: Counter[int]) -> Line:
    ranks = len({event.rank for event, _, _ in parts})
    waits = [wait for _, wait, _ in parts if wait is not None]
    rank, times = latest.most_common(1)[0] if latest else (None, 0)
    return Line(
        name,
        where,
        round(len(parts) / ranks),
        round(sum(event.nbytes for event, _, _ in parts) / len(parts)),
        sum(waits) / ranks if waits else None,
        sum(moving for _, _, moving in parts) / ranks,
        rank,
        times / max(sum(latest.values()), 1),
    )


def _cells(line: Line) -> tuple[str, ...]:
    late = "-" if line.latest is None else f"{line.latest} ({line.share:.0%})"
    wait = "-" if line.wait is None else f"{line.wait:.4f}"
    numbers = str(line.calls), str(line.nbytes), wait, f"{line.transfer:.4f}"
    return line.name, *numbers, late, line.where

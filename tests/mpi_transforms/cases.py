"""Every primitive as a function of one array per rank, with its serial meaning over all ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from spmd import ranks

from distsolve import mpi

Arrays = list[np.ndarray]
Function = Callable[[Any], Any]

# The refusals, by name: part of our own sentence, and the whole of it in words for the docs.
SENTENCES = {
    "sum only": (
        "has no derivative, only op=SUM has",
        "`NotImplementedError`: only `op=SUM` has a derivative; wrap the argument in "
        "`jax.lax.stop_gradient` if it must not contribute.",
    ),
    "forward only": (
        "has no reverse-mode derivative",
        "`NotImplementedError`: there is no reverse mode; use forward mode, or write the program "
        "with `allreduce`, `bcast`, `allgather`, `alltoall` or `sendrecv`.",
    ),
    "one-sided": (
        "one rank alone cannot reverse a message",
        "`NotImplementedError`: one rank alone cannot reverse a message; use `sendrecv`, which "
        "has every derivative.",
    ),
}


def refuses(sentence: str, *transforms: str) -> dict[str, str]:
    """Give the same sentence for several transforms."""
    return dict.fromkeys(transforms, sentence)


DERIVATIVES = ("grad", "jvp", "vjp", "linear_transpose")
REVERSE = ("grad", "vjp", "linear_transpose")


@dataclass(frozen=True)
class Case:
    """One row: `apply` is what a rank runs; `reference` maps all ranks' arrays to all results.

    Attributes
    ----------
    shape : (rank, size) -> shape of that rank's array.
    replicated : whether the result, and so its cotangent, is the same on all ranks.
    symmetric : whether arrays are symmetric matrices.
    refuses : transform -> key of `SENTENCES`.
    """

    name: str
    apply: Function
    reference: Callable[[Arrays], Arrays]
    shape: Callable[[int, int], tuple[int, ...]] = lambda rank, size: (2, 3)
    replicated: bool = False
    symmetric: bool = False
    refuses: dict[str, str] | None = None

    def refusal(self, transform: str) -> str | None:
        """Name the sentence that a transform raises, or None where it works."""
        return (self.refuses or {}).get(transform)

    def arrays(self, seed: int = 0) -> Arrays:
        """Give every rank's array: another one on each rank."""
        size = ranks().size
        return [self.values(seed, rank, self.shape(rank, size)) for rank in range(size)]

    def values(self, seed: int, rank: int, shape: tuple[int, ...]) -> np.ndarray:
        """Give small distinct numbers, symmetric where the case wants that."""
        x = np.random.default_rng([seed, rank]).uniform(0.5, 2.0, shape)
        return (x + x.T) / 2 if self.symmetric else x

    def cotangents(self, seed: int = 7) -> Arrays:
        """Give every rank's cotangent; a replicated result has a replicated one."""
        shapes = [y.shape for y in self.reference(self.arrays())]
        return [
            self.values(seed, 0 if self.replicated else rank, shape)
            for rank, shape in enumerate(shapes)
        ]

    def transposed(self, cotangents: Arrays) -> Arrays:
        """Apply the transpose of the global matrix, built column by column from the reference."""
        xs = self.arrays()
        result = [np.zeros(x.shape) for x in xs]
        for rank, x in enumerate(xs):
            for index in np.ndindex(x.shape):
                units = [np.zeros(other.shape) for other in xs]
                units[rank][index] = 1.0
                columns = self.reference(units)
                copies = 1 if self.replicated else len(columns)
                result[rank][index] = sum(np.vdot(columns[k], cotangents[k]) for k in range(copies))
        return result


def root() -> int:
    """Give the last rank, so that a forgotten root shows."""
    return ranks().size - 1


def send_counts(rank: int, size: int) -> list[int]:
    """Give uneven counts with zeros among them."""
    return [(2 * rank + to) % 3 for to in range(size)]


def uneven(size: int) -> list[int]:
    """Give rows per rank; the middle ones differ most."""
    return [1 + (2 * rank) % 3 for rank in range(size)]


def partner(rank: int, size: int) -> int | None:
    """Pair the ranks; the last of an odd number has none."""
    return rank ^ 1 if rank ^ 1 < size else None


def my_partner() -> Any:
    """Give this rank's partner as a peer."""
    other = partner(ranks().rank, ranks().size)
    return mpi.PROC_NULL if other is None else other


def _total(xs: Arrays) -> Arrays:
    return [sum(xs)] * len(xs)


def _with_root(at_root: Callable[[Arrays], np.ndarray]) -> Callable[[Arrays], Arrays]:
    return lambda xs: [*xs[:-1], at_root(xs)]


def _exchanged(xs: Arrays) -> Arrays:
    others = [partner(rank, len(xs)) for rank in range(len(xs))]
    return [xs[rank] if other is None else xs[other] for rank, other in enumerate(others)]


def _runs(xs: Arrays) -> Arrays:
    """Cut each array by its send counts and hand the runs out."""
    size = len(xs)
    cuts = [np.split(x, np.cumsum(send_counts(r, size))[:-1]) for r, x in enumerate(xs)]
    return [np.concatenate([cuts[r][to] for r in range(size)]) for to in range(size)]


def _exchange(first: Function, second: Function) -> Any:
    """Send first on even ranks, receive first on odd ones."""

    def run(x: Any) -> Any:
        sender, receiver = first(x), second(x)
        if ranks().rank % 2:
            y = receiver()
            sender()
            return y
        sender()
        return receiver()

    return run


def _sends(x: Any) -> Function:
    return lambda: mpi.send(x, my_partner(), tag=3)


def _receives(x: Any) -> Function:
    return lambda: mpi.recv(x, my_partner(), tag=3)


def _alltoallv(x: Any) -> Any:
    rank, size = ranks().rank, ranks().size
    return mpi.alltoallv(
        x, send_counts(rank, size), [send_counts(r, size)[rank] for r in range(size)]
    )


def _chain(x: Any) -> Any:
    """Shift by one rank; the first gets its template, 2 x, back."""
    rank, size = ranks().rank, ranks().size
    source = rank - 1 if rank else mpi.PROC_NULL
    dest = rank + 1 if rank + 1 < size else mpi.PROC_NULL
    return mpi.sendrecv(x, 2.0 * x, source, dest, sendtag=1, recvtag=1)


def _in_background(op: mpi.Op) -> Function:
    """Double what a rank has while the message is under way."""

    def run(x: Any) -> Any:
        request, through = mpi.iallreduce(x, op, through=x)
        return mpi.wait(request, after=2.0 * through)[0]

    return run


def _barrier(x: Any) -> Any:
    mpi.barrier()
    return 3.0 * x


def _ranks_first(rank: int, size: int) -> tuple[int, ...]:
    return (size, 2)


def _ranks_first_at_root(rank: int, size: int) -> tuple[int, ...]:
    return (size, 3) if rank == size - 1 else (3,)


NO_REVERSE = refuses("forward only", *REVERSE)
ONE_SIDED = refuses("one-sided", *DERIVATIVES)

CASES = [
    Case("allreduce", mpi.allreduce, _total, replicated=True),
    Case(
        "allreduce, op=MAX",
        lambda x: mpi.allreduce(x, mpi.MAX),
        lambda xs: [np.max(xs, axis=0)] * len(xs),
        replicated=True,
        refuses=refuses("sum only", *DERIVATIVES),
    ),
    Case("iallreduce, wait", _in_background(mpi.SUM), _total, replicated=True),
    Case(
        "iallreduce, op=MAX",
        _in_background(mpi.MAX),
        lambda xs: [np.max(xs, axis=0)] * len(xs),
        replicated=True,
        refuses=refuses("sum only", *DERIVATIVES),
    ),
    Case("reduce", lambda x: mpi.reduce(x, mpi.SUM, root()), _with_root(sum)),
    Case("scan", mpi.scan, lambda xs: list(np.cumsum(xs, axis=0)), refuses=NO_REVERSE),
    Case(
        "exscan",
        mpi.exscan,
        lambda xs: list(np.cumsum(xs, axis=0) - np.stack(xs)),
        refuses=NO_REVERSE,
    ),
    Case("reduce_scatter", mpi.reduce_scatter, lambda xs: list(sum(xs)), shape=_ranks_first),
    Case(
        "allreduce_symmetric",
        mpi.allreduce_symmetric,
        _total,
        shape=lambda rank, size: (3, 3),
        replicated=True,
        symmetric=True,
    ),
    Case("bcast", lambda x: mpi.bcast(x, root()), lambda xs: [xs[-1]] * len(xs), replicated=True),
    Case("gather", lambda x: mpi.gather(x, root()), _with_root(np.stack)),
    Case(
        "scatter",
        lambda x: mpi.scatter(x, root()),
        lambda xs: list(xs[-1]),
        shape=_ranks_first_at_root,
    ),
    Case("allgather", mpi.allgather, lambda xs: [np.stack(xs)] * len(xs), replicated=True),
    Case(
        "alltoall",
        mpi.alltoall,
        lambda xs: list(np.swapaxes(np.stack(xs), 0, 1)),
        shape=_ranks_first,
    ),
    Case(
        "gatherv",
        lambda x: mpi.gatherv(x, uneven(ranks().size), root()),
        _with_root(np.concatenate),
        shape=lambda rank, size: (uneven(size)[rank], 2),
    ),
    Case(
        "scatterv",
        lambda x: mpi.scatterv(x, uneven(ranks().size), root()),
        lambda xs: np.split(xs[-1], np.cumsum(uneven(len(xs)))[:-1]),
        shape=lambda rank, size: (sum(uneven(size)) if rank == size - 1 else 1, 2),
    ),
    Case(
        "allgatherv",
        lambda x: mpi.allgatherv(x, uneven(ranks().size)),
        lambda xs: [np.concatenate(xs)] * len(xs),
        shape=lambda rank, size: (uneven(size)[rank], 2),
        replicated=True,
    ),
    Case(
        "alltoallv",
        _alltoallv,
        _runs,
        shape=lambda rank, size: (sum(send_counts(rank, size)), 2),
    ),
    Case("sendrecv", _chain, lambda xs: [2.0 * xs[0], *xs[:-1]]),
    Case(
        "send",
        _exchange(_sends, lambda x: _receives(jax.lax.stop_gradient(x))),
        _exchanged,
        refuses=ONE_SIDED,
    ),
    Case(
        "recv",
        _exchange(lambda x: _sends(jax.lax.stop_gradient(x)), _receives),
        _exchanged,
        refuses=ONE_SIDED,
    ),
    Case("barrier", _barrier, lambda xs: [3.0 * x for x in xs]),
]

BY_NAME = {case.name: case for case in CASES}

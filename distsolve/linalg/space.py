"""Where vectors live: the products and the decisions that solvers need, over the ranks.

A solver sees only a `Space`. This is the one file of `distsolve.linalg` that knows of MPI.
"""

import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from distsolve import mpi
from distsolve.linalg import tiles, trees
from distsolve.mpi.ops import merge_moments


class Space:
    """What solvers ask of the place where their vectors live.

    A space is hashable and equal to another one over the same ranks, so that it can be a static
    argument. Its methods are called inside programs; each says how many messages it sends. At one
    rank nothing is sent.
    """

    is_whole = False  # whether every rank holds all entries of a vector

    def dot(self, *pairs: tuple[Any, Any]) -> jax.Array:
        """Return ``Re <x, y>`` of each pair ``(x, y)``, over all entries: (k,) replicated.

        Communication: one `sum`.
        """
        return self.sum(_dots(pairs))

    def project(self, V: Any, w: Any) -> jax.Array:
        """Return ``<V_i, w>`` for a stack ``V`` of vectors: (m,) replicated.

        The leaves of ``V`` are those of ``w`` with one more axis in front. The result is complex if
        all leaves are complex; otherwise it is the real parts.

        Communication: one `sum`.
        """
        return self.sum(trees.project(V, w))

    def norm(self, x: Any) -> jax.Array:
        """Return the 2-norm of ``x`` over all entries, safe against overflow and underflow.

        Communication: one `sum`, as the squares travel sorted by magnitude.
        """
        return trees.norm_of_bins(self.sum(trees.square_bins(trees.norm(x))))

    def open(
        self, vectors: Sequence[Any], inputs: jax.Array, here: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array, Any]:
        """Return what a solve starts from: norms, scalars that all ranks agree on, the size.

        ``inputs`` are each rank's own idea of the user's scalars: (m,) floats of the vectors'
        `trees.scalar_dtype`. Rank 0 decides.
        ``here`` is what `rank_zero` returned outside the program: the text of the program is then
        the same on all ranks. The norms of k vectors alike are (k,), and the size is that of one.

        Communication: one message in all.
        """
        here = self.rank_zero() if here is None else here
        bins = [trees.square_bins(trees.norm(x)) for x in vectors]
        # Not a product with 0: infinity may be an input.
        decided = jnp.where(here, inputs, jnp.zeros_like(inputs))
        digits = trees.size_digits(vectors[0], inputs.dtype)
        k, m = len(bins), len(inputs)
        total = self.sum(jnp.concatenate([*bins, decided, digits]))
        norms = [trees.norm_of_bins(total[3 * i : 3 * i + 3]) for i in range(k)]
        return jnp.stack(norms), total[3 * k : 3 * k + m], trees.size_of_digits(total[3 * k + m :])

    def size(self, x: Any) -> Any:
        """Return the number of entries on all ranks, an integer scalar, replicated.

        At most the largest int32 where 64-bit numbers are off.

        Communication: one `sum`, inside the program and never while tracing.
        """
        return trees.size_of_digits(self.sum(trees.size_digits(x, jnp.float32)))

    def decide(self, x: jax.Array) -> jax.Array:
        """Return a value that follows from this space's products, equal on all ranks.

        Communication: none, as the products are the same on all ranks already.
        """
        return x

    def begin(self, pairs: Sequence[tuple[Any, Any]], through: Any) -> tuple[Any, Any]:
        """Start the `dot` of ``pairs``, and return what `finish` takes, and ``through``.

        The work to hide the reduction behind must use ``through`` as it is returned.

        Communication: one message, which `finish` waits for.
        """
        return self.dot(*pairs), through

    def finish(self, pending: Any, after: Any) -> tuple[jax.Array, Any]:
        """Return the products that were begun, (k,) replicated, and ``after``.

        The reduction is waited for once ``after``, the result of the hidden work, is there.

        Communication: none beyond that of `begin`.
        """
        return pending, after

    def messages(self, method: str) -> int:
        """Return how many messages a call of the method with this name takes."""
        sends = {"dot", "project", "norm", "open", "size", "begin"}
        sends |= {"sum", "sum_symmetric", "agree", "gather", "offset", "assemble", "merge_moments"}
        return int(method in sends and self.ranks() > 1)

    def ranks(self) -> int:
        """Return the number of pieces that a vector consists of."""
        raise NotImplementedError

    def rank_zero(self) -> jax.Array:
        """Return whether this is the first rank, as a scalar."""
        raise NotImplementedError

    def sum(self, x: Any) -> Any:
        """Return the sum of a pytree over the pieces of a vector, replicated.

        Communication: one message for each dtype.
        """
        raise NotImplementedError

    def enter(self, x: Any) -> Any:
        """Return ``x``, a replicated value that the ranks now use on their own pieces.

        Its cotangent is the sum of what the ranks give back.

        Communication: none; in reverse one `sum`.
        """
        return x

    def sum_symmetric(self, H: jax.Array) -> jax.Array:
        """Return the `sum` of symmetric or Hermitian matrices (n, n). One message."""
        return self.sum(H)

    def agree(self, x: jax.Array) -> jax.Array:
        """Return the entrywise maximum of ``x`` over the ranks, equal on all of them.

        NaN compares with nothing, so it is sent as infinity.

        Communication: one message.
        """
        raise NotImplementedError

    def gather(self, x: jax.Array) -> jax.Array:
        """Return ``x`` of every rank: ``(ranks, *shape)`` replicated.

        Communication: one message, of the size of the result.
        """
        raise NotImplementedError

    def merge_moments(self, x: jax.Array, sides: tuple[int, ...]) -> jax.Array:
        """Return what the ranks' tiles of moments merge into, (tiles, length) replicated.

        ``sides`` are those of a tile; see ``distsolve.linalg.tiles``.

        Communication: one `gather`.
        """
        return tiles.merge(self.gather(x), sides)

    def offset(self, n: int) -> jax.Array:
        """Return how many entries are on the ranks before this one, of which each has its ``n``.

        Communication: one message.
        """
        raise NotImplementedError

    def assemble(self, piece: jax.Array, offset: jax.Array, total: int) -> jax.Array:
        """Return the whole of an array whose rows from ``offset`` on are ``piece``: (total, ...).

        Communication: one message, of the size of the result.
        """
        start = (offset, *[jnp.zeros_like(offset)] * (piece.ndim - 1))
        whole = jnp.zeros((total, *piece.shape[1:]), piece.dtype)
        return self.sum(jax.lax.dynamic_update_slice(whole, piece, start))


class _OnRanks(Space):
    """A space over the ranks of a communicator."""

    def __init__(self, comm: Any = None) -> None:
        self.comm = comm
        if comm is not None:  # the world is prepared when MPI is first touched
            mpi.prepare(comm)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _OnRanks) and type(self) is type(other) and self.comm == other.comm

    def __hash__(self) -> int:
        return hash(type(self))

    def __repr__(self) -> str:
        where = "" if self.comm is None else f"comm={self.comm.Get_name()!r}"
        return f"{type(self).__name__}({where})"

    def rank_zero(self) -> jax.Array:
        """Return whether this is rank 0, as a scalar; no communication."""
        # Folded into the program, the constant would give ranks programs that round differently.
        return jax.lax.optimization_barrier(jnp.asarray(mpi.rank(self.comm) == 0))

    def agree(self, x: jax.Array) -> jax.Array:
        """Return the entrywise maximum of ``x`` over the ranks, equal on all of them.

        NaN compares with nothing, so it is sent as infinity.

        Communication: one allreduce; none at one rank.
        """
        return (
            x
            if mpi.size(self.comm) == 1
            else mpi.allreduce(trees.nan_as_inf(x), mpi.MAX, comm=self.comm)
        )


class Replicated(_OnRanks):
    """Vectors of which every rank holds all entries: inner products are local.

    This is the space of stochastic reconfiguration, where the samples are spread over the ranks and
    the vectors of parameters are not. Ranks must hold equal copies; `check_replicated` tells.

    Parameters
    ----------
    comm : mpi4py intracommunicator, optional
        The ranks that hold the vectors; the world by default.

    Communication
    -------------
    None for products, norms and sums; one tiny allreduce for each decision of a loop.
    """

    is_whole = True

    def norm(self, x: Any) -> jax.Array:
        """Return the 2-norm, as `Space.norm`. Communication: none."""
        return trees.norm(x)

    def sum(self, x: Any) -> Any:
        """Return ``x``: a vector has one piece. Communication: none."""
        return x

    def size(self, x: Any) -> int:
        """Return the number of entries, as a Python int. Communication: none."""
        return trees.size(x)

    def decide(self, x: jax.Array) -> jax.Array:
        """Return `agree`, as copies may differ in their last bits; see `Space.decide`.

        Ranks that leave a loop at different times would wait for each other for ever.
        """
        return self.agree(x)

    def open(
        self, vectors: Sequence[Any], inputs: jax.Array, here: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array, int]:
        """Return what a solve starts from, as `Space.open`: one allreduce; none at one rank."""
        norms = jnp.stack([self.norm(x) for x in vectors])
        here = self.rank_zero() if here is None else here
        decided = jnp.where(here, inputs, jnp.full_like(inputs, -jnp.inf))
        # Copies have one size; pieces that were taken for copies must not count different steps.
        digits = trees.size_digits(vectors[0], inputs.dtype)
        agreed = self.agree(jnp.concatenate([norms, decided, digits]))
        norms, inputs, digits = jnp.split(agreed, [len(norms), len(norms) + len(inputs)])
        return norms, inputs, trees.size_of_digits(digits)

    def messages(self, method: str) -> int:
        """Return how many messages a call of the method with this name takes."""
        return int(method in {"open", "agree", "decide"} and mpi.size(self.comm) > 1)

    def ranks(self) -> int:
        """Return 1: a vector has one piece."""
        return 1

    def gather(self, x: jax.Array) -> jax.Array:
        """Return ``x`` with an axis of length 1 in front. Communication: none."""
        return x[None]

    def offset(self, n: int) -> jax.Array:
        """Return 0: a vector has one piece. Communication: none."""
        return jnp.zeros((), jnp.int32)

    def assemble(self, piece: jax.Array, offset: jax.Array, total: int) -> jax.Array:
        """Return ``piece``: it is the whole. Communication: none."""
        return piece


class Sharded(_OnRanks):
    """Vectors of which every rank holds a piece: inner products are sums over the ranks.

    Pieces may have any sizes, also 0, but the same dtypes on all ranks.

    Parameters
    ----------
    comm : mpi4py intracommunicator, optional
        The ranks that hold the pieces; the world by default.

    Communication
    -------------
    One small allreduce for each `dot` of any number of pairs, `norm` and `sum`; none at one rank.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from distsolve import Sharded, mpi
    >>> squared = Sharded().norm(jnp.array([1.0, 2.0, 2.0])) ** 2
    >>> bool(jnp.allclose(squared, 9.0 * mpi.size()))
    True
    """

    def ranks(self) -> int:
        """Return the number of ranks; no communication."""
        return mpi.size(self.comm)

    def sum(self, x: Any) -> Any:
        """Return the sum of a pytree over the ranks. One allreduce for each dtype."""
        return x if self.ranks() == 1 else mpi.allreduce(x, comm=self.comm)

    def enter(self, x: Any) -> Any:
        """Return ``x``; see `Space.enter`. Communication: none; in reverse one allreduce."""
        return x if self.ranks() == 1 else mpi.pvary(x, comm=self.comm)

    def sum_symmetric(self, H: jax.Array) -> jax.Array:
        """Return the sum of symmetric matrices, in place, by half their bytes. One message."""
        return H if self.ranks() == 1 else mpi.allreduce_symmetric(H, comm=self.comm)

    def open(
        self, vectors: Sequence[Any], inputs: jax.Array, here: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array, Any]:
        """Return what a solve starts from; see `Space.open`.

        In check mode (``DISTSOLVE_CHECK``) one message more, and a warning of rank 0 where the
        pieces of the first vector are equal on all ranks: is it a copy of the whole?
        """
        here = self.rank_zero() if here is None else here
        if self.ranks() > 1 and mpi.is_checking():
            self._warn_of_copies(vectors[0], here)
        return super().open(vectors, inputs, here)

    def _warn_of_copies(self, x: Any, here: jax.Array) -> None:
        places = jax.tree.map(lambda u: jnp.arange(u.size).reshape(u.shape).astype(u.dtype), x)
        mark = trees.vdot(places, x)
        largest, smallest = self.agree(jnp.stack([mark, -mark]))
        copies = (largest == -smallest) & (mark != 0)
        jax.debug.callback(_say_copies, copies & here)

    def begin(self, pairs: Sequence[tuple[Any, Any]], through: Any) -> tuple[Any, Any]:
        """Start the `dot` of ``pairs``; see `Space.begin`. One iallreduce; none at one rank."""
        if self.ranks() == 1:
            return self.dot(*pairs), through
        return mpi.iallreduce(_dots(pairs), through=through, comm=self.comm)

    def finish(self, pending: Any, after: Any) -> tuple[jax.Array, Any]:
        """Return the products that were begun, and ``after``; see `Space.finish`."""
        if self.ranks() == 1:
            return pending, after
        return mpi.wait(pending, after=after)

    def gather(self, x: jax.Array) -> jax.Array:
        """Return ``x`` of every rank: ``(ranks, *shape)`` replicated. One allgather."""
        return x[None] if self.ranks() == 1 else mpi.allgather(x, comm=self.comm)

    def merge_moments(self, x: jax.Array, sides: tuple[int, ...]) -> jax.Array:
        """Return the tiles that all ranks' merge into; see `Space.merge_moments`. One allreduce."""
        return x if self.ranks() == 1 else merge_moments(x, comm=self.comm)

    def offset(self, n: int) -> jax.Array:
        """Return how many entries are on the ranks before this one. One exscan."""
        mine = jnp.asarray(n, jnp.int32)
        return jnp.zeros_like(mine) if self.ranks() == 1 else mpi.exscan(mine, comm=self.comm)

    def rank(self) -> int:
        """Return the number of this rank; no communication."""
        return mpi.rank(self.comm)

    def counts(self, n: int) -> tuple[int, ...]:
        """Return the ``n`` of every rank, as Python ints for programs to be built on.

        Not inside `jax.jit`: what a program is built on must be known while tracing, and nothing is
        sent then. Communication: one allgather; none at one rank.
        """
        counts = [n] if self.ranks() == 1 else self.gather(jnp.asarray(n, jnp.int32))
        if isinstance(counts, jax.core.Tracer):
            raise ValueError(
                "`counts` sends a message: call it outside jax.jit, and close over it."
            )
        return tuple(map(int, counts))

    def exchange(
        self, x: jax.Array, send_counts: Sequence[int], recv_counts: Sequence[int]
    ) -> jax.Array:
        """Give rank r the r-th run of rows of ``x``; return the runs meant for this rank, by rank.

        Parameters
        ----------
        x : (sum(send_counts), ...) sharded
        send_counts, recv_counts : rows to and from every rank, known while tracing

        Returns
        -------
        (sum(recv_counts), ...) sharded

        Communication
        -------------
        One alltoallv; none at one rank.
        """
        if self.ranks() == 1:
            return x
        return mpi.alltoallv(x, send_counts, recv_counts, comm=self.comm)


def _dots(pairs: Sequence[tuple[Any, Any]]) -> jax.Array:
    """Return this rank's part of ``Re <x, y>`` of each pair, stacked: (k,)."""
    return jnp.stack([trees.vdot(x, y) for x, y in pairs])


def _say_copies(copies: Any) -> None:
    if copies:
        print(
            "distsolve: a vector that is said to be sharded is equal on all ranks "
            "(DISTSOLVE_CHECK). If each rank holds the whole vector, its products come out larger "
            "by the number of ranks: use space=distsolve.Replicated().",
            file=sys.stderr,
            flush=True,
        )

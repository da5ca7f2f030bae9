"""Sparse matrices whose rows are split over the ranks.

Each rank holds consecutive rows, and the entries of vectors that belong to them. A product needs
the *halo*: entries of other ranks whose columns occur in this rank's rows. Which ones is found out
once, when the matrix is made, and afterwards they travel in one message a product.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from distsolve.linalg import arguments, ellpack
from distsolve.linalg.space import Sharded
from distsolve.linalg.trees import DTYPES

# What a row costs beyond its entries, in entries: the vector operations of a solver.
_ROW_WORK = 10


class Layout(NamedTuple):
    """What is known of a matrix while tracing; hashable."""

    space: Sharded
    starts: tuple[int, ...]  # rows `starts[r]` to `starts[r + 1]` are on rank r
    rank: int
    send_counts: tuple[int, ...]
    recv_counts: tuple[int, ...]
    is_split: bool  # whether any rank needs entries of another one


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class DistributedCSR:
    """A square sparse matrix, rows split over the ranks: ``A @ x`` for vectors of `Sharded`.

    ``(A x)_i = sum_j A_ij x_j`` for the rows ``i`` of this rank.

    Made by `from_rows`, `from_whole` or `scatter`, outside ``jit``. It is a pytree: the arrays are
    traced, so that other values of the same pattern run the same compiled code.

    Examples
    --------
    >>> import numpy as np, scipy.sparse
    >>> from distsolve import DistributedCSR, Sharded, cg
    >>> matrix = scipy.sparse.diags_array([-1, 2, -1], offsets=[-1, 0, 1], shape=(9, 9))
    >>> A = DistributedCSR.from_whole(matrix.astype(np.float32))
    >>> b = np.ones(len(A.rows), np.float32)
    >>> x, info = cg(A, b, space=Sharded())
    >>> info.reason_name
    'converged'
    """

    values: tuple[jax.Array, ...]  # one rectangle for each group of rows
    columns: tuple[jax.Array, ...]  # places in this rank's entries, followed by the halo
    members: tuple[jax.Array, ...]  # the rows of each group
    order: jax.Array | None  # where each row is among those of all groups, unless there is one
    send: jax.Array  # places of the entries that other ranks need
    layout: Layout = dataclasses.field(metadata={"static": True})

    @classmethod
    def from_rows(cls, rows: Any, space: Sharded | None = None) -> "DistributedCSR":
        """Make a matrix from the rows that each rank has.

        Parameters
        ----------
        rows : (n, N) SciPy sparse matrix, sharded
            The rows of this rank, after those of the ranks before it; columns count over the whole
            matrix. ``n`` may differ between ranks and be 0.
        space : Sharded, optional
            Where the vectors live; `Sharded` on the world by default.

        Returns
        -------
        DistributedCSR

        Raises
        ------
        TypeError, ValueError
            On all ranks: for entries that are no floats or that JAX would round, and for rows that
            do not make a square matrix of one dtype.

        Communication
        -------------
        Three allgathers and two alltoallv, outside programs; collective.
        """
        space = _sharded(space)
        matrix = _agreed(space, functools.partial(_canonical, "rows"), rows)
        starts = _starts(matrix, space)
        rank, size = space.rank(), space.ranks()
        start, stop = starts[rank], starts[rank + 1]

        inside = (matrix.indices >= start) & (matrix.indices < stop)
        halo = np.unique(matrix.indices[~inside])
        owner = np.searchsorted(starts, halo, side="right") - 1
        recv_counts = np.bincount(owner, minlength=size)
        one_each = [1] * size
        send_counts = _exchange(space, recv_counts, one_each, one_each)
        send = _exchange(space, halo - np.take(starts, owner), recv_counts, send_counts)
        is_split = bool(_gather(space, [len(halo)]).any())

        columns = np.where(
            inside, matrix.indices - start, stop - start + np.searchsorted(halo, matrix.indices)
        )
        layout = Layout(space, starts, rank, _ints(send_counts), _ints(recv_counts), is_split)
        values, places, members, order = ellpack.pack(matrix, columns)
        return cls(values, places, members, order, jnp.asarray(send), layout)

    @classmethod
    def from_whole(cls, matrix: Any, space: Sharded | None = None) -> "DistributedCSR":
        """Make a matrix that every rank has the whole of: each keeps its share of the rows.

        Parameters
        ----------
        matrix : (N, N) SciPy sparse matrix, replicated
            It is cut where rows and entries make equal work.
        space : Sharded, optional
            As for `from_rows`.

        Returns
        -------
        DistributedCSR

        Communication
        -------------
        One allgather, and that of `from_rows`.
        """
        space = _sharded(space)
        matrix = _agreed(space, functools.partial(_canonical, "matrix"), matrix)
        cuts = _cuts(matrix.indptr, space.ranks())
        return cls.from_rows(matrix[cuts[space.rank()] : cuts[space.rank() + 1]], space)

    @classmethod
    def scatter(
        cls, matrix: Any, space: Sharded | None = None, *, root: int = 0
    ) -> "DistributedCSR":
        """Make a matrix that only one rank has: it sends the others their rows.

        Parameters
        ----------
        matrix : (N, N) SciPy sparse matrix at the root, None elsewhere
            It is cut where rows and entries make equal work.
        space : Sharded, optional
            As for `from_rows`.
        root : rank

        Returns
        -------
        DistributedCSR

        Raises
        ------
        TypeError, ValueError
            As `from_rows`.

        Communication
        -------------
        One allgather, four alltoallv in which only the root sends, and that of `from_rows`.
        """
        space = _sharded(space)
        if not arguments.is_int(root) or not 0 <= root < space.ranks():
            raise ValueError(
                f"`root` must be a rank from 0 to {space.ranks() - 1}: got {root!r}. Pass the one "
                "that has the matrix, on all ranks."
            )
        size, at_root = space.ranks(), space.rank() == root
        from_root = np.where(np.arange(size) == root, 1, 0)
        matrix = _agreed(
            space, functools.partial(_canonical, "matrix") if at_root else lambda _: None, matrix
        )
        heads = np.zeros((0, 4), int)
        if at_root:
            cuts = _cuts(matrix.indptr, size)
            entries = np.diff(matrix.indptr[cuts])
            shared = np.full((size, 2), (matrix.shape[1], DTYPES.index(matrix.dtype)))
            heads = np.column_stack([np.diff(cuts), entries, shared])
        nothing = np.zeros(size, int)
        head = _exchange(space, heads, nothing + at_root, from_root)
        ((n, n_entries, N, number),) = head

        def share(whole, column, mine):
            sends = heads[:, column] if at_root else nothing
            return _exchange(space, whole, sends, from_root * mine)

        none = np.zeros(0, int)
        lengths = share(np.diff(matrix.indptr) if at_root else none, 0, n)
        indices = share(matrix.indices if at_root else none, 1, n_entries)
        data = share(matrix.data if at_root else np.zeros(0, DTYPES[number]), 1, n_entries)
        indptr = np.concatenate([[0], np.cumsum(lengths)])
        return cls.from_rows(_csr((data, indices, indptr), (n, N)), space)

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows and columns of the whole matrix."""
        return self.layout.starts[-1], self.layout.starts[-1]

    @property
    def rows(self) -> range:
        """The rows of this rank."""
        return range(*self.layout.starts[self.layout.rank : self.layout.rank + 2])

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of rows on each rank."""
        return _ints(np.diff(self.layout.starts))

    @property
    def dtype(self) -> Any:
        """Dtype of the entries, and of the vectors."""
        return self.values[0].dtype

    def check_space(self, space: Any, name: str) -> None:
        """Raise unless this space's vectors are in pieces."""
        if not isinstance(space, Sharded):
            raise TypeError(
                f"{name} is a DistributedCSR, whose vectors are in pieces: got space={space}. Pass "
                f"space={self.layout.space}."
            )

    def __repr__(self) -> str:
        rows = self.rows
        return (
            f"DistributedCSR(shape={self.shape}, dtype={self.dtype}, "
            f"rows {rows.start} to {rows.stop} on rank {self.layout.rank})"
        )

    def __matmul__(self, x: jax.Array) -> jax.Array:
        """Return ``A x``.

        Parameters
        ----------
        x : (n,) sharded, of this matrix's dtype

        Returns
        -------
        (n,) sharded

        Raises
        ------
        TypeError, ValueError
            If ``x`` is not such a vector.

        Communication
        -------------
        One alltoallv of the halo; none where no rank has one.
        """
        self._check(x)
        x = jnp.asarray(x)
        if self.layout.is_split:
            sent = x.at[self.send].get(mode="promise_in_bounds")
            halo = self.layout.space.exchange(
                sent, self.layout.send_counts, self.layout.recv_counts
            )
            x = jnp.concatenate([x, halo])
        return self._join(
            [ellpack.multiply(v, c, x) for v, c in zip(self.values, self.columns, strict=True)]
        )

    def diag(self) -> jax.Array:
        """Return the diagonal entries of this rank's rows: (n,) sharded. No communication."""

        def of_group(values, columns, members):
            mine = columns == ellpack.spread(members, values)
            axes = (0, 1) if values.ndim == 3 else 1
            return jnp.sum(jnp.where(mine, values, jnp.zeros((), values.dtype)), axis=axes)

        return self._join(list(map(of_group, self.values, self.columns, self.members)))

    def local_block(self) -> Any:
        """Return the block that couples this rank's own entries, as `block_jacobi` takes it.

        Returns
        -------
        (n, n) SciPy CSR array, sharded

        Communication
        -------------
        None; outside ``jit`` only.
        """
        n = len(self.rows)
        block = _csr((n, n)).astype(self.dtype)
        for group in zip(self.values, self.columns, self.members, strict=True):
            values, columns, members = map(np.asarray, group)
            rows = np.broadcast_to(ellpack.spread(members, values), values.shape)
            mine = (columns < n) & (values != 0)
            block += _csr((values[mine], (rows[mine], columns[mine])), (n, n))
        return block

    def _join(self, pieces):
        """Return one array of all rows, in their order, from those of the groups."""
        if self.order is None:
            return pieces[0]
        return jnp.concatenate(pieces).at[self.order].get(mode="promise_in_bounds")

    def _check(self, x):
        n, rows = len(self.rows), self.rows
        if getattr(x, "shape", None) != (n,):
            raise ValueError(
                f"`x` must be this rank's piece of a vector, rows {rows.start} to {rows.stop} of "
                f"{self.shape[0]}: expected shape ({n},), got {getattr(x, 'shape', type(x))}. For "
                "several vectors use jax.vmap."
            )
        if x.dtype != self.dtype:
            raise TypeError(
                f"`x` is {x.dtype} and the matrix is {self.dtype}: dtypes are not cast silently. "
                f"Convert one of them, for example x.astype({self.dtype})."
            )


def _cuts(indptr, size):
    """Return the first row of each of ``size`` pieces of about equal work, and the end."""
    work = indptr.astype(np.int64) + _ROW_WORK * np.arange(len(indptr))
    return np.searchsorted(work, work[-1] * np.arange(size + 1) // size)


def _csr(*arguments, **options):
    """Make a CSR array. SciPy is imported here: programs without such matrices do without it."""
    from scipy.sparse import csr_array

    return csr_array(*arguments, **options)


def _agreed(space, function, matrix):
    """Return ``function(matrix)``; where it raises on one rank, all raise. One allgather."""
    result = fault = None
    try:
        result = function(matrix)
    except (TypeError, ValueError) as error:
        fault = error
    failed = np.flatnonzero(_gather(space, [fault is not None]))
    if fault is not None:
        raise fault
    if len(failed):
        raise ValueError(
            f"the matrix of rank {failed[0]} cannot be used, for the reason that is raised there."
        )
    return result


def _sharded(space):
    space = arguments.space(space, Sharded)
    if not isinstance(space, Sharded):
        raise TypeError(f"`space` must be a Sharded, as rows are split: got {space!r}.")
    return space


def _canonical(name, matrix):
    """Return a CSR array with sorted indices and no entry twice; raise if JAX would change it."""
    if getattr(matrix, "ndim", None) != 2:
        raise TypeError(
            f"`{name}` must be a SciPy sparse matrix: got {type(matrix).__name__}. Make one, for "
            "example with scipy.sparse.csr_array."
        )
    matrix = _csr(matrix, copy=True)
    matrix.sum_duplicates()
    if matrix.dtype not in DTYPES:
        raise TypeError(
            f"`{name}` must have entries of one of {', '.join(DTYPES)}: got {matrix.dtype}. "
            "Convert it, for example with matrix.astype(float)."
        )
    held = jax.dtypes.canonicalize_dtype(matrix.dtype)
    if held != matrix.dtype:
        raise TypeError(
            f"`{name}` has entries of {matrix.dtype}, which JAX would round to {held}: call "
            'jax.config.update("jax_enable_x64", True) at the start of the program, or convert the '
            f'matrix, with matrix.astype("{held}").'
        )
    if max(matrix.shape) >= 2**31:
        raise ValueError(
            f"`{name}` has the shape {matrix.shape}: expected fewer than 2**31 rows and columns."
        )
    return matrix


def _starts(matrix, space):
    """Return the first row of each rank, and the end; raise on all ranks if the rows do not fit."""
    heads = _gather(space, [*matrix.shape, DTYPES.index(matrix.dtype)])
    n, N, numbers = heads.T
    if (n.sum() != N).any():
        raise ValueError(
            f"`rows` of all ranks must make a square matrix: got {n.tolist()} rows, {n.sum()} in "
            f"all, of {N.tolist()} columns. Give each rank its rows of the whole matrix, with "
            "columns that count over all of it."
        )
    if (numbers != numbers[0]).any():
        raise TypeError(
            "`rows` must have one dtype on all ranks: got "
            f"{[DTYPES[k] for k in numbers]}. Convert them."
        )
    return _ints(np.concatenate([[0], np.cumsum(n)]))


def _gather(space, numbers):
    """Return the small numbers of all ranks: (ranks, k) integers."""
    return np.asarray(space.gather(jnp.asarray(np.array(numbers, np.int32)))).astype(np.int64)


def _exchange(space, x, send_counts, recv_counts):
    """Exchange rows of a NumPy array, outside programs; integers travel as int32."""
    x = np.asarray(x)
    x = x.astype(np.int32) if np.issubdtype(x.dtype, np.integer) else x
    return np.asarray(space.exchange(jnp.asarray(x), _ints(send_counts), _ints(recv_counts)))


def _ints(numbers):
    return tuple(int(k) for k in numbers)

"""Preconditioners from the diagonal and from diagonal blocks: no communication.

Both are pytrees that can be called, so they pass through ``jax.jit`` as data: other values run the
same compiled code. Each acts on the entries that this rank holds, so it serves replicated vectors
and pieces of sharded ones alike.

What is not positive definite raises where its values are known. While tracing they are not: the
preconditioner is then minus the identity on that rank, which the solver reports as
``indefinite_preconditioner``, and no NaN arises from a division by zero.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distsolve.linalg import arguments, operators
from distsolve.linalg.arguments import where


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Jacobi:
    """Divides by a diagonal; made by `jacobi`."""

    inverse: Any

    def __call__(self, x: Any) -> Any:
        """Return ``x / diag`` for a vector ``x`` like ``diag``."""
        wanted: Any = jax.tree.structure(self.inverse)
        found = jax.tree.structure(x)
        if wanted != found:
            raise TypeError(
                f"`jacobi`: `diag` must have the structure of the vector: expected {found}, "
                f"got {wanted}. Give one diagonal entry for each entry of the vector."
            )

        def leaf(path, inverse, x):
            if inverse.shape != x.shape:
                raise ValueError(
                    f"`jacobi`: `diag`{where(path)} must have the shape of the vector: expected "
                    f"{x.shape}, got {inverse.shape}. Give one diagonal entry for each entry of "
                    "the vector; sharded vectors take the entries of this rank."
                )
            return _like(inverse, x, f"`jacobi`: `diag`{where(path)}") * x

        return jax.tree_util.tree_map_with_path(leaf, self.inverse, x)


def jacobi(diag: Any) -> Jacobi:
    """Return the preconditioner that divides by the diagonal of the operator.

    The equation is ``(M x)_i = x_i / diag_i``.

    Parameters
    ----------
    diag : array or pytree like the vectors; ownership as theirs
        The diagonal, real and positive also for complex vectors: replicated for replicated vectors,
        the entries of this rank for sharded ones.

    Returns
    -------
    Jacobi
        A pytree, for a solver's ``M=``.

    Raises
    ------
    TypeError
        If an entry is not a real float.
    ValueError
        If there is no array; outside tracing, if an entry is not positive with a finite reciprocal.
        It says how many are not, and where the first is among the entries of its leaf on this rank.
        While tracing see the head of `distsolve.linalg.preconditioners`.

    Communication
    -------------
    None.

    References
    ----------
    Saad (2003), Iterative Methods for Sparse Linear Systems, section 10.2,
    doi:10.1137/1.9780898718003.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from distsolve.linalg import cg, jacobi
    >>> diagonal = jnp.array([1.0, 1e3, 1e6])
    >>> x, info = cg(lambda p: diagonal * p, jnp.ones(3), M=jacobi(diagonal))
    >>> int(info.iterations)
    1
    """
    leaves, treedef = jax.tree_util.tree_flatten_with_path(diag)
    if not leaves:
        raise ValueError(
            f"`diag` must have at least one array: got {diag!r}, which has no leaves. Pass the "
            "diagonal, like the vectors."
        )
    entries = [arguments.array(leaf, "diag", path) for path, leaf in leaves]
    for (path, _), leaf in zip(leaves, entries, strict=True):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise TypeError(
                f"`diag`{where(path)} must be real floats: got {leaf.dtype}. The diagonal of a "
                "Hermitian operator is real: pass its real part, as floats."
            )
    inverses, usable = _invert(entries)
    if not any(isinstance(leaf, jax.core.Tracer) for leaf in usable):
        for (path, _), leaf, ok in zip(leaves, entries, usable, strict=True):
            _require_positive(np.asarray(leaf), np.asarray(ok), where(path))
    return Jacobi(jax.tree.unflatten(treedef, inverses))


@jax.jit
def _invert(leaves):
    """Return the reciprocals, all -1 unless all are positive and finite, and which are."""
    inverses = [jnp.ones_like(leaf) / leaf for leaf in leaves]
    usable = [(inverse > 0) & jnp.isfinite(inverse) for inverse in inverses]
    good = jnp.all(jnp.stack([jnp.all(ok) for ok in usable] + [jnp.array(True)]))
    return [jnp.where(good, inverse, -jnp.ones_like(inverse)) for inverse in inverses], usable


def _require_positive(entries, usable, place):
    bad = np.flatnonzero(~usable)
    if bad.size:
        raise ValueError(
            f"`diag`{place} must be positive, with finite reciprocals: {bad.size} of "
            f"{entries.size} entries on this rank are not; the first, at index {bad[0]} of the "
            f"flattened array, is {entries.ravel()[bad[0]]}. An operator with such a diagonal is "
            "not positive definite: add a shift to it, or solve without `jacobi`."
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockJacobi:
    """Solves with diagonal blocks; made by `block_jacobi`."""

    factors: tuple[jax.Array, ...]  # lower triangles, in stacks of one size, along the vector
    sign: jax.Array

    def __call__(self, x: Any) -> jax.Array:
        """Return ``x`` with the inverse of each block applied to its entries."""
        if len(jax.tree.leaves(x)) != 1 or not hasattr(x, "shape"):
            raise TypeError(
                "`block_jacobi` acts on one array: got a pytree of structure "
                f"{jax.tree.structure(x)}. Ravel the vectors, or call one for each leaf in `M`."
            )
        covered = sum(stack.shape[0] * stack.shape[1] for stack in self.factors)
        if x.size != covered:
            raise ValueError(
                f"`block_jacobi`: the blocks cover {covered} entries, and the vector on this rank "
                f"has {x.size}. Give blocks for exactly the entries that this rank holds."
            )
        flat, pieces, start = x.ravel(), [], 0
        for stack in self.factors:
            stop = start + stack.shape[0] * stack.shape[1]
            factor = _like(stack, x, "`block_jacobi`: the blocks")
            piece = flat[start:stop].reshape(*stack.shape[:2], 1)
            # B = L L^H  =>  B^-1 x = L^-H (L^-1 x)
            for adjoint in (False, True):
                piece = jax.lax.linalg.triangular_solve(
                    factor,
                    piece,
                    left_side=True,
                    lower=True,
                    transpose_a=adjoint,
                    conjugate_a=adjoint,
                )
            pieces.append(piece.ravel())
            start = stop
        if not pieces:
            return x
        solved = jnp.concatenate(pieces).reshape(x.shape)
        return _like(self.sign, x, "`block_jacobi`: the blocks") * solved


def block_jacobi(matrix_or_blocks: Any, block_size: int | None = None) -> BlockJacobi:
    """Return the preconditioner that solves with diagonal blocks of the operator.

    The equation is ``M x = (B_1^-1 x_1, ..., B_k^-1 x_k)`` for consecutive pieces ``x_i`` of the
    flattened array that this rank holds.

    Parameters
    ----------
    matrix_or_blocks : (k, s, s) array, list of (s_i, s_i) arrays, (n, n) array or SciPy sparse
        The blocks, Hermitian positive definite, ownership as of the vectors; or, together with
        ``block_size``, the square matrix that they are cut from. For sharded vectors that is the
        part of the operator that couples this rank's own entries. Only the blocks of a sparse
        matrix are stored. Real blocks serve complex vectors.
    block_size : int, optional
        Cut blocks of this size out of a matrix; the last one takes what is left.

    Returns
    -------
    BlockJacobi
        A pytree, for a solver's ``M=``, on vectors of one array.

    Raises
    ------
    TypeError, ValueError
        For shapes or dtypes that cannot work; outside tracing also for a block that is not
        Hermitian positive definite, which it names. While tracing see the head of
        `distsolve.linalg.preconditioners`; there only the Hermitian part of a block counts.

    Communication
    -------------
    None. Each block is factorised once; a product is two batched triangular solves.

    References
    ----------
    Saad (2003), Iterative Methods for Sparse Linear Systems, section 12.2,
    doi:10.1137/1.9780898718003.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from distsolve.linalg import block_jacobi, cg
    >>> A = jnp.array([[4.0, 1, 0], [1, 3, 0], [0, 0, 2]])
    >>> x, info = cg(A, jnp.ones(3), M=block_jacobi(A, block_size=2))
    >>> int(info.iterations)
    1
    """
    stacks = _stacks(matrix_or_blocks, block_size)
    for stack in stacks:
        if not jnp.issubdtype(stack.dtype, jnp.inexact):
            raise TypeError(
                f"`matrix_or_blocks` must be real or complex floats: got {stack.dtype}. "
                "Convert it, for example with .astype(float)."
            )
    factors, sign, finite = _factorise(stacks)
    if not isinstance(sign, jax.core.Tracer):
        first = 0
        for stack, ok in zip(stacks, finite, strict=True):
            _require_definite(np.asarray(stack), np.asarray(ok), first)
            first += len(stack)
    return BlockJacobi(tuple(factors), sign)


@jax.jit
def _factorise(stacks):
    """Return the lower triangles, the sign 1, and which blocks are definite: (k,) for each stack.

    If one is not, the triangles are those of the identity and the sign is -1.
    """
    lower = [jnp.linalg.cholesky(stack) for stack in stacks]
    finite = [jnp.all(jnp.isfinite(triangles), axis=(1, 2)) for triangles in lower]
    good = jnp.all(jnp.concatenate([*finite, jnp.ones(1, bool)]))
    factors = [
        jnp.where(good, L, jnp.broadcast_to(jnp.eye(L.shape[-1], dtype=L.dtype), L.shape))
        for L in lower
    ]
    dtype = jnp.finfo(lower[0].dtype).dtype if lower else jnp.float32
    return factors, jnp.where(good, jnp.ones((), dtype), -jnp.ones((), dtype)), finite


def _stacks(given, block_size):
    """Return the diagonal blocks, in order, as stacks of blocks of one size."""
    if isinstance(given, (list, tuple)):
        if block_size is not None:
            raise ValueError(
                f"`block_size` cuts blocks out of a matrix: got {block_size} together with a list "
                "of blocks. Leave it out."
            )
        return _group([_square(arguments.array(block, "matrix_or_blocks"), 2) for block in given])
    sparse = operators.is_sparse(given)
    matrix = given if sparse else arguments.array(given, "matrix_or_blocks")
    if block_size is None and not sparse and matrix.ndim == 3:
        return [_square(matrix, 3)]
    _square(matrix, 2)
    if not arguments.is_int(block_size):
        raise TypeError(
            f"`block_size` must be an integer, as `matrix_or_blocks` is a matrix: got "
            f"{block_size!r}. Pass the size of the blocks to cut out of it."
        )
    if block_size < 1:
        raise ValueError(f"`block_size` must be at least 1: got {block_size}.")
    n, s = matrix.shape[0], int(block_size)
    whole = n // s * s
    cut = _cut_sparse if sparse else _cut_dense
    last: Any = matrix[whole:, whole:]
    last = last.toarray() if sparse else last
    stacks = [cut(matrix, whole, s)] if whole else []
    return stacks + ([jnp.asarray(last)[None]] if whole < n else [])


def _cut_dense(matrix, whole, s):
    k = np.arange(whole // s)
    return matrix[:whole, :whole].reshape(len(k), s, len(k), s)[k, :, k, :]


def _cut_sparse(matrix, whole, s):
    entries = matrix.tocoo()
    row, column, value = entries.row, entries.col, entries.data
    inside = (row // s == column // s) & (row < whole)
    row, column, value = row[inside], column[inside], value[inside]
    blocks = np.zeros((whole // s, s, s), entries.dtype)
    np.add.at(blocks, (row // s, row % s, column % s), value)  # an entry may occur twice
    return jnp.asarray(blocks)


def _group(blocks):
    stacks: list[Any] = []
    for block in blocks:
        if stacks and stacks[-1][0].shape == block.shape and stacks[-1][0].dtype == block.dtype:
            stacks[-1].append(block)
        else:
            stacks.append([block])
    return [jnp.stack(stack) for stack in stacks]


def _square(array, dims):
    if array.ndim != dims or array.shape[-1] != array.shape[-2]:
        raise ValueError(
            "`matrix_or_blocks` must be blocks of shape (k, s, s), a list of square blocks, or a "
            f"square matrix with `block_size`: got the shape {array.shape}."
        )
    return array


def _require_definite(stack, finite, first):
    """Raise for the first block that is not Hermitian positive definite, by its number."""
    tolerance = 100 * float(jnp.finfo(stack.dtype).eps)
    for i, block in enumerate(stack):
        gap = np.abs(block - block.conj().T).max(initial=0)
        if gap > tolerance * np.abs(block).max(initial=0):
            fault = f"is not Hermitian: it differs from its conjugate transpose by {gap}"
        elif not finite[i]:
            fault = f"is not positive definite: its smallest eigenvalue is {_smallest(block)}"
        else:
            continue
        raise ValueError(
            f"`matrix_or_blocks`: block {first + i} on this rank, of shape {block.shape}, {fault}. "
            "Pass Hermitian positive definite blocks, for example with a shift on the diagonal."
        )


def _smallest(block):
    return np.linalg.eigvalsh(block)[0] if np.isfinite(block).all() else np.nan


def _like(factor, x, name):
    """Return ``factor`` in the dtype of ``x``; only real to complex of the same width is a cast."""
    same_width = jnp.finfo(factor.dtype).dtype == jnp.finfo(x.dtype).dtype
    into_reals = jnp.iscomplexobj(factor) and not jnp.iscomplexobj(x)
    if not same_width or into_reals:
        raise TypeError(
            f"{name} of {factor.dtype} cannot act on a vector of {x.dtype}: nothing is cast "
            "silently. Convert one of them."
        )
    return factor.astype(x.dtype)

"""Systems from Matrix Market files, with every fault told in a sentence that names the file."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import scipy.io
import scipy.sparse

from distsolve.commands.together import InputError

# Rounding of entries that were computed, or written with 16 digits, and should be equal.
SYMMETRY = 1e-10


class System(NamedTuple):
    """A square matrix and a right-hand side of one dtype, whole."""

    matrix: Any  # (N, N) SciPy CSR array
    b: np.ndarray  # (N,)
    note: str  # what was converted, or empty


def read_system(path: Path, rhs: Path | None, dtype: str | None, hermitian: bool) -> System:
    """Read a matrix and a right-hand side.

    Parameters
    ----------
    path : Path
        Of the matrix, in coordinate or array format, of any field and symmetry.
    rhs : Path or None
        Of one column with as many entries; ``A @ ones`` where there is none.
    dtype : str or None
        What to compute in; double precision by default, complex if an entry is.
    hermitian : bool
        Whether the method needs a Hermitian matrix.

    Returns
    -------
    System

    Raises
    ------
    InputError
        In one sentence that names the file, and the line or the entry where that is known.
    """
    matrix, field = _read(path)
    if not scipy.sparse.issparse(matrix):
        matrix = scipy.sparse.coo_array(matrix)
    rows, columns = matrix.shape
    if rows != columns or not rows:
        raise InputError(
            f"{path}: a system needs a square matrix of at least one row, but this one has {rows} "
            f"rows and {columns} columns."
        )
    if rows >= 2**31:
        raise InputError(f"{path}: {rows} rows are too many, expected fewer than 2**31.")
    _require_finite(path, matrix.data, matrix.coords if hasattr(matrix, "coords") else None)
    b = None if rhs is None else _read_vector(rhs, rows)
    wanted = np.result_type(np.float64, matrix.dtype, *([] if b is None else [b.dtype]))
    if dtype is None:
        dtype = wanted.name
    elif wanted.kind == "c" and np.dtype(dtype).kind != "c":
        culprit = path if matrix.dtype.kind == "c" else rhs
        raise InputError(
            f"{culprit}: it has complex entries, which --dtype {dtype} cannot hold; use "
            "--dtype complex128."
        )
    matrix = scipy.sparse.csr_array(matrix.astype(dtype))
    matrix.sum_duplicates()
    _require_finite(path, matrix.data, None, f" in {dtype}")
    if hermitian:
        _require_hermitian(path, matrix)
    b = matrix @ np.ones(rows, dtype) if b is None else b.astype(dtype)
    _require_finite(rhs or path, b, None, f" in {dtype}")
    note = "" if field in ("real", "complex") else f"{field} entries taken as {dtype}"
    return System(matrix, b, note)


def _read(path):
    """Return what is in a Matrix Market file, and its field."""
    if not path.is_file():
        raise InputError(f"{path}: {'is a folder' if path.is_dir() else 'no such file'}.")
    try:
        field = scipy.io.mminfo(path)[4]
        return scipy.io.mmread(path), field
    except (OSError, ValueError, OverflowError, MemoryError, EOFError) as error:
        text = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise InputError(f"{path}: cannot be read as a Matrix Market file: {text}.") from error


def _read_vector(path, n):
    vector, _ = _read(path)
    vector = vector.toarray() if scipy.sparse.issparse(vector) else vector
    if 1 not in vector.shape or vector.size != n:
        rows, columns = vector.shape
        raise InputError(
            f"{path}: the right-hand side must be one column of {n} entries, as the matrix has {n} "
            f"rows, but this file has {rows} rows and {columns} columns."
        )
    _require_finite(path, vector, None)
    return vector.ravel()


def _require_finite(path, data, coordinates, where=""):
    bad = np.flatnonzero(~np.isfinite(data))
    if bad.size:
        place = f"entry {bad[0] + 1}"
        if coordinates is not None:
            place = "the entry of row {} and column {}".format(
                *(c[bad[0]] + 1 for c in coordinates)
            )
        raise InputError(
            f"{path}: {place} is {np.ravel(data)[bad[0]]}{where}; expected finite numbers."
        )


def _require_hermitian(path, matrix):
    gap = abs(matrix - matrix.conj().T).tocoo()
    if not gap.nnz or gap.data.max() <= SYMMETRY * abs(matrix.data).max():
        return
    worst = np.argmax(gap.data)
    row, column = (int(c[worst]) + 1 for c in gap.coords)
    word = "Hermitian" if matrix.dtype.kind == "c" else "symmetric"
    raise InputError(
        f"{path}: the matrix is not {word}, which this method needs (row {row}, column {column} "
        f"differs from its mirror image by {gap.data[worst]:.3g}); use --method gmres."
    )

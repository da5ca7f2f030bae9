"""Named systems that every rank builds whole from one seed, with the awkward ones among them."""

from typing import Any, NamedTuple

import numpy as np


class System(NamedTuple):
    """A dense Hermitian matrix and a right-hand side, in NumPy."""

    matrix: Any
    b: Any

    @property
    def x(self):
        """The solution, by elimination."""
        return np.linalg.solve(self.matrix, self.b)


def random_spd(n=24, dtype=np.float64, condition=100.0, seed=0):
    """A positive definite matrix with a logarithmic spectrum in a random basis."""
    random = np.random.default_rng(seed)
    entries = random.standard_normal((n, n))
    if np.issubdtype(dtype, np.complexfloating):
        entries = entries + 1j * random.standard_normal((n, n))
    basis, _ = np.linalg.qr(entries)
    matrix = (basis * np.geomspace(1, condition, n)) @ basis.conj().T
    matrix = (matrix + matrix.conj().T) / 2
    b = basis @ random.standard_normal(n)
    return System(matrix.astype(dtype), b.astype(dtype))


class Tree(NamedTuple):
    """A system of two leaves: the operator as a function, the right-hand side, the solution."""

    A: Any
    b: dict
    x: dict


def real_and_complex():
    """A positive definite system of a real leaf, shaped as a matrix, and a complex one."""
    real, complex_ = random_spd(6, seed=4), random_spd(4, np.complex128, seed=5)

    def A(p):
        return {
            "real": (real.matrix @ p["real"].ravel()).reshape(3, 2),
            "complex": complex_.matrix @ p["complex"],
        }

    b = {"real": real.b.reshape(3, 2), "complex": complex_.b}
    return Tree(A, b, {"real": real.x.reshape(3, 2), "complex": complex_.x})


def diagonal(entries, b=None):
    """A diagonal system, of ones unless ``b`` is given."""
    entries = np.asarray(entries, float)
    return System(np.diag(entries), np.ones(len(entries)) if b is None else np.asarray(b, float))


def laplacian(n=30):
    """The second difference with zero boundary values; a delta as right-hand side."""
    matrix = 2 * np.eye(n) - np.eye(n, k=1) - np.eye(n, k=-1)
    return System(matrix, np.eye(n)[0])


def periodic_laplacian(n=16):
    """A singular, consistent system: constants are the null space, ``b`` has mean zero."""
    matrix = 2 * np.eye(n) - np.roll(np.eye(n), 1, 0) - np.roll(np.eye(n), -1, 0)
    b = np.random.default_rng(2).standard_normal(n)
    return System(matrix, b - b.mean())


class Samples(NamedTuple):
    """Rows of a matrix spread unevenly over ranks: ``S = J^T J / N + shift``."""

    pieces: list  # one array of rows for each rank, the second of them empty
    shift: float
    b: Any

    @property
    def total(self):
        """The number of rows on all ranks."""
        return sum(map(len, self.pieces))

    def dense(self):
        """Return the matrix S."""
        rows = np.concatenate(self.pieces)
        return rows.conj().T @ rows / self.total + self.shift * np.eye(rows.shape[1])


def samples(size, unknowns=12, dtype=np.float64, seed=3):
    """Rank r holds 5 + 3 r rows, rank 1 none."""
    random = np.random.default_rng(seed)
    pieces = []
    for rank in range(size):
        shape = (0 if rank == 1 else 5 + 3 * rank, unknowns)
        rows = random.standard_normal(shape)
        if np.issubdtype(dtype, np.complexfloating):
            rows = rows + 1j * random.standard_normal(shape)
        pieces.append(rows.astype(dtype))
    return Samples(pieces, 0.1, random.standard_normal(unknowns).astype(dtype))


class Product:
    """Supports `@` and nothing else."""

    def __init__(self, matrix):
        self.matrix = matrix

    def __matmul__(self, p):
        return self.matrix @ p

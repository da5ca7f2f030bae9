"""Read a molecule from an XYZ file: coordinates in angstrom, energies in hartree."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

BOHR_IN_ANGSTROM = 0.529177210903  # CODATA 2018

# The orbitals of `wavefunction` are of s type, which is why the list ends at beryllium.
ELEMENTS = {"H": 1, "He": 2, "Li": 3, "Be": 4}

NEAREST_NUCLEI = 0.1  # bohr; closer than this is a slip in the file, not a molecule


class MoleculeError(ValueError):
    """The molecule cannot be read or is not one that this example treats."""


@dataclass(frozen=True, eq=False)
class Molecule:
    """Nuclei, fixed in space, and the electrons around them.

    Parameters
    ----------
    symbols : tuple of str
        One chemical symbol per nucleus (A nuclei).
    numbers : (A,) float array
        Nuclear charges in units of the elementary charge.
    positions : (A, 3) float array
        In bohr.
    charge : int
        Total charge of the molecule.
    exact : float or None
        Known ground state energy in hartree, to compare with.
    """

    symbols: tuple[str, ...]
    numbers: np.ndarray
    positions: np.ndarray
    charge: int = 0
    exact: float | None = None

    @property
    def name(self) -> str:
        """The symbols in one word, with the charge, such as ``HHe+1``."""
        counts = {s: self.symbols.count(s) for s in dict.fromkeys(self.symbols)}
        word = "".join(s + (str(n) if n > 1 else "") for s, n in counts.items())
        return word + (f"{self.charge:+d}" if self.charge else "")

    @property
    def n_electrons(self) -> int:
        """Number of electrons."""
        return int(self.numbers.sum()) - self.charge

    @property
    def n_up(self) -> int:
        """Number of spin-up electrons: half of all, the odd one included."""
        return (self.n_electrons + 1) // 2


def read_xyz(path: str | Path, charge: int | None = None) -> Molecule:
    """Read an XYZ file: the number of atoms, a comment, then one ``symbol x y z`` per line.

    Coordinates are in angstrom, as the format has it. The comment may hold the words
    ``charge=INTEGER``, the total charge (0 without it), and ``exact_hartree=VALUE``, the energy
    of this geometry and charge to compare with.

    Parameters
    ----------
    path : str or Path
        The file.
    charge : int, optional
        Total charge instead of the file's. If it differs, the file's exact energy is dropped.

    Returns
    -------
    Molecule
        With positions in bohr.

    Raises
    ------
    MoleculeError
        The message names the file and the line, what was expected there, and the remedy.
    """
    lines = _read_lines(path)
    n_atoms = _parse_count(path, lines)
    _check_length(path, lines, n_atoms)
    file_charge = _parse_word(path, lines[1], "charge", int) or 0
    exact = _parse_word(path, lines[1], "exact_hartree", float)
    if charge is None:
        charge = file_charge
    elif charge != file_charge:
        exact = None
    atoms = [_parse_atom(path, number, lines[number - 1]) for number in range(3, n_atoms + 3)]
    symbols = tuple(symbol for symbol, _ in atoms)
    positions = np.array([xyz for _, xyz in atoms]) / BOHR_IN_ANGSTROM
    _check_distances(path, positions)
    numbers = np.array([ELEMENTS[s] for s in symbols], dtype=float)
    molecule = Molecule(symbols, numbers, positions, charge, exact)
    if molecule.n_electrons < 1:
        raise MoleculeError(
            f"{path}: charge {charge} leaves {molecule.n_electrons} electrons to nuclei of charge "
            f"{int(numbers.sum())}; expected at least 1. Give a smaller --charge."
        )
    _check_orbitals(path, molecule)
    return molecule


def _fault(path, number: int, text: str) -> MoleculeError:
    return MoleculeError(f"{path}, line {number}: {text}")


def _read_lines(path) -> list[str]:
    try:
        # utf-8-sig: editors on Windows put a byte order mark in front of the count.
        return Path(path).read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise MoleculeError(
            f"{path}: cannot be read ({error.strerror}). Give the path of an XYZ file."
        ) from error
    except UnicodeDecodeError as error:
        raise MoleculeError(
            f"{path}: not a text file ({error.reason} at byte {error.start}). "
            "Expected an XYZ file in UTF-8; save it as plain text."
        ) from error


def _parse_count(path, lines: list[str]) -> int:
    first = lines[0].strip() if lines else ""
    # isascii: str.isdigit accepts digits such as a superscript two, which int() refuses.
    if not (first.isascii() and first.isdigit()) or int(first) == 0:
        raise _fault(
            path,
            1,
            f"expected the number of atoms, a positive integer, got {first!r}. "
            "An XYZ file starts with that number alone on its line.",
        )
    return int(first)


def _check_length(path, lines: list[str], n_atoms: int) -> None:
    if len(lines) < 2:
        raise _fault(path, 2, "expected a comment line (it may be empty), got the end of the file.")
    if len(lines) < n_atoms + 2:
        raise _fault(
            path,
            len(lines) + 1,
            f"expected atom {len(lines) - 1} of {n_atoms}, got the end of the file. "
            "Add the missing atoms or correct the number of atoms in line 1.",
        )
    for number, line in enumerate(lines[n_atoms + 2 :], start=n_atoms + 3):
        if line.strip():
            raise _fault(
                path,
                number,
                f"expected the end of the file after {n_atoms} atoms, got {line.strip()!r}. "
                "Remove the line or correct the number of atoms in line 1.",
            )


def _parse_word(path, comment: str, key: str, kind: type) -> int | float | None:
    words = [word for word in comment.split() if word.startswith(key + "=")]
    if not words:
        return None
    text = words[0].removeprefix(key + "=")
    value = _finite(text)
    if value is None or value != kind(value):
        raise _fault(
            path,
            2,
            f"expected {'an integer' if kind is int else 'a finite number'} after '{key}=', "
            f"got {text!r}. Correct it or remove the word.",
        )
    return kind(value)


def _parse_atom(path, number: int, line: str) -> tuple[str, list[float]]:
    words = line.split()
    if len(words) != 4:
        raise _fault(
            path,
            number,
            f"expected 4 words, a symbol and x y z in angstrom, got {len(words)}: "
            f"{line.strip()!r}. Write it like 'H 0.0 0.0 0.74'.",
        )
    symbol = words[0].capitalize()
    if symbol not in ELEMENTS:
        raise _fault(
            path,
            number,
            f"expected one of the elements {', '.join(ELEMENTS)}, got {words[0]!r}. The orbitals "
            "of this example are of s type; heavier atoms need another program.",
        )
    xyz = [_finite(word) for word in words[1:]]
    for axis, word, value in zip("xyz", words[1:], xyz, strict=True):
        if value is None:
            raise _fault(
                path,
                number,
                f"expected a finite number in angstrom for {axis}, got {word!r}. "
                "Write it with a decimal point, like 0.74.",
            )
    return symbol, xyz


def _finite(word: str) -> float | None:
    try:
        value = float(word)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _check_distances(path, positions: np.ndarray) -> None:
    for b in range(len(positions)):
        for a in range(b):
            distance = float(np.linalg.norm(positions[a] - positions[b]))
            if distance < NEAREST_NUCLEI:
                raise _fault(
                    path,
                    b + 3,
                    f"expected an atom at least {NEAREST_NUCLEI * BOHR_IN_ANGSTROM:.3f} angstrom "
                    f"from the atom in line {a + 3}, got {distance * BOHR_IN_ANGSTROM:.3f}. "
                    "Check that the coordinates are in angstrom and the atom is not there twice.",
                )


def _check_orbitals(path, molecule: Molecule) -> None:
    available = sum(1 if z <= 2 else 2 for z in molecule.numbers)
    if molecule.n_up > available:
        raise MoleculeError(
            f"{path}: {molecule.n_up} spin-up electrons, but the atoms carry {available} s "
            "orbitals. Expected no more electrons per spin than orbitals; use a larger --charge."
        )

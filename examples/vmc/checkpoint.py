"""Checkpoints: the arrays and the settings of a run, in one file that is whole at every moment.

The file is NumPy's ``.npz``, without pickled objects. It is written under another name in the same
folder and renamed when all of it is on the disk: whoever opens it, after whatever interruption,
finds the old checkpoint or the new one. No communication.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

FORMAT = "vmc_molecule 1"  # the number grows when the arrays get another meaning
REMEDY = "Name another --checkpoint, or begin anew with --restart, which replaces the file."


class CheckpointError(ValueError):
    """The checkpoint cannot be written or read, or it belongs to another run."""


def write(path: Path, settings: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    """Replace the checkpoint by a new one.

    Parameters
    ----------
    path : Path
        The file. ``.partial`` is added to its name while it is written; what an interrupted run
        has left under that name is overwritten.
    settings : mapping
        What `read` compares: strings, numbers and None.
    arrays : mapping
        Names and arrays of numbers; no name is ``settings``.

    Raises
    ------
    CheckpointError
        The message names the file and the reason; the old checkpoint is untouched.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            np.savez(file, settings=json.dumps(_stamped(settings)), **arrays)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the rename, too
        finally:
            os.close(folder)
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be written ({error.strerror}). Expected a file in a folder with space "
            "where rank 0 may write; make room or name another --checkpoint."
        ) from error


def read(
    path: Path, settings: Mapping[str, Any], expected: Mapping[str, Any]
) -> dict[str, np.ndarray] | None:
    """Read the checkpoint of a run with these settings.

    Parameters
    ----------
    path : Path
        The file.
    settings : mapping
        Of the run that wants to go on, as for `write`.
    expected : mapping
        Names and what has the shape and the dtype that the arrays must have.

    Returns
    -------
    dict or None
        The arrays by name; None where there is no file.

    Raises
    ------
    CheckpointError
        The file cannot be read, is damaged or foreign, or comes from a run with other settings.
        The message names it, what was expected, and the remedy.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
        written = dict(json.loads(str(arrays.pop("settings"))))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}). {REMEDY}") from error
    except Exception as error:  # whatever damaged bytes make of zipfile, NumPy and json
        raise CheckpointError(
            f"{path}: damaged or no checkpoint. Expected one that this program wrote. {REMEDY}"
        ) from error
    for name, wanted in _stamped(settings).items():
        if written.get(name) != wanted:
            raise CheckpointError(
                f"{path}: {name} is {written.get(name)} in the file and {wanted} in this run. "
                f"Expected the settings of the run that wrote it: repeat them. {REMEDY}"
            )
    shapes, wanted = (
        {name: f"{array.dtype}{list(array.shape)}" for name, array in named.items()}
        for named in (arrays, expected)
    )
    for name in shapes | wanted:
        if shapes.get(name) != wanted.get(name):
            raise CheckpointError(
                f"{path}: {name} is {shapes.get(name)} in the file and {wanted.get(name)} in this "
                f"program. Expected a checkpoint of the same version of it. {REMEDY}"
            )
    return arrays


def _stamped(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {"format": FORMAT, **settings}

"""Where a run stands: saved by rank 0 for all ranks, and handed out again when the run goes on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import distsolve.mpi as mpi

from . import checkpoint
from .optimizer import State
from .xyz import MoleculeError

# What each rank holds for its own walkers; all else is replicated.
OF_WALKERS = ("state.walkers.x", "state.walkers.keys", "sums")


class Progress(NamedTuple):
    """All that a run needs to go on as if it had not stopped; replicated but for the walkers."""

    state: State  # its walkers are those of the evaluation once that has begun
    method: np.ndarray  # scalar: place of the solver's method among all methods
    steps: np.ndarray  # scalar: optimisation steps done
    history: np.ndarray  # (all steps, 3) energy, error and variance of each; 0 for those to come
    sums: jax.Array  # (n,) as in `estimate.Chains`
    measured: jax.Array  # scalar, as in `estimate.Chains`


def agreed(function: Callable, *args: Any) -> Any:
    """Call a function on this rank; where it failed on any, end all of them with one message.

    Parameters
    ----------
    function : callable
        It must not communicate.
    *args
        Its arguments.

    Returns
    -------
    Any
        What it returned here.

    Raises
    ------
    SystemExit
        On all ranks, with status 2, after the first of those that raised `MoleculeError` or
        `CheckpointError` has printed its message.

    Notes
    -----
    Communication: one message of a number per rank.
    """
    result, message = None, ""
    try:
        result = function(*args)
    except (MoleculeError, checkpoint.CheckpointError) as error:
        message = str(error)
    failed = np.zeros(mpi.size(), np.int32)
    failed[mpi.rank()] = bool(message)
    failed = np.asarray(mpi.allreduce(failed))
    if failed.any():
        if mpi.rank() == int(np.argmax(failed)):
            print(f"error: {message}", file=sys.stderr, flush=True)
        raise SystemExit(2)
    return result


def save(
    path: Path, settings: Mapping[str, Any], counts: Sequence[int], progress: Progress
) -> None:
    """Write a checkpoint on rank 0, or end all ranks with one message.

    Parameters
    ----------
    path, settings
        As for `checkpoint.write`.
    counts : sequence of int
        Walkers on each rank.
    progress : Progress
        With the walkers of this rank.

    Notes
    -----
    Communication: the walkers are gathered in 3 messages; one of a number per rank follows.
    """
    arrays = {
        name: mpi.gatherv(leaf, counts) if name in OF_WALKERS else leaf
        for name, leaf in _named(_with_keys(jax.random.key_data, progress)).items()
    }
    agreed(_on_rank_0, partial(checkpoint.write, path, settings), arrays)


def resume(
    path: Path, settings: Mapping[str, Any], counts: Sequence[int], fresh: Progress
) -> Progress | None:
    """Read a checkpoint on rank 0 and hand it out, or end all ranks with one message.

    Parameters
    ----------
    path, settings
        As for `checkpoint.read`.
    counts : sequence of int
        Walkers on each rank.
    fresh : Progress
        Of a run that begins; shapes and dtypes are all that is read.

    Returns
    -------
    Progress or None
        With the walkers of this rank, after a line on rank 0 that says where the run stands; None
        on all ranks where rank 0 finds no file.

    Notes
    -----
    Communication: 2 messages of a few numbers, then one for each array.
    """
    like = jax.eval_shape(partial(_with_keys, jax.random.key_data), fresh)
    expected = {
        name: jax.ShapeDtypeStruct((sum(counts), *leaf.shape[1:]), leaf.dtype)
        if name in OF_WALKERS
        else leaf
        for name, leaf in _named(like).items()
    }
    arrays = agreed(_on_rank_0, partial(checkpoint.read, path, settings), expected)
    if not mpi.bcast(np.int32(arrays is not None)):
        return None
    if arrays is None:  # templates of what rank 0 sends
        arrays = {name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in expected.items()}
    leaves = [
        mpi.scatterv(arrays[name], counts) if name in OF_WALKERS else mpi.bcast(arrays[name])
        for name in expected
    ]
    progress = jax.tree.unflatten(jax.tree.structure(like), leaves)
    if mpi.rank() == 0:
        print(
            f"{path}: resumed after {progress.steps} of {len(progress.history)} steps and "
            f"{progress.measured:.0f} measurements per walker",
            flush=True,
        )
    return _with_keys(jax.random.wrap_key_data, progress)


def _on_rank_0(function: Callable, *args: Any) -> Any:
    return function(*args) if mpi.rank() == 0 else None


def _with_keys(convert: Callable, progress: Progress) -> Progress:
    # Random keys are no numbers, which is what files hold.
    walkers = progress.state.walkers
    walkers = walkers._replace(keys=convert(walkers.keys))
    return progress._replace(state=progress.state._replace(walkers=walkers))


def _named(progress: Progress) -> dict[str, Any]:
    """The arrays by their names, such as ``state.walkers.x``, in the order of the tree."""
    leaves = jax.tree.leaves_with_path(progress)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}

"""Errors of the user's input: one sentence from one rank, and the same exit status from all."""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from distsolve import mpi

BAD_INPUT = 2


class InputError(Exception):
    """What is wrong with the user's input, in one sentence."""


def agreed(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function on this rank; where it raised `InputError` on any, all ranks leave.

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
        On all ranks, after the first of those that failed has printed its sentence.

    Communication
    -------------
    One allreduce.
    """
    result, message = None, ""
    try:
        result = function(*args)
    except InputError as error:
        message = str(error)
    failed = np.zeros(mpi.size(), np.int32)
    failed[mpi.rank()] = bool(message)
    failed = np.asarray(mpi.allreduce(failed))
    if failed.any():
        if mpi.rank() == int(np.argmax(failed)):
            print(f"error: {message}", file=sys.stderr, flush=True)
        raise SystemExit(BAD_INPUT)
    return result


def agreed_on_rank_0(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function as `agreed`, but on rank 0 only; the others get None."""
    return agreed(function if mpi.rank() == 0 else lambda *_: None, *args)

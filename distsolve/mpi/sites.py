"""Where in the user's program a call is: a number that is the same on every rank and in every run.

The number is made of the file's name and the line, not of the folder, so that ranks which hold the
program in different places agree, and compiled programs can be cached. It travels as an attribute
of the call; the text that it stands for stays in this process.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
from pathlib import Path
from types import FrameType

from distsolve.mpi._jaxcompat import is_user_filename
from distsolve.mpi.native import recorder

_PACKAGE = str(Path(__file__).parents[1]) + os.sep
UNKNOWN = 0


def caller() -> int:
    """The line that the running thread is at: the innermost one outside this package and JAX.

    Inside a solver it is the line that called the solver, or that of the user's operator.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _is_users(frame.f_code.co_filename):
            return _number_of(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return UNKNOWN


@functools.cache
def _is_users(file: str) -> bool:
    return is_user_filename(file) and not file.startswith(_PACKAGE)


@functools.cache
def _number_of(file: str, line: int) -> int:
    """The number of a line, whose text is kept for reports."""
    name = f"{os.path.basename(file)}:{line}"
    number = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest()) or 1
    recorder.add_site(number, f"{file}:{line}".encode())
    return number

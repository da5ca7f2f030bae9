"""The command line: ``python -m distsolve COMMAND``, alone or under ``mpiexec``."""

import argparse
import contextlib
import sys
from typing import Any

from distsolve import mpi
from distsolve.commands import bench, doctor, predict, solve

# Each has `add(subparsers)`, which sets `run`, a function of the options that returns the status.
COMMANDS = (bench, doctor, predict, solve)


class _Parser(argparse.ArgumentParser):
    """Takes full names of options only: a new one could make a short form mean another."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)


def main(arguments: list[str] | None = None) -> int:
    """Run a command on all ranks.

    Parameters
    ----------
    arguments : list of str, optional
        Instead of the command line.

    Returns
    -------
    int
        The exit status, the same on all ranks.
    """
    parser = _Parser(prog="python -m distsolve", description="Tools of distsolve.")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add(subparsers)
    with contextlib.ExitStack() as stack:
        if not _is_first():  # all ranks read the same line: one of them explains what is wrong
            stack.enter_context(contextlib.redirect_stdout(None))
            stack.enter_context(contextlib.redirect_stderr(None))
        options, unknown = parser.parse_known_args(arguments)
        if unknown:
            # Not the parser's own message, which shows nothing of what the command knows.
            subparsers.choices[options.command].error(f"unknown: {' '.join(unknown)}")
    return options.run(options)


def _is_first():
    """Whether this is rank 0. Where MPI cannot be used the command says why, on each process."""
    try:
        return mpi.rank() == 0
    except (ImportError, RuntimeError, ValueError):
        return True


if __name__ == "__main__":
    sys.exit(main())

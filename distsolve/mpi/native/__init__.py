"""Compiled modules: the handlers, the chunk engine, and the table of the loaded MPI library."""

try:
    from distsolve.mpi.native import abi as abi
except ImportError as error:
    raise ImportError(
        f"The compiled modules of distsolve are not in {__path__[0]}. This is a source tree that "
        "hides the installed package: run from another directory, or build the tree with "
        "`pip install -e .`"
    ) from error

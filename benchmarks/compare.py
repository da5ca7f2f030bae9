"""The rows in which one peer competes, of both comparisons, with all contenders of these rows.

usage: python benchmarks/compare.py PEER [--quick] [--json FILE] ...
"""

import argparse
import sys

import compare_primitives
import compare_solvers
from table import compare

PROGRAMS = {"primitives": compare_primitives, "solvers": compare_solvers}
PEERS = ("mpi4jax", "shard-map", "c", "mpi4py", "petsc", "jax-scipy", "lineax")


def chosen(peer):
    """The rows of a peer, by program and number, and all measurements."""
    rows, measurements = {}, {}
    for name, program in PROGRAMS.items():
        found = program.measurements()
        measurements |= found
        for number, row in program.ROWS.items():
            if any(contender.peer == peer for contender in found[row.measurement].values()):
                rows[f"{name} {number}"] = row
    return rows, measurements


if __name__ == "__main__":
    parser = argparse.ArgumentParser(usage=__doc__.splitlines()[2][7:], add_help=False)
    parser.add_argument("peer", choices=PEERS)
    options, words = parser.parse_known_args()
    sys.exit(compare(__doc__.splitlines()[0], *chosen(options.peer), words))

"""Several runs of `python -m distsolve bench` in one job, with their results in one folder."""

import argparse
import json
import sys

from distsolve import mpi
from distsolve.__main__ import main

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--runs", required=True, help="arguments of each run, separated by commas")
parser.add_argument("--output", required=True, help="folder")
options = parser.parse_args()
for run in options.runs.split(","):
    status = main(["bench", *run.split(), "--quiet", "--output", options.output])
    if status:
        sys.exit(status)
if mpi.rank() == 0:
    print(json.dumps({"folder": options.output}))

"""The comparisons run, judge, and say by name what they could not measure."""

import json
import subprocess
import sys

import pytest
from launch import ROOT, job_environment, mpi_name

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(mpi_name() != "mpich", reason="compares under the mpich wheel"),
]

# A contender whose package is nowhere, beside one that runs.
PROGRAM = """
import json, sys
from compare import PEERS, chosen
from compare_solvers import ROWS, dense
from launch import launch
from table import Contender, compare
json.dump({peer: list(chosen(peer)[0]) for peer in PEERS}, open("rows.json", "w"))
for case in ("loop", "single", "eager"):
    launch("kernels/numpy_allreduce.py", np=2, case=case, elements=8, iterations=3)
absent = Contender("kernels/dense_s.py", "no_such_package", {})
contenders = {"distsolve": dense("distsolve"), "rival": absent}
sys.exit(compare("test", {10: ROWS[10]}, {"dense": contenders}))
"""


def test_quick_run(tmp_path):
    samples, table = tmp_path / "samples.json", tmp_path / "table.md"
    command = [sys.executable, "-c", PROGRAM, "--quick"]
    command += ["--json", str(samples), "--markdown", str(table)]
    env = job_environment("mpich", 1) | {"PYTHONPATH": str(ROOT / "benchmarks")}
    done = subprocess.run(
        command, capture_output=True, text=True, env=env, cwd=tmp_path, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads(samples.read_text())["rows"]
    # Two ranks, one triangle with its diagonal of a 256 x 256 matrix.
    assert row["medians"]["distsolve"] == (256 + 1) / (2 * 256)
    assert row["medians"]["rival"] == "not installed"
    assert row["targets"][0]["reached"] == "quick run"
    assert "rival: not installed" in table.read_text()
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert all(rows.values())
    assert rows["petsc"] == ["solvers 6"]
    assert rows["shard-map"] == ["primitives 7"]

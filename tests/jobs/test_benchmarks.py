"""The comparisons run, judge, and say by name what they could not measure."""

import json
import subprocess
import sys
from xml.etree import ElementTree

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


def write_page(folder):
    program = ROOT / "benchmarks/write_performance.py"
    command = [sys.executable, program, "--folder", folder, "--page", folder / "page.md"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_the_page_is_written_from_results(tmp_path):
    medians = {"distsolve": 2e-6, "rival": 3e-6, "C": "not installed"}
    row = {"row": 1, "title": "a call", "ours": "distsolve", "figure": "seconds"}
    row |= {"medians": medians, "texts": {"distsolve": "2 us", "rival": "3 us"}}
    row["targets"] = [{"target": "<= rival", "value": "0.667", "reached": "yes"}]
    machine = {"date": "2020-02-03", "cores": 2, "processor": "Z80", "system": "CP/M"}
    machine |= {"memory_gib": 64, "python": "3", "packages": {"distsolve": "7.8"}}
    samples = {
        "call": {
            "rival": {"samples": [{"other_load": 0.25, "mpi": "MPI 9"}]},
            "C": {"missing": "failed"},
        }
    }
    results = {"command": "python benchmarks/x.py --rows 1", "quick": False, "ranks": 2}
    results |= {"repeats": 5, "environment": {"THREADS": "1"}, "machine": machine}
    results |= {"rows": [row], "samples": samples}
    (tmp_path / "primitives.json").write_text(json.dumps(results))
    assert "solvers.json: not there" in write_page(tmp_path).stderr
    (tmp_path / "solvers.json").write_text(json.dumps(results | {"quick": True}))
    assert "solvers.json: a quick run" in write_page(tmp_path).stderr
    assert not (tmp_path / "page.md").exists()
    (tmp_path / "solvers.json").write_text(json.dumps(results))
    assert write_page(tmp_path).returncode == 0
    page = (tmp_path / "page.md").read_text()
    for text in (
        "`python benchmarks/x.py --rows 1`",
        "2 cores of Z80",
        "distsolve 7.8",
        "- MPI 9\n",
    ):
        assert page.count(text) == 2
    assert "25.0% of the cores" in page
    assert "| 1. a call | distsolve: 2 us<br>rival: 3 us | <= rival | 0.667 | yes |" in page
    assert "(primitives.svg)" in page
    drawn = "".join(ElementTree.parse(tmp_path / "primitives.svg").getroot().itertext())
    assert "1. a call" in drawn
    assert "rival" in drawn

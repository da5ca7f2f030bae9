"""The comparisons run, judge, and say by name what they could not measure."""

import json
import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest
from launch import ROOT, job_environment, mpi_name

from distsolve.commands.bench import report
from distsolve.commands.bench.points import Point

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
    env = job_environment("mpich") | {"PYTHONPATH": str(ROOT / "benchmarks")}
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


def write_runs(folder):
    """A solve on one rank, and one on two that is 1.6 times as fast."""
    for ranks, seconds in ((1, 1.6), (2, 1.0)):
        times = dict.fromkeys(("seconds", "lower", "upper", "minimum", "average"), seconds)
        times |= {"compute": seconds, "wait": 0.0, "transfer": 0.0}
        counted = {"messages": 2.0, "sent": 16.0, "peak": 0}
        key = ("poisson", "strong", 64, "classic", 0, "tol 1", ranks, 7, 3)
        conditions = {
            "date": f"2020-02-0{ranks}T04:05:06.789+00:00",
            "command": "bin/python -m distsolve bench poisson",
            "ranks": ranks,
            "nodes": [{"cpu": "Z80", "ranks": [0], "cores": [0], "threads": {}}],
            "device": "cpu",
            "mpi": {"library": "MPI 7, of a vendor", "chunk": 4096},
            "versions": {"jax": "0.10", "distsolve": "7.8"},
            "environment": {},
        }
        report.write(folder, report.Run(conditions, [Point(*key, **times, **counted)]))


def write_page(folder, *more):
    program = ROOT / "benchmarks/write_performance.py"
    command = [sys.executable, program, "--folder", folder, "--page", folder / "page.md", *more]
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
    assert "runs.json: not there" in write_page(tmp_path).stderr
    runs = tmp_path / "runs"
    runs.mkdir()
    assert "runs: no runs" in write_page(tmp_path, "--runs", runs).stderr
    write_runs(runs)
    rows = [["sum, 8 bytes", "3", "5 ms", "4 ms", "+25.0%"]]
    columns = ["held out", "ranks", "predicted", "measured", "error"]
    told = {"rows": rows, "columns": columns, "worst": 0.25, "limit": 0.2}
    (tmp_path / "prediction.json").write_text(json.dumps(results | told))
    done = write_page(tmp_path, "--runs", runs)
    assert done.returncode == 0, done.stderr
    assert "a node" not in (tmp_path / "runs.json").read_text()
    page = (tmp_path / "page.md").read_text()
    for text, times in (
        ("`python benchmarks/x.py --rows 1`", 3),
        ("2 cores of Z80", 3),
        ("distsolve 7.8", 4),
        ("- MPI 9\n", 2),
    ):
        assert page.count(text) == times
    assert "25.0% of the cores" in page
    assert "| 1. a call | distsolve: 2 us<br>rival: 3 us | <= rival | 0.667 | yes |" in page
    assert "(primitives.svg)" in page
    assert "| sum, 8 bytes | 3 | 5 ms | 4 ms | +25.0% |" in page
    assert "The worst error is 25.0%; at most 20% is the aim: not reached." in page
    assert "By `python -m distsolve bench poisson`:" in page
    assert re.search(r"^ +2 +80.0% +7 ", page, re.MULTILINE)  # ranks, efficiency, iterations
    assert "(poisson-strong.svg)" in page
    drawn = "".join(ElementTree.parse(tmp_path / "primitives.svg").getroot().itertext())
    assert "1. a call" in drawn
    assert "rival" in drawn

"""`python -m distsolve bench`: what it measures, what it keeps, and how runs come together."""

import csv
import json
import math
import subprocess
import sys
from argparse import Namespace
from dataclasses import asdict, replace
from pathlib import Path

import jax
import numpy as np
import pytest
import scipy.sparse
from launch import job_environment, run_ranks

from distsolve.commands import bench
from distsolve.commands.bench import cases, memory, points, report
from distsolve.commands.together import InputError

pytestmark = pytest.mark.once
EDGE, SAMPLES, PARAMETERS, REPEATS = 20, 31, 12, 3
CONDITIONS = {
    "date": "2020-02-03T04:05:06.789+00:00",
    "ranks": 1,
    "nodes": [{"cpu": "Z80", "ranks": [0], "cores": [0], "threads": {"XLA": 1}}],
    "device": "cpu",
    "mpi": {"library": "MPI 7", "chunk": 4096},
    "versions": {"jax": "0.10"},
    "environment": {},
}
# The last run is interrupted on one rank, once its first size is done.
PROGRAM = f"""
import os, signal, sys
import numpy as np
from distsolve import mpi
from distsolve.__main__ import main
from distsolve.commands.bench import cases, report

def bench(*args):
    try:
        return main(["bench", *args, "--output", sys.argv[1], "--repeats", "{REPEATS}"])
    except SystemExit as end:
        return end.code

assert bench("cg", "--sizes", "{EDGE}") == 0
assert bench("poisson", "--sizes", "{EDGE}", "--weak", "--method", "pipelined", "--quiet") == 0
assert bench("sr", "--sizes", "{SAMPLES}", "--parameters", "{PARAMETERS}") == 0
assert bench("sr", "--sizes", "{SAMPLES}", "--parameters", "{PARAMETERS}", "--method", "dense") == 0
assert bench("poisson", "--sizes", "1") == 2
if mpi.rank() == 0:
    data = {{
        "plane": cases._normal(0, {EDGE}, {EDGE}),
        "box": cases._normal(0, 2 * {EDGE}, {EDGE}, {EDGE}),
        "J": cases._normal(0, {SAMPLES}, {PARAMETERS}),
        "energies": cases._normal(0, {SAMPLES}, stream=1),
    }}
    np.savez(sys.argv[1] + "/data.npz", **data)

def write(*args, write=report.write):
    write(*args)
    os.kill(os.getpid(), signal.SIGINT)

report.write = write
assert bench("allreduce", "--sizes", "4", "4000", "8") == 130
"""


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """What a job of two ranks leaves: its folder and its output."""
    folder = tmp_path_factory.mktemp("bench") / "made" / "anew"
    return folder, run_ranks(PROGRAM, np=2, timeout=150, args=[str(folder)]).check()


def conjugate_gradients(A, b, tol):
    """Count the steps of the textbook's method."""
    r = p = b
    steps, rr = 0, b @ b
    while rr > tol**2 * (b @ b):
        Ap = A @ p
        r = r - rr / (p @ Ap) * Ap
        rr, before = r @ r, rr
        p = r + rr / before * p
        steps += 1
    return steps


def laplacian(*shape, shift=0.0):
    """The second differences along each axis."""
    A = shift * scipy.sparse.eye_array(int(np.prod(shape)))
    for axis, n in enumerate(shape):
        D = scipy.sparse.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(n, n))
        others = [scipy.sparse.eye_array(m) for m in shape]
        others[axis] = D
        whole = others[0]
        for factor in others[1:]:
            whole = scipy.sparse.kron(whole, factor)
        A = A + whole
    return A.tocsr()


def expected_steps(data):
    plane, box, J, energies = (data[name] for name in ("plane", "box", "J", "energies"))
    J = J * np.logspace(0, -cases.SR_RANGE, PARAMETERS)
    J = J - J.mean(0)
    S = J.T @ J / SAMPLES + cases.SR_SHIFT * np.eye(PARAMETERS)
    return {
        "cg": conjugate_gradients(laplacian(*plane.shape, shift=cases.SHIFT), plane.ravel(), 1e-8),
        "poisson": conjugate_gradients(laplacian(*box.shape), box.ravel(), 1e-8),
        "sr": conjugate_gradients(S, J.T @ (energies - energies.mean()) / SAMPLES, 1e-6),
    }


def test_two_ranks(measured):
    folder, done = measured
    every = [point for run in report.read(folder) for point in run.points]
    found = {point.case: point for point in every}
    iterative, dense = (point for point in every if point.case == "sr")
    assert list(found) == ["cg", "poisson", "sr", "allreduce"]
    for point in every:
        assert (point.ranks, point.repeats) == (2, REPEATS)
        assert 0 < point.lower <= point.seconds <= point.upper
        assert 0 < point.minimum <= point.average <= point.seconds
        assert point.wait > 0
        assert point.transfer > 0
        assert point.compute + point.wait + point.transfer == pytest.approx(point.seconds)
    assert found["poisson"].key == ("poisson", "weak", EDGE, "pipelined", 0, "float64, tol 1e-08")
    assert iterative.key == ("sr", "strong", SAMPLES, "cg", PARAMETERS, "float64, tol 1e-06")
    assert dense.key == ("sr", "strong", SAMPLES, "dense", PARAMETERS, "float64")
    assert dense.steps == 1
    found["sr"] = iterative
    for name, steps in expected_steps(np.load(folder / "data.npz")).items():
        assert abs(found[name].steps - steps) <= 1
    assert done.stdout.count("distsolve bench: 2 ranks on 1 node") == 5
    assert f"{EDGE} {found['cg'].steps:>10} {1e3 * found['cg'].seconds:10.4f} " in done.stdout
    assert "repeats" in done.stderr  # the progress bar
    assert "Traceback" not in done.stderr
    (fault,) = (line for line in done.stderr.splitlines() if line.startswith("error: "))
    assert fault.startswith(
        "error: --sizes: size 1 of poisson: expected at least 2, one for each rank"
    )


def test_messages_and_bytes_of_a_step(measured):
    folder, _ = measured
    every = [point for run in report.read(folder) for point in run.points]
    found = {(point.case, point.method): point for point in every}
    call, sr = found["allreduce", ""], found["sr", "cg"]
    assert (call.messages, call.sent) == (1, 4)
    # One for each product with S, of two vectors, and one for the force.
    assert sr.messages == pytest.approx(1 + 1 / sr.steps)
    assert 8 * PARAMETERS < sr.sent < 3 * 8 * PARAMETERS
    # A plane to either side and one reduction; the start and the rounding of averages besides.
    halo = found["poisson", "pipelined"]
    assert 3 <= halo.messages < 3.5
    assert 2 * 8 * EDGE**2 <= halo.sent < 2.5 * 8 * EDGE**2


def test_peak_growth():
    pieces = [np.ones(2**10) for _ in range(2**12)]
    above = pieces.pop()  # so that malloc keeps the others, 32 MiB, once they are freed
    pieces.clear()
    with memory.PeakGrowth() as growth:
        pieces += [np.ones(2**10) for _ in range(2**12)]
    assert above.all()
    assert growth.nbytes == pytest.approx(2**25, rel=0.05)  # Linux counts in batches of pages
    with memory.PeakGrowth() as growth:
        pass
    assert growth.nbytes < 2**20


def test_ctrl_c_on_one_rank_keeps_what_is_done(measured):
    folder, done = measured
    (run,) = (run for run in report.read(folder) if run.points[0].case == "allreduce")
    assert [point.size for point in run.points] == [4]
    assert "stopped after 1 of 3 sizes" in done.stderr
    assert (folder / "allreduce.png").exists()


def test_files_of_a_run(measured):
    folder, _ = measured
    path = min(folder.glob("bench-2ranks-*.json"))
    content = json.loads(path.read_text())
    conditions = content["conditions"]
    assert conditions["ranks"] == len(conditions["nodes"][0]["ranks"]) == 2
    assert conditions["nodes"][0]["cpu"]
    assert conditions["versions"]["jax"] == jax.__version__
    assert sys.executable in conditions["command"]
    (row,) = csv.DictReader(path.with_suffix(".csv").open())
    assert row == {name: str(value) for name, value in content["points"][0].items()}
    assert not list(folder.glob("*.part"))


def point(ranks, seconds, scaling="strong", case="cg", steps=40, size=64):
    parts = 0.5 * seconds, 0.125 * seconds, 0.375 * seconds
    around = 0.875 * seconds, 1.5 * seconds
    method = "" if case == "allreduce" else "classic"
    return points.Point(
        *(case, scaling, size, method, 0, "x", ranks, steps, 5, seconds, *around),
        *(seconds, seconds, *parts, 2.0, 16.0, 4096),
    )


def save(folder, date, *measured, **changed):
    conditions = CONDITIONS | changed | {"date": f"2020-02-03T04:05:0{date}.000+00:00"}
    report.write(folder, report.Run(conditions | {"ranks": measured[0].ranks}, list(measured)))


def test_merging_needs_no_mpi_and_computes_efficiency(tmp_path):
    save(tmp_path, 1, point(2, 0.008), point(2, 0.5, "weak"), point(2, 3e-6, "", "allreduce"))
    save(tmp_path, 2, point(8, 0.004, steps=41), point(8, 0.625, "weak"))
    save(tmp_path, 3, point(8, 7e-6, "", "allreduce"), point(8, 0.25, size=65))
    save(tmp_path, 0, point(8, 99.0), versions={"jax": "0.9"})  # older than the other on 8 ranks
    env = job_environment("mpich") | {"MPI4PY_LIBMPI": "/absent", "MPI4PY_MPIABI": "mpich"}
    command = [sys.executable, "-m", "distsolve", "bench", "--merge", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    quarters = "50%", "12%", "38%"
    assert ["2", "100.0%", "40", "8.0000", "7-12", *quarters] in rows
    assert ["8", "50.0%", "41", "4.0000", "3.5-6", *quarters] in rows
    assert ["8", "80.0%", "40", "625.0000", "546.9-937.5", *quarters] in rows
    assert ["64", "3.00", "7.00"] in rows
    assert "edge 65" not in done.stdout  # on 8 ranks only
    assert "WARN  the runs differ in jax: 0.9; 0.10" in done.stdout
    for name in ("cg-strong", "cg-weak", "allreduce"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    merged = list(csv.DictReader((tmp_path / "scaling.csv").open()))
    assert len(merged) == 7
    assert all(row["seconds"] != "99.0" for row in merged)


def test_pictures_have_the_ideal_line_and_iterations():
    from matplotlib.figure import Figure

    from distsolve.commands.bench import plots

    figure = Figure()
    plots._scaling(figure, points.series([point(8, 0.004, steps=41), point(2, 0.008)]))
    left, right = figure.axes
    drawn = [list(line.get_ydata()) for line in left.lines]
    assert [0.008, 0.004] in drawn
    assert [0.008, 0.002] in drawn
    assert [text.get_text() for text in left.texts] == ["40", "41"]
    assert [1.0, 0.5] in [list(line.get_ydata()) for line in right.lines]
    assert (left.get_xscale(), left.get_yscale()) == ("log", "log")


def test_without_matplotlib_the_table_is_kept(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    save(tmp_path, 1, point(2, 0.008))
    assert report.merge(tmp_path)[-1].endswith("pip install 'distsolve[examples]'")
    assert (tmp_path / "scaling.csv").exists()


BAD = {
    "--sizes 4 8: sizes of what? Name one of allreduce": {"case": None, "sizes": [4, 8]},
    "--sizes: size 6 of allreduce: expected a multiple of 4": {
        "case": "allreduce",
        "sizes": [4, 6],
    },
    "--sizes: size 3 of sr: expected at least 4, one for each": {"case": "sr", "sizes": [3]},
    "--method kernel: expected a method of cg: classic, single_reduction": {"method": "kernel"},
    "--method cg: expected a method of allreduce: it has none": {
        "case": "allreduce",
        "method": "cg",
    },
    "--weak: of solves; allreduce": {"case": "allreduce", "scaling": "weak"},
    "--sizes: size 30000 of cg: a matrix of 3600000000 rows": {
        "sizes": [30000],
        "scaling": "weak",
    },
    "--parameters 10: cg has none, so leave it out": {"parameters": 10},
}


@pytest.mark.parametrize("sentence", BAD)
def test_bad_input(sentence):
    options = {
        "case": "cg",
        "scaling": "strong",
        "output": None,
        "method": None,
        "sizes": None,
        "parameters": None,
    } | BAD[sentence]
    with pytest.raises(InputError) as caught:
        bench._check(Namespace(**options), 4)
    assert str(caught.value).startswith(sentence)


def test_default_sizes_that_do_not_fit_are_left_out():
    options = Namespace(case=None, sizes=None, scaling="strong", method=None, parameters=None)
    plan, omitted = bench._plan(options, 100)
    assert "poisson" not in dict(plan)
    assert {"allreduce", "cg", "sr"} == set(dict(plan))
    assert [text.partition(":")[0] for text in omitted] == ["size 64 of poisson"]
    alone = Namespace(**vars(options) | {"case": "poisson", "output": None})
    with pytest.raises(InputError, match="size 64 of poisson: expected at least 100"):
        bench._check(alone, 100)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{", "Expecting property name"),
        ('{"format": "other"}', "its format is 'other'"),
        (f'{{"format": "{report.FORMAT}"}}', "it has no 'conditions'"),
    ],
)
def test_files_that_are_no_results(tmp_path, content, sentence):
    refused(tmp_path, content, sentence)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"case": "lu"}, "the unknown benchmark 'lu'"),
        ({"method": "jacobi"}, "method of cg is 'jacobi'"),
        ({"method": ["classic"]}, "method is ['classic'], expected str"),
        ({"scaling": ""}, "scaling of cg is ''"),
        ({"parameters": 3}, "parameters of cg is 3"),
        ({"case": "sr", "method": "kernel"}, "parameters of sr is 0"),
        ({"seconds": math.nan}, "seconds is nan"),
        ({"seconds": math.inf}, "seconds is inf"),
        ({"seconds": 0}, "seconds is 0"),
        ({"wait": -1.0}, "wait is -1.0"),
        ({"upper": "1"}, "upper is '1', expected float"),
        ({"ranks": 2.5}, "ranks is 2.5, expected int"),
        ({"ranks": 10**30}, "ranks is 1000"),
        ({"steps": None}, "steps is None, expected int"),
        ({"more": 1}, "unexpected keyword argument 'more'"),
    ],
)
def test_points_that_are_no_results(tmp_path, changed, sentence):
    content = {"conditions": CONDITIONS, "points": [asdict(point(1, 1.0)) | changed]}
    refused(tmp_path, json.dumps({"format": report.FORMAT} | content), sentence)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        (None, "conditions is None, expected dict"),
        ({"date": 7}, "date is 7, expected str"),
        ({"nodes": []}, "nodes is empty"),
        ({"nodes": [CONDITIONS["nodes"][0] | {"cores": []}]}, "cores is empty"),
        ({"nodes": [{"ranks": [0]}]}, "an entry of nodes has no 'cores'"),
        ({"mpi": {"library": "MPICH", "chunk": 0}}, "chunk is 0"),
        ({"versions": "new"}, "versions is 'new', expected dict"),
    ],
)
def test_conditions_that_are_no_results(tmp_path, changed, sentence):
    conditions = changed and CONDITIONS | changed
    content = {"conditions": conditions, "points": [asdict(point(1, 1.0))]}
    refused(tmp_path, json.dumps({"format": report.FORMAT} | content), sentence)


def refused(tmp_path, content, sentence):
    path = tmp_path / "bench-1.json"
    path.write_text(content)
    given = {"case": "cg", "sizes": [4], "scaling": "weak", "method": None, "parameters": None}
    options = Namespace(**given, output=tmp_path)
    with pytest.raises(InputError, match="Move it away") as caught:
        bench._check(options, 1)
    assert str(caught.value).startswith(f"{path}: cannot be read")
    assert sentence in str(caught.value)


def test_folders_that_cannot_be_used(tmp_path, capsys):
    (tmp_path / "file").touch()
    given = {"case": "cg", "sizes": [4], "scaling": "weak", "method": None, "parameters": None}
    options = Namespace(**given, output=tmp_path / "file")
    with pytest.raises(InputError, match=r"^--output .*file: expected a folder"):
        bench._check(options, 1)
    options.output = Path("/proc/self")  # where even root writes nothing
    with pytest.raises(InputError, match=r"^--output /proc/self: expected a folder that can be"):
        bench._check(options, 1)
    for changed, sentence in (
        ({}, "there are no results"),
        ({"case": "cg"}, "measures nothing, and takes no benchmark"),
        ({"method": "pipelined"}, "measures nothing"),
        ({"parameters": 7}, "measures nothing"),
        ({"merge": tmp_path / "absent"}, "no such folder"),
    ):
        names = ("case", "sizes", "output", "method", "parameters")
        given = dict.fromkeys(names) | {"merge": tmp_path} | changed
        assert bench.run(Namespace(**given)) == 2
        assert f"error: --merge {given['merge']}: {sentence}" in capsys.readouterr().err


def test_of_two_runs_the_later_counts():
    first, second = point(2, 1.0), point(2, 2.0)
    assert points.series([first, second]) == {first.key: [second]}
    other = replace(second, settings="y")
    assert len(points.series([first, other])) == 2

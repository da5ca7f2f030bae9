"""`python -m distsolve predict`: it finds the machine that made the figures, and what follows."""

import dataclasses
import itertools
import json

import numpy as np
import pytest

from distsolve.__main__ import main
from distsolve.commands.bench import report
from distsolve.commands.bench.points import Point
from distsolve.commands.predict import fitting
from distsolve.commands.predict.crossings import METHODS, Problem, axis, crossings
from distsolve.linalg.machine import Machine, largest_of, stages

pytestmark = pytest.mark.once
KIB, MIB = 2**10, 2**20
TRUTH = Machine(
    latency=3e-6,
    bandwidth=2e9,
    memory_bandwidth=7e9,
    flops=4e10,
    factor_flops=1e10,
    overhead=1e-6,
    skew=0.2,
    measured=True,
)


def point(case, ranks, size, method="", parameters=0, **times):
    times = {"seconds": 1.0, "compute": 0.0, "wait": 0.0} | times
    spread = dict.fromkeys(("lower", "upper", "minimum", "average"), times["seconds"])
    counted = {"transfer": 0.0, "messages": 1.0, "sent": 1.0, "peak": 1}
    scaling = "strong" if case == "sr" else ""
    steps = 10 if method == "cg" else 1
    key = (case, scaling, size, method, parameters, "text", ranks, steps, 3)
    return Point(*key, **spread, **times, **counted)


def run(ranks, cores, points):
    node = {"ranks": list(range(ranks)), "cores": list(range(cores)), "cpu": "Z80", "threads": {}}
    return report.Run(
        {
            "date": "2020-02-03T04:05:06.789+00:00",
            "ranks": ranks,
            "nodes": [node],
            "device": "cpu",
            "versions": {},
            "environment": {},
            "mpi": {"library": "MPI 7", "chunk": 4 * MIB},
        },
        points,
    )


def measured(ranks, truth=TRUTH, cores=4):
    """Points as this machine would give them, worked out apart from the model."""
    crowd, points = max(1, ranks / cores), []
    for size in (8, 64 * KIB, 3 * MIB, 11 * MIB):
        calls = -(-size // (4 * MIB))
        seconds = calls * (truth.overhead + np.ceil(np.log2(ranks)) * truth.latency)
        seconds += 2 * (ranks - 1) / ranks * size / truth.bandwidth
        points.append(point("allreduce", ranks, size, seconds=seconds))
    N, P = 4096, 300
    n = -(-N // ranks)
    read = crowd * 8 * P * (n + 8) / truth.memory_bandwidth
    times = {"seconds": 2 * read, "compute": read, "wait": truth.skew * read * largest_of(ranks)}
    points.append(point("sr", ranks, N, "cg", P, **times))
    dense = 2 * crowd * (2 * n * P**2 / truth.flops + P**3 / 3 / truth.factor_flops)
    kernel = 2 * crowd * (2 * N**2 * P / ranks / truth.flops + N**3 / 3 / truth.factor_flops)
    for method, compute in (("dense", dense), ("kernel", kernel)):
        times = {"compute": compute, "wait": truth.skew * compute * largest_of(ranks)}
        points.append(point("sr", ranks, N, method, P, seconds=1.0, **times))
    return run(ranks, cores, points)


def test_the_machine_that_made_the_figures_is_found():
    found = fitting.fit(fitting.samples(map(measured, (2, 4, 8))), Machine())
    assert found.assumed == []
    for field in dataclasses.fields(Machine):
        truth, fitted = getattr(TRUTH, field.name), getattr(found.machine, field.name)
        assert fitted == pytest.approx(truth, rel=1e-6), field.name
    for residual in found.residuals:
        if residual.sample.point.case == "allreduce":
            assert abs(residual.error) < 1e-9


def test_what_no_point_tells_of_is_assumed_and_said():
    (only,) = (measured(2, dataclasses.replace(TRUTH, overhead=0.0)),)
    sums = [p for p in only.points if p.case == "allreduce"]
    found = fitting.fit(fitting.samples([only._replace(points=sums)]), Machine())
    assert found.assumed == ["overhead", "memory_bandwidth", "flops", "factor_flops", "skew"]
    assert (found.machine.overhead, found.machine.flops) == (0.0, Machine.flops)
    assert found.machine.latency == pytest.approx(TRUTH.latency)
    found = fitting.fit(fitting.samples([only._replace(points=sums[:1])]), Machine())
    assert "bandwidth" in found.assumed
    assert found.machine.latency == pytest.approx(sums[0].seconds)


@pytest.mark.parametrize("chunk", [64 * KIB, 4 * MIB])
def test_the_chunk_is_that_of_the_run(chunk):
    measured_run = measured(2)
    measured_run.conditions["mpi"]["chunk"] = chunk
    assert {sample.chunk for sample in fitting.samples([measured_run])} == {chunk}


def test_points_that_tell_nothing_are_left_out():
    nothing = dataclasses.replace(point("sr", 2, 1, "cg", 3), steps=0)
    unseen = [point("sr", 2, 8, method, 3) for method in METHODS]  # no time to compute
    found = fitting.fit(fitting.samples([run(2, 4, [nothing, *unseen])]), Machine())
    assert len(found.residuals) == 3
    assert found.assumed == list(fitting.NAMES)


def test_of_two_runs_the_later_counts():
    slow = measured(2, dataclasses.replace(TRUTH, latency=1.0))
    assert fitting.samples([slow, measured(2)]) == fitting.samples([measured(2)])


def test_the_expected_largest_of_normal_numbers():
    rng = np.random.default_rng(0)
    for p in (2, 8, 100):
        sampled = rng.standard_normal((20_000, p)).max(1).mean()
        assert largest_of(p) == pytest.approx(sampled, rel=0.05)
    assert largest_of(1) == 0
    assert [stages(p) for p in (1, 2, 3, 4, 5, 8, 9)] == [0, 1, 2, 2, 3, 3, 4]


def problem(**changed):
    given = {"samples": 3000, "parameters": 800, "iterations": 400, "memory": 1e12}
    return Problem(dtype=np.dtype("float32"), **{"machine": TRUTH} | given | changed)


@pytest.mark.parametrize(
    ("sizes", "pairs"),
    [
        ((20_000, 300, 20), {("dense", "cg")}),
        ((300, 20_000, 20), {("kernel", "cg"), ("cg", "kernel")}),
    ],
)
def test_crossings_are_where_the_order_changes(sizes, pairs):
    samples, parameters, iterations = sizes
    slow = dataclasses.replace(TRUTH, latency=1e-4)
    p = problem(samples=samples, parameters=parameters, iterations=iterations, machine=slow)
    plans = [p.plan(ranks) for ranks in range(1, 257)]
    found = crossings(p.plan, axis(1, 256))
    assert {(c.faster, c.slower) for c in found} >= pairs
    expected = {
        (after.ranks, one, other)
        for before, after in itertools.pairwise(plans)
        for one, other in itertools.permutations(METHODS, 2)
        if after[one].seconds < after[other].seconds
        and before[one].seconds >= before[other].seconds
    }
    assert set(found) == expected


def test_parts_of_the_time_and_memory():
    plan = problem(memory=5e6).plan(16)
    n, P, b = -(-3000 // 16), 800, 4
    cg = plan["cg"]
    assert cg.computing == pytest.approx(400 * (n + 8) * P * b / TRUTH.memory_bandwidth)
    assert cg.waiting == pytest.approx(TRUTH.skew * cg.computing * largest_of(16))
    few = TRUTH.overhead + 4 * TRUTH.latency + 2 * 15 / 16 * 2 * P * b / TRUTH.bandwidth
    assert cg.sending == pytest.approx(400 * few)
    many = TRUTH.overhead + 4 * TRUTH.latency + 2 * 15 / 16 * 3000 * b / TRUTH.bandwidth
    assert problem().plan(16, 3000)["cg"].sending == pytest.approx(400 * many)
    assert cg.seconds == cg.computing + cg.waiting + cg.sending
    assert [plan[name].fits for name in METHODS] == [True, False, False]


COMMAND = ["predict", "--ranks", "64", "8", "--samples", "3000", "--parameters", "800"]


def test_command(tmp_path, capsys):
    runs, output = tmp_path / "runs", tmp_path / "made" / "anew"
    runs.mkdir()
    for ranks in (2, 4):
        report.write(runs, measured(ranks))
    assert (
        main([*COMMAND, "--runs", str(runs), "--output", str(output), "--iterations", "400"]) == 0
    )
    text = capsys.readouterr().out
    assert "PREDICTED" in text
    assert "assumed" not in text
    assert "pipelined cg does not apply" in text
    chunked = dataclasses.replace(TRUTH, chunk=16 * MIB)
    expected = problem(memory=8e9, machine=chunked).plan(64)["cg"].seconds
    (row,) = (line.split() for line in text.splitlines() if line.split()[:1] == ["64"])
    assert float(row[1]) == pytest.approx(expected, rel=1e-3)
    content = json.loads((output / "prediction.json").read_text())
    assert [plan["ranks"] for plan in content["predicted"]] == [8, 64]
    assert len(content["residuals"]) == 14
    assert (output / "prediction.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--runs", "nowhere"], "--runs nowhere: no such folder"),
        (["--runs", "."], "--runs .: there is no run of allreduce on several ranks"),
        (["--memory", "-1"], "--memory -1: expected a positive number of GB"),
        (["--memory", "inf"], "--memory inf: expected a positive number of GB"),
        (["--output", "/proc/self/none"], "--output /proc/self/none: the prediction cannot be"),
    ],
)
def test_unusable_input(arguments, text, capsys):
    assert main([*COMMAND, *arguments]) == 2
    assert text in capsys.readouterr().err


def test_an_option_that_there_is_not(capsys):
    with pytest.raises(SystemExit) as end:
        main([*COMMAND, "--rank", "8", "--sample-size", "9"])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert "error: unknown: --rank 8 --sample-size 9" in error
    assert "--samples" in error  # what there is


def test_without_runs_all_is_assumed(capsys):
    assert main(COMMAND) == 0
    text = capsys.readouterr().out
    assert text.count("(assumed)") == len(fitting.NAMES)
    assert "(fitted)" not in text
    assert not fitting.fit([], Machine()).machine.measured
    assert "800 parameters, float32, 100 cg steps" in text


@pytest.mark.parametrize("text", ["0", "-3", "1.5", "1e-5", "inf", "nan", "many", str(2**31)])
def test_numbers_that_are_none(text, capsys):
    with pytest.raises(SystemExit) as end:
        main([*COMMAND, "--iterations", text])
    assert end.value.code == 2
    expected = "--iterations: expected a positive integer below 2**31, such as 100 or 1e5"
    assert f"{expected}: got '{text}'" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["250", "250.0", "2.5e2"])
def test_numbers_as_people_write_them(text, capsys):
    assert main([*COMMAND, "--iterations", text]) == 0
    assert "250 cg steps" in capsys.readouterr().out


def test_no_more_steps_than_unknowns(capsys):
    assert main(["predict", "--ranks", "4", "--samples", "1", "--parameters", "800"]) == 0
    assert "1 sample in all, 800 parameters, float32, 1 cg step\n" in capsys.readouterr().out


def test_where_no_method_fits_none_is_chosen(capsys):
    assert main([*COMMAND, "--memory", "1e-9"]) == 0
    text = capsys.readouterr().out
    assert text.count("; none fits") == 2
    assert "is chosen" not in text

"""The asv suite: its parameters, and one of its jobs, called as asv calls it."""

import json
import subprocess
import sys

import pytest
from launch import ROOT, cores, job_environment, mpi_name

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(mpi_name() != "mpich", reason="asv's environments have the mpich wheel"),
]

PROGRAM = """
import inspect, json, sys
from distsolve.commands.bench.cases import CASES
from suite import track

found = [kind for kind in vars(track).values() if hasattr(kind, "case")]
assert {kind.case for kind in found} == set(CASES)
for kind in found:
    _, sizes, methods, _ = kind.params
    case = CASES[kind.case]
    assert set(methods) == set(case.methods or [""])
    assert not any(case.fault(size, 4, "strong") for size in sizes)
    for name, function in inspect.getmembers(kind, inspect.isfunction):
        assert not name.startswith("track_") or function.unit

# Both sizes and all figures come from one job.
ranks, started = int(sys.argv[1]), []
def run_module(*words, run=track.run_module, **options):
    started.append(options["np"])
    return run(*words, **options)
track.run_module = run_module
track.Allreduce.params[1] = [8, 16]
for size in track.Allreduce.params[1]:
    benchmark = track.Allreduce()
    parameters = benchmark.setup_cache(), ranks, size, "", "tcp" if ranks > 1 else "shared memory"
    benchmark.setup(*parameters)
    tracks = "track_time", "track_messages", "track_sent", "track_peak_memory"
    print(json.dumps([getattr(benchmark, name)(*parameters) for name in tracks]))
assert started == [ranks]
assert "mpi4py.MPI" not in sys.modules
for ranks, transport in ((10**6, "shared memory"), (1, "tcp")):
    try:
        track.CG().setup(".", ranks, 8, "classic", transport)
    except NotImplementedError:
        continue
    raise AssertionError("asv would not skip this")
"""


def test_a_job_serves_all_figures(tmp_path):
    env = job_environment("mpich") | {"PYTHONPATH": f"{ROOT}:{ROOT / 'benchmarks'}"}
    command = [sys.executable, "-c", PROGRAM, str(min(cores(), 2))]
    done = subprocess.run(
        command, capture_output=True, text=True, env=env, cwd=tmp_path, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for size, line in zip((8, 16), done.stdout.splitlines(), strict=True):
        seconds, messages, sent, peak = json.loads(line)
        assert seconds > 0
        assert (messages, sent) == (1, size)
        assert peak >= 0


def test_configuration():
    config = json.loads((ROOT / "asv.conf.json").read_text())
    assert (ROOT / config["benchmark_dir"] / "track.py").exists()
    for name in ("env_dir", "results_dir", "html_dir"):
        assert config[name].startswith(".asv/")  # as .gitignore has it

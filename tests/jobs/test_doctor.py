"""`python -m distsolve doctor`: what it says, and that it notices what is wrong."""

import copy
import json
import re
import sys
import warnings

import pytest
from launch import cores, job_environment, mpi_name, openmpi_prefix, run_command, run_ranks

pytestmark = pytest.mark.below_jax
HEADER = """
import os, sys
from distsolve import mpi
from distsolve.commands import selftest
"""
RUN = """
from distsolve.__main__ import main
sys.exit(main(["doctor", *sys.argv[1:]]))
"""
UNTESTED = "\nselftest.CHECKS.clear()\n"


def row(text, name):
    return re.search(rf"^  {name} +(.*)$", text, re.MULTILINE)[1]


def test_a_healthy_job():
    """Whatever JAX is told by its variables for finding faults."""
    env = {"DISTSOLVE_CHUNK_BYTES": "65536", "JAX_DISABLE_JIT": "1"}
    env |= dict.fromkeys(("JAX_DEBUG_NANS", "JAX_DEBUG_INFS"), "1")
    done = run_ranks(HEADER + RUN, np=2, args=["--json"], timeout=120, env=env).check()
    said = json.loads(done.stdout)
    assert said["ranks"] == 2
    assert said["versions"]["Python"] == ".".join(map(str, sys.version_info[:3]))
    library = {"mpich": "MPICH", "openmpi": "Open MPI"}[mpi_name()]
    assert library in said["mpi"]["library"]
    assert "libmpi" in said["mpi"]["file"][0]
    assert said["mpi"]["thread_level"] == "MULTIPLE"
    assert said["mpi"]["launcher"].endswith("_SIZE=2")
    assert said["mpi"]["chunk"] == 65536
    assert said["environment"]["DISTSOLVE_CHUNK_BYTES"] == "65536"
    (node,) = said["nodes"]
    assert node["ranks"] == [0, 1]
    assert len(node["cores"]) == cores()
    assert node["threads"] == {"XLA": 1, "BLAS": 1}
    assert said["extras"]["test"]["pytest"] == pytest.__version__
    assert [test["name"] for test in said["self_test"]] == [
        *("in place", "order", "large counts", "gradients", "cg")
    ]
    assert all(test["verdict"] == "ok" for test in said["self_test"]), said["self_test"]
    # Jobs of the tests are not bound.
    expected = ["binding"] if cores() >= 2 else ["threads", "binding"]
    assert [warning["about"] for warning in said["warnings"]] == expected
    assert said["verdict"] == "WARN"


# A function of the MPI library that spoils one result on one rank.
SPOILT = """
import ctypes
from distsolve.mpi import library
addresses = library._addresses
KIND = ctypes.CFUNCTYPE(ctypes.c_int, *2 * [ctypes.c_void_p], ctypes.c_int, *3 * [ctypes.c_void_p])

def spoilt(MPI):
    found = addresses(MPI)
    allreduce = KIND(found["MPI_Allreduce"])

    @KIND
    def other(operand, result, count, *handles):
        code = allreduce(operand, result, count, *handles)
        if count == 1001 and MPI.COMM_WORLD.rank == 1:
            ctypes.c_ubyte.from_address(result).value ^= 1
        return code

    library.kept = other
    return found | {"MPI_Allreduce": ctypes.cast(other, ctypes.c_void_p).value}

library._addresses = spoilt
if mpi.rank() == 1:
    os.environ["DISTSOLVE_ABORT"] = "1"
del selftest.CHECKS["gradients"], selftest.CHECKS["cg"]
"""


@pytest.mark.once
def test_a_wrong_result_on_one_rank_is_told_with_its_rank():
    done = run_ranks(HEADER + SPOILT + RUN, np=2, timeout=120)
    assert done.returncode == 1, done.stderr
    assert row(done.stdout, "in place").startswith(
        "FAIL  rank 1: allreduce of float64[1001]: entry 0 is "
    )
    assert done.stdout.count("FAIL") == 2
    assert row(done.stdout, "order").startswith("ok ")
    assert row(done.stdout, "verdict") == "FAIL"
    told = re.search("DISTSOLVE_ABORT +WARN (.*)", done.stdout)[1]
    assert told.startswith(" not set on rank 0, 1 on rank 1: set it equally")


def test_ranks_that_wait_for_ever_are_ended():
    stuck = """
def stuck(rank, size):
    if rank == 0:
        mpi.barrier()
    yield "nothing", 0, 0
selftest.CHECKS = {"stuck": stuck}
"""
    done = run_ranks(HEADER + stuck + RUN, np=2, args=["--timeout", "2"])
    assert done.returncode
    assert not done.timed_out
    assert row(done.stdout, "stuck").startswith("FAIL  rank 0: not over")
    assert "rank 0 of 2: self-test `stuck` is not over after 2 s: still in it" in done.stderr
    assert "is not over after 2 s: done here, without a fault; waiting" in done.stderr


MUTANTS = """
import jax
from distsolve import linalg
jax.config.update("jax_enable_x64", True)
jit, allreduce, sendrecv, solve = jax.jit, mpi.allreduce, mpi.sendrecv, linalg.cg
size = mpi.size()
mutants = [
    ("in place", mpi, "allreduce", lambda x: x),
    ("in place", mpi, "allreduce", lambda x: (size * x).astype(x.dtype)),
    ("in place", jax, "jit", lambda f, **options: jit(f)),
    ("order", mpi, "sendrecv", lambda x, *more: sendrecv(0 * x, *more)),
    ("order", mpi, "sendrecv", lambda x, *more: x),
    ("order", mpi, "allreduce", lambda x: size * x),
    ("large counts", mpi, "allreduce", lambda x, chunk_bytes: allreduce(x)),
    ("large counts", mpi, "allreduce", lambda x, chunk_bytes: 2 * x),
    ("gradients", mpi, "pvary", lambda x: x),
    ("gradients", mpi, "allreduce", lambda x: x),
    ("cg", linalg, "cg", lambda A, b, **options: solve(lambda p: 2 * A(p), b, **options)),
]
for name, place, attribute, mutant in mutants:
    original = getattr(place, attribute)
    setattr(place, attribute, mutant)
    assert selftest.fault(selftest.CHECKS[name], mpi.rank(), size), (name, attribute)
    setattr(place, attribute, original)
"""


@pytest.mark.once
def test_each_check_fails_with_what_it_is_about():
    run_ranks(HEADER + MUTANTS, np=2, timeout=180).check()


@pytest.mark.once
def test_an_exception_in_a_check_is_told():
    from distsolve.commands import selftest

    def check(rank, size):
        yield "one", 1, 1
        yield "shape", [1.0], [1.0, 2.0]
        raise RuntimeError("boom")

    assert selftest.fault(check, 0, 1) == "shape: float64[1], expected float64[2]"

    def broken(rank, size):
        yield "one", 1, 1
        raise RuntimeError("boom")

    assert selftest.fault(broken, 0, 1) == "RuntimeError: boom"


def test_mpi_that_cannot_be_used_is_told_once():
    program = f"""{HEADER}
import platform
platform.machine = lambda: "sparc64"
{RUN}"""
    done = run_ranks(program, np=2)
    assert done.returncode == 1
    assert row(done.stdout, "error").startswith("FAIL  distsolve passes MPI handles in")
    assert done.stdout.count("distsolve doctor") == 1
    assert "Traceback" not in done.stderr


def mixed(program, args=()):
    """Run a program below the launcher of another MPI: under MPICH, its variables alone."""
    if mpi_name() == "mpich":
        foreign = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}
        env = job_environment("mpich", foreign)
        return run_command([sys.executable, "-c", program, *args], 60, env).check()
    env = job_environment("openmpi", {"LD_LIBRARY_PATH": str(openmpi_prefix() / "lib")})
    return run_ranks(program, np=2, mpi="mpich", env=env, args=args).check()


def test_a_launcher_of_another_mpi_is_warned_of():
    done = mixed(HEADER + UNTESTED + RUN, ["--json"])
    said = json.loads(done.stdout)
    assert said["ranks"] == 1
    (text,) = [w["text"] for w in said["warnings"] if w["about"] == "launcher"]
    sentences = [text, *re.findall("RuntimeWarning: (This process is alone.*)", done.stderr)]
    assert len(sentences) == 2, "the library warns once"
    for sentence in sentences:
        assert f"a world of 1 rank, made by {said['mpi']['library']}," in sentence
        assert "mpiexec" in sentence
        assert "started 2 ranks" in sentence
        assert "_SIZE=2" in sentence
        assert "MPI4PY_LIBMPI" in sentence


@pytest.mark.once
@pytest.mark.parametrize(
    ("size", "variables", "told"),
    [
        (1, {}, ""),
        (1, {"PMI_SIZE": "4"}, "PMI_SIZE=4"),
        (4, {"PMI_SIZE": "4"}, ""),
        (1, {"PMI_SIZE": "1"}, ""),
        (1, {"PMI_SIZE": "many"}, ""),
        (1, {"MPI_LOCALNRANKS": "3"}, "MPI_LOCALNRANKS=3"),
        (1, {"PMI_SIZE": "1", "SLURM_STEP_NUM_TASKS": "4"}, ""),
        (1, {"SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "8"}, "SLURM_STEP_NUM_TASKS=4"),
        (1, {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, ""),  # a batch script
    ],
)
def test_what_the_launcher_says(size, variables, told, monkeypatch):
    from distsolve.mpi import launcher
    from distsolve.mpi.native import serial

    for name in {name for known in launcher.LAUNCHERS for name in (known.size, known.rank)}:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    text = launcher.mismatch(size, "MPI of a vendor")
    assert (told in text) if told else text == ""
    assert ("another MPI" in text) == bool(told)
    text = launcher.mismatch(size, serial.VERSION)
    assert (told in text and "unset" in text) if told else text == ""


@pytest.mark.once
def test_one_process_of_a_job_warns(monkeypatch):
    from distsolve.mpi import launcher

    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    with pytest.warns(RuntimeWarning, match="OMPI_COMM_WORLD_SIZE=2"):
        launcher.warn_of_mismatch(1, "MPI of a vendor")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    assert not launcher.is_first()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        launcher.warn_of_mismatch(1, "MPI of a vendor")


@pytest.fixture
def four_ranks(monkeypatch):
    """Facts of four bound ranks on two nodes, in which nothing is odd."""
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    one = {
        "versions": {"Python": "3.11.2", "jax": "0.10.2"},
        "node": "a",
        "cores": [0, 1],
        "threads": {"XLA": 2, "BLAS": 1},
        "cpu": "model 1",
        "vectors": ["avx", "avx2"],
        "driver": None,
        "environment": {"JAX_PLATFORMS": "cpu"},
        "mpi": {"library": "MPI of a vendor", "file": ["/lib/libmpi.so"], "thread_level": "FULL"},
    }
    ranks = [copy.deepcopy(one) for _ in range(4)]
    ranks[1]["cores"] = ranks[3]["cores"] = [2, 3]
    ranks[2]["node"] = ranks[3]["node"] = "b"
    return ranks


def told(ranks, plugins=()):
    from distsolve.commands import findings

    return list(findings.of_facts(ranks, list(plugins)))


@pytest.mark.once
def test_nothing_is_said_of_bound_and_equal_ranks(four_ranks):
    assert told(four_ranks) == []


@pytest.mark.once
def test_more_threads_than_cores(four_ranks):
    for mine in four_ranks:
        mine["cores"] = [0, 1, 2, 3]
    ((about, text),) = told(four_ranks)
    assert about == "binding"
    assert "the cores 0-3 of node a and 1 more" in text
    four_ranks[0]["threads"] = {"XLA": 1, "BLAS": 3}
    (about, text), _ = told(four_ranks)
    assert about == "threads"
    assert text.startswith("2 ranks x 2.5 threads = 5 threads on 4 cores of node a: set")
    for mine in four_ranks:
        mine |= {"cores": [0], "threads": {"XLA": 1, "BLAS": 1}}
    (about, text), _ = told(four_ranks)
    assert text.startswith("2 ranks x 1 thread = 2 threads on 1 core of node a and 1 more: start")


@pytest.mark.once
@pytest.mark.parametrize(
    ("change", "about", "text"),
    [
        ({"cpu": "model 2"}, "CPU", "model 1 on ranks 0-1, 3, model 2 on rank 2: compiled"),
        (
            {"vectors": ["avx"]},
            "vector instructions",
            "all there on ranks 0-1, 3, without avx2 on rank 2: compiled",
        ),
        (
            {"versions": {"Python": "3.11.2", "jax": "0.11"}},
            "jax",
            "0.10.2 on ranks 0-1, 3, 0.11 on rank 2: use one environment",
        ),
        (
            {"environment": {"JAX_PLATFORMS": "cpu", "DISTSOLVE_CHUNK_BYTES": "64"}},
            "DISTSOLVE_CHUNK_BYTES",
            "not set on ranks 0-1, 3, 64 on rank 2: set it equally",
        ),
        (
            {"mpi": {"library": "Other MPI", "thread_level": "FULL"}},
            "MPI library",
            "MPI of a vendor on ranks 0-1, 3, Other MPI on rank 2: use one",
        ),
    ],
)
def test_a_rank_that_differs_is_named(four_ranks, change, about, text):
    four_ranks[2] |= change
    ((found, sentence),) = told(four_ranks)
    assert found == about
    assert sentence.startswith(text)


@pytest.mark.once
def test_values_that_differ_everywhere_are_cut(four_ranks):
    for rank, mine in enumerate(four_ranks):
        mine["cpu"] = f"model {rank}"
    ((_, text),) = told(four_ranks)
    assert "model 2 on rank 2, and 1 more values: " in text


@pytest.mark.once
def test_another_library_than_the_named_one(four_ranks, tmp_path):
    named = tmp_path / "libmpi.so"
    named.touch()
    for mine in four_ranks:
        mine["environment"] = {"JAX_PLATFORMS": "cpu", "MPI4PY_LIBMPI": str(named)}
    ((about, text),) = told(four_ranks)
    assert about == "MPI"
    assert f"names {named}, but /lib/libmpi.so is loaded" in text
    four_ranks[0]["mpi"]["file"] = [str(tmp_path / "libmpi.so.40")]
    assert told(four_ranks) == []
    four_ranks[0]["mpi"]["file"].append("/lib/libmpi.so")
    ((_, text),) = told(four_ranks)
    assert "more than one library" in text


@pytest.mark.once
def test_a_plugin_for_gpus(four_ranks):
    assert told(four_ranks, ["cuda"]) == []
    for mine in four_ranks:
        mine["environment"] = {}
    ((about, text),) = told(four_ranks, ["cuda"])
    assert about == "GPU"
    assert "plugin cuda" in text
    assert "rank 0-3" in text
    assert "JAX_PLATFORMS=cpu" in text
    for mine in four_ranks:
        mine["driver"] = "libcuda.so.1"
    assert told(four_ranks, ["cuda"]) == []


@pytest.mark.once
@pytest.mark.parametrize(
    ("variables", "XLA", "BLAS"),
    [
        ({}, cores(), cores()),
        ({"NPROC": "3", "OMP_NUM_THREADS": "1"}, 3, 1),
        ({"NPROC": "3", "PJRT_NPROC": "5", "OMP_NUM_THREADS": "0"}, 5, cores()),
        ({"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "2"}, cores(), 1),
        ({"OMP_NUM_THREADS": "100000"}, cores(), cores()),
    ],
)
def test_threads_of_a_rank(variables, XLA, BLAS, monkeypatch):
    from distsolve.commands import facts

    for name in (*facts.XLA_THREADS, *facts.BLAS_THREADS):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert facts.of_rank()["threads"] == {"XLA": XLA, "BLAS": BLAS}


@pytest.mark.once
@pytest.mark.parametrize("text", ["0", "-1", "nan", "soon"])
def test_a_time_limit_that_is_none(text, capsys):
    import argparse

    from distsolve.commands import doctor

    parser = argparse.ArgumentParser()
    doctor.add(parser.add_subparsers())
    with pytest.raises(SystemExit):
        parser.parse_args(["doctor", "--timeout", text])
    error = capsys.readouterr().err
    assert f"--timeout: expected a positive number of seconds, such as 60: got {text!r}" in error

"""The harness must fail where it should: each test here runs pytest on a faulty test file."""

import sys

import pytest
from launch import (
    ROOT,
    Finished,
    is_running,
    job_environment,
    mpi_name,
    mpiexec,
    run_command,
    run_ranks,
)

pytestmark = pytest.mark.once
HEADER = """
import time
import pytest
from spmd import agree, ranks
"""


def pytest_job(folder, source, np=2, watchdog=20, options=()):
    """Run a test file with the plugin on `np` ranks."""
    path = folder / "test_faulty.py"
    path.write_text(HEADER + source)
    extra = {"PYTHONPATH": str(ROOT / "tests"), "DISTSOLVE_TEST_WATCHDOG": str(watchdog)}
    command = [*mpiexec(mpi_name(), np), sys.executable, "-m", "pytest", "-p", "spmd"]
    command += ["-p", "no:cacheprovider", "--color=no", "--rootdir", str(folder), str(path)]
    command += options
    return run_command(command, 90, job_environment(mpi_name(), extra), cwd=folder)


def failed(done: Finished) -> str:
    assert done.returncode != 0
    assert not done.timed_out, done.stderr
    return done.stdout + done.stderr


def test_failure_on_one_rank_fails_on_all(tmp_path):
    done = pytest_job(
        tmp_path,
        """
def test_one_rank():
    print("seen by", ranks().rank)
    assert ranks().rank != 1, "wrong here"

def test_next_one_still_runs():
    agree(True)
""",
    )
    text = failed(done)
    assert "failed on rank 1" in text
    assert "wrong here" in text
    assert "seen by 1" in text
    assert "1 failed, 1 passed" in text


def test_failure_in_a_fixture_on_one_rank_stops_the_test_on_all(tmp_path):
    text = failed(
        pytest_job(
            tmp_path,
            """
@pytest.fixture
def broken():
    assert ranks().rank != 1, "no such thing"

def test_collective(broken):
    ranks().agreeing.barrier()
""",
        )
    )
    assert "no such thing" in text
    assert "1 error" in text


def test_skip_on_one_rank_is_a_failure(tmp_path):
    source = """
def test_skips():
    if ranks().rank == 1:
        pytest.skip("not here")
"""
    assert "the ranks disagree: {0: 'passed', 1: 'skipped'}" in failed(pytest_job(tmp_path, source))


def test_different_collection_is_a_failure(tmp_path):
    source = """
@pytest.mark.parametrize("n", range(2 + ranks().rank))
def test_n(n):
    pass
"""
    text = failed(pytest_job(tmp_path, source))
    assert "the ranks collected different tests" in text
    assert "rank 0: 2 tests, without ['test_faulty.py::test_n[2]']" in text


def test_import_error_on_one_rank_is_a_failure(tmp_path):
    text = failed(pytest_job(tmp_path, "assert ranks().rank == 0, 'cannot import'"))
    assert "cannot import" in text


def test_hang_ends_with_the_traces_of_all_ranks(tmp_path):
    source = """
def test_deadlock():
    if ranks().rank == 1:
        wait_for_a_message()
    else:
        ranks().agreeing.barrier()

def wait_for_a_message():
    ranks().agreeing.recv(source=0)
"""
    done = pytest_job(tmp_path, source, watchdog=8)
    text = failed(done)
    assert "[rank 0] watchdog: test_faulty.py::test_deadlock" in text
    assert "[rank 1] watchdog: test_faulty.py::test_deadlock" in text
    assert "in wait_for_a_message" in text


def test_rank_that_raised_does_not_wait_for_ever(tmp_path):
    source = """
def test_leaves():
    if ranks().rank == 1:
        raise RuntimeError("gone")
    ranks().agreeing.barrier()
"""
    done = pytest_job(tmp_path, source, watchdog=8)
    text = failed(done)
    assert "[rank 0] watchdog" in text
    assert "waiting for other ranks" in text
    assert "gone" in text


def test_other_ranks_are_quiet(tmp_path):
    done = pytest_job(tmp_path, "def test_fine():\n    pass\n", np=3).check()
    assert done.stdout.count("1 passed") == 1


def test_run_ranks_passes_output_and_status():
    program = "from mpi4py import MPI; print('rank', MPI.COMM_WORLD.rank, flush=True)"
    done = run_ranks(program, np=3).check()
    assert sorted("".join(done.stdout.split())) == sorted(
        "rank0rank1rank2"
    )  # ranks may write into each other's lines
    assert run_ranks("import sys; sys.exit(3)", np=1).returncode == 3


def test_run_ranks_runs_the_mpi_under_test():
    program = "from mpi4py import MPI; print(MPI.Get_library_version())"
    vendor = {"mpich": "MPICH", "openmpi": "Open MPI"}[mpi_name()]
    assert vendor in run_ranks(program, np=1).check().stdout


def test_run_ranks_ends_a_hang_with_traces():
    program = "import time\ndef stuck():\n    time.sleep(600)\nstuck()\n"
    done = run_ranks(program, np=2, timeout=2)
    assert done.returncode != 0
    assert not done.timed_out
    assert "in stuck" in done.stderr


def test_run_command_ends_processes_that_ignore_signals(tmp_path):
    program = """
import faulthandler, os, pathlib, signal, sys, time
faulthandler.cancel_dump_traceback_later()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(sys.argv[1], str(os.getpid())).touch()
time.sleep(600)
"""
    path = tmp_path / "job.py"
    path.write_text(program)
    command = [*mpiexec(mpi_name(), 2), sys.executable, str(path), str(tmp_path)]
    done = run_command(command, 10, job_environment(mpi_name()))
    assert done.timed_out
    assert done.returncode == -1
    pids = [int(entry.name) for entry in tmp_path.iterdir() if entry.name.isdigit()]
    assert len(pids) == 2
    assert not any(is_running(pid) for pid in pids)


@pytest.mark.parametrize(
    ("cases", "kept"),
    [
        ("all", "aX aY aZ bX bY bZ once rows-1 rows-2"),
        ("values", "aX bY aZ once rows-1 rows-2"),
        ("first", "aX once rows-1"),
    ],
)
def test_cases(tmp_path, cases, kept):
    """Of two parameters each value is there; rows of values stay together."""
    source = """
@pytest.mark.parametrize("second", "XYZ")
@pytest.mark.parametrize("first", "ab")
def test_two(first, second):
    print(f"ran {first}{second} ")

def test_none():
    print("ran once")

@pytest.mark.parametrize(("x", "y"), [(1, 1), (2, 1)])
def test_rows(x, y):
    print(f"ran rows-{x}")
"""
    done = pytest_job(tmp_path, source, np=1, options=["--cases", cases, "-rP"]).check()
    ran = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("ran ")]
    assert sorted(ran) == sorted(kept.split())

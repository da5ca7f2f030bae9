"""Jobs with a fault: each ends in bounded time, and says which rank, which call, which line.

What check mode finds on all ranks is in `tests/mpi/test_check_mode.py`.
"""

import re

import pytest
from launch import run_ranks

pytestmark = pytest.mark.below_jax
HEADER = """\
import os, signal, sys, time
import jax, jax.numpy as jnp
from mpi4py import MPI
from distsolve import mpi
rank, size = mpi.rank(), mpi.size()
reduce = jax.jit(lambda x: mpi.allreduce(x))
half = MPI.COMM_WORLD.Dup()
mpi.prepare(half)
reduce(jnp.ones(3)).block_until_ready()
"""
LINES = HEADER.count("\n")
SECONDS = 2.0
WATCHED = {"DISTSOLVE_TIMEOUT": str(SECONDS)}

# The program after the header; what the report says of the call, of the waiting, of the culprit.
HANGS = {
    "sleeping rank": (
        "if rank == 1: time.sleep(40)\nmpi.allreduce(jnp.ones(5))",
        r"rank 0 of 2 has been in MPI_Allreduce float32\[5\] SUM",
        r"rank 0: in MPI_Allreduce .* at \S+job\.py:{second}",
        r"rank 1: in no call; has entered 1 collectives .* at \S+job\.py:6",
    ),
    "sleeping rank, queued": (
        "if rank == 0: time.sleep(40)\nreduce(jnp.ones(5)).block_until_ready()",
        r"rank 1 of 2 has been in MPI_Allreduce float32\[5\] SUM",
        r"rank 1: in MPI_Allreduce .* at \S+job\.py:6",
        r"rank 0: in no call",
    ),
    "early end": (
        "if rank == 1: sys.exit(0)\nmpi.bcast(jnp.ones(4), 0)\nmpi.barrier()",
        r"rank 0 of 2 has been in MPI_(Bcast|Barrier)",
        r"rank 0: in MPI_(Bcast|Barrier) .* at \S+job\.py:",
        r"rank 1: at the end of its program",
    ),
    "missing call": (
        "if rank == 0: mpi.barrier()\nmpi.recv(jnp.ones(2), 1 - rank)",
        r"MPI_(Barrier|Recv)",
        r"rank 0: in MPI_Barrier .* at \S+job\.py:{first}",
        r"rank 1: in MPI_Recv float32\[2\], root or peer 0 .* at \S+job\.py:{second}",
    ),
    "wrong communicator": (
        "mpi.allreduce(jnp.ones(2), comm=half if rank else None)",
        r"rank 0 of 2 has been in MPI_Allreduce",
        r"rank 0: in MPI_Allreduce .*communicator 2, collective 2\) at \S+job\.py:{first}",
        r"rank 1: in MPI_Allreduce .*communicator 1, collective 1\) at \S+job\.py:{first}",
    ),
    "other branch": (
        "jax.block_until_ready(jax.jit(lambda x: jax.lax.cond(x[0] > 0, mpi.allreduce,"
        " lambda x: x, x))(jnp.ones(3) - rank))\nif rank: time.sleep(40)",
        r"rank 0 of 2 has been in MPI_Allreduce",
        r"rank 0: in MPI_Allreduce .* at \S+job\.py:{first}",
        r"rank 1: in no call",
    ),
    "a request that nobody else started": (
        "if rank == 1: time.sleep(40)\nmpi.wait(mpi.iallreduce(jnp.ones(7)))",
        r"rank 0 of 2 has been in MPI_Wait float32\[7\]",
        r"rank 0: in MPI_Wait",
        r"rank 1: in no call",
    ),
}


@pytest.mark.parametrize("name", HANGS)
def test_a_hang_is_reported_and_ended(name):
    program, *expected = HANGS[name]
    done = run_ranks(HEADER + program + "\n", np=2, env=WATCHED)
    places = {"first": LINES + 1, "second": LINES + 2}
    for pattern in expected:
        pattern = pattern.replace("{first}", str(places["first"]))
        pattern = pattern.replace("{second}", str(places["second"]))
        assert re.search(pattern, done.stderr), f"{pattern}\n{done.stderr}"
    assert done.stderr.count("Where the ranks of communicator") == 1, done.stderr
    assert "most recent call first" in done.stderr  # Python's stacks
    assert done.returncode not in (0, -1)
    assert not done.timed_out
    (age,) = re.findall(r"for (\S+) s, longer", done.stderr)
    assert float(age) >= SECONDS


# Ends of one rank that its launcher notices.
ENDS = {
    "killed": ("if rank: os.kill(os.getpid(), signal.SIGKILL)", ""),
    "left": ("if rank: os._exit(3)", ""),
    "raised": (
        "if rank: raise ValueError('no such molecule')",
        "rank 1: ValueError: no such molecule",
    ),
    "raised in a loop": (
        "def fail(i):\n"
        "    if rank and i == 2: raise ValueError('no such walker')\n"
        "def body(i, x):\n"
        "    jax.debug.callback(fail, i, ordered=True)\n"
        "    return mpi.allreduce(x)\n"
        "jax.block_until_ready(jax.jit(lambda x: jax.lax.fori_loop(0, 5, body, x))(jnp.ones(3)))",
        "no such walker",
    ),
}


@pytest.mark.parametrize("name", ENDS)
def test_the_end_of_one_rank_ends_the_job(name):
    end, said = ENDS[name]
    program = f"{HEADER}{end}\nfor _ in range(100): mpi.allreduce(jnp.ones(5))\n"
    done = run_ranks(program, np=2, env={"DISTSOLVE_TIMEOUT": "5"})
    assert done.returncode not in (0, -1)
    assert not done.timed_out
    assert said in done.stderr, done.stderr


def test_a_report_need_not_end_the_job():
    program = """
mpi.set_timeout(1.0, action="report")
if rank == 1: time.sleep(4)
sys.stdout.write(f"total {mpi.allreduce(float(rank))}\\n")
mpi.set_timeout(None)
if rank == 1: time.sleep(2)
mpi.barrier()
"""
    done = run_ranks(HEADER + program, np=2).check()
    assert done.stdout.count("total 1.0") == 2
    assert done.stderr.count("longer than the time-out of 1.0 s") == 1, done.stderr
    assert "ends the job" not in done.stderr


def test_three_ranks_report_once():
    """The lowest of those that wait reports, and joins ranks that are at the same place."""
    program = "if rank == 1: time.sleep(40)\nmpi.barrier()\n"
    done = run_ranks(HEADER + program, np=3, env=WATCHED)
    assert re.search(r"rank 0 of 3 has been in MPI_Barrier", done.stderr), done.stderr
    assert re.search(r"rank 0, 2: in MPI_Barrier", done.stderr), done.stderr
    assert done.stderr.count("Where the ranks of communicator") == 1
    assert done.returncode not in (0, -1)


def test_below_multiple():
    program = "import mpi4py\nmpi4py.rc.thread_level = 'serialized'\n"
    program += HEADER + "if rank == 1: time.sleep(40)\nmpi.barrier()\n"
    done = run_ranks(program, np=2, env=WATCHED)
    assert re.search(r"rank 1: in no call", done.stderr), done.stderr
    assert done.returncode not in (0, -1)


# The header, a program that never uses the world, and what is said.
BEFORE_THE_WORLD = {
    "another communicator": (
        "turned = MPI.COMM_WORLD.Split(0, -mpi.rank())\nmpi.prepare(turned)\n"
        "if mpi.rank() == 0: time.sleep(40)\nmpi.allreduce(jnp.ones(7), comm=turned)",
        r"rank 1 of 2 has been in MPI_Allreduce float32\[7\] SUM \(communicator 1, collective 1\)",
        r"rank 1: has made no call yet",
    ),
    "a first use on one rank": (
        "if mpi.rank() == 1: mpi.send(jnp.ones(5), 0)\ntime.sleep(40)",
        r"rank 1 of 2 has been in the first use of a communicator at \S+job\.py:3 ",
        r"call distsolve\.mpi\.prepare",
    ),
    "a start on one rank": (
        "if MPI.COMM_WORLD.rank == 1: import distsolve; distsolve.initialize(timeout=1)\n"
        "time.sleep(40)",
        r"rank 1 of 2 has been in the start of jax\.distributed at \S+job\.py:3 ",
        r"longer than the time-out of 1\.0 s.* or raise the time-out",
    ),
}


@pytest.mark.parametrize("name", BEFORE_THE_WORLD)
def test_a_hang_before_the_world_is_used(name):
    program, *expected = BEFORE_THE_WORLD[name]
    imports = HEADER[: HEADER.index("rank, size")].replace("\n", "; ").strip("; ")
    done = run_ranks(f"{imports}\n\n{program}\n", np=2, env=WATCHED)
    for pattern in expected:
        assert re.search(pattern, done.stderr), f"{pattern}\n{done.stderr}"
    assert "most recent call first" in done.stderr
    assert done.returncode not in (0, -1)
    assert not done.timed_out


def test_requests_that_differ_in_size():
    """Also where MPI itself fails over them."""
    program = "mpi.wait(mpi.iallreduce(jnp.ones(4 + rank)))\n"
    done = run_ranks(HEADER + program, np=2, env={"DISTSOLVE_CHECK": "1"})
    assert done.returncode not in (0, -1)
    said = re.search(r"rank (\d): MPI_Iallreduce float32\[(\d)\] SUM .*job\.py", done.stderr)
    assert said, done.stderr
    assert int(said[2]) == 4 + int(said[1]), done.stderr


def test_check_mode_by_its_variable():
    """An uncaught mismatch ends the job with the table of all ranks."""
    program = "mpi.allreduce(jnp.ones(4 + rank))\n"
    done = run_ranks(HEADER + program, np=2, env={"DISTSOLVE_CHECK": "1"})
    assert done.returncode not in (0, -1)
    for rank in range(2):
        assert f"rank {rank}: MPI_Allreduce float32[{4 + rank}] SUM" in done.stderr, done.stderr


@pytest.mark.parametrize("name", ["DISTSOLVE_TIMEOUT", "DISTSOLVE_CHECK"])
def test_a_variable_that_is_set_on_one_rank_only(name):
    program = f"""
import os
from mpi4py import MPI
if MPI.COMM_WORLD.Get_rank() == 1: os.environ[{name!r}] = "1"
from distsolve import mpi
mpi.barrier()
"""
    done = run_ranks(program, np=2)
    assert done.returncode not in (0, -1)
    assert not done.timed_out
    assert "differ between ranks 0 and 1" in done.stderr, done.stderr
    assert "Set them equally on all ranks" in done.stderr


def test_signal_shows_calls_and_stacks():
    program = "mpi.bcast(jnp.ones(9), 0)\nos.kill(os.getpid(), signal.SIGUSR1)\n"
    shown = run_ranks(HEADER + program, np=1).check().stderr
    assert re.search(
        rf"rank 0: #\d+ MPI_Bcast float32\[9\].* at \S+job\.py:{LINES + 1}: took", shown
    )
    assert "most recent call first" in shown


def test_a_signal_handler_of_the_program_stays():
    program = "import signal\nsignal.signal(signal.SIGUSR1, lambda *_: print('mine'))\n"
    program += HEADER + "os.kill(os.getpid(), signal.SIGUSR1)\n"
    done = run_ranks(program, np=1).check()
    assert done.stdout == "mine\n"
    assert "the last calls" not in done.stderr


def test_a_failing_call_shows_its_line_and_the_last_calls():
    program = """
mpi.barrier()
if rank == 0:
    try:
        mpi.recv(jnp.ones(2), 1)
    except jax.errors.JaxRuntimeError as error:
        print(error)
else:
    mpi.send(jnp.ones(5), 0)
"""
    done = run_ranks(HEADER + program, np=2).check()
    assert re.search(rf"MPI_Recv failed .* at \S+job\.py:{LINES + 5}: ", done.stdout), done.stdout
    assert re.search(rf"rank 0: #\d+ MPI_Barrier .* at \S+job\.py:{LINES + 2}: took", done.stderr)


@pytest.mark.once
@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"DISTSOLVE_TIMEOUT": "soon"}, "DISTSOLVE_TIMEOUT is 'soon'; expected a number"),
        ({"DISTSOLVE_TIMEOUT": "-1"}, "`DISTSOLVE_TIMEOUT` is -1.0; expected a number"),
        (
            {"DISTSOLVE_TIMEOUT_ACTION": "wait"},
            "`DISTSOLVE_TIMEOUT_ACTION` is 'wait'; expected one of abort, report",
        ),
        ({"DISTSOLVE_CHECK": "yes"}, "DISTSOLVE_CHECK is 'yes'; expected 1 or calls for on"),
        ({"DISTSOLVE_NO_MPI": "false"}, "DISTSOLVE_NO_MPI is 'false'; expected 1 for on"),
    ],
)
def test_variables_that_make_no_sense(variables, said):
    done = run_ranks("from distsolve import mpi\nmpi.barrier()\n", np=1, env=variables)
    assert done.returncode not in (0, -1)
    assert said in done.stderr, done.stderr

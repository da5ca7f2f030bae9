"""How a job ends: at once when one rank raises, and well when all ranks are done."""

import re
import time

import pytest
from launch import run_ranks

from distsolve.mpi import switches

HEADER = """\
import sys, threading, time
import jax, jax.numpy as jnp
from distsolve import mpi
rank, size = mpi.rank(), mpi.size()
"""


@pytest.mark.parametrize("times", [3, pytest.param(7, marks=pytest.mark.once)])
def test_work_in_flight_at_the_end(times):
    """10 times of 10 (mpi4jax issue 22)."""
    program = HEADER + "jax.jit(mpi.allreduce)(jnp.ones(10_000_000))\n"
    for _ in range(times):
        assert "Traceback" not in run_ranks(program, np=2).check().stderr


@pytest.mark.parametrize("end", ["exit", "finalize", "failure"])
def test_requests_that_nobody_waited_for(end):
    """One is on its way when the other rank comes to the end."""
    program = (
        HEADER
        + f"""
from mpi4py import MPI
jax.jit(mpi.iallreduce)(jnp.ones(3))
mpi.iallreduce(jnp.ones(3), mpi.MAX)
if rank == 1:
    time.sleep(1)
request = jax.jit(mpi.iallreduce)(jnp.ones(100_000))
if {end!r} == "finalize":
    MPI.Finalize()
if {end!r} == "failure" and rank == 1:
    raise ValueError("no such molecule")
"""
    )
    done = run_ranks(program, np=2)
    assert not done.timed_out
    if end == "failure":
        assert "rank 1 of 2: uncaught exception" in done.stderr
        assert done.returncode != 0
    else:
        assert "Traceback" not in done.check().stderr


def test_nothing_runs_when_finalize_begins(tmp_path):
    """MPICH aborts if a thread is in MPI by then; attributes are deleted last set first."""
    program = (
        HEADER
        + f"""
import pathlib
from mpi4py import MPI
from distsolve.mpi.native import nonblocking
def note(*args):
    sys.stdout.write("pending %d\\n" % nonblocking.pending())
mpi.wait(mpi.iallreduce(jnp.ones(3)))
MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=note), 1)
started = pathlib.Path({str(tmp_path / "started")!r})
if rank == 1:
    while not started.exists():
        time.sleep(0.01)
    time.sleep(0.5)
mpi.iallreduce(jnp.ones(3))
if rank == 0:
    assert nonblocking.pending()
    started.touch()
MPI.Finalize()
"""
    )
    assert run_ranks(program, np=2).check().stdout.split() == 2 * ["pending", "0"]


# Rank 1 notes when it raises, and never makes the call that the others are in.
LEAVE = """
import pathlib
def leave():
    pathlib.Path({path!r}).write_text(str(time.time()))
    raise ValueError("no such molecule")
"""
WAITING = {
    "eager collective": "mpi.allreduce(jnp.ones(3))",
    "queued collective": "jax.block_until_ready(jax.jit(mpi.allreduce)(jnp.ones(3)))",
    "receive": "mpi.recv(jnp.ones(3), 1)",
    "compiled loop": """
jax.block_until_ready(jax.jit(lambda x: jax.lax.while_loop(
    lambda x: x[0] >= 0, lambda x: mpi.allreduce(x) * 0.5, x))(jnp.ones(3)))""",
}
RAISING = {
    "raise": "leave()",
    "thread": "threading.Thread(target=leave).start(); time.sleep(60)",
    "callback": """
def host(x):
    leave()
jax.block_until_ready(jax.jit(lambda x: mpi.allreduce(
    jax.pure_callback(host, jax.ShapeDtypeStruct((3,), jnp.float32), x)))(jnp.ones(3)))""",
}
ENDINGS = [(waiting, "raise") for waiting in WAITING]
ENDINGS += [("compiled loop", "thread"), ("queued collective", "callback")]


@pytest.mark.parametrize(("waiting", "raising"), ENDINGS)
def test_one_rank_raises_while_the_other_waits(waiting, raising, tmp_path):
    left = tmp_path / "left"
    program = HEADER + LEAVE.format(path=str(left))
    program += f"if rank == 1:\n    time.sleep(0.5)\n    exec({RAISING[raising]!r})\n"
    program += f"else:\n    exec({WAITING[waiting]!r})\n"
    done = run_ranks(program, np=2)
    ended = time.time()
    assert done.returncode != 0
    assert not done.timed_out
    assert ended - float(left.read_text()) < 20.0
    assert "rank 1 of 2: uncaught exception" in done.stderr
    assert "rank 1: " in done.stderr
    assert "no such molecule" in done.stderr


def test_failure_in_flight_at_the_end_is_not_success():
    """Nobody reads the result, so no exception is raised; the job must not look well."""
    program = (
        HEADER
        + """
if rank == 0:
    mpi.send(jnp.ones(8), 1)
else:
    jax.jit(lambda x: mpi.recv(x, 0))(jnp.ones(2))
"""
    )
    done = run_ranks(program, np=2)
    assert "MPI_Recv failed on rank 1 of 2" in done.stderr
    assert done.returncode != 0


def test_failed_mpi_call_ends_the_job():
    program = (
        HEADER
        + """
if rank == 0:
    mpi.send(jnp.ones(8), 1)
    mpi.recv(jnp.ones(1), 1)
else:
    mpi.recv(jnp.ones(2), 0)
"""
    )
    done = run_ranks(program, np=2)
    assert done.returncode != 0
    assert "Timeout (" not in done.stderr  # of the job's own time limit
    assert "MPI_Recv failed on rank 1 of 2" in done.stderr
    assert "rank 1 of 2: uncaught exception" in done.stderr


@pytest.mark.parametrize("end", ["raise SystemExit(0)", "sys.exit(3)"])
def test_exit_status_of_all_ranks_is_kept(end):
    """Also where they do not end at one moment."""
    done = run_ranks(
        f"{HEADER}mpi.allreduce(1.0)\ntime.sleep(rank)\n{end}\n",
        np=2,
        env={"DISTSOLVE_EXIT_GRACE": "30"},
    )
    assert str(done.returncode) in end
    assert "Traceback" not in done.stderr
    assert "ending the job" not in done.stderr


def test_one_rank_exits_with_a_failure_while_the_other_waits():
    """What it has queued is done before."""
    program = (
        HEADER
        + """
reduce = jax.jit(mpi.allreduce)
x = reduce(jnp.ones(1_000_000))
if rank == 1:
    sys.exit(3)
jax.block_until_ready(reduce(x))
"""
    )
    done = run_ranks(program, np=2, env={"DISTSOLVE_EXIT_GRACE": "0.5"})
    line = program.split("\n").index("    sys.exit(3)") + 1
    said = rf"^rank 1 of 2: sys\.exit with status 3 at \S+job\.py:{line}, and after 0\.5 s"
    assert re.search(said, done.stderr, re.MULTILINE), done.stderr
    assert done.returncode == 3


def test_an_exit_without_failure_leaves_the_others_alone():
    """One that was caught, also where it is kept, or came in another thread, is none."""
    program = (
        HEADER
        + """
import _thread
mpi.allreduce(1.0)
if rank == 1:
    _thread.start_new_thread(sys.exit, (3,))
    try:
        sys.exit(3)
    except SystemExit as error:
        kept = error
        time.sleep(0.5)
    sys.exit(0)
time.sleep(2)
print("went on", flush=True)
"""
    )
    done = run_ranks(program, np=2, env={"DISTSOLVE_EXIT_GRACE": "0.5"}).check()
    assert done.stdout == "went on\n"
    assert "ignored" not in done.stderr


@pytest.mark.above_mpi
def test_exit_of_a_thread_is_not_an_error():
    program = (
        HEADER
        + """
thread = threading.Thread(target=lambda: sys.exit(1))
thread.start()
thread.join()
assert mpi.allreduce(1.0) == 2.0
"""
    )
    assert "Traceback" not in run_ranks(program, np=2).check().stderr


@pytest.mark.parametrize("late", [0, 1], ids=["late", "early"])
def test_rank_0_finishes_at_another_time(late):
    program = (
        HEADER
        + f"""
jax.jit(mpi.allreduce)(jnp.ones(1000))
if rank == {late}:
    time.sleep(5)
"""
    )
    run_ranks(program, np=2).check()


def test_rank_that_raises_before_its_first_call_ends_the_job():
    program = """
from mpi4py import MPI
from distsolve import mpi
if MPI.COMM_WORLD.rank == 1:
    raise ValueError("no such molecule")
mpi.allreduce(1.0)
"""
    done = run_ranks(program, np=2, timeout=20)
    assert done.returncode != 0
    assert not done.timed_out
    assert "rank 1 of 2: uncaught exception" in done.stderr
    assert "no such molecule" in done.stderr


@pytest.mark.above_mpi
def test_debugging_can_keep_the_job():
    """With DISTSOLVE_ABORT=0 an exception is its own rank's alone: the other goes on to its end."""
    program = (
        HEADER
        + """
if rank == 1:
    raise ValueError("no such molecule")
time.sleep(1)
print("went on", flush=True)
"""
    )
    done = run_ranks(program, np=2, env={"DISTSOLVE_ABORT": "0"})
    assert "no such molecule" in done.stderr
    assert "ending the job" not in done.stderr
    assert "went on" in done.stdout


@pytest.mark.once
@pytest.mark.parametrize("name", ["DISTSOLVE_ABORT", "DISTSOLVE_NO_MPI"])
def test_a_switch_with_a_text_that_means_nothing_is_off(name, monkeypatch):
    """So the hook of exceptions works until the first use of MPI, which refuses the text."""
    for text, on in (("", False), ("0", False), ("1", True), ("false", False)):
        monkeypatch.setenv(name, text)
        assert switches.is_on(name) == on
    with pytest.raises(ValueError, match=f"{name} is 'false'; expected 1 for on, 0 for off"):
        switches.refuse_unknown()


def test_calls_after_finalize_raise():
    program = (
        HEADER
        + """
from mpi4py import MPI
compiled = jax.jit(mpi.allreduce).lower(jnp.ones(3)).compile()
request, wait = mpi.iallreduce(jnp.ones(3)), jax.jit(mpi.wait).lower(mpi.iallreduce(jnp.ones(3)))
wait = wait.compile()
jitted = jax.jit(lambda x: mpi.bcast(x))
jax.block_until_ready((compiled(jnp.ones(3)), jitted(jnp.ones(3)), mpi.allreduce(jnp.ones(3))))
MPI.Finalize()
for call in (
    lambda: compiled(jnp.ones(3)),
    lambda: jitted(jnp.ones(3)),
    lambda: mpi.allreduce(jnp.ones(3)),
    lambda: mpi.allreduce(jnp.ones(3), comm=MPI.COMM_WORLD),
    lambda: jax.jit(mpi.scan)(jnp.ones(3)),
    lambda: wait(request),
    mpi.barrier,
):
    try:
        jax.block_until_ready(call())
    except Exception as error:
        print(type(error).__name__, "|", error)
    else:
        print("no error")
"""
    )
    done = run_ranks(program, np=2).check()
    # Ranks may write into each other's lines: count sentences.
    said = done.stdout
    assert said.count("after MPI_Finalize") + said.count("has been finalised") == 14, said
    assert "no error" not in said


def test_first_use_after_finalize_raises():
    program = """
from mpi4py import MPI
from distsolve import mpi
MPI.Finalize()
try:
    mpi.rank()
except RuntimeError as error:
    print(error)
"""
    assert "MPI has been finalised" in run_ranks(program, np=1).check().stdout

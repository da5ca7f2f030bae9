"""MPI that cannot be used is refused at the first use, with both sides in the message."""

import pytest
from launch import run_ranks

pytestmark = pytest.mark.below_jax
HEADER = """\
import jax, jax.numpy as jnp, mpi4py
from distsolve import mpi
"""
ATTEMPT = """
from mpi4py import MPI
print("level", MPI.Query_thread())
try:
    print("total", mpi.allreduce(1.0))
except (RuntimeError, ImportError) as error:
    print(type(error).__name__, "|", error)
"""
LEVELS = ["single", "funneled", "serialized", "multiple"]


@pytest.mark.parametrize("wanted", LEVELS)
def test_thread_level(wanted):
    program = f"{HEADER}mpi4py.rc.thread_level = {wanted!r}\n{ATTEMPT}"
    level, said = run_ranks(program, np=1).check().stdout.splitlines()
    given = int(level.split()[1])
    # An MPI may give more than what was asked for.
    assert given >= LEVELS.index(wanted)
    if given >= LEVELS.index("serialized"):
        assert said == "total 1.0"
        return
    assert said.startswith("RuntimeError | ")
    assert f"thread level {LEVELS[given].upper()}" in said
    assert 'mpi4py.rc.thread_level = "multiple"' in said


def test_serialized_calls_from_many_threads():
    """Below MULTIPLE our calls take a lock: several devices' threads, one call at a time."""
    program = f"""{HEADER}
mpi4py.rc.thread_level = "serialized"
add = jax.jit(mpi.allreduce)
results = [add(jnp.full(1000, float(i))) for i in range(50)]
for i, y in enumerate(results):
    assert y[0] == 2.0 * i == y[-1], (i, y)
"""
    run_ranks(program, np=2).check()


def test_serialized_calls_in_the_background():
    """Below MULTIPLE no thread helps, and nothing may wait for it."""
    program = f"""{HEADER}
mpi4py.rc.thread_level = "serialized"
@jax.jit
def loop(x):
    def body(i, x):
        request, p = mpi.iallreduce(x, through=x)
        p = mpi.allreduce(p)
        return mpi.wait(request, after=p)[0] / 2 + 1
    return jax.lax.fori_loop(0, 50, body, x)
assert jnp.all(loop(jnp.ones(3)) == 51.0)
mpi.iallreduce(1.0)
"""
    run_ranks(program, np=2).check()


@pytest.mark.parametrize("fault", ["version", "size"])
def test_two_libraries_are_refused(fault):
    program = f"""{HEADER}
from distsolve.mpi.native import abi
bound = abi.bound_library
def other(handle):
    version, size = bound(handle)
    return ("MPI of another vendor", size) if {fault!r} == "version" else (version, size + 3)
abi.bound_library = other
{ATTEMPT}"""
    said = run_ranks(program, np=1).check().stdout
    assert "ImportError | " in said
    assert "load one MPI only" in said
    assert "world of 1" in said
    assert ("MPI of another vendor" if fault == "version" else "world of 4") in said


@pytest.mark.once
def test_missing_function_is_named():
    program = f"""{HEADER}
from distsolve.mpi.native import abi
abi.NAMES = (*abi.NAMES, "MPI_Not_there")
{ATTEMPT}"""
    said = run_ranks(program, np=1).check().stdout
    assert "ImportError | " in said
    assert "has no MPI_Not_there" in said


@pytest.mark.once
def test_unknown_machine_is_refused():
    program = f"""{HEADER}
import platform
platform.machine = lambda: "sparc64"
{ATTEMPT}"""
    said = run_ranks(program, np=1).check().stdout
    assert "ImportError | " in said
    assert "sparc64" in said


@pytest.mark.once
@pytest.mark.parametrize("text", ["many", "0", "-5", str(2**40)])
def test_wrong_chunk_variable(text):
    program = f"""{HEADER}
try:
    mpi.allreduce(1.0)
except ValueError as error:
    print(error)
"""
    done = run_ranks(program, np=1, env={"DISTSOLVE_CHUNK_BYTES": text}).check()
    assert f"DISTSOLVE_CHUNK_BYTES is '{text}'; expected a number of bytes" in done.stdout


def test_chunk_variable_and_in_place_switch():
    program = f"""{HEADER}
x = jnp.ones(2500)
y = jax.jit(mpi.allreduce, donate_argnums=0)(x)
assert jnp.all(y == 2.0)
print(mpi.call_count()["MPI_Allreduce"])
"""
    for switch in ("", "1"):
        env = {"DISTSOLVE_CHUNK_BYTES": "4000", "DISTSOLVE_NO_IN_PLACE": switch}
        said = run_ranks(program, np=2, env=env).check().stdout
        assert "".join(said.split()) == "33"  # ranks may write into each other's lines

"""What an import does not do, and a world of one rank without any MPI."""

import os
import sys

import pytest
from launch import job_environment, mpi_name, openmpi_prefix, run_command, run_ranks

IMPORTS = """
import sys
import distsolve, distsolve.mpi, distsolve.linalg
assert "mpi4py.MPI" not in sys.modules, "MPI was initialised"
import jax
# JAX refuses this once it has a backend.
jax.config.update("jax_num_cpu_devices", 3)
assert len(jax.devices()) == 3
print("lazy")
"""


def run_alone(program, **extra):
    """Run a program without a launcher, which would have told where Open MPI's libraries are."""
    if mpi_name() == "openmpi":
        extra["LD_LIBRARY_PATH"] = str(openmpi_prefix() / "lib")
    env = job_environment(mpi_name(), extra)
    return run_command([sys.executable, "-c", program], 60, env).check()


@pytest.mark.above_mpi
def test_import_starts_neither_mpi_nor_jax():
    assert "lazy" in run_alone(IMPORTS).stdout


def test_program_without_a_launcher_is_a_world_of_one():
    program = """
import jax.numpy as jnp
from distsolve import mpi
assert (mpi.rank(), mpi.size()) == (0, 1)
assert mpi.allreduce(3.0) == 3.0
print("alone")
"""
    assert "alone" in run_alone(program).stdout


TWO_DEVICES = """
import jax, jax.numpy as jnp
jax.config.update("jax_num_cpu_devices", 2)
from distsolve import mpi

add = jax.jit(lambda x: mpi.allreduce(x))
for i in (0, 1, 1, 0):
    x = jax.device_put(jnp.arange(3.0), jax.devices()[i])
    y = add(x)
    assert y.devices() == x.devices() and (y == x).all(), y

# What fails on one in the background is told once on the other.
from mpi4py import MPI

comm = MPI.COMM_SELF.Dup()
late = jax.jit(lambda m: mpi.allreduce(jnp.sum(m @ m), comm=comm))
matrix = jnp.ones((500, 500))
jax.block_until_ready(late(matrix))
jax.block_until_ready(add(x))
comm.Free()
x = jax.device_put(x, jax.devices()[1])
told = []
for call in (lambda: late(matrix), *3 * [lambda: jax.block_until_ready(add(x))]):
    try:
        call()
    except jax.errors.JaxRuntimeError as error:
        told.append(str(error))
assert len(told) == 1 and "has been freed" in told[0], told
assert (add(x) == x).all()
print("both")
"""


@pytest.mark.above_mpi
def test_programs_may_take_turns_on_two_devices():
    assert "both" in run_alone(TWO_DEVICES).stdout


WITHOUT_MPI = """
import sys
sys.modules["mpi4py"] = None  # not even installed
import jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_enable_x64", True)
from distsolve import mpi

x = jnp.arange(1.0, 7.0).reshape(1, 6)
S = jnp.asarray([[2.0, 1.0], [1.0, 3.0]])
bits = jnp.asarray([5, 6])
flags = jnp.asarray([True, False])
SAME = {
    "allreduce": (mpi.allreduce, x), "reduce": (mpi.reduce, x), "scan": (mpi.scan, x),
    "bcast": (mpi.bcast, x), "alltoall": (mpi.alltoall, x), "pvary": (mpi.pvary, x),
    "allreduce_symmetric": (mpi.allreduce_symmetric, S),
    "gatherv": (lambda x: mpi.gatherv(x, [1]), x), "scatterv": (lambda x: mpi.scatterv(x, [1]), x),
    "allgatherv": (lambda x: mpi.allgatherv(x, [1]), x),
    "alltoallv": (lambda x: mpi.alltoallv(x, [1], [1]), x),
    "sendrecv": (lambda x: mpi.sendrecv(x, 0.0 * x, 0, 0), x),
    "iallreduce": (lambda x: mpi.wait(mpi.iallreduce(x), after=x)[0], x),
    "recv": (lambda x: mpi.recv(x, mpi.PROC_NULL), x),
    "float16": (mpi.allreduce, x.astype(jnp.float16)),
    "bfloat16": (mpi.allreduce, x.astype(jnp.bfloat16)),
    "complex": (mpi.allreduce, x * 1j),
}
for op in mpi.Op:
    operand = flags if op.name[0] == "L" else bits
    SAME[str(op)] = (lambda x, op=op: mpi.allreduce(x, op), operand)
OTHER = {
    "exscan": (mpi.exscan, x, 0.0 * x),
    "gather": (mpi.gather, x, x[None]), "allgather": (mpi.allgather, x, x[None]),
    "scatter": (mpi.scatter, x, x[0]), "reduce_scatter": (mpi.reduce_scatter, x, x[0]),
}

def nothing(x):
    mpi.barrier()
    mpi.send(x, mpi.PROC_NULL)
    return x

cases = [(name, f, x, x) for name, (f, x) in SAME.items()]
cases += [(name, f, x, y) for name, (f, x, y) in OTHER.items()]
cases += [("send and barrier", nothing, x, x)]
for name, f, operand, expected in cases:
    for run in (f, jax.jit(f)):
        y = run(operand)
        assert y.dtype == expected.dtype and jnp.array_equal(y, expected), (name, y)
tree = mpi.allreduce({"a": jnp.ones(3), "b": jnp.ones(100_000)}, donate=True)
assert tree["b"].sum() == 100_000
y, status = mpi.sendrecv(x, x, 0, 0, sendtag=4, return_status=True)
assert [int(field) for field in status] == [0, 4, 6]
assert jax.grad(lambda p: mpi.allreduce(mpi.pvary(p) ** 2))(3.0) == 6.0
assert (mpi.rank(), mpi.size()) == (0, 1)
mpi.assert_in_place(mpi.allreduce, x)
for wrong in (lambda: mpi.allreduce(x, comm="world"), lambda: mpi.bcast(x, 1)):
    try:
        wrong()
    except (TypeError, ValueError) as error:
        print(error)
    else:
        raise AssertionError("accepted")
try:
    mpi.recv(x, 0)
except jax.errors.JaxRuntimeError as error:
    print(error)
else:
    raise AssertionError("accepted")
from distsolve.linalg import cg
found, info = cg(lambda v: mpi.allreduce(v), jnp.arange(1.0, 4.0), tol=1e-10)
assert info.converged and jnp.allclose(found, jnp.arange(1.0, 4.0))
assert "mpi4py.MPI" not in sys.modules
print("all")
"""


@pytest.mark.above_mpi
def test_every_primitive_without_mpi():
    done = run_alone(WITHOUT_MPI, DISTSOLVE_NO_MPI="1")
    lines = done.stdout.splitlines()
    assert lines[-1] == "all"
    assert "DISTSOLVE_NO_MPI=1 there is only the world of one rank" in lines[0]
    assert "`root` of bcast is 1" in lines[1]
    assert "a world of one rank has no other rank" in lines[2]


def test_switch_can_be_off():
    program = "from distsolve import mpi; print(mpi.size())"
    done = run_ranks(program, np=2, env={"DISTSOLVE_NO_MPI": "0"}).check()
    assert "".join(done.stdout.split()) == "22"  # ranks may write into each other's lines


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="reads the loaded libraries")
def test_world_of_one_loads_no_mpi_library():
    program = """
from distsolve import mpi
assert mpi.allreduce(2.0) == 2.0
print([line for line in open("/proc/self/maps") if "libmpi" in line])
"""
    assert run_alone(program, DISTSOLVE_NO_MPI="1").stdout.strip() == "[]"

"""JAX's processes are the ranks of MPI: they meet, or all of them say why not."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from launch import run_ranks

HEADER = """\
import os
import distsolve, jax
from distsolve import mpi, rendezvous
"""
# With a dead proxy a connection would fail, by whichever name gRPC finds it.
PROXIES = dict.fromkeys(
    ("http_proxy", "HTTPS_PROXY", "https_proxy", "grpc_proxy"), "http://127.0.0.1:9"
)
# What a launcher says is not asked. Set by the program: mpiexec itself would believe it.
LAUNCHER = """
os.environ |= {"SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "9",
               "SLURM_PROCID": "7", "SLURM_LOCALID": "7"}
"""
TOGETHER = """
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
assert (jax.process_index(), jax.process_count()) == (comm.rank, comm.size)
mesh = jax.make_mesh((2,), ("ranks",))
local = jnp.full(2, 1.0 + comm.rank)
x = jax.make_array_from_process_local_data(NamedSharding(mesh, P("ranks")), local)
add = jax.shard_map(lambda x: jax.lax.psum(x, "ranks"), mesh=mesh, in_specs=P("ranks"),
                    out_specs=P())
assert jnp.array_equal(jax.jit(add)(x), jnp.full(2, 3.0))
# MPI inside jit goes on next to it, on each process's own device.
assert jnp.array_equal(jax.jit(mpi.allreduce)(local), jnp.full(2, 3.0))
assert mpi.allreduce(local, comm=comm)[0] == 3.0
"""


def test_two_ranks_become_two_processes():
    program = f"""{HEADER}
from mpi4py import MPI
{LAUNCHER}
comm = MPI.COMM_WORLD.Split(0, key=-MPI.COMM_WORLD.rank)  # rank 0 is another than the world's
environment = dict(os.environ)
distsolve.initialize(comm)
assert dict(os.environ) == environment
rendezvous._meet = None  # nobody has to meet again
distsolve.initialize(comm)
rendezvous.meet(comm)
assert distsolve.local_rank(comm) == comm.rank
{TOGETHER}
jax.distributed.shutdown()
try:
    distsolve.initialize(comm)
except RuntimeError as error:
    assert "JAX has a backend already: distsolve.initialize() came too late" in str(error)
    assert "Move the call to the top of the program" in str(error)
else:
    raise AssertionError("accepted")
"""
    done = run_ranks(program, np=2, env=PROXIES).check()
    assert done.stderr.count("HTTPS_PROXY, grpc_proxy, http_proxy, https_proxy bypassed") == 1
    assert "JAX detected proxy" not in done.stderr


def test_the_line_that_programs_have():
    program = f"""{HEADER}
from mpi4py.MPI import COMM_WORLD as comm
{LAUNCHER}
import jax

import distsolve.cluster

jax.distributed.initialize()
{TOGETHER}"""
    run_ranks(program, np=2).check()


@pytest.mark.once
@pytest.mark.parametrize("method", ["slurm", "auto"])
def test_a_launcher_can_be_asked(method):
    program = f"""{HEADER}
import socket
from mpi4py.MPI import COMM_WORLD as comm
with socket.create_server(("127.0.0.1", 0)) as server:
    port = comm.bcast(str(server.getsockname()[1]))
os.environ |= {{"SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_NTASKS": "2",
                "SLURM_PROCID": str(1 - comm.rank), "SLURM_LOCALID": "0",
                "JAX_COORDINATOR_PORT": port}}
distsolve.initialize(method={method!r})
assert (jax.process_index(), jax.process_count()) == (1 - comm.rank, 2)
distsolve.initialize(method={method!r})
"""
    done = run_ranks(program, np=2, env=PROXIES).check()
    assert done.stderr.count("grpc_proxy, http_proxy, https_proxy bypassed while JAX") == 1


def test_all_ranks_hear_why_they_did_not_meet():
    """Then, at last, at a port where a stranger answered first, they do."""
    program = f"""{HEADER}
import socket
from distsolve.mpi import comm as communicators

def refused(kind, *words, **arguments):
    try:
        distsolve.initialize(**arguments)
    except kind as error:
        assert all(word in str(error) for word in words), error
    else:
        raise AssertionError("accepted")

refused(ValueError, "`timeout` is 0", "positive", timeout=0)
record = communicators.resolve()
host_name, socket.gethostname = socket.gethostname, lambda: "localhost"
communicators._world = record._replace(local_rank=0, local_size=1)  # as on two nodes
refused(RuntimeError, "'localhost'", "loopback", "`interface=`")
communicators._world = record
socket.gethostname = host_name
refused(ValueError, "`interface` is 'wire9'", "'lo'", interface="wire9")

answer, calls = rendezvous._answer, []
def stranger(server, token):
    calls.append(token)
    answer(server, bytes(16) if len(calls) % rendezvous.ATTEMPTS else token)
def wrong(server, token):
    answer(server, bytes(16))

rendezvous._answer = lambda server, token: None
refused(ConnectionError, "Rank 0 did not reach rank 0 at 127.0.0.1:", "within 2 s: timed out",
        timeout=2)
rendezvous._answer = wrong
refused(ConnectionError, "at 127.0.0.1:", "another program answers there")
rendezvous._answer = stranger
distsolve.initialize()
assert len(calls) == (rendezvous.ATTEMPTS if mpi.rank() == 0 else 0)
from mpi4py.MPI import COMM_WORLD as comm
{TOGETHER}"""
    run_ranks(program, np=2).check()


def test_two_jobs_at_once():
    program = HEADER + "distsolve.initialize()\nassert jax.process_count() == 2\n"
    with ThreadPoolExecutor(2) as pool:
        for job in [pool.submit(run_ranks, program, np=2) for _ in range(4)]:
            job.result().check()


@pytest.mark.above_mpi
def test_one_rank_needs_nothing():
    program = f"""{HEADER}
distsolve.initialize()
assert distsolve.select_device() is None and distsolve.local_rank() == 0
assert not jax.distributed.is_initialized()
jax.config.update("jax_num_cpu_devices", 3)  # refused once there is a backend
assert len(jax.devices()) == 3
distsolve.initialize()
"""
    run_ranks(program, np=2, env={"DISTSOLVE_NO_MPI": "1"}).check()


@pytest.mark.above_mpi
def test_each_rank_of_a_node_takes_its_gpu():
    """MPICH treats the ranks as if each had its own node, Open MPI does not."""
    program = f"""{HEADER}
from jax._src.xla_bridge import CUDA_VISIBLE_DEVICES
from mpi4py import MPI
node = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
assert distsolve.select_device() is None
jax.config.update("jax_platforms", "cuda,cpu")
assert distsolve.select_device() == distsolve.local_rank() == node.rank
assert CUDA_VISIBLE_DEVICES.value == str(node.rank)
"""
    env = {"CUDA_VISIBLE_DEVICES": "4,5", "MPIR_CVAR_NOLOCAL": "1", "UCX_TLS": "tcp,self"}
    run_ranks(program, np=2, env=env).check()

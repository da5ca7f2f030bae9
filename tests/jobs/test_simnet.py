"""The library that slows collectives down: right values, no sooner than the delay, overlap."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from launch import ROOT, mpi_name, run_ranks

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(mpi_name() != "mpich", reason="built with the mpicc of the mpich wheel"),
]

PROGRAM = """
import ctypes, time
import jax, jax.numpy as jnp, numpy as np
from mpi4py import MPI
from distsolve import mpi

net = ctypes.CDLL(None)
net.simnet_delay.argtypes = 2 * [ctypes.c_double]
net.simnet_calls.restype = net.simnet_bytes.restype = ctypes.c_int64
world = MPI.COMM_WORLD
mine = np.arange(4.0) + world.rank
both = 2 * np.arange(4.0) + 1

def timed(call):
    world.Barrier()
    start = time.perf_counter()
    result = call()
    return result, time.perf_counter() - start

# Ours, and the variables of the environment: 50 ms.
reduce = jax.jit(mpi.allreduce)
y, seconds = timed(lambda: np.asarray(reduce(mine)))
assert seconds >= 0.05 and np.array_equal(y, both), (seconds, y)

# Non-blocking, with work in between: complete once, and not before its time.
out = np.empty(4)
calls, sent = net.simnet_calls(), net.simnet_bytes()
start = time.perf_counter()
request = world.Iallreduce(mine, out)
time.sleep(0.02)
ready = request.Test()
assert not ready or time.perf_counter() - start >= 0.05
request.Wait()
assert time.perf_counter() - start >= 0.05
assert np.array_equal(out, both), out
assert (net.simnet_calls() - calls, net.simnet_bytes() - sent) == (1, 32)

# Polled, and several at once; handles are used again.
for _ in range(2):
    out[:] = 0
    request = world.Iallreduce(mine, out)
    while not request.Test():
        time.sleep(0.002)
    assert np.array_equal(out, both), out
first, second = np.empty(4), np.empty(4)
requests = [world.Iallreduce(mine, first), world.Ibarrier(), world.Iallreduce(mine, second)]
_, seconds = timed(lambda: MPI.Request.Waitall(requests))
assert np.array_equal(first, both) and np.array_equal(second, both)

# By bytes: 1000 us for 1e6 bytes, and 8e6 bytes. The barrier before takes no time.
net.simnet_delay(0.0, 1000.0)
big = np.ones(1_000_000)
_, seconds = timed(lambda: world.Allreduce(MPI.IN_PLACE, big))
assert seconds >= 0.008 and np.all(big == 2.0), seconds
net.simnet_delay(0.0, 0.0)
print("passed", flush=True)
"""

# On 3 ranks a tree has 2 stages, and each rank 2 partners.
TREE = """
import time
import numpy as np
from mpi4py import MPI

world, mine, all = MPI.COMM_WORLD, np.ones(3), np.ones(3)
big = np.ones(750_000)
for call, expected in (
    (lambda: world.Bcast(mine), 0.04),
    (lambda: world.Alltoall(mine, all), 0.04),
    (lambda: world.Allreduce(MPI.IN_PLACE, big), 0.04 + 0.08),  # 6e6 bytes, 4/3 times
):
    world.Barrier()
    start = time.perf_counter()
    call()
    seconds = time.perf_counter() - start
    assert seconds >= expected, (seconds, expected)
print("passed", flush=True)
"""


@pytest.fixture(scope="module")
def simnet():
    """Path of the library."""
    if not Path(sys.executable).with_name("mpicc").exists():
        pytest.skip("no mpicc beside this Python: the mpich wheel is not installed")
    command = [sys.executable, ROOT / "benchmarks/simnet/build.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.strip()


def test_delays_and_counts(simnet):
    delay = {"LD_PRELOAD": simnet, "SIMNET_ALPHA_US": "50000", "JAX_ENABLE_X64": "1"}
    assert run_ranks(PROGRAM, np=2, env=delay).check().stdout.count("passed") == 2


def test_delays_depend_on_the_ranks(simnet):
    delay = {"LD_PRELOAD": simnet, "SIMNET_ALPHA_US": "20000", "SIMNET_BETA_US_PER_MB": "10000"}
    done = run_ranks(TREE, np=3, env=delay | {"SIMNET_TREE": "1"}).check()
    assert done.stdout.count("passed") == 3


def test_wrong_delay_is_named(simnet):
    env = os.environ | {"LD_PRELOAD": simnet, "SIMNET_ALPHA_US": "2 ms"}
    command = [sys.executable, "-c", "print('ran')"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60)
    assert done.returncode == 2
    assert "SIMNET_ALPHA_US must be a number >= 0, got '2 ms'" in done.stderr

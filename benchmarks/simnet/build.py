"""Builds simnet, the library that slows collectives down, and prints its path.

LD_PRELOAD=$(python benchmarks/simnet/build.py) SIMNET_ALPHA_US=2000 python ... on every rank: with
MPICH `mpiexec -n 2 env LD_PRELOAD=... python ...`. simnet.c says what it models.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
BUILT = HERE.parents[1] / "build/simnet"


def library(mpicc):
    """Path of the library built with an MPI's compiler wrapper; built once for each source."""
    sources = b"".join((HERE / name).read_bytes() for name in ("simnet.c", "collectives.h"))
    key = hashlib.sha256(sources + str(mpicc).encode()).hexdigest()[:16]
    path = BUILT / f"simnet-{key}.so"
    if path.exists():
        return path
    BUILT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BUILT) as folder:
        unfinished = Path(folder, path.name)
        command = [str(mpicc), "-O2", "-Wall", "-Wextra", "-fPIC", "-shared", "-pthread"]
        command += [str(HERE / "simnet.c"), "-o", str(unfinished)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if done.returncode:
            raise RuntimeError(f"simnet does not compile: {done.stderr.strip()[-2000:]}")
        os.replace(unfinished, path)
    return path


def main():
    """Build with the mpicc beside this Python, or the one on PATH."""
    beside = Path(sys.executable).parent / "mpicc"
    mpicc = str(beside) if beside.exists() else shutil.which("mpicc")
    if mpicc is None:
        sys.exit("no mpicc beside this Python or on PATH: pip install mpich")
    print(library(mpicc))


if __name__ == "__main__":
    main()

"""A short run of `make soak`."""

from pathlib import Path

from launch import mpi_name, run_ranks


def test_soak():
    program = Path(__file__).with_name("soak.py")
    # Compiled as users do, which takes a minute, under one MPI.
    environment = {"XLA_FLAGS": ""} if mpi_name() == "mpich" else {}
    done = run_ranks(program, np=2, timeout=250, args=["300"], env=environment).check()
    assert "300 solves on 2 ranks" in done.stdout
    for seen in ("converges:", "indefinite:", "nan:"):
        assert seen in done.stdout

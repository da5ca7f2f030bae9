"""A short run of `make soak`."""

from pathlib import Path

from launch import run_ranks


def test_soak():
    program = Path(__file__).with_name("soak.py")
    done = run_ranks(program, np=2, timeout=250, args=["300"]).check()
    assert "300 solves on 2 ranks" in done.stdout
    for seen in ("converges:", "indefinite:", "nan:"):
        assert seen in done.stdout

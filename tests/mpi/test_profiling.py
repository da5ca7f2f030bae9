"""The profile: waiting and moving are told apart, and the latest rank is named."""

import jax
import jax.numpy as jnp
import pytest
from spmd import agree, ranks

from distsolve import mpi
from distsolve.mpi import profiling
from distsolve.mpi.native import recorder
from distsolve.mpi.profiling import _Event, _lines

pytestmark = [pytest.mark.few_ranks, pytest.mark.below_jax]


def event(rank, number, entered, left, where="a.py:1"):
    """Give a collective of two ranks."""
    return _Event(rank, (1, 0, number), 2, "MPI_Allreduce", where, 8, entered, left)


@pytest.mark.once
def test_waiting_ends_when_the_last_rank_enters():
    events = [event(0, 1, 10.0, 14.0), event(1, 1, 13.0, 14.5)]
    events += [event(0, 2, 19.5, 20.5), event(1, 2, 20.0, 20.25)]
    (line,) = _lines(events)
    agree((line.calls, line.nbytes) == (2, 8))
    agree(line.wait == (3.0 + 0 + 0.5 + 0) / 2)
    agree(line.transfer == (1.0 + 1.5 + 0.5 + 0.25) / 2)
    agree((line.latest, line.share) == (1, 1.0))


@pytest.mark.once
def test_the_longest_line_comes_first_and_halves_are_left_out():
    events = [event(0, 1, 0.0, 1.0), event(1, 1, 0.0, 1.0)]
    events += [event(0, 2, 2.0, 9.0, "b.py:2"), event(1, 2, 2.0, 9.0, "b.py:2")]
    events += [event(0, 3, 10.0, 99.0)]  # rank 1 was in it before the block
    events += [_Event(0, None, 1, "MPI_Send", "c.py:3", 8, 0.0, 0.5)]
    lines = _lines(events)
    agree([line.where for line in lines] == ["b.py:2", "a.py:1", "c.py:3"])
    agree((lines[2].wait, lines[2].latest, lines[2].transfer) == (None, None, 0.5))


def test_a_block_is_measured(tmp_path):
    size = ranks().size
    half = ranks().communicators["halves"]
    step = jax.jit(lambda x: mpi.allreduce(x))
    jax.block_until_ready(step(jnp.ones(1000, jnp.float32)))
    with mpi.profile() as found:
        agree(found.lines == [])
        for _ in range(5):
            mpi.allreduce(jnp.ones(10, jnp.float32), comm=half)
        for _ in range(3):
            step(jnp.ones(1000, jnp.float32))
    mpi.allreduce(1.0)  # not in the block
    calls = {(line.name, line.calls, line.nbytes) for line in found.lines}
    agree({("MPI_Allreduce", 5, 40), ("MPI_Allreduce", 3, 4000)} <= calls, str(calls))
    agree(all(line.wait >= 0 and line.transfer >= 0 for line in found.lines))
    agree(all(line.where.startswith(f"{__file__}:") for line in found.lines[:2]))
    text = str(found)
    agree(text.startswith(f"{size} ranks, " if size > 1 else "1 rank, ") and f"{__file__}:" in text)
    everyone = ranks().reporting.allgather(text)
    agree(len(set(everyone)) == 1)
    picture = tmp_path / "profile.png"
    found.plot(picture)
    agree(picture.read_bytes()[:4] == b"\x89PNG")


def test_clocks_are_compared(monkeypatch):
    """Rank r's clock is r hours ahead, and the profile does not see it."""
    ahead = 3600 * ranks().rank
    clock, end = profiling.time.monotonic, recorder.end_profile

    def entries():
        return [
            entry | {key: entry[key] + ahead * 10**9 for key in ("entered", "left")}
            for entry in end()
        ]

    monkeypatch.setattr(profiling.time, "monotonic", lambda: clock() + ahead)
    monkeypatch.setattr(recorder, "end_profile", entries)
    with mpi.profile() as found:
        mpi.barrier()
    monkeypatch.undo()
    (line,) = found.lines
    agree(0 <= line.wait < 60, str(found))
    agree(0 <= line.transfer < 60, str(found))


def test_an_exception_leaves_the_block_without_messages():
    try:
        with mpi.profile():
            raise ValueError("mine")
    except ValueError as error:
        agree(str(error) == "mine")
    with mpi.profile() as again:
        mpi.barrier()
    agree([line.name for line in again.lines] == ["MPI_Barrier"])


def test_a_profile_in_a_profile_or_a_program_is_refused():
    """Before any message: the one would take the other's calls, or see none."""

    @jax.jit
    def program(x):
        with mpi.profile():
            return mpi.allreduce(x)

    with pytest.raises(RuntimeError, match="around the call"):
        program(1.0)
    with mpi.profile() as found:
        mpi.barrier()
        with pytest.raises(RuntimeError, match="already"), mpi.profile():
            pass
    agree([line.name for line in found.lines] == ["MPI_Barrier"])

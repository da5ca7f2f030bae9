"""The tests of the primitives can fail: they do when a primitive is replaced by local work.

Two mutants of each: the identity, and arithmetic without communication that gets shapes right.
"""

import jax.numpy as jnp
import pytest
from mpi import oracle
from mpi.test_messages import check_chain
from mpi.test_ops import check, check_barrier
from spmd import ROADS, ranks

from distsolve import mpi
from distsolve.mpi.nonblocking import iallreduce

pytestmark = pytest.mark.below_jax


@pytest.fixture(autouse=True)
def several_ranks(world):
    if world.size == 1:
        pytest.skip("on one rank local work is all there is")


def times_size(x, *arguments, comm=None, **keywords):
    """x * size, the result if all ranks had the same values."""
    return x * comm.size


def of_shape(shape):
    """Local values, repeated until a shape is full that depends on rank, size and arguments."""

    def mutant(x, *arguments, comm=None, **keywords):
        return jnp.resize(x * comm.size, shape(x, comm.rank, comm.size, *arguments))

    return mutant


def elsewhere_back(shape):
    """The same at the root; the other ranks get their operand back, as they should."""

    def at_root(x, rank, size, *arguments):
        return shape(x, size, *arguments) if rank == arguments[-1] else x.shape

    def mutant(x, *arguments, comm=None, **keywords):
        return of_shape(at_root)(x, *arguments, comm=comm) if comm.rank == arguments[-1] else x

    return mutant


def own_row(x, rank, size, root):
    return x.shape[1:] if rank == root else x.shape


def kept_apart(scale):
    """A reduction in the background that no other rank takes part in."""

    def mutant(x, op, *, comm):
        return iallreduce(scale(x, comm), op, comm=ranks().communicators["self"])

    return mutant


LOCAL = {
    "allreduce": times_size,
    "iallreduce": kept_apart(lambda x, comm: x * comm.size),
    "reduce": times_size,
    "scan": lambda x, *arguments, comm=None: x * (comm.rank + 1),
    "exscan": lambda x, *arguments, comm=None: x * comm.rank,
    "reduce_scatter": lambda x, *arguments, comm=None: x[comm.rank] * comm.size,
    "bcast": times_size,
    "gather": elsewhere_back(lambda x, size, root: (size, *x.shape)),
    "scatter": of_shape(own_row),
    "allgather": of_shape(lambda x, rank, size: (size, *x.shape)),
    "alltoall": times_size,
    "gatherv": elsewhere_back(lambda x, size, counts, root: (sum(counts), *x.shape[1:])),
    "scatterv": of_shape(lambda x, rank, size, counts, root: (counts[rank], *x.shape[1:])),
    "allgatherv": of_shape(lambda x, rank, size, counts: (sum(counts), *x.shape[1:])),
    "alltoallv": of_shape(lambda x, rank, size, sent, received: (sum(received), *x.shape[1:])),
    "sendrecv": lambda sendbuf, recvbuf, *peers, comm=None: sendbuf * comm.size,
}
IDENTITY = dict.fromkeys(oracle.SERIAL, lambda x, *arguments, comm=None: x)
IDENTITY["sendrecv"] = lambda sendbuf, recvbuf, *peers, comm=None: sendbuf
IDENTITY["iallreduce"] = kept_apart(lambda x, comm: x)
MUTANTS = {"identity": IDENTITY, "local arithmetic": LOCAL}


def test_every_collective_has_its_mutants():
    assert set(LOCAL) == set(IDENTITY) == set(oracle.SERIAL)


@pytest.mark.parametrize("kind", MUTANTS)
@pytest.mark.parametrize("name", oracle.SERIAL)
def test_a_collective_that_does_not_communicate_is_found_out(name, kind, world, monkeypatch):
    every = oracle.variants(name, world.size)
    if name == "sendrecv":
        every.remove((0,))  # a message to oneself is the identity
    monkeypatch.setattr(mpi, name, MUTANTS[kind][name])
    for road in ROADS.values():
        with pytest.raises(AssertionError, match=name):
            check(name, world, road, every)


def test_a_barrier_that_does_not_wait_is_found_out(road, world, monkeypatch):
    monkeypatch.setattr(mpi, "barrier", lambda *, comm=None: None)
    with pytest.raises(AssertionError, match="left a barrier"):
        check_barrier(road)


@pytest.mark.parametrize("factor", [1, 2], ids=["identity", "local arithmetic"])
def test_messages_that_are_not_sent_are_found_out(factor, road, world, monkeypatch):
    monkeypatch.setattr(mpi, "send", lambda x, dest, *, tag=0, comm=None: None)
    monkeypatch.setattr(mpi, "recv", lambda x, source, *, tag=0, comm=None: x * factor)
    with pytest.raises(AssertionError, match="Mismatch"):
        check_chain(road, world)

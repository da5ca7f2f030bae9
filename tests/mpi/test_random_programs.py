"""Random programs of 1 to 20 primitives, jitted and eager, against the serial oracle.

A program has a pool of variables, each of one shape and dtype on all ranks. A step takes one of
them, makes the operand that its primitive wants by local work, communicates, and comes back to one
variable by local work; the result joins the pool. The whole pool is compared, so no step can be
dropped, merged or exchanged with another. The local work is written once: it runs in NumPy for all
ranks, and in JAX for one.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mpi import oracle
from spmd import agree, ranks

from distsolve import mpi

DTYPES = ("bool_", "int8", "uint16", "int32", "uint64", "float16", "bfloat16", "float32", "float64")
DTYPES += ("complex64", "complex128")
CHUNKED = ("allreduce", "reduce", "scan", "exscan", "bcast", "reduce_scatter")
# `chain` is a send and a recv, `tree` one allreduce of several variables.
NAMES = (*oracle.SERIAL, "chain", "tree", "symmetric", "barrier")


class Step(NamedTuple):
    """One primitive; numbers are taken modulo what there is to choose from."""

    name: str
    variable: int
    op: int
    number: int
    chunk: int


class Program(NamedTuple):
    inputs: list
    steps: list
    comm: str


def program(seed):
    """The program of a seed: every number below is as likely as any other."""
    random = np.random.default_rng(seed)

    def shape():
        return tuple(
            int(n) for n in random.integers(1, 5, random.integers(4)) - (random.random() < 0.1)
        )

    inputs = [(str(random.choice(DTYPES)), shape()) for _ in range(random.integers(1, 4))]
    steps = [
        Step(str(random.choice(NAMES)), *(int(n) for n in random.integers(0, 12, 4)))
        for _ in range(random.integers(1, 21))
    ]
    return Program(inputs, steps, str(random.choice(("world", "world", "dup", "halves"))))


# Hypothesis draws seeds: drawn one by one, the parts of a program would mostly be small numbers,
# and many programs alike. Ranks do not shrink what fails, so nothing is lost.
programs = st.integers(0, 2**32 - 1).map(program)


def small(x):
    """Bring whole numbers back to a small range, so that the next step is exact, too."""
    dtype = x.dtype
    if dtype == np.bool_:
        return x
    if jnp.issubdtype(dtype, jnp.complexfloating):
        five = x.real.dtype.type(5)
        return (x.real % five).astype(dtype) + (x.imag % five).astype(dtype) * dtype.type(1j)
    wide = x.astype(np.float32) if dtype.itemsize == 2 and dtype.kind != "u" else x
    return (wide % wide.dtype.type(5)).astype(dtype)


def rows(x, n, xp):
    """A number of rows that differ from one another."""
    made = [xp.flip(x) if k % 2 else xp.roll(x, k) for k in range(n)]
    return xp.stack(made) if made else xp.zeros((0, *x.shape), x.dtype)


def outer(x):
    """A symmetric or Hermitian matrix."""
    flat = x.reshape(-1)[:4]
    return flat[:, None] * flat.conj()[None, :]


def arguments_of(step, dtype, size):
    """The arguments behind the operand, as the oracle takes them."""
    if step.name not in oracle.REDUCTIONS:
        found = oracle.variants(step.name, size)
        return found[step.number % len(found)]
    ops = oracle.fitting(dtype)
    if step.name == "exscan" and (mpi.BAND not in ops and mpi.LAND not in ops):
        ops = (mpi.SUM, mpi.PROD)  # the identities of MIN and MAX are infinite
    op = ops[step.op % len(ops)]
    return (op, step.number % size) if step.name == "reduce" else (op,)


def operand(name, x, rank, size, arguments, xp):
    """What a rank passes, made from its variable."""
    wanted = oracle.shape(name, rank, size, arguments, x.shape)
    return rows(x, wanted[0], xp) if len(wanted) > x.ndim else x


def result(step, y, x):
    """The new variable, made from what a rank got and from its own, so that ranks stay different.

    What came without rows leaves the variable as it was.
    """
    if y.ndim > x.ndim:
        y = y[step.number % y.shape[0]] if y.shape[0] else x
    return y ^ x if x.dtype == np.bool_ else small(small(y) + x)


def summands(step, pool, sample):
    """The variables that a `tree` step sums."""
    return [i for i, x in enumerate(pool) if sample(x).dtype != np.bool_][step.number % 3 :][:4]


def simulate(program, world):
    """Run a program on all ranks at once; return the pools of all ranks, variable by variable."""
    size = len(world)
    pool = [
        [oracle.data(who, shape, getattr(jnp, dtype), i) for who in world]
        for i, (dtype, shape) in enumerate(program.inputs)
    ]
    for step in program.steps:
        xs = pool[step.variable % len(pool)]
        if step.name == "chain":
            pool.append([xs[max(r - 1, 0)] for r in range(size)])
        elif step.name == "tree":
            for i in summands(step, pool, lambda xs: xs[0]):
                pool.append([small(oracle.fold(mpi.SUM, pool[i]))] * size)
        elif step.name == "symmetric":
            if xs[0].dtype != np.bool_:
                total = oracle.fold(mpi.SUM, [outer(x) for x in xs])
                total = np.triu(total) + np.triu(total, 1).conj().T
                pool.append([small(total)] * size)
        elif step.name != "barrier":
            more = arguments_of(step, xs[0].dtype, size)
            sent = [operand(step.name, x, r, size, more, np) for r, x in enumerate(xs)]
            got = oracle.SERIAL[step.name](sent, *more)
            pool.append([result(step, y, x) for y, x in zip(got, xs, strict=True)])
    return pool


def send_along(x, comm):
    """Send to the next rank, receive from the one before; the first keeps its own."""
    rank, last = comm.rank, comm.size - 1
    before, after = rank - 1 if rank else mpi.PROC_NULL, rank + 1 if rank < last else mpi.PROC_NULL
    if rank % 2 == 0:
        mpi.send(x, after, tag=3, comm=comm)
        return mpi.recv(x, before, tag=3, comm=comm)
    y = mpi.recv(x, mpi.ANY_SOURCE, comm=comm)
    mpi.send(x, after, tag=3, comm=comm)
    return y


def perform(program, pool, comm, xp):
    """Run a program on this rank, with local work in JAX or in NumPy; return its pool."""
    pool = list(pool)
    local = np.asarray if xp is np else lambda y: y
    for step in program.steps:
        x = pool[step.variable % len(pool)]
        chunk = None if step.chunk % 2 else 16 * (step.chunk + 1)
        if step.name == "chain":
            pool.append(local(send_along(x, comm)))
        elif step.name == "tree":
            tree = {i: pool[i] for i in summands(step, pool, lambda x: x)}
            tree = mpi.allreduce(tree, comm=comm, chunk_bytes=chunk)
            pool += [small(local(tree[i])) for i in sorted(tree)]
        elif step.name == "symmetric":
            if x.dtype != np.bool_:
                S = mpi.allreduce_symmetric(outer(x), comm=comm, chunk_bytes=chunk)
                pool.append(small(local(S)))
        elif step.name == "barrier":
            mpi.barrier(comm=comm)
        else:
            more = arguments_of(step, x.dtype, comm.size)
            sent = operand(step.name, x, comm.rank, comm.size, more, xp)
            keywords = {"chunk_bytes": chunk} if step.name in CHUNKED else {}
            y = oracle.invoke(step.name, sent, comm, more, **keywords)
            pool.append(result(step, local(y), x))
    return pool


def check(program, xp):
    """Compare the whole pool of this rank with that of the simulation."""
    comm = ranks().communicators[program.comm]
    pool = simulate(program, oracle.members(comm))
    inputs = [xp.asarray(xs[comm.rank]) for xs in pool[: len(program.inputs)]]
    run = functools.partial(perform, program, comm=comm, xp=xp)
    got = (run if xp is np else jax.jit(run))(inputs)
    found = [oracle.difference(y, xs[comm.rank]) for y, xs in zip(got, pool, strict=True)]
    wrong = [f"variable {i}: {text}" for i, text in enumerate(found) if text is not None]
    agree(not wrong, f"{program}: {wrong[:1]}")


@pytest.mark.watchdog(180)
@settings(max_examples=16)
@given(programs)
def test_random_programs_jitted(program):
    check(program, jnp)


@pytest.mark.watchdog(180)
@settings(max_examples=8)
@given(programs)
def test_random_programs_eager(program):
    check(program, np)

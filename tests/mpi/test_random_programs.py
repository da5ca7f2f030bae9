"""Random programs of 1 to 20 primitives, jitted and eager, against the serial oracle.

A program has a pool of variables, each of one shape and dtype on all ranks. A step takes one of
them, makes the operand that its primitive wants by local work, communicates, and comes back to the
shape of the variable by local work; the result joins the pool, and the whole pool is compared, so
that no step can be dropped, merged or exchanged with another. The local work is written once and
runs in NumPy for all ranks and in JAX for one.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from mpi import oracle
from spmd import agree, assert_equal, ranks

from distsolve import mpi

DTYPES = ("bool", "int8", "uint16", "int32", "uint64", "float16", "bfloat16", "float32", "float64")
DTYPES += ("complex64", "complex128")
BLOCKS = ("scatter", "alltoall", "reduce_scatter")
STACKS = ("gather", "allgather")
PLAIN = ("allreduce", "reduce", "scan", "exscan", "bcast", "sendrecv", *BLOCKS, *STACKS)
UNEVEN = ("gatherv", "scatterv", "allgatherv", "alltoallv")
OTHERS = ("tree", "chain", "barrier", "symmetric")


class Step(NamedTuple):
    """One primitive; every number is taken modulo what there is to choose from."""

    name: str
    variable: int
    op: int
    number: int  # the root, shift or row
    donate_or_chunk: int


class Program(NamedTuple):
    inputs: list  # of (dtype, shape)
    steps: list
    comm: str


shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
steps = st.builds(
    Step,
    st.sampled_from((*PLAIN, *UNEVEN, *OTHERS)),
    *4 * [st.integers(0, 11)],
)
programs = st.builds(
    Program,
    st.lists(st.tuples(st.sampled_from(DTYPES), shapes), min_size=1, max_size=3),
    st.lists(steps, min_size=1, max_size=20),
    st.sampled_from(("world", "world", "halves", "self")),
)


def as_dtype(name):
    return np.dtype(getattr(ml_dtypes, name) if name == "bfloat16" else name)


def small(x, xp):
    """Bring whole numbers back to a small range, so that the next step is exact, too."""
    if x.dtype == np.bool_:
        return x
    if np.issubdtype(x.dtype, np.complexfloating):
        real = x.real.dtype.type
        return ((x.real % real(5)) + (x.imag % real(3)) * x.dtype.type(1j)).astype(x.dtype)
    if x.dtype.itemsize == 2 and jnp.issubdtype(x.dtype, jnp.floating):
        return (x.astype(np.float32) % np.float32(5)).astype(x.dtype)
    return x % x.dtype.type(5)


def blocks(x, size, xp):
    """Blocks for each rank that differ from one another."""
    return xp.stack([xp.roll(x, k) if k % 2 else x for k in range(size)])


def rows(x, n, xp):
    """A number of rows, each a variable."""
    return xp.stack([xp.roll(x, k) for k in range(n)]) if n else xp.zeros((0, *x.shape), x.dtype)


def first(y, x):
    """Come back from rows to one variable; `x` where there are none."""
    return y[-1] if y.shape[0] else x


def fits(op, name, dtype):
    """An operation for a dtype; MIN and MAX of exscan would bring infinities."""
    ops = oracle.fitting(dtype)
    if name == "exscan" and not jnp.issubdtype(dtype, jnp.integer) and dtype != np.bool_:
        ops = tuple(o for o in ops if o in (mpi.SUM, mpi.PROD))
    return ops[op % len(ops)]


def arguments_of(step, dtype, size):
    """The arguments behind the operand, as the oracle takes them."""
    root = step.number % size
    if step.name in UNEVEN:
        found = oracle.variants(step.name, size)
        return found[step.number % len(found)]
    if step.name == "sendrecv":
        return (root,)
    more = ()
    if step.name in oracle.REDUCTIONS:
        more = (fits(step.op, step.name, dtype),)
    return (*more, root) if step.name in oracle.WITH_ROOT else more


def operand(step, x, rank, size, arguments, xp):
    """What a rank passes, made from its variable."""
    if step.name == "scatter":
        return blocks(x, size, xp) if rank == arguments[0] else x
    if step.name in BLOCKS:
        return blocks(x, size, xp)
    if step.name == "scatterv":
        return rows(x, sum(arguments[0]) if rank == arguments[1] else 1, xp)
    if step.name == "alltoallv":
        return rows(x, int(sum(arguments[0][rank])), xp)
    if step.name in UNEVEN:
        return rows(x, arguments[0][rank], xp)
    return x


def result(step, y, x, rank, arguments, xp):
    """The new variable, made from what a rank got."""
    if step.name in UNEVEN:
        y = first(y, x)
    elif step.name == "allgather" or (step.name == "gather" and rank == arguments[-1]):
        y = y[step.number % y.shape[0]]
    return small(y, xp)


def square(x, xp):
    """A symmetric or Hermitian matrix made from a variable; only its triangle is exact."""
    flat = x.reshape(-1)[:4]
    return small(flat[:, None] * flat.conj()[None, :], xp).astype(x.dtype)


def serial(program, comm_size, world):
    """Run a program on all ranks at once, in NumPy; return the pools of all ranks."""
    size = comm_size
    pool = [
        [oracle.data(who, shape, as_dtype(dtype), i) for who in world]
        for i, (dtype, shape) in enumerate(program.inputs)
    ]
    for step in program.steps:
        xs = pool[step.variable % len(pool)]
        dtype = xs[0].dtype
        if step.name == "barrier":
            continue
        if step.name == "chain":
            pool.append([xs[max(r - 1, 0)] for r in range(size)])
        elif step.name == "tree":
            for other in (xs, pool[step.number % len(pool)]):
                op = fits(step.op, "allreduce", other[0].dtype)
                op = op if step.op % 2 or other[0].dtype == np.bool_ else mpi.SUM
                del op
            pool.append(xs)
        else:
            arguments = arguments_of(step, dtype, size)
            sent = [operand(step, x, r, size, arguments, np) for r, x in enumerate(xs)]
            got = oracle.SERIAL[step.name](sent, *arguments)
            pool.append(
                [result(step, y, xs[r], r, arguments, np) for r, y in enumerate(got)]
            )
    return pool

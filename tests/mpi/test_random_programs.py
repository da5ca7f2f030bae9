"""Random SPMD programs, jitted and eager parts mixed, against the serial oracle.

A program has a pool of variables, each of one shape and dtype on all ranks. A step takes one of
them, makes the operand that its primitive wants by local work, communicates, and comes back to one
variable by local work; the result joins the pool. A block does so with steps of its own, inside a
loop, a branch, a batch, or between the start and the end of a reduction in the background. The
whole pool is compared, so no step can be dropped, merged or exchanged with another. The local work
is written once: it runs in NumPy for all ranks, and in NumPy or JAX for one.

`make fuzz` runs many programs of a new seed. One that fails is printed with the command that
repeats it.
"""

import functools
import os
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi import oracle
from spmd import agree, ranks, watchdog

from distsolve import mpi

EXAMPLES = int(os.environ.get("DISTSOLVE_FUZZ_EXAMPLES", "10"))
SEED = int(os.environ.get("DISTSOLVE_FUZZ_SEED", "0"))
ONLY = os.environ.get("DISTSOLVE_FUZZ_PROGRAM")  # the number of one program
PROGRAM_SECONDS = 60.0
KEPT = 50  # programs whose compiled code is kept

DTYPES = ("bool_", "int8", "uint16", "int32", "uint64", "float16", "bfloat16", "float32", "float64")
DTYPES += ("complex64", "complex128")
CHUNKED = ("allreduce", "reduce", "scan", "exscan", "bcast", "reduce_scatter")
# `chain` is a send and a recv, `tree` one allreduce of several variables.
NAMES = (*oracle.SERIAL, "chain", "tree", "symmetric", "barrier")
COMMUNICATORS = ("world", "world", "dup", "halves", "halves", "self")
# A batched condition cannot choose between MPI calls: a batch holds none.
IN_A_BATCH = ("scan", "overlap", "jit", "checkpoint", "vmap")
KINDS = (*IN_A_BATCH, "while", "cond")
MOST_TURNS = 3


class Step(NamedTuple):
    """One primitive; numbers are taken modulo what there is to choose from."""

    name: str
    comm: str
    variable: int
    op: int
    number: int
    chunk: int


class Block(NamedTuple):
    """Steps on one variable, which come back to one like it."""

    kind: str
    comm: str  # of an overlap; conditions are taken from the whole world
    variable: int
    number: int
    steps: tuple


class Part(NamedTuple):
    """Steps that run in one compiled program, or one by one."""

    jitted: bool
    donated: bool
    steps: tuple


class Program(NamedTuple):
    inputs: tuple
    parts: tuple


def program(number):
    """The program of a number: every choice below is as likely as any other."""
    random = np.random.default_rng([SEED, number])

    def choose(names):
        return str(random.choice(names))

    def numbers(n):
        return [int(k) for k in random.integers(0, 12, n)]

    def shape():
        return tuple(
            int(n) for n in random.integers(1, 5, random.integers(4)) - (random.random() < 0.1)
        )

    def steps(most, depth, kinds=KINDS):
        return tuple(step(depth, kinds) for _ in range(random.integers(1, most + 1)))

    def step(depth, kinds):
        if depth == 0 or random.random() < 0.65:
            return Step(choose(NAMES), choose(COMMUNICATORS), *numbers(4))
        kind = choose(kinds)
        inner = IN_A_BATCH if kind == "vmap" else kinds
        return Block(kind, choose(COMMUNICATORS), *numbers(2), steps(3, depth - 1, inner))

    inputs = tuple((choose(DTYPES), shape()) for _ in range(random.integers(1, 4)))
    parts = tuple(
        Part(bool(random.random() < 0.6), bool(random.random() < 0.5), steps(6, 2))
        for _ in range(random.integers(1, 4))
    )
    return Program(inputs, parts)


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
    """A number of rows that differ from one another.

    None, too, are made of `x`: in a batch all ranks must pass a batch.
    """
    return xp.stack([xp.flip(x) if k % 2 else xp.roll(x, k) for k in range(n or 1)])[:n]


def outer(x):
    """A symmetric or Hermitian matrix."""
    flat = x.reshape(-1)[:4]
    return flat[:, None] * flat.conj()[None, :]


def join(x, y):
    """One variable of two that are alike, made from both."""
    return x ^ y if x.dtype == np.bool_ else small(small(x) + small(y))


def join_alike(xs):
    """One variable like the first, made from all that are like it."""
    return functools.reduce(
        join, [x for x in xs if (x.shape, x.dtype) == (xs[0].shape, xs[0].dtype)]
    )


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


def branch(block, first):
    """The steps of one branch of a `cond`; the other's are the rest."""
    half = len(block.steps) // 2
    return block.steps[:half] if first else block.steps[half:]


class Simulation:
    """All ranks at once: a variable is the list of the arrays of all ranks of the world."""

    def __init__(self, groups):
        self.groups = groups  # communicator -> the world ranks of each of its groups

    def run(self, steps, pool):
        """Add what the steps make to a pool, in a new one."""
        pool = list(pool)
        for step in steps:
            xs = pool[step.variable % len(pool)]
            if isinstance(step, Block):
                pool.append(self.block(step, xs))
            elif step.name == "tree":
                pool += [
                    self.grouped(step.comm, pool[i], lambda xs: [small(oracle.fold(mpi.SUM, xs))])
                    for i in summands(step, pool, lambda xs: xs[0])
                ]
            elif step.name == "symmetric":
                if xs[0].dtype != np.bool_:
                    pool.append(self.grouped(step.comm, xs, self.symmetric))
            elif step.name != "barrier":
                pool.append(self.grouped(step.comm, xs, functools.partial(self.primitive, step)))
        return pool

    def grouped(self, comm, xs, function):
        """Apply a function to each group of a communicator; one result is that of all its ranks."""
        ys = list(xs)
        for members in self.groups[comm]:
            made = function([xs[rank] for rank in members])
            for rank, y in zip(members, made * (len(members) // len(made)), strict=True):
                ys[rank] = y
        return ys

    def symmetric(self, xs):
        total = oracle.fold(mpi.SUM, [outer(x) for x in xs])
        return [small(np.triu(total) + np.triu(total, 1).conj().T)]

    def primitive(self, step, xs):
        if step.name == "chain":
            return [xs[max(r - 1, 0)] for r in range(len(xs))]
        more = arguments_of(step, xs[0].dtype, len(xs))
        sent = [operand(step.name, x, r, len(xs), more, np) for r, x in enumerate(xs)]
        got = oracle.SERIAL[step.name](sent, *more)
        return [result(step, y, x) for y, x in zip(got, xs, strict=True)]

    def block(self, block, xs):
        signal = sum(map(np.count_nonzero, xs))
        if block.kind == "scan":
            for _ in range(block.number % MOST_TURNS):
                xs = self.body(block.steps, xs)
        elif block.kind == "while":
            for _ in range(MOST_TURNS):
                if sum(map(np.count_nonzero, xs)) % 4 == 0:
                    break
                xs = self.body(block.steps, xs)
        elif block.kind == "cond":
            xs = self.body(branch(block, signal % 2), xs)
        elif block.kind == "vmap":
            stacks = [rows(x, 1 + block.number % 3, np) for x in xs]
            batches = [self.body(block.steps, batch) for batch in zip(*stacks, strict=True)]
            xs = [join_alike(ys) for ys in zip(*batches, strict=True)]
        elif block.kind == "overlap":
            op = overlapping(block, xs[0].dtype)
            reduced = self.grouped(block.comm, xs, lambda xs: [oracle.fold(op, xs)])
            xs = [join(y, z) for y, z in zip(self.body(block.steps, xs), reduced, strict=True)]
        else:
            xs = self.body(block.steps, xs)
        return xs

    def body(self, steps, xs):
        """One turn of a block."""
        return [join_alike(ys) for ys in zip(*self.run(steps, [list(xs)]), strict=True)]


def overlapping(block, dtype):
    """The operation of a reduction in the background."""
    ops = oracle.fitting(dtype)
    return ops[block.number % len(ops)]


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


def signal(x):
    """The number of entries on all ranks that are not zero: the same on all of them."""
    return mpi.allreduce(jnp.count_nonzero(x).astype(jnp.int32))


def perform(steps, pool, xp):
    """Add what the steps make on this rank to a pool, with local work in JAX or in NumPy."""
    pool = list(pool)
    local = np.asarray if xp is np else lambda y: y
    for step in steps:
        x = pool[step.variable % len(pool)]
        if isinstance(step, Block):
            pool.append(local(perform_block(step, x, xp)))
            continue
        comm = ranks().communicators[step.comm]
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


def perform_block(block, x, xp):
    """Run a block on this rank."""

    def body(x, steps=block.steps, xp=jnp):
        return join_alike(perform(steps, [x], xp))

    if block.kind == "overlap":
        comm, op = ranks().communicators[block.comm], overlapping(block, x.dtype)
        if block.number % 2:
            request, x = mpi.iallreduce(x, op, through=x, comm=comm)
            reduced, y = mpi.wait(request, after=body(np.asarray(x) if xp is np else x, xp=xp))
        else:
            request = mpi.iallreduce(x, op, comm=comm)
            y = body(x, xp=xp)
            reduced = mpi.wait(request)
        return join(y, reduced) if xp is jnp else join(np.asarray(y), np.asarray(reduced))
    x = jnp.asarray(x)
    if block.kind == "scan":
        turns = block.number % MOST_TURNS
        return jax.lax.scan(lambda x, _: (body(x), None), x, length=turns)[0]
    if block.kind == "while":
        return jax.lax.while_loop(
            lambda s: (s[0] < MOST_TURNS) & (signal(s[1]) % 4 != 0),
            lambda s: (s[0] + 1, body(s[1])),
            (0, x),
        )[1]
    if block.kind == "cond":
        branches = [functools.partial(body, steps=branch(block, first)) for first in (True, False)]
        return jax.lax.cond(signal(x) % 2 == 1, *branches, x)
    if block.kind == "vmap":
        return join_alike(list(jax.vmap(body)(rows(x, 1 + block.number % 3, jnp))))
    return {"jit": jax.jit, "checkpoint": jax.checkpoint}[block.kind](body)(x)


def check(number, groups):
    """Compare the whole pool of this rank with that of the simulation."""
    made = program(number)
    repeat = f"make fuzz SEED={SEED} PROGRAM={number} RANKS={ranks().size}"
    watchdog.arm(PROGRAM_SECONDS, repeat)
    simulation = Simulation(groups)
    pool = [
        [oracle.data(who, shape, getattr(jnp, dtype), i) for who in range(ranks().size)]
        for i, (dtype, shape) in enumerate(made.inputs)
    ]
    got = [xs[ranks().rank] for xs in pool]
    for steps in made.parts:
        pool = simulation.run(steps.steps, pool)
        if steps.jitted:
            run = functools.partial(perform, steps.steps, xp=jnp)
            got = jax.jit(run, donate_argnums=0 if steps.donated else ())(
                list(map(jnp.asarray, got))
            )
        else:
            got = perform(steps.steps, list(map(np.asarray, got)), np)
    found = [oracle.difference(y, xs[ranks().rank]) for y, xs in zip(got, pool, strict=True)]
    wrong = [f"variable {i}: {text}" for i, text in enumerate(found) if text is not None]
    agree(not wrong, f"{repeat}\n{made}: {wrong[:1]}")


@pytest.mark.watchdog(PROGRAM_SECONDS)
def test_random_programs():
    here = {name: oracle.members(comm) for name, comm in ranks().communicators.items()}
    everyone = ranks().agreeing.allgather(here)
    groups = {name: {tuple(theirs[name]) for theirs in everyone} for name in here}
    for number in range(EXAMPLES) if ONLY is None else [int(ONLY)]:
        check(number, groups)
        if number % KEPT == KEPT - 1:
            jax.clear_caches()

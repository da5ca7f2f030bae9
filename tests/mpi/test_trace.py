"""The recorder: what is kept of every call, and that it names the user's line."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from spmd import agree, ranks

from distsolve import cg, mpi

pytestmark = [pytest.mark.few_ranks, pytest.mark.below_jax]

HERE = __file__


def line():
    """Return the number of the line that calls this."""
    return inspect.currentframe().f_back.f_lineno


def calls_of(function):
    """Return what was recorded while a function ran."""
    mpi.barrier()
    before = mpi.trace()[-1].sequence
    jax.block_until_ready(function())
    mpi.barrier()
    return [call for call in mpi.trace() if call.sequence > before][:-1]


def at(number):
    return f"{HERE}:{number}"


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jitted"])
def test_what_is_kept(jitted):
    first = line() + 3

    def program(x):
        y = mpi.allreduce(x, mpi.MAX)
        return mpi.bcast(y, root=ranks().size - 1)

    run = jax.jit(program) if jitted else program
    reduced, cast = calls_of(lambda: run(jnp.ones((2, 3), jnp.float64)))
    agree((reduced.name, cast.name) == ("MPI_Allreduce", "MPI_Bcast"))
    agree((reduced.dtype, reduced.count) == (np.float64, 6))
    agree((reduced.op, reduced.peer) == (mpi.MAX, None))
    agree((cast.op, cast.peer) == (None, ranks().size - 1))
    agree((reduced.where, cast.where) == (at(first), at(first + 1)))
    agree(cast.number == reduced.number + 1 and cast.sequence == reduced.sequence + 1)
    agree(reduced.entered <= reduced.left <= cast.entered <= cast.left)


def test_equal_calls_keep_their_lines():
    first = line() + 4

    @jax.jit
    def program(x):
        x = mpi.allreduce(x)
        return mpi.allreduce(x)

    lines = [call.where for call in calls_of(lambda: program(jnp.ones(3)))]
    agree(lines == [at(first), at(first + 1)])
    eager = line() + 1
    lines = [call.where for call in calls_of(lambda: (mpi.allreduce(1.0), mpi.allreduce(2.0)))]
    agree(lines == [at(eager)] * 2)


def test_lines_survive_loops_and_derivatives():
    inner = line() + 3

    def body(x, _):
        return mpi.allreduce(x) / ranks().size, None

    def loss(x):
        return jnp.sum(jax.lax.scan(jax.checkpoint(body), x, length=3)[0])

    calls = calls_of(lambda: jax.jit(jax.grad(loss))(jnp.ones(4)))
    agree({call.where for call in calls} == {at(inner)})


def test_a_solver_is_at_the_line_that_calls_it():
    operator = line() + 3

    def matvec(v):
        return mpi.allreduce(v)

    solve = line() + 1
    calls = calls_of(lambda: cg(matvec, jnp.arange(1.0, 25.0))[0])
    agree({call.where for call in calls} <= {at(operator), at(solve)})
    agree(sum(call.where == at(operator) for call in calls) > 0)
    agree((ranks().size == 1) == (at(solve) not in {call.where for call in calls}))


def test_messages_have_peers_and_no_number():
    me, size = ranks().rank, ranks().size
    (call,) = calls_of(
        lambda: mpi.sendrecv(jnp.ones(5), jnp.ones(5), (me - 1) % size, (me + 1) % size)
    )
    agree((call.name, call.count, call.number) == ("MPI_Sendrecv", 5, None))
    agree(call.peer == (me - 1) % size)


def test_the_last_1024_calls_are_kept():
    @jax.jit
    def many(x):
        return jax.lax.fori_loop(0, 1500, lambda _, y: mpi.allreduce(y, mpi.MIN), x)

    calls = (jax.block_until_ready(many(1.0)), mpi.trace())[1]
    agree(len(calls) == 1024)
    agree(
        [call.sequence for call in calls]
        == list(range(calls[0].sequence, calls[0].sequence + 1024))
    )
    agree(all(call.left is not None for call in calls))


def test_communicators_count_their_own_collectives():
    half = ranks().communicators["halves"]
    ours, world = calls_of(lambda: (mpi.allreduce(1.0, comm=half), mpi.allreduce(1.0)))
    again, _ = calls_of(lambda: (mpi.allreduce(1.0, comm=half), mpi.allreduce(1.0)))
    agree(ours.comm != world.comm)
    agree(again.number == ours.number + 1)


def test_text_of_a_program_is_the_same_wherever_it_lies():
    """Compiled programs are cached by their text: the folder of a file is not in it."""
    source = "def program(mpi, x):\n    return mpi.allreduce(x)\n"
    texts = []
    for folder in ("/somewhere", "/else"):
        names = {}
        exec(compile(source, f"{folder}/program.py", "exec"), names)
        lowered = jax.jit(lambda x, run=names["program"]: run(mpi, x)).lower(1.0)
        texts.append(lowered.as_text())
    agree(texts[0] == texts[1])

"""One allreduce of float32 data through distsolve or mpi4jax; prints one JSON line.

Cases
-----
loop    donated operand in `fori_loop` inside one jitted function: seconds per iteration.
single  one donated call of a function compiled beforehand: seconds and peak memory growth.
eager   calls outside jit, each waited for: seconds per call.
jit     calls of a jitted function with one allreduce, each waited for: seconds per call.
"""

import argparse

import jax
import jax.numpy as jnp
from measure import COMM, PeakGrowth, expect, report, slowest

RANK, SIZE = COMM.Get_rank(), COMM.Get_size()


def load(library):
    """The library's sum over all ranks, as a function of one array."""
    if library == "distsolve":
        from distsolve import mpi

        return lambda x: mpi.allreduce(x, mpi.SUM)
    import mpi4jax
    from mpi4py import MPI

    return lambda x: mpi4jax.allreduce(x, op=MPI.SUM)


def filled(elements, factor=1.0):
    """A new array whose value differs on each rank."""
    return jnp.full((elements,), (RANK + 1) * factor, jnp.float32).block_until_ready()


def loop(allreduce, elements, iterations, scale):
    """Time `iterations` reductions in one jitted loop.

    Each iteration after the first multiplies by SIZE. With `scale` the loop divides it out again;
    without, the start value is small enough, and the loop holds nothing but the reduction.
    """

    def body(_, x):
        y = allreduce(x)
        return y * (1 / SIZE) if scale else y

    run = jax.jit(lambda x: jax.lax.fori_loop(0, iterations, body, x), donate_argnums=0)
    factor = 1.0 if scale else float(SIZE) ** -iterations
    run(filled(elements, factor)).block_until_ready()
    x = filled(elements, factor)
    result = []
    seconds = slowest(lambda: result.append(run(x).block_until_ready()))
    expect(result[0], (SIZE + 1) / 2)
    return {"seconds": seconds / iterations}


def single(allreduce, elements, iterations, scale):
    """Time one donated call and measure the memory it needs beyond its operand."""
    shape = jax.ShapeDtypeStruct((elements,), jnp.float32)
    run = jax.jit(allreduce, donate_argnums=0)
    compiled = run.lower(shape).compile()
    # Connections and thread pools are made here; a call at full size would hide its own memory.
    run(filled(1)).block_until_ready()
    x = filled(elements)
    result = []
    COMM.Barrier()
    with PeakGrowth() as growth:
        seconds = slowest(lambda: result.append(compiled(x).block_until_ready()))
    expect(result[0], SIZE * (SIZE + 1) / 2)
    return {"seconds": seconds, "peak_growth_mib": growth.largest()}


def repeated(call, elements, iterations):
    """Time separate calls on one operand, each waited for."""
    x = filled(elements)
    for _ in range(3):
        y = call(x).block_until_ready()
    expect(y, SIZE * (SIZE + 1) / 2)

    def run():
        for _ in range(iterations):
            call(x).block_until_ready()

    return {"seconds": slowest(run) / iterations}


def eager(allreduce, elements, iterations, scale):
    """Time calls outside jit."""
    return repeated(allreduce, elements, iterations)


def jit(allreduce, elements, iterations, scale):
    """Time calls of a jitted function that holds nothing but the reduction."""
    return repeated(jax.jit(allreduce), elements, iterations)


def main():
    """Run one case and report it."""
    cases = {"loop": loop, "single": single, "eager": eager, "jit": jit}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", choices=["distsolve", "mpi4jax"], required=True)
    parser.add_argument("--case", choices=cases, required=True)
    parser.add_argument("--elements", type=int, required=True)
    parser.add_argument("--iterations", type=int, default=1)
    parser.add_argument("--scale", type=int, choices=[0, 1], default=0)
    options = parser.parse_args()
    case = cases[options.case]
    figures = case(load(options.library), options.elements, options.iterations, options.scale)
    report(**figures, iterations=options.iterations)


if __name__ == "__main__":
    main()

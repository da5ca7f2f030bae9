"""One allreduce of float32 data by mpi4py on NumPy buffers; prints one JSON line.

Cases
-----
loop    in place, in a loop of Python: seconds per iteration.
single  one call in place: seconds and peak memory growth.
eager   calls with a new array for each result: seconds per call.
"""

import argparse

import numpy as np
from measure import COMM, PeakGrowth, expect, report, slowest
from mpi4py import MPI

RANK, SIZE = COMM.Get_rank(), COMM.Get_size()


def filled(elements, factor=1.0):
    """A new array whose value differs on each rank."""
    return np.full(elements, (RANK + 1) * factor, np.float32)


def loop(elements, iterations, scale):
    """Time reductions in place, scaled or started small as those of kernels/allreduce.py."""
    factor = 1.0 if scale else float(SIZE) ** -iterations

    def run(x):
        for _ in range(iterations):
            COMM.Allreduce(MPI.IN_PLACE, x)
            if scale:
                x *= np.float32(1 / SIZE)

    run(filled(elements, factor))
    x = filled(elements, factor)
    seconds = slowest(lambda: run(x))
    expect(x, (SIZE + 1) / 2)
    return {"seconds": seconds / iterations}


def single(elements, iterations, scale):
    """Time one call in place and measure the memory it needs beyond its operand."""
    COMM.Allreduce(MPI.IN_PLACE, filled(1))
    x = filled(elements)
    COMM.Barrier()
    with PeakGrowth() as growth:
        seconds = slowest(lambda: COMM.Allreduce(MPI.IN_PLACE, x))
    expect(x, SIZE * (SIZE + 1) / 2)
    return {"seconds": seconds, "peak_growth_mib": growth.largest()}


def eager(elements, iterations, scale):
    """Time calls that leave their operand as it is."""
    x, results = filled(elements), []

    def run():
        for _ in range(iterations):
            y = np.empty_like(x)
            COMM.Allreduce(x, y)
        results.append(y)

    run()
    seconds = slowest(run)
    expect(results[-1], SIZE * (SIZE + 1) / 2)
    return {"seconds": seconds / iterations}


def main():
    """Run one case and report it."""
    cases = {"loop": loop, "single": single, "eager": eager}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=cases, required=True)
    parser.add_argument("--elements", type=int, required=True)
    parser.add_argument("--iterations", type=int, default=1)
    parser.add_argument("--scale", type=int, choices=[0, 1], default=0)
    options = parser.parse_args()
    figures = cases[options.case](options.elements, options.iterations, options.scale)
    report(**figures, iterations=options.iterations)


if __name__ == "__main__":
    main()

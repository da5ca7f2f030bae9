"""Draw the memory of a process over time: ten reductions of one array, in place and not.

python memory.py FILE.svg
"""

import re
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt

from distsolve import mpi

BYTES, CALLS, PAUSE = 1 << 28, 10, 0.01
RSS = re.compile(r"VmRSS:\s+(\d+) kB")


def in_place(x):
    """Reduce the array in its own memory: nobody needs it any more."""
    return mpi.allreduce(x)


def copied(x):
    """Reduce a copy: the array is still needed."""
    return jnp.minimum(x, mpi.allreduce(x))


def mebibytes():
    """Return the resident memory of this process."""
    return int(RSS.search(Path("/proc/self/status").read_text())[1]) / 1024


def record(function):
    """Return times from 0 to 1, and MiB beyond those at the start, while a function is called."""
    step = jax.jit(function, donate_argnums=0)
    x = jnp.ones(BYTES // 4, jnp.float32)
    program = step.lower(x).compile()
    x.block_until_ready()
    times, sizes, done = [], [], threading.Event()
    start, before = time.perf_counter(), mebibytes()

    def sample():
        while not done.wait(PAUSE / 10):
            times.append(time.perf_counter() - start)
            sizes.append(mebibytes() - before)

    sampler = threading.Thread(target=sample)
    sampler.start()
    for _ in range(CALLS):
        x = program(x).block_until_ready()
        time.sleep(PAUSE)
    done.set()
    sampler.join()
    return [moment / times[-1] for moment in times], sizes


def draw(path):
    """Reduce, and write the picture."""
    figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
    for function, label in ((copied, "not in place"), (in_place, "in place")):
        axes.plot(*record(function), label=label)
    axes.set(xlabel=f"time, {CALLS} calls", ylabel=f"MiB beyond an array of {BYTES >> 20} MiB")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)
    plt.close(figure)


if __name__ == "__main__":
    draw(sys.argv[1])

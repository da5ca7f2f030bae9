"""How fast the machine under the ranks is: a model of its network, and a short measurement.

A sum of B bytes over p ranks, in chunks of at most K bytes, takes

    ceil(B / K) (o + L ceil(log2 p)) + 2 (p - 1) / p B / W

with what every sum costs o, the latency of a stage L and the bandwidth W: LogGP for a tree of
small messages and a reduce-scatter with an allgather of large ones. An exchange, in which each rank
sends B bytes, a part to each other one, takes

    (p - 1) L + (p - 1) / p B / W

A symmetric matrix is summed through its triangle of B bytes, in pieces of at most `PACKED`, which
are written and read four times: packed, sent, received, unpacked. That takes 4 B / V more, with the
rate V at which memory is read.

Ranks that compute for t seconds, with the standard deviation s t over ranks, wait for the slowest:
s t m(p), where m(p) is the expected largest of p standard normal numbers.

References: Alexandrov, Ionescu, Schauser and Scheiman (1997), doi:10.1006/jpdc.1997.1346; Thakur,
Rabenseifner and Gropp (2005), doi:10.1177/1094342005051521; Blom (1958) for m(p).
"""

import dataclasses
import math
import os
import platform
import statistics
import time
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from distsolve.linalg.space import Space
from distsolve.linalg.trees import HIGHEST

PACKED = 2 << 20  # bytes of a symmetric matrix that are packed at a time


def largest_of(ranks: int) -> float:
    """Return the expected largest of so many standard normal numbers, by Blom's approximation."""
    return statistics.NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25)) if ranks > 1 else 0.0


def stages(ranks: int) -> int:
    """Return the depth of a binary tree over the ranks."""
    return (ranks - 1).bit_length()


@dataclasses.dataclass(frozen=True)
class Machine:
    """What the model stands on: of the slowest rank."""

    latency: float = 2e-6  # seconds for each of log2(p) stages of a sum
    bandwidth: float = 5e9  # bytes a second of a large sum
    memory_bandwidth: float = 1e10  # bytes a second in a product of a matrix and a vector
    flops: float = 5e10  # float32 operations a second in a product of matrices
    factor_flops: float = 2e10  # and in a Cholesky factorisation
    memory: float = 8e9  # bytes for each rank
    measured: bool = False
    overhead: float = 0.0  # seconds of a sum on any number of ranks
    chunk: float = math.inf  # bytes that a sum hands to MPI at a time
    skew: float = 0.0  # standard deviation over ranks of what they compute, as a fraction of it

    def summed(self, size: float, ranks: int) -> float:
        """Return the seconds that a sum of so many bytes over the ranks takes."""
        if ranks == 1:
            return 0.0
        calls = max(1, math.ceil(size / self.chunk))
        transfer = 2 * (ranks - 1) / ranks * size / self.bandwidth
        return calls * (self.overhead + stages(ranks) * self.latency) + transfer

    def summed_symmetric(self, size: float, ranks: int) -> float:
        """Return the seconds that the sum of a symmetric matrix takes; the size of its triangle."""
        if ranks == 1:
            return 0.0
        pieces = dataclasses.replace(self, chunk=min(self.chunk, PACKED))
        return pieces.summed(size, ranks) + 4 * size / self.memory_bandwidth

    def exchanged(self, size: float, ranks: int) -> float:
        """Return the seconds in which each rank sends so many bytes to all, a part to each."""
        return (ranks - 1) * self.latency + (ranks - 1) / ranks * size / self.bandwidth

    def waited(self, seconds: float, ranks: int) -> float:
        """Return how long ranks wait for the slowest, which have computed for some seconds."""
        return self.skew * seconds * largest_of(ranks)


_machines: dict[Space, Machine] = {}


def machine_of(rows: Space) -> Machine:
    """Return what is known of the machine under these ranks; measure it at the first use.

    Nothing is measured while tracing.
    """
    if rows not in _machines:
        if is_tracing():
            return Machine()
        _machines[rows] = measure(rows)
    return _machines[rows]


def is_tracing() -> bool:
    """Return whether a program is being traced, so that nothing can be sent now."""
    return isinstance(jnp.zeros(()), jax.core.Tracer)


def measure(rows: Space) -> Machine:
    """Measure the machine, the slowest rank of it; collective. Takes a fraction of a second."""
    small, large = jnp.ones(1, jnp.float32), jnp.ones(1 << 18, jnp.float32)
    A, v = jnp.ones((512, 512), jnp.float32), jnp.ones(1 << 13, jnp.float32)
    J = jnp.ones((1 << 10, len(v)), jnp.float32)
    p = rows.ranks()
    depth = max(1, stages(p))

    def repeated_sum(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 20, lambda _, x: rows.sum(x) / p, x)

    seconds = [
        _fastest(repeated_sum, small) / 20 / depth,
        _fastest(repeated_sum, large) / 20,
        _fastest(lambda J, v: jnp.matmul(J, v, precision=HIGHEST), J, v),
        _fastest(lambda A: jnp.matmul(A, A, precision=HIGHEST), A),
        _fastest(lambda A: jax.lax.linalg.cholesky(A + 512 * jnp.eye(512, dtype=A.dtype)), A),
    ]
    if p == 1:  # no network to be seen
        seconds[:2] = [Machine.latency, 0.0]
    # The largest of each over the ranks, so that all of them plan alike.
    less_memory = 1 / (_memory() / _ranks_on_this_node(rows))
    slowest = rows.agree(jnp.asarray([*seconds, less_memory], jnp.float32))
    latency, summed, read, multiplied, factorised, less_memory = (float(x) for x in slowest)
    share = max(summed - depth * latency, 1e-9)
    return Machine(
        latency=latency,
        bandwidth=Machine.bandwidth if p == 1 else 2 * (p - 1) / p * large.nbytes / share,
        memory_bandwidth=J.nbytes / read,
        flops=2 * 512**3 / multiplied,
        factor_flops=512**3 / (3 * factorised),
        memory=1 / less_memory,
        measured=True,
    )


def _fastest(function: Callable[..., Any], *args: Any) -> float:
    """Return the shortest of a few times in seconds, compilation left out."""
    compiled = jax.jit(function)
    jax.block_until_ready(compiled(*args))
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        jax.block_until_ready(compiled(*args))
        times.append(time.perf_counter() - begin)
    return max(min(times), 1e-9)


def _memory() -> int:
    """Return the bytes of memory of this rank's device, all of the node's for a CPU."""
    known = jax.local_devices()[0].memory_stats() or {}
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return known.get("bytes_limit", physical)


def _ranks_on_this_node(rows: Space) -> int:
    """Return how many ranks share the memory: 1 for a device of its own."""
    if jax.default_backend() != "cpu":
        return 1
    name = jnp.asarray(zlib.crc32(platform.node().encode()) & 0x7FFFFFFF, jnp.int32)
    return int((rows.gather(name) == name).sum())

"""Which method solves the SR system fastest: a model of time and memory, and what it stands on.

N samples on all ranks, at most n on one, P parameters, p ranks, numbers of b bytes. A message of B
bytes summed over the ranks takes ``L log2(p) + 2 (p - 1) / p B / W``, with the latency L and the
bandwidth W of the network; memory is read at the rate V, and products of matrices make F operations
a second. Per rank, with k steps of cg:

========  ==============================================  =======================
method    time                                            memory in bytes
========  ==============================================  =======================
cg        k (n P b / V + sum(P b))                        n P b + 8 P b
dense     2 n P^2 / F + sum(P^2 b / 2) + P^3 / (3 F)      n P b + 3.5 P^2 b
kernel    2 N^2 P / (p F) + all-to-all(n P b)             4 n P b + 3.5 N^2 b
          + sum(N^2 b / 2) + N^3 / (3 F)
========  ==============================================  =======================

Complex numbers take four times the operations; 64-bit ones half the rate. The model leaves out what
all methods share.
"""

import dataclasses
import math
import numbers
import os
import platform
import time
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distsolve.linalg import arguments
from distsolve.linalg.space import Sharded, Space
from distsolve.linalg.trees import HIGHEST

ITERATIONS = 100


@dataclasses.dataclass(frozen=True)
class Machine:
    """What the model stands on: of the slowest rank."""

    latency: float = 2e-6  # seconds for each of log2(p) stages of a small sum
    bandwidth: float = 5e9  # bytes a second of a large sum
    memory_bandwidth: float = 1e10  # bytes a second in a product of a matrix and a vector
    flops: float = 5e10  # float32 operations a second in a product of matrices
    memory: float = 8e9  # bytes for each rank
    measured: bool = False


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What a method needs on each rank."""

    method: str
    seconds: float
    memory: float  # bytes
    fits: bool


@dataclasses.dataclass(frozen=True)
class Plan:
    """The predictions, and the method that they speak for; `print` shows a table."""

    samples: int
    parameters: int
    ranks: int
    dtype: str
    iterations: int
    memory: float
    machine: Machine
    predictions: tuple[Prediction, ...]

    @property
    def method(self) -> str:
        """The fastest method that fits into memory; if none does, the smallest."""
        return self._best().method

    def _best(self) -> Prediction:
        fitting = [p for p in self.predictions if p.fits]
        if not fitting:
            return min(self.predictions, key=lambda p: p.memory)
        return min(fitting, key=lambda p: p.seconds)

    def __getitem__(self, method: str) -> Prediction:
        return next(p for p in self.predictions if p.method == method)

    def __str__(self) -> str:
        machine, best = self.machine, self._best()
        kind = "measured" if machine.measured else "assumed, not measured"
        lines = [
            f"{self.samples} samples, {self.parameters} parameters, {self.dtype}, on {self.ranks} "
            f"rank{'s'[: self.ranks > 1]}; {self.iterations} cg steps",
            f"{kind}: latency {machine.latency * 1e6:.2g} us, network "
            f"{machine.bandwidth / 1e9:.2g} GB/s, memory {machine.memory_bandwidth / 1e9:.2g} "
            f"GB/s, {machine.flops / 1e9:.3g} GFLOP/s in float32",
            f"{'method':<8} {'time':>12} {'memory a rank':>14}",
        ]
        for p in self.predictions:
            fault = "" if p.fits else f"  more than {self.memory / 2**20:.0f} MiB"
            chosen = "  <- chosen" if p is best else ""
            seconds = f"{p.seconds * 1e3:.3g} ms"
            mebibytes = f"{p.memory / 2**20:.3g} MiB"
            lines.append(f"{p.method:<8} {seconds:>12} {mebibytes:>14}{fault}{chosen}")
        why = "the fastest that fits into" if best.fits else "none fits; it is nearest to"
        lines.append(f"{best.method}: {why} {self.memory / 2**20:.0f} MiB a rank")
        return "\n".join(lines)


def plan(
    samples: int,
    parameters: int,
    *,
    ranks: int | None = None,
    dtype: Any = None,
    iterations: int | None = None,
    comm: Any = None,
    memory: float | None = None,
) -> Plan:
    """Predict time and memory of each method of `natural_gradient`.

    The equations are at the head of `distsolve.linalg.plan`.

    Parameters
    ----------
    samples : int
        On all ranks together, spread evenly.
    parameters : int
    ranks : int, optional
        By default those of ``comm``; others show what more ranks would buy.
    dtype : dtype of J
        JAX's default float by default.
    iterations : int, optional
        Of cg; by default 100, or as many as there are samples or parameters if those are fewer.
    comm : mpi4py intracommunicator, optional
        Whose network is measured; the world by default.
    memory : float, optional
        Bytes for each rank; by default its share of the machine's.

    Returns
    -------
    Plan
        Equal on all ranks; ``plan.method`` is the choice, ``print(plan)`` a table.

    Raises
    ------
    TypeError, ValueError
        Sizes that are not positive integers, a dtype of no floats, no positive number of bytes.

    Communication
    -------------
    The first use on a communicator measures for a fraction of a second, collectively; never inside
    `jax.jit`, where what was measured before is used, or the assumptions of `Machine`.

    Examples
    --------
    >>> from distsolve import plan
    >>> plan(100, 1_000_000, memory=1e9).method in ("cg", "kernel")
    True
    """
    rows = Sharded(comm)
    ranks = rows.ranks() if ranks is None else ranks
    sizes = {"samples": samples, "parameters": parameters, "ranks": ranks}
    sizes |= {} if iterations is None else {"iterations": iterations}
    for name, value in sizes.items():
        if not arguments.is_int(value) or value < 1:
            raise ValueError(f"`{name}` must be a positive integer: got {value!r}.")
    dtype = _float_dtype(jnp.zeros(()).dtype if dtype is None else dtype)
    counts = (-(-samples // ranks),) * ranks
    return predict(counts, samples, parameters, dtype, dtype, iterations, memory, machine_of(rows))


def _float_dtype(dtype: Any) -> Any:
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or not jnp.issubdtype(found, jnp.inexact):
        raise TypeError(f"`dtype` must be one of floats: got {dtype!r}. Pass for example J.dtype.")
    return found


def as_bytes(memory: Any) -> float:
    """Return a number of bytes; raise unless it is positive."""
    real = isinstance(memory, numbers.Real) and not isinstance(memory, bool)
    if not real or not memory > 0:
        raise ValueError(
            f"`memory` must be a positive number of bytes for each rank: got {memory!r}. Pass for "
            "example 8e9, or None for what the machine has."
        )
    return float(memory)


def choose(
    counts: tuple[int, ...] | None,
    P: int,
    dtype: Any,
    vector_dtype: Any,
    rows: Space,
    maxiter: Any,
    memory: float | None,
) -> str:
    """Return the name of the method for these counts of samples, the same on all ranks.

    ``"cg"`` where the counts are not known.
    """
    if counts is None or sum(counts) == 0 or P == 0:
        return "cg"
    steps = None
    if isinstance(maxiter, (int, np.integer)):
        steps = max(1, min(int(maxiter), ITERATIONS, sum(counts), P))
    machine = machine_of(rows)
    return predict(counts, sum(counts), P, dtype, vector_dtype, steps, memory, machine).method


def predict(
    counts: tuple[int, ...],
    N: int,
    P: int,
    dtype: Any,
    vector_dtype: Any,
    iterations: int | None,
    memory: float | None,
    machine: Machine,
) -> Plan:
    """Return the plan for the counts of samples on each rank; see the head of this file."""
    p, n = len(counts), max(counts)
    steps = min(ITERATIONS, N, P) if iterations is None else int(iterations)
    real_vectors = not jnp.issubdtype(vector_dtype, jnp.complexfloating)
    is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
    if is_complex and real_vectors:  # as twice as many real rows
        n, N, b = 2 * n, 2 * N, dtype.itemsize // 2
    else:
        b = dtype.itemsize
    flops = machine.flops / (2 if jnp.finfo(dtype).bits == 64 else 1)
    flops /= 4 if is_complex and not real_vectors else 1

    def sum_of(size: float) -> float:
        share = 2 * (p - 1) / p * size / machine.bandwidth
        return math.ceil(math.log2(p)) * machine.latency + share

    J = n * P * b
    exchange = (p - 1) * machine.latency + (p - 1) / p * J / machine.bandwidth
    seconds = {
        "cg": steps * (J / machine.memory_bandwidth + sum_of(P * b)),
        "dense": 2 * n * P**2 / flops + sum_of(P**2 * b / 2) + P**3 / (3 * flops),
        "kernel": 2 * N**2 * P / (p * flops) + exchange + sum_of(N**2 * b / 2) + N**3 / 3 / flops,
    }
    needs = {"cg": J + 8 * P * b, "dense": J + 3.5 * P**2 * b, "kernel": 4 * J + 3.5 * N**2 * b}
    limit = machine.memory if memory is None else as_bytes(memory)
    return Plan(
        sum(counts) if is_complex and real_vectors else N,
        P,
        p,
        str(dtype),
        steps,
        limit,
        machine,
        tuple(
            Prediction(name, seconds[name], needs[name], needs[name] <= limit) for name in seconds
        ),
    )


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
    stages = max(1, math.ceil(math.log2(p)))

    def repeated_sum(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 20, lambda _, x: rows.sum(x) / p, x)

    seconds = [
        _fastest(repeated_sum, small) / 20 / stages,
        _fastest(repeated_sum, large) / 20,
        _fastest(lambda J, v: jnp.matmul(J, v, precision=HIGHEST), J, v),
        _fastest(lambda A: jnp.matmul(A, A, precision=HIGHEST), A),
    ]
    if p == 1:  # no network to be seen
        seconds[:2] = [Machine.latency, 0.0]
    # The largest of each over the ranks, so that all of them plan alike.
    less_memory = 1 / (_memory() / _ranks_on_this_node(rows))
    slowest = rows.agree(jnp.asarray([*seconds, less_memory], jnp.float32))
    latency, summed, read, multiplied, less_memory = (float(x) for x in slowest)
    share = max(summed - stages * latency, 1e-9)
    return Machine(
        latency=latency,
        bandwidth=Machine.bandwidth if p == 1 else 2 * (p - 1) / p * large.nbytes / share,
        memory_bandwidth=J.nbytes / read,
        flops=2 * 512**3 / multiplied,
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
    statistics = jax.local_devices()[0].memory_stats() or {}
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return statistics.get("bytes_limit", physical)


def _ranks_on_this_node(rows: Space) -> int:
    """Return how many ranks share the memory: 1 for a device of its own."""
    if jax.default_backend() != "cpu":
        return 1
    name = jnp.asarray(zlib.crc32(platform.node().encode()) & 0x7FFFFFFF, jnp.int32)
    return int((rows.gather(name) == name).sum())

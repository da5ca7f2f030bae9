"""Which method solves the SR system fastest: a model of time and memory.

N samples on all ranks, at most n on one, P parameters, p ranks, numbers of b bytes. What messages
and waiting cost is told in `distsolve.linalg.machine`: sum(B) is a sum of B bytes, triangle(B) that
of a symmetric matrix, exchange(B) a transpose over the ranks. Memory is read at the rate V;
products of matrices make F operations a second, Cholesky factorisations C. Per rank, with k steps
of cg:

========  ==============================================  =======================
method    time                                            memory in bytes
========  ==============================================  =======================
cg        k ((n + 8) P b / V + wait + sum(m P b))         n P b + 8 P b
dense     2 n P^2 / F + P^3 / (3 C) + wait                n P b + 3.5 P^2 b
          + sum(P b) + triangle(P^2 b / 2) + sum(8)
kernel    2 N^2 P / (p F) + N^3 / (3 C) + wait            4 n P b + 3.5 N^2 b
          + sum(P b) + exchange(n P b)
          + triangle(N^2 b / 2) + sum(8)
========  ==============================================  =======================

Waiting is for the slowest rank. With few parameters (`cg_gram.SMALL`) x travels with the
direction, so that m = 2, else m = 1. Complex numbers take four times the operations; 64-bit
ones half the rate. The model leaves out what all methods share.
"""

import dataclasses
import numbers
from typing import Any

import jax.numpy as jnp
import numpy as np

from distsolve.linalg import arguments
from distsolve.linalg.krylov import cg_gram
from distsolve.linalg.machine import Machine, machine_of
from distsolve.linalg.space import Sharded, Space

ITERATIONS = 100
FLAG = 8  # bytes of the message in which ranks agree that a factor is good


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What a method needs on each rank."""

    method: str
    computing: float  # seconds
    waiting: float  # for the slowest rank
    sending: float
    memory: float  # bytes
    fits: bool

    @property
    def seconds(self) -> float:
        """The time in all."""
        return self.computing + self.waiting + self.sending


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
    sizes: dict[str, Any] = {"samples": samples, "parameters": parameters, "ranks": ranks}
    sizes |= {} if iterations is None else {"iterations": iterations}
    for name, value in sizes.items():
        if not arguments.is_int(value) or value < 1:
            found = f"shape {value.shape}" if getattr(value, "shape", ()) else repr(value)
            raise ValueError(f"`{name}` must be a positive integer: got {found}.")
    dtype = _float_dtype(jnp.zeros(()).dtype if dtype is None else dtype)
    largest = -(-samples // ranks)
    machine = machine_of(rows)
    return predict(ranks, largest, samples, parameters, dtype, dtype, iterations, memory, machine)


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
    sizes = len(counts), max(counts), sum(counts), P
    return predict(*sizes, dtype, vector_dtype, steps, memory, machine_of(rows)).method


def predict(
    p: int,
    n: int,
    N: int,
    P: int,
    dtype: Any,
    vector_dtype: Any,
    iterations: int | None,
    memory: float | None,
    machine: Machine,
) -> Plan:
    """Return the plan for p ranks with at most n of N samples each; see the head of this file."""
    samples = N
    steps = min(ITERATIONS, N, P) if iterations is None else int(iterations)
    real_vectors = not jnp.issubdtype(vector_dtype, jnp.complexfloating)
    is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
    if is_complex and real_vectors:  # as twice as many real rows
        n, N, b = 2 * n, 2 * N, dtype.itemsize // 2
    else:
        b = dtype.itemsize
    slower = 2 if jnp.finfo(dtype).bits == 64 else 1
    slower *= 4 if is_complex and not real_vectors else 1
    flops, factor_flops = machine.flops / slower, machine.factor_flops / slower

    def summed(size: float) -> float:
        return machine.summed(size, p)

    def factored(rows: int) -> tuple[float, float]:
        """Of a matrix: its factorisation, and its sum with that of whether the factor is good."""
        sent = machine.summed_symmetric(rows**2 * b / 2, p) + summed(FLAG)
        return rows**3 / (3 * factor_flops), sent

    J, vector = n * P * b, P * b
    (P_factor, P_sent), (N_factor, N_sent) = factored(P), factored(N)
    # Of computing, and of messages.
    seconds = {
        "cg": (
            steps * (J + 8 * vector) / machine.memory_bandwidth,
            steps * summed((2 if P <= cg_gram.SMALL else 1) * vector),
        ),
        "dense": (2 * n * P**2 / flops + P_factor, P_sent + summed(vector)),
        "kernel": (
            2 * N**2 * P / (p * flops) + N_factor,
            machine.exchanged(J, p) + N_sent + summed(vector),
        ),
    }
    needs = {
        "cg": J + 8 * vector,
        "dense": J + 3.5 * P**2 * b,
        "kernel": 4 * J + 3.5 * N**2 * b,
    }
    limit = machine.memory if memory is None else as_bytes(memory)
    predictions = tuple(
        Prediction(
            name, computed, machine.waited(computed, p), sent, needs[name], needs[name] <= limit
        )
        for name, (computed, sent) in seconds.items()
    )
    return Plan(samples, P, p, str(dtype), steps, limit, machine, predictions)

"""What is timed: a message, and three solves whose data do not depend on the number of ranks."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from distsolve import linalg, mpi

METHODS = ("classic", "single_reduction", "pipelined")
SR_DIRECT = ("dense", "kernel")
WIDTH = np.dtype(np.float32).itemsize  # of an element of a message
# What the loop over a message moves and takes at most, between these numbers of calls.
LOOP_BYTES, LOOP_SECONDS = 10**8, 0.5
FEWEST_CALLS, MOST_CALLS = 10, 1000
MOST_STEPS = 100_000
SHIFT = 0.05  # of the sparse matrix: its condition number is about 8 / SHIFT on any grid
SR_SHIFT = 1e-3
SR_RANGE = 2  # decades between the sizes of the log-derivatives


class Work(NamedTuple):
    """A problem on this rank. Both functions are collective, and over when they return."""

    run: Callable[[], int]  # the whole of it; returns the steps that it took
    few: Callable[[int], Any]  # exactly that many of these steps
    settings: str  # as in `Key`


@dataclass(frozen=True)
class Case:
    """A benchmark.

    ``make(total, size, method, parameters)`` gives the work of this rank: ``total`` is the size of
    the whole problem along the axis that the ranks share, ``size`` that of the other axes.
    """

    title: str
    unit: str  # what a size counts
    sizes: tuple[int, ...]
    make: Callable[[int, int, str, int], Work]
    methods: tuple[str, ...] = ()  # the default first
    direct: tuple[str, ...] = ()  # those of them whose only step is the whole solve
    has_parameters: bool = False
    is_solve: bool = True
    is_matrix: bool = False  # of size x size rows, for which an int32 must do

    def method(self, asked: str | None) -> str:
        """Return the method that was asked for, if it is one of these, or the default."""
        return asked if asked in self.methods else next(iter(self.methods), "")

    def step(self, method: str) -> str:
        """Return what a step is."""
        if not self.is_solve:
            return "a call"
        return "a solve" if method in self.direct else "an iteration"

    def fault(self, size: int, ranks: int, scaling: str) -> str:
        """Return what is wrong with a size, and what to do; or nothing."""
        if not self.is_solve:
            wrong = size % WIDTH
            return f"expected a multiple of {WIDTH}, the bytes of a float32" if wrong else ""
        if scaling == "strong" and size < ranks:
            return (
                f"expected at least {ranks}, one for each rank: use a larger size, or --weak, "
                "where a size is that of each rank's part"
            )
        rows = size * size * (ranks if scaling == "weak" else 1)
        if self.is_matrix and rows >= 2**31:
            return f"a matrix of {rows} rows; expected fewer than 2**31: use a smaller size"
        return ""


def _allreduce(total, size, method, parameters):
    rank, ranks, elements = mpi.rank(), mpi.size(), size // WIDTH

    @jax.jit
    def loop(value, calls):
        x = jnp.full(elements, value, jnp.float32)
        return jax.lax.fori_loop(0, calls, lambda _, x: mpi.allreduce(x), x)

    def few(calls, value=2 * rank - ranks + 1):
        # Over all ranks these values sum up to 0, so that the next call has finite values again.
        return jax.block_until_ready(loop(np.float32(value), np.int32(calls)))

    def run():
        few(calls)
        return calls

    wanted, found = ranks * (ranks + 1) / 2, few(1, rank + 1)
    if not bool(jnp.all(found == wanted)):
        raise ArithmeticError(
            f"allreduce of {size} bytes: rank {rank} got values from {found.min()} to "
            f"{found.max()}, expected {wanted}. Run `python -m distsolve doctor`."
        )
    begin = time.perf_counter()
    few(FEWEST_CALLS)
    seconds = float(mpi.allreduce(np.float64(time.perf_counter() - begin), mpi.MAX)) / FEWEST_CALLS
    most = min(LOOP_BYTES / size, LOOP_SECONDS / seconds)
    calls = int(np.clip(most, FEWEST_CALLS, MOST_CALLS))
    return Work(run, few, "float32")


def _solve(program, data, tol):
    """Return the work of ``program(data, tol, maxiter)``, which returns the report of a solve."""
    compiled = jax.jit(program)

    def run():
        info = jax.block_until_ready(compiled(data, tol, np.int32(MOST_STEPS)))
        info.raise_if_failed()
        return int(info.iterations)

    def few(steps):
        return jax.block_until_ready(compiled(data, 0.0, np.int32(steps)))

    return Work(run, few, f"float64, tol {tol:g}")


def _direct(update, data):
    """Return the work of ``update(data)``, a solve in one step, which returns its report."""
    compiled = jax.jit(update)

    def run():
        info = jax.block_until_ready(compiled(data))
        info.raise_if_failed()
        return 1

    return Work(run, lambda steps: run(), "float64")


def _share(total):
    """Return the first and the last but one of what this rank has, of so many in a row."""
    rank, ranks = mpi.rank(), mpi.size()
    return total * rank // ranks, total * (rank + 1) // ranks


def _normal(start, stop, *shape, stream=0):
    """Return an array of random numbers for each index, the same on whichever rank it is."""
    key = jax.random.key(stream)
    return jax.vmap(lambda i: jax.random.normal(jax.random.fold_in(key, i), shape))(
        jnp.arange(start, stop)
    )


def _cg(total, size, method, parameters):
    from scipy.sparse import diags_array, eye_array, kron

    start, stop = _share(total)

    def differences(n):
        return diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(n, n), format="csr")

    across = kron(differences(total)[start:stop], eye_array(size))
    along = kron(
        eye_array(total, format="csr")[start:stop], differences(size) + SHIFT * eye_array(size)
    )
    A = linalg.DistributedCSR.from_rows(across + along)

    def program(data, tol, maxiter):
        A, b = data
        space = A.layout.space
        _, info = linalg.cg(A, b, space=space, method=method, tol=tol, maxiter=maxiter)
        return info

    return _solve(program, (A, _normal(start, stop, size).ravel()), 1e-8)


def _sr(total, size, method, parameters):
    start, stop = _share(total)
    sizes = jnp.logspace(0, -SR_RANGE, parameters)
    J = linalg.center(_normal(start, stop, parameters) * sizes)
    energies = _normal(start, stop, stream=1)
    residuals = energies - linalg.mean(energies)
    counts = linalg.Sharded().counts(stop - start)

    def update(data, **options):
        return linalg.natural_gradient(
            *data, shift=SR_SHIFT, method=method, counts=counts, **options
        )[1]

    if method in SR_DIRECT:
        return _direct(update, (J, residuals))

    def program(data, tol, maxiter):
        return update(data, tol=tol, maxiter=maxiter).solve

    return _solve(program, (J, residuals), 1e-6)


def _poisson(total, size, method, parameters):
    rank, ranks = mpi.rank(), mpi.size()
    below: Any = rank - 1 if rank > 0 else mpi.PROC_NULL
    above: Any = rank + 1 if rank < ranks - 1 else mpi.PROC_NULL

    def A(u):
        """Multiply planes of this rank by the 7-point operator; 2 sendrecv of a plane."""
        outside = jnp.zeros_like(u[:1])
        before = mpi.sendrecv(u[-1:], outside, source=below, dest=above)
        after = mpi.sendrecv(u[:1], outside, source=above, dest=below)
        padded = jnp.pad(jnp.concatenate([before, u, after]), ((0, 0), (1, 1), (1, 1)))
        # Else XLA fuses the padding into the sums, and asks at each point where it is.
        p = jax.lax.optimization_barrier(padded)
        return (
            6 * u
            - (p[:-2, 1:-1, 1:-1] + p[2:, 1:-1, 1:-1])
            - (p[1:-1, :-2, 1:-1] + p[1:-1, 2:, 1:-1])
            - (p[1:-1, 1:-1, :-2] + p[1:-1, 1:-1, 2:])
        )

    def program(b, tol, maxiter):
        space = linalg.Sharded()
        _, info = linalg.cg(A, b, space=space, method=method, tol=tol, maxiter=maxiter)
        return info

    return _solve(program, _normal(*_share(total), size, size), 1e-8)


CASES = {
    "allreduce": Case(
        "a sum over all ranks, in place",
        "bytes",
        tuple(WIDTH * 4**k for k in range(12)),
        _allreduce,
        is_solve=False,
    ),
    "cg": Case(
        "a sparse matrix, of a grid in the plane", "edge", (512,), _cg, METHODS, is_matrix=True
    ),
    "sr": Case(
        "stochastic reconfiguration",
        "samples",
        (4096,),
        _sr,
        ("cg", *SR_DIRECT),
        SR_DIRECT,
        has_parameters=True,
    ),
    "poisson": Case("Poisson's equation in space, by cg", "edge", (64,), _poisson, METHODS),
}

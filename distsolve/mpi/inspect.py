"""What a program did and will do: MPI calls made, and whether its reductions are in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from distsolve.mpi.arguments import as_int
from distsolve.mpi.carrier import as_array
from distsolve.mpi.native import abi, agreement

# Bytes of tokens and loop counters, which XLA counts as temporaries: few in a small program, and
# never as many as a donated array has.
_BOOKKEEPING, _MOST_BOOKKEEPING = 64, 1024


def call_count() -> dict[str, int]:
    """Give the MPI calls made so far on this rank, by MPI function name."""
    return abi.call_counts()


def is_checking() -> bool:
    """Return whether check mode is on: ``DISTSOLVE_CHECK=1`` when MPI was first touched."""
    return agreement.get_checking()


def _nbytes(tree: Any) -> int:
    arrays = [
        leaf if hasattr(leaf, "dtype") else np.asarray(leaf) for leaf in jax.tree.leaves(tree)
    ]
    return sum(int(x.size) * x.dtype.itemsize for x in arrays)


def assert_in_place(
    fn: Callable[..., Any], *args: Any, donate_argnums: int | tuple[int, ...] = 0
) -> None:
    """Raise unless `fn`, compiled with donated arguments, needs no memory beyond them.

    XLA drops a donation silently when it cannot use it; this compiles `fn` (it does not run it) and
    reads the compiled memory statistics.

    Parameters
    ----------
    fn : callable, jitted or not
    *args : arrays or ``jax.ShapeDtypeStruct``, as for a call
    donate_argnums : positions of the donated arguments

    Raises
    ------
    AssertionError
        With the bytes that are not in place and the likely reason.
    TypeError, ValueError
        `fn` cannot be called, an argument is no array, or `donate_argnums` are no positions.
    """
    if not callable(fn):
        raise TypeError(
            f"`fn` is {fn!r} of type {type(fn).__name__}; expected a function of the arrays."
        )
    numbers = _positions(donate_argnums, len(args))
    args = tuple(jax.tree.map(_as_operand, args))
    jitted = jax.jit(lambda *xs: fn(*xs), donate_argnums=numbers)
    lowered = jitted.lower(*args)
    stats = lowered.compile().memory_analysis()
    if stats is None:
        raise RuntimeError("This JAX backend gives no memory statistics of compiled programs.")
    donated = _nbytes([args[i] for i in numbers])
    copied = max(donated - stats.alias_size_in_bytes, 0)
    extra = copied + stats.temp_size_in_bytes
    smallest = min((_nbytes(leaf) for i in numbers for leaf in jax.tree.leaves(args[i])), default=0)
    allowed = min(max(smallest - 1, _BOOKKEEPING), _MOST_BOOKKEEPING)
    if copied == 0 and stats.temp_size_in_bytes <= allowed:
        return
    raise AssertionError(
        f"{getattr(fn, '__name__', 'fn')} is not in place: {extra} bytes beyond the {donated} "
        f"donated bytes ({copied} of them were not reused for a result, and there are "
        f"{stats.temp_size_in_bytes} bytes of temporaries). "
        f"{_likely_reason(lowered, args, numbers)}"
    )


def _positions(donate_argnums: Any, n: int) -> tuple[int, ...]:
    """The positions of donated arguments, or an error unless all are below `n`."""
    given = donate_argnums if isinstance(donate_argnums, (tuple, list)) else (donate_argnums,)
    numbers = tuple(as_int(number, "`donate_argnums`") for number in given)
    if not all(0 <= number < n for number in numbers):
        raise ValueError(
            f"`donate_argnums` is {donate_argnums!r}; expected positions from 0 to {n - 1} among "
            f"the {n} arguments behind `fn`."
        )
    return numbers


def _as_operand(leaf: Any) -> Any:
    return leaf if isinstance(leaf, jax.ShapeDtypeStruct) else as_array(leaf, "fn", "args")


def _debugs_nonfinite() -> bool:
    config: Any = jax.config
    return config.jax_debug_nans or config.jax_debug_infs


def _likely_reason(lowered: Any, args: tuple, numbers: tuple[int, ...]) -> str:
    if _debugs_nonfinite():
        return "JAX keeps donated arguments alive while jax_debug_nans or jax_debug_infs is on."
    results = {(r.shape, r.dtype) for r in jax.tree.leaves(lowered.out_info)}
    for i in numbers:
        for leaf in jax.tree.leaves(args[i]):
            if (leaf.shape, leaf.dtype) not in results:
                return (
                    f"No result has the shape {leaf.shape} and dtype {leaf.dtype} of a donated "
                    "array: a cast, reshape or transpose stands between them."
                )
    return (
        "The donated value is probably still used after the reduction, or used twice: compute "
        "what needs it before, or let it go."
    )

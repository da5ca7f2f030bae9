"""What every loop over steps needs: its limits, equal on all ranks, what it shows, its report."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from distsolve.linalg import trees, watch
from distsolve.linalg.info import Info, Reason

# Units of rounding, relative to the size of an operator: what is below this many is rounding that
# has added up over the steps, and nothing to divide by.
ROUNDING = 100


class Stop(NamedTuple):
    """When to stop: scalars, traced, so that other values do not compile again."""

    tol: jax.Array
    atol: jax.Array
    maxiter: jax.Array | None
    here: jax.Array  # whether this is rank 0: a value, so that programs are equal on all ranks

    def pack(self, dtype):
        """Return the scalars that ranks are to agree on: (4,) of ``dtype``, for `Limits.agreed`.

        The limit travels as two small numbers that every float holds exactly.
        """
        maxiter = jnp.zeros((), jnp.int32) if self.maxiter is None else self.maxiter
        numbers = [self.tol, self.atol, maxiter >> 15, maxiter & 0x7FFF]
        return jnp.stack([number.astype(dtype) for number in numbers])

    def relative(self, info):
        """Return what asks as much of another right-hand side as was asked of that of ``info``."""
        tol = jnp.maximum(self.tol, trees.safe_ratio(info.threshold, info.rhs_norm))
        return self._replace(tol=tol, atol=jnp.zeros_like(self.atol))


class Limits(NamedTuple):
    """What a loop compares with: equal on all ranks, but for ``here``."""

    tol: jax.Array
    threshold: jax.Array
    fixed: jax.Array  # whether to take exactly `maxiter` steps
    maxiter: jax.Array
    here: jax.Array

    @classmethod
    def agreed(cls, packed, rhs_norm, size, stop):
        """Return the limits from what `Stop.pack` made, once ranks agree on it.

        ``size`` is the global number of unknowns; without a `maxiter`, ten times that many steps.
        """
        tol, atol, high, low = packed
        if stop.maxiter is None:
            largest = jnp.iinfo(jnp.int32).max
            size = jnp.asarray(size, rhs_norm.dtype)
            small = size < largest // 10
            maxiter = jnp.where(small, 10 * jnp.where(small, size, 0), largest).astype(jnp.int32)
        else:
            maxiter = (high.astype(jnp.int32) << 15) + low.astype(jnp.int32)
        threshold = jnp.maximum(tol * rhs_norm, atol)
        return cls(tol, threshold, (tol == 0) & (atol == 0), maxiter, stop.here)

    def reached(self, residual_norm):
        """Return whether a true residual is small enough to stop."""
        return (residual_norm <= self.threshold) & ~self.fixed

    def at_limit(self):
        """Return the reason of a loop that has taken all its steps."""
        return jnp.where(self.fixed, Reason.FIXED_STEPS, Reason.MAXITER).astype(jnp.int32)

    def at_start(self, rhs_norm, residual_norm):
        """Return the reason why there is nothing to do, or RUNNING."""
        finite = jnp.isfinite(residual_norm) & jnp.isfinite(rhs_norm)
        cases = [~finite, self.reached(residual_norm), self.maxiter > 0]
        return jnp.select(
            cases, [Reason.NONFINITE, Reason.CONVERGED, Reason.RUNNING], self.at_limit()
        ).astype(jnp.int32)


def first_of(*outcomes: tuple[Any, Any]) -> jax.Array:
    """Return the reason that stands beside the first condition that holds, or RUNNING, as int32."""
    conditions, reasons = zip(*outcomes, strict=True)
    codes = [jnp.asarray(reason, jnp.int32) for reason in (*reasons, Reason.RUNNING)]
    return jnp.select(list(conditions), codes[:-1], codes[-1])


class Watch(NamedTuple):
    """What the user wants to see of a solve."""

    history: int = 0
    progress: bool = False
    callback: Callable[[int, float], Any] | None = None


class Seen(NamedTuple):
    """What has been shown of a solve, and what is kept of it."""

    history: jax.Array  # (history,) residual norms
    due: jax.Array  # the iteration at which the live line wants to hear again

    @classmethod
    def nothing(cls, wanted, residual_norm):
        """Return what is seen at the start."""
        history = jnp.full((wanted.history,), jnp.nan, residual_norm.dtype)
        return cls(history.at[:1].set(residual_norm), jnp.zeros((), jnp.int32))

    def after(self, name, wanted, limits, iterations, residual_norm):
        """Keep and show the residual norm after a step, as far as it is wanted."""
        history, due = self
        if wanted.history:
            history = history.at[iterations].set(residual_norm, mode="drop")
        if wanted.progress:
            norm, aim = residual_norm, limits.threshold
            due = watch.report(name, limits.here, iterations, norm, aim, due)
        if wanted.callback is not None:
            watch.call_back(wanted.callback, iterations, residual_norm)
        return Seen(history, due)


class Counting:
    """A space that counts the messages of what is traced with it."""

    def __init__(self, space):
        self._space, self._count = space, 0

    def __getattr__(self, name):
        self._count += self._space.messages(name)
        return getattr(self._space, name)

    def taken(self):
        """Return the number of messages since the last time that it was asked."""
        count, self._count = self._count, 0
        return count


def agree_to_move(space, event, *flags):
    """Return the event of a step, and flags without which it is to move nothing, as `decide` does.

    They travel together. What is false on one rank is false on all: copies of a replicated vector
    may differ in their last bits, and one rank must not move alone.
    """
    event, *refusals = space.decide(jnp.stack([event, *(~f for f in flags)], dtype=event.dtype))
    return event, *(refusal == 0 for refusal in refusals)


def report(
    name,
    wanted,
    space,
    limits,
    seen,
    *,
    reason,
    iterations,
    residual_norm,
    reductions,
    converged=None,
    **more,
):
    """Return the `Info` of a solve, after the last word on its live line.

    A solver that has rules of its own says whether it ``converged``.
    """
    if converged is None:
        converged = (residual_norm <= limits.threshold) & (reason != Reason.NONFINITE)
    history = None
    if wanted.history:
        kept = jnp.arange(wanted.history, dtype=jnp.int32) <= iterations
        history = jnp.where(kept, space.decide(seen.history), jnp.nan)
        reductions += space.messages("decide")
    if wanted.progress:
        numbers = iterations, residual_norm, limits.threshold
        reductions += watch.close(name, limits.here, *numbers)
    return Info(
        converged=converged,
        reason=reason,
        iterations=iterations,
        residual_norm=residual_norm,
        threshold=limits.threshold,
        reductions=jnp.asarray(reductions, jnp.int32),
        residual_history=history,
        **more,
    )

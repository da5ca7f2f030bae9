"""What a solve tells while it runs: a live line on rank 0, and the user's callback.

Every rank runs the same program: which rank prints is a value, not a branch of the trace. The line
is told when it wants to hear from the loop again, some ten times a second, so that a fast loop
hardly ever leaves compiled code.
"""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap

INTERVAL = 0.1  # seconds between two updates of the line


class Line:
    """The live line of one solve after another; a host-side object, on rank 0 only."""

    def __init__(self):
        self.bar: Any = None
        self.told, self.clock = 0, 0.0

    def update(self, name, iteration, residual, threshold):
        """Show where the solve is, and return the iteration to hear of next."""
        if self.bar is None or iteration < self.told:
            self.open(name, iteration)
        now, steps = time.perf_counter(), iteration - self.told
        rate = steps / max(now - self.clock, 1e-9)
        self.bar.set_postfix_str(
            f"residual {residual:.3e}, to reach {threshold:.3e}", refresh=False
        )
        self.bar.update(steps)
        self.told, self.clock = iteration, now
        return iteration + max(1, int(min(rate * INTERVAL, 2 * steps)))

    def open(self, name, iteration):
        """Begin a new line; rates count from here, as the time before is not known."""
        from tqdm import tqdm

        self.close()
        self.bar = tqdm(desc=name, unit=" iterations", initial=iteration, mininterval=0, miniters=1)
        self.told, self.clock = iteration, time.perf_counter()

    def close(self):
        """Leave the line as it is."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None


_line = Line()


def report(name, here, iteration, residual, threshold, due):
    """Update the line where ``here`` holds and an update is due; return when the next one is."""

    def show(iteration, residual, threshold):
        return np.int32(_line.update(name, int(iteration), float(residual), float(threshold)))

    return _on_host(show, here & (iteration >= due), due, iteration, residual, threshold)


def close(name, here, iteration, residual, threshold):
    """Show the end of a solve where ``here`` holds, and leave the line as it is; return 0."""

    def show(iteration, residual, threshold):
        _line.update(name, int(iteration), float(residual), float(threshold))
        _line.close()
        return np.int32(0)

    return _on_host(show, here, jnp.zeros((), jnp.int32), iteration, residual, threshold)


def _on_host(show, wanted, otherwise, *values):
    """Return ``show(*values)`` where ``wanted``, and else an int32. A batch is shown once.

    For JAX ``show`` is pure, as loops with a batched condition take nothing else; it happens
    because its result is used.
    """

    @custom_vmap
    def call(wanted, otherwise, *values):
        return jax.lax.cond(
            wanted, lambda: jax.pure_callback(show, np.int32(0), *values), lambda: otherwise
        )

    @call.def_vmap
    def _(size, batched, *values):
        # Batched solves share one line: it shows the slowest of them.
        slowest = [jnp.max(v, axis=0) if b else v for v, b in zip(values, batched, strict=True)]
        return call(*slowest), False

    return call(wanted, otherwise, *values)


def call_back(callback, iteration, residual):
    """Call the user's ``callback(iteration, residual_norm)``, on this rank."""
    jax.debug.callback(
        lambda iteration, residual: callback(int(iteration), float(residual)), iteration, residual
    )

"""What is added to the diagonal of the SR matrix, in the forms that VMC codes use."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from distsolve.linalg import arguments, trees


class Damping(NamedTuple):
    """``shift + diag_scale diag(C) + rms_scale sqrt(v)``; a pytree.

    v is the running mean square of the force: ``v = decay v_before + (1 - decay) |F|^2``.
    """

    shift: jax.Array  # scalar or (P,)
    diag_scale: jax.Array | None
    rms: tuple[jax.Array, jax.Array, jax.Array] | None  # scale, decay, v_before (P,)

    @classmethod
    def checked(cls, shift: Any, diag_scale: Any, rms: Any, P: int, real: Any) -> "Damping":
        """Return the damping of P parameters with scalars of dtype ``real``, or raise."""

        def number(value, name, *shapes):
            found = arguments.real_array(value, name, real, *shapes)
            if not isinstance(found, jax.core.Tracer) and np.any(np.asarray(found) < 0):
                raise ValueError(
                    f"`{name}` must not be negative, or the matrix is not positive definite: got "
                    f"{value!r}. Pass 0 for none."
                )
            return found

        none = arguments.is_plain_zero(diag_scale)
        if rms is not None:
            if not isinstance(rms, (tuple, list)) or len(rms) != 3:
                raise ValueError(
                    f"`rms` must be (scale, decay, running), with the running mean square of shape "
                    f"({P},): got {rms!r}. Start with zeros, and pass `info.rms` next time."
                )
            names, shapes = ("rms[0]", "rms[1]", "rms[2]"), ((), (), (P,))
            rms = tuple(map(number, rms, names, shapes))
        return cls(
            number(shift, "shift", (), (P,)),
            None if none else number(diag_scale, "diag_scale", ()),
            rms,
        )

    @property
    def is_vector(self) -> bool:
        """Whether parameters are damped differently."""
        return self.shift.ndim == 1 or self.diag_scale is not None or self.rms is not None

    def of(self, columns: slice) -> "Damping":
        """Return the damping of some of the parameters."""
        shift = self.shift[columns] if self.shift.ndim else self.shift
        rms = self.rms and (self.rms[0], self.rms[1], self.rms[2][columns])
        return self._replace(shift=shift, rms=rms)

    def at(self, force: jax.Array, diagonal: Any) -> tuple[jax.Array, jax.Array | None]:
        """Return the damping, and v with this ``force`` in it, or None.

        ``diagonal`` is that of C, and read if there is a ``diag_scale``.
        """
        damping, running = self.shift, None
        if self.diag_scale is not None:
            damping = damping + self.diag_scale * diagonal
        if self.rms is not None:
            scale, decay, before = self.rms
            running = decay * before + (1 - decay) * trees.squared(force)
            damping = damping + scale * jnp.sqrt(running)
        return damping, running

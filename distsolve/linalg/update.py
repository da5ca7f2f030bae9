"""The report of a natural-gradient step."""

import dataclasses

import jax
import numpy as np

from distsolve.linalg.info import Info, SolveError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class UpdateInfo:
    """What a `natural_gradient` did, equal on all ranks; a pytree.

    Attributes
    ----------
    shift : real scalar or (P,)
        What was added to the diagonal of ``J^H w J / N``, in all.
    raised : real scalar
        How much of it, at most, because the matrix was not positive definite without; mostly 0.
    rms : (P,) real, or None
        The running mean square of the force, for the next step.
    converged : bool
        Whether the system was solved: cg met its tolerance, or a Cholesky factor was found. Without
        one the update is zero, or what momentum keeps.
    solve : Info, or None
        The report of cg.
    method : str
        ``"cg"``, ``"dense"`` or ``"kernel"``; known while tracing.
    """

    shift: jax.Array
    raised: jax.Array
    rms: jax.Array | None
    converged: jax.Array
    solve: Info | None
    method: str = dataclasses.field(metadata={"static": True})

    @property
    def message(self) -> str:
        """A sentence that says what happened and what to do; outside jit only."""
        if self.solve is not None:
            return f"cg: {self.solve.message}"
        if isinstance(self.converged, jax.core.Tracer):
            raise TypeError("`info` is being traced: read its message outside jit.")
        if not np.all(self.converged):
            return (
                f"{self.method}: the system was not solved, as no Cholesky factor is finite. Check "
                "that `J` and `residuals` are finite on every rank; if they are, pass a larger "
                "`shift`, of which no entry is negative, and for the method 'kernel' none is zero."
            )
        largest, raised = float(np.max(self.shift, initial=0)), float(np.max(self.raised))
        if raised:
            return (
                f"{self.method}: the matrix was not positive definite, so its shift was raised "
                f"from {largest - raised:.3g} to {largest:.3g}. Pass a larger `shift`."
            )
        return f"{self.method}: solved by Cholesky factorisation with a shift of {largest:.3g}."

    def raise_if_failed(self) -> None:
        """Raise `SolveError` unless the system was solved; outside jit only."""
        if self.solve is not None:
            self.solve.raise_if_failed()
        elif not np.all(self.converged):
            raise SolveError(self.message)

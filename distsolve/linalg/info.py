"""The report of a solve: why it ended, and how good the answer is."""

import dataclasses
import enum

import jax
import numpy as np


class Reason(enum.IntEnum):
    """Why a solve ended. Ranks agree on the largest code, so worse news has a larger one."""

    RUNNING = 0
    CONVERGED = 1
    MAXITER = 2
    FIXED_STEPS = 3
    STAGNATED = 4
    INDEFINITE_PRECONDITIONER = 5
    INDEFINITE_OPERATOR = 6
    NONFINITE = 7


OUTCOMES = {
    Reason.RUNNING: "The solve has not ended.",
    Reason.CONVERGED: "Converged in {steps}: the residual is {relative:.3g} of "
    "the right-hand side's norm.",
    Reason.MAXITER: "Stopped after {steps} with a residual of {residual:.6g}, above "
    "the threshold {threshold:.6g}.",
    Reason.FIXED_STEPS: "Took {steps}, as tol = atol = 0 asks for; the residual is "
    "{relative:.3g} of the right-hand side's norm.",
    Reason.STAGNATED: "Stagnated after {steps}: the true residual stays at "
    "{residual:.6g}, above the threshold {threshold:.6g}, because rounding prevents more, or `A` "
    "is singular and `b` is not in its range.",
    Reason.INDEFINITE_PRECONDITIONER: "Stopped after {steps}: <r, M r> = "
    "{breakdown:.6g}, so `M` is not positive definite.",
    Reason.INDEFINITE_OPERATOR: "Stopped after {steps}: <p, A p> = {breakdown:.6g} on one rank at "
    "least, so `A` is not positive definite here.",
    Reason.NONFINITE: "Stopped after {steps}: NaN or infinity on at least one rank, "
    "in `b`, `x0`, or the result of `A` or `M`.",
}
ADVICE = {
    Reason.MAXITER: "Raise `maxiter`, loosen `tol`, use wider floats (float64 needs "
    "jax_enable_x64), or pass a preconditioner `M`. If the residual hardly fell, see that `A` is "
    "what the method asks for (cg: positive definite), that it reduces over ranks once, and that "
    "vectors in pieces have space=Sharded().",
    Reason.STAGNATED: "Loosen `tol`, use wider floats (float64 needs "
    "jax_enable_x64), or lower the condition number with a preconditioner `M` or a shift; with "
    "gmres, raise `restart`.",
    Reason.INDEFINITE_PRECONDITIONER: "Pass a positive definite `M`, or none.",
    Reason.INDEFINITE_OPERATOR: "Common causes are a wrong reduction over ranks "
    "(a missing, doubled or unscaled allreduce in `A`), vectors in pieces without space=Sharded(), "
    "and a singular `A`, for which minres is made; otherwise add a larger shift to `A`.",
    Reason.NONFINITE: "Check that each is finite on every rank. If they "
    "are, `A` may lack its allreduce: see with `distsolve.check_replicated(A(b))` (of a matrix, "
    "`A @ b`) in a Replicated space. Else `A` is probably singular and the system has no solution: "
    "add a shift to `A`.",
}


class SolveError(ArithmeticError):
    """A solve that did not reach its tolerance; `Info.raise_if_failed` raises it."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Info:
    """The report of a solve, equal on all ranks; a pytree.

    Attributes
    ----------
    converged : bool
        Whether ``residual_norm <= max(tol * rhs_norm, atol)``.
    reason : int
        A `Reason`.
    iterations : int
        Steps taken; a step that broke down moves nothing and does not count.
    residual_norm : float
        The true residual ``||b - A x||``, computed from the returned ``x``, unpreconditioned.
    rhs_norm : float
        ``||b||``.
    threshold : float
        ``max(tol * rhs_norm, atol)``.
    breakdown : float
        ``<p, A p>`` or ``<r, M r>`` where one was not positive and ended the solve, 0 otherwise;
        of replicated vectors the smallest of all ranks.
    condition_estimate : float
        The ratio of the extreme Ritz values of ``M A`` that the steps have found: a lower bound of
        the condition number, and after convergence mostly close to it. 1 where the method has none.
    reductions : int
        Messages that the solver sent, those of ``A`` and ``M`` not counted.
    residual_history : (history,) array, or None
        Residual norms at the start and after each step, as the method knows them; NaN beyond the
        last step.
    """

    converged: jax.Array
    reason: jax.Array
    iterations: jax.Array
    residual_norm: jax.Array
    rhs_norm: jax.Array
    threshold: jax.Array
    breakdown: jax.Array
    condition_estimate: jax.Array
    reductions: jax.Array
    residual_history: jax.Array | None = None

    @property
    def reason_name(self) -> str:
        """The reason in words, in lower case; outside jit only."""
        return self._reason().name.lower()

    @property
    def message(self) -> str:
        """What happened and what to do, in words; outside jit only."""
        return f"{self.outcome} {ADVICE.get(self._reason(), '')}".rstrip()

    @property
    def outcome(self) -> str:
        """A sentence that says what happened; outside jit only."""
        reason = self._reason()
        residual, rhs = float(self.residual_norm), float(self.rhs_norm)
        count = int(self.iterations)
        return OUTCOMES[reason].format(
            steps=f"{count} iteration" if count == 1 else f"{count} iterations",
            residual=residual,
            relative=residual / rhs if rhs else residual,
            threshold=float(self.threshold),
            breakdown=float(self.breakdown),
        )

    def raise_if_failed(self) -> None:
        """Raise `SolveError` unless the solve converged or took its fixed steps; outside jit only.

        The report is equal on all ranks, so all of them raise or none.
        """
        if self._reason() not in (Reason.CONVERGED, Reason.FIXED_STEPS):
            raise SolveError(self.message)

    def _reason(self) -> Reason:
        if isinstance(self.reason, jax.core.Tracer):
            raise TypeError(
                "`info` is being traced, so its reason is not known yet: inside jit compare "
                "`info.reason` with `distsolve.linalg.Reason`; read names and messages outside."
            )
        if np.ndim(self.reason):
            raise TypeError(
                f"`info` reports {np.shape(self.reason)} solves: take one of them first, with "
                "jax.tree.map(lambda leaf: leaf[i], info)."
            )
        return Reason(int(self.reason))

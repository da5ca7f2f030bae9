"""Natural gradients: the system of stochastic reconfiguration (SR), by the method that fits.

N samples on all ranks, n of them here, P parameters; J (n, P) the centred log-derivatives here, w
weights whose sum over all ranks is N (1 each by default), r residuals: local energies less their
mean. With C = J^H w J / N and the force F = J^H w r / N, the update x solves

    (C + D) x = F,    D = shift + diag_scale diag(C) + rms_scale sqrt(v),

v being the running mean square of the force. Momentum (SPRING) leaves mu x_before in x:

    x = mu x_before + (C + D)^-1 J^H w (r - J mu x_before) / N.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.typing import ArrayLike

from distsolve.linalg import arguments, cholesky, dual, trees
from distsolve.linalg.damping import Damping
from distsolve.linalg.gram import Gram
from distsolve.linalg.jacobian import MODES, check_weights, safe
from distsolve.linalg.krylov.cg import cg
from distsolve.linalg.machine import is_tracing
from distsolve.linalg.plan import as_bytes, choose
from distsolve.linalg.space import Sharded, Space
from distsolve.linalg.trees import HIGHEST
from distsolve.linalg.update import UpdateInfo

METHODS = ("auto", "cg", "dense", "kernel")


def natural_gradient(
    J: jax.Array,
    residuals: jax.Array,
    *,
    shift: ArrayLike,
    method: str = "auto",
    x0: jax.Array | None = None,
    mode: str | None = None,
    diag_scale: ArrayLike = 0.0,
    rms: tuple[ArrayLike, ArrayLike, jax.Array] | None = None,
    momentum: tuple[ArrayLike, jax.Array] | None = None,
    weights: jax.Array | None = None,
    counts: tuple[int, ...] | None = None,
    rows: Space | None = None,
    memory: float | None = None,
    tol: ArrayLike = 1e-5,
    atol: ArrayLike = 0.0,
    maxiter: ArrayLike | None = None,
    M: Any = None,
    history: int = 0,
    progress: bool = False,
    callback: Callable[[int, float], Any] | None = None,
) -> tuple[jax.Array, UpdateInfo]:
    """Solve the SR system for the update of the parameters.

    ``(J^H w J / N + D) x = J^H w r / N``,
    ``D = shift + diag_scale diag(J^H w J / N) + rms_scale sqrt(v)``

    Parameters
    ----------
    J : (n, P) float32, float64, complex64 or complex128, sharded by rows
        Centred log-derivatives: ``center(jacobian(log_psi, params, samples))``. Ranks may hold
        different numbers of them, also none.
    residuals : (n,) real or of J's dtype, sharded
        Local energies less their mean. As J is centred, a mean that is left makes no difference.
    shift : real scalar, or (P,) replicated
    method : {"auto", "cg", "dense", "kernel"}
        ``"cg"``: conjugate gradients on S, one message a step. ``"dense"``: S in one buffer, summed
        in place through its triangle, and Cholesky. ``"kernel"``: the N x N dual (minSR), the same
        answer; J is transposed over the ranks once. ``"auto"``: what `plan` predicts to be fastest
        of those that fit into memory.
    x0 : (P,) like the update, replicated, optional
        Where cg starts; the others need no start.
    mode : {"real", "complex", "holomorphic"}, optional
        As for `jacobian`. ``"complex"``, real parameters of a complex ``log_psi``, must be said: it
        takes real parts, of C and of F. Otherwise the update has J's dtype.
    diag_scale : real scalar
        How much of the diagonal of C is added to it.
    rms : (scale, decay, running), optional
        Adds ``scale * sqrt(v)``, ``v = decay * running + (1 - decay) |F|^2``. ``running`` is (P,)
        real, replicated: zeros at first, then the last ``info.rms``.
    momentum : (mu, previous), optional
        SPRING: ``previous`` is the last update, (P,) replicated, zeros at first; mu e.g. 0.99.
    weights : (n,) real, sharded, optional
        Not negative; pass the same ones to `center`.
    counts : tuple of int, optional
        The n of every rank, from ``rows.counts(n)`` outside jit. ``"kernel"`` needs it inside jit,
        as sizes must be known while tracing; so does ``"auto"``, which is ``"cg"`` without it.
        Outside jit it is found out, in one message.
    rows : Space
        Over which ranks the samples are spread; `Sharded` by default.
    memory : float, optional
        Bytes that ``"auto"`` may fill on a rank; by default what the machine has.
    tol, atol, maxiter, M, history, progress, callback
        For cg: see the head of `distsolve.linalg.driver`.

    Returns
    -------
    update : (P,), replicated
        Columns as in J. To be subtracted from the parameters, times a rate.
    info : UpdateInfo

    Raises
    ------
    TypeError, ValueError
        While tracing, before any message, for arguments that cannot work. Outside jit, after one
        message, for a ``shift`` with entries 0 that ``"kernel"`` would divide by.

    Notes
    -----
    Derivatives with respect to ``J``, ``residuals``, ``weights``, the damping and the momentum, in
    forward and reverse mode, cost one more solve: of cg, or by one more Cholesky factorisation, in
    which a shift that was raised is held. What is replicated gets its whole cotangent on each rank.

    Communication
    -------------
    ``"cg"``: one message for F and all diagonals, then one for each product with S.
    ``"dense"``: that one, S, and a tiny one for each factorisation. ``"kernel"``: J once, the dual,
    the update, and a tiny one for each factorisation.

    References
    ----------
    Sorella (1998), doi:10.1103/PhysRevLett.80.4558. Chen and Heyl (2024),
    doi:10.1038/s41567-024-02566-1. Rende and others (2024), doi:10.1038/s42005-024-01732-4.
    Goldshlager, Abrahamsen and Lin (2024), doi:10.1016/j.jcp.2024.113351.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from distsolve import natural_gradient
    >>> J = jnp.array([[1.0, 2.0], [-1.0, -2.0]])  # the same rows on each rank
    >>> update, info = natural_gradient(J, jnp.array([1.0, -1.0]), shift=1.0, method="kernel")
    >>> [round(float(x), 6) for x in update], info.method
    ([0.166667, 0.333333], 'kernel')
    """
    rows = arguments.space(rows, Sharded, "rows")
    J, residuals, dtype = _check_rows(J, residuals, mode)
    P, real = J.shape[1], jnp.finfo(J.dtype).dtype
    weights = check_weights(weights, len(J), real)
    damping = Damping.checked(shift, diag_scale, rms, P, real)
    momentum = _check_momentum(momentum, P, dtype, real)
    x0 = None if x0 is None else _like_update(x0, "x0", P, dtype)
    if method not in METHODS:
        raise ValueError(
            f"`method` must be one of {', '.join(map(repr, METHODS))}: got {method!r}."
        )
    memory = None if memory is None else as_bytes(memory)
    counts = None if counts is None else _check_counts(counts, len(J), rows)
    if method in ("auto", "kernel"):
        counts = _counts(counts, J, rows, method)
    if method == "auto":
        method = choose(counts, P, J.dtype, dtype, rows, maxiter, memory)
    data = J, residuals, momentum, weights, damping
    if method == "kernel":
        _require_damping(J, weights, damping, rows)
        return _kernel(*data, counts=counts, dtype=dtype, rows=rows)
    if method == "dense":
        return _dense(*data, dtype=dtype, rows=rows)
    options = {"tol": tol, "atol": atol, "maxiter": maxiter, "M": M}
    options |= {"history": history, "progress": progress, "callback": callback}
    return _cg(*data, x0, dtype=dtype, rows=rows, options=options)


def _cg(J, residuals, momentum, weights, damping, x0, *, dtype, rows, options):
    force, kept, _, total, running = _open(
        J, residuals, momentum, weights, damping, dtype=dtype, rows=rows
    )
    start = x0 if x0 is None or momentum is None else x0 - kept
    S = Gram(J, total, rows=rows, weights=weights)
    x, solve = cg(S, force, start, **options)
    raised = jnp.zeros((), total.dtype)
    info = UpdateInfo(total, raised, running, solve.converged, solve, "cg")
    return _add(x, kept), info


@functools.partial(jax.jit, static_argnames=("dtype", "rows"))
def _dense(J, residuals, momentum, weights, damping, *, dtype, rows):
    force, kept, N, total, running = _open(
        J, residuals, momentum, weights, damping, dtype=dtype, rows=rows
    )
    H = Gram(J, rows=rows, weights=weights).dense_here(dtype)
    S = rows.sum_symmetric(H) / N.astype(dtype)
    x, raised, solved = cholesky.solve(S, force, total, rows)
    info = UpdateInfo(total + raised, raised, running, solved, None, "dense")
    return _add(x, kept), info


@functools.partial(jax.jit, static_argnames=("counts", "dtype", "rows"))
def _kernel(J, residuals, momentum, weights, damping, *, counts, dtype, rows):
    R, kept = _rows_of_residuals(J, residuals, momentum, damping, rows)
    x, total, raised, running, solved = dual.solve(
        J, R, weights, damping, counts=counts, dtype=dtype, rows=rows
    )
    solved &= jnp.isfinite(x).all()
    info = UpdateInfo(total, raised, running, solved, None, "kernel")
    return _add(x, kept), info


@functools.partial(jax.jit, static_argnames=("dtype", "rows"))
def _open(J, residuals, momentum, weights, damping, *, dtype, rows):
    """Return F, mu x_before, N, D and the running mean square; one message."""
    R, kept = _rows_of_residuals(J, residuals, momentum, damping, rows)
    real = jnp.finfo(J.dtype).dtype
    weight = jnp.asarray(len(J), real) if weights is None else weights.sum()
    weighted = R if weights is None else R * weights[None].astype(R.dtype)
    forces = jnp.matmul(weighted.conj(), J, precision=HIGHEST).conj()
    forces = forces if jnp.issubdtype(dtype, jnp.complexfloating) else forces.real
    diagonal = None
    if damping.diag_scale is not None:
        ones = jnp.ones(len(J), real) if weights is None else weights
        diagonal = jnp.matmul(ones, trees.squared(J), precision=HIGHEST)
    sums, unpack = ravel_pytree(
        (trees.real_parts(forces), [] if diagonal is None else [diagonal], weight)
    )
    parts, diagonals, N = unpack(rows.sum(sums))
    N = safe(N)
    forces = trees.from_real_parts(parts, forces) / N.astype(forces.dtype)
    total, running = damping.at(forces[0], diagonals[0] / N if diagonals else None)
    return forces[-1], kept, N, total, running


def _rows_of_residuals(J, residuals, momentum, damping, rows):
    """Return the residuals whose forces are needed, (k, n), the one to solve for last."""
    if momentum is None:
        return residuals[None], None
    mu, previous = momentum
    kept = mu.astype(previous.dtype) * previous
    entered = rows.enter(kept).astype(J.dtype)
    rest = residuals - jnp.matmul(J, entered, precision=HIGHEST)
    return jnp.stack([residuals, rest] if damping.rms else [rest]), kept


def _add(x, kept):
    return x if kept is None else x + kept


def _check_rows(J, residuals, mode):
    J, residuals = arguments.log_derivatives(J), arguments.array(residuals, "residuals")
    real = jnp.finfo(J.dtype).dtype
    if residuals.shape != J.shape[:1]:
        if residuals.shape == J.shape[1:]:
            raise ValueError(
                f"`J` looks transposed: its shape is {J.shape}, and `residuals` are "
                f"{len(residuals)}. Rows are samples, columns parameters: pass J.T."
            )
        raise ValueError(
            f"`residuals` must be one number for each row of `J`: expected shape {J.shape[:1]}, "
            f"got {residuals.shape}. Pass this rank's own."
        )
    dtypes = dict.fromkeys((J.dtype, real))
    if residuals.dtype not in dtypes:
        raise TypeError(
            f"`residuals` must have the dtype {' or '.join(map(str, dtypes))}, as nothing is cast "
            f"silently: got {residuals.dtype}. Convert them; for real `J` take their real part."
        )
    is_complex = jnp.iscomplexobj(J)
    if mode is not None and (mode not in MODES or (mode == "real") == is_complex):
        fitting = "'complex' or 'holomorphic'" if is_complex else "'real'"
        raise ValueError(f"`mode` must be {fitting} or None for `J` of {J.dtype}: got {mode!r}.")
    return J, residuals.astype(J.dtype), jnp.dtype(real if mode == "complex" else J.dtype)


def _check_momentum(momentum, P, dtype, real):
    if momentum is None:
        return None
    if not isinstance(momentum, (tuple, list)) or len(momentum) != 2 or jnp.shape(momentum[0]):
        raise ValueError(
            f"`momentum` must be (mu, previous), a scalar and the last update: got {momentum!r}. "
            "Start with zeros."
        )
    mu, previous = momentum
    return arguments.real_array(mu, "momentum[0]", real, ()), _like_update(
        previous, "momentum[1]", P, dtype
    )


def _require_damping(J, weights, damping, rows):
    """Raise where a parameter of the dual has no damping, as far as values are known."""
    shift = damping.shift
    alone = shift.ndim and damping.diag_scale is None and damping.rms is None
    known = not any(isinstance(x, jax.core.Tracer) for x in (J, shift, weights))
    if not alone or is_tracing() or not known or np.all(np.asarray(shift)):
        return
    squares = trees.squared(J)
    here = squares.sum(0) if weights is None else weights @ squares
    bare = np.flatnonzero((np.asarray(shift) == 0) & (np.asarray(rows.agree(here)) != 0))
    if len(bare):
        raise ValueError(
            f"`shift` is 0 for {len(bare)} of {len(shift)} parameters that have samples, the first "
            f"at entry {bare[0]}: the method 'kernel' divides by it. Pass a positive shift there, "
            "or the method 'dense' or 'cg'."
        )


def _like_update(x, name, P, dtype):
    x = arguments.array(x, name)
    if x.shape != (P,) or x.dtype != dtype:
        raise ValueError(
            f"`{name}` must be like the update, {dtype} of shape ({P},): got {x.dtype} of shape "
            f"{x.shape}. With real parameters and complex `J`, pass mode='complex'."
        )
    return x


def _check_counts(counts, n, rows):
    """Return the counts as ints; raise unless there is one for each rank, with n here."""
    size, here = rows.ranks(), rows.rank() if hasattr(rows, "rank") else 0
    known = isinstance(counts, (tuple, list)) and all(map(arguments.is_int, counts))
    if not known or len(counts) != size or (hasattr(rows, "rank") and counts[here] != n):
        raise ValueError(
            f"`counts` must be the number of samples on each of {size} ranks, with {n} at rank "
            f"{here}: got {counts}. Take `Sharded().counts(n)` outside jit, on all ranks."
        )
    return tuple(map(int, counts))


def _counts(counts, J, rows, method):
    """Return the n of every rank, or None where it is not known and not needed."""
    n, size = len(J), rows.ranks()
    if size == 1:
        return (n,)
    if not hasattr(rows, "exchange"):
        if method == "kernel":
            raise ValueError(
                f"method 'kernel' transposes `J` by MPI, which {rows!r} has none of. Use Sharded, "
                "or the method 'dense' or 'cg'."
            )
        return None
    if counts is None:
        if not is_tracing():
            return rows.counts(n)
        if method == "kernel":
            raise ValueError(
                "`counts` is needed for the method 'kernel' inside jit: the number of samples on "
                "each rank must be known while tracing, and nothing is sent then. Outside jit, "
                f"take counts = Sharded().counts(n), and pass it; here n is {n}."
            )
        return None
    return counts

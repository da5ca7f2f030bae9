"""Conjugate gradients for Hermitian positive definite operators, in three arrangements."""

from collections.abc import Callable
from typing import Any

from jax.typing import ArrayLike

from distsolve.linalg import arguments, driver
from distsolve.linalg.gram import SRMatrix
from distsolve.linalg.info import Info
from distsolve.linalg.krylov import cg_classic, cg_gram, cg_pipelined, cg_single_reduction
from distsolve.linalg.space import Space

METHODS = {
    "classic": cg_classic.METHOD,
    "single_reduction": cg_single_reduction.METHOD,
    "pipelined": cg_pipelined.METHOD,
}


def cg(
    A: Any,
    b: Any,
    x0: Any = None,
    *,
    tol: ArrayLike = 1e-5,
    atol: ArrayLike = 0.0,
    maxiter: ArrayLike | None = None,
    M: Any = None,
    space: Space | None = None,
    method: str = "classic",
    args: tuple[Any, ...] = (),
    history: int = 0,
    progress: bool = False,
    callback: Callable[[int, float], Any] | None = None,
) -> tuple[Any, Info]:
    """Solve ``A x = b`` for a Hermitian positive definite ``A`` by conjugate gradients.

    The equation is ``A x = b`` over all leaves of ``b`` together, with the inner product
    ``Re <x, y>``. Where vectors live is said by ``space``: by default they are replicated, so every
    rank holds all of ``b`` and ``x``, as in stochastic reconfiguration; with `Sharded` each rank
    holds its piece.

    Parameters
    ----------
    A, b, x0, tol, atol, maxiter, M, space, args, history, progress, callback
        As for all solvers: see the head of `distsolve.linalg.driver`.
    method : {"classic", "single_reduction", "pipelined"}
        ``"classic"`` takes two small reductions a step for vectors in pieces.
        ``"single_reduction"`` takes one, for one more vector and a little accuracy.
        ``"pipelined"`` starts its one reduction before the products with ``M`` and ``A`` and waits
        for it after them, for more vectors (two; six with ``M``) and more rounding. All three
        decide by the true residual, and restart from it where the recurrence drifted away.

    Returns
    -------
    x : pytree like ``b``, replicated or in pieces as ``b`` is
    info : Info
        Why the solve ended, equal on all ranks; ``info.raise_if_failed()`` outside jit.

    Raises
    ------
    TypeError, ValueError
        While tracing, before any message is sent, for arguments that cannot work.

    Notes
    -----
    Derivatives with respect to ``b``, ``args`` and all that ``A`` closes over cost one more solve
    each, forward and reverse. Called outside jit, it compiles once for each program that ``A`` and
    ``M`` amount to; other data, tolerances and limits run the same compiled code.

    Communication
    -------------
    One product with ``A`` in each step and one at the end, for the true residual; one more if
    ``x0`` is given, one more with ``"single_reduction"``, and two more with ``"pipelined"``, which
    takes some besides where it replaces vectors. Beyond that, for k steps in one cycle: sharded
    vectors 2 k + 3 messages with ``"classic"`` and k + 3 with the others; replicated vectors k + 2
    tiny ones (k + 3 with ``M`` or with the others) at more than one rank, in which the ranks agree
    to stop. With a `Gram` operator and ``"classic"`` k messages in all, at least one, and one more
    for ``x0``: all rides in its one message a product, the true residual included.

    References
    ----------
    Hestenes and Stiefel (1952), doi:10.6028/jres.049.044. Chronopoulos and Gear (1989),
    doi:10.1016/0377-0427(89)90045-9. Ghysels and Vanroose (2014),
    doi:10.1016/j.parco.2013.06.001. Chen and Carson (2020), doi:10.1137/19M1276856.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from distsolve.linalg import cg
    >>> diagonal = jnp.array([1.0, 2.0, 3.0])
    >>> x, info = cg(lambda p: diagonal * p, jnp.ones(3))
    >>> info.reason_name, int(info.iterations)
    ('converged', 3)
    """
    space = arguments.space(space)
    arrangement = arguments.choice(method, METHODS, "method")
    # Where every rank has all rows, products are no messages that an agreement could ride in.
    reduces = isinstance(A, SRMatrix) and not A.rows.is_whole
    if reduces and method == "classic" and not args and space.is_whole:
        arrangement = cg_gram.METHOD
    return driver.drive(
        arrangement,
        A,
        b,
        x0,
        tol=tol,
        atol=atol,
        maxiter=maxiter,
        M=M,
        space=space,
        args=args,
        history=history,
        progress=progress,
        callback=callback,
    )

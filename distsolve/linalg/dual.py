"""The SR system through its N x N dual, exact: samples take the place of parameters.

N samples on all ranks, n of them here, P parameters, p ranks. For a positive damping D,

    (J^H J / N + D)^-1 J^H = D^-1 J^H (J D^-1 J^H / N + 1)^-1.

Each rank gets all samples for P / p of the parameters: J is transposed over the ranks once, in one
message, and no rank ever holds all of it. A sample's residual and weight travel at the end of its
row. For real parameters of complex J the real and the imaginary parts are 2 N real rows.
"""

from typing import Any

import jax
import jax.numpy as jnp

from distsolve.linalg import cholesky, trees
from distsolve.linalg.damping import Damping
from distsolve.linalg.jacobian import safe
from distsolve.linalg.trees import HIGHEST


def solve(
    J: jax.Array,
    R: jax.Array,
    weights: jax.Array | None,
    damping: Damping,
    *,
    counts: tuple[int, ...],
    dtype: Any,
    rows: Any,
):
    """Solve ``(J^H w J / N + D) x = J^H w r / N``.

    Parameters
    ----------
    J : (n, P) sharded by rows
    R : (k, n) of J's dtype, sharded
        The last row is r; the first is the one whose force the damping is made with.
    weights : (n,) real, sharded, or None
    damping : Damping, replicated
    counts : the n of every rank
    dtype : of x

    Returns
    -------
    x : (P,), shift : () or (P,), raised : scalar, running : (P,) or None, solved : bool
        Replicated: the solution, what was added to the diagonal in all, what of it because the
        Cholesky factorisation failed, the running mean square, and whether there is a solution: x
        is zero where a good factor, or the damping of a parameter, is missing.

    Communication
    -------------
    One alltoallv of J, one `sum_symmetric` of (N, N), one `assemble` of x, and a tiny message for
    each factorisation. In reverse the first three again, and one of the damping.
    """
    # Ranks use all that is replicated for their own columns: their cotangents are shares.
    damping = jax.tree.map(rows.enter, damping)
    P, k, size = J.shape[1], len(R), rows.ranks()
    rank = rows.rank() if size > 1 else 0
    edges = [P * i // size for i in range(size + 1)]
    mine = slice(edges[rank], edges[rank + 1])
    A = transposed(J, R, weights, edges, rank, counts=counts, dtype=dtype, rows=rows)
    width = edges[rank + 1] - edges[rank]
    A, R, N = A[:, :width], A[:, width:-1].T, safe(A[:, -1].real.sum())

    forces = jnp.matmul(R.conj(), A, precision=HIGHEST).conj() / N.astype(A.dtype)
    diagonal = trees.squared(A).sum(0) / N
    shift, running = damping.of(mine).at(forces[0], diagonal)
    if damping.is_vector:
        # A column of zeros may have no damping, and has no update then; any other one must.
        idle = (shift == 0) & (diagonal == 0)
        inverse = jnp.where(idle, 0, 1 / jnp.where(idle, 1, shift))
        # Without damping it is infinite, and so T is not finite on any rank.
        factor, scaled = jnp.ones_like(N), A * inverse.astype(A.dtype)[None]
        inverse = jnp.where(jnp.isfinite(inverse), inverse, 0).astype(A.dtype)
    else:
        inverse, factor, scaled = None, shift, A
    T = jax.lax.dot_general(scaled, A.conj(), (((1,), (1,)), ((), ())), precision=HIGHEST)
    T = rows.enter(rows.sum_symmetric(T)) / N.astype(T.dtype)
    y, raised, solved = cholesky.solve(T, R[k - 1], factor, rows)
    x = jnp.matmul(y.conj(), A, precision=HIGHEST).conj() / N.astype(A.dtype)
    x = x if inverse is None else inverse * x
    # Without a solution y is zero, and its derivative NaN; A itself may not be finite.
    x = jnp.where(solved, x, y.sum())

    if damping.is_vector:  # a raised factor raises every entry in proportion
        columns = [x, shift * (1 + raised)] + ([] if running is None else [running])
    else:
        columns = [x]
    parts = trees.real_parts(columns)
    offset = jnp.asarray(edges[rank], jnp.int32)
    whole = rows.assemble(jnp.stack(parts, axis=1), offset, P) if size > 1 else jnp.stack(parts, 1)
    x, *rest = trees.from_real_parts(list(whole.T), columns)
    if not damping.is_vector:
        return x, shift + raised, raised, None, solved
    raised = raised / (1 + raised) * jnp.max(jnp.abs(rest[0]), initial=0)
    return x, rest[0], raised, rest[1] if running is not None else None, solved


def transposed(J, R, weights, edges, rank, *, counts, dtype, rows):
    """Return all samples' columns of J from ``edges[rank]`` on, then those of R and the weights.

    All but the weights are multiplied by the square roots of the weights. Complex rows for real
    vectors come as two.
    """
    real = jnp.finfo(J.dtype).dtype
    weights = jnp.ones(len(J), real) if weights is None else weights
    parts = 1
    if jnp.iscomplexobj(J) and not jnp.issubdtype(dtype, jnp.complexfloating):
        parts = 2
        J, R = (jnp.concatenate([x.real, x.imag], axis) for x, axis in ((J, 0), (R, 1)))
    once = jnp.concatenate([weights, jnp.zeros_like(weights)][:parts])[:, None].astype(J.dtype)
    roots = jnp.sqrt(jnp.concatenate([weights] * parts))[:, None].astype(J.dtype)
    J, tail = roots * J, jnp.concatenate([roots * R.T, once], axis=1)
    extra, size = tail.shape[1], len(edges) - 1
    width = edges[rank + 1] - edges[rank] + extra
    blocks = [
        jnp.concatenate([J[:, edges[i] : edges[i + 1]], tail], axis=1).ravel() for i in range(size)
    ]
    if size == 1:
        return blocks[0].reshape(-1, width)
    sends = [len(block) for block in blocks]
    receives = [parts * count * width for count in counts]
    return rows.exchange(jnp.concatenate(blocks), sends, receives).reshape(-1, width)

"""The rank's part of a product with a Gram matrix, reading J once.

n rows here of P entries: J (n, P). For k vectors V (k, P) at once, and weights w (n,) of the rows,

    U_c = J^H (w * (J V_c)),    norms_c = sum_i w_i |J_i V_c|^2.

Both come in one row of real numbers, followed by a tail that the caller gives: what is to be summed
over ranks lies in one piece of memory, and is sent as it is.

On CPUs a compiled handler takes four rows at a time through the cache, from the first rows to the
last or back: in a loop that turns each time, what was read last is still in the cache. Products are
summed in the dtype of J, in as many partial sums as a vector register has lanes, and the norms in
float64: the rounding is that of a BLAS product. Elsewhere, and for derivatives, XLA computes
``J @ v`` and ``conj(w) @ J``: never with a transpose of J in memory, and always at full precision.
"""

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from distsolve.linalg import handlers
from distsolve.linalg.native import gram as _native
from distsolve.linalg.trees import DTYPES, HIGHEST, squared, vary_like


def gram_product(J, V, tail, weights=None, backward=False):
    """Return ``U``, the squared norms and the tail as one row of reals; `unpack` takes it apart.

    Parameters
    ----------
    J : (n, P) float32, float64, complex64 or complex128, this rank's rows
    V : (k, P) of J's dtype, replicated; or real for complex ``J``: then ``U = Re(J^H (w * J V))``
    tail : (m,) of the real dtype of J
    weights : (n,) of the real dtype of J, optional
        1 for each row by default.
    backward : bool scalar, optional
        Whether to begin with the last rows; the rounding of sums depends on it.

    Returns
    -------
    (k P + k + m,) real array, of complex ``U`` as pairs (2 k P + k + m).

    Communication
    -------------
    None.
    """
    if weights is None:
        weights = jnp.zeros(0, tail.dtype)
    operands = J, V, weights, tail, jnp.asarray(backward)
    return vary_like(gram_product_p.bind(*operands), operands)


def unpack(packed, k, P, dtype):
    """Return ``U`` (k, P) of ``dtype``, the norms (k,) and the tail of what `gram_product` gave."""
    pairs = jnp.issubdtype(dtype, jnp.complexfloating)
    end = k * P * (2 if pairs else 1)
    U = packed[:end]
    if pairs:
        U = U.reshape(k * P, 2)
        U = jax.lax.complex(U[:, 0], U[:, 1])
    return U.reshape(k, P), packed[end : end + k], packed[end + k :]


def pack(U, norms, tail):
    """Return one row of reals; the inverse of `unpack`."""
    if jnp.iscomplexobj(U):
        U = jnp.stack([U.real, U.imag], axis=-1)
    return jnp.concatenate([U.ravel(), norms, tail])


def rows_times(J, V):
    """Return ``J V_c`` of each vector: (k, n)."""
    if len(V) == 1:
        return jnp.matmul(J, V[0], precision=HIGHEST)[None]
    return jax.lax.dot_general(V, J, (((1,), (1,)), ((), ())), precision=HIGHEST)


def plain(J, V, weights, tail, backward=None):
    """Compute the same in XLA's operations, all rows at once."""
    real_vectors = jnp.iscomplexobj(J) and not jnp.iscomplexobj(V)
    parts = [J.real, J.imag] if real_vectors else [J]
    U, norms = jnp.zeros_like(V), jnp.zeros(len(V), tail.dtype)
    for part in parts:
        W = rows_times(part, V)
        squares = squared(W)
        if weights.size:
            W, squares = W * weights[None].astype(W.dtype), squares * weights[None]
        U = U + jnp.matmul(W.conj(), part, precision=HIGHEST).conj()
        norms = norms + squares.sum(1)
    return pack(U, norms, tail)


gram_product_p = Primitive("gram_product")


@gram_product_p.def_abstract_eval
def _abstract(J, V, weights, tail, backward):
    if str(J.dtype) not in DTYPES:
        raise TypeError(f"`J` must have one of the dtypes {', '.join(DTYPES)}: got {J.dtype}.")
    real = jnp.finfo(J.dtype).dtype
    if V.dtype not in (J.dtype, real):
        raise TypeError(
            f"a vector times `J` must have the dtype of `J`, {J.dtype}, or its real one, {real}: "
            f"got {V.dtype}. Convert it."
        )
    if V.ndim != 2 or V.shape[1] != J.shape[1]:
        raise ValueError(f"expected vectors of shape (k, {J.shape[1]}), got {V.shape}.")
    if tail.dtype != real or weights.dtype != real or weights.shape not in ((0,), J.shape[:1]):
        raise ValueError(
            f"`weights` must be {real} of shape {J.shape[:1]}, and the tail {real}: got "
            f"{weights.dtype} of shape {weights.shape}, and {tail.dtype}."
        )
    reals = 2 if jnp.issubdtype(V.dtype, jnp.complexfloating) else 1
    return jax.core.ShapedArray((V.size * reals + V.shape[0] + tail.size,), real)


def _lower(ctx, *operands):
    """Call the handler; a second result is memory that it works in."""
    J, V, *_ = ctx.avals_in
    k, entries = V.shape[0], V.shape[0] * J.shape[1]
    moved = 2 * entries * J.dtype.itemsize if jnp.issubdtype(J.dtype, jnp.complexfloating) else 0
    scratch = jax.core.ShapedArray((8 * k + moved,), jnp.uint8)
    rule = jax.ffi.ffi_lowering("distsolve_gram_product")
    return rule(ctx.replace(avals_out=(*ctx.avals_out, scratch)), *operands)[:1]


def _jvp(primals, tangents):
    out = gram_product_p.bind(*primals)
    varied = [i for i, t in enumerate(tangents) if not isinstance(t, ad.Zero)]

    def of_varied(*values):
        operands = list(primals)
        for i, value in zip(varied, values, strict=True):
            operands[i] = value
        return plain(*operands)

    at, along = ([x[i] for i in varied] for x in (primals, tangents))
    return out, jax.jvp(of_varied, at, along)[1]


def _batch(operands, axes):
    """More vectors in one sweep, where only vectors and tails are many."""
    J, V, weights, tail, backward = operands
    J_axis, V_axis, weights_axis, tail_axis, backward_axis = axes
    if J_axis is not None or weights_axis is not None or V_axis is None:
        return jax.vmap(plain, in_axes=axes)(*operands), 0
    V = jnp.moveaxis(V, V_axis, 0)
    size, k, P = V.shape
    if tail_axis is None:
        tail = jnp.broadcast_to(tail, (size, *tail.shape))
    else:
        tail = jnp.moveaxis(tail, tail_axis, 0)
    no_tail = jnp.zeros(0, tail.dtype)
    # One order for all of them: that of the first.
    backward = backward if backward_axis is None else jnp.moveaxis(backward, backward_axis, 0)[0]
    packed = gram_product_p.bind(J, V.reshape(size * k, P), weights, no_tail, backward)
    ends = len(packed) - size * k
    parts = [packed[:ends].reshape(size, -1), packed[ends:].reshape(size, k), tail]
    return jnp.concatenate(parts, axis=1), 0


handlers.register(gram_product_p, _native.HANDLERS, plain, _lower)
ad.primitive_jvps[gram_product_p] = _jvp
batching.primitive_batchers[gram_product_p] = _batch

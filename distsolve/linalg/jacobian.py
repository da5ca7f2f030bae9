"""Log-derivatives of a model at samples: one row for each sample, in chunks.

N samples on all ranks, n of them here, P parameters. J (n, P) has the rows
``O_k(x) = d log psi(x) / d theta_k``. The columns are in the order of `jax.tree.leaves`, which is
that of `jax.flatten_util.ravel_pytree`; its second result turns (P,) back into parameters.

====================  ============  =============  ==================================
mode                  parameters    log psi        J
====================  ============  =============  ==================================
``"real"``            real          real           real
``"complex"``         real          complex        complex; ``S = Re(J^H J) / N``
``"holomorphic"``     complex       complex        complex, the complex derivative
====================  ============  =============  ==================================
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from distsolve.linalg import arguments
from distsolve.linalg.space import Sharded, Space
from distsolve.linalg.trees import HIGHEST, vary_like

MODES = ("real", "complex", "holomorphic")


def jacobian(
    log_psi: Callable[[Any, Any], jax.Array],
    params: Any,
    samples: Any,
    *,
    mode: str | None = None,
    chunk_size: int | None = None,
) -> jax.Array:
    """Return the log-derivatives at each sample.

    ``J_ik = d log psi(x_i) / d theta_k``

    Parameters
    ----------
    log_psi : callable
        ``log_psi(params, x)`` of ONE sample, a scalar; it is vectorised here.
    params : pytree of floats or complex floats of one dtype, P numbers in all, replicated
    samples : array or pytree of arrays (n, ...), sharded
        This rank's samples, of any number, also 0.
    mode : {"real", "complex", "holomorphic"}, optional
        See the table above. By default what the dtypes tell; ``"holomorphic"`` has to be said, as
        only the user knows that ``log_psi`` has a complex derivative.
    chunk_size : int, optional
        How many samples are worked on at a time; all by default. The memory beyond ``J`` is that
        of one chunk.

    Returns
    -------
    (n, P) array, sharded by rows
        Real or complex as in the table; columns in the order of `jax.tree.leaves`.

    Raises
    ------
    TypeError
        While tracing: the mode does not fit the model; the message names the one that does.

    Communication
    -------------
    None.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from distsolve import jacobian
    >>> x = jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    >>> jacobian(lambda a, x: -jnp.vdot(a, x**2), jnp.ones(2), x).tolist()
    [[-1.0, -4.0], [-9.0, -16.0], [-25.0, -36.0]]
    """
    mode = check_mode(log_psi, params, samples, mode)
    derivatives = jax.vmap(row_function(log_psi, params, mode))
    dtype = row_dtype(jax.tree.leaves(params)[0].dtype, mode)
    P = sum(leaf.size for leaf in jax.tree.leaves(params))

    def write(J, x, at, _):
        return jax.lax.dynamic_update_slice(J, derivatives(x), (at, jnp.zeros_like(at)))

    return fold(write, jnp.zeros((count(samples), P), dtype), samples, chunk_size)


def center(J: jax.Array, weights: jax.Array | None = None, rows: Space | None = None) -> jax.Array:
    """Subtract the mean of all rows on all ranks from each row.

    ``J_i - sum_j w_j J_j / sum_j w_j``

    Parameters
    ----------
    J : (n, P) array, sharded by rows
        Under ``jax.jit(center, donate_argnums=0)`` the result takes its memory.
    weights : (n,) real array, sharded, optional
        Not negative; their sum over all ranks need not be 1. They count in the mean only: give
        them to `Gram`, too. No square root of them is multiplied into ``J``.
    rows : Space
        Over which ranks the rows are spread; `Sharded` by default.

    Returns
    -------
    (n, P) array, sharded by rows

    Communication
    -------------
    One message of P + 1 numbers.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from distsolve import center
    >>> center(jnp.array([[1.0, 2.0], [3.0, 6.0]])).tolist()  # the same rows on each rank
    [[-1.0, -2.0], [1.0, 2.0]]
    """
    J, rows = arguments.one_array(J), arguments.space(rows, Sharded, "rows")
    real = jnp.finfo(J.dtype).dtype
    weights = check_weights(weights, J.shape[0], real)
    if weights is None:
        column_sums, weight = J.sum(0), jnp.asarray(len(J), real)
    else:
        column_sums = jnp.matmul(weights.astype(J.dtype), J, precision=HIGHEST)
        weight = weights.sum()
    return J - mean_of(column_sums, weight, rows)[None]


def mean_of(sums, weight, rows):
    """Return the mean over all ranks from each rank's ``sums`` and ``weight``; one message."""
    total = rows.sum(jnp.concatenate([sums, weight.astype(sums.dtype)[None]]))
    return total[:-1] / safe(total[-1].real).astype(sums.dtype)


def safe(total):
    """Return a sum of weights to divide by: 1 where no rank has a sample."""
    return jnp.where(total == 0, jnp.ones_like(total), total)


def check_weights(weights, n, real):
    """Return the weights of n rows; raise unless they are (n,) of the dtype ``real``."""
    if weights is None:
        return None
    weights = arguments.array(weights, "weights")
    if weights.shape != (n,) or weights.dtype != real:
        raise ValueError(
            f"`weights` must be one number for each row here: expected {real} of shape ({n},), got "
            f"{weights.dtype} of shape {weights.shape}. Pass one real weight a sample."
        )
    return weights


def row_dtype(dtype, mode):
    """Return the dtype of rows for parameters of ``dtype``."""
    if mode != "complex":
        return dtype
    return jnp.dtype(jnp.complex128 if jnp.finfo(dtype).bits == 64 else jnp.complex64)


def row_function(log_psi, params, mode):
    """Return the function of one sample that gives its row of J."""

    def row(x):
        # Per-device parameters inside shard_map: the derivative with respect to shared ones would
        # be summed over the devices.
        own = vary_like(params, x)
        if mode == "holomorphic":
            return ravel_pytree(jax.grad(log_psi, holomorphic=True)(own, x))[0]
        if mode == "real":
            return ravel_pytree(jax.grad(log_psi)(own, x))[0]
        (y, _), pull = jax.vjp(functools.partial(real_and_imag, log_psi, x=x), own)
        zero, one = jnp.zeros_like(y), jnp.ones_like(y)
        (re,), (im,) = pull((one, zero)), pull((zero, one))
        return jax.lax.complex(ravel_pytree(re)[0], ravel_pytree(im)[0])

    return row


def real_and_imag(log_psi, params, x):
    """Return real and imaginary part of a complex ``log_psi``."""
    y = log_psi(params, x)
    return y.real, y.imag


def count(samples):
    """Return the number of samples here; raise unless all leaves have as many."""
    arguments.require_arrays(samples, "samples")
    counts = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(samples)}
    if len(counts) != 1 or () in counts:
        shapes = [np.shape(leaf) for leaf in jax.tree.leaves(samples)]
        found = f"shapes {shapes}" if shapes else "no arrays"
        raise ValueError(
            f"`samples` must be arrays with one row for each sample, as many in each leaf: got "
            f"{found}."
        )
    return counts.pop()[0]


def fold(function, carry, samples, chunk_size):
    """Return ``carry`` after ``carry = function(carry, x, at, new)`` for each chunk ``x``.

    ``at`` is the index of the first sample of the chunk. All chunks have the same size, so that one
    program serves them: the last one reaches back, and ``new`` (chunk,) is false for samples that
    an earlier chunk held.
    """
    n = count(samples)
    if chunk_size is not None and (not arguments.is_int(chunk_size) or chunk_size < 1):
        raise ValueError(f"`chunk_size` must be a positive integer or None: got {chunk_size!r}.")
    if n == 0:
        return carry
    size = n if chunk_size is None else min(chunk_size, n)

    def one(i, carry):
        i = i.astype(jnp.int32)
        at = jnp.minimum(i * size, n - size)
        x = jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, at, size), samples)
        return function(carry, x, at, at + jnp.arange(size, dtype=jnp.int32) >= i * size)

    if size == n:
        return function(carry, samples, jnp.zeros((), jnp.int32), jnp.ones(n, bool))
    carry = vary_like(carry, samples)
    return jax.lax.fori_loop(0, -(-n // size), one, carry)


def check_mode(log_psi, params, samples, mode):
    """Return the mode; raise, from abstract evaluation, if it does not fit the model."""
    if mode is not None and mode not in MODES:
        raise ValueError(f"`mode` must be one of {', '.join(map(repr, MODES))}: got {mode!r}.")
    if not callable(log_psi):
        raise TypeError(f"`log_psi` must be a function of (params, x): got {log_psi!r}.")
    arguments.require_arrays(params, "params")
    dtypes = sorted({str(jnp.asarray(leaf).dtype) for leaf in jax.tree.leaves(params)})
    if len(dtypes) != 1 or not jnp.issubdtype(dtypes[0], jnp.inexact):
        raise TypeError(
            f"`params` must be real or complex floats of one dtype: got {', '.join(dtypes) or 'no'}"
            " leaves. Give a complex parameter as its real and imaginary part, and convert floats "
            "of other widths."
        )
    count(samples)
    one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), samples)
    try:
        out = jax.eval_shape(log_psi, params, one)
    except Exception as error:
        # The user's own error stays what it is; Python prints the note below it.
        error.add_note(
            f"`log_psi(params, x)` failed for one sample `x`: {_forms(one)}. `samples` have the "
            "axis of samples first; for a single sample pass x[None]."
        )
        raise
    if getattr(out, "shape", None) != ():
        raise ValueError(
            f"`log_psi(params, x)` must return a scalar for one sample `x`: got {_forms(out)} for "
            f"`x`: {_forms(one)}. It is given one row of `samples`, without the axis of samples."
        )
    complex_params, complex_out = (
        jnp.issubdtype(dtype, jnp.complexfloating) for dtype in (dtypes[0], out.dtype)
    )
    model = f"a model with parameters of {dtypes[0]} and a `log_psi` of {out.dtype}"
    if not complex_params:
        fitting = "complex" if complex_out else "real"
        if mode not in (None, fitting):
            raise TypeError(f"mode {mode!r} does not fit {model}: use mode={fitting!r}.")
        return fitting
    if mode != "holomorphic" or not complex_out:
        fault = "`mode` is needed for" if mode is None else f"mode {mode!r} does not fit"
        raise TypeError(
            f"{fault} {model}: use mode='holomorphic' if `log_psi` is a complex "
            "and complex-differentiable function of `params`; otherwise give real and imaginary "
            "parts as real parameters, and use mode='complex' or 'real'."
        )
    return mode


def _forms(tree):
    """Return what the arrays of a pytree are, as text."""
    if hasattr(tree, "dtype"):
        return f"{tree.dtype} of shape {tree.shape}"
    leaves = [f"{x.dtype} of shape {x.shape}" for x in jax.tree.leaves(tree)]
    return f"a {type(tree).__name__} of {', '.join(leaves) or 'no arrays'}"

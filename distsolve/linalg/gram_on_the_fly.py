"""The matrix of stochastic reconfiguration by derivatives of the model, without stored rows.

A product is a forward and a reverse derivative at each sample, in chunks. The mean row m is known
from construction, so that centring needs no message of its own:

    W = J v - m v,    J_c^H w W = J^H w W - conj(m) sum(w W),

and sum(w W), zero but for rounding, travels in the product's message.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from distsolve.linalg import arguments, gram_product
from distsolve.linalg.gram import SRMatrix
from distsolve.linalg.jacobian import (
    check_mode,
    check_weights,
    count,
    fold,
    mean_of,
    row_dtype,
    row_function,
)
from distsolve.linalg.space import Sharded, Space
from distsolve.linalg.trees import HIGHEST, squared, vary_like


@jax.tree_util.register_pytree_node_class
class GramOnTheFly(SRMatrix):
    """The matrix of stochastic reconfiguration without stored log-derivatives.

    Equal to ``Gram(center(jacobian(log_psi, params, samples)))``: a product costs a forward and a
    reverse derivative of ``log_psi`` at each sample, and the memory of one chunk.

    Parameters
    ----------
    log_psi : callable
        ``log_psi(params, x)`` of one sample, a scalar, as for `jacobian`. In a pytree it is
        compared by identity: pass the same function each time, not a new lambda.
    params : pytree of floats or complex floats of one dtype, P numbers in all, replicated
    samples : array or pytree of arrays (n, ...), sharded
    mode : {"real", "complex", "holomorphic"}, optional
        As for `jacobian`. Vectors have the dtype of ``params``.
    chunk_size : int, optional
        How many samples are worked on at a time; all by default.
    shift, diag_scale, rows, weights
        As for `Gram`.
    center : bool
        Subtract the mean row; one message here, at construction, and none later.

    Raises
    ------
    TypeError, ValueError
        While tracing: a mode that does not fit the model, shapes or dtypes that do not fit.

    Communication
    -------------
    One message for each product.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from distsolve import GramOnTheFly
    >>> x = jnp.array([[1.0, 2.0], [3.0, 6.0]])  # the same samples on each rank
    >>> S = GramOnTheFly(jnp.vdot, jnp.ones(2), x, shift=0.5)
    >>> (S @ jnp.array([1.0, 0.0])).tolist()
    [1.5, 2.0]
    """

    DATA = ("params", "samples", "mean", "shift", "diag_scale", "diagonal", "weights")
    STATIC = ("log_psi", "mode", "chunk_size", "rows")
    params: Any
    mean: jax.Array | None  # (1, P); of a complex log psi of real parameters (2, P), re and im

    def __init__(
        self,
        log_psi: Callable[[Any, Any], jax.Array],
        params: Any,
        samples: Any,
        *,
        mode: str | None = None,
        chunk_size: int | None = None,
        shift: Any = 0.0,
        diag_scale: Any = 0.0,
        rows: Space | None = None,
        weights: jax.Array | None = None,
        center: bool = True,
    ) -> None:
        self.mode = check_mode(log_psi, params, samples, mode)
        self.log_psi, self.chunk_size = log_psi, chunk_size
        self.params, self.samples = jax.tree.map(jnp.asarray, (params, samples))
        if str(self._vector_dtype) not in gram_product.DTYPES:
            raise TypeError(
                f"`params` must have a dtype of {', '.join(gram_product.DTYPES)}: got "
                f"{self._vector_dtype}."
            )
        self.rows = arguments.space(rows, Sharded, "rows")
        n = count(samples)
        self.weights = check_weights(weights, n, self.real_dtype)
        self.mean = self._mean() if arguments.flag(center, "center") else None
        self._damp(shift, diag_scale)

    @property
    def size(self) -> int:
        """The number of parameters P."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.params))

    @property
    def dtype(self) -> Any:
        """The dtype of the rows of J."""
        return row_dtype(self._vector_dtype, self.mode)

    @property
    def real_dtype(self) -> Any:
        """The dtype of real numbers as precise as the parameters."""
        return jnp.finfo(self._vector_dtype).dtype

    @property
    def _vector_dtype(self):
        return jax.tree.leaves(self.params)[0].dtype

    def _vector_dtypes(self):
        return (self._vector_dtype,)

    def _weights_here(self):
        n = count(self.samples)
        return jnp.ones(n, self.real_dtype) if self.weights is None else self.weights

    def _weight_here(self):
        return self._weights_here().sum()

    def _chunks(self, function, carry):
        """Return ``carry`` after ``carry = function(carry, samples, weights)`` for each chunk."""

        def one(carry, chunk, _, new):
            x, weights = chunk
            return function(carry, x, jnp.where(new, weights, jnp.zeros_like(weights)))

        return fold(one, carry, (self.samples, self._weights_here()), self.chunk_size)

    def _derivative(self, x):
        """Return ``v -> J v`` (parts, chunk) for a row v (P,), and ``W -> J^T W``."""

        def values(params):
            y = jax.vmap(self.log_psi, in_axes=(None, 0))(params, x)
            return jnp.stack([y.real, y.imag] if self.mode == "complex" else [y])

        own = vary_like(self.params, x)  # as for `jacobian`
        out, forward = jax.linearize(values, own)
        backward = jax.linear_transpose(forward, own)
        _, shaped = ravel_pytree(own)
        return (
            lambda v: forward(shaped(vary_like(v, x))).astype(v.dtype),
            lambda W: ravel_pytree(backward(vary_like(W, x).astype(out.dtype))[0])[0],
        )

    def _mean(self):
        """Return the mean row of each part of log psi; one message."""
        parts = 2 if self.mode == "complex" else 1

        def add(sums, x, weights):
            _, pull = self._derivative(x)
            picked = jnp.einsum(
                "ab,i->abi", jnp.eye(parts, dtype=sums.dtype), weights.astype(sums.dtype)
            )
            return sums + jax.vmap(pull)(picked)

        sums = self._chunks(add, jnp.zeros((parts, self.size), self._vector_dtype))
        return mean_of(sums.ravel(), self._weight_here(), self.rows).reshape(sums.shape)

    def _local(self, V, tail, backward):
        parts = 2 if self.mode == "complex" else 1
        shift = jnp.zeros((len(V), parts), V.dtype)
        if self.mean is not None:
            shift = jnp.matmul(V, self.mean.T, precision=HIGHEST)

        def add(carry, x, weights):
            push, pull = self._derivative(x)

            def product(v, shift):
                W = push(v) - shift[:, None]
                weighted = W * weights[None].astype(v.dtype)
                return (
                    pull(weighted.conj()).conj(),
                    jnp.sum(squared(W) * weights[None]),
                    weighted.sum(1),
                )

            return jax.tree.map(jnp.add, carry, jax.vmap(product)(V, shift))

        norms = jnp.zeros(len(V), self.real_dtype)
        U, norms, sums = self._chunks(add, (jnp.zeros_like(V), norms, jnp.zeros_like(shift)))
        sums = gram_product.pack(sums, tail[:0], tail[:0])
        return gram_product.pack(U, norms, jnp.concatenate([tail, sums]))

    def _finish(self, U, rest):
        if self.mean is None:
            return U
        k, parts = len(U), len(self.mean)
        sums, _, _ = gram_product.unpack(rest, k, parts, U.dtype)
        return U - jnp.matmul(sums, self.mean.conj(), precision=HIGHEST)

    def _fold(self, function, start):
        rows = jax.vmap(row_function(self.log_psi, self.params, self.mode))

        def one(carry, x, weights):
            J = rows(x)
            if self.mean is not None:
                m = self.mean[0]
                m = jax.lax.complex(m, self.mean[1]) if self.mode == "complex" else m
                J = J - m[None]
            return function(carry, J, weights)

        return self._chunks(one, start)

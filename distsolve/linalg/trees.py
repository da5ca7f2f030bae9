"""Linear algebra on pytrees that one rank holds: no communication.

Leaves may be real and complex together. The inner product is ``Re <x, y>``, conjugate-linear in the
first argument: over the real numbers it makes any mixture of leaves one Euclidean space.
Coefficients are real scalars. Leaves keep their dtype; 16-bit ones are combined in float32 and
rounded once.
"""

import jax
import jax.numpy as jnp

HIGHEST = jax.lax.Precision.HIGHEST


def _wide(dtype):
    """Return the dtype to compute in: float32 for floats of fewer bits, else the dtype itself."""
    return jnp.dtype(jnp.float32) if jnp.finfo(dtype).bits < 32 else dtype


def axpy(alpha, x, y):
    """Return ``alpha * x + y``."""

    def leaf(x, y):
        wide = _wide(x.dtype)
        return (y.astype(wide) + alpha.astype(wide) * x.astype(wide)).astype(x.dtype)

    return jax.tree.map(leaf, x, y)


def scale(alpha, x):
    """Return ``alpha * x``."""

    def leaf(x):
        wide = _wide(x.dtype)
        return (alpha.astype(wide) * x.astype(wide)).astype(x.dtype)

    return jax.tree.map(leaf, x)


def subtract(x, y):
    """Return ``x - y``."""
    return jax.tree.map(lambda x, y: x - y, x, y)


def zeros_like(x):
    """Return the zero vector with the structure, shapes and dtypes of ``x``."""
    return jax.tree.map(jnp.zeros_like, x)


def select(condition, x, y):
    """Return ``x`` where the scalar ``condition`` holds and ``y`` elsewhere."""
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), x, y)


def real_parts(x):
    """Return the real arrays that ``x`` consists of: two for a complex leaf, one for a real one."""
    parts = []
    for leaf in jax.tree.leaves(x):
        complex_leaf = jnp.issubdtype(leaf.dtype, jnp.complexfloating)
        parts += [leaf.real, leaf.imag] if complex_leaf else [leaf]
    return parts


def from_real_parts(parts, like):
    """Return the tree with the structure and dtypes of ``like`` that `real_parts` took apart."""
    leaves, treedef = jax.tree.flatten(like)
    parts = iter(parts)
    joined = [
        jax.lax.complex(next(parts), next(parts))
        if jnp.issubdtype(leaf.dtype, jnp.complexfloating)
        else next(parts)
        for leaf in leaves
    ]
    return jax.tree.unflatten(treedef, joined)


def scalar_dtype(x):
    """Return the real dtype in which inner products of ``x`` are held: float32 or float64."""
    wide = any(jnp.finfo(leaf.dtype).bits == 64 for leaf in jax.tree.leaves(x))
    return jnp.dtype(jnp.float64 if wide else jnp.float32)


def epsilon(x):
    """Return the unit of rounding of the least precise leaf, as a Python float."""
    return max(float(jnp.finfo(leaf.dtype).eps) for leaf in jax.tree.leaves(x))


def size(x):
    """Return the number of entries on this rank, as a Python int."""
    return sum(leaf.size for leaf in jax.tree.leaves(x))


def vdot(x, y):
    """Return ``Re <x, y>`` as one real scalar of dtype `scalar_dtype`."""
    dtype = scalar_dtype(x)
    total = jnp.zeros((), dtype)
    for u, v in zip(real_parts(x), real_parts(y), strict=True):
        accumulator = _wide(u.dtype)
        u, v = u.ravel().astype(accumulator), v.ravel().astype(accumulator)
        # Full precision by name: TF32 would leave three digits of a float32 product on some GPUs.
        total = total + jnp.vdot(u, v, precision=HIGHEST).astype(dtype)
    return total


def max_abs(x):
    """Return the largest modulus among the real parts, 0 for an empty vector."""
    dtype = scalar_dtype(x)
    largest = jnp.zeros((), dtype)
    for part in real_parts(x):
        largest = jnp.maximum(largest, jnp.max(jnp.abs(part), initial=0).astype(dtype))
    return largest


def norm(x):
    """Return the 2-norm, safe against overflow and underflow of the squares."""
    unit = power_of_two(max_abs(x), x)
    return unit * jnp.sqrt(vdot(*2 * (scale(1 / unit, x),)))


def power_of_two(value, x):
    """Return a power of two near the scalar ``value``; 1 where it is not positive and finite.

    Multiplying the vector ``x`` by it, or by its reciprocal, is exact, so the solve of a scaled
    system takes the very same steps. Both are normal numbers in every leaf's dtype.
    """
    limit = 2.0 ** (min(int(jnp.finfo(leaf.dtype).maxexp) for leaf in jax.tree.leaves(x)) - 2)
    usable = jnp.isfinite(value) & (value > 0)
    value = jnp.clip(jnp.where(usable, value, jnp.ones_like(value)), 1 / limit, limit)
    # A positive float with its mantissa cleared is a power of two; infinity is the mask for that.
    integer = jnp.uint64 if value.dtype == jnp.float64 else jnp.uint32
    exponent_bits = jax.lax.bitcast_convert_type(jnp.full_like(value, jnp.inf), integer)
    bits = jax.lax.bitcast_convert_type(value, integer) & exponent_bits
    return jax.lax.bitcast_convert_type(bits, value.dtype)


def safe_ratio(numerator, denominator):
    """Return ``numerator / denominator``, and 0 where the denominator is not positive."""
    positive = denominator > 0
    ratio = numerator / jnp.where(positive, denominator, jnp.ones_like(denominator))
    return jnp.where(positive, ratio, jnp.zeros_like(ratio))

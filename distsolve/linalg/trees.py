"""Linear algebra on pytrees that one rank holds: no communication.

Leaves may be real and complex together. The inner product is ``Re <x, y>``, conjugate-linear in the
first argument: over the real numbers it makes any mixture of leaves one Euclidean space.
Coefficients are real scalars. Leaves keep their dtype; 16-bit ones are combined in float32 and
rounded once.
"""

import jax
import jax.numpy as jnp

HIGHEST = jax.lax.Precision.HIGHEST
DTYPES = ("float32", "float64", "complex64", "complex128")  # that kernels and files take
_DIGIT_BITS = 8
_DIGIT = 1 << _DIGIT_BITS


def _wide(dtype):
    """Return the dtype to compute in: float32 for floats of fewer bits, else the dtype itself."""
    return jnp.dtype(jnp.float32) if jnp.finfo(dtype).bits < 32 else dtype


def _is_complex(leaf):
    return jnp.issubdtype(leaf.dtype, jnp.complexfloating)


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
        parts += [leaf.real, leaf.imag] if _is_complex(leaf) else [leaf]
    return parts


def from_real_parts(parts, like):
    """Return the tree with the structure and dtypes of ``like`` that `real_parts` took apart."""
    leaves, treedef = jax.tree.flatten(like)
    parts = iter(parts)
    joined = [
        jax.lax.complex(next(parts), next(parts)) if _is_complex(leaf) else next(parts)
        for leaf in leaves
    ]
    return jax.tree.unflatten(treedef, joined)


def squared(x):
    """Return ``|x_i|^2`` of each entry of an array, without the root that `jnp.abs` takes."""
    return x.real**2 + x.imag**2 if jnp.iscomplexobj(x) else x**2


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


def size_digits(x, dtype):
    """Return `size` as digits, lowest first, that add up exactly over up to 2**16 ranks: (6,)."""
    return jnp.asarray([size(x) >> _DIGIT_BITS * i & _DIGIT - 1 for i in range(6)], dtype)


def size_of_digits(digits):
    """Return the size whose `size_digits` add up to ``digits``, or the largest integer there is."""
    total, estimate = jnp.zeros((), int), jnp.zeros((), digits.dtype)
    for digit in digits[::-1]:
        total = total * _DIGIT + digit.astype(total.dtype)
        estimate = estimate * _DIGIT + digit
    largest = jnp.iinfo(total.dtype).max
    return jnp.where(estimate < float(largest), total, largest)


def inner_dtype(x):
    """Return the dtype of the whole ``<x, y>``: that of `scalar_dtype`, complex if any leaf is."""
    dtype = scalar_dtype(x)
    if not any(map(_is_complex, jax.tree.leaves(x))):
        return dtype
    return jnp.dtype(jnp.complex128 if dtype == jnp.float64 else jnp.complex64)


def inner(x, y):
    """Return the whole ``<x, y>``, of dtype `inner_dtype`."""
    dtype = inner_dtype(x)
    total = jnp.zeros((), dtype)
    for u, v in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True):
        u, v = u.ravel().astype(_wide(u.dtype)), v.ravel().astype(_wide(v.dtype))
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
    largest = max_abs(x)
    unit = power_of_two(largest, largest)
    total = jnp.zeros_like(unit)
    for part in real_parts(x):
        part = part.ravel().astype(unit.dtype) * (1 / unit)
        total = total + jnp.vdot(part, part, precision=HIGHEST)
    return unit * _sqrt(total)


def square_bins(size):
    """Return the square of a norm as large, middling and small, of which two are 0: (3,).

    Scaled so that none overflows or vanishes, squares of the norms of pieces add up as they are,
    and the ranks need no second message to agree on a scale. NaN counts as middling, infinity as
    large. The bounds are those of Blue (1978), doi:10.1145/355769.355771, as in Anderson (2017),
    doi:10.1145/3061665.
    """
    small, large, scales = _bounds(size.dtype)
    is_large, is_small = size > large, size < small
    members = is_large, ~(is_large | is_small), is_small
    # Scaled before it is selected: XLA makes (x s) (x s) into x x (s s), which overflows.
    parts = [jnp.where(m, size * scale, 0) for m, scale in zip(members, scales, strict=True)]
    return jnp.square(jnp.stack(parts))


def norm_of_bins(bins):
    """Return the 2-norm of a vector from the sum of the `square_bins` of its pieces' norms."""
    _, _, scales = _bounds(bins.dtype)
    parts = _sqrt(bins) / jnp.asarray(scales, bins.dtype)
    unit = power_of_two(jnp.max(parts), parts)
    return unit * _sqrt(jnp.sum(jnp.square(parts / unit)))


def _bounds(dtype):
    """Return up to where entries are small, from where they are large, and the bins' scales."""
    info = jnp.finfo(dtype)
    # The exponents and digits of the papers, for a mantissa between 1/2 and 1.
    lowest, highest, digits = int(info.minexp) + 1, int(info.maxexp), int(info.nmant) + 1
    small = 2.0 ** -((1 - lowest) // 2)
    large = 2.0 ** ((highest - digits + 1) // 2)
    scales = 2.0 ** -((highest + digits) // 2), 1.0, 2.0 ** ((digits - lowest + 1) // 2)
    return small, large, scales


def _sqrt(x):
    """Return the square root, with the derivative 0 at 0 rather than infinity."""
    zero = x == 0
    return jnp.where(zero, 0, jnp.sqrt(jnp.where(zero, 1, x)))


def project(V, w):
    """Return ``<V_i, w>`` for a stack of vectors, whose leaves have one more axis in front: (m,).

    Complex if all leaves are complex; else the real parts, which is the inner product of a mixture.
    """
    leaves = list(zip(jax.tree.leaves(V), jax.tree.leaves(w), strict=True))
    whole = all(_is_complex(vector) for _, vector in leaves)
    dtype = inner_dtype(w) if whole else scalar_dtype(w)
    total = jnp.zeros(len(leaves[0][0]), dtype)
    for rows, vector in leaves:
        rows, vector = rows.astype(_wide(rows.dtype)), vector.astype(_wide(rows.dtype))
        # <v, w> is the conjugate of <w, v>, for which the stack is read as it lies.
        product = jnp.tensordot(rows, vector.conj(), axes=vector.ndim, precision=HIGHEST).conj()
        total = total + (product if whole else product.real).astype(dtype)
    return total


def combine(V, y):
    """Return the sum of the vectors of a stack ``V_i`` with the coefficients ``y``: (m,)."""

    def leaf(rows):
        wide = _wide(rows.dtype)
        total = jnp.tensordot(y.astype(wide), rows.astype(wide), axes=1, precision=HIGHEST)
        return total.astype(rows.dtype)

    return jax.tree.map(leaf, V)


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


def nan_as_inf(x):
    """Return an array with infinity for NaN, which no comparison holds for."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return jnp.where(jnp.isnan(x), jnp.full_like(x, jnp.inf), x)


def safe_ratio(numerator, denominator):
    """Return ``numerator / denominator``, and 0 where the denominator is not positive."""
    positive = denominator > 0
    ratio = numerator / jnp.where(positive, denominator, jnp.ones_like(denominator))
    return jnp.where(positive, ratio, jnp.zeros_like(ratio))


def vary_like(tree, like):
    """Return ``tree``, marked inside `jax.shard_map` as different where any leaf of ``like`` is.

    A loop's start needs the mark that its body gives; anywhere else this is the identity.
    """
    axes = frozenset().union(*map(_varying, jax.tree.leaves(like)))

    def mark(x):
        missing = tuple(sorted(axes - _varying(x)))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(mark, tree)


def _varying(x):
    """The mesh axes along which ``x`` differs between devices."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)

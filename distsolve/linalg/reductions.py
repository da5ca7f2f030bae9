"""Inner products and statistics over ranks, on pytrees, in one message each.

Samples lie on the leading axis of every leaf. Ranks may hold different numbers of them, also none;
all other axes are the same on all ranks. Integers and booleans are converted to JAX's default
float; 16-bit floats are summed in float32 and rounded once.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from distsolve.linalg import arguments, moments, trees
from distsolve.linalg.arguments import as_vector, require_same, where
from distsolve.linalg.space import Replicated, Sharded, Space


def vdot(x: Any, y: Any, space: Space | None = None) -> jax.Array:
    """Return the inner product of two vectors.

    The equation is ``<x, y> = sum_i conj(x_i) y_i`` over all entries of all leaves on all ranks.
    Solvers use its real part.

    Parameters
    ----------
    x, y : pytrees of real or complex floats, alike, living in ``space``
    space : Space, optional
        `Replicated` on the world by default.

    Returns
    -------
    scalar, replicated
        Complex if any leaf is complex, else real; of 64-bit floats if any leaf has them.

    Raises
    ------
    TypeError, ValueError
        While tracing: leaves that are no floats, or that differ in structure, shape or dtype.

    Communication
    -------------
    One message of one number; none in `Replicated`.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from distsolve import vdot
    >>> complex(vdot(jnp.array([1j, 2.0]), jnp.array([1.0, 1j])))
    1j
    """
    x, y = as_vector(x, "x"), as_vector(y, "y")
    require_same(y, x, "`y`", "Pass two vectors of the same space.", like="`x`")
    return arguments.space(space, Replicated).sum(trees.inner(x, y))


def norm(x: Any, space: Space | None = None) -> jax.Array:
    """Return the 2-norm of a vector, safe against overflow and underflow of the squares.

    The equation is ``||x|| = sqrt(<x, x>)`` over all leaves on all ranks. Its derivative at 0 is 0.

    Parameters
    ----------
    x : pytree of real or complex floats, living in ``space``
    space : Space, optional
        `Replicated` on the world by default.

    Returns
    -------
    real scalar, replicated

    Raises
    ------
    TypeError, ValueError
        While tracing: leaves that are no floats, or no leaves.

    Communication
    -------------
    One message of three numbers; none in `Replicated`.

    References
    ----------
    Blue (1978), doi:10.1145/355769.355771. Anderson (2017), doi:10.1145/3061665.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from distsolve import norm
    >>> float(norm({"a": jnp.array([3e200]), "b": jnp.array([4e200])}) / 1e200)
    5.0
    """
    return arguments.space(space, Replicated).norm(as_vector(x, "x"))


def mean(x: Any, space: Space | None = None) -> Any:
    """Return the mean of samples that are spread over ranks.

    The equation is ``sum_k x_k / N`` with N the number of samples on all ranks: no average of
    averages.

    Parameters
    ----------
    x : pytree of arrays (n, ...), sharded
        n samples on this rank, any number.
    space : Space, optional
        Where the samples are; `Sharded` on the world by default. For samples that every rank holds
        in copy it gives the same as `Replicated`, as each sample then counts P times.

    Returns
    -------
    pytree of arrays (...), replicated
        NaN where there is no sample on any rank.

    Raises
    ------
    TypeError, ValueError
        While tracing: leaves that are no numbers or have no axis, or no leaves.

    Communication
    -------------
    One message of the size of the result.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from distsolve import mean, mpi
    >>> mine = jnp.arange(1.0, 4.0) if mpi.rank() == 0 else jnp.full(1, 10.0)
    >>> bool(mean(mine) == (6 + 10 * (mpi.size() - 1)) / (3 + mpi.size() - 1))
    True
    """
    x = _samples(x, "x")
    dtype, parts = _parts(x)
    sums = [jnp.sum(part, 0) for part in parts]
    counts = jnp.asarray(np.array([len(part) for part in parts]), dtype)
    sums, counts = arguments.space(space, Sharded).sum((sums, counts))
    return _like(x, [total / count for total, count in zip(sums, counts, strict=True)])


def weighted_mean(x: Any, weights: ArrayLike, space: Space | None = None) -> Any:
    """Return the weighted mean of samples that are spread over ranks.

    The equation is ``sum_k w_k x_k / sum_k w_k`` over the samples on all ranks.

    Parameters
    ----------
    x : pytree of arrays (n, ...), sharded
    weights : (n,) real, sharded
        One for each sample of this rank, not normalised. All of a rank's may be zero.
    space : Space, optional
        As for `mean`.

    Returns
    -------
    pytree of arrays (...), replicated
        NaN where all weights on all ranks are zero.

    Raises
    ------
    TypeError, ValueError
        While tracing: as for `mean`, or weights that are not real or not (n,).

    Communication
    -------------
    One message of the size of the result.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from distsolve import weighted_mean
    >>> float(weighted_mean(jnp.array([1.0, 2.0, 9.0]), jnp.array([1.0, 1.0, 0.0])))
    1.5
    """
    x, weights = _samples(x, "x"), _samples(weights, "weights")
    if not isinstance(weights, jax.Array) or not jnp.issubdtype(weights.dtype, jnp.floating):
        raise TypeError(f"`weights` must be one real array: got {weights!r}. Pass shape (n,).")
    for path, leaf in jax.tree_util.tree_leaves_with_path(x):
        if weights.shape != leaf.shape[:1]:
            raise ValueError(
                f"`weights` must have one entry for each sample of `x`{where(path)}: expected "
                f"shape {leaf.shape[:1]}, got {weights.shape}."
            )
    _, (*parts, weights) = _parts((x, weights))
    sums = [jnp.tensordot(weights, part, axes=1, precision=trees.HIGHEST) for part in parts]
    sums, total = arguments.space(space, Sharded).sum((sums, jnp.sum(weights)))
    return _like(x, [part / total for part in sums])


def var(x: Any, ddof: ArrayLike = 0, space: Space | None = None) -> Any:
    """Return the variance of samples that are spread over ranks.

    The equation is ``sum_k |x_k - mean|^2 / (N - ddof)`` with N the number of samples on all ranks.
    Each rank centres its samples about their own mean; the ranks' counts, means and centred sums
    are then merged, so nothing cancels however large the mean is.

    Parameters
    ----------
    x : pytree of arrays (n, ...), sharded
    ddof : real number
        1 for the unbiased estimate.
    space : Space, optional
        As for `mean`. Note that copies of samples count: with ``ddof`` other than 0, pass
        `Replicated` for samples that every rank holds.

    Returns
    -------
    pytree of real arrays (...), replicated
        NaN where there are no more than ``ddof`` samples.

    Raises
    ------
    TypeError, ValueError
        While tracing: as for `mean`, or ``ddof`` that is no real number.

    Communication
    -------------
    One message, of about three numbers for each of the result, and six for complex samples. A sum
    cannot serve, because its terms would have to be taken about a point that no rank knows: it is
    an allreduce by an operation of the library's own. In `MeshAxis` it is a gather of all ranks'
    numbers. A derivative takes one sum more, of two numbers for each of the result.

    References
    ----------
    Chan, Golub and LeVeque (1983), doi:10.1080/00031305.1983.10483115.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from distsolve import var
    >>> float(var(jnp.array([1e8, 1e8 + 2.0])))
    1.0
    """
    x, ddof = _samples(x, "x"), _ddof(ddof)
    _, parts = _parts(x)
    groups = [(_rows(part),) for part in parts]
    found = moments.of_groups(groups, False, arguments.space(space, Sharded))
    # Nothing negative: a rounding error is all that is left of equal samples.
    variances = iter([_divide(jnp.maximum(m.total, 0), m.n, ddof) for m in found])

    def leaf(samples: jax.Array) -> jax.Array:
        total = next(variances)
        if jnp.issubdtype(samples.dtype, jnp.complexfloating):
            total = total + next(variances)
        return total.reshape(samples.shape[1:]).astype(samples.real.dtype)

    return jax.tree.map(leaf, x)


def covariance(
    x: ArrayLike, y: ArrayLike | None = None, ddof: ArrayLike = 0, space: Space | None = None
) -> jax.Array:
    r"""Return the covariance of samples that are spread over ranks.

    The equation is ``C_ij = sum_k (x_ki - mean x_i) conj(y_kj - mean y_j) / (N - ddof)``.

    Parameters
    ----------
    x : (n, ...), sharded
        One array, of which this rank has n samples.
    y : (n, ...), sharded, optional
        Samples taken together with those of ``x``; ``x`` itself by default.
    ddof, space
        As for `var`.

    Returns
    -------
    array (\*x.shape[1:], \*y.shape[1:]), replicated
        Complex if ``x`` or ``y`` is; at least float32.
        Hermitian if ``y`` is left out. NaN where there are no more than ``ddof`` samples.

    Raises
    ------
    TypeError, ValueError
        While tracing: pytrees, no numbers, different numbers of samples, or ``ddof`` that is no
        real number.

    Communication
    -------------
    One message, as for `var`: for many entries of about the size of the result, or of half of it
    if ``y`` is left out.

    References
    ----------
    Chan, Golub and LeVeque (1983), doi:10.1080/00031305.1983.10483115.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from distsolve import covariance
    >>> covariance(jnp.array([[0.0, 0.0], [2.0, 4.0]])).tolist()
    [[1.0, 2.0], [2.0, 4.0]]
    """
    arrays = [_samples(x, "x")] if y is None else [_samples(x, "x"), _samples(y, "y")]
    for name, array in zip("xy", arrays, strict=False):
        if not isinstance(array, jax.Array):
            raise TypeError(
                f"`{name}` must be one array: got {jax.tree.structure(array)}. Pass its leaves one "
                "by one, or two of them as `x` and `y`."
            )
    if len(arrays[0]) != len(arrays[-1]):
        raise ValueError(
            f"`y` must have the samples of `x`: expected {len(arrays[0])} on the leading axis, got "
            f"{len(arrays[1])}."
        )
    ddof, wide = _ddof(ddof), trees.inner_dtype(arrays)
    x, y = (_rows(array.astype(wide)) for array in (arrays[0], arrays[-1]))
    (found,) = moments.of_groups([(x, y)], len(arrays) == 1, arguments.space(space, Sharded))
    total = found.total.reshape(arrays[0].shape[1:] + arrays[-1].shape[1:])
    return _divide(total, found.n, ddof)


def _rows(samples: jax.Array) -> jax.Array:
    """Return samples as a matrix, one in each row."""
    return samples.reshape(len(samples), math.prod(samples.shape[1:]))


def _divide(total: jax.Array, count: jax.Array, ddof: jax.Array) -> jax.Array:
    freedom = count - ddof.astype(count.dtype)
    return total / jnp.where(freedom > 0, freedom, jnp.nan).astype(total.dtype)


def _ddof(ddof: ArrayLike) -> jax.Array:
    value = arguments.array(ddof, "ddof")
    is_real = jnp.issubdtype(value.dtype, jnp.floating) or jnp.issubdtype(value.dtype, jnp.integer)
    if value.shape != () or not is_real:
        raise TypeError(f"`ddof` must be one real number: got {ddof!r}. Pass 0 or 1.")
    if not isinstance(ddof, jax.core.Tracer) and not np.isfinite(ddof):
        raise ValueError(f"`ddof` must be finite: got {ddof!r}. Pass 0 or 1.")
    return value


def _parts(x: Any) -> tuple[Any, list[jax.Array]]:
    """Return the real arrays that ``x`` consists of, all of one dtype: one message serves all."""
    dtype = trees.scalar_dtype(x)
    return dtype, [part.astype(dtype) for part in trees.real_parts(x)]


def _like(x: Any, parts: list[jax.Array]) -> Any:
    """Return results for the real parts of ``x`` as a tree with its dtypes."""
    real = [part.dtype for part in trees.real_parts(x)]
    parts = [part.astype(dtype) for part, dtype in zip(parts, real, strict=True)]
    return trees.from_real_parts(parts, x)


def _arrays(x: Any, name: str) -> Any:
    """Return ``x`` with arrays as leaves, or raise with the leaf that is no number."""
    leaves = jax.tree_util.tree_leaves_with_path(x)
    if not leaves:
        raise ValueError(f"`{name}` must have at least one array: got {x!r}, which has no leaves.")
    for path, leaf in leaves:
        try:
            dtype = jnp.asarray(leaf).dtype
        except TypeError:
            dtype = None
        if dtype is None or not (jnp.issubdtype(dtype, jnp.number) or dtype == jnp.bool_):
            found = type(leaf).__name__ if dtype is None else dtype
            raise TypeError(f"`{name}`{where(path)} must be an array of numbers: got {found}.")
    return jax.tree.map(jnp.asarray, x)


def _samples(x: Any, name: str) -> Any:
    x = _arrays(x, name)
    for path, leaf in jax.tree_util.tree_leaves_with_path(x):
        if leaf.ndim == 0:
            raise ValueError(
                f"`{name}`{where(path)} must have samples on its leading axis: got a scalar. Pass "
                "shape (n, ...)."
            )
    return jax.tree.map(
        lambda leaf: leaf if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf.astype(float), x
    )

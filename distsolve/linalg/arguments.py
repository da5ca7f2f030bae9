"""Checks of a solver's arguments: every fault that is visible while tracing raises there."""

import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distsolve.linalg.space import Replicated, Sharded, Space
from distsolve.linalg.trees import DTYPES


def as_vector(b, name="b"):
    """Return ``b`` with arrays as leaves; raise unless all of them are real or complex floats."""
    leaves = jax.tree_util.tree_leaves_with_path(b)
    if not leaves:
        raise ValueError(f"`{name}` must have at least one array: got {b!r}, which has no leaves.")
    for path, leaf in leaves:
        dtype = _dtype(leaf)
        if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
            found = type(leaf).__name__ if dtype is None else dtype
            raise TypeError(
                f"`{name}`{where(path)} must be real or complex floats: got {found}. "
                f"Convert it, for example with jnp.asarray({name}, dtype=float)."
            )
    return jax.tree.map(_strong, b)


def array(value, name, path=()):
    """Return ``value`` as an array; raise unless it is one, or numbers that make one."""
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError):
        raise TypeError(_no_array(value, name, path)) from None


def require_arrays(tree, name):
    """Raise unless the leaves are arrays or numbers, of dtypes that JAX has."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        dtype = _dtype(leaf)
        if dtype is None or dtype.kind in "OSUMm":
            raise TypeError(_no_array(leaf, name, path))


def _no_array(value, name, path):
    found = f"dtype {value.dtype}" if hasattr(value, "dtype") else type(value).__name__
    return (
        f"`{name}`{where(path)} must be an array of numbers: got {found}. Pass one of JAX or NumPy."
    )


def like_b(x, b, name):
    """Return ``x`` with arrays as leaves; raise unless it is a vector like ``b``."""
    require_arrays(x, name)
    require_same(jax.tree.map(_strong, x), b, f"`{name}`", f"Make `{name}` a vector like `b`.")
    return jax.tree.map(_strong, x)


def require_same(out, b, name, remedy, like="`b`"):
    """Raise unless ``out`` has the tree structure, shapes and dtypes of ``b``, called ``like``."""
    structure: Any = jax.tree.structure(b)
    if out is None:
        raise TypeError(f"{name} is None: is a `return` missing? {remedy}")
    if structure != jax.tree.structure(out):
        raise TypeError(
            f"{name} must have the structure of {like}: expected {structure}, "
            f"got {jax.tree.structure(out)}. {remedy}"
        )
    pairs = zip(jax.tree_util.tree_leaves_with_path(out), jax.tree.leaves(b), strict=True)
    for (path, found), wanted in pairs:
        if found.shape != wanted.shape:
            raise ValueError(
                f"{name}{where(path)} must have the shape of {like}: expected {wanted.shape}, "
                f"got {found.shape}. {remedy}"
            )
        if found.dtype != wanted.dtype:
            raise TypeError(
                f"{name}{where(path)} must have the dtype of {like}, as nothing is cast silently: "
                f"expected {wanted.dtype}, got {found.dtype}. "
                f"{_mixed(found.dtype, wanted.dtype, name, like)}{remedy}"
            )


def _mixed(found, wanted, name, like):
    """Return what to do where one of two dtypes is complex and the other is not, or nothing."""
    found, wanted = (jnp.issubdtype(dtype, jnp.complexfloating) for dtype in (found, wanted))
    if found == wanted:
        return ""
    wide, narrow = (name, like) if found else (like, name)
    return f"Make {narrow} complex, or take the real part of {wide}. "


def require_dtype_of_b(A, b, name="A"):
    """Raise unless a matrix has the dtype of ``b``; the remedy loses nothing."""
    if A.dtype == b.dtype:
        return
    with jax.numpy_dtype_promotion("standard"):
        wide = jnp.promote_types(A.dtype, b.dtype)
    narrow = [f"{x}.astype({wide})" for x, a in ((name, A), ("b", b)) if a.dtype != wide]
    raise TypeError(
        f"`{name}` is a matrix of {A.dtype} and `b` is {b.dtype}: dtypes are not cast silently. "
        f"Convert to the wider one: {' and '.join(narrow)}."
    )


def one_array(J):
    """Return the log-derivatives ``J`` as an array; raise if they are a pytree of several."""
    leaves = jax.tree.leaves(J)
    if isinstance(J, dict) or (not hasattr(J, "dtype") and any(map(np.ndim, leaves))):
        raise TypeError(
            f"`J` must be one array of shape (n, P): got a {type(J).__name__} of {len(leaves)} "
            f"arrays. {_MAKE_J}"
        )
    J = array(J, "J")
    if J.ndim != 2 or not jnp.issubdtype(J.dtype, jnp.inexact):
        raise TypeError(_wrong_J("floats", J))
    return J


def log_derivatives(J):
    """Return ``J`` as an array; raise unless it is (n, P) of one of the `DTYPES`."""
    J = one_array(J)
    if str(J.dtype) not in DTYPES:
        raise TypeError(_wrong_J(", ".join(DTYPES), J))
    return J


def _wrong_J(dtypes, J):
    return (
        f"`J` must have shape (n, P) and a dtype of {dtypes}: got {J.dtype} of shape {J.shape}. "
        f"{_MAKE_J}"
    )


_MAKE_J = "Make it with `distsolve.jacobian(log_psi, params, samples)`."


def tolerance(value, name, dtype):
    """Return a tolerance as a scalar; raise if it is known to be negative or not finite."""
    found = None if isinstance(value, (bool, np.bool_)) else _dtype(value)
    real = found is not None and (
        jnp.issubdtype(found, jnp.floating) or jnp.issubdtype(found, jnp.integer)
    )
    if not real or np.shape(value) != ():
        raise TypeError(
            f"`{name}` must be one real number: got {value!r}. Pass a float such as 1e-5."
        )
    if not isinstance(value, jax.core.Tracer) and not 0 <= value < np.inf:
        raise ValueError(
            f"`{name}` must be at least 0 and finite: got {value}. 0 turns this criterion off."
        )
    return jnp.asarray(value).astype(dtype)


def real_array(value, name, dtype, *shapes):
    """Return a real array as ``dtype``; raise unless it has one of the ``shapes``.

    Numbers that are not in an array of JAX are settings, and must be finite. What a program has
    computed may be NaN: the solve then tells.
    """
    given, value = value, array(value, name)
    if jnp.iscomplexobj(value) or value.shape not in shapes:
        raise ValueError(
            f"`{name}` must be real, of shape {' or '.join(map(str, shapes))}: got "
            f"{value.dtype} of shape {value.shape}. Pass a number, or an array of that shape."
        )
    if not isinstance(given, jax.Array) and not np.isfinite(given).all():
        raise ValueError(f"`{name}` must be finite: got {given}. Pass 0 for none.")
    return value.astype(dtype)


def is_plain_zero(value):
    """Return whether this is the Python number 0, which is known to add nothing."""
    return isinstance(value, (int, float)) and value == 0


def step_limit(value):
    """Return `maxiter` as an int32 scalar, or None."""
    if value is None:
        return None
    largest = int(jnp.iinfo(jnp.int32).max)
    dtype = None if isinstance(value, (bool, np.bool_)) else _dtype(value)
    if dtype is None or not jnp.issubdtype(dtype, jnp.integer) or np.shape(value) != ():
        raise TypeError(f"`maxiter` must be an integer or None: got {value!r}. Pass int(maxiter).")
    if isinstance(value, jax.core.Tracer):
        if jnp.iinfo(dtype).max > largest:
            value = jnp.minimum(value, jnp.asarray(largest, dtype))
        return value.astype(jnp.int32)
    if value < 0:
        raise ValueError(f"`maxiter` must be at least 0: got {value}. None is 10 times the size.")
    return jnp.asarray(min(int(value), largest), jnp.int32)


def history(value):
    """Return the number of residual norms to keep."""
    largest = int(jnp.iinfo(jnp.int32).max)
    if not is_int(value) or not 0 <= value <= largest:
        raise ValueError(
            f"`history` must be the number of residual norms to keep, an int from 0 to {largest}: "
            f"got {value!r}. Pass for example history=maxiter + 1."
        )
    return int(value)


def is_int(value):
    """Return whether this is an integer that is known, and no bool."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def flag(value, name):
    """Return a bool; raise for anything else, as a text such as "no" would count as true."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"`{name}` must be True or False: got {value!r}.")
    return bool(value)


def callback(value):
    """Return the user's function, or None."""
    if value is not None and not callable(value):
        raise TypeError(
            f"`callback` must be a function of (iteration, residual_norm): got {value!r}."
        )
    return value


def space(value, default=Replicated, name="space"):
    """Return the space of the argument ``name``, by default ``default`` on the world."""
    if value is not None and not isinstance(value, Space):
        remedy = "What every rank holds whole is Replicated(); pieces are Sharded()."
        if isinstance(value, type) and issubclass(value, Space):
            call = "()" if issubclass(value, (Replicated, Sharded)) else "(...)"
            remedy = f"Did you mean {value.__name__}{call}?"
        raise TypeError(
            f"`{name}` must be a Replicated, Sharded or MeshAxis: got {value!r}. {remedy}"
        )
    return default() if value is None else value


def data(value):
    """Return the arrays that are handed to ``A``, a tuple."""
    if not isinstance(value, tuple):
        raise TypeError(
            f"`args` must be a tuple of what `A` takes behind the vector: got "
            f"{type(value).__name__}. Pass for example args=(data,)."
        )
    return value


def choice(value, table, name):
    """Return the entry of ``table`` that ``value`` names."""
    if not isinstance(value, str) or value not in table:
        raise ValueError(f"`{name}` must be one of {', '.join(map(repr, table))}: got {value!r}.")
    return table[value]


def where(path):
    """Return a leaf's path as text to put behind an argument's name, empty for a single array."""
    return f" at {jax.tree_util.keystr(path)}" if path else ""


def _dtype(leaf):
    """Return the dtype of an array or of a number, None for anything else."""
    if hasattr(leaf, "dtype") and hasattr(leaf, "shape"):
        return leaf.dtype
    return np.asarray(leaf).dtype if isinstance(leaf, numbers.Number) else None


def _strong(leaf):
    array = jnp.asarray(leaf)
    return jax.lax.convert_element_type(array, array.dtype)

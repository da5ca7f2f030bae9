"""A vector of one or several leaves as one flat array, for what works on arrays only.

A vector whose leaves have one dtype is a flat array of that dtype. Any other becomes the real
arrays that it consists of, in its `trees.scalar_dtype`: over ``Re <x, y>`` the spaces are the same.
"""

import jax
import jax.numpy as jnp

from distsolve.linalg import trees


def structure_of(x):
    """Return a hashable description of a vector: tree, shapes and dtypes."""
    leaves, treedef = jax.tree.flatten(x)
    return treedef, tuple((leaf.shape, jnp.dtype(leaf.dtype).name) for leaf in leaves)


def vector_of(structure):
    """Return the vector of `jax.ShapeDtypeStruct` that `structure_of` describes."""
    treedef, leaves = structure
    return jax.tree.unflatten(treedef, [jax.ShapeDtypeStruct(*leaf) for leaf in leaves])


def ravel(x):
    """Return a vector as one flat array."""
    if _has_one_dtype(x):
        return jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(x)])
    dtype = trees.scalar_dtype(x)
    return jnp.concatenate([part.ravel().astype(dtype) for part in trees.real_parts(x)])


def unravel(flat, like):
    """Return the vector like ``like`` whose `ravel` is ``flat``."""
    whole, parts, start = _has_one_dtype(like), [], 0
    for leaf in jax.tree.leaves(like):
        halves = 2 if jnp.issubdtype(leaf.dtype, jnp.complexfloating) and not whole else 1
        dtype = leaf.dtype if whole else jnp.finfo(leaf.dtype).dtype
        for _ in range(halves):
            piece = flat[start : start + leaf.size]
            parts.append(piece.reshape(leaf.shape).astype(dtype))
            start += leaf.size
    if whole:
        return jax.tree.unflatten(jax.tree.structure(like), parts)
    return trees.from_real_parts(parts, like)


def _has_one_dtype(x):
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(x)}
    return len(dtypes) == 1 and jnp.finfo(*dtypes).bits >= 32

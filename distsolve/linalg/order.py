"""An order between updates of vectors, which the compiler keeps.

Where a step makes ``x + a p`` and then a new ``p``, XLA may make the new one first, and copies the
old one in each step, to have it still. `after` says which comes first.
"""

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching

from distsolve.linalg import handlers, trees
from distsolve.linalg.native import order as _native


def after(first, x):
    """Return the vector ``x`` as it is, for use once all of the vector ``first`` is computed."""
    leaves, others = jax.tree.leaves(x), jax.tree.leaves(first)
    ordered = [trees.vary_like(ordered_p.bind(leaf, *others), (leaf, others)) for leaf in leaves]
    return jax.tree.unflatten(jax.tree.structure(x), ordered)


def _batch(operands, axes):
    return ordered_p.bind(*operands), axes[0]


ordered_p = Primitive("ordered")
ordered_p.def_abstract_eval(lambda x, *first: jax.core.ShapedArray(x.shape, x.dtype))
batching.primitive_batchers[ordered_p] = _batch
handlers.register(
    ordered_p,
    _native.HANDLERS,
    lambda x, *first: x,
    jax.ffi.ffi_lowering("distsolve_ordered", operand_output_aliases={0: 0}),
)

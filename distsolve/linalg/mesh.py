"""Vectors over an axis of a mesh of devices: the space that JAX's own collectives serve."""

from typing import Any

import jax
import jax.numpy as jnp

from distsolve.linalg import trees
from distsolve.linalg.space import Space


class MeshAxis(Space):
    """Vectors of which every device of a mesh axis holds a piece, inside `jax.shard_map`.

    The same products as `Sharded`, on JAX's own collectives and without MPI.

    Parameters
    ----------
    name : str or tuple of str
        The axis, or axes, over which the vectors are split.

    Raises
    ------
    TypeError
        ``name`` is something else.

    Communication
    -------------
    One psum for each `dot` of any number of pairs, `norm` and `sum`.
    """

    def __init__(self, name: str | tuple[str, ...]) -> None:
        self.name = tuple(name) if isinstance(name, list) else name
        names = self.name if isinstance(self.name, tuple) else (self.name,)
        if not names or not all(isinstance(each, str) and each for each in names):
            raise TypeError(
                f"`name` must be the name of a mesh axis, or a tuple of them: got {name!r}. Pass "
                "for example MeshAxis('i') inside jax.shard_map."
            )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MeshAxis) and self.name == other.name

    def __hash__(self) -> int:
        return hash((MeshAxis, self.name))

    def __repr__(self) -> str:
        return f"MeshAxis({self.name!r})"

    def ranks(self) -> int:
        """Return the number of devices along the axis; no communication."""
        return jax.lax.axis_size(self.name)

    def rank_zero(self) -> jax.Array:
        """Return whether this is the first device of the axis, as a scalar; no communication."""
        return jax.lax.axis_index(self.name) == 0

    def sum(self, x: Any) -> Any:
        """Return the sum of a pytree over the axis, replicated. One psum."""
        return jax.lax.psum(x, self.name)

    def agree(self, x: jax.Array) -> jax.Array:
        """Return the entrywise maximum of ``x`` over the axis; NaN counts as infinity. One pmax."""
        return jax.lax.pmax(trees.nan_as_inf(x), self.name)

    def gather(self, x: jax.Array) -> jax.Array:
        """Return ``x`` of every device: ``(devices, *shape)`` replicated. One psum."""
        # A sum of rows rather than an all_gather, because JAX takes its result as replicated.
        rows = jnp.zeros((self.ranks(), *x.shape), x.dtype)
        return self.sum(rows.at[jax.lax.axis_index(self.name)].set(x))

    def offset(self, n: int) -> jax.Array:
        """Return how many entries are on the devices before this one. One psum."""
        counts = self.gather(jnp.asarray(n, jnp.int32))
        before = jnp.arange(self.ranks(), dtype=jnp.int32) < jax.lax.axis_index(self.name)
        return jnp.sum(jnp.where(before, counts, 0), dtype=jnp.int32)

"""Named ranks and tags whose numbers differ between MPI libraries."""

from __future__ import annotations

import operator

import jax
import jax.numpy as jnp

from distsolve.mpi.library import load


class Wildcard:
    """A named rank or tag: ``ANY_SOURCE``, ``ANY_TAG`` or ``PROC_NULL``, good for mpi4py too.

    MPI libraries give these different values, known only once MPI is loaded.
    """

    def __init__(self, name: str):
        self.name = name

    def __index__(self) -> int:
        return getattr(load(), self.name.lower())

    def __jax_array__(self) -> jax.Array:
        return jnp.asarray(operator.index(self))

    def __eq__(self, other: object) -> bool:
        return operator.index(self) == other if isinstance(other, int) else self is other

    __hash__ = None  # type: ignore[assignment]  # it would have to be that of an int not known yet

    def __repr__(self) -> str:
        return self.name


ANY_SOURCE = Wildcard("ANY_SOURCE")
ANY_TAG = Wildcard("ANY_TAG")
PROC_NULL = Wildcard("PROC_NULL")

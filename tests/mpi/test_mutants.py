"""The tests of the collectives can fail: they do when a collective is replaced by local work."""

import jax
import jax.numpy as jnp
import pytest
from mpi import oracle
from mpi.test_messages import check_exchange
from mpi.test_ops import check, check_barrier
from spmd import ranks

from distsolve import mpi

pytestmark = pytest.mark.skipif(
    "ranks().size == 1", reason="on one rank local work is all there is", raises=()
)

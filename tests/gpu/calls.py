"""Calls of handlers on device memory, compared with the same calls on host memory.

The latter are compared with NumPy by the tests of `tests/mpi`.
"""

import numpy as np
from gpu.fake import STAGING, run_on_host
from spmd import agree, ranks

from distsolve.mpi import device, table
from distsolve.mpi.comm import resolve
from distsolve.mpi.native import abi
from distsolve.mpi.operations import Op

STAGED, DIRECT = device.NEVER, device.ALWAYS


def road(direct_from):
    """Set how device memory comes to MPI on the world."""
    abi.set_road(resolve().id, direct_from, STAGING)


def numbers(shape, dtype=np.float64, seed=0):
    """Small whole numbers that differ by rank, so that sums are exact in every order."""
    random = np.random.default_rng([seed, ranks().rank])
    values = random.integers(1, 4, shape)
    if np.dtype(dtype).kind == "c":
        return (values + 1j * random.integers(1, 4, shape)).astype(dtype)
    return (values > 1 if dtype == np.bool_ else values).astype(dtype)


def on_host(made, operands, params):
    """The same call on host memory."""
    return run_on_host(made.spec, operands, **params)


def check(gpu, made, operands, in_place=True, **params):
    """Compare a call on device memory with the same call on host memory, in every element."""
    params = {"comm": resolve().id} | params
    found = gpu.run(made.spec, operands, in_place, **params)
    expected = on_host(made, operands, params)
    for mine, theirs in zip(found, expected, strict=True):
        agree(mine.dtype == theirs.dtype and np.array_equal(mine, theirs), f"{mine} {theirs}")


def check_ring(gpu, size):
    """Compare messages around a ring; templates are longer by 5."""
    right, left = (ranks().rank + 1) % ranks().size, (ranks().rank - 1) % ranks().size
    params = {"dest": right, "source": left, "sendtag": 7, "recvtag": -1, "status": 0}
    check(gpu, table.sendrecv, [numbers(size), numbers(size + 5, seed=1)], **params)


def reduction(made, **more):
    """The parameters of a reduction."""
    named = {"op": int(Op.SUM), "chunk": 0, "root": ranks().size - 1} | more
    return {name: named[name] for name in made.spec.attributes if name != "comm"}

"""Reductions in the memory of their operands.

mpiexec -n 2 python in_place.py
"""

import jax
import jax.numpy as jnp

import distsolve.mpi as mpi

# Outside jit: donate=True consumes x.
x = jnp.full(1 << 16, mpi.rank() + 1.0)
address = x.unsafe_buffer_pointer()
y = mpi.allreduce(x, donate=True)
assert y.unsafe_buffer_pointer() == address
assert x.is_deleted()


# Inside jit: donate the argument of the jitted function.
def smooth(x):
    return jax.lax.fori_loop(0, 10, lambda _, x: mpi.allreduce(x) / mpi.size(), x)


mpi.assert_in_place(smooth, y)  # compiles and looks; does not run
y = jax.jit(smooth, donate_argnums=0)(y)
assert y.unsafe_buffer_pointer() == address


# The operand is needed after the reduction: XLA has to copy it.
def difference(x):
    return mpi.allreduce(x) - x


try:
    mpi.assert_in_place(difference, y)
except AssertionError as error:
    if mpi.rank() == 0:
        print(error)
else:
    raise SystemExit("a copy was expected")

"""What travels in place of arrays that XLA does not hold as plain bytes: random keys, 4-bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

# XLA packs these, several to a byte.
_WIDER = {
    "int1": jnp.int8,
    "int2": jnp.int8,
    "int4": jnp.int8,
    "uint1": jnp.uint8,
    "uint2": jnp.uint8,
    "uint4": jnp.uint8,
    "float4_e2m1fn": jnp.float32,
}


def encode(
    x: Any, call: str, name: str = "x"
) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
    """An array of whole bytes per element, and the function that turns it back.

    Parameters
    ----------
    x : array, NumPy array or Python scalar
        Only data movement may use this: the carrier of a 4-bit integer must not be summed.
    """
    x = as_array(x, call, name)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        impl = jax.random.key_impl(x)
        return jax.random.key_data(x), lambda y: jax.random.wrap_key_data(y, impl=impl)
    wider = _WIDER.get(x.dtype.name)
    if wider is None:
        return x, lambda y: y
    dtype = x.dtype
    return x.astype(wider), lambda y: y.astype(dtype)


def as_array(x: Any, call: str, name: str = "x") -> jax.Array:
    """A JAX array, or an error that names the argument and the call."""
    if isinstance(x, jax.Array):
        return x
    try:
        return jnp.asarray(x)
    except TypeError as error:
        if hasattr(x, "dtype"):
            raise TypeError(
                f"`{name}` of {call} has dtype {x.dtype}, which JAX does not know: convert it, for "
                "instance to float64 or to bytes (uint8)."
            ) from error
        raise TypeError(
            f"`{name}` of {call} is of type {type(x).__name__}; expected an array, a NumPy array, "
            "a Python scalar, or a pytree of these."
        ) from error

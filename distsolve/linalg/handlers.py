"""How an operation becomes a compiled handler on CPUs, and XLA's own operations elsewhere."""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir


def register(
    primitive: Primitive, handlers: dict[str, Any], plain: Callable[..., Any], lower: Any
) -> None:
    """Lower a primitive of one result by ``lower`` on CPUs, and by ``plain`` elsewhere.

    Parameters
    ----------
    primitive : Primitive
    handlers : dict
        Capsules that ``lower`` calls as ``distsolve_<name>``.
    plain : function of the operands
        The same in XLA's operations.
    lower : lowering rule
    """
    for name, handler in handlers.items():
        jax.ffi.register_ffi_target(f"distsolve_{name}", handler, platform="cpu")
    primitive.def_impl(jax.jit(primitive.bind))
    mlir.register_lowering(primitive, mlir.lower_fun(plain, multiple_results=False))
    mlir.register_lowering(primitive, lower, platform="cpu")

"""Everything that is not public in JAX, and every test of its version: nothing else may do either.

Supported: jax 0.10 to the newest. Where a name moved, it is looked up here once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax._src import core, dispatch, effects, xla_bridge
from jax._src.clusters import ClusterEnv
from jax._src.interpreters import ad, batching, mlir, pxla
from jax._src.interpreters import partial_eval as pe
from jax._src.lib.mlir.dialects import hlo
from jax._src.source_info_util import is_user_filename

__all__ = [
    "ClusterEnv",
    "Primitive",
    "ShapedArray",
    "Zero",
    "abstract_token",
    "ad",
    "apply_primitive",
    "ask_first",
    "batching",
    "cluster_names",
    "follow_ordered",
    "has_backend",
    "instantiate_zero",
    "is_in_cluster",
    "is_tracing",
    "is_undefined_primal",
    "is_user_filename",
    "mlir",
    "n_devices",
    "ordered_effect",
    "pe",
    "platforms",
    "wait_for_ordered",
    "when_lowered",
    "with_token",
    "without_fusion",
    "zero_tangent",
]

Primitive = core.Primitive
apply_primitive = dispatch.apply_primitive
ShapedArray = core.ShapedArray
Zero = ad.Zero
abstract_token = core.abstract_token
is_undefined_primal = ad.is_undefined_primal
instantiate_zero = ad.instantiate_zeros
zero_tangent = ad.p2tz
has_backend = xla_bridge.backends_are_initialized


def ask_first(cluster: type[ClusterEnv]) -> type[ClusterEnv]:
    """Let ``jax.distributed`` ask a kind of cluster before all others; a new one comes last."""
    kinds = ClusterEnv._cluster_types
    kinds.remove(cluster)
    kinds.insert(0, cluster)
    return cluster


def cluster_names() -> set[str]:
    """The kinds of cluster that ``jax.distributed`` can be told to use."""
    return {kind.name for kind in ClusterEnv._cluster_types if kind.name}


def is_in_cluster(name: str | None) -> bool:
    """Whether this process is in a kind of cluster; None is any that JAX recognises by itself."""
    return any(
        kind.is_env_present()
        for kind in ClusterEnv._cluster_types
        if kind.name == name or (name is None and not kind.opt_in_only_method)
    )


class MPIEffect(effects.Effect):
    """One ordered effect for every primitive and communicator: MPI calls keep program order."""

    def __str__(self) -> str:
        return "MPI"

    __repr__ = __str__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MPIEffect)

    def __hash__(self) -> int:
        return hash(MPIEffect.__qualname__)


for _allowed in (
    effects.ordered_effects,
    effects.lowerable_effects,
    effects.control_flow_allowed_effects,
    effects.custom_derivatives_allowed_effects,
    effects.remat_allowed_effects,
):
    _allowed.add_type(MPIEffect)

ordered_effect = MPIEffect()


# JAX gives the fast dispatch path to ahead-of-time compiled programs with ordered effects, and
# that path forgets their tokens: from the second call on, `f.lower(x).compile()` raises "supplied 1
# arguments but compiled program expected 2" (jax 0.10.2 and 0.12.0.1). Here they take the other.
_create_cpp_call = pxla.MeshExecutable.create_cpp_call


def _without_losing_tokens(executable, params):
    if getattr(executable.unsafe_call, "ordered_effects", None):
        return None
    return _create_cpp_call(executable, params)


pxla.MeshExecutable.create_cpp_call = _without_losing_tokens  # type: ignore[method-assign]


# JAX waits for the token of the last program, and then puts a new one onto the device, which takes
# as long as the rest of a call. Where the token is on that device already, we pass it on. Wherever
# it is, we wait first: a failed one is dropped, or every later program would raise its error (jax
# 0.10).
_token_input = dispatch.RuntimeTokenSet.get_token_input


def _token_where_it_is(tokens, effect, devices):
    token = tokens.current_tokens.get(effect)
    if effect == ordered_effect and token is not None:
        follow_ordered()
        if token._buf.devices() == set(devices):
            return token
    return _token_input(tokens, effect, devices)


dispatch.RuntimeTokenSet.get_token_input = _token_where_it_is  # type: ignore[method-assign]


def is_tracing() -> bool:
    """Whether a transformation or a compilation is being traced right now."""
    return not core.trace_ctx.is_top_level()


def wait_for_ordered() -> None:
    """Wait until the MPI calls of all dispatched programs of this thread are done.

    The token stays in place (``jax.effects_barrier`` would drop it, and the next jitted call would
    have to make a new one).
    """
    token = dispatch.runtime_tokens.current_tokens.get(ordered_effect)
    if token is not None:
        token.block_until_ready()


def follow_ordered() -> None:
    """Wait as the next call does: what failed before is raised by it, and by none after it."""
    try:
        wait_for_ordered()
    except Exception:
        dispatch.runtime_tokens.current_tokens.pop(ordered_effect, None)
        raise


def with_token(ctx, lower, operands, **attributes):
    """Lower with the ordering token as the last operand and the last result."""
    token = ctx.tokens_in.get(ordered_effect)
    extended = ctx.replace(
        avals_in=(*ctx.avals_in, abstract_token), avals_out=(*ctx.avals_out, abstract_token)
    )
    *results, token = lower(extended, *operands, token, **attributes)
    ctx.set_tokens_out(mlir.TokenSet({ordered_effect: token}))
    return results


def without_fusion(lower):
    """Lower so that XLA fuses nothing with the call: what it is given and gives is behind barriers.

    For GPUs it would fuse the slice that an operand or a result is with the call, and then abort
    the process, because it cannot fuse tokens (jaxlib 0.12.0.1).
    """

    def lower_behind_barriers(ctx, *operands, **attributes):
        results = lower(ctx, *_behind_barrier(operands), **attributes)
        return _behind_barrier(results)

    return lower_behind_barriers


def _behind_barrier(values):
    return list(hlo.OptimizationBarrierOp(values).results) if values else []


def lower_as(ctx, function, operands):
    """Lower to what another function of the operands, which may have the same effects, gives."""
    return mlir.lower_fun(function, multiple_results=True)(ctx, *operands)


def when_lowered(see: Callable[[Any], None]) -> None:
    """Show every program that is lowered from now on, as a whole, before it is compiled."""
    lower_program = mlir.lower_jaxpr_to_module

    def lower_and_show(*args, **kwargs):
        lowered = lower_program(*args, **kwargs)
        see(lowered.module)
        return lowered

    mlir.lower_jaxpr_to_module = lower_and_show


def platforms(ctx) -> tuple[str, ...]:
    """The platforms that a program is compiled for."""
    return tuple(ctx.module_context.platforms)


def n_devices(ctx) -> int:
    """The number of devices that a program is compiled for."""
    return getattr(ctx.module_context.axis_context, "num_devices", 1)

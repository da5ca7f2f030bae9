"""From a table row to a JAX primitive: abstract evaluation, effect, transforms, eager call.

Every primitive takes any number of arrays and returns a list. Its parameters are plain hashables
with value equality, so that an eager call compiles once per shape; `where` is the line of the
user's program. Inside a traced program it carries the ordered effect; an eager call runs a cached
executable without it, because program order is MPI order there anyway, and an ordered effect costs
more than the call.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from distsolve.mpi import sites
from distsolve.mpi._jaxcompat import (
    Primitive,
    ShapedArray,
    Zero,
    ad,
    apply_primitive,
    batching,
    follow_ordered,
    instantiate_zero,
    is_tracing,
    is_undefined_primal,
    mlir,
    ordered_effect,
    pe,
    zero_tangent,
)
from distsolve.mpi.comm import executables_of
from distsolve.mpi.lowering import lower
from distsolve.mpi.native import recorder

Avals = Sequence[ShapedArray]


def no_aliases(avals_in: Avals, avals_out: Avals, params: dict) -> dict[int, int]:
    """No result lies where an operand lay."""
    return {}


@dataclasses.dataclass(frozen=True)
class OpSpec:
    """One row of the table.

    Attributes
    ----------
    name : of the handler and the primitive.
    attributes : parameters that the handler reads, sorted as XLA sorts them.
    outputs : (avals, params) -> avals of the results.
    aliases : (avals_in, avals_out, params) -> {operand: result} that must share memory.
    batch : (bind, operands, dims, params) -> (results, dims), always one MPI call.
    derivative : params -> why there is none, or None where the operation is linear.
    joint : whether tangents travel in the same message as the values.
    jvp : (bind, primals, tangents, params) -> (results, tangents), where it is not the operation
        applied to the tangents.
    on_gpu : (operands, params) -> results, in place of a handler that needs host memory.
    silent : whether there are no results, so that JAX would forget the call in reverse mode.
    transpose : (cotangents, operand avals, params) -> cotangents of the operands, or None.
    """

    name: str
    attributes: tuple[str, ...]
    outputs: Callable[..., list[ShapedArray]]
    batch: Callable[..., tuple[list, list]]
    aliases: Callable[[Avals, Avals, dict], dict[int, int]] = no_aliases
    derivative: Callable[[dict], str | None] = lambda params: None
    joint: bool = False
    jvp: Callable[..., tuple[list, list]] | None = None
    on_gpu: Callable[..., list] | None = None
    silent: bool = False
    transpose: Callable[..., list] | None = None

    def __post_init__(self) -> None:
        # The line of the call and its program sort last.
        assert list(self.attributes) == sorted(self.attributes) < ["where"], self.name


@dataclasses.dataclass(frozen=True)
class MPIPrimitive:
    """A row and its primitive; call it to bind or, outside any trace, to run."""

    spec: OpSpec
    primitive: Primitive

    def __call__(self, *operands: Any, donate: bool = False, **params: Any) -> list[Any]:
        if is_tracing():
            return self.primitive.bind(*operands, ordered=True, where=sites.caller(), **params)
        return run_eagerly(self.primitive, operands, donate, sites.caller(), params)


def _executable(primitive: Primitive, donate: int, params: dict) -> Callable[..., list[Any]]:
    """The jitted call, kept with its communicator."""
    known = executables_of(params["comm"])
    key = primitive, donate, tuple(params.items())
    if key not in known:
        known[key] = _jitted(primitive, donate, params)
    return known[key]


def _jitted(primitive: Primitive, donate: int, params: dict) -> Callable[..., list[Any]]:
    def call(*operands: Any) -> list[Any]:
        return primitive.bind(*operands, ordered=False, where=sites.UNKNOWN, **params)

    call.__name__ = primitive.name
    return jax.jit(call, donate_argnums=tuple(range(donate)))


def run_eagerly(
    primitive: Primitive, operands: Sequence, donate: bool, where: int, params: dict
) -> list[Any]:
    """Run after all outstanding ordered work, and wait for the result.

    The executable serves all lines, so the line is said beside it.
    """
    follow_ordered()
    function = _executable(primitive, len(operands) if donate else 0, params)
    recorder.set_site(where)
    try:
        results = function(*operands)
        for result in results:
            result.block_until_ready()
    except ValueError as error:
        # JAX's fast path gives this type to what it calls JaxRuntimeError elsewhere.
        if not str(error).startswith("INTERNAL: "):
            raise
        raise jax.errors.JaxRuntimeError(str(error)) from None
    return results


def make_primitive(spec: OpSpec) -> MPIPrimitive:
    """Register a row with every part of JAX."""
    primitive = Primitive(f"mpi_{spec.name}")
    primitive.multiple_results = True
    made = MPIPrimitive(spec, primitive)

    def impl(*operands: Any, ordered: bool, where: int, **params: Any) -> list[Any]:
        if not ordered:  # `jax.disable_jit` has opened the executable of an eager call
            return apply_primitive(primitive, *operands, ordered=False, where=where, **params)
        results = run_eagerly(primitive, operands, False, where, params)
        # Without the placeholder of a call that has no results.
        return results if spec.outputs([jax.typeof(x) for x in operands], params) else []

    def abstract_eval(*avals: ShapedArray, ordered: bool, where: int, **params: Any):
        outputs = spec.outputs(avals, params)
        if ordered:
            return outputs, {ordered_effect}
        # Without the effect a call without results would be dropped.
        return outputs or [ShapedArray((0,), np.dtype(np.bool_))], set()

    primitive.def_impl(impl)
    primitive.def_effectful_abstract_eval(abstract_eval)
    mlir.register_lowering(primitive, functools.partial(lower, spec))
    batching.primitive_batchers[primitive] = functools.partial(_batch, made)
    ad.primitive_jvps[primitive] = functools.partial(_jvp, made)
    ad.primitive_transposes[primitive] = functools.partial(_transpose, made)
    if spec.joint:
        pe.custom_partial_eval_rules[primitive] = functools.partial(_partial_eval, made)
        pe.partial_eval_jaxpr_custom_rules[primitive] = _partial_eval_jaxpr
    if spec.silent:
        pe.custom_partial_eval_rules[primitive] = functools.partial(_refuse_waiting, made)
    return made


def _batch(made: MPIPrimitive, operands: Sequence, dims: Sequence, *, ordered: bool, **params: Any):
    bind = functools.partial(made.primitive.bind, ordered=ordered)
    return made.spec.batch(bind, operands, dims, params)


def _jvp(made: MPIPrimitive, primals: Sequence, tangents: Sequence, **params: Any):
    """The operation applied to the tangents, in the message of the values where rows allow it."""
    bind = functools.partial(made.primitive.bind, **params)
    if made.spec.jvp is not None:
        return made.spec.jvp(bind, primals, tangents, params)
    reason = made.spec.derivative(params)
    if reason is not None:
        raise NotImplementedError(reason)
    if made.spec.joint:
        # Each operand has its own result, so operands without a tangent simply stay out.
        moving = [i for i, t in enumerate(tangents) if type(t) is not Zero]
        together = bind(*primals, *(tangents[i] for i in moving))
        values, moved = together[: len(primals)], together[len(primals) :]
        t_values = [zero_tangent(v) for v in values]
        for i, t in zip(moving, moved, strict=True):
            t_values[i] = t
        return values, t_values
    if not all(_is_inexact(x) for x in primals):
        raise NotImplementedError(
            f"{made.spec.name} of integers and floating-point numbers together has no derivative: "
            "move them in two calls."
        )
    values = bind(*primals)
    moved = bind(*(instantiate_zero(t) for t in tangents))
    return values, [
        t if _is_inexact(v) else zero_tangent(v) for v, t in zip(values, moved, strict=True)
    ]


def _is_inexact(x: Any) -> bool:
    return jax.numpy.issubdtype(x.dtype, jax.numpy.inexact)


def _transpose(
    made: MPIPrimitive,
    cotangents: Sequence,
    *operands: Any,
    ordered: bool,
    where: int,
    **params: Any,
):
    reason = made.spec.derivative(params)
    if reason is not None or made.spec.transpose is None:
        raise NotImplementedError(reason or _no_transpose(made.spec.name))
    avals = [x.aval if is_undefined_primal(x) else jax.typeof(x) for x in operands]
    if all(type(ct) is Zero for ct in cotangents):
        return [
            Zero(a.to_ct_aval()) if is_undefined_primal(x) else None
            for x, a in zip(operands, avals, strict=True)
        ]
    made_cotangents = made.spec.transpose(
        [instantiate_zero(ct) for ct in cotangents], avals, params
    )
    return [
        ct if is_undefined_primal(x) else None
        for x, ct in zip(operands, made_cotangents, strict=True)
    ]


def _no_transpose(name: str) -> str:
    return (
        f"{name} has no reverse-mode derivative; write the program with `allreduce`, `bcast`, "
        "`allgather`, `alltoall` or `sendrecv`, which have one, or use forward mode."
    )


def _partial_eval(made: MPIPrimitive, trace: Any, *tracers: Any, **params: Any):
    """Values that are known now go now, tangents that are not wait: no result depends on both."""
    known = [i for i, t in enumerate(tracers) if t.pval.is_known()]
    waiting = [i for i, t in enumerate(tracers) if not t.pval.is_known()]
    results: list[Any] = [None] * len(tracers)
    if known:
        values = made.primitive.bind(*(tracers[i].pval.get_known() for i in known), **params)
        for i, value in zip(known, values, strict=True):
            results[i] = value
    if waiting:
        staged = trace.default_process_primitive(
            made.primitive, [tracers[i] for i in waiting], params
        )
        for i, tracer in zip(waiting, staged, strict=True):
            results[i] = tracer
    return results


def _refuse_waiting(made: MPIPrimitive, trace: Any, *tracers: Any, **params: Any):
    """A call without results cannot wait for its operands: nothing would ask for it later."""
    if all(t.pval.is_known() for t in tracers):
        return made.primitive.bind(*(t.pval.get_known() for t in tracers), **params)
    raise NotImplementedError(made.spec.derivative(params))


def _partial_eval_jaxpr(saveable: Any, unknown: Sequence[bool], inst: Sequence[bool], eqn: Any):
    """The same under `jax.checkpoint`: calls on known values run once, and are not repeated."""

    def restrict(keep: Sequence[bool]) -> Any:
        return eqn.replace(
            invars=[v for v, k in zip(eqn.invars, keep, strict=True) if k],
            outvars=[v for v, k in zip(eqn.outvars, keep, strict=True) if k],
        )

    known = [not u for u in unknown]
    return (
        restrict(known) if any(known) else None,
        restrict(unknown) if any(unknown) else None,
        list(unknown),
        list(unknown),
        [],
    )

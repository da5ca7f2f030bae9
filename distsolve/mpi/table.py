"""The table: one row per MPI call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from distsolve.mpi import rules, triangles
from distsolve.mpi._jaxcompat import (
    Primitive,
    ShapedArray,
    Zero,
    ad,
    batching,
    mlir,
    zero_tangent,
)
from distsolve.mpi.comm import of_id
from distsolve.mpi.native.abi import ANY_SOURCE, ANY_TAG
from distsolve.mpi.operations import SUM
from distsolve.mpi.primitive import MPIPrimitive, OpSpec, make_primitive

# ---- pvary: the identity on a replicated value that enters per-rank work (design D6) ----

pvary_p = Primitive("mpi_pvary")
pvary_p.multiple_results = True
pvary_p.def_impl(lambda *xs, comm: list(xs))
pvary_p.def_abstract_eval(lambda *avals, comm: rules.same_shapes(avals, {}))
mlir.register_lowering(pvary_p, lambda ctx, *xs, comm: list(xs))
batching.primitive_batchers[pvary_p] = lambda xs, dims, *, comm: (
    pvary_p.bind(*xs, comm=comm),
    list(dims),
)
ad.deflinear2(
    pvary_p,
    lambda cts, *xs, comm: allreduce(
        *(ad.instantiate_zeros(ct) for ct in cts), comm=comm, op=int(SUM), chunk=0
    ),
)


def _pvary(x: Any, params: dict) -> Any:
    return pvary_p.bind(x, comm=params["comm"])[0]


# ---- reductions ----


def _allreduce_transpose(cts: list, avals: rules.Avals, params: dict) -> list:
    # The result is replicated, so its cotangent is: identity, whose transpose is an allreduce.
    return pvary_p.bind(*cts, comm=params["comm"])


def _reduce_transpose(cts: list, avals: rules.Avals, params: dict) -> list:
    # y_root = sum_r x_r and y_r = x_r elsewhere  =>  x'_r = y'_root + [r != root] y'_r.
    shared = bcast(*cts, comm=params["comm"], chunk=params["chunk"], root=params["root"])
    return [
        _pvary(s, params) + rules.on_rank(not rules.is_root(params), ct)
        for s, ct in zip(shared, cts, strict=True)
    ]


def _reduce_scatter_transpose(cts: list, avals: rules.Avals, params: dict) -> list:
    # y_r = sum_k x_k[r]  =>  x'_k[r] = y'_r.
    return [_pvary(allgather(*cts, comm=params["comm"])[0], params)]


def _elementwise(name: str, **more: Any) -> OpSpec:
    """A reduction element by element: in place, any number of arrays in one message."""
    fields: dict[str, Any] = {
        "attributes": ("chunk", "comm", "op"),
        "outputs": rules.same_shapes,
        "aliases": rules.in_place,
        "batch": rules.each_apart,
        "joint": True,
        "derivative": rules.only_of_sums(name),
    }
    return OpSpec(name=name, **(fields | more))


allreduce: MPIPrimitive = make_primitive(_elementwise("allreduce", transpose=_allreduce_transpose))

reduce = make_primitive(
    _elementwise("reduce", attributes=("chunk", "comm", "op", "root"), transpose=_reduce_transpose)
)

scan = make_primitive(_elementwise("scan"))

exscan = make_primitive(_elementwise("exscan"))

allreduce_symmetric = make_primitive(
    OpSpec(
        name="allreduce_symmetric",
        on_gpu=partial(triangles.through, allreduce.primitive.bind),
        attributes=("chunk", "comm", "op"),
        outputs=rules.same_shapes,
        aliases=rules.in_place,
        batch=rules.in_front,
        transpose=_allreduce_transpose,
    )
)

merge_moments = make_primitive(
    OpSpec(
        name="merge_moments",
        attributes=("chunk", "comm"),
        outputs=rules.same_shapes,
        aliases=rules.in_place,
        batch=rules.in_front,
        derivative=lambda params: (
            "merge_moments has no derivative: differentiate `var` or `covariance`, which have one."
        ),
    )
)

reduce_scatter = make_primitive(
    OpSpec(
        name="reduce_scatter",
        attributes=("chunk", "comm", "op"),
        outputs=lambda avals, params: [ShapedArray(avals[0].shape[1:], avals[0].dtype)],
        batch=rules.behind_ranks(1, 0),
        transpose=_reduce_scatter_transpose,
        derivative=rules.only_of_sums("reduce_scatter"),
    )
)


# ---- a reduction in the background: `count` operands are the message, the rest passes through ----


def _iallreduce_jvp(bind: Callable, primals: Sequence, tangents: Sequence, params: dict) -> tuple:
    # The tangent of a request is that of its operand: `wait` reduces it.
    reason = iallreduce.spec.derivative(params)
    if reason is not None and any(type(t) is not Zero for t in tangents[: params["count"]]):
        raise NotImplementedError(reason)
    number, *values = bind(*primals)
    return [number, *values], [zero_tangent(number), *tangents]


def _iallreduce_transpose(cts: list, avals: rules.Avals, params: dict) -> list:
    n = params["count"]
    return [*pvary_p.bind(*cts[1 : n + 1], comm=params["comm"]), *cts[n + 1 :]]


iallreduce: MPIPrimitive = make_primitive(
    OpSpec(
        name="iallreduce",
        attributes=("comm", "count", "op"),
        outputs=rules.started,
        aliases=lambda avals_in, avals_out, params: {i: i + 1 for i in range(len(avals_in))},
        batch=lambda bind, xs, dims, params: (bind(*xs, **params), [None, *dims]),
        derivative=rules.only_of_sums("iallreduce"),
        jvp=_iallreduce_jvp,
        transpose=_iallreduce_transpose,
    )
)


def _wait_jvp(bind: Callable, primals: Sequence, tangents: Sequence, params: dict) -> tuple:
    moved = list(tangents[1:])
    moving = [i for i, t in enumerate(moved[: params["count"]]) if type(t) is not Zero]
    if moving:
        sums = allreduce(*(moved[i] for i in moving), comm=params["comm"], op=params["op"], chunk=0)
        for i, t in zip(moving, sums, strict=True):
            moved[i] = t
    return bind(*primals), moved


wait = make_primitive(
    OpSpec(
        name="wait",
        attributes=("comm", "count"),
        outputs=lambda avals, params: rules.same_shapes(avals[1:], params),
        aliases=lambda avals_in, avals_out, params: {i + 1: i for i in range(len(avals_out))},
        batch=rules.waited,
        derivative=rules.only_of_sums("iallreduce"),
        jvp=_wait_jvp,
        transpose=lambda cts, avals, params: [Zero(avals[0].to_ct_aval()), *cts],
    )
)


# ---- broadcast and data movement in equal blocks ----


def _bcast_transpose(cts: list, avals: rules.Avals, params: dict) -> list:
    # The result is replicated, so its cotangent is; it belongs to the root's operand alone.
    varied = pvary_p.bind(*cts, comm=params["comm"])
    return [rules.on_rank(rules.is_root(params), ct) for ct in varied]


bcast = make_primitive(
    OpSpec(
        name="bcast",
        attributes=("chunk", "comm", "root"),
        outputs=rules.same_shapes,
        aliases=rules.in_place,
        batch=rules.each_apart,
        joint=True,
        transpose=_bcast_transpose,
    )
)


def _gather_transpose(cts: list, avals: rules.Avals, params: dict) -> list:
    # y_root = stack_r x_r and y_r = x_r elsewhere  =>  x'_r = y'_root[r] + [r != root] y'_r.
    (back,) = scatter(*cts, comm=params["comm"], root=params["root"])
    return [back if rules.is_root(params) else back + cts[0]]


def _scatter_transpose(cts: list, avals: rules.Avals, params: dict) -> list:
    # y_r = x_root[r]: the templates of the other ranks have no influence.
    (back,) = gather(*cts, comm=params["comm"], root=params["root"])
    return [rules.on_rank(rules.is_root(params), back)]


gather = make_primitive(
    OpSpec(
        name="gather",
        attributes=("comm", "root"),
        aliases=rules.given_back,
        outputs=rules.rooted_shapes(lambda shape, size: (size, *shape)),
        batch=rules.batch_rooted(0, 1),
        transpose=_gather_transpose,
    )
)

scatter = make_primitive(
    OpSpec(
        name="scatter",
        attributes=("comm", "root"),
        outputs=rules.rooted_shapes(lambda shape, size: shape[1:]),
        batch=rules.batch_rooted(1, 0),
        transpose=_scatter_transpose,
    )
)


def _allgather_transpose(cts: list, avals: rules.Avals, params: dict) -> list:
    # The result is replicated, so its cotangent is: this rank's block of it.
    return [_pvary(cts[0], params)[of_id(params["comm"]).rank]]


allgather = make_primitive(
    OpSpec(
        name="allgather",
        attributes=("comm",),
        outputs=lambda avals, params: [
            ShapedArray((of_id(params["comm"]).size, *avals[0].shape), avals[0].dtype)
        ],
        batch=rules.behind_ranks(0, 1),
        transpose=_allgather_transpose,
    )
)

alltoall: MPIPrimitive = make_primitive(
    OpSpec(
        name="alltoall",
        attributes=("comm",),
        outputs=rules.same_shapes,
        batch=rules.behind_ranks(1, 1),
        transpose=lambda cts, avals, params: alltoall(*cts, **params),
    )
)


# ---- data movement in uneven blocks ----


def _gatherv_transpose(cts: list, avals: rules.Avals, params: dict) -> list:
    # As for gather; on the other ranks the cotangent serves as the template.
    (back,) = scatterv(*cts, **params)
    return [back if rules.is_root(params) else back + cts[0]]


def _scatterv_transpose(cts: list, avals: rules.Avals, params: dict) -> list:
    # As for scatter, but templates may have any length: zeros that depend on what was gathered, so
    # that the transpose of this makes the same MPI calls on every rank.
    (back,) = gatherv(*cts, **params)
    if rules.is_root(params):
        return [back]
    return [rules.zeros_like(avals[0]) + jnp.sum(rules.on_rank(False, back))]


def _allgatherv_transpose(cts: list, avals: rules.Avals, params: dict) -> list:
    rank = of_id(params["comm"]).rank
    start = sum(params["counts"][:rank])
    return [jax.lax.slice_in_dim(_pvary(cts[0], params), start, start + rules.my_rows(params))]


gatherv = make_primitive(
    OpSpec(
        name="gatherv",
        attributes=("comm", "counts", "root"),
        aliases=rules.given_back,
        outputs=rules.leading_rows(
            lambda p: sum(p["counts"]) if rules.is_root(p) else rules.my_rows(p)
        ),
        batch=rules.behind_ranks(1, 1),
        transpose=_gatherv_transpose,
    )
)

scatterv = make_primitive(
    OpSpec(
        name="scatterv",
        attributes=("comm", "counts", "root"),
        outputs=rules.leading_rows(rules.my_rows),
        batch=rules.behind_ranks(1, 1),
        transpose=_scatterv_transpose,
    )
)

allgatherv = make_primitive(
    OpSpec(
        name="allgatherv",
        attributes=("comm", "counts"),
        outputs=rules.leading_rows(lambda p: sum(p["counts"])),
        batch=rules.behind_ranks(1, 1),
        transpose=_allgatherv_transpose,
    )
)

alltoallv: MPIPrimitive = make_primitive(
    OpSpec(
        name="alltoallv",
        attributes=("comm", "recv_counts", "send_counts"),
        outputs=rules.leading_rows(lambda p: sum(p["recv_counts"])),
        batch=rules.behind_ranks(1, 1),
        transpose=lambda cts, avals, p: alltoallv(
            *cts, comm=p["comm"], recv_counts=p["send_counts"], send_counts=p["recv_counts"]
        ),
    )
)


# ---- point to point ----


def _sendrecv_transpose(cts: list, avals: rules.Avals, params: dict) -> list:
    # The cotangent travels back: from the rank that received to the rank that sent.
    if params["source"] == ANY_SOURCE:
        raise NotImplementedError(
            "sendrecv with source=ANY_SOURCE has no reverse-mode derivative, because the rank to "
            "send the cotangent to is not known: name the source."
        )
    known = params["recvtag"] != ANY_TAG
    reverse = dict(
        params,
        source=params["dest"],
        dest=params["source"],
        status=0,
        sendtag=params["recvtag"] if known else params["sendtag"],
        recvtag=params["sendtag"] if known else ANY_TAG,
    )
    back, _ = sendrecv(cts[0], rules.zeros_like(avals[0]), **reverse)
    untouched = params["source"] < 0
    return [back, cts[0] if untouched else rules.zeros_like(avals[1])]


send = make_primitive(
    OpSpec(
        name="send",
        attributes=("comm", "dest", "tag"),
        outputs=lambda avals, params: [],
        batch=rules.received,
        silent=True,
        derivative=rules.no_derivative("send"),
    )
)

recv = make_primitive(
    OpSpec(
        name="recv",
        attributes=("comm", "source", "status", "tag"),
        outputs=rules.message_and_status,
        aliases=rules.template_in_place,
        batch=rules.received,
        derivative=rules.no_derivative("recv"),
    )
)

sendrecv = make_primitive(
    OpSpec(
        name="sendrecv",
        attributes=("comm", "dest", "recvtag", "sendtag", "source", "status"),
        outputs=rules.message_and_status,
        aliases=rules.template_in_place,
        batch=rules.received,
        transpose=_sendrecv_transpose,
    )
)

barrier = make_primitive(
    OpSpec(
        name="barrier",
        attributes=("comm",),
        outputs=lambda avals, params: [],
        batch=rules.each_apart,
    )
)

"""One lowering rule for every row of the table and every platform."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax
import numpy as np

from distsolve.mpi import device
from distsolve.mpi._jaxcompat import lower_as, n_devices, platforms, with_token, without_fusion

if TYPE_CHECKING:
    from distsolve.mpi.primitive import OpSpec


def lower(spec: OpSpec, ctx, *operands, ordered, where, **params):
    """Lower to one custom call, with the ordering token inside a larger program.

    The text holds the communicator's number and plain integers only, so it is the same in every
    run, and on every rank that takes part in the same way.
    """
    if n_devices(ctx) > 1:
        raise NotImplementedError(
            f"{spec.name} inside a program over {n_devices(ctx)} devices: each process must "
            "compute on one device. Inside `shard_map` use `jax.lax.psum` and its kin."
        )
    if platforms(ctx) != ("cpu",) and platforms(ctx) != (device.find(),):
        raise NotImplementedError(
            f"{spec.name} on platform {', '.join(platforms(ctx))}: it runs on one platform at a "
            "time, on CPUs and on GPUs whose driver is on this machine "
            f"({' or '.join(d.libraries[0] for d in device.DRIVERS.values())}). Run with "
            "JAX_PLATFORMS=cpu, or place the data on a CPU device."
        )
    on_gpu = platforms(ctx) != ("cpu",)
    if on_gpu and spec.on_gpu is not None:
        called = functools.partial(spec.on_gpu, ordered=ordered, where=where, **params)
        return lower_as(ctx, called, operands)
    rule = jax.ffi.ffi_lowering(
        f"distsolve_{spec.name}",
        has_side_effect=True,
        operand_output_aliases=spec.aliases(ctx.avals_in, ctx.avals_out, params),
    )
    if on_gpu:
        rule = without_fusion(rule)
    attributes = {
        name: np.asarray(params[name], np.int64)
        if isinstance(params[name], tuple)
        else np.int64(params[name])
        for name in spec.attributes
    }
    attributes["where"] = np.int64(where)
    attributes["within"] = np.int64(0)  # the program, see `programs.py`
    attributes["xla_device"] = np.int64(on_gpu)
    if ordered:
        return with_token(ctx, rule, operands, **attributes)
    return rule(ctx, *operands, **attributes)

"""Check mode: every call carries a hash of the program that it is in, to be compared over ranks.

Shapes, constants and all other numbers may differ between the ranks of a correct program: they do
not count. The hash stands in the program itself, so a program from a compilation cache has its own.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any

import numpy as np

from distsolve.mpi._jaxcompat import mlir, when_lowered
from distsolve.mpi.native import agreement

# Tensors of constants, dimensions of a type, numbers that are no part of a name.
_FREE = re.compile(
    r"""dense(?:_resource)?<(?:"[^"]*"|[^<>"])*>"""
    r"|(?<=tensor<)(?:[\d?]+x)+"
    r"|(?<![\w%@#.])-?\d[\d.]*(?:[eE][-+]?\d+)?"
)


def compare_programs() -> None:
    """Mark all programs that are lowered from now on."""
    when_lowered(_mark)


def _mark(module: Any) -> None:
    calls: list[Any] = []

    def see(operation: Any) -> Any:
        name = operation.attributes.get("call_target_name")
        if name is not None and name.value.startswith("distsolve_"):
            calls.append(operation)
        return mlir.ir.WalkResult.ADVANCE

    module.operation.walk(see)
    if calls:
        text = plain(module.operation.get_asm(large_elements_limit=4)).encode()
        number = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest())
        agreement.add_program(number, text)
        with module.context:
            for call in calls:
                _set_program(call, number)


def _set_program(call: Any, number: int) -> None:
    config = call.attributes["mhlo.backend_config"]
    if "within" in config:
        fields = {field.name: field.attr for field in config}
        fields["within"] = mlir.ir_attribute(np.int64(number))
        call.attributes["mhlo.backend_config"] = mlir.ir.DictAttr.get(fields)


def plain(text: str) -> str:
    """Leave out of a program's text what may differ between ranks, and how deep its lines are."""
    return re.sub("^ +", "", _FREE.sub("_", text), flags=re.MULTILINE)

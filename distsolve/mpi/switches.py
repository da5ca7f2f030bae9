"""Environment variables that turn something on or off: which texts mean which."""

from __future__ import annotations

import os

_ON = {
    "DISTSOLVE_NO_MPI": ("1",),
    "DISTSOLVE_NO_IN_PLACE": ("1",),
    "DISTSOLVE_CHECK": ("1", "calls"),
    "DISTSOLVE_ABORT": ("1",),
}


def is_on(name: str) -> bool:
    """Whether a switch has a text that means on; one that means nothing turns nothing on."""
    return os.environ.get(name, "") in _ON[name]


def refuse_unknown() -> None:
    """Raise where a switch has a text that means nothing: `no` or `false` may be meant as off."""
    for name, texts in _ON.items():
        text = os.environ.get(name, "")
        if text not in ("", "0", *texts):
            raise ValueError(
                f"{name} is {text!r}; expected {' or '.join(texts)} for on, 0 for off."
            )

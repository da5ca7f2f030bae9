"""What several commands read from their command lines."""

import argparse
from collections.abc import Callable
from typing import TypeVar

Number = TypeVar("Number", int, float)


def number(
    text: str, kind: Callable[[str], Number], fits: Callable[[Number], bool], expected: str
) -> Number:
    """Return the number that a text is.

    Raises
    ------
    argparse.ArgumentTypeError
        For other text, and for numbers that do not fit.
    """
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not fits(value):
        raise argparse.ArgumentTypeError(f"expected {expected}: got {text!r}")
    return value


def positive(text: str) -> int:
    """Return a positive integer that an int32 holds, as argparse's `type`."""
    expected = "a positive integer below 2**31, such as 100 or 1e5"
    return number(text, _integer, lambda value: 0 < value < 2**31, expected)


def _integer(text: str) -> int:
    value = float(text)  # which holds every int32
    if not value.is_integer():
        raise ValueError(text)
    return int(value)

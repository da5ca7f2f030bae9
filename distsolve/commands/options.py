"""What several commands read from their command lines."""

import argparse


def positive(text: str) -> int:
    """Return a positive integer, as argparse's `type`.

    Raises
    ------
    argparse.ArgumentTypeError
        For other text, and for numbers that no int32 holds.
    """
    try:
        value = int(text)
    except ValueError:
        value = 0
    if not 0 < value < 2**31:
        raise argparse.ArgumentTypeError(
            f"expected a positive integer below 2**31, such as 100: got {text!r}"
        )
    return value

"""How far the memory of this process grows."""

import contextlib
import ctypes
from pathlib import Path
from typing import Any

_PROCESS = Path("/proc/self")


class PeakGrowth:
    """Measures, in a ``with`` block, the growth of the peak of this process's resident memory.

    Attributes
    ----------
    nbytes : int
        After the block: the peak in it, less what was resident before.
    """

    def __enter__(self) -> "PeakGrowth":
        # Memory that was freed, and kept, would be used again without a trace.
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
        if trim:
            trim(0)
        # Where the peak cannot be reset the earlier one stays: too large, never too small.
        with contextlib.suppress(OSError):
            (_PROCESS / "clear_refs").write_text("5")
        self._before = _resident("VmRSS")
        return self

    def __exit__(self, *exception: Any) -> None:
        self.nbytes = max(_resident("VmHWM") - self._before, 0)


def _resident(field: str) -> int:
    """Return a size that Linux keeps of this process, in bytes."""
    lines = (_PROCESS / "status").read_text().splitlines()
    (text,) = (line for line in lines if line.startswith(field + ":"))
    return int(text.split()[1]) * 1024

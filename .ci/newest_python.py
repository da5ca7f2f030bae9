"""Print the newest Python >= 3.12 of this machine that really runs; print nothing without one.

A name on PATH proves nothing: the shims of pyenv exist for versions that they refuse to run. Each
candidate is therefore run, and reports its own version and path.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

LOWEST = (3, 12)
# Free-threaded and unfinished interpreters are passed over: JAX publishes no wheels for them.
REPORT = """
import sys, sysconfig
if sys.version_info.releaselevel == "final" and not sysconfig.get_config_var("Py_GIL_DISABLED"):
    print(*sys.version_info[:3], sys.executable)
"""


def candidates() -> list[str]:
    """Return every path that may be a Python: from PATH, and from pyenv's versions."""
    found = []
    for folder in os.get_exec_path():
        if Path(folder).is_dir():
            found += [
                str(path)
                for path in Path(folder).iterdir()
                if re.fullmatch(r"python3(\.\d+)?", path.name)
            ]
    if shutil.which("pyenv"):
        root = subprocess.run(["pyenv", "root"], capture_output=True, text=True, timeout=30)
        found += [str(path) for path in Path(root.stdout.strip(), "versions").glob("*/bin/python3")]
    return found


def report(python: str) -> tuple[tuple[int, ...], str] | None:
    """Run a candidate; return its version and its own path, or None where it does not run."""
    try:
        done = subprocess.run(
            [python, "-I", "-c", REPORT], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    words = done.stdout.split(maxsplit=3)
    if len(words) != 4:
        return None
    return tuple(map(int, words[:3])), words[3].strip()


def main() -> None:
    """Print the path of the newest candidate that runs."""
    reports = [found for found in map(report, candidates()) if found and found[0] >= LOWEST]
    if reports:
        print(max(reports)[1])


main()

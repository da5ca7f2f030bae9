"""Compile in less time: most of a test's time goes into programs that run once.

`run.py` sets these variables for the cells of the first environment, whose JAX is known; the other
environments compile as users do. On a rank, `start` does what no variable can.
"""

import functools
import os
import subprocess
from pathlib import Path

# XLA's simpler code generator, without optimisation, in one piece: less than half the time.
# jaxlib 0.12 has no such choice.
XLA_FLAGS = (
    " --xla_cpu_use_fusion_emitters=false --xla_backend_optimization_level=0"
    " --xla_cpu_parallel_codegen_split_count=1"
)
CACHE = "DISTSOLVE_TEST_CACHE"


def variables(cache: Path | None) -> dict[str, str]:
    """Return the variables of a cell; `cache` is a folder for compiled programs, if any is kept."""
    found = {
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", "") + XLA_FLAGS,
        "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0",
    }
    if cache is not None:
        found |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", CACHE: str(cache)}
    return found


def is_known_to(python: str) -> bool:
    """Return whether the jaxlib of an environment knows these flags: others abort."""
    known = os.environ | {"XLA_FLAGS": XLA_FLAGS.strip(), "JAX_PLATFORMS": "cpu"}
    command = [python, "-c", "import jax; jax.devices()"]
    done = subprocess.run(command, env=known, capture_output=True, check=False, timeout=120)
    return done.returncode == 0


def start(rank: int) -> None:
    """Keep what this rank compiles for later cells, and lower all programs in one context of MLIR.

    JAX makes a context for each program, in a third of the time of lowering a small one. Ranks
    share no folder: JAX reads entries that others may not have written to their end. Without a
    folder, as in a session that a test has started, nothing changes.
    """
    if CACHE not in os.environ:
        return
    import jax
    from jax._src.interpreters import mlir

    jax.config.update("jax_compilation_cache_dir", os.path.join(os.environ[CACHE], str(rank)))
    mlir.make_ir_context = functools.cache(mlir.make_ir_context)

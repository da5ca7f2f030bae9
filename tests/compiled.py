"""Ranks that need the same program compile it once, in tests with a compilation cache on disk.

Ranks run the same tests at the same time, so each would compile what another is compiling already.
Here rank 0 leaves a note while it compiles, and the others wait for its result. What rank 0 does
not begin within a moment is a program of their own.
"""

import time
from pathlib import Path

NOTE_SECONDS = 0.1  # ranks reach a program about this much apart
COMPILE_SECONDS = 20.0  # a compilation that failed leaves its note


def share(rank: int, folder: str) -> None:
    """Share what is compiled with the other ranks, from now on."""
    from jax._src import compilation_cache, compiler

    notes = Path(folder) / "notes"
    notes.mkdir(parents=True, exist_ok=True)
    look_up, keep = compilation_cache.get_executable_and_time, compiler._cache_write

    def announce(cache_key, *arguments):
        found = look_up(cache_key, *arguments)
        if found[0] is None:
            (notes / cache_key).touch()
        return found

    def keep_and_tell(cache_key, *arguments):
        keep(cache_key, *arguments)
        (notes / cache_key).unlink(missing_ok=True)

    def await_rank_0(cache_key, *arguments):
        note, start = notes / cache_key, time.monotonic()
        found = look_up(cache_key, *arguments)
        while found[0] is None:
            limit = COMPILE_SECONDS if note.exists() else NOTE_SECONDS
            found = look_up(cache_key, *arguments)
            if time.monotonic() - start > limit:
                break
            time.sleep(0.005)
        return found

    if rank:
        compilation_cache.get_executable_and_time = await_rank_0
    else:
        compilation_cache.get_executable_and_time = announce
        compiler._cache_write = keep_and_tell

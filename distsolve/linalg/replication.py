"""Whether ranks hold equal copies of what is meant to be replicated."""

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distsolve.linalg.space import Replicated, Sharded

_DIGEST_BYTES = 16


def check_replicated(tree: Any, space: Replicated | None = None) -> None:
    """Raise on every rank unless all ranks hold bitwise the same arrays.

    Copies that differ in their last bits are enough to make ranks take different branches. NaN
    equals NaN; 0 and -0 differ. To be called outside jit, for instance once before a solve.

    Parameters
    ----------
    tree : pytree of arrays, replicated
    space : Replicated, optional
        The ranks; the world by default.

    Raises
    ------
    ValueError
        On every rank, with each leaf that differs, by how much and on which ranks; also where
        structures, shapes or dtypes differ, which cannot hang.
    TypeError
        Inside jit, where values are not known.

    Communication
    -------------
    Two small allgathers, of 16 bytes and of 16 bytes a leaf from each rank. Where something
    differs, also the leaf or the description.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from distsolve import check_replicated
    >>> check_replicated({"w": jnp.arange(3.0)})
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    if any(isinstance(leaf, jax.core.Tracer) for _, leaf in leaves):
        raise TypeError("`tree` of check_replicated has traced leaves: call it outside jit.")
    if space is not None and not isinstance(space, Replicated):
        raise TypeError(
            f"`space` of check_replicated must be Replicated(comm) or None: got {space!r}. Pieces "
            "of a vector are no copies."
        )
    ranks = Sharded(None if space is None else space.comm)
    _check_forms(tree, leaves, ranks)
    arrays = [(f"`tree`{jax.tree_util.keystr(path)}", _numbers(leaf)) for path, leaf in leaves]
    if not arrays:
        return
    digests = _gather(np.stack([_digest(_bits(array)) for _, array in arrays]), ranks)
    differs = (digests != digests[0]).any(-1)
    found = [
        _describe(name, array, np.flatnonzero(differs[:, i]), ranks)
        for i, (name, array) in enumerate(arrays)
        if differs[:, i].any()
    ]
    if found:
        raise ValueError(
            f"check_replicated: {'; '.join(found)}. Replicated values must be equal bit for bit: "
            "make them from the same seed, or send rank 0's to all with `mpi.bcast`. Where they "
            "were computed from data of each rank, an allreduce may be missing."
        )


def _check_forms(tree: Any, leaves: list, ranks: Sharded) -> None:
    """Raise unless all ranks have the same leaves, of the same shapes and dtypes."""
    lines = [f"`tree`{jax.tree_util.keystr(path)} is {_form(leaf)}" for path, leaf in leaves]
    text = "\n".join([*lines, f"its structure is {jax.tree.structure(tree)}"]).encode()
    digests = _gather(_digest(text), ranks)
    if (digests == digests[0]).all():
        return
    # Descriptions differ in length, so the lengths go first.
    longest = _gather(np.array(len(text), np.int32), ranks).max()
    padded = np.frombuffer(text.ljust(longest), np.uint8)
    first, *others = [row.tobytes().decode().rstrip().split("\n") for row in _gather(padded, ranks)]
    found = []
    for rank, lines in enumerate(others, 1):
        # Where one rank has more leaves, its line stands against the other's next one.
        pair = next(((a, b) for a, b in zip(first, lines, strict=False) if a != b), None)
        if pair is not None:
            found.append(f"{pair[0]} on rank 0, and {pair[1]} on rank {rank}")
    raise ValueError(
        f"check_replicated: `tree` differs between ranks: {'; '.join(found)}. Build it the same "
        "way on all ranks."
    )


def _describe(name: str, array: np.ndarray, where: np.ndarray, ranks: Sharded) -> str:
    """Return by how much the array on some ranks differs from rank 0's."""
    bits = np.frombuffer(_bits(array), np.uint8)
    sent = bits if bool(ranks.rank_zero()) else np.zeros_like(bits)
    first = np.frombuffer(np.asarray(ranks.sum(jnp.asarray(sent))).tobytes(), array.dtype)
    wide = np.complex128 if np.iscomplexobj(array) else np.float64
    mine, first = array.ravel().astype(wide), first.astype(wide)
    same = (mine == first) | (np.isnan(mine) & np.isnan(first))
    with np.errstate(invalid="ignore"):
        apart = np.where(same, 0, np.abs(mine - first))
    largest = _gather(np.array(np.max(apart, initial=0), np.float32), ranks)
    texts = [f"by up to {largest[rank]:.3g} on rank {rank}" for rank in where]
    return f"{name} differs from rank 0's {', '.join(texts)}"


def _gather(array: np.ndarray, ranks: Sharded) -> np.ndarray:
    return np.asarray(ranks.gather(jnp.asarray(array)))


def _digest(data: bytes) -> np.ndarray:
    return np.frombuffer(hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest(), np.uint8)


def _bits(array: np.ndarray) -> bytes:
    """Return the bytes of an array, the same ones for every NaN."""
    parts = array.view(array.real.dtype) if np.iscomplexobj(array) else array
    if jnp.issubdtype(parts.dtype, jnp.floating):
        parts = np.where(np.isnan(parts), np.full_like(parts, np.nan), parts)
    return parts.tobytes()


def _numbers(leaf: Any) -> np.ndarray:
    """Return a leaf in NumPy, or raise; all ranks have the same kind of leaf by now."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    array = np.atleast_1d(np.asarray(leaf))
    if not (jnp.issubdtype(array.dtype, jnp.number) or array.dtype == np.bool_):
        raise TypeError(
            f"`tree` of check_replicated has {_form(leaf)}; expected arrays of numbers."
        )
    return np.ascontiguousarray(array)


def _form(leaf: Any) -> str:
    if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
        return type(leaf).__name__
    return f"{leaf.dtype}{list(leaf.shape)}"

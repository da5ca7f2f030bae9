"""Rows of a sparse matrix as rectangles of numbers, and their products with a vector.

Rows are packed by length: a group of rows is a rectangle, filled up with zeros to its longest row
(the ELLPACK format, one for each length). XLA turns the sum over its columns into vector
instructions, where a sum over segments of a CSR array costs several times as much.
"""

import jax
import jax.numpy as jnp
import numpy as np

# A group of rows takes at most this much of what its entries take.
PADDING = 1.5
# Columns of a rectangle that are added up in one loop over its rows.
UNROLL = 8


def multiply(values, columns, x):
    """Return the products of one group of rows with ``x``."""

    def taken(places):
        return x.at[places].get(mode="promise_in_bounds")

    if values.ndim == 2:
        return jnp.sum(values * taken(columns), axis=1)

    def add(k, y):
        for j in range(values.shape[1]):
            y = y + values[k, j] * taken(columns[k, j])
        return y

    y = jnp.zeros(values.shape[2], values.dtype)
    return add(0, y) if values.shape[0] == 1 else jax.lax.fori_loop(0, values.shape[0], add, y)


def spread(members, values):
    """Return the row numbers of a group, shaped so that they broadcast over its rectangle."""
    return members[None, None] if values.ndim == 3 else members[:, None]


def pack(matrix, columns):
    """Return ``values, columns, members, order`` of `DistributedCSR` for the rows of this rank.

    A group with more rows than columns is stored by columns, ``(k, 8, rows)``; one of few long rows
    by rows, ``(rows, columns)``.
    """
    groups = _groups(np.diff(matrix.indptr))
    packed = []
    for members in groups:
        first, length = matrix.indptr[members], np.diff(matrix.indptr)[members]
        width = int(length.max(initial=0))
        if width > UNROLL:
            width = -(-width // UNROLL) * UNROLL
        filled = np.arange(width) < length[:, None]
        source = (first[:, None] + np.arange(width))[filled]
        # What fills up is 0 times the row's own entry: NaN elsewhere in the vector stays there.
        own = np.broadcast_to(members[:, None].astype(np.int32), filled.shape)
        rectangles = []
        for empty, entries in ((np.zeros_like(own, matrix.dtype), matrix.data), (own, columns)):
            rectangle = empty.copy()
            rectangle[filled] = entries[source]
            if len(members) >= width:
                shape = (max(width // UNROLL, 1), min(width, UNROLL), len(members))
                rectangle = rectangle.T.reshape(shape)
            rectangles.append(jnp.asarray(rectangle))
        packed.append((*rectangles, jnp.asarray(members.astype(np.int32))))
    values, columns, members = zip(*packed, strict=True)
    order = None
    if len(groups) > 1:
        order = jnp.asarray(np.argsort(np.concatenate(groups)).astype(np.int32))
    return values, columns, members, order


def _groups(lengths):
    """Split rows into groups that, filled up to their longest row, take little more than they hold.

    From the longest row on, a group takes as many rows as `PADDING` allows. The next group begins
    with a row that is shorter by this factor at least, so there are few groups whatever the matrix.
    """
    order = np.argsort(-lengths, kind="stable")
    ordered, first = lengths[order].astype(np.int64), 0
    groups: list[np.ndarray] = []
    while first < len(ordered) or not groups:
        held = np.cumsum(ordered[first:])
        padded = ordered[first : first + 1] * np.arange(1, len(held) + 1)
        count = int(np.count_nonzero(padded <= PADDING * held))
        groups.append(np.sort(order[first : first + count]))
        first += count
    return groups

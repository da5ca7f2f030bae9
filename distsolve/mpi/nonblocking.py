"""A reduction in the background: `iallreduce` starts it, `wait` gives its result."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax

from distsolve.mpi import table
from distsolve.mpi._jaxcompat import is_tracing
from distsolve.mpi.arguments import as_op
from distsolve.mpi.carrier import as_array, encode
from distsolve.mpi.comm import resolve
from distsolve.mpi.operations import SUM, Op, check_op


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("number", "template"),
    meta_fields=("comm", "op"),
)
@dataclasses.dataclass(frozen=True)
class Request:
    """A reduction that was started: a pytree of arrays, which loops may carry.

    Each rank has its own, of the calls that it made; it is waited for once.

    Attributes
    ----------
    number : uint32 array of shape (2,)
        The halves of a 64-bit number: which of this rank's outstanding reductions it is.
    template : pytree of arrays
        What the result looks like; the values are those of `x`, or anything.
    comm : int
        The number of the communicator.
    op : Op
        The operation.
    """

    number: jax.Array
    template: Any
    comm: int
    op: Op


def iallreduce(x: Any, op: Any = SUM, *, through: Any = None, comm: Any = None) -> Any:
    """Start to combine `x` over all ranks, and go on with other work until `wait`.

    Parameters
    ----------
    x : pytree of arrays of one dtype, the same on every rank; at most 1 MiB
        Each rank's own values. They are copied.
    op, comm : as for `allreduce`.
    through : pytree of arrays
        The operands of the work that is to hide the message. XLA starts independent work in any
        order: use what comes back in their place, and the work cannot begin before the message.

    Returns
    -------
    Request, or ``(Request, through)`` where `through` was given
        To be waited for once. `through` lies where it lay, unless the program goes on to use the
        original as well: then XLA copies it.

    Raises
    ------
    TypeError, ValueError
        While tracing, on every rank: more than one dtype, too many bytes, no array, an operation
        that does not fit.

    Communication
    -------------
    One message. Other calls may be made before the `wait`. MPI works on the message in a thread,
    if it was initialised with ``MPI_THREAD_MULTIPLE``, which is mpi4py's default; if not, it may
    do nothing until the next call.

    Notes
    -----
    Derivative for SUM only: that of `allreduce`. A tangent is reduced by an `allreduce` of its own,
    at the `wait`.

    Examples
    --------
    The product with `A` hides the reduction:

    >>> import jax, jax.numpy as jnp
    >>> from distsolve import mpi
    >>> A = jnp.eye(3)
    >>> @jax.jit
    ... def step(r, p):
    ...     request, p = mpi.iallreduce(r @ r, through=p)
    ...     return mpi.wait(request, after=A @ p)
    >>> rr, Ap = step(jnp.ones(3), jnp.ones(3))
    >>> float(rr) == 3 * mpi.size()
    True
    """
    call = "iallreduce"
    op, record = as_op(op, call), resolve(comm)
    leaves, tree = jax.tree.flatten(x)
    leaves = [as_array(leaf, call) for leaf in leaves]
    dtypes = sorted({str(leaf.dtype) for leaf in leaves})
    if not leaves:
        raise ValueError(f"`x` of {call} is a pytree without arrays: there is no message.")
    check_op(op, leaves[0].dtype, call)
    if len(dtypes) > 1:
        raise TypeError(
            f"`x` of {call} has the dtypes {', '.join(dtypes)}; expected one, because it is one "
            "message: cast them to one, or start one reduction for each."
        )
    start = functools.partial(table.iallreduce, comm=record.id, count=len(leaves), op=int(op))
    (number, *templates), through = _passing(start, leaves, "through", through)
    request = Request(number, jax.tree.unflatten(tree, templates), record.id, op)
    return request if through is None else (request, through)


def wait(request: Request, *, after: Any = None) -> Any:
    """Wait for a reduction that `iallreduce` started.

    Parameters
    ----------
    request : Request
        Each is waited for once.
    after : pytree of arrays
        Results of the work that hides the message: the program waits when they are there.

    Returns
    -------
    pytree like `x` of the `iallreduce`, replicated; with `after`, ``(pytree, after)``.

    Raises
    ------
    TypeError
        `request` is something else.
    jax.errors.JaxRuntimeError
        The request was waited for before, or MPI failed.

    Communication
    -------------
    None of its own.
    """
    if not isinstance(request, Request):
        raise TypeError(
            f"`request` of wait is {request!r} of type {type(request).__name__}; expected what "
            "`iallreduce` returned."
        )
    templates, tree = jax.tree.flatten(request.template)
    finish = functools.partial(
        table.wait, comm=request.comm, count=len(templates), op=int(request.op)
    )
    reduced, after = _passing(finish, [request.number, *templates], "after", after)
    y = jax.tree.unflatten(tree, reduced)
    return y if after is None else (y, after)


def _passing(call: Any, operands: list, name: str, passed: Any) -> tuple[list, Any]:
    """Call with more operands, the leaves of `passed`, which come back as the last results.

    An eager call does not need them, since it runs when it is made, and would copy them.
    """
    leaves, tree = jax.tree.flatten(passed)
    what = call.func.spec.name
    if not is_tracing():
        given = [as_array(leaf, what, name) for leaf in leaves]
        return call(*operands), jax.tree.unflatten(tree, given)
    encoded = [encode(leaf, what, name) for leaf in leaves]
    results = call(*operands, *(array for array, _ in encoded))
    n = len(results) - len(encoded)
    given = [decode(y) for y, (_, decode) in zip(results[n:], encoded, strict=True)]
    return results[:n], jax.tree.unflatten(tree, given)

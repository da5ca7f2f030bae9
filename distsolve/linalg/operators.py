"""What a solver may multiply by, and functions as data.

A user's operator is traced once, into a program and the arrays that it closed over. With the arrays
as ordinary arguments, derivatives reach them, and a program that has been compiled serves new data:
a fresh lambda over fresh samples does not compile again.
"""

import enum
import functools
import sys
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core

from distsolve.linalg import arguments


def is_matrix(A):
    """Whether ``A`` is an array, and so a matrix."""
    return isinstance(A, (jax.Array, np.ndarray))


def is_sparse(A):
    """Whether ``A`` is a SciPy matrix; imports nothing, as most programs have none."""
    sparse = sys.modules.get("scipy.sparse")
    return sparse is not None and sparse.issparse(A)


def as_function(A, name, b, space, args=()):
    """Return the function ``p -> A p`` for a function, a matrix, or an object that supports `@`."""
    if is_sparse(A):
        raise TypeError(
            f"`{name}` is a SciPy matrix, which JAX cannot multiply with: got {type(A).__name__}. "
            "Make a `distsolve.DistributedCSR` of it."
        )
    check = getattr(A, "check_vector", None)  # of an operator that knows its vectors
    if check is not None:
        check(b, "`b`" if name in ("A", "M") else "a vector")
    check = getattr(A, "check_space", None)  # of one that knows where they live
    if check is not None:
        check(space, f"`{name}`")
    if callable(A):
        return (lambda p: A(p, *args)) if args else A
    if args:
        raise TypeError(
            f"`args` are handed to a function `{name}(p, *args)`: got {len(args)} of them with "
            f"{type(A).__name__}, which takes none. Pass a function."
        )
    if is_matrix(A):
        return _matrix(A, name, b, space)
    if hasattr(A, "__matmul__"):
        return lambda p: A @ p
    raise TypeError(
        f"`{name}` must be a function, a 2-d array, or an object that is callable or supports `@`: "
        f"got {type(A).__name__}. Wrap the product in a function of one vector."
    )


def _matrix(A, name, b, space):
    A, whole = jax.numpy.asarray(A), space.is_whole
    n = b.shape[0] if isinstance(b, jax.Array) and b.ndim == 1 else None
    if A.ndim != 2 or A.shape[0] != n or (A.shape[1] != n if whole else A.shape[1] < n):
        shape = "(n, n)" if whole else "(n, entries of `b` on all ranks)"
        found = f"one array of shape {b.shape}" if isinstance(b, jax.Array) else "a pytree"
        remedy = "Pass a function of one vector, or a matrix that fits."
        rows, columns = A.shape if A.ndim == 2 and n is not None else (0, 0)
        if not whole and rows == columns > (n or 0):
            remedy = (
                "It looks like the whole matrix: pass only this rank's rows of it, or for a sparse "
                "one `distsolve.DistributedCSR.from_whole(matrix)`."
            )
        elif not whole and rows < columns == n:
            remedy = f"`b` looks whole: pass only this rank's piece of it, {rows} entries."
        elif whole and rows == n and columns > rows:
            remedy = (
                "It looks like this rank's rows of a larger matrix: for vectors in pieces pass "
                "space=distsolve.Sharded()."
            )
        raise ValueError(
            f"`{name}`: expected a function, or for one array `b` of shape (n,) a matrix of shape "
            f"{shape}: got an array of shape {A.shape}, and `b` is {found}. {remedy}"
        )
    arguments.require_dtype_of_b(A, b, name)
    product = functools.partial(jax.numpy.matmul, A, precision=jax.lax.Precision.HIGHEST)
    if whole:
        return product
    offset = space.offset(n)
    return lambda p: product(space.assemble(p, offset, A.shape[1]))


class Incomparable(Exception):  # noqa: N818 - no fault: such a program is compiled anew
    """A program holds something whose equality with another cannot be told."""


class Program:
    """A traced function of ``(consts, p)``."""

    def __init__(self, jaxpr, out_tree):
        self.jaxpr, self.out_tree = jaxpr, out_tree

    def key(self, differentiable):
        """Return a hashable description: programs with equal ones compute the same.

        Custom derivative rules are functions made anew by each trace. Where the program may be
        differentiated they count, and a program with such a rule raises `Incomparable`, as does one
        with a Python callback.
        """
        return self.out_tree, _describe_jaxpr(self.jaxpr, differentiable)

    def __call__(self, consts, p):
        out = jax.core.eval_jaxpr(self.jaxpr, consts, *jax.tree.leaves(p))
        return jax.tree.unflatten(self.out_tree, out)


class Held(NamedTuple):
    """The program of an operator that is a pytree, kept as it is: a function of its leaves."""

    structure: Any

    def held(self, consts):
        """Return the operator with these leaves."""
        return jax.tree.unflatten(self.structure, consts)

    def key(self, differentiable):
        """Return a hashable description, as `Program.key`."""
        return self.structure

    def __call__(self, consts, p):
        return self.held(consts)(p)


def hold(A):
    """Return the program and the consts of an operator that is a pytree."""
    consts, structure = jax.tree.flatten(A)
    return Held(structure), consts


def trace(function, b):
    """Trace ``function`` at a vector like ``b``.

    Returns
    -------
    program : Program
    consts : list of arrays
        Everything that ``function`` closed over, tracers included.
    out : pytree of jax.ShapeDtypeStruct
    """
    # A function of its own for each trace: JAX would answer for the user's from its cache, although
    # an attribute that it reads may have changed since.
    closed, out = jax.make_jaxpr(lambda p: function(p), return_shape=True)(b)
    if _nested_consts(closed.jaxpr):
        flat = jax.make_jaxpr(lambda *p: _open_nested(closed.jaxpr, closed.consts, p))
        closed = flat(*jax.tree.leaves(b))
    return Program(closed.jaxpr, jax.tree.structure(out)), list(closed.consts), out


def _is_nested_jit(eqn):
    return eqn.primitive.name in ("jit", "pjit")


def _nested_consts(jaxpr):
    """Whether a nested jitted function holds arrays, which would pass for program text."""
    nested = [eqn.params["jaxpr"] for eqn in jaxpr.eqns if _is_nested_jit(eqn)]
    return any(closed.consts or _nested_consts(closed.jaxpr) for closed in nested)


def _open_nested(jaxpr, consts, args):
    """Evaluate ``jaxpr``, with nested jitted functions in line: their arrays become constants."""
    values = dict(zip(jaxpr.constvars, consts, strict=True))
    values.update(zip(jaxpr.invars, args, strict=True))

    def read(atom):
        return atom.val if isinstance(atom, core.Literal) else values[atom]

    for eqn in jaxpr.eqns:
        if _is_nested_jit(eqn):
            closed = eqn.params["jaxpr"]
            operands = [read(atom) for atom in eqn.invars]
            results = _open_nested(closed.jaxpr, closed.consts, operands)
        else:
            results = jax.core.eval_jaxpr(_alone(eqn, jaxpr), (), *map(read, _variables(eqn)))
        values.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _variables(eqn):
    """The variables that an equation reads, each once."""
    return list(dict.fromkeys(v for v in eqn.invars if not isinstance(v, core.Literal)))


def _alone(eqn, jaxpr):
    """Return a program of one equation: how an equation is evaluated differs between versions."""
    return jaxpr.replace(
        constvars=[],
        invars=_variables(eqn),
        outvars=list(eqn.outvars),
        eqns=[eqn],
        effects=eqn.effects,
        debug_info=jaxpr.debug_info._replace(arg_names=None, result_paths=None),
    )


def _describe_jaxpr(jaxpr, differentiable):
    numbers: dict[Any, int] = {}

    def name(atom):
        if isinstance(atom, core.Literal):
            return str(atom.aval), _describe_value(np.asarray(atom.val), differentiable)
        return numbers.setdefault(atom, len(numbers)), str(atom.aval)

    inputs = tuple(name(v) for v in (*jaxpr.constvars, *jaxpr.invars))
    equations = tuple(
        (
            eqn.primitive,
            tuple(name(v) for v in eqn.invars),
            tuple(name(v) for v in eqn.outvars),
            _describe_params(eqn, differentiable),
        )
        for eqn in jaxpr.eqns
    )
    return inputs, equations, tuple(name(v) for v in jaxpr.outvars)


def _describe_params(eqn, differentiable):
    params = eqn.params
    if not differentiable and eqn.primitive.name in ("custom_jvp_call", "custom_vjp_call"):
        params = {k: v for k, v in params.items() if k in ("call_jaxpr", "num_consts")}
    return tuple((key, _describe_value(params[key], differentiable)) for key in sorted(params))


def _describe_value(value, differentiable):
    if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
        inner = _describe_jaxpr(getattr(value, "jaxpr", value), differentiable)
        return inner, _describe_value(tuple(getattr(value, "consts", ())), differentiable)
    if isinstance(value, (tuple, list)):
        return type(value), tuple(_describe_value(v, differentiable) for v in value)
    if isinstance(value, dict):
        return tuple((k, _describe_value(value[k], differentiable)) for k in sorted(value))
    if isinstance(value, (np.ndarray, np.generic)) and value.size <= _SMALL:
        return value.dtype, value.shape, value.tobytes()
    if value is None or isinstance(value, (type, enum.Enum, core.Primitive, jax.sharding.Mesh)):
        return value  # one object for each value: equal means identical
    if type(value).__name__ == "UnspecifiedValue":
        return type(value)  # the sharding of what has none: a marker without state
    if type(value).__hash__ is object.__hash__ or type(value).__hash__ is None:
        raise Incomparable
    return type(value), value


_SMALL = 64  # entries of an array that may stand for itself in a description

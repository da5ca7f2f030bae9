"""The derivative of a solve: implicit, so it costs one more solve and stores no iteration.

    A x = b  =>  A x' + A' x = b'  =>  x' = A^-1 (b' - A' x)

The preconditioner, the start and the tolerances do not move the solution.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from distsolve.linalg import trees
from distsolve.linalg.info import Reason


class Adjoint(NamedTuple):
    """The program of the adjoint of a linear one, over ``Re <x, y>``."""

    program: Any

    def __call__(self, consts, p):
        # Over its real parts a complex linear function is a real one, whose transpose is this.
        function, like = _over_reals(lambda p: self.program(consts, p), p), trees.real_parts(p)
        (parts,) = jax.linear_transpose(function, like)(like)
        return trees.from_real_parts(parts, p)


def adjoint(program):
    """Return the program of the adjoint; that of the adjoint is the one it was made from."""
    return program.program if isinstance(program, Adjoint) else program and Adjoint(program)


def solve(run, symmetric, A, M, A_consts, M_consts, b, x0, stop):
    """Return ``run(A, M, A_consts, M_consts, b, x0, stop)``, ``(x, info)``, with a derivative.

    It is defined in ``A_consts`` and in ``b``. ``run`` also takes ``watched=False``, for solves
    that are not the user's own.
    """

    @jax.custom_jvp
    def solution(A_consts, M_consts, b, x0, stop):
        return run(A, M, A_consts, M_consts, b, x0, stop)

    @functools.partial(solution.defjvp, symbolic_zeros=True)
    def _(primals, tangents):
        A_consts, M_consts, _, _, stop = primals
        t_A_consts, _, t_b, _, _ = tangents
        x, info = solution(*primals)
        t_rhs = jax.tree.map(_instantiate, t_b, is_leaf=_is_zero)
        varied = [i for i, t in enumerate(t_A_consts) if not _is_zero(t)]
        if varied:

            def product(moved):
                consts = list(A_consts)
                for i, const in zip(varied, moved, strict=True):
                    consts[i] = const
                return A(consts, x)

            moved = [A_consts[i] for i in varied], [t_A_consts[i] for i in varied]
            _, t_A_x = jax.jvp(product, (moved[0],), (moved[1],))
            t_rhs = trees.subtract(t_rhs, t_A_x)
        t_stop = stop.relative(info)
        quiet = functools.partial(run, watched=False)

        def another(A, M, rhs):
            v, info = solve(quiet, symmetric, A, M, A_consts, M_consts, rhs, None, t_stop)
            return jax.tree.map(lambda leaf: jnp.where(unsolved(info), jnp.nan, leaf), v)

        forward = functools.partial(another, A, M)
        backward = forward if symmetric else functools.partial(another, adjoint(A), adjoint(M))
        t_x = linear_solve(lambda v: A(A_consts, v), forward, backward, t_rhs, symmetric)
        return (x, info), (t_x, jax.tree.map(no_tangent, info))

    return solution(A_consts, M_consts, b, x0, stop)


def unsolved(info):
    """Return whether a solve from zero stayed there, so that a derivative is NaN rather than 0."""
    tried = (info.iterations > 0) | (info.reason >= Reason.STAGNATED)
    stuck = (info.residual_norm == info.rhs_norm) & (info.reason != Reason.CONVERGED)
    return (tried & stuck) | ~jnp.isfinite(info.rhs_norm)


def linear_solve(A, forward, backward, rhs, symmetric):
    """Solve with a function that is linear in ``rhs`` and has a transpose.

    Over the real numbers a Hermitian operator is symmetric and its own transpose, at every order of
    differentiation and for any mixture of leaves; over the complex ones it is neither.
    """
    forward, backward = _over_reals(forward, rhs), _over_reals(backward, rhs)
    parts = jax.lax.custom_linear_solve(
        _over_reals(A, rhs),
        trees.real_parts(rhs),
        solve=lambda _, parts: forward(parts),
        transpose_solve=lambda _, parts: backward(parts),
        symmetric=symmetric,
    )
    return trees.from_real_parts(parts, rhs)


def _over_reals(function, like):
    return lambda parts: trees.real_parts(function(trees.from_real_parts(parts, like)))


def _is_zero(tangent):
    return isinstance(tangent, SymbolicZero)


def _instantiate(tangent):
    return jnp.zeros(tangent.shape, tangent.dtype) if _is_zero(tangent) else tangent


def no_tangent(x):
    floating = jnp.issubdtype(x.dtype, jnp.floating)
    return jnp.zeros_like(x) if floating else np.zeros(x.shape, jax.dtypes.float0)

"""A Cholesky solve that raises the shift where the matrix is not positive definite."""

import jax
import jax.numpy as jnp

from distsolve.linalg import derivative
from distsolve.linalg.space import Space
from distsolve.linalg.trees import HIGHEST

TRIES = 9
ROUNDING = 8  # a pivot of fewer units in the last place of its entry counts as zero
RUNNING, SOLVED, HOPELESS = 1, 0, 2


def solve(H: jax.Array, b: jax.Array, damping: jax.Array, space: Space):
    """Solve ``(H + damping + raised) x = b``, with ``raised`` 0 wherever that works.

    The derivative is implicit, by one more factorisation, and holds ``raised`` fixed.

    Parameters
    ----------
    H : (n, n) real symmetric or complex Hermitian, replicated
    b : (n,) of the same dtype, replicated
    damping : real scalar or (n,), replicated
        Added to the diagonal.
    space : Space
        Over whose ranks the copies are; they agree on whether the factor is good.

    Returns
    -------
    x : (n,), replicated
        Zero, and its derivative NaN, unless ``solved``.
    raised : real scalar, replicated
        What was added to the diagonal besides: 0, or nine times the damping and then ten times
        as much at each attempt, never less than rounding asks for.
    solved : bool, replicated
        False where no factor was good, a negative ``damping`` made the matrix indefinite, ``b`` is
        not finite, or an entry of ``b`` is not zero whose row of the matrix is, undamped.

    Communication
    -------------
    One tiny message for each attempt, at more than one rank; none for derivatives.
    """

    @jax.custom_jvp
    def solution(H, b, damping):
        return _search(H, b, damping, space)

    @solution.defjvp
    def _(primals, tangents):
        H, _, damping = primals
        t_H, t_b, t_damping = tangents
        x, raised, solved = solution(*primals)

        # (H + D) x = b  =>  (H + D) x' = b' - H' x - D' x
        S, idle = _damped(H, damping, raised)
        L = jax.lax.linalg.cholesky(S, symmetrize_input=False)
        t_H_x = jnp.matmul(t_H, x, precision=HIGHEST)
        rhs = jnp.where(idle, 0, t_b - t_H_x - t_damping.astype(x.dtype) * x)

        def multiply(v):
            return jnp.matmul(S, v, precision=HIGHEST)

        def another(rhs):
            return jax.scipy.linalg.cho_solve((L, True), rhs)

        t_x = derivative.linear_solve(multiply, another, another, rhs, symmetric=True)
        known = jnp.where(solved, 1, jnp.nan).astype(x.dtype)  # a factor: in reverse it is one, too
        unmoved = map(derivative.no_tangent, (raised, solved))
        return (x, raised, solved), (t_x * known, *unmoved)

    return solution(H, b, jnp.broadcast_to(damping, b.shape))


def _damped(H, damping, raised):
    """Return the matrix to factorise, and which entries are not in it.

    What nothing depends on and nothing damps stays where it is, and makes no other entry move.
    """
    idle = (jnp.real(jnp.diagonal(H)) == 0) & (damping == 0)
    # Not a scatter: a sum is fused with the copy that the factorisation overwrites.
    added = (damping + raised + idle.astype(damping.dtype)).astype(H.dtype)
    return jnp.where(jnp.eye(len(H), dtype=bool), H + added[None], H), idle


def _search(H, b, damping, space):
    """Return the solution with the least shift that gives a good factor."""
    diagonal = jnp.real(jnp.diagonal(H))
    eps = jnp.finfo(H.dtype).eps
    largest = jnp.max(jnp.abs(diagonal), initial=0) + jnp.max(jnp.abs(damping), initial=0)
    largest = jnp.where(largest == 0, jnp.ones_like(largest), largest)
    # Large enough that rounding, eps * largest, leaves some digits of the answer.
    least = float(eps) ** (2 / 3) * largest
    first = jnp.maximum(9 * jnp.max(jnp.abs(damping), initial=0), least)
    # A force on what nothing moves: where squares have underflowed.
    stuck = jnp.any(_damped(H, damping, 0)[1] & (b != 0))
    hopeful = ~stuck & jnp.isfinite(largest) & jnp.all(damping >= 0) & jnp.all(jnp.isfinite(b))

    def go_on(carry):
        _, _, verdict, tries = carry
        return (verdict == RUNNING) & (tries < TRIES)

    # The factor is not carried: a loop would keep one more matrix for it.
    def attempt(carry):
        _, raised, _, tries = carry
        more = jnp.where(tries == 0, jnp.zeros_like(raised), jnp.maximum(10 * raised, first))
        damped, idle = _damped(H, damping, more)
        L = jax.lax.linalg.cholesky(damped, symmetrize_input=False)
        x = jax.scipy.linalg.cho_solve((L, True), jnp.where(idle, 0, b))
        # A pivot that is all rounding would make x a large random vector.
        pivots = jnp.real(jnp.diagonal(L)) ** 2
        sound = pivots > ROUNDING * eps * jnp.real(jnp.diagonal(damped))
        good = ~stuck & jnp.all(jnp.isfinite(x)) & jnp.all(sound)
        failed = jnp.where(hopeful, RUNNING, HOPELESS)
        verdict = jnp.where(good, SOLVED, failed).astype(raised.dtype)
        return x, more, space.agree(verdict), tries + 1

    start = (
        jnp.zeros_like(b),
        jnp.zeros((), diagonal.dtype),
        jnp.full((), RUNNING, diagonal.dtype),
        jnp.zeros((), jnp.int32),
    )
    x, raised, verdict, _ = jax.lax.while_loop(go_on, attempt, start)
    solved = verdict == SOLVED
    return jnp.where(solved, x, 0), raised, solved

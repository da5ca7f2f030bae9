"""A Cholesky solve that raises the shift where the matrix is not positive definite."""

import jax
import jax.numpy as jnp

from distsolve.linalg.space import Space

TRIES = 9
ROUNDING = 8  # a pivot of fewer units in the last place of its entry counts as zero
RUNNING, SOLVED, HOPELESS = 1, 0, 2


def solve(H: jax.Array, b: jax.Array, damping: jax.Array, space: Space):
    """Solve ``(H + damping + raised) x = b``, with ``raised`` 0 wherever that works.

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
        NaN where no factor was good, or a negative ``damping`` made the matrix indefinite.
    raised : real scalar, replicated
        What was added to the diagonal besides: 0, or nine times the damping and then ten times
        as much at each attempt, never less than rounding asks for.

    Communication
    -------------
    One tiny message for each attempt, at more than one rank.
    """
    diagonal = jnp.real(jnp.diagonal(H))
    damping = jnp.broadcast_to(damping, diagonal.shape)
    # What nothing depends on and nothing damps stays where it is, and makes no other entry move.
    idle = (diagonal == 0) & (damping == 0)
    b, alone = jnp.where(idle, 0, b), idle.astype(diagonal.dtype)
    eps = jnp.finfo(H.dtype).eps
    largest = jnp.max(jnp.abs(diagonal), initial=0) + jnp.max(jnp.abs(damping), initial=0)
    largest = jnp.where(largest == 0, jnp.ones_like(largest), largest)
    # Large enough that rounding, eps * largest, leaves some digits of the answer.
    least = float(eps) ** (2 / 3) * largest
    first = jnp.maximum(9 * jnp.max(jnp.abs(damping), initial=0), least)

    def go_on(carry):
        _, _, verdict, tries = carry
        return (verdict == RUNNING) & (tries < TRIES)

    # The factor is not carried: a loop would keep one more matrix for it.
    def attempt(carry):
        _, raised, _, tries = carry
        more = jnp.where(tries == 0, jnp.zeros_like(raised), jnp.maximum(10 * raised, first))
        # Not a scatter: a sum is fused with the copy that the factorisation overwrites.
        added = (damping + more + alone).astype(H.dtype)
        damped = jnp.where(jnp.eye(len(b), dtype=bool), H + added[None], H)
        L = jax.lax.linalg.cholesky(damped, symmetrize_input=False)
        x = jax.scipy.linalg.cho_solve((L, True), b)
        # A pivot that is all rounding would make x a large random vector.
        pivots = jnp.real(jnp.diagonal(L)) ** 2
        sound = pivots > ROUNDING * eps * (diagonal + damping + more + alone)
        good = jnp.all(jnp.isfinite(x)) & jnp.all(sound)
        failed = jnp.where(jnp.isfinite(largest) & jnp.all(damping >= 0), RUNNING, HOPELESS)
        verdict = jnp.where(good, SOLVED, failed).astype(raised.dtype)
        return x, more, space.agree(verdict), tries + 1

    start = (
        jnp.zeros_like(b),
        jnp.zeros((), diagonal.dtype),
        jnp.full((), RUNNING, diagonal.dtype),
        jnp.zeros((), jnp.int32),
    )
    x, raised, verdict, _ = jax.lax.while_loop(go_on, attempt, start)
    return jnp.where(verdict == SOLVED, x, jnp.nan), raised

"""The randomised Nystrom preconditioner: the largest eigenvalues of an operator, from a sketch.

n entries of a vector on this rank, r the rank of the sketch. A = S + shift * I is the operator of
the solve, S positive semidefinite. A stack of vectors is stored by rows, (r, n): products with rows
are what XLA does well on CPUs.

Omega (r, n) Gaussian;  Y = S Omega (r, n);  C = Omega^H Y (r, r);  S ~ Y C^-1 Y^H = U diag(lam) U^H
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from distsolve.linalg import arguments, flat, operators, trees
from distsolve.linalg.space import Space


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Nystrom:
    """The preconditioner that `nystrom` makes; a pytree that acts on one vector.

    Attributes
    ----------
    vectors : (r, n) in the space of the vectors
        Approximate eigenvectors of S by rows, orthonormal; zeros where the rank of S was exhausted.
    eigenvalues : (r,) replicated
        Their eigenvalues, without the shift, largest first.
    shift : scalar, replicated
        The part of the operator that is a multiple of the identity.
    """

    vectors: jax.Array
    eigenvalues: jax.Array
    shift: jax.Array
    space: Space = dataclasses.field(metadata={"static": True})
    structure: Any = dataclasses.field(metadata={"static": True})

    @property
    def U(self) -> jax.Array:
        """The vectors as columns, (n, r)."""
        return self.vectors.T

    def __call__(self, x: Any) -> Any:
        """Return ``M x = U (lam_r + shift) / (lam + shift) U^H x + (x - U U^H x)``.

        Communication: one sum of r numbers for sharded vectors; none for replicated ones.
        """
        if flat.structure_of(x) != self.structure:
            raise ValueError(
                f"This Nystrom preconditioner was made for vectors like {self.structure}: got one "
                f"like {flat.structure_of(x)}. Make another one with `like=` a vector of the solve."
            )
        v = flat.ravel(x)
        weights = (self._scale() - 1).astype(v.dtype)
        inside = self.space.sum(_inner(self.vectors, v[None]))[:, 0]
        return flat.unravel(v + _combine((weights * inside)[:, None], self.vectors)[0], x)

    def with_shift(self, shift: ArrayLike) -> "Nystrom":
        """Return the preconditioner for the same S and another shift; no communication."""
        return dataclasses.replace(self, shift=_shift(shift, self.eigenvalues.dtype))

    def quality(self, operator: Any, key: jax.Array, *, probes: int = 4) -> jax.Array:
        """Return an estimate from below of the condition number of the preconditioned operator.

        With ``K = M^1/2 A M^1/2``, Gaussian ``g`` and random ``z`` in the span of the stored
        vectors it is ``max(<g, K^2 g> / <g, K g>, <z, K^2 z> / <z, K z>) <z, z> / <z, K z>``. What
        S has gained since the sketch raises the first factor; what it has lost raises the second.
        Right after the sketch it is 1 to 3, also where the rank is small, and it does not change
        when the operator is only scaled.

        Parameters
        ----------
        operator, key
            As for `nystrom`: the operator of the solve, and a key, the same on all ranks.
        probes : int
            How many ``g`` and how many ``z``; the operator acts on ``2 * probes`` vectors.

        Returns
        -------
        scalar, at least 1, equal on all ranks; infinity for an operator that is not positive
        definite or not finite.

        Communication
        -------------
        The operator's own messages for one product, as all vectors travel together. Replicated
        vectors: one message with one number. Sharded ones: three small messages.
        """
        _require_count(probes, "probes")
        w, squares = _probes(self, key, int(probes))
        Aw = _apply(operator, w, self.structure, self.space)
        return _estimate(self, w, Aw, squares)

    def aged(
        self, operator: Any, key: jax.Array, *, factor: ArrayLike = 10.0, probes: int = 4
    ) -> jax.Array:
        """Return whether `quality` exceeds ``factor``: time to make another preconditioner.

        Iterations grow at most like the square root of the condition number, so the default allows
        about three times as many. The growth of ``info.iterations`` from one solve of a sequence to
        the next is a signal that costs nothing; this one needs no solve, and does not confuse an
        aged preconditioner with a harder right-hand side.

        Parameters
        ----------
        operator, key, probes
            As for `quality`.
        factor : float

        Returns
        -------
        bool scalar, equal on all ranks, so that they can branch on it together.

        Communication
        -------------
        That of `quality`.
        """
        return ~(self.quality(operator, key, probes=probes) <= factor)

    def _tail(self):
        """lam_r + shift, or what rounding leaves of the largest if that is more.

        M has its smallest eigenvalue, tail / (lam_1 + shift), where the vectors are orthonormal to
        a few units of rounding only: below that it would not be definite.
        """
        lam = self.eigenvalues + self.shift
        rounding = 8 * len(lam) ** 0.5 * float(jnp.finfo(lam.dtype).eps)
        return jnp.maximum(lam[-1], rounding * lam[0])

    def _scale(self):
        """The eigenvalues of M on the stored vectors: (lam_r + shift) / (lam + shift) <= 1."""
        tail = self._tail()
        ratio = tail / jnp.where(tail > 0, jnp.maximum(self.eigenvalues + self.shift, tail), 1)
        return jnp.where(tail == 0, jnp.ones_like(ratio), ratio)


def nystrom(
    operator: Any,
    rank: int,
    key: jax.Array,
    *,
    shift: ArrayLike | None = None,
    space: Space | None = None,
    like: Any = None,
) -> Nystrom:
    """Return the randomised Nystrom preconditioner of an operator, for a solver's ``M=``.

    The equation is ``M = U (lam_r + shift) (lam + shift)^-1 U^H + (I - U U^H)``, where
    ``U lam U^H`` approximates ``S`` in ``A = S + shift * I``, from ``A`` times ``rank`` random
    vectors. Where ``rank`` exceeds about twice the number of eigenvalues of ``S`` above the
    shift, the preconditioned condition number is a small constant.

    Parameters
    ----------
    operator : callable, matrix, or object that supports ``@``
        ``A`` exactly as the solver gets it, with its shift inside, Hermitian positive semidefinite.
        It acts on one vector and is mapped over all of them by `jax.vmap`.
    rank : int
        r, the number of products and of vectors stored. More than n does no harm.
    key : jax.random key, replicated
        Must be the same on all ranks. Entry i of a sharded array meets the same random numbers on
        any number of ranks.
    shift : float, optional
        The part of ``operator`` that is a multiple of the identity, at least 0; by default the
        attribute ``operator.shift`` if there is one, as in `Gram` (its smallest entry if it has
        several), else 0.
    space : Space, optional
        Where the vectors live; `Replicated` by default.
    like : pytree, optional
        A vector of the solve, such as ``b`` (values do not matter); by default one array of the
        operator's ``dtype`` and as many entries as it has rows, for a matrix or a `Gram`. Leaves of
        several dtypes are sketched as the real arrays they consist of.

    Returns
    -------
    Nystrom
        A pytree; usable over a sequence of solves, see `Nystrom.with_shift` and `Nystrom.aged`.

    Raises
    ------
    TypeError, ValueError
        While tracing, before any message is sent, for arguments that cannot work.

    Communication
    -------------
    The operator's own messages for one product: those of all ``rank`` products travel together.
    Replicated vectors: nothing else. Sharded ones: four more messages, of one number, twice of
    ``rank^2`` and once of ``2 rank^2`` numbers. Each application of the result: see `Nystrom`.

    References
    ----------
    Frangella, Tropp and Udell (2023), doi:10.1137/21M1466244. Ours: eigenvalues of r x r matrices
    of inner products in place of QR, Cholesky and SVD, as these are what reduces over ranks and
    what stands any rank. The vectors are rotated to the eigenvectors of C before their inner
    products are taken, which keeps small eigenvalues accurate, and made orthonormal twice.

    Examples
    --------
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from distsolve.linalg import cg, nystrom
    >>> spectrum = jnp.where(jnp.arange(300) < 10, 1e4, 1.0)
    >>> A = lambda p: spectrum * p
    >>> b = jnp.sin(jnp.arange(300.0))
    >>> M = nystrom(A, 20, jax.random.key(0), shift=1.0, like=b)
    >>> bool(cg(A, b, M=M)[1].iterations <= 2)
    True
    """
    _require_count(rank, "rank")
    _require_key(key)
    space = arguments.space(space)
    like = _default_like(operator) if like is None else arguments.as_vector(like, "like")
    structure = flat.structure_of(like)
    v = jax.eval_shape(flat.ravel, like)
    if shift is None:
        # One for each parameter contains the smallest of them as a multiple of the identity.
        shift = jnp.min(jnp.asarray(getattr(operator, "shift", 0.0)))
    mu = _shift(shift, trees.scalar_dtype(like))
    omega = _gaussian(key, int(rank), v.size, v.dtype, space)
    Y = _apply(operator, omega, structure, space)
    vectors, eigenvalues = _eigenpairs(omega, Y, mu, trees.epsilon(like), space)
    return Nystrom(vectors, eigenvalues, mu, space, structure)


@functools.partial(jax.jit, static_argnames=("eps", "space"))
def _eigenpairs(omega, Y, shift, eps, space):
    """Return the eigenpairs of the Nystrom approximation of S, from ``Y = (S + shift) Omega``."""
    rank = len(omega)
    real = jnp.finfo(omega.dtype).dtype
    noise = rank * eps
    # The local norms add up to at least the global one, and to at most sqrt(ranks) times it.
    size = trees.norm(Y).astype(omega.dtype)
    Y = Y - shift.astype(omega.dtype) * omega
    W, C, size = _sum_together([_inner(omega, omega), _inner(omega, Y), size], space)

    # Orthonormal combinations of Omega's vectors; those that are missing, as rank > n, are zero.
    w, Q = jnp.linalg.eigh(W)
    there = w > noise * w[-1]
    T = Q * _inverse_root(w, there)[None].astype(Q.dtype)
    nu = eps * size.real * jnp.max(_inverse_root(w, there))
    c, Z = jnp.linalg.eigh(_product(T.conj().T, _product(C, T)))
    c = jnp.maximum(c, 0) + nu
    # The shift nu, of the size of the rounding errors of Y, makes C safe to divide by.
    TZ = _product(T, Z)
    Y = _combine(TZ, Y) + nu.astype(omega.dtype) * _combine(TZ, omega)
    B = _inverse_root(c, c > 0).astype(Y.dtype)[:, None] * Y

    s, V = jnp.linalg.eigh(space.sum(_inner(B, B)))
    alive = s - nu > noise * s[-1]
    U = _combine(V * _inverse_root(s, alive)[None].astype(V.dtype), B)
    # U^H U = 1 + E, with a small E: U (1 + E)^-1/2 is orthonormal and the nearest to U.
    dead = jnp.diag((~alive).astype(omega.dtype))
    e, R = jnp.linalg.eigh(space.sum(_inner(U, U)) + dead)
    U = _combine(_product(R * _inverse_root(e, e > 0)[None].astype(R.dtype), R.conj().T), U)

    lam = jnp.where(alive, s - nu, 0)[::-1].astype(real)
    # What Omega could not see must not pass for a zero of S.
    seen = jnp.sum(there)
    last = jnp.max(jnp.where(jnp.arange(rank) == seen - 1, lam, 0))
    lam = jnp.where(jnp.arange(rank) < seen, lam, last)
    return U[::-1], lam


@functools.partial(jax.jit, static_argnames="count")
def _probes(M, key, count):
    """Return ``w = M^1/2 v`` for the g and the z, (2 count, n), and ``<v, v>`` on this rank."""
    U, dtype = M.vectors, M.vectors.dtype
    root = jnp.sqrt(M._scale())[:, None].astype(dtype)
    g_key, z_key = jax.random.split(key)
    g = _gaussian(g_key, count, U.shape[1], dtype, M.space)
    z = jax.random.normal(z_key, (len(U), count), dtype)
    z = jnp.where((M.eigenvalues > 0)[:, None], z, jnp.zeros_like(z))
    inside = M.space.sum(_inner(U, g))
    w = jnp.concatenate([g + _combine((root - 1) * inside, U), _combine(root * z, U)])
    return w, (_rows(g, g), _rows(z.T, z.T))


@jax.jit
def _estimate(M, w, Aw, squares):
    """Return `Nystrom.quality` from probes; sums over the g and over the z are two numbers each."""
    tail, alive = M._tail(), jnp.any(M.eigenvalues > 0)
    Aw = Aw / jnp.where(tail > 0, tail, jnp.ones_like(tail)).astype(Aw.dtype)
    gg, zz = squares
    local = [_rows(w, Aw), _rows(Aw, Aw), gg, _inner(M.vectors, Aw)]
    first, AwAw, gg, inside = _sum_together(local, M.space)  # <v, K v> is the first
    # <v, K^2 v> = <A w, M A w>
    second = AwAw.real + jnp.sum((M._scale() - 1)[:, None] * jnp.abs(inside) ** 2, axis=0)
    squares = jnp.concatenate([gg, zz])
    first, second, squares = (
        jnp.sum(x.real.reshape(2, -1), axis=1) for x in (first, second, squares)
    )
    upper = jnp.max(trees.safe_ratio(second, first))
    g_mean, z_mean = trees.safe_ratio(first, squares)
    lower = jnp.where(alive, z_mean, g_mean)
    sound = jnp.all(jnp.isfinite(second)) & (lower > 0) & (tail > 0)
    ratio = jnp.where(sound, trees.safe_ratio(upper, lower), jnp.full_like(lower, jnp.inf))
    nothing = ~alive & (second[0] == 0)  # a zero operator then and now
    return M.space.decide(jnp.where(nothing, 1, jnp.maximum(ratio, 1)))


def _inverse_root(x, where):
    return jnp.where(where, jax.lax.rsqrt(jnp.where(where, x, 1)), jnp.zeros_like(x))


def _product(x, y):
    return jnp.matmul(x, y, precision=trees.HIGHEST)


def _inner(x, y):
    """Return ``<x_i, y_j>`` for two stacks of vectors, over the entries on this rank."""
    return _product(x.conj(), y.T)


def _combine(coefficients, x):
    """Return the stack of ``sum_j coefficients_ji x_j``."""
    return _product(coefficients.T, x)


def _rows(x, y):
    """Return ``<x_i, y_i>``."""
    return jnp.sum(x.conj() * y, axis=1)


def _sum_together(arrays, space):
    """Return the sums of arrays of one dtype, in one message."""
    total = space.sum(jnp.concatenate([x.ravel() for x in arrays]))
    stops = np.cumsum([x.size for x in arrays])[:-1].tolist()
    parts = jnp.split(total, stops)
    return [part.reshape(x.shape) for part, x in zip(parts, arrays, strict=True)]


@functools.partial(jax.jit, static_argnames=("count", "n", "dtype", "space"))
def _gaussian(key, count, n, dtype, space):
    """Return ``count`` Gaussian vectors; entry i of a whole one depends on i and the key only."""
    places = space.offset(n) + jnp.arange(n, dtype=jnp.int32)
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, places)
    return jax.vmap(lambda key: jax.random.normal(key, (count,), dtype), out_axes=1)(keys)


def _apply(operator, vectors, structure, space):
    """Return the operator's products with a stack of vectors: one call of each primitive in it."""
    like = flat.vector_of(structure)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)
    function = operators.as_function(operator, "operator", zeros, space)

    def product(v):
        out = function(flat.unravel(v, like))
        remedy = "`operator` must map a vector like `like` to one like it."
        arguments.require_same(out, like, "`operator(v)`", remedy)
        return flat.ravel(out)

    return jax.vmap(product)(vectors)


def _require_count(value, name):
    if not arguments.is_int(value):
        raise TypeError(f"`{name}` must be an integer: got {value!r}. Pass a Python int.")
    if value < 1:
        raise ValueError(f"`{name}` must be at least 1: got {value}.")


def _require_key(key):
    """Raise unless this is one key for random numbers, new or old style."""
    is_array = hasattr(key, "shape") and hasattr(key, "dtype")
    is_new = is_array and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if not is_array or key.ndim != (0 if is_new else 1) or not (is_new or key.dtype == np.uint32):
        found = f"{key.dtype} of shape {key.shape}" if is_array else type(key).__name__
        raise TypeError(
            f"`key` must be one key, the same on all ranks: got {found}. Pass jax.random.key(seed)."
        )


def _shift(given, dtype):
    value = arguments.array(given, "shift")
    if value.shape != () or jnp.issubdtype(value.dtype, jnp.complexfloating):
        raise TypeError(
            f"`shift` must be one real number: got {value.dtype} of shape {value.shape}. Other "
            "diagonal terms belong to `operator` and need no mention."
        )
    if not isinstance(given, jax.core.Tracer) and not 0 <= given < np.inf:
        raise ValueError(
            f"`shift` must be at least 0 and finite: got {given}. It is the multiple of the "
            "identity that `operator` contains; 0 if there is none."
        )
    return value.astype(dtype)


def _default_like(operator):
    """Return a vector of the operator's dtype: a sharded matrix has as many rows as its vectors."""
    shape, dtype = getattr(operator, "shape", None), getattr(operator, "dtype", None)
    entries = shape[0] if shape else getattr(operator, "size", None)
    if entries is None or dtype is None:
        raise ValueError(
            f"`like` must be a vector of the solve, as `operator`, a {type(operator).__name__}, "
            "has no shape and dtype: got None. Pass like=b."
        )
    if not jnp.issubdtype(dtype, jnp.inexact):
        raise TypeError(
            f"`operator` must be of real or complex floats: got {dtype}. Convert it, for example "
            "with .astype(float)."
        )
    return jax.ShapeDtypeStruct((entries,), jnp.dtype(dtype))

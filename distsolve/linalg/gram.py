"""The matrix of stochastic reconfiguration as an operator: one message for each product.

N samples on all ranks, n of them here, P parameters; J (n, P) the rows here, centred; w their
weights, 1 each by default, and N their sum over all ranks:

    C = J^H w J / N,    S = C + shift + diag_scale * diag(C).

The vectors that S acts on are replicated. Nothing is centred in a product, and N is not known while
tracing: it travels in the product's own message.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from distsolve.linalg import arguments, gram_product, trees
from distsolve.linalg.jacobian import check_weights, mean_of, safe
from distsolve.linalg.space import Sharded, Space
from distsolve.linalg.trees import HIGHEST


class SRMatrix:
    """What both forms of S share: damping, and the one message of a product.

    A pytree: the fields in ``DATA`` are its leaves, those in ``STATIC`` are compared by value.
    """

    DATA: tuple[str, ...] = ()
    STATIC: tuple[str, ...] = ()
    rows: Space
    shift: jax.Array
    diag_scale: jax.Array | None
    diagonal: jax.Array | None
    weights: jax.Array | None

    def tree_flatten(self):
        """Return the fields that are data, and the others."""
        data, static = ([getattr(self, f) for f in fields] for fields in (self.DATA, self.STATIC))
        return data, tuple(static)

    @classmethod
    def tree_unflatten(cls, static, data):
        """Return the operator again, without what its construction does."""
        self = object.__new__(cls)
        for name, value in zip(cls.DATA + cls.STATIC, (*data, *static), strict=True):
            setattr(self, name, value)
        return self

    def _damp(self, shift, diag_scale):
        """Set the damping; the diagonal it may need is one message."""
        real = self.real_dtype
        self.shift = arguments.real_array(shift, "shift", real, (), (self.size,))
        self.diag_scale = self.diagonal = None
        if not arguments.is_plain_zero(diag_scale):
            self.diag_scale = arguments.real_array(diag_scale, "diag_scale", real, ())
            self.diagonal = self._gram_diagonal()

    @property
    def size(self) -> int:
        """The number of parameters P."""
        raise NotImplementedError

    @property
    def real_dtype(self) -> Any:
        """The dtype of real numbers as precise as the matrix."""
        raise NotImplementedError

    def _local(self, V, tail, backward):
        """Return this rank's part of C N V, as `gram_product` does, with more behind the tail.

        ``backward`` as for `product`; of no use where no rows are stored.
        """
        raise NotImplementedError

    def _finish(self, U, rest):
        """Return the sum over ranks of C N V from that of `_local`."""
        return U

    def _fold(self, function, start):
        """Return ``start`` after ``start = function(start, rows of J, their weights)``."""
        raise NotImplementedError

    def product(
        self, V: jax.Array, extra: jax.Array, backward: Any = False
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Multiply several vectors, and sum what has to travel with them.

        Parameters
        ----------
        V : (k, P) array, replicated
            Real vectors for the complex ``J`` of real parameters.
        extra : (m,) real array
            This rank's own scalars.
        backward : bool scalar
            Whether to read J from its last rows on, what is in the cache after a product from the
            first rows on.

        Returns
        -------
        S V : (k, P), replicated
        quadratic : (k,) real, replicated
            ``V_c^H S V_c``, from the norms ``||J V_c||^2``: never negative without a shift that is.
        total : (m,), replicated
            ``extra`` summed over the ranks.

        Communication
        -------------
        One message.
        """
        U, quadratic, total = self.undamped_product(V, extra, backward)
        return *self.damped(V, U, quadratic), total

    def undamped_product(
        self, V: jax.Array, extra: jax.Array, backward: Any = False
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return what `product` does for C, the matrix without damping; one message."""
        if V.ndim != 2:
            raise ValueError(f"expected vectors of shape (k, {self.size}): got {V.shape}.")
        self._check(V.shape[1], V.dtype, "a vector")
        k, P = V.shape
        here = jnp.asarray(self._weight_here(), self.real_dtype)
        tail = jnp.concatenate([here[None], extra])
        summed = self.rows.sum(self._local(self.rows.enter(V), tail, backward))
        U, norms, rest = gram_product.unpack(summed, k, P, V.dtype)
        N = safe(rest[0])
        U = self._finish(U, rest[len(tail) :]) / N.astype(V.dtype)
        return U, norms / N, rest[1 : len(tail)]

    def damped(
        self, V: jax.Array, U: jax.Array, quadratic: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return ``S V`` and ``V^H S V`` from ``C V`` and ``V^H C V``; no communication."""
        damping = jnp.broadcast_to(self._damping(self.diagonal), V.shape[1:]).astype(V.dtype)
        # One by one: XLA makes a slow product of matrices of the sum over the rows of an array.
        added = [trees.vdot(damping * v, v) for v in V]
        return U + damping[None] * V, quadratic + jnp.array(added, quadratic.dtype)

    def __matmul__(self, v: Any) -> Any:
        """Return ``S v``, for ``v`` (P,) or a pytree of P numbers in the order of its leaves.

        Communication: one message.
        """
        self.check_vector(v, "a vector")
        none = jnp.zeros(0, self.real_dtype)
        row, shaped = ravel_pytree(v)
        product, _, _ = self.product(row[None], none)
        return shaped(product[0])

    def __call__(self, v: Any) -> Any:
        """Return ``S v``; the same as ``S @ v``."""
        return self @ v

    def diag(self) -> jax.Array:
        """Return the diagonal of S: (P,) real, replicated.

        Communication: one message; none with ``diag_scale``, for which it is there already.
        """
        diagonal = self._gram_diagonal() if self.diagonal is None else self.diagonal
        return diagonal + self._damping(self.diagonal)

    def dense(self, dtype: Any = None) -> jax.Array:
        """Return S as a matrix on vectors of ``dtype``: (P, P) replicated.

        A real ``dtype`` for complex ``J`` gives ``Re(J^H J)``; by default the dtype of ``J``.

        Communication: one `sum_symmetric` of the matrix, in place, and one number.
        """
        dtype = jnp.dtype(self.dtype if dtype is None else dtype)
        H = self.rows.sum_symmetric(self.dense_here(dtype))
        N = self.rows.sum(jnp.asarray(self._weight_here(), dtype))
        damping = jnp.broadcast_to(self._damping(self.diagonal), (self.size,))
        diagonal = jnp.arange(self.size)
        return (H / safe(N)).at[diagonal, diagonal].add(damping.astype(dtype))

    def dense_here(self, dtype: Any) -> jax.Array:
        """Return this rank's part ``J^H w J`` of N C, for vectors of ``dtype``: (P, P), sharded."""
        real_vectors = not jnp.issubdtype(dtype, jnp.complexfloating)

        def add(H, J, weights):
            if jnp.iscomplexobj(J) and real_vectors:  # one product: H exists once
                J, weights = jnp.concatenate([J.real, J.imag]), jnp.concatenate([weights, weights])
            weighted = J * weights[:, None].astype(J.dtype)
            contract = (((0,), (0,)), ((), ()))
            return H + jax.lax.dot_general(J.conj(), weighted, contract, precision=HIGHEST)

        return self._fold(add, jnp.zeros((self.size, self.size), dtype))

    @property
    def dtype(self) -> Any:
        """The dtype of the rows of J."""
        raise NotImplementedError

    def check_vector(self, v: Any, name: str) -> None:
        """Raise unless ``v`` is a vector that S acts on; the message calls it ``name``."""
        leaves = jax.tree.leaves(v)
        if len({leaf.dtype for leaf in leaves}) != 1:
            raise TypeError(
                f"{name} must have leaves of one dtype: got {[str(x.dtype) for x in leaves]}. "
                "Convert them."
            )
        self._check(sum(leaf.size for leaf in leaves), leaves[0].dtype, name)

    def _check(self, entries, dtype, name):
        if entries != self.size:
            raise ValueError(
                f"{name} must have as many entries as there are parameters, {self.size}: got "
                f"{entries}. Numbers for each sample, e, must be projected first: J^H e / N, over "
                "all ranks; `natural_gradient(J, e)` does that, too."
            )
        dtypes = self._vector_dtypes()
        if dtype in dtypes:
            return
        remedy = f"Convert it to {next(iter(dtypes))}."
        if jnp.issubdtype(dtype, jnp.complexfloating) and not any(
            jnp.issubdtype(wanted, jnp.complexfloating) for wanted in dtypes
        ):
            remedy = f"S acts on real vectors here: take the real part of {name}."
        raise TypeError(
            f"{name} must have the dtype {' or '.join(map(str, dtypes))}, as nothing is cast "
            f"silently: got {dtype}. {remedy}"
        )

    def _vector_dtypes(self):
        raise NotImplementedError

    def _damping(self, diagonal):
        return self.shift if diagonal is None else self.shift + self.diag_scale * diagonal

    def _weight_here(self):
        raise NotImplementedError

    def _gram_diagonal(self):
        """Return diag(C) (P,); one message."""

        def add(sums, J, weights):
            return sums + jnp.matmul(weights, trees.squared(J), precision=HIGHEST)

        sums = self._fold(add, jnp.zeros(self.size, self.real_dtype))
        return mean_of(sums, jnp.asarray(self._weight_here(), sums.dtype), self.rows)


@jax.tree_util.register_pytree_node_class
class Gram(SRMatrix):
    """The matrix of stochastic reconfiguration from stored log-derivatives.

    ``S = J^H w J / N + shift + diag_scale diag(J^H w J / N)``, with N the sum of all weights.

    ``G @ v`` and ``G(v)`` are products, ``G.diag()`` and ``G.dense()`` parts of it. It is a pytree:
    `jax.jit` takes it as an argument, and a new ``J``, shift or weight compiles nothing anew.

    Parameters
    ----------
    J : (n, P) float32, float64, complex64 or complex128, sharded by rows
        Centred already, see `center`. Vectors have its dtype, or for the complex ``J`` of real
        parameters are real; then ``S = Re(J^H w J) / N + ...``.
    shift : real scalar, or (P,) replicated
        Added to the diagonal.
    diag_scale : real scalar
        How much of the diagonal of ``J^H w J / N`` is added to it. Anything but the Python number
        0 costs one message here, at construction, and none later.
    rows : Space
        Over which ranks the rows are spread; `Sharded` by default. Vectors are replicated.
    weights : (n,) real of J's precision, sharded, optional
        Not negative; 1 each by default. They need not sum to 1.

    Raises
    ------
    TypeError, ValueError
        While tracing: shapes or dtypes that do not fit. Nothing is cast silently.

    Communication
    -------------
    One message for each product, of k P + k + 1 numbers for k vectors.

    References
    ----------
    Sorella (1998), doi:10.1103/PhysRevLett.80.4558.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from distsolve import Gram
    >>> G = Gram(jnp.array([[1.0, 2.0], [-1.0, -2.0]]), shift=0.5)  # the same rows on each rank
    >>> (G @ jnp.array([1.0, 0.0])).tolist()
    [1.5, 2.0]
    """

    DATA = ("J", "shift", "diag_scale", "diagonal", "weights")
    STATIC = ("rows",)
    J: jax.Array

    def __init__(
        self,
        J: jax.Array,
        shift: Any = 0.0,
        diag_scale: Any = 0.0,
        rows: Space | None = None,
        weights: jax.Array | None = None,
    ) -> None:
        self.J = arguments.log_derivatives(J)
        self.rows = arguments.space(rows, Sharded, "rows")
        self.weights = check_weights(weights, len(self.J), self.real_dtype)
        self._damp(shift, diag_scale)

    @property
    def size(self) -> int:
        """The number of parameters P."""
        return int(self.J.shape[1])

    @property
    def dtype(self) -> Any:
        """The dtype of J."""
        return self.J.dtype

    @property
    def real_dtype(self) -> Any:
        """The dtype of real numbers as precise as J."""
        return jnp.finfo(self.J.dtype).dtype

    def _vector_dtypes(self):
        return dict.fromkeys((self.J.dtype, self.real_dtype))

    def _weight_here(self):
        return len(self.J) if self.weights is None else self.weights.sum()

    def _local(self, V, tail, backward):
        return gram_product.gram_product(self.J, V, tail, self.weights, backward)

    def _fold(self, function, start):
        ones = jnp.ones(len(self.J), self.real_dtype)
        return function(start, self.J, ones if self.weights is None else self.weights)

"""The distributed sparse matrix against SciPy: rows split unevenly, empty ranks, odd rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from linalg.solves import messages, several
from spmd import agree, assert_allclose, assert_equal, ranks

from distsolve.linalg import DistributedCSR, Sharded, block_jacobi, cg, gmres, jacobi, minres
from distsolve.linalg.ellpack import PADDING, pack

N = 40
# Compiled, as one program each: operation by operation JAX takes seconds.
product_and_diagonal = jax.jit(lambda A, x: (A @ x, A.diag()))
product = jax.jit(lambda A, x: A @ x)


def pieces(kind):
    """Return the first row of each rank, and the end."""
    size = ranks().size
    if kind == "empty" and size > 1:  # rank 1 has no rows
        return [
            0,
            N // 2,
            *[N // 2 + (N - N // 2) * (r - 1) // (size - 1) for r in range(2, size + 1)],
        ]
    return [N * r * (r + 1) // (size * (size + 1)) for r in range(size + 1)]


@functools.cache
def random_matrix(kind, dtype=np.float64):
    """A matrix that every rank builds whole, with rows of very different lengths."""
    random = np.random.default_rng(4)
    dense = random.standard_normal((N, N)) * (random.random((N, N)) < 0.1)
    dense[5] = random.standard_normal(N)  # one full row
    dense[7] = 0  # and an empty one
    dense[N - 9 :, ::2] = 1.5  # a group of rows of another length
    if np.issubdtype(dtype, np.complexfloating):
        dense = dense * np.exp(1j * random.random((N, N)))
    if kind == "no_halo":  # the rows of rank 0 need nothing of the others, who need what it has
        cut = pieces(kind)[1]
        dense[:cut, cut:] = 0
    return scipy.sparse.csr_array(dense.astype(dtype))


def split(kind, matrix):
    """Return this rank's rows, as a slice, and the distributed matrix."""
    starts = pieces(kind)
    mine = slice(starts[ranks().rank], starts[ranks().rank + 1])
    return mine, DistributedCSR.from_rows(matrix[mine])


def vector(dtype=np.float64, seed=6):
    random = np.random.default_rng(seed)
    x = random.standard_normal(N)
    return (x + 1j * random.standard_normal(N)).astype(dtype) if np.dtype(dtype).kind == "c" else x


@pytest.mark.parametrize("kind", ["uneven", "empty", "no_halo"])
@pytest.mark.parametrize("dtype", [np.float64, np.complex128])
def test_product_is_that_of_scipy(kind, dtype):
    matrix, x = random_matrix(kind, dtype), vector(dtype)
    mine, A = split(kind, matrix)
    agree(A.shape == (N, N) and A.rows == range(mine.start, mine.stop) and A.dtype == dtype)
    y, diagonal = product_and_diagonal(A, jnp.asarray(x[mine]))
    assert_allclose(y, (matrix @ x)[mine], atol=1e-13)
    assert_equal(diagonal, matrix.diagonal()[mine])
    agree(abs(A.local_block() - matrix[mine, mine]).max() == 0 if y.size else True)


def test_same_matrix_from_one_rank_and_from_all():
    matrix, x = random_matrix("uneven"), vector()
    root = ranks().size - 1
    whole = DistributedCSR.from_whole(matrix)
    sent = DistributedCSR.scatter(matrix if ranks().rank == root else None, root=root)
    agree(whole.layout == sent.layout)
    mine = slice(whole.rows.start, whole.rows.stop)
    y = product(whole, jnp.asarray(x[mine]))
    assert_allclose(y, (matrix @ x)[mine], atol=1e-13)
    assert_equal(product(sent, jnp.asarray(x[mine])), y)
    agree(sum(whole.counts) == N and whole.counts[ranks().rank] == len(whole.rows))


def test_fault_of_one_rank_is_raised_on_all():
    matrix, last = random_matrix("uneven"), ranks().size - 1
    bad = matrix.astype(int)
    calls = (
        lambda: DistributedCSR.scatter(bad if ranks().rank == last else None, root=last),
        lambda: DistributedCSR.from_whole(bad if ranks().rank == last else matrix),
        lambda: DistributedCSR.from_rows((bad if ranks().rank == last else matrix)[:0]),
    )
    for call in calls:
        error, text = (TypeError, "int64") if ranks().rank == last else (ValueError, f"rank {last}")
        with pytest.raises(error, match=text):
            call()


def test_new_values_run_the_same_program():
    matrix, x = random_matrix("uneven"), vector()
    compiled = []
    for factor in (1.0, 3.0):
        mine, A = split("uneven", matrix * factor)
        y = product(A, jnp.asarray(x[mine]))
        assert_allclose(y, factor * (matrix @ x)[mine], atol=1e-13)
        compiled.append(product._cache_size())
    agree(compiled[0] == compiled[1], f"{compiled}")


def test_derivatives_and_vmap():
    matrix, x, w = random_matrix("uneven"), vector(), vector(seed=7)
    mine, A = split("uneven", matrix)

    # Each rank's share of w^T A x: its gradient sums over the rows of all ranks.
    @jax.jit
    def both(A, x, w):
        share = jax.grad(lambda x: jnp.vdot(w, A @ x))
        return share(x), jax.vmap(lambda x: A @ x)(jnp.stack([x, w]))

    gradient, products = both(A, jnp.asarray(x[mine]), jnp.asarray(w[mine]))
    assert_allclose(gradient, (matrix.T @ w)[mine], atol=1e-13)
    assert_allclose(products[1], (matrix @ w)[mine], atol=1e-13)


def test_one_message_a_product():
    mine, A = split("uneven", random_matrix("uneven"))
    x = jnp.asarray(vector()[mine])
    _, made = messages(product, A, x)
    agree(made == several(), f"{made} messages")


def test_nan_stays_in_the_rows_that_read_it():
    matrix, x = random_matrix("uneven"), vector()
    mine, A = split("uneven", matrix)
    x[0] = np.nan
    spoilt = matrix.toarray()[:, 0] != 0
    spoilt[0] = True  # rows are filled up with their own entry
    got = np.isnan(np.asarray(product(A, jnp.asarray(x[mine]))))
    agree(not got[~spoilt[mine]].any() and got[matrix.toarray()[mine, 0] != 0].all(), f"{got}")


def test_no_message_where_no_rank_has_a_halo():
    mine, A = split("uneven", scipy.sparse.diags_array(np.arange(1.0, N + 1)).tocsr())
    agree(not A.layout.is_split)
    assert_equal(product(A, jnp.ones(mine.stop - mine.start)), np.arange(1.0, N + 1)[mine])


@functools.cache
def hermitian(dtype):
    """A positive definite matrix, and the indefinite one that a shift makes of it."""
    part = random_matrix("uneven", dtype)
    spd = scipy.sparse.csr_array(part.conj().T @ part + 0.5 * scipy.sparse.eye_array(N))
    return spd, scipy.sparse.csr_array(spd - 1.7 * scipy.sparse.eye_array(N).astype(dtype))


SOLVES = {
    "cg_complex": (cg, 0, np.complex128, lambda A: jacobi(A.diag().real)),
    "block_jacobi": (cg, 0, np.float64, lambda A: block_jacobi(A.local_block(), 4)),
    "minres": (minres, 1, np.float64, lambda A: None),
    "gmres": (gmres, 1, np.complex128, lambda A: None),
}


@pytest.mark.parametrize("name", SOLVES)
def test_solvers_take_it(name):
    solver, which, dtype, preconditioner = SOLVES[name]
    matrix, b = hermitian(dtype)[which], vector(dtype)
    mine, A = split("uneven", matrix)
    M = preconditioner(A)
    x, info = solver(A, jnp.asarray(b[mine]), tol=1e-11, maxiter=2000, M=M, space=Sharded())
    agree(info.converged, info.message)
    assert_allclose(x, np.linalg.solve(matrix.toarray(), b)[mine], rtol=1e-7, atol=1e-7)


@pytest.mark.once
def test_rectangles_hold_little_more_than_the_entries():
    random = np.random.default_rng(8)
    lengths = (random.pareto(1.0, 3000) * 3).astype(int).clip(0, 3000)
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    indices = np.concatenate([np.arange(n) for n in lengths])
    rows = scipy.sparse.csr_array((np.ones(len(indices)), indices, indptr), shape=(3000, 3000))
    values, _, members, _ = pack(rows, rows.indices)
    agree(sum(map(len, members)) == 3000)
    agree(len(values) <= 20, f"{len(values)} groups")
    # Beyond the padding of the groups, columns come in eights.
    agree(sum(v.size for v in values) <= PADDING * rows.nnz + 8 * 3000)


@pytest.mark.once
def test_faults():
    matrix = random_matrix("uneven")
    with pytest.raises(TypeError, match=r"int64.*astype\(float\)"):
        DistributedCSR.from_whole(scipy.sparse.csr_array(np.eye(3, dtype=int)))
    with pytest.raises(ValueError, match="square matrix"):
        DistributedCSR.from_rows(matrix[:, :-1])
    A = DistributedCSR.from_whole(matrix)
    with pytest.raises(ValueError, match=r"this rank's piece.*rows"):
        A @ jnp.ones(len(A.rows) + 1)
    with pytest.raises(TypeError, match="float32"):
        A @ jnp.ones(len(A.rows), jnp.float32)
    b = jnp.ones(len(A.rows))
    for given in ({"A": A}, {"A": lambda p: p, "M": A}):
        with pytest.raises(TypeError, match=r"DistributedCSR.*pieces.*space=Sharded\(\)"):
            cg(b=b, **given)
    agree("DistributedCSR(shape=(40, 40), dtype=float64, rows" in repr(A))

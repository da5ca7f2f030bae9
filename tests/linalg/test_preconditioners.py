"""jacobi and block_jacobi: against dense formulas, in solves, over ranks, as data of programs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from linalg import problems
from linalg.solves import dense, layout
from spmd import agree, assert_allclose

from distsolve.linalg import block_jacobi, cg, jacobi

pytestmark = pytest.mark.few_ranks

# ---- jacobi


def test_jacobi_divides_each_leaf_and_keeps_dtypes():
    diag = {"a": jnp.array([1.0, 2]), "z": jnp.array([[4.0]], jnp.float32)}
    x = {"a": jnp.array([3.0, 8]), "z": jnp.array([[2 + 4j]], jnp.complex64)}
    y = jacobi(diag)(x)
    assert_allclose(y["a"], [3, 4])
    assert_allclose(y["z"], [[0.5 + 1j]])
    agree([y[k].dtype for k in y] == [x[k].dtype for k in x], str(y))


def test_jacobi_in_solves_of_both_spaces():
    diagonal = jnp.asarray(np.geomspace(1, 1e6, 40))
    _, info = cg(lambda p: diagonal * p, jnp.ones(40), M=jacobi(diagonal))
    agree(int(info.iterations) == 1, info.message)
    space, rows = layout("uneven", 40)
    mine = diagonal[rows]
    _, info = cg(lambda p: mine * p, jnp.ones(len(mine)), M=jacobi(mine), space=space)
    agree(int(info.iterations) == 1, info.message)


@pytest.mark.once
@pytest.mark.parametrize(
    ("diag", "error", "words"),
    [
        ([1.0, 0, 3, -2], ValueError, "2 of 4 entries on this rank are not.* index 1 .* is 0.0"),
        ([1.0, np.nan], ValueError, "1 of 2"),
        ([1.0, 5e-324], ValueError, "finite reciprocals"),
        ([1, 2], TypeError, "real floats: got int64"),
        ([1j, 2], TypeError, "pass its real part"),
    ],
)
def test_jacobi_refuses(diag, error, words):
    with pytest.raises(error, match=words):
        jacobi(np.array(diag))


@pytest.mark.once
def test_jacobi_names_the_leaf():
    with pytest.raises(ValueError, match=r"`diag` at \['b'\] must be positive"):
        jacobi({"a": jnp.ones(2), "b": jnp.zeros(2)})
    with pytest.raises(ValueError, match=r"at \['a'\] must have the shape of the vector: .*\(3,\)"):
        jacobi({"a": jnp.ones(2)})({"a": jnp.ones(3)})
    with pytest.raises(TypeError, match="float64 cannot act on a vector of float32"):
        jacobi(jnp.ones(2))(jnp.ones(2, jnp.float32))
    with pytest.raises(TypeError, match="structure"):
        jacobi(jnp.ones(2))({"a": jnp.ones(2)})


@functools.cache
def solve_with_jacobi():
    """Return a jitted solve with a traced diagonal, and a list of its traces."""
    traces = []

    @jax.jit
    def solve(diag, M, b):
        traces.append(1)
        x, info = cg(lambda p: jnp.arange(1.0, 4) * p, b, M=M if diag is None else jacobi(diag))
        return x, info

    return solve, traces


@pytest.mark.parametrize("bad", [[1.0, 0, 2], [1.0, -1, 2], [0.0, 0, 0], [1.0, np.nan, 2]])
def test_jacobi_while_tracing_reports_what_is_not_positive(bad):
    x, info = solve_with_jacobi()[0](jnp.array(bad), None, jnp.ones(3))
    agree(info.reason_name == "indefinite_preconditioner", info.message)
    assert_allclose(x, [0, 0, 0])


def test_jacobi_is_data():
    solve, traces = solve_with_jacobi()
    for scale in (1.0, 2.0, 3.0):
        x, info = solve(None, jacobi(scale * jnp.arange(1.0, 4)), jnp.ones(3))
        agree(int(info.iterations) == 1, info.message)
        assert_allclose(x, [1, 1 / 2, 1 / 3])
        if scale == 1:
            before = len(traces)
    agree(len(traces) == before, f"{traces}")


# ---- block_jacobi


def blocks_of(matrix, size):
    """Return the matrix with everything outside the diagonal blocks set to zero."""
    numbers = np.arange(len(matrix)) // size
    return np.where(numbers[:, None] == numbers, matrix, 0)


@pytest.mark.parametrize("form", ["stack", "dense", "csr", "list"])
def test_block_jacobi_inverts_the_blocks(form):
    system = problems.random_spd(n=12 if form == "stack" else 14, dtype=np.complex128)
    wanted = blocks_of(system.matrix, 4)
    cuts = [slice(i, min(i + 4, len(wanted))) for i in range(0, len(wanted), 4)]
    blocks = [wanted[cut, cut] for cut in cuts]
    M = {
        "stack": lambda: block_jacobi(np.stack(blocks)),
        "dense": lambda: block_jacobi(system.matrix, 4),
        "csr": lambda: block_jacobi(scipy.sparse.csr_array(system.matrix), block_size=4),
        "list": lambda: block_jacobi(blocks),
    }[form]()
    assert_allclose(dense(M, len(wanted), np.complex128) @ wanted, np.eye(len(wanted)), atol=1e-13)


def test_block_jacobi_in_solves_of_both_spaces():
    system = problems.random_spd(n=30)
    matrix = blocks_of(system.matrix, 5)
    b = jnp.asarray(system.b)
    x, info = cg(matrix, b, M=block_jacobi(matrix, 5), tol=1e-10)
    agree(int(info.iterations) == 1, info.message)
    space, mine = layout("uneven", 30)  # cuts between blocks, as 5 divides 30 / 3
    local = scipy.sparse.csr_array(matrix[mine, mine])
    if local.shape[0]:
        product = functools.partial(jnp.matmul, local.toarray())
    else:
        product = jnp.zeros_like
    M = block_jacobi(local, block_size=5)
    y, info = cg(product, b[mine], M=M, space=space, tol=1e-10)
    agree(int(info.iterations) == 1, info.message)
    assert_allclose(y, x[mine], rtol=1e-9)


@pytest.mark.once
@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((np.stack([np.eye(2), np.diag([1.0, -3])]),), ValueError, "block 1 .* eigenvalue is -3"),
        (([np.eye(3), np.eye(2), np.ones((2, 2)) + np.eye(2, k=1)],), ValueError, "block 2 .*Herm"),
        ((np.full((1, 2, 2), np.nan),), ValueError, "block 0"),
        ((np.eye(4),), TypeError, "`block_size` must be an integer"),
        ((np.eye(4), 0), ValueError, "at least 1: got 0"),
        ((np.ones((2, 3)), 1), ValueError, r"\(2, 3\)"),
        (([np.eye(2)], 2), ValueError, "Leave it out"),
        ((np.eye(4, dtype=int), 2), TypeError, "got int64"),
    ],
)
def test_block_jacobi_refuses(arguments, error, words):
    with pytest.raises(error, match=words):
        block_jacobi(*arguments)


@pytest.mark.once
def test_block_jacobi_refuses_vectors():
    M = block_jacobi(jnp.eye(4), 3)
    with pytest.raises(ValueError, match="cover 4 entries, and the vector on this rank has 3"):
        M(jnp.ones(3))
    with pytest.raises(TypeError, match="acts on one array"):
        M({"a": jnp.ones(4), "b": jnp.ones(0)})
    with pytest.raises(TypeError, match="complex128 cannot act on a vector of float64"):
        block_jacobi(jnp.eye(4, dtype=complex), 3)(jnp.ones(4))
    assert_allclose(M(jnp.ones((2, 2), complex)), np.ones((2, 2)))


def test_block_jacobi_while_tracing():
    @jax.jit
    def solve(matrix, b):
        return cg(lambda p: 2 * p, b, M=block_jacobi(matrix, 2))

    _, info = solve(2 * jnp.eye(3), jnp.ones(3))
    agree(int(info.iterations) == 1, info.message)
    x, info = solve(jnp.diag(jnp.array([1.0, 2, 0])), jnp.ones(3))
    agree(info.reason_name == "indefinite_preconditioner", info.message)
    assert_allclose(x, [0, 0, 0])

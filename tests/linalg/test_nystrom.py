"""nystrom: against its formula, in solves, over ranks with its messages, as data, as it ages."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from linalg import problems
from linalg.solves import calls, dense, layout, several
from spmd import agree, assert_allclose, ranks

from distsolve import mpi
from distsolve.linalg import Gram, Replicated, cg, nystrom

pytestmark = pytest.mark.few_ranks

KEY = 7


def key(seed=KEY):
    """Return the same key on all ranks."""
    return jax.random.key(seed)


def decaying(n=60, shift=1e-3, dtype=np.float64, ratio=0.75, seed=5):
    """Return a matrix S with geometric eigenvalues from 100 on, S + shift, and a vector."""
    basis = problems.random_spd(n, dtype, seed=seed)
    _, Q = np.linalg.eigh(basis.matrix)
    S = (Q * (100 * ratio ** np.arange(n))) @ Q.conj().T
    S = (S + S.conj().T) / 2
    return S, (S + shift * np.eye(n)).astype(dtype), basis.b.astype(dtype)


def shared(matrix):
    """Return the product with a matrix of which every rank has a share: one allreduce."""
    share = jnp.asarray(matrix * ((1 + ranks().rank) * 2 / ranks().size / (ranks().size + 1)))
    return lambda p: mpi.allreduce(share @ p)


def calls_of(function, *args):
    """Return the MPI calls of a compiled function."""
    return calls(jax.jit(function), *args)[1]


@pytest.mark.parametrize("dtype", [np.float64, pytest.param(np.complex128, marks=pytest.mark.once)])
def test_nystrom_is_the_formula(dtype):
    S, A, _ = decaying(dtype=dtype)
    M = nystrom(jnp.asarray(A), 15, key(), shift=1e-3)
    # Y (Omega^H Y)^-1 Y^H, whatever the basis, from the same random vectors
    from distsolve.linalg.nystrom import _gaussian

    omega = np.asarray(_gaussian(key(), 15, 60, jnp.dtype(dtype), Replicated())).T
    Y = S @ omega
    wanted = Y @ np.linalg.solve(omega.conj().T @ Y, Y.conj().T)
    U, lam = np.asarray(M.U), np.asarray(M.eigenvalues)
    assert_allclose((U * lam) @ U.conj().T, wanted, rtol=0, atol=1e-10)
    assert_allclose(U.conj().T @ U, np.eye(15), atol=1e-13)
    agree(np.all(np.diff(lam) <= 0) and lam[-1] > 0, f"{lam}")
    inverse = (U * (lam[-1] + 1e-3) / (lam + 1e-3)) @ U.conj().T + np.eye(60) - U @ U.conj().T
    assert_allclose(dense(M, 60, dtype), inverse, rtol=0, atol=1e-12)


def test_nystrom_saves_iterations_as_theory_says():
    """Eigenvalues of A on a rank-k S plus shift become equal, so two steps are enough."""
    S, _, b = decaying()
    values, Q = np.linalg.eigh(S)
    low = (Q[:, -12:] * values[-12:]) @ Q[:, -12:].T
    A = jnp.asarray(low + 1e-3 * np.eye(len(b)))
    M = nystrom(A, 15, key(), shift=1e-3)
    assert_allclose(M.eigenvalues[:12], values[::-1][:12], rtol=1e-9)
    assert_allclose(M.eigenvalues[12:], np.zeros(3))
    _, alone = cg(A, b, tol=1e-8)
    x, info = cg(A, b, M=M, tol=1e-8)
    agree(int(info.iterations) <= 2 and int(alone.iterations) >= 14, f"{info} {alone}")
    assert_allclose(A @ x, b, rtol=0, atol=1e-7 * np.linalg.norm(b))


def test_more_rank_means_fewer_iterations():
    """A spectrum without a gap: the condition number is at most a few times lam_r / shift."""
    _, A, b = decaying()
    A = jnp.asarray(A)
    counts = [int(cg(A, b, tol=1e-8)[1].iterations)]
    for rank in (15, 30):
        M = nystrom(A, rank, key(), shift=1e-3)
        counts.append(int(cg(A, b, M=M, tol=1e-8)[1].iterations))
    agree(counts[0] > 2 * counts[1] > 4 * counts[2], f"{counts}")


def test_one_message_for_the_whole_sketch():
    _, A, b = decaying(30)
    S = shared(A)
    make = functools.partial(nystrom, S, 8, shift=1e-3, like=jnp.asarray(b))
    found = calls_of(make, key())
    agree(found == {"MPI_Allreduce": 1}, f"{found}")
    M = make(key())
    assert_allclose(M.eigenvalues, nystrom(jnp.asarray(A), 8, key(), shift=1e-3).eigenvalues, 1e-9)
    # the probes of `quality` share the operator's message, and then the ranks agree
    found = calls_of(lambda M, k: M.aged(S, k), M, key(1))
    agree(found == {"MPI_Allreduce": 1 + several(1)}, f"{found}")
    agree(calls_of(lambda M, x: M(x), M, jnp.asarray(b)) == {}, "an application sent something")


@pytest.mark.parametrize("dtype", [np.float64, pytest.param(np.complex128, marks=pytest.mark.once)])
def test_sharded_is_replicated(dtype):
    """Uneven pieces: the same numbers as on one rank, and the messages that are promised."""
    _, A, b = decaying(dtype=dtype)
    space, mine = layout("gap", 60)
    rows, b = jnp.asarray(A[mine]), jnp.asarray(b)
    whole = nystrom(jnp.asarray(A), 30, key(), shift=1e-3)
    make = functools.partial(nystrom, shift=1e-3, space=space)
    M = make(rows, 30, key())
    assert_allclose(M.eigenvalues, whole.eigenvalues, rtol=1e-6)
    assert_allclose(M(b[mine]), whole(b)[mine], rtol=1e-6, atol=1e-9)
    x, info = cg(rows, b[mine], M=M, space=space, tol=1e-8)
    y, info_whole = cg(jnp.asarray(A), b, M=whole, tol=1e-8)
    agree(abs(int(info.iterations) - int(info_whole.iterations)) <= 1, f"{info} {info_whole}")
    agree(info.reason_name == "converged", info.message)
    assert_allclose(x, y[mine], rtol=0, atol=1e-4 * np.linalg.norm(y))
    agree(not M.aged(rows, key(3)) and bool(M.aged(3e4 * rows[::-1] + rows, key(3))), "aged")


def test_messages_of_sharded_vectors():
    space, mine = layout("gap", 24)
    diagonal = jnp.asarray(np.geomspace(1, 1e4, 24)[mine])
    like = jnp.ones_like(diagonal)

    def A(p):
        return diagonal * p

    make = functools.partial(nystrom, A, 4, space=space, like=like)
    M = make(key())
    wanted = {"MPI_Allreduce": 3, "MPI_Exscan": 1} if ranks().size > 1 else {}
    found = calls_of(make, key())
    agree(found == wanted, f"{found}")
    wanted = {"MPI_Allreduce": 2, "MPI_Exscan": 1} if ranks().size > 1 else {}
    found = calls_of(lambda M, k: M.quality(A, k), M, key())
    agree(found == wanted, f"{found}")
    found = calls_of(lambda M, x: M(x), M, like)
    agree(found == ({"MPI_Allreduce": 1} if ranks().size > 1 else {}), f"{found}")


def test_nystrom_of_a_gram_operator():
    """The shift and the vectors are those of the operator; all products are one message."""
    system = problems.samples(ranks().size, unknowns=12)
    G = Gram(jnp.asarray(system.pieces[ranks().rank]), shift=system.shift)
    M = nystrom(G, 6, key())
    assert_allclose(M.shift, system.shift)
    oracle = nystrom(jnp.asarray(system.dense()), 6, key(), shift=system.shift)
    assert_allclose(M.eigenvalues, oracle.eigenvalues, rtol=1e-9)
    found = calls_of(lambda k: nystrom(G, 6, k), key())
    agree(found == ({"MPI_Allreduce": 1} if ranks().size > 1 else {}), f"{found}")
    _, info = cg(G, jnp.asarray(system.b), M=M, tol=1e-8)
    agree(info.reason_name == "converged", info.message)


def test_nystrom_says_when_it_has_aged():
    S, A, _ = decaying()
    A = jnp.asarray(A)
    quality = jax.jit(lambda M, A, seed: M.quality(A, jax.random.key(seed)))

    def aged(M, A, seed):
        return bool(quality(M, A, seed) > 10)

    rolled = jnp.asarray(np.roll(S, 30, (0, 1)) + 1e-3 * np.eye(len(S)))
    _, Q = np.linalg.eigh(S)
    gained = A + jnp.asarray(500 * Q[:, :5] @ Q[:, :5].T)
    for rank in (15, 30):  # also where the rank is too small to do much good
        M = nystrom(A, rank, key(), shift=1e-3)
        for seed in range(5):
            agree(not aged(M, A, seed), f"rank {rank}: {quality(M, A, seed)}")
            agree(not aged(M, 1e5 * A, seed), f"scaled, rank {rank}: {quality(M, 1e5 * A, seed)}")
        for other in (rolled, gained):
            agree(aged(M, other, 1), f"rank {rank}: {quality(M, other, 1)}")
    true = np.linalg.cond(dense(M, len(S)) @ np.asarray(rolled))
    agree(1 < float(quality(M, rolled, 1)) <= true, f"{quality(M, rolled, 1)} {true}")
    for other in (-A, jnp.nan * A):
        agree(
            np.isinf(quality(M, other, 1)) and bool(M.aged(other, key())), "not positive definite"
        )


def test_nystrom_is_data_and_takes_another_shift():
    _, A, b = decaying(ratio=0.5)
    traces = []

    @jax.jit
    def solve(A, b, M):
        traces.append(1)
        return cg(lambda p: A @ p, b, M=M, tol=1e-8)

    first = nystrom(jnp.asarray(A), 30, key(), shift=1e-3)
    second = nystrom(jnp.asarray(2 * A), 30, key(2), shift=2e-3).with_shift(1e-1)
    moved = jnp.asarray(2 * A) + (0.1 - 2e-3) * jnp.eye(60)
    for matrix, M in ((jnp.asarray(A), first), (moved, second)):
        x, info = solve(matrix, jnp.asarray(b), M)
        agree(info.reason_name == "converged" and int(info.iterations) <= 8, info.message)
        assert_allclose(matrix @ x, b, rtol=0, atol=1e-7 * np.linalg.norm(b))
    agree(len(traces) == 1, f"{traces}")


def test_nystrom_on_pytrees_of_mixed_leaves():
    """A complex leaf is two real ones: the operator is symmetric over Re <x, y> only."""
    system = problems.random_spd(n=13, condition=1e4)
    matrix = jnp.asarray(system.matrix)
    like = {"a": jnp.ones((3,)), "z": jnp.ones((2, 2), complex), "f": jnp.ones(2, jnp.float32)}

    def A(p):
        z = p["z"].ravel()
        flat = jnp.concatenate([p["a"], p["f"].astype(float), z.real, z.imag])
        a, f, re, im = jnp.split(matrix @ flat, [3, 5, 9])
        z = jax.lax.complex(re, im).reshape(2, 2)
        return {"a": a, "f": f.astype(jnp.float32), "z": z}

    M = nystrom(A, 13, key(), like=like)
    # Products are rounded where the leaf of single precision is: by 1e-7 of the largest one.
    rounding = np.finfo(np.float32).eps * 1e4
    assert_allclose(M.eigenvalues, np.geomspace(1e4, 1, 13), rtol=rounding)
    y = M(like)
    agree([leaf.dtype for leaf in jax.tree.leaves(y)] == [jnp.float64, jnp.float32, complex], "")
    _, info = cg(A, like, M=M, tol=rounding)
    agree(info.reason_name == "converged" and int(info.iterations) <= 3, info.message)
    with pytest.raises(ValueError, match="was made for vectors like"):
        M(jnp.ones(13))


@pytest.mark.once
@pytest.mark.parametrize("dtype", [np.float32, np.complex64])
def test_nystrom_in_single_precision(dtype):
    """The smallest eigenvalues of M stay positive where they are all rounding."""
    for n, rank, shift in ((60, 30, 1e-3), (20, 20, 1e-5)):
        _, A, b = decaying(n, shift, dtype, ratio=0.5)
        M = nystrom(jnp.asarray(A), rank, key(), shift=shift)
        agree(M.vectors.dtype == dtype and M.eigenvalues.dtype == jnp.float32, str(M))
        matrix = dense(M, n, dtype).astype(complex)
        smallest = np.linalg.eigvalsh((matrix + matrix.conj().T) / 2)[0]
        agree(smallest > 0, f"{smallest}")
        _, info = cg(jnp.asarray(A), jnp.asarray(b), M=M, tol=1e-3)
        agree(info.reason_name in ("converged", "stagnated"), info.message)
    for scale in (1e-25, 1e25):  # squares of A's entries are not numbers in float32
        scaled = nystrom(jnp.asarray(A) * dtype(scale), rank, key(), shift=shift * scale)
        assert_allclose(scaled.eigenvalues / np.float32(scale), M.eigenvalues, rtol=0, atol=1e-2)
        agree(float(scaled.quality(jnp.asarray(A) * dtype(scale), key())) < 3, "quality")


@pytest.mark.once
def test_nystrom_of_awkward_operators():
    zero = jnp.zeros((4, 4))
    for rank in (3, 9):  # fewer and more than there are entries
        M = nystrom(zero, rank, key())
        assert_allclose(M(jnp.arange(4.0)), np.arange(4.0))
        agree(float(M.quality(zero, key())) == 1 and not M.aged(zero, key()), "zero")
        agree(bool(M.aged(jnp.diag(jnp.array([1.0, 1, 1, 1e3])), key())), "not zero any more")
        one = nystrom(jnp.eye(4), rank, key(), shift=1.0)
        assert_allclose(one(jnp.arange(4.0)), np.arange(4.0), atol=1e-12)
        M = nystrom(jnp.diag(jnp.array([1.0, 10, 0, 0])), rank, key())
        agree(bool(jnp.all(jnp.isfinite(M(jnp.ones(4))))), f"{M}")
    full = nystrom(jnp.diag(jnp.array([1.0, 10, 100, 1000])), 9, key())
    assert_allclose(full.eigenvalues, [1000, 100, 10, *6 * [1]], rtol=1e-9)
    assert_allclose(full(jnp.ones(4)), [1, 0.1, 0.01, 0.001], rtol=1e-9)
    nothing = nystrom(jnp.zeros((0, 0)), 2, key())
    agree(nothing(jnp.ones(0)).shape == (0,), f"{nothing}")


@pytest.mark.once
@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"rank": 0}, ValueError, "`rank` must be at least 1: got 0"),
        ({"rank": 2.0}, TypeError, "`rank` must be an integer: got 2.0"),
        ({"shift": -1.0}, ValueError, "`shift` must be at least 0 and finite: got -1.0"),
        ({"shift": jnp.ones(2)}, TypeError, "`shift` must be one real number"),
        ({"like": None}, ValueError, "Pass like=b"),
        ({"operator": lambda p: p[:2]}, ValueError, r"`operator\(v\)` must have the shape"),
    ],
)
def test_nystrom_refuses(change, error, words):
    arguments = {"operator": lambda p: p, "rank": 2, "like": jnp.ones(3), "shift": 0.0}
    arguments.update(change)
    with pytest.raises(error, match=words):
        nystrom(key=key(), **arguments)

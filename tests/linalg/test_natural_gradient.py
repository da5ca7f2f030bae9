"""Natural gradients by every method, on uneven and empty parts, against one dense solve."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from linalg.solves import messages, several
from spmd import agree, assert_allclose, ranks

from distsolve import MeshAxis, Sharded, natural_gradient, plan
from distsolve.linalg import SolveError
from distsolve.linalg.machine import Machine
from distsolve.linalg.plan import predict

COUNTS = [7, 0, 4]
P = 5
SHIFT = 0.1
SOLVERS = ["cg", "dense", "kernel"]
TIGHT = {"cg": {"tol": 1e-14, "maxiter": 60}, "dense": {}, "kernel": {}}
DIRECT = ["dense", "kernel"]
KINDS = {"real": (float, "real"), "complex": (complex, "complex"), "holomorphic": (complex, None)}


class Case:
    """The whole problem in NumPy, and this rank's part of it."""

    def __init__(self, kind, dtype=np.float64):
        size, rank = ranks().size, ranks().rank
        self.counts = tuple(COUNTS[:size])
        start, self.N = sum(COUNTS[:rank]), sum(self.counts)
        self.mine = slice(start, start + COUNTS[rank])
        random = np.random.default_rng(7)
        entries, self.mode = KINDS[kind]

        def draw(*shape):
            values = random.standard_normal(shape)
            return values if entries is float else values + 1j * random.standard_normal(shape)

        self.weights = random.uniform(0.5, 2, self.N)
        self.J, self.r = draw(self.N, P), draw(self.N)
        self.J -= self.weights @ self.J / self.weights.sum()
        self.previous = draw(P).real if kind == "complex" else draw(P)
        self.running = random.uniform(0, 1, P)
        self.kind = kind

    def force(self, r, weights=None):
        w = np.ones(self.N) if weights is None else weights
        F = self.J.conj().T @ (w * r) / w.sum()
        return F.real if self.kind == "complex" else F

    def matrix(self, weights=None):
        w = np.ones(self.N) if weights is None else weights
        C = self.J.conj().T @ (w[:, None] * self.J) / w.sum()
        return C.real if self.kind == "complex" else C

    def here(self, array):
        return jnp.asarray(array[self.mine])


case = functools.cache(Case)


# The cases of cg are few, as it takes longest to compile, and has tests of its own.
@pytest.mark.parametrize(("method", "kind"), [("cg", "complex"), *itertools.product(DIRECT, KINDS)])
def test_every_method_gives_the_dense_answer(method, kind):
    c = case(kind)
    want = np.linalg.solve(c.matrix() + SHIFT * np.eye(P), c.force(c.r))
    solve = functools.partial(
        natural_gradient, shift=SHIFT, method=method, mode=c.mode, counts=c.counts, **TIGHT[method]
    )
    J, r = c.here(c.J), c.here(c.r)
    (x, info), sent = messages(lambda: solve(J, r))
    assert_allclose(x, want, rtol=1e-12, atol=1e-13)
    agree(x.dtype == want.dtype and info.method == method and bool(info.converged))
    assert_allclose(info.shift, SHIFT)
    expected = {"dense": 3, "kernel": 4}.get(method)
    expected = 1 + int(info.solve.iterations) if expected is None else expected
    agree(sent == expected * (ranks().size > 1), f"{sent} messages, {expected} expected")


# All that changes the equations, at once: each term is a different function of all the others.
@pytest.mark.parametrize(("method", "kind"), [("cg", "real"), *itertools.product(DIRECT, KINDS)])
def test_damping_momentum_and_weights_inside_jit(method, kind):
    c, mu, decay = case(kind), 0.9, 0.7
    C, w = c.matrix(c.weights), c.weights
    v = decay * c.running + (1 - decay) * abs(c.force(c.r, w)) ** 2
    damping = SHIFT * np.arange(1, P + 1) + 0.2 * np.diag(C).real + 0.3 * np.sqrt(v)
    rest = c.force(c.r - c.J @ (mu * c.previous), w)
    want = mu * c.previous + np.linalg.solve(C + np.diag(damping), rest)
    options = {"method": method, "mode": c.mode, "counts": c.counts, **TIGHT[method]}

    @jax.jit
    def solve(J, r, w, shift, previous, running):
        rms, momentum = (0.3, decay, running), (mu, previous)
        extra = {"diag_scale": 0.2, "rms": rms, "momentum": momentum, "weights": w}
        return natural_gradient(J, r, shift=shift, x0=previous, **extra, **options)

    shift = jnp.asarray(SHIFT * np.arange(1, P + 1))
    vectors = jnp.asarray(c.previous), jnp.asarray(c.running)
    x, info = solve(c.here(c.J), c.here(c.r), c.here(c.weights), shift, *vectors)
    assert_allclose(x, want, rtol=1e-11, atol=1e-12)
    assert_allclose(info.rms, v)
    assert_allclose(info.shift, damping)


def differentiable(c, method):
    """Return the update as a function of all that it depends on, and where to look at it.

    What this rank alone has comes first, and then what all have.
    """
    options = {"method": method, "mode": c.mode, "counts": c.counts, **TIGHT[method]}

    @jax.jit
    def update(here, replicated):
        (J, r, w), (shift, scale, running, mu, previous) = here, replicated
        more = {"diag_scale": scale, "rms": (0.3, 0.7, running), "momentum": (mu, previous)}
        x = natural_gradient(J, r, shift=shift, weights=w, **more, **options)[0]
        return x + natural_gradient(J, r, shift=shift[0], **options)[0]

    here = c.here(c.J), c.here(c.r), c.here(c.weights)
    shift = SHIFT * np.arange(1, P + 1)
    replicated = (shift, np.float64(0.2), c.running, np.float64(0.9), c.previous)
    return update, (here, jax.tree.map(jnp.asarray, replicated))


def pairing(cotangents, tangents):
    """Return the real number that JAX's cotangents assign to tangents."""
    pairs = zip(jax.tree.leaves(cotangents), jax.tree.leaves(tangents), strict=True)
    return sum(float(np.sum(np.asarray(c) * np.asarray(t)).real) for c, t in pairs)


@pytest.mark.parametrize(
    ("method", "kind"), [("dense", "holomorphic"), ("kernel", "real"), ("kernel", "holomorphic")]
)
def test_derivatives(method, kind):
    update, (here, replicated) = differentiable(case(kind), method)
    move = jax.tree.map(lambda leaf: jnp.cos(3 * leaf), (here, replicated))
    x, slope = jax.jvp(update, (here, replicated), move)
    h = 1e-6

    def moved(h):
        return update(*jax.tree.map(lambda leaf, t: leaf + h * t, (here, replicated), move))

    assert_allclose(slope, (moved(h) - moved(-h)) / (2 * h), rtol=1e-6, atol=1e-7)
    cotangent = jnp.sin(jnp.arange(1.0, P + 1)).astype(x.dtype)
    cotangents = jax.vjp(update, here, replicated)[1](cotangent)
    shares = sum(ranks().agreeing.allgather(pairing(cotangents[0], move[0])))
    assert_allclose(shares + pairing(cotangents[1], move[1]), pairing(cotangent, slope), rtol=1e-9)


def test_derivatives_are_those_of_cg():
    cotangent = jnp.sin(jnp.arange(1.0, P + 1))

    def pulled(method):
        update, point = differentiable(case("complex"), method)
        return jax.vjp(update, *point)[1](cotangent)

    want = jax.tree.leaves(pulled("cg"))
    for method in DIRECT:
        for ours, theirs in zip(jax.tree.leaves(pulled(method)), want, strict=True):
            assert_allclose(ours, theirs, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("method", DIRECT)
def test_single_precision(method):
    c = case("real")
    want = np.linalg.solve(c.matrix() + SHIFT * np.eye(P), c.force(c.r))
    J, r = (c.here(x).astype(jnp.float32) for x in (c.J, c.r))
    x, _ = natural_gradient(J, r, shift=SHIFT, method=method)
    agree(x.dtype == jnp.float32)
    assert_allclose(x, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", DIRECT)
def test_shift_is_raised_where_the_matrix_is_not_definite(method):
    c = case("real")
    J, r = c.here(c.J), c.here(c.r)
    # Centred rows of two parameters alike: both matrices are singular without a shift.
    x, info = natural_gradient(J[:, [0, 0]], r, shift=0.0, method=method, counts=c.counts)
    agree(float(info.raised) > 0 and bool(info.converged), info.message)
    # All that tells the two apart is the shift, and rounding is this much of it.
    rounding = np.finfo(float).eps * c.matrix()[0, 0] / float(info.raised)
    assert_allclose(x[0], x[1], rtol=10 * rounding)
    agree("was raised from 0 to" in info.message, info.message)
    shift, force = float(info.shift), c.force(c.r)[[0, 0]]
    want = np.linalg.solve(c.matrix()[0, 0] + shift * np.eye(2), force)
    assert_allclose(x, want, rtol=1e4 * rounding)


@pytest.mark.parametrize("method", DIRECT)
def test_a_negative_shift_is_refused(method):
    c = case("real")
    solve = functools.partial(
        natural_gradient, c.here(c.J), c.here(c.r), method=method, counts=c.counts
    )
    with pytest.raises(ValueError, match=r"`shift` must not be negative.*got -0\.5"):
        solve(shift=-0.5)
    inside = jax.jit(lambda shift: solve(shift=shift))  # nothing is known while tracing
    x, info = inside(-5.0)
    agree(not info.converged and not np.any(x), info.message)
    slope = jax.jvp(inside, (-5.0,), (1.0,))[1][0]
    agree(bool(jnp.isnan(slope).all()), f"{slope}")


def test_a_factor_of_rounding_has_no_derivative():
    J, r = jnp.array([[1.0, 1.0], [-1.0, -1.0]]), jnp.array([1.0, -1.0])  # on each rank

    @jax.jit
    def solve(shift):
        return natural_gradient(J, r, shift=shift, method="dense")

    shift = jnp.array([-1e-20, 2.3e-16])
    (x, info), (slope, _) = jax.jvp(solve, (shift,), (shift,))
    agree(not info.converged and not np.any(x), f"{x} {info.message}")
    agree(bool(jnp.isnan(slope).all()), f"{slope}")
    gradient = jax.grad(lambda shift: jnp.sum(solve(shift)[0]))(shift)
    agree(bool(jnp.isnan(gradient).all()), f"{gradient}")


@pytest.mark.parametrize("rows", ["all", "weighted"])
def test_a_parameter_without_damping_is_refused_by_the_dual(rows):
    c = case("real")
    shift = jnp.full(P, SHIFT).at[jnp.array([1, 3])].set(0)
    weights = None if rows == "all" else c.here(np.arange(c.N) % 2.0)
    J, r = c.here(c.J), c.here(c.r)
    solve = functools.partial(
        natural_gradient, residuals=r, method="kernel", counts=c.counts, weights=weights
    )
    with pytest.raises(ValueError, match=r"`shift` is 0 for 2 of 5 .* entry 1: .*'cg'"):
        solve(J, shift=shift)
    x, info = jax.jit(solve)(J, shift=shift)
    agree(not info.converged and not np.any(x), f"{x} {info.message}")
    # One that no sample depends on has no update, and needs no damping.
    x, info = solve(J.at[:, jnp.array([1, 3])].set(0), shift=shift)
    agree(bool(info.converged) and float(x[1]) == 0 and bool(np.all(x[::2])), info.message)


@pytest.mark.parametrize("method", ["cg", *DIRECT])
def test_a_parameter_that_nothing_depends_on_stays_where_it_is(method):
    c = case("real")
    J = c.here(c.J).at[:, 0].set(0)
    damping = np.diag(c.matrix()) * 0.01
    x, info = natural_gradient(J, c.here(c.r), shift=0.0, diag_scale=0.01, method=method, tol=1e-12)
    rest = slice(1, None)
    matrix = c.matrix()[rest, rest] + np.diag(damping[rest])
    assert_allclose(x[rest], np.linalg.solve(matrix, c.force(c.r)[rest]), rtol=1e-8, atol=1e-10)
    agree(float(x[0]) == 0 and not np.any(info.raised), f"{info}")


@pytest.mark.parametrize("method", DIRECT)
def test_nothing_finite_is_said(method):
    c = case("real")
    J, r = c.here(c.J), c.here(c.r)
    for not_finite in ((J.at[:1, 0].set(jnp.nan), r), (J, r.at[:1].set(jnp.nan))):
        x, info = natural_gradient(*not_finite, shift=SHIFT, method=method, counts=c.counts)
        agree(not info.converged and "was not solved" in info.message, info.message)
        agree(not np.any(x) and not np.any(info.raised), f"{x} {info.raised}")
    with pytest.raises(SolveError, match="was not solved"):
        info.raise_if_failed()


def test_a_matrix_that_has_underflowed_is_not_solved():
    c = case("real")
    J = (1e-25 * c.here(c.J)).astype(np.float32)  # whose squares are 0, and whose force is not
    x, info = natural_gradient(J, c.here(c.r).astype(np.float32), shift=0.0, method="dense")
    agree(not info.converged and not np.any(x), f"{x} {info}")


@pytest.mark.parametrize("method", DIRECT)
def test_no_samples_at_all(method):
    x, _ = natural_gradient(jnp.zeros((0, 3)), jnp.zeros(0), shift=SHIFT, method=method)
    assert_allclose(x, np.zeros(3))


def test_auto_is_the_same_on_all_ranks():
    c = case("real")
    want = np.linalg.solve(c.matrix() + SHIFT * np.eye(P), c.force(c.r))
    J, r = c.here(c.J), c.here(c.r)
    x, info = natural_gradient(J, r, shift=SHIFT, tol=1e-14)
    assert_allclose(x, want, rtol=1e-12, atol=1e-13)
    methods = ranks().agreeing.allgather(info.method)
    agree(len(set(methods)) == 1 and methods[0] in SOLVERS, f"{methods}")
    _, info = jax.jit(functools.partial(natural_gradient, shift=SHIFT))(J, r)
    agree(info.method == ("cg" if ranks().size > 1 else methods[0]), info.method)


def test_plan_is_the_same_on_all_ranks():
    few = plan(200, 1_000_000, ranks=16, dtype=np.float32, memory=4e9)
    agree(few.method == "kernel" and not few["dense"].fits, str(few))
    agree(len(set(ranks().agreeing.allgather(str(few)))) == 1)
    agree("kernel" in str(few) and "<- chosen" in str(few) and "measured" in str(few), str(few))
    agree(plan(10**6, 100, iterations=100).method == "dense")
    nothing = plan(10**6, 10**5, memory=1.0)
    agree(nothing.method == "cg" and "none fits" in str(nothing), str(nothing))
    inside = []
    comm = ranks().communicators["dup"]  # not measured before
    jax.jit(lambda: (inside.append(plan(10, 10, comm=comm)), jnp.zeros(()))[1])()
    agree(inside[0].machine == Machine() and "not measured" in str(inside[0]))


@pytest.mark.parametrize("method", DIRECT)
def test_the_plan_counts_the_messages_that_are_sent(method):
    each_sum = Machine(latency=0.0, bandwidth=np.inf, memory_bandwidth=np.inf, overhead=1.0)
    # So that S takes two pieces, or the dual.
    n, columns = (3, 760) if method == "dense" else (760 // ranks().size + 1, 2)
    N = n * ranks().size
    J = jnp.asarray(np.random.default_rng(ranks().rank).standard_normal((n, columns)))
    counts = (n,) * ranks().size
    update = functools.partial(natural_gradient, shift=SHIFT, method=method, counts=counts)
    _, sent = messages(lambda: jax.jit(update)(J, J[:, 0]))
    sums = predict(ranks().size, n, N, columns, J.dtype, J.dtype, None, None, each_sum)
    exchanges = several(method == "kernel")
    agree(sent == sums[method].sending + exchanges == several(4) + exchanges, f"{sent}, {sums}")


def error(kind, match, **options):
    c = case("real")
    given = {"J": c.here(c.J), "residuals": c.here(c.r), "shift": SHIFT} | options
    with pytest.raises(kind, match=match):
        natural_gradient(**given)


def test_errors_name_the_argument_and_the_remedy():
    c = case("real")
    J, r = c.here(c.J), c.here(c.r)
    error(ValueError, "`method` must be one of 'auto', 'cg'", method="minsr")
    error(TypeError, "`J` must have shape", J=J[0] if len(J) else jnp.zeros(P))
    error(TypeError, "`J` must be one array .*got a dict of 1.*distsolve.jacobian", J={"w": J})
    if len(J) != P:
        error(ValueError, "`J` looks transposed.*pass J.T", J=J.T)
    error(TypeError, r"`rows`.*Did you mean Sharded\(\)", rows=Sharded)
    error(ValueError, "`residuals` must be one number for each row", residuals=jnp.zeros(99))
    error(TypeError, "`residuals` must have the dtype float64", residuals=r.astype(jnp.float32))
    error(ValueError, "`mode` must be 'real' or None", mode="complex")
    error(ValueError, "`shift` must be real", shift=jnp.zeros(3))
    error(ValueError, "`rms` must be", rms=0.5)
    error(ValueError, "`momentum` must be", momentum=jnp.zeros(P))
    error(ValueError, r"`x0` must be like the update, float64 of shape \(5,\)", x0=jnp.zeros(4))
    if ranks().size > 1:
        error(ValueError, "`counts` must be the number", method="kernel", counts=(1,))
        with pytest.raises(ValueError, match=r"`counts` is needed .* Sharded\(\).counts\(n\)"):
            jax.jit(lambda J: natural_gradient(J, r, shift=SHIFT, method="kernel"))(J)
        with pytest.raises(ValueError, match="call it outside"):
            jax.jit(lambda: Sharded().counts(3)[0])()
    agree(Sharded().counts(len(J)) == c.counts)


@pytest.mark.once
def test_on_a_mesh_axis():
    c = case("real")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("rows",))
    spec = jax.sharding.PartitionSpec

    def solve(J, r, method):
        return natural_gradient(J, r, shift=SHIFT, method=method, rows=MeshAxis("rows"))[0]

    want = np.linalg.solve(c.J.T @ c.J / c.N + SHIFT * np.eye(P), c.J.T @ c.r / c.N)
    for method in ("dense", "kernel"):
        sharded = jax.shard_map(
            functools.partial(solve, method=method),
            mesh=mesh,
            in_specs=(spec("rows"), spec("rows")),
            out_specs=spec(),
            check_vma=False,
        )
        assert_allclose(jax.jit(sharded)(jnp.asarray(c.J), jnp.asarray(c.r)), want, rtol=1e-12)

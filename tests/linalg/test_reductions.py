"""Statistics of samples that are spread over ranks, against NumPy on all of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from linalg.solves import same_everywhere, sent, several
from spmd import agree, assert_allclose, assert_equal, ranks

import distsolve
from distsolve import Replicated, Sharded, check_replicated, mpi
from distsolve.linalg import trees

COUNTS = [3, 0, 4]  # samples of each rank


def samples(make):
    """Return this rank's part of the samples that ``make(random, N)`` draws, and all of them."""
    counts = COUNTS[: ranks().size]
    everything = make(np.random.default_rng(3), sum(counts))
    start = sum(counts[: ranks().rank])
    part = jax.tree.map(lambda v: jnp.asarray(v[start : start + counts[ranks().rank]]), everything)
    return part, everything


@functools.cache
def mixed():
    """A tree of every kind of sample: one program of each statistic serves many tests."""

    def make(random, n):
        return {
            "far": 1e8 + 1e-3 * random.standard_normal((n, 2)),
            "complex": random.standard_normal(n) + 1j * (1e5 + random.standard_normal(n)),
            "single": (1e4 + random.standard_normal((n, 1, 2))).astype(np.float32),
            "half": random.standard_normal(n).astype(jnp.bfloat16),
            "integer": random.integers(-5, 5, (n, 2)),
        }

    return samples(make)


def wide(leaf):
    """Return samples with all the digits that NumPy has."""
    return leaf.astype(np.clongdouble if np.iscomplexobj(leaf) else np.longdouble)


def close(found, wanted, like, rtol=None):
    """Compare with tolerances that fit the dtype, relative to the largest entry."""
    for name, want in wanted.items():
        real = like[name].real.dtype
        eps = 4e-3 if name == "half" else 1e-5 if real == np.float32 else rtol or 1e-12
        want = np.asarray(want).astype(np.complex128 if np.iscomplexobj(want) else np.float64)
        assert_allclose(found[name], want, rtol=0, atol=eps * np.max(np.abs(want)), message=name)


def test_mean_of_all_samples_is_one_message():
    x, every = mixed()
    found, messages = sent(jax.jit(distsolve.mean), x)
    close(found, {k: wide(v).mean(0) for k, v in every.items()}, every)
    agree(messages == several(), f"{messages} messages")
    dtypes = {k: v.dtype if k != "integer" else jnp.float64 for k, v in x.items()}
    agree({k: v.dtype for k, v in found.items()} == dtypes, "dtypes")


def variance(leaf, ddof):
    leaf = wide(leaf)
    return np.sum(np.abs(leaf - leaf.mean(0)) ** 2, 0) / (len(leaf) - ddof)


def test_variance_does_not_cancel():
    x, every = mixed()
    found, messages = sent(jax.jit(functools.partial(distsolve.var, ddof=1)), x)
    # 1e-8 is what the samples themselves leave of a spread of 1e-3 about 1e8.
    close(found, {k: variance(v, 1) for k, v in every.items()}, every, rtol=1e-8)
    agree(messages == several(), f"{messages} messages")
    dtypes = {k: v.real.dtype if k != "integer" else jnp.float64 for k, v in x.items()}
    agree({k: v.dtype for k, v in found.items()} == dtypes, "dtypes")


def test_covariance_of_one_and_of_two_arrays():
    (x, y), (all_x, all_y) = samples(
        lambda random, n: (
            1e6 + random.standard_normal((n, 3)) + 1j * random.standard_normal((n, 3)),
            random.standard_normal((n, 2, 2)),
        )
    )

    def both(x, y):
        return distsolve.covariance(x, ddof=1), distsolve.covariance(x, y)

    (found, crossed), messages = sent(jax.jit(both), x, y)
    assert_allclose(found, np.cov(all_x.T), rtol=1e-9)
    assert_equal(found, found.conj().T)
    agree(messages == several(2), f"{messages} messages")
    centred = all_x - all_x.mean(0), all_y - all_y.mean(0)
    want = np.einsum("ki,kjl->ijl", *centred) / len(all_x)
    assert_allclose(crossed, want, rtol=1e-9)


@pytest.mark.parametrize(
    ("dtype", "mean", "spread"), [(np.float32, 1e4, 1e-2), (np.complex128, 1e25, 1e14)]
)
def test_spreads_much_smaller_than_the_mean_in_any_number_of_tiles(dtype, mean, spread):
    def draw(random, n):
        unit = 1 + 1j if np.dtype(dtype).kind == "c" else 1
        x = mean + spread * unit * random.standard_normal((n, 65)).cumsum(1)
        x *= np.where(np.arange(65) % 2, mean**-2, 1)  # every other entry is as far below 1
        return [x[:, :p].astype(dtype) for p in (0, 1, 33, 65)]

    x, every = samples(draw)

    def statistics(x):
        return distsolve.var(x), distsolve.covariance(x[3]), distsolve.covariance(x[3], x[2])

    (variances, *spreads), messages = sent(jax.jit(statistics), x)
    agree(messages == several(3), f"{messages} messages")
    same_everywhere((variances, spreads))
    d, eps = [wide(v) - wide(v).mean(0) for v in every], np.finfo(dtype).eps
    for found, v in zip(variances, d, strict=True):
        want = np.mean(np.abs(v) ** 2, 0).astype(found.dtype)
        assert_allclose(found, want, rtol=20 * eps)
    for found, v in zip(spreads, (d[3], d[2]), strict=True):
        want = (d[3].T @ v.conj() / len(v)).astype(dtype)
        assert_allclose(found, want, rtol=0, atol=20 * eps * np.max(np.abs(want)))


def test_a_message_of_many_bytes_is_one():
    x, every = samples(lambda random, n: random.standard_normal((n, 500)))
    many = jnp.tile(x, (1, 100))

    def statistics(x, many):
        return distsolve.covariance(x), distsolve.var(many)

    (found, variances), messages = sent(jax.jit(statistics), x, many)
    agree(found.nbytes > 1 << 20, f"{found.nbytes} bytes")
    agree(messages == several(2), f"{messages} messages")
    assert_allclose(found, np.cov(every.T, ddof=0), rtol=0, atol=1e-13)
    assert_allclose(variances, np.tile(every.var(0), 100), rtol=1e-12)


def test_what_is_not_finite_spoils_its_own_entries():
    x, every = samples(lambda random, n: random.standard_normal((n, 40)))
    spoilt = jnp.where(jnp.arange(40) == 35, jnp.where(ranks().rank == 0, jnp.nan, x), x)
    spoilt = spoilt.at[..., 3].set(jnp.inf) if ranks().rank == 0 else spoilt
    found, shared = jax.jit(lambda x: (distsolve.var(x), distsolve.covariance(x)))(spoilt)
    want = np.where(np.isin(np.arange(40), [3, 35]), np.nan, every.var(0))
    assert_allclose(found, want, rtol=1e-12)
    assert_allclose(jnp.isnan(shared), np.isnan(want[:, None] + want))


def test_weighted_mean_with_a_rank_without_weight():
    x, every = mixed()
    all_weights = np.arange(1.0, len(every["half"]) + 1)
    if ranks().size == 3:  # of two ranks only the first has samples
        all_weights[: COUNTS[0]] = 0
    start = sum(COUNTS[: ranks().rank])
    weights = jnp.asarray(all_weights[start : start + COUNTS[ranks().rank]])
    found, messages = sent(jax.jit(distsolve.weighted_mean), x, weights)
    want = {k: np.average(wide(v), axis=0, weights=all_weights) for k, v in every.items()}
    close(found, want, every)
    agree(messages == several(), f"{messages} messages")


def test_unequal_numbers_of_samples():
    size = ranks().size
    if ranks().rank == 0:
        x = jnp.asarray([1, 2, 3])
    else:
        x = jnp.full(int(ranks().rank == 1), 10)
    mean, var = jax.jit(lambda x: (distsolve.mean(x), distsolve.var(x)))(x)
    assert_equal(mean, jnp.asarray(4.0 if size > 1 else 2.0))
    assert_allclose(var, 12.5 if size > 1 else 2 / 3, rtol=1e-15)


def test_no_samples_at_all_have_no_statistics():
    nothing, one = jnp.zeros((0, 2)), jnp.ones(int(ranks().rank == 0))

    @jax.jit
    def statistics(x, one):
        means = distsolve.mean(x), distsolve.weighted_mean(jnp.ones(2), jnp.zeros(2))
        spreads = distsolve.var(x), distsolve.covariance(x), distsolve.var(one, ddof=1)
        return jnp.concatenate([v.ravel() for v in (*means, *spreads)]), distsolve.var(one)

    found, zero = statistics(nothing, one)
    assert_equal(found, jnp.full(10, jnp.nan))
    assert_equal(zero, jnp.asarray(0.0))


def test_copies_of_samples_have_the_statistics_of_one():
    x = jnp.asarray([1.0, 5.0, 9.0])

    def statistics(space):
        calls = (distsolve.mean, distsolve.var, distsolve.covariance)
        return jnp.stack([call(x, space=space) for call in calls])

    found, messages = sent(jax.jit(lambda: statistics(Replicated())))
    assert_allclose(found, [5, 32 / 3, 32 / 3], rtol=1e-15)
    agree(messages == 0, f"{messages} messages")
    assert_allclose(jax.jit(lambda: statistics(None))(), found, rtol=1e-15)


def test_derivatives_are_those_of_the_whole_sample():
    x, every = samples(lambda random, n: random.standard_normal(n))
    start = sum(COUNTS[: ranks().rank])
    for statistic, want in (
        (distsolve.mean, np.full(len(every), 1 / len(every))),
        (distsolve.var, 2 * (every - every.mean()) / len(every)),
    ):
        found = jax.jit(jax.grad(lambda x, s=statistic: s(x)))(x)
        assert_allclose(found, want[start : start + len(x)], rtol=1e-12, atol=1e-15)


def test_derivatives_of_covariances():
    """Once and twice forwards, and backwards: with the means taken out they are polynomials."""

    def draw(random, n):
        x, y = random.standard_normal((2, 3, n, 35))
        return [*(x[:2] + 1j * y[:2]), x[2]]

    (x, dx, y), every = samples(draw)

    def derivatives(x, dx):
        def along(x):
            return jax.jvp(distsolve.covariance, (x,), (dx,))[1]

        return jax.jvp(along, (x,), (dx,))

    (once, twice), messages = sent(jax.jit(derivatives), x, dx)
    agree(messages == several(3), f"{messages} messages")
    u, du, w = (v - v.mean(0) for v in every)
    n = len(u)
    assert_allclose(once, (du.T @ u.conj() + u.T @ du.conj()) / n, rtol=1e-11, atol=1e-13)
    assert_allclose(twice, 2 * du.T @ du.conj() / n, rtol=1e-11, atol=1e-13)

    def norm(x):
        return jnp.sum(trees.squared(distsolve.covariance(x, y)))

    # The cotangents of the ranks' samples, against the slope along all of their directions.
    gradient, messages = sent(jax.jit(jax.grad(norm)), x)
    agree(messages == several(), f"{messages} messages")
    slope = mpi.allreduce(jnp.sum((gradient * dx).real))
    want = 2 * np.sum(((du.T @ w).conj() * (u.T @ w)).real) / n**2
    assert_allclose(slope, want, rtol=1e-11)


def test_a_batch_of_statistics_is_one_message():
    x, every = samples(lambda random, n: random.standard_normal((n, 4, 2)))
    statistics = jax.vmap(distsolve.covariance, in_axes=1)
    found, messages = sent(jax.jit(statistics), x)
    agree(messages == several(), f"{messages} messages")
    want = np.stack([np.cov(every[:, i].T, ddof=0) for i in range(4)])
    assert_allclose(found, want, rtol=1e-11)


def test_a_parameter_that_all_samples_share():
    x, every = samples(lambda random, n: random.standard_normal(n))
    step, a = 1e-6, 0.3
    wanted = (np.mean(np.exp((a + step) * every)) - np.mean(np.exp((a - step) * every))) / (
        2 * step
    )
    found = jax.jit(jax.grad(lambda a, x: distsolve.mean(jnp.exp(mpi.pvary(a) * x))))(a, x)
    assert_allclose(found, wanted, rtol=1e-8)


def test_inner_products_are_whole_and_conjugate_the_first():
    x = {"c": np.array([1 + 2j, 3.0]), "r": np.array([2.0])}
    y = {"c": np.array([1j, 1.0]), "r": np.array([5.0])}
    half, far = jnp.ones(4096, jnp.float16), np.array([3e200, 4e200j])

    def products(space):
        found = distsolve.vdot(x, y, space), distsolve.norm({"a": far}, space)
        return *found, distsolve.vdot(half, half, space)

    (product, norm, ones), messages = sent(jax.jit(lambda: products(Sharded())))
    want, size = np.vdot(x["c"], y["c"]) + 10, ranks().size
    assert_allclose(product, want * size, rtol=1e-15)
    assert_allclose(norm, 5e200 * np.sqrt(size), rtol=1e-15)
    assert_equal(ones, jnp.asarray(4096 * size, jnp.float32))
    agree(messages == 3 * several(), f"{messages} messages")
    (product, norm, ones), messages = sent(jax.jit(lambda: products(None)))
    assert_equal(product, jnp.asarray(want))
    agree(messages == 0, f"{messages} messages")


@pytest.mark.once
@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: distsolve.mean({}), "`x` must have at least one array"),
        (lambda: distsolve.mean({"a": jnp.ones(2), "b": 1.0}), r"`x` at \['b'\] must have samples"),
        (
            lambda: distsolve.mean([jnp.ones(2), "text"]),
            r"`x` at \[1\] must be an array of numbers",
        ),
        (lambda: distsolve.var(jnp.ones(2), ddof=1j), "`ddof` must be one real number"),
        (
            lambda: distsolve.vdot(jnp.ones(2), jnp.ones(3)),
            r"`y` must have the shape of `x`: expected \(2,\), got \(3,\)",
        ),
        (lambda: distsolve.vdot({"a": jnp.ones(2)}, [jnp.ones(2)]), "must have the structure"),
        (lambda: distsolve.norm({"n": jnp.arange(2)}), r"`x` at \['n'\] must be real or complex"),
        (lambda: distsolve.covariance({"a": jnp.ones(2)}), "`x` must be one array"),
        (lambda: distsolve.covariance(jnp.ones(2), jnp.ones(3)), "expected 2 on the leading axis"),
        (lambda: distsolve.weighted_mean(jnp.ones(2), jnp.ones(3)), r"expected shape \(2,\)"),
        (lambda: distsolve.weighted_mean(jnp.ones(2), jnp.full(2, 1j)), "must be one real array"),
        (lambda: check_replicated(1.0, Sharded()), "must be Replicated"),
        (lambda: jax.jit(check_replicated)(1.0), "call it outside jit"),
    ],
)
def test_wrong_arguments(call, text):
    with pytest.raises((TypeError, ValueError), match=text):
        call()


def different(change):
    """Return a tree that is the same on all ranks, but for a change on the last one."""
    tree = {
        "w": jnp.asarray([1.0, np.nan, -0.0]),
        "z": jnp.asarray([1j], jnp.complex64),
        "h": jnp.ones(2, jnp.bfloat16),
        "key": jax.random.key(5),
        "step": 3,
    }
    return change(tree) if ranks().rank == ranks().size - 1 else tree


def test_equal_copies_pass():
    other_nan = jnp.asarray(np.array([0x7FF8000000000123], np.uint64).view(np.float64))
    check_replicated(different(lambda tree: tree | {"w": tree["w"].at[1].set(other_nan[0])}))
    check_replicated({})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda t: t | {"w": t["w"] + 1e-9, "h": t["h"] * 3},
            r"`tree`\['h'\] differs from rank 0's by up to 2 on rank {last}; "
            r"`tree`\['w'\] differs from rank 0's by up to 1e-09 on rank {last}",
        ),
        (lambda t: t | {"w": jnp.abs(t["w"])}, r"\['w'\] differs from rank 0's by up to 0 on"),
        (lambda t: t | {"step": 4}, r"`tree`\['step'\] differs from rank 0's by up to 1 on rank"),
        (lambda t: t | {"key": jax.random.key(6)}, r"`tree`\['key'\] differs from rank 0's"),
        (
            lambda t: t | {"w": jnp.ones(4)},
            r"`tree`\['w'\] is float64\[3\] on rank 0, and `tree`\['w'\] is float64\[4\] on rank",
        ),
        (lambda t: t | {"z": t["z"].real}, r"complex64\[1\] on rank 0, and .*float32\[1\] on"),
        (
            lambda t: {"a": 1.0, **t},
            r"`tree`\['h'\] is .* on rank 0, and `tree`\['a'\] is float on",
        ),
        (lambda t: [t], "`tree` differs between ranks"),
    ],
)
def test_copies_that_differ_raise_on_all_ranks(change, text):
    if ranks().size == 1:
        check_replicated(different(change))
        return
    with pytest.raises(ValueError, match=text.format(last=ranks().size - 1)):
        check_replicated(different(change))


def test_only_the_ranks_of_the_space_are_compared():
    halves = ranks().communicators["halves"]
    check_replicated(jnp.asarray(ranks().rank % 2), Replicated(halves))

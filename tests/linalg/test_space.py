"""Products, norms and decisions over ranks, against NumPy on the whole vector."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from launch import job_environment, mpi_name, run_command
from linalg.solves import sent, several
from spmd import agree, assert_allclose, assert_equal, on, ranks

from distsolve import MeshAxis, Replicated, Sharded
from distsolve.linalg import trees

SPACES = {"replicated": Replicated, "sharded": Sharded}


def pieces(comm, dtype=np.float64):
    """Return the pieces of all ranks of a communicator, of 2, 0, 4, 0, ... rows."""
    random = np.random.default_rng(comm.size)

    def entries(*shape):
        real = random.standard_normal(shape)
        return {"r": real, "c": real[:, 0] + 1j * random.standard_normal(shape[0])}

    sizes = [0 if rank % 2 else rank + 2 for rank in range(comm.size)]
    return [entries(size, 3) for size in sizes]


def mine(comm, parts):
    return jax.tree.map(jnp.asarray, parts[comm.rank])


def whole(parts):
    return {k: np.concatenate([part[k] for part in parts]) for k in parts[0]}


def product(x, y):
    return sum(np.vdot(x[k], y[k]).real for k in x)


@pytest.mark.parametrize("kind", SPACES)
def test_squared_norm_of_a_piece_on_each_rank(kind):
    space = SPACES[kind]()
    x = jnp.asarray([1.0, 2.0, 2.0])
    wanted = 9.0 * (ranks().size if kind == "sharded" else 1)
    assert_allclose(space.norm(x) ** 2, wanted, rtol=1e-15)
    assert_equal(space.dot((x, x)), jnp.asarray([wanted]))
    assert_equal(int(space.size(x)), 3 * (ranks().size if kind == "sharded" else 1))


@on("world", "halves")
def test_products_of_pieces_are_one_message(comm):
    parts, space = pieces(comm), Sharded(comm)
    x, all_x = mine(comm, parts), whole(parts)
    y, all_y = jax.tree.map(lambda v: 2 * v + 1, (x, all_x))
    many = int(comm.size > 1)
    products, messages = sent(jax.jit(lambda x, y: space.dot((x, y), (x, x), (y, y))), x, y)
    pairs = ((all_x, all_y), (all_x, all_x), (all_y, all_y))
    assert_allclose(products, [product(*pair) for pair in pairs], rtol=1e-14)
    agree(messages == many == space.messages("dot"), f"{messages} messages")
    stack = jax.tree.map(lambda u, v: jnp.stack([u, v]), x, y)
    assert_allclose(space.project(stack, x), [product(all_x, all_x), product(all_x, all_y)])
    found = space.project(stack["c"], x["c"])
    assert_allclose(found, [np.vdot(v["c"], all_x["c"]) for v in (all_x, all_y)])
    agree(found.dtype == jnp.complex128, "a stack of complex vectors has complex coefficients")
    agree(Replicated(comm).messages("dot") == 0, "local products")


@pytest.mark.parametrize("exponent", [-37, 0, 37])
def test_norm_is_safe_for_one_message(exponent):
    # The large entry is on the last rank, a tiny one on the first, nothing between them.
    rank, last = ranks().rank, ranks().size - 1
    unit = np.float32(10.0**exponent)
    x = {
        "r": jnp.asarray([3 * unit, 1e-37][: int(rank == last) + int(rank == 0)], jnp.float32),
        "c": jnp.asarray([4j * unit][: int(rank == last)], jnp.complex64),
        "h": jnp.zeros(2, jnp.bfloat16),
    }
    norm, messages = sent(norms("sharded"), x)
    want = np.sqrt(sum(np.sum(np.abs(v.astype(complex)) ** 2) for v in gathered(x)))
    assert_allclose(norm, np.float32(want), rtol=3e-7)
    agree(messages == several() and norm.dtype == jnp.float32, f"{messages} messages")


NORMS = {}


def norms(kind):
    """Return the compiled norm of a space, the same for all tests."""
    return NORMS.setdefault(kind, jax.jit(SPACES[kind]().norm))


def gathered(x):
    return [np.asarray(v) for row in ranks().agreeing.allgather(x) for v in row.values()]


@pytest.mark.parametrize("kind", SPACES)
def test_norm_of_what_is_not_finite(kind):
    first = ranks().rank == 0 or kind == "replicated"
    for value in (np.inf, -np.inf, np.nan):
        x = jnp.asarray([1.0, value if first else 1e300, 1e-300])
        assert_equal(norms(kind)(x), jnp.asarray(np.abs(value)))
    for x in (jnp.zeros(3), jnp.zeros(0)):
        assert_equal(norms(kind)(x), jnp.asarray(0.0))


def test_norm_in_every_magnitude_matches_exact_arithmetic():
    random = np.random.default_rng(7)
    for dtype, widest in ((np.float32, 37), (np.float64, 300)):
        for top in (-widest + 8, 0, widest):
            x = random.standard_normal(40) * 10.0 ** random.uniform(-widest, top, 40)
            x = x.astype(dtype)
            want = np.sqrt(np.sum(x.astype(np.longdouble) ** 2)).astype(dtype)
            assert_allclose(norms("replicated")(jnp.asarray(x)), want, rtol=8 * np.finfo(dtype).eps)


def test_derivative_of_the_norm():
    x = jnp.asarray([3.0, 4.0])
    gradient = jax.grad(norms("sharded"))
    assert_allclose(gradient(x), x / (5 * np.sqrt(ranks().size)))
    assert_equal(gradient(0 * x), jnp.zeros(2))


@pytest.mark.parametrize("kind", SPACES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_opening_is_one_message(kind, dtype):
    space, rank, size = SPACES[kind](), ranks().rank, ranks().size
    x = jnp.full(2 + rank if kind == "sharded" else 3, 2.0, dtype)
    # Infinity on another rank must not reach the result through a product with zero.
    inputs = jnp.asarray([0.1, np.inf if kind == "sharded" and rank else 7.0, np.inf], dtype)
    inputs = inputs.at[0].add(0.01 * rank)
    opened = jax.jit(lambda *vectors, inputs, here: space.open(vectors, inputs, here))
    (norms, inputs, n), messages = sent(
        lambda: opened(x, 2 * x, inputs=inputs, here=space.rank_zero())
    )
    entries = sum(2 + r for r in range(size)) if kind == "sharded" else 3
    assert_allclose(norms, np.array([2, 4], dtype) * np.sqrt(entries), rtol=1e-6)
    assert_allclose(inputs, np.array([0.1, 7, np.inf], dtype), rtol=1e-6)
    agree(int(n) == entries, f"size {n}")
    agree(messages == several() == space.messages("open"), f"{messages} messages")
    agree(norms.dtype == inputs.dtype == dtype, "dtypes")


def test_text_of_a_program_is_the_same_on_all_ranks():
    space, x = Sharded(), jnp.ones(3)

    def program(x, here):
        norms, inputs, size = space.open((x,), jnp.ones(2), here)
        return space.offset(3), space.norm(x), norms, inputs, size

    text = jax.jit(program).lower(x, space.rank_zero()).as_text()
    agree(ranks().agreeing.bcast(text) == text, "the programs differ")


@pytest.mark.once
def test_sizes_are_exact_until_no_integer_holds_them():
    class Whole:
        size = 2**33 + 12345

    digits = trees.size_digits([Whole], jnp.float32)
    many = 2**16
    assert int(trees.size_of_digits(digits * many)) == Whole.size * many
    with jax.enable_x64(False):
        assert int(trees.size_of_digits(jnp.asarray(digits))) == 2**31 - 1


def test_agreement_is_the_maximum_and_nan_travels_as_infinity():
    rank, size, space = ranks().rank, ranks().size, Sharded()
    x = jnp.asarray([rank, -rank, np.nan if rank == size - 1 else 0.0])
    want = [size - 1, 0, np.inf if size > 1 else np.nan]
    assert_allclose(space.agree(x), want)
    assert_equal(space.agree(jnp.asarray(rank, jnp.int32)), jnp.asarray(size - 1, jnp.int32))
    for space, messages in ((Sharded(), 0), (Replicated(), several())):
        _, count = sent(space.decide, x)
        agree(count == messages == space.messages("decide"), f"{space}: {count} messages")


@pytest.mark.parametrize("kind", SPACES)
def test_a_whole_vector_from_pieces(kind):
    space, rank, size = SPACES[kind](), ranks().rank, ranks().size
    sizes = [3, 0, 2][:size] if kind == "sharded" else [3]
    every = np.arange(2.0 * sum(sizes)).reshape(-1, 2)
    offset = sum(sizes[:rank]) if kind == "sharded" else 0
    n = sizes[rank] if kind == "sharded" else 3
    found = space.offset(n)
    assert_equal(found, jnp.asarray(offset, jnp.int32))
    piece = jnp.asarray(every[offset : offset + n])
    assert_equal(space.assemble(piece, found, sum(sizes)), jnp.asarray(every))
    rows = space.gather(jnp.asarray(float(rank)))
    assert_equal(rows, jnp.arange(float(size)) if kind == "sharded" else jnp.asarray([float(rank)]))


@pytest.mark.parametrize("kind", SPACES)
def test_products_in_the_background(kind):
    space = SPACES[kind]()
    x = jnp.arange(3.0) + ranks().rank

    def program(x):
        pending, y = space.begin(((x, x), (x, 2 * x)), x)
        return space.finish(pending, 3 * y)

    ((products, y), messages) = sent(jax.jit(program), x)
    assert_equal(products, space.dot((x, x), (x, 2 * x)))
    assert_equal(y, 3 * x)
    wanted = several() if kind == "sharded" else 0
    agree(messages == wanted == space.messages("begin"), f"{messages} messages")


def test_batches_share_one_message():
    space = Sharded()
    x = jnp.arange(12.0).reshape(4, 3) + ranks().rank
    norms, messages = sent(jax.jit(jax.vmap(space.norm)), x)
    assert_allclose(norms, [space.norm(row) for row in x])
    agree(messages == several(), f"{messages} messages")


def test_spaces_are_equal_by_their_ranks(world):
    agree(Sharded() == Sharded() and hash(Sharded()) == hash(Sharded()), "equal")
    agree(Sharded(world) == Sharded(world) and Sharded(world) != Sharded(), "by communicator")
    agree(Sharded() != Replicated() and Replicated() != MeshAxis("i"), "by kind")
    agree(MeshAxis(["i", "j"]) == MeshAxis(("i", "j")), "by name")
    with pytest.raises(TypeError, match="`comm` is 'world'"):
        Sharded("world")


ON_A_MESH = """
import jax
import jax.numpy as jnp
import numpy as np
import sys
from jax.sharding import Mesh, PartitionSpec as P
import distsolve
jax.config.update("jax_enable_x64", True)
space = distsolve.MeshAxis("i")
split, same = P("i"), P()

def on_mesh(function, *args, outs=same):
    mesh = Mesh(np.array(jax.devices()), ("i",))
    specs = dict(mesh=mesh, in_specs=(split,) * len(args), out_specs=outs)
    return jax.jit(jax.shard_map(function, **specs))(*args)

def methods(x):
    index = jax.lax.axis_index("i")
    norms, inputs, size = space.open((x, 2 * x), jnp.asarray([3.0, jnp.inf]) + index)
    pending, y = space.begin(((x, x),), x)
    (xx,), y = space.finish(pending, y)
    agreed = space.agree(jnp.where(index == 2, jnp.nan, x[0]))
    stack = {"x": jnp.stack([x, 2 * x])}
    return dict(
        dot=space.dot((x, x), (x, 2 * x)), norm=space.norm(x), norms=norms, inputs=inputs,
        opened=size, size=space.size(x), begun=xx, agreed=agreed, gathered=space.gather(x[0]),
        assembled=space.assemble(x, space.offset(3), 12), projected=space.project(stack, {"x": x}),
        mean=distsolve.mean(x, space), var=distsolve.var(x, space=space),
        slope=jax.jvp(lambda x: distsolve.var(x, space=space), (x,), (x,))[1],
        covariance=distsolve.covariance(x[:, None] * jnp.arange(40.0), space=space),
    )

x = jnp.arange(1.0, 13.0)
found, xx = on_mesh(methods, x), float(x @ x)
wanted = dict(
    dot=[xx, 2 * xx], norm=xx ** 0.5, norms=[xx ** 0.5, 2 * xx ** 0.5], inputs=[3, np.inf],
    opened=12, size=12, begun=xx, agreed=np.inf, gathered=x[::3], assembled=x,
    projected=[xx, 2 * xx], mean=np.mean(x), var=np.var(x), slope=2 * np.var(x),
    covariance=np.var(x) * np.outer(np.arange(40), np.arange(40)),
)
for name, want in wanted.items():
    np.testing.assert_allclose(found[name], want, rtol=1e-14, err_msg=name)

def solve(d, b):
    return distsolve.cg(lambda p: d * p, b, space=space, tol=1e-10)

d = jnp.linspace(1.0, 4.0, 12)
y, info = on_mesh(solve, d, x, outs=(split, same))
np.testing.assert_allclose(y, x / d, rtol=1e-9)
assert info.reason_name == "converged", info
assert "mpi4py.MPI" not in sys.modules
print("all")
"""


@pytest.mark.once
def test_solve_on_the_axis_of_a_mesh_without_mpi():
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    ok, text = True, ""
    if ranks().rank == 0:
        env = job_environment(mpi_name(), flags)
        done = run_command([sys.executable, "-c", ON_A_MESH], 60, env)
        ok, text = done.stdout.strip() == "all", done.stdout + done.stderr
    agree(ok, text)

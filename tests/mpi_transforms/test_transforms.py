"""Every primitive under every transform of JAX: right, or our own sentence.

The table in docs/transforms.md says what each cell does, and each cell is a test. To write it anew:
`python tests/mpi_transforms/test_transforms.py --write docs/transforms.md`.
"""

import argparse
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mpi_transforms.cases import BY_NAME, CASES, SENTENCES, Case
from spmd import agree, assert_allclose, ranks

from distsolve import mpi

pytestmark = [pytest.mark.few_ranks, pytest.mark.above_mpi]

DOCS = Path(__file__).resolve().parents[2] / "docs/transforms.md"
REPEATS = 3


def mine(arrays: list[np.ndarray]) -> jax.Array:
    """Give this rank's array."""
    return jnp.asarray(arrays[ranks().rank])


def calls() -> int:
    """Give the number of MPI calls made so far."""
    return sum(mpi.call_count().values())


@dataclass(frozen=True)
class Run:
    """A function to jit and run: its arguments, results, and number of MPI calls if it matters."""

    function: Callable
    arguments: tuple
    expected: object
    calls: int | None = None

    def check(self) -> None:
        """Compare all results and the number of MPI calls."""
        before = calls()
        results = jax.block_until_ready(jax.jit(self.function)(*self.arguments))
        counted = calls() - before
        for got, want in zip(jax.tree.leaves(results), jax.tree.leaves(self.expected), strict=True):
            assert_allclose(got, want, rtol=1e-13)
        agree(self.calls in (None, counted), f"{counted} MPI calls, expected {self.calls}")

    def trace(self) -> None:
        """Trace only: what should be refused must not run, or a rank might wait for another."""
        jax.jit(self.function).trace(*self.arguments)


Runs = Iterator[Run]


@functools.cache
def calls_of(name: str) -> int:
    """Give how many MPI calls one plain call makes."""
    case, before = BY_NAME[name], calls()
    jax.block_until_ready(jax.jit(case.apply)(mine(case.arrays())))
    return calls() - before


def in_jit(case: Case) -> Runs:
    yield Run(case.apply, (mine(case.arrays()),), mine(case.reference(case.arrays())))


def in_vmap(case: Case) -> Runs:
    samples = [case.arrays(seed) for seed in range(REPEATS)]
    x = jnp.stack([mine(xs) for xs in samples], axis=1)
    y = np.stack([mine(case.reference(xs)) for xs in samples])
    yield Run(jax.vmap(case.apply, in_axes=1), (x,), y, calls_of(case.name))


def weighted(case: Case, function: Callable) -> Callable:
    """Give a loss whose gradient is the transpose applied to the cotangents."""
    w = mine(case.cotangents())
    return lambda x: jnp.sum(w * function(x))


def in_grad(case: Case) -> Runs:
    expected = mine(case.transposed(case.cotangents()))
    yield Run(jax.grad(weighted(case, case.apply)), (mine(case.arrays()),), expected)


def in_vjp(case: Case) -> Runs:
    def pull(x, ct):
        y, back = jax.vjp(case.apply, x)
        return y, back(ct)[0]

    ys, back = case.reference(case.arrays()), case.transposed(case.cotangents())
    yield Run(pull, (mine(case.arrays()), mine(case.cotangents())), (mine(ys), mine(back)))


def in_jvp(case: Case) -> Runs:
    x, t = case.arrays(), case.arrays(seed=5)
    yield Run(
        lambda x, t: jax.jvp(case.apply, (x,), (t,)),
        (mine(x), mine(t)),
        (mine(case.reference(x)), mine(case.reference(t))),
    )


def in_linear_transpose(case: Case) -> Runs:
    x = mine(case.arrays())
    yield Run(
        lambda ct: jax.linear_transpose(case.apply, x)(ct)[0],
        (mine(case.cotangents()),),
        mine(case.transposed(case.cotangents())),
    )


def in_scan(case: Case) -> Runs:
    samples = [case.arrays(seed) for seed in range(REPEATS)]

    def body(total, x):
        y = case.apply(x)
        return total + jnp.sum(y), y

    ys = np.stack([mine(case.reference(xs)) for xs in samples])
    yield Run(
        lambda xs: jax.lax.scan(body, 0.0, xs),
        (jnp.stack([mine(xs) for xs in samples]),),
        (np.sum(ys), ys),
        REPEATS * calls_of(case.name),
    )


def in_while_body(case: Case) -> Runs:
    def body(state):
        i, x, total = state
        return i + 1, x + 1.0, total + case.apply(x)

    steps = [case.reference([x + i for x in case.arrays()]) for i in range(REPEATS)]
    total = sum(mine(ys) for ys in steps)
    yield Run(
        lambda x: jax.lax.while_loop(
            lambda state: state[0] < REPEATS, body, (0, x, jnp.zeros(total.shape))
        )[2],
        (mine(case.arrays()),),
        total,
        REPEATS * calls_of(case.name),
    )


def in_while_condition(case: Case) -> Runs:
    y = mine(case.reference(case.arrays()))

    def condition(state):
        i, x = state
        right = jnp.all(jnp.abs(case.apply(x) - y) < 1e-12)
        # All ranks leave together, also where the value is wrong on one.
        return (i < REPEATS) & mpi.allreduce(right, mpi.LAND)

    yield Run(
        lambda x: jax.lax.while_loop(condition, lambda state: (state[0] + 1, state[1]), (0, x))[0],
        (mine(case.arrays()),),
        REPEATS,
        (REPEATS + 1) * (calls_of(case.name) + 1),
    )


def in_cond(case: Case) -> Runs:
    x, y = mine(case.arrays()), mine(case.reference(case.arrays()))

    def branch(flag, x):
        return jax.lax.cond(flag, case.apply, lambda x: jnp.full(y.shape, -1.0), x)

    yield Run(branch, (jnp.asarray(True), x), y, calls_of(case.name))
    yield Run(branch, (jnp.asarray(False), x), np.full(y.shape, -1.0), 0)


def in_checkpoint(case: Case) -> Runs:
    x = mine(case.arrays())
    kept = jax.checkpoint(lambda x: case.apply(jnp.sin(x)))
    sines = [np.sin(x) for x in case.arrays()]
    if case.refusal("grad"):
        yield Run(kept, (x,), mine(case.reference(sines)), calls_of(case.name))
        return
    before = calls()
    jax.block_until_ready(jax.jit(jax.value_and_grad(weighted(case, case.apply)))(x))
    made = calls() - before
    value = np.sum(mine(case.cotangents()) * mine(case.reference(sines)))
    slope = np.cos(x) * mine(case.transposed(case.cotangents()))
    yield Run(jax.value_and_grad(weighted(case, kept)), (x,), (value, slope), made)


def in_custom_vjp(case: Case) -> Runs:
    @jax.custom_vjp
    def function(x):
        return case.apply(x)

    # A reverse rule that communicates too.
    function.defvjp(
        lambda x: (case.apply(x), x),
        lambda x, ct: (x * mpi.allreduce(jnp.sum(ct)),),
    )
    x, ys = mine(case.arrays()), case.reference(case.arrays())
    slope = np.asarray(x) * sum(2.0 * y.size for y in ys)
    yield Run(
        jax.value_and_grad(lambda x: 2.0 * jnp.sum(function(x))),
        (x,),
        (2.0 * np.sum(mine(ys)), slope),
        calls_of(case.name) + 1,
    )


def in_custom_jvp(case: Case) -> Runs:
    @jax.custom_jvp
    def function(x):
        return case.apply(x)

    @function.defjvp
    def rule(primals, tangents):
        y = case.apply(*primals)
        return y, jnp.full(y.shape, jnp.sum(tangents[0]))

    x, y = mine(case.arrays()), mine(case.reference(case.arrays()))
    yield Run(
        jax.value_and_grad(lambda x: jnp.sum(function(x))),
        (x,),
        (np.sum(y), np.full(x.shape, float(y.size))),
        calls_of(case.name),
    )


TRANSFORMS: dict[str, Callable[[Case], Runs]] = {
    "jit": in_jit,
    "grad": in_grad,
    "jvp": in_jvp,
    "vjp": in_vjp,
    "linear_transpose": in_linear_transpose,
    "vmap": in_vmap,
    "scan": in_scan,
    "while body": in_while_body,
    "while condition": in_while_condition,
    "cond": in_cond,
    "checkpoint": in_checkpoint,
    "custom_vjp": in_custom_vjp,
    "custom_jvp": in_custom_jvp,
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("primitive", BY_NAME)
def test_cell(primitive, transform):
    case = BY_NAME[primitive]
    sentence = case.refusal(transform)
    for run in TRANSFORMS[transform](case):
        if sentence is None:
            run.check()
            continue
        before = calls()
        with pytest.raises(NotImplementedError, match=SENTENCES[sentence][0]):
            run.trace()
        agree(calls() == before, "it communicated before it refused")


def table() -> str:
    """Give the page: one row a primitive, one column a transform."""
    numbers = {sentence: str(i) for i, sentence in enumerate(SENTENCES, 1)}
    rows = [["", *TRANSFORMS], ["---"] * (1 + len(TRANSFORMS))]
    for case in CASES:
        cells = [case.refusal(transform) for transform in TRANSFORMS]
        rows.append([f"`{case.name}`", *("yes" if c is None else numbers[c] for c in cells)])
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    notes = [f"{numbers[name]}. {text}" for name, (_, text) in SENTENCES.items()]
    return PAGE.format(table="\n".join(lines), notes="\n".join(notes))


PAGE = """\
# Primitives and transforms

Each *yes* is a test: the value is compared with a serial computation over all ranks, a derivative
with the global linear map. A number stands for an exception that is raised while tracing, on every
rank and before any communication; its text is below.

{table}

{notes}

A batched call (`vmap`) is one MPI call for the whole batch. `jax.checkpoint` does not repeat an MPI
call. The value and the tangent of `allreduce`, `reduce`, `scan`, `exscan` and `bcast` travel in one
message; the tangent of `iallreduce` has an `allreduce` of its own, at the `wait`. Integers and
booleans have no derivative, as everywhere in JAX.

The results of `allreduce`, `allreduce_symmetric`, `wait`, `bcast`, `allgather` and `allgatherv` are
the same on every rank, and so are their cotangents: each rank gets its own share of a gradient.
Apply `pvary` to a replicated value that enters per-rank work, and `jax.grad` gives the full
gradient on every rank. `allreduce_symmetric` is differentiated along symmetric or Hermitian
matrices.

A derivative is MPI calls too, so every rank must differentiate through the same calls: an operand
that depends on the parameters on one rank and is a constant on another gives the two ranks
different messages. Let it depend on them everywhere, if need be as `0 * x`. The same holds for a
batch: an operand is batched on all ranks or on none.

Written by `python tests/mpi_transforms/test_transforms.py --write docs/transforms.md`.
"""


def test_docs_are_up_to_date():
    text = DOCS.read_text() if DOCS.exists() else ""
    assert text == table(), "write it anew: see the first lines of this file"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path, default=DOCS)
    parser.parse_args().write.write_text(table())

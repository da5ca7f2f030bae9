"""The COST tables are kept: products and messages of one step, counted as MPI calls."""

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from linalg.solves import calls, layout, reductions
from spmd import agree, ranks

from distsolve import mpi
from distsolve.linalg import Gram, Replicated, Sharded, cg, gmres, lsmr, minres
from distsolve.linalg.krylov import cg as cgs
from distsolve.linalg.krylov import cg_gram
from distsolve.linalg.krylov import gmres as gmres_file
from distsolve.linalg.krylov import lsmr as lsmr_file
from distsolve.linalg.krylov import minres as minres_file

pytestmark = pytest.mark.few_ranks

N, FEW, MORE = 12, 3, 5
SOLVERS = {
    name: (functools.partial(cg, method=name), cgs.METHODS[name].cost) for name in cgs.METHODS
}
SOLVERS["minres"] = minres, minres_file.COST
SOLVERS["gmres"] = functools.partial(gmres, restart=8), gmres_file.COST
DOCS = Path(__file__).resolve().parents[2] / "docs/krylov.md"
COLUMNS = {
    "products with `A`": "matvec",
    "with its adjoint": "adjoint",
    "reductions": "reductions",
    "agreements": "agreements",
    "vectors held": "vectors",
}

VECTOR = 5000
STEP = re.compile(r"^%[\w.]*.*?^}", re.MULTILINE | re.DOTALL)
COPY = re.compile(rf"\[{VECTOR}\]\S* copy\(")


@pytest.mark.once
@pytest.mark.parametrize("method", ["classic", "single_reduction", "gram"])
def test_a_step_copies_no_vector(method):
    """Each copy would cost as much as an update of x."""
    b, J = jnp.ones(VECTOR), jnp.ones((3, VECTOR))

    def A(p):
        return 3 * p - jnp.roll(p, 1) - jnp.roll(p, -1)

    solve = functools.partial(cg, A, method=method, space=Sharded())
    if method == "gram":
        solve = functools.partial(cg, Gram(J, shift=1.0))
    text = jax.jit(solve).lower(b).compile().as_text()
    loops = [body for body in STEP.findall(text) if loop_of(body) in text and "while(" not in body]
    agree(bool(loops), "no loop found")
    copies = [line for body in loops for line in body.splitlines() if COPY.search(line)]
    agree(not copies, "\n".join(copies))


def loop_of(computation):
    """Return the words by which a while loop names a computation as its body."""
    return f"body={computation.split(maxsplit=1)[0]},"


def marked(product):
    """Return the product, told apart from other messages: each one makes a barrier."""
    return jax.lax.optimization_barrier((product, mpi.bcast(jnp.zeros(()))))[0]


def cost_of_a_step(solve):
    """Return what a step of ``solve(maxiter)`` adds: MPI calls that reduce, and products."""

    def counts(maxiter):
        (_, info), made = calls(solve, maxiter)
        sums = reductions(made)
        agree(int(info.iterations) == maxiter, info.message)
        return np.array([sums, made.get("MPI_Bcast", 0)]), sums - int(info.reductions)

    (few, unseen), (more, unseen_more) = counts(FEW), counts(MORE)
    return (more - few) / (MORE - FEW), (unseen, unseen_more)


@pytest.mark.parametrize(
    ("name", "where"), [*((name, "uneven") for name in SOLVERS), ("minres", "replicated")]
)
def test_a_step_costs_what_the_table_says(name, where):
    solver, cost = SOLVERS[name]
    space, mine = layout(where, N)
    diagonal, b = jnp.asarray(np.linspace(1, 30, N)[mine]), np.ones(N)[mine]

    def A(p):
        return marked(diagonal * p)

    (messages, products), unseen = cost_of_a_step(
        lambda k: solver(A, b, tol=0, maxiter=k, space=space)
    )
    kind = "agreements" if where == "replicated" else "reductions"
    agree(messages == (cost[kind] if ranks().size > 1 else 0), f"{messages} {cost}")
    agree(products == cost["matvec"], f"{products} products, {cost}")
    agree(unseen == (0, 0), f"info.reductions misses {unseen}")


@pytest.mark.parametrize("columns", ["replicated", "uneven"])
def test_a_step_of_least_squares_costs_what_the_table_says(columns):
    cost, mine = lsmr_file.COST, layout("uneven", N).mine
    diagonal, b = jnp.asarray(np.linspace(1, 30, N)[mine]), np.ones(N)[mine]
    if columns == "replicated":
        columns_space, unknowns = Replicated(), N
        rows = jnp.diag(jnp.linspace(1, 30, N))[mine]
        forward, backward = (lambda p: marked(rows @ p)), (lambda u: marked(u @ rows))
        # The norm of the rows, the sum of the shares of A^H u, and the agreement.
        expected = 3
    else:
        columns_space, unknowns = Sharded(), len(b)
        forward = backward = lambda p: marked(diagonal * p)
        expected = cost["reductions"]
    (messages, products), unseen = cost_of_a_step(
        lambda k: lsmr(
            forward,
            b,
            np.zeros(unknowns),
            adjoint=backward,
            tol=0,
            maxiter=k,
            columns_space=columns_space,
        )
    )
    agree(messages == (expected if ranks().size > 1 else 0), f"{messages} {cost}")
    agree(products == cost["matvec"] + cost["adjoint"], f"{products} products, {cost}")
    # The sums of shares are a part of the products.
    seen = columns == "replicated" or unseen == (0, 0)
    agree(seen, f"info.reductions misses {unseen}")


def table():
    """Return the table of docs/krylov.md."""
    costs = {f'`cg`, `method="{name}"`': method.cost for name, method in cgs.METHODS.items()}
    costs |= {"`cg` of a `Gram`": cg_gram.COST, "`minres`": minres_file.COST}
    costs |= {"`gmres`, `restart=30`": gmres_file.COST, "`lsmr`": lsmr_file.COST}
    rows = [["solver", *COLUMNS], ["---"] * (1 + len(COLUMNS))]
    rows += [
        [name, *(cost.get(key, 0) for key in COLUMNS.values())] for name, cost in costs.items()
    ]
    return "".join(f"| {' | '.join(map(str, row))} |\n" for row in rows)


@pytest.mark.once
def test_the_table_of_costs_is_up_to_date():
    agree(table() in DOCS.read_text(), f"docs/krylov.md should have:\n{table()}")

"""The pages say what is: names, links, programs, and the table of README.md.

A block of Python in a page follows a mark in an HTML comment. `runs`: it is run on any number of
ranks. `runs once`: on one. `runs in a job`: by `tests/jobs/test_pages.py`. `from FILE`: it stands
in that program as it is. `compiles`: it needs what is not there, such as a handler of its own.
"""

import ast
import contextlib
import functools
import inspect
import re
import runpy
import tomllib
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from spmd import agree, ranks

import distsolve
from distsolve import linalg, mpi

pytestmark = [pytest.mark.few_ranks, pytest.mark.above_mpi]

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]
REFERENCE = (
    "primitives.md",
    "spaces.md",
    "jacobians.md",
    "natural-gradient.md",
    "solver.md",
    "krylov.md",
    "preconditioners.md",
    "sparse.md",
    "diagnosis.md",
    "initialize.md",
)
EXAMPLES = sorted((ROOT / "docs/examples").glob("*.py"))
ENTRY = re.compile(r"^\.\. auto(?:function|class|exception|data):: ([\w.]+)$", re.MULTILINE)
BLOCK = re.compile(r"^(?:<!-- (.+?) -->\n)?```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")
BLOCKS = [
    pytest.param(
        *(page, mark, code),
        id=f"{page.name}-{k}",
        marks=() if mark == "runs" else pytest.mark.once,
    )
    for page in PAGES
    for k, (mark, code) in enumerate(BLOCK.findall(page.read_text()))
]
PUBLIC = sorted(
    {
        (module.__name__, name)
        for module in (distsolve, mpi)
        for name in module.__all__
        if not name.startswith("__")
    }
)


@contextlib.contextmanager
def users_settings():
    """Undo the strictness of the tests: a user's program runs with the defaults of JAX."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.once
@pytest.mark.parametrize(("module", "name"), PUBLIC)
def test_every_public_name_is_documented(module, name):
    public = getattr(distsolve if module == "distsolve" else mpi, name)
    summary = (inspect.getdoc(public) or "").partition("\n")[0]
    agree(summary.endswith("."), f"summary of {module}.{name}: {summary!r}")
    pages = [(ROOT / "docs" / page).read_text() for page in REFERENCE]
    mention = re.compile(rf"`(?:[\w.]+\.)?{name}\b")
    agree(any(map(mention.search, pages)), f"{name} is in none of {REFERENCE}")


@pytest.mark.once
def test_every_public_name_has_one_entry_in_the_reference():
    """Those of `distsolve.linalg` are in `distsolve`, as the same objects."""
    pages = [page.read_text() for page in sorted((ROOT / "docs/reference").glob("*.md"))]
    entries = Counter(name for page in pages for name in ENTRY.findall(page))
    public = {f"{module}.{name}" for module, name in PUBLIC} - {"distsolve.mpi"}
    public.add("distsolve.linalg.space.Space")  # what all spaces have
    agree(not public - entries.keys(), f"without an entry: {public - entries.keys()}")
    agree(not entries - Counter(public), f"twice, or not public: {entries - Counter(public)}")
    agree(set(linalg.__all__) <= set(distsolve.__all__), "names of linalg only")


@pytest.mark.once
def test_the_citation_is_of_this_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    cited = (ROOT / "CITATION.cff").read_text().splitlines()
    wanted = {f"{key}: {project[key]}" for key in ("version", "license")}
    agree(wanted <= set(cited), f"CITATION.cff lacks {wanted - set(cited)}")


@pytest.mark.once
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    missing = [link for link in LINK.findall(text) if not (page.parent / link).exists()]
    agree(not missing, f"{page.name}: {missing}")


@pytest.mark.parametrize(("page", "mark", "code"), BLOCKS)
def test_blocks(page, mark, code):
    compile(code, page.name, "exec", ast.PyCF_ONLY_AST)
    if mark in ("runs", "runs once"):
        with users_settings():
            exec(compile(code, page.name, "exec"), {"__name__": "block"})
    elif mark not in ("runs in a job", "compiles"):
        assert mark.startswith("from "), f"{mark!r} is no mark"
        assert code in (ROOT / mark.removeprefix("from ")).read_text(), "differs from the program"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_run_and_are_shown(path):
    agree(any(f"examples/{path.name})" in page.read_text() for page in PAGES), "in no page")
    with users_settings():
        runpy.run_path(str(path), run_name="__main__")


@functools.cache
def table():
    """Return the cells of README.md's table, by primitive."""
    rows = re.findall(r"^\| `([a-z_]+)` \|(.*)\|$", README.read_text(), re.MULTILINE)
    return {name: [cell.strip() for cell in cells.split("|")] for name, cells in rows}


def primitives():
    """Return each primitive as a function of one array, and an array for this rank."""
    rank, size = ranks().rank, ranks().size
    x = jnp.ones((4096, 2), jnp.float32)
    stack = jnp.ones((size, 4096), jnp.float32)
    everything = jnp.ones((size * 4096, 2), jnp.float32)
    counts = [4096] * size
    left, right = (rank - 1) % size, (rank + 1) % size
    sent = jnp.float32(1)

    def sendrecv(x):
        return mpi.sendrecv(
            jax.tree.map(lambda leaf: sent.astype(leaf.dtype), x), x, source=left, dest=right
        )

    def background(x):
        return mpi.wait(mpi.iallreduce(x))

    elementwise = ("allreduce", "reduce", "scan", "exscan", "bcast", "pvary")
    return {
        **{name: (getattr(mpi, name), x) for name in (*elementwise, "gather", "allgather")},
        "allreduce_symmetric": (mpi.allreduce_symmetric, jnp.ones((64, 64), jnp.float32)),
        "iallreduce": (background, x),
        "wait": (background, x),
        "reduce_scatter": (mpi.reduce_scatter, stack),
        "scatter": (mpi.scatter, stack if rank == 0 else x),
        "alltoall": (mpi.alltoall, stack),
        "gatherv": (lambda x: mpi.gatherv(x, counts), x),
        "scatterv": (lambda x: mpi.scatterv(x, counts), everything if rank == 0 else x),
        "allgatherv": (lambda x: mpi.allgatherv(x, counts), x),
        "alltoallv": (lambda x: mpi.alltoallv(x, counts, counts), everything),
        "send": (lambda x: mpi.send(x, right), x),
        "recv": (lambda x: mpi.recv(x, left), x),
        "sendrecv": (sendrecv, x),
    }


def is_traced(function, *args):
    """Return whether tracing succeeds, which sends nothing; refusals are our own exceptions."""
    try:
        jax.make_jaxpr(function)(*args)
    except (NotImplementedError, TypeError):
        return False
    return True


def derivative(name, call, x, differentiate):
    """Return the cell of a derivative: SUM where only that operation has one."""
    if not is_traced(differentiate(call), x):
        return "no"
    takes_op = "op" in inspect.signature(getattr(mpi, name)).parameters
    if not takes_op:
        return "yes"
    assert not is_traced(differentiate(lambda x: getattr(mpi, name)(x, mpi.MAX)), x)
    return "SUM"


def forward(call):
    return lambda x: jax.jvp(call, (x,), (x,))


def reverse(call):
    return jax.grad(lambda x: sum(jnp.sum(y) for y in jax.tree.leaves(call(x))))


def in_place(name, call, x):
    """Return whether no rank needs more memory than the operand."""
    if name == "send":
        return "-"
    try:
        mpi.assert_in_place(call, x)
        mine = True
    except AssertionError:
        mine = False
    if not all(ranks().agreeing.allgather(mine)):
        return "no"
    return "template" if name in ("recv", "sendrecv") else "yes"


@pytest.mark.parametrize("name", sorted(primitives()))
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_the_table_of_the_readme_says_what_is_in_place(name):
    found = in_place(name, *primitives()[name])
    agree(table()[name][1] == found, f"{name}: found {found}, README.md has {table()[name][1]}")


@pytest.mark.once
@pytest.mark.parametrize("name", sorted(primitives()))
def test_the_table_of_the_readme(name):
    call, x = primitives()[name]

    def yes(function, x):
        return "yes" if is_traced(function, x) else "no"

    float8 = x.astype(jnp.float8_e4m3fn)
    found = [
        yes(jax.jit(call), x),
        yes(call, {"one": x, "two": (x,)}),
        yes(jax.vmap(call), jnp.stack([x, x])),
        derivative(name, call, x, forward),
        "no" if name == "send" else derivative(name, call, x, reverse),
        "all" if is_traced(call, float8) else "numbers",
    ]
    listed = table()[name][:1] + table()[name][2:]
    agree(listed == found, f"{name}: found {found}, README.md has {listed}")


@pytest.mark.once
def test_the_table_of_the_readme_has_every_primitive():
    helpers = {"assert_in_place", "call_count", "is_checking", "prepare", "rank"}
    helpers |= {"set_chunk_bytes", "set_timeout", "size", "trace"}
    functions = {n for n in mpi.__all__ if inspect.isfunction(getattr(mpi, n))} - helpers
    agree(set(table()) == functions, f"{set(table()) ^ functions}")

"""What in the facts of all ranks deserves a warning, in a sentence with the remedy."""

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from distsolve.mpi.launcher import mismatch

Facts = dict[str, Any]
Warnings = Iterator[tuple[str, str]]

MOST_VALUES = 3  # of a thing that differs between ranks, that are told
BINDING = "docs/environment.md says how to bind ranks to cores"


def spans(numbers: Iterable[int]) -> str:
    """Write whole numbers as ranges: ``0-3, 7``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)


def plural(number: int, what: str) -> str:
    """Write a number of things."""
    return f"{number} {what}{'s'[: number != 1]}"


def by_node(facts: list[Facts]) -> dict[str, list[int]]:
    """Return the ranks of each node."""
    nodes = defaultdict(list)
    for rank, mine in enumerate(facts):
        nodes[mine["node"]].append(rank)
    return dict(nodes)


def cores_of(facts: list[Facts], ranks: list[int]) -> set[int]:
    """Return the cores that the ranks of a node may use together."""
    return set().union(*(facts[rank]["cores"] for rank in ranks))


def nodes(facts: list[Facts]) -> list[dict[str, Any]]:
    """Return each node with its ranks, cores, threads per rank and CPU."""
    return [
        {
            "name": name,
            "ranks": ranks,
            "cores": sorted(cores_of(facts, ranks)),
            "threads": facts[ranks[0]]["threads"],
            "cpu": facts[ranks[0]]["cpu"],
        }
        for name, ranks in by_node(facts).items()
    ]


def threads_of(mine: Facts) -> int:
    """Return how many threads a rank may keep busy at a time."""
    return max(mine["threads"].values())


def of_facts(facts: list[Facts], plugins: list[str]) -> Warnings:
    """Find what is unlike what it should be.

    Parameters
    ----------
    facts : list of dict
        Of each rank, from `distsolve.commands.facts`.
    plugins : list of str
        Of JAX, for other devices than CPUs.

    Yields
    ------
    str, str
        What it is about, and a sentence.
    """
    yield from _of_libraries(facts[0], len(facts))
    yield from _of_cores(facts)
    yield from _of_differences(facts)
    without = [rank for rank, mine in enumerate(facts) if mine["driver"] is None]
    if plugins and without and facts[0]["environment"].get("JAX_PLATFORMS") != "cpu":
        yield (
            "GPU",
            f"JAX has the plugin {', '.join(plugins)}, but rank {spans(without)} finds no driver "
            "of a GPU: set JAX_PLATFORMS=cpu, or install the driver's library",
        )


def _of_libraries(first, size):
    if "error" in first["mpi"]:
        return
    if text := mismatch(size, first["mpi"]["library"]):
        yield "launcher", text
    files = first["mpi"]["file"]
    if not files:  # a world without MPI
        return
    if len(files) > 1:
        yield "MPI", f"more than one library is loaded: {', '.join(files)}"
    named = first["environment"].get("MPI4PY_LIBMPI", "")
    if os.path.isfile(named) and _folder(named) not in map(_folder, files):
        yield (
            "MPI",
            f"MPI4PY_LIBMPI names {named}, but {files[0]} is loaded: put the folder of the former "
            "first into LD_LIBRARY_PATH",
        )


def _folder(path):
    return os.path.dirname(os.path.realpath(path))


def _of_cores(facts):
    full, shared = [], []
    for node, ranks in by_node(facts).items():
        cores = cores_of(facts, ranks)
        threads = sum(threads_of(facts[rank]) for rank in ranks)
        if threads > len(cores):
            full.append((node, ranks, threads, len(cores)))
        if sum(len(facts[rank]["cores"]) for rank in ranks) > len(cores):
            shared.append((node, cores))
    if full:
        node, ranks, threads, available = full[0]
        each = threads / len(ranks)
        remedy = "start fewer ranks on a node"
        if each > 1:
            remedy = (
                "set PJRT_NPROC (XLA) and OMP_NUM_THREADS (BLAS) to the cores that a rank can "
                "have, or bind the ranks"
            )
        yield (
            "threads",
            f"{plural(len(ranks), 'rank')} x {each:.3g} thread{'s'[: each != 1]} = {threads} "
            f"threads on {plural(available, 'core')} of {_and_others(node, full)}: {remedy}",
        )
    if shared:
        node, cores = shared[0]
        yield (
            "binding",
            f"ranks share the cores {spans(cores)} of {_and_others(node, shared)}, and may wander "
            f"between them: {BINDING}",
        )


def _and_others(node, found):
    return f"node {node}" + (f" and {len(found) - 1} more" if len(found) > 1 else "")


def _of_differences(facts):
    compile_alike = "compiled programs may round differently between these ranks"
    one = "use one environment on all nodes"
    equally = "set it equally on all ranks"
    yield from _differences("CPU", [mine["cpu"] for mine in facts], compile_alike)
    every = set().union(*(mine["vectors"] for mine in facts))
    lacking = [" ".join(sorted(every - set(mine["vectors"]))) for mine in facts]
    lacking = [f"without {names}" if names else "all there" for names in lacking]
    yield from _differences("vector instructions", lacking, compile_alike)
    for name in facts[0]["versions"]:
        yield from _differences(name, [mine["versions"].get(name) for mine in facts], one)
    for name, label in (("library", "MPI library"), ("thread_level", "thread level")):
        yield from _differences(label, [mine["mpi"].get(name) for mine in facts], one)
    for name in sorted(set().union(*(mine["environment"] for mine in facts))):
        values = [mine["environment"].get(name, "not set") for mine in facts]
        yield from _differences(name, values, equally)


def _differences(about, values, remedy):
    ranks = defaultdict(list)
    for rank, value in enumerate(values):
        ranks[value].append(rank)
    if len(ranks) == 1:
        return
    told = [
        f"{value} on rank{'s'[: len(who) > 1]} {spans(who)}"
        for value, who in list(ranks.items())[:MOST_VALUES]
    ]
    more = [f"and {len(ranks) - MOST_VALUES} more values"] if len(ranks) > MOST_VALUES else []
    yield about, f"{', '.join([*told, *more])}: {remedy}"

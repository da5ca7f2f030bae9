"""The figures as lines of text, each as soon as it is known."""

from collections.abc import Iterator, Mapping
from typing import Any

from distsolve.commands.bench.cases import CASES
from distsolve.commands.bench.points import Key, Point, efficiency
from distsolve.commands.findings import plural

WIDTHS = {"quartiles": 15, "compute": 7, "wait": 7, "transfer": 8}
WIDTH = 10  # of the other columns


def title(conditions: dict[str, Any]) -> list[str]:
    """Return the first lines of a run, of its conditions as `report` describes them."""
    ranks, nodes, versions = (conditions[name] for name in ("ranks", "nodes", "versions"))
    library = conditions["mpi"]["library"].split(",")[0]
    return [
        f"distsolve bench: {plural(ranks, 'rank')} on {plural(len(nodes), 'node')}, "
        f"{nodes[0]['cpu']}, {conditions['date']}",
        f"distsolve {versions['distsolve']}, jax {versions['jax']}, {library}",
    ]


def head(point: Point) -> list[str]:
    """Return what stands above the rows of a case in one run."""
    case = CASES[point.case]
    times = f"{point.scaling} scaling; milliseconds of {case.step(point.method)}"
    if not case.is_solve:
        times = "microseconds of a call on the fastest rank, on average, on the slowest"
    return ["", f"{point.case}: {case.title}, {point.key.words}; {times}", _titles(_cells(point))]


def row(point: Point) -> str:
    """Return a point as a line below its `head`."""
    return _line(_cells(point))


def scaling(found: Mapping[Key, list[Point]]) -> Iterator[str]:
    """Write the series that have several numbers of ranks.

    Parameters
    ----------
    found : dict of Key to list of Point
        From `series`.

    Yields
    ------
    str
        Lines.
    """
    messages: dict[str, dict[int, list[Point]]] = {}
    for key, points in found.items():
        case = CASES[key.case]
        if len(points) < 2:
            continue
        if case.is_solve:
            where = "on each rank" if key.scaling == "weak" else "in all"
            yield ""
            yield (
                f"{key.case}, {key.scaling} scaling, {case.unit} {key.size} {where}, "
                f"{key.words}; milliseconds of {case.step(key.method)}"
            )
            rows = [
                {"ranks": point.ranks, "efficiency": f"{efficiency(points[0], point):.1%}"}
                | _solve(point)
                for point in points
            ]
            yield from (_titles(rows[0]), *map(_line, rows))
        else:
            messages.setdefault(f"{key.case}, {key.words}", {})[key.size] = points
    for name, sizes in messages.items():
        ranks = sorted({point.ranks for points in sizes.values() for point in points})
        yield from ("", f"{name}; microseconds of a call, slowest rank")
        columns = {n: plural(n, "rank") for n in ranks}
        yield _titles({"bytes": 0} | dict.fromkeys(columns.values()))
        for size, points in sizes.items():
            times = {columns[point.ranks]: f"{1e6 * point.seconds:.2f}" for point in points}
            yield _line({"bytes": size} | dict.fromkeys(columns.values(), "-") | times)


def _cells(point: Point) -> dict[str, Any]:
    case = CASES[point.case]
    cells: dict[str, Any] = {case.unit: point.size}
    if case.is_solve:
        return cells | _solve(point)
    times = {"minimum": point.minimum, "average": point.average, "maximum": point.seconds}
    cells |= {name: f"{1e6 * seconds:.2f}" for name, seconds in times.items()}
    return cells | {"quartiles": _quartiles(point, 1e6)}


def _solve(point: Point) -> dict[str, Any]:
    shares = zip(("compute", "wait", "transfer"), point.shares, strict=True)
    return {
        "iterations": point.steps,
        "median": f"{1e3 * point.seconds:.4f}",
        "quartiles": _quartiles(point, 1e3),
    } | {name: f"{share:.0%}" for name, share in shares}


def _quartiles(point: Point, factor: float) -> str:
    return f"{factor * point.lower:.4g}-{factor * point.upper:.4g}"


def _titles(cells: Mapping[str, Any]) -> str:
    return _line({name: name for name in cells})


def _line(cells: Mapping[str, Any]) -> str:
    return " ".join(f"{text!s:>{WIDTHS.get(name, WIDTH)}}" for name, text in cells.items())

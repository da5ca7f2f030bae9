"""What a run leaves in its folder, and what is read from there: JSON, CSV and pictures."""

import csv
import datetime
import json
import os
import shlex
import sys
from collections.abc import Container, Iterable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, NamedTuple

import jax

from distsolve.commands import facts, findings
from distsolve.commands.bench import plots, tables
from distsolve.commands.bench.cases import CASES
from distsolve.commands.bench.points import Key, Point, series
from distsolve.commands.together import InputError
from distsolve.mpi.comm import live

FORMAT = "distsolve bench 2"
# What is read of a file: the type of a value, the entries of a dictionary, or those of a list that
# is not empty. A float may be written without a point.
POINT = {field.name: field.type for field in fields(Point)}
COLUMNS = list(POINT)
NODE = {"ranks": [int], "cores": [int], "threads": dict, "cpu": str}
CONDITIONS = {
    "date": str,
    "ranks": int,
    "nodes": [NODE],
    "device": str,
    "versions": dict,
    "mpi": {"library": str, "chunk": int},
    "environment": dict,
}
POSITIVE = ("size", "ranks", "repeats", "seconds", "lower", "upper", "minimum", "average", "chunk")
MOST = 2**63  # larger numbers are none of what is measured


class Run(NamedTuple):
    """What one run measured, and on what; the content of its JSON file."""

    conditions: dict[str, Any]
    points: list[Point]


def conditions() -> dict[str, Any]:
    """Return hardware, versions, date and command of this run.

    Returns
    -------
    dict
        The same on all ranks but for the date.

    Communication
    -------------
    One allgather, by mpi4py.
    """
    mine = facts.of_rank() | {"mpi": facts.of_mpi()}
    comm = live(None)
    everyone = comm.allgather(mine) if comm else [mine]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
        "command": shlex.join(sys.orig_argv),
        "ranks": len(everyone),
        "nodes": findings.nodes(everyone),
        "device": jax.devices()[0].device_kind,
        "versions": mine["versions"],
        "mpi": mine["mpi"],
        "environment": mine["environment"],
    }


def write(folder: Path, run: Run) -> None:
    """Write a run as JSON and CSV, in place of what it wrote before."""
    when = "".join(filter(str.isdigit, run.conditions["date"].partition("+")[0]))
    stem = f"bench-{run.conditions['ranks']}ranks-{when}"
    records = list(map(asdict, run.points))
    content = {"format": FORMAT, "conditions": run.conditions, "points": records}
    try:
        _replace(folder / f"{stem}.json", json.dumps(content, indent=1) + "\n")
        _write_csv(folder / f"{stem}.csv", run.points)
    except OSError as error:
        raise InputError(f"--output {folder}: the results cannot be written: {error}.") from error


def read(folder: Path) -> list[Run]:
    """Read the runs of a folder, the oldest first.

    Raises
    ------
    InputError
        For a file that `write` did not write.
    """
    runs = []
    for path in sorted(folder.glob("bench-*.json")):
        try:
            content = json.loads(path.read_text())
            if content["format"] != FORMAT:
                raise ValueError(f"its format is {content['format']!r}, expected {FORMAT!r}")
            _check(content, {"conditions": CONDITIONS, "points": list}, "it")
            points = [_point(record) for record in content["points"]]
            runs.append(Run(content["conditions"], points))
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"{path}: cannot be read as results of `distsolve bench`: {error}. Move it away."
            ) from error
    return sorted(runs, key=lambda run: run.conditions["date"])


def _point(record: Any) -> Point:
    _check(record, POINT, "a point")
    point = Point(**record)
    if point.case not in CASES:
        raise ValueError(f"it has the unknown benchmark {point.case!r}")
    case = CASES[point.case]
    scalings = ("strong", "weak") if case.is_solve else ("",)
    for name, known in (("method", case.methods or ("",)), ("scaling", scalings)):
        if getattr(point, name) not in known:
            raise ValueError(f"{name} of {point.case} is {getattr(point, name)!r}")
    if (point.parameters > 0) != case.has_parameters:
        raise ValueError(f"parameters of {point.case} is {point.parameters}")
    return point


def _check(value: Any, shape: Any, name: str) -> None:
    """Raise ValueError, with the name of the value, unless it has a shape such as `CONDITIONS`."""
    kind = shape if isinstance(shape, type) else type(shape)
    is_kind = isinstance(value, (int, float) if kind is float else kind)
    if not is_kind:
        raise ValueError(f"{name} is {value!r}, expected {kind.__name__}")
    if kind in (int, float) and not (0 <= value < MOST and (value or name not in POSITIVE)):
        raise ValueError(f"{name} is {value}")
    if isinstance(shape, list):
        if not value:
            raise ValueError(f"{name} is empty")
        for entry in value:
            _check(entry, shape[0], f"an entry of {name}")
    elif isinstance(shape, dict):
        for key, inner in shape.items():
            if key not in value:
                raise ValueError(f"{name} has no {key!r}")
            _check(value[key], inner, key)


def merge(folder: Path, shown: Container[Key] | None = None) -> list[str]:
    """Join the runs of a folder into one table, as ``scaling.csv`` and as pictures.

    Parameters
    ----------
    folder : Path
    shown : set of Key, optional
        The series to tell of; all by default.

    Returns
    -------
    list of str
        Lines that say what was found and written.

    Raises
    ------
    InputError
        Where there are no results, or none that can be read.
    """
    runs = read(folder)
    found = series(point for run in runs for point in run.points)
    if not found:
        fault = "there are no results (bench-*.json)" if folder.is_dir() else "no such folder"
        raise InputError(
            f"--merge {folder}: {fault}. Name the folder that was --output of some runs."
        )
    told = {key: group for key, group in found.items() if shown is None or key in shown}
    lines = [*tables.scaling(told), ""]
    lines += [f"WARN  the runs differ in {text}" for text in _differences(runs)]
    try:
        _write_csv(folder / "scaling.csv", [point for group in found.values() for point in group])
        written = ["scaling.csv", *(path.name for path in plots.draw(found, folder))]
    except ImportError:
        written = ["scaling.csv; pictures need matplotlib: pip install 'distsolve[examples]'"]
    except OSError as error:
        raise InputError(f"{folder}: the results cannot be written: {error}.") from error
    return [*lines, f"{folder}: {', '.join(written)}"]


def _differences(runs: list[Run]) -> Iterable[str]:
    """Tell in what runs differ, besides their ranks, that changes times."""
    described: list[dict[str, Any]] = []
    for run in runs:
        known = run.conditions
        described.append(
            {
                "CPU": ", ".join(sorted({node["cpu"] for node in known["nodes"]})),
                "threads": str(known["nodes"][0]["threads"]),
                "device": known["device"],
                "MPI library": known["mpi"]["library"],
                **known["versions"],
                **known["environment"],
            }
        )
    for name in dict.fromkeys(name for one in described for name in one):
        values = list(dict.fromkeys(str(one.get(name, "not set")) for one in described))
        if len(values) > 1:
            yield f"{name}: {'; '.join(values)}"


def _write_csv(path, points):
    with open(f"{path}.part", "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(map(asdict, points))
    os.replace(f"{path}.part", path)


def _replace(path: Path, text: str) -> None:
    """Write a file so that who reads it meanwhile finds the old one or the new one, whole."""
    part = path.with_suffix(".part")
    part.write_text(text)
    os.replace(part, path)

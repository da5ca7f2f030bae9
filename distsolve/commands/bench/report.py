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
COLUMNS = [field.name for field in fields(Point)]


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
            points = [Point(**record) for record in content["points"]]
            if unknown := {point.case for point in points} - set(CASES):
                raise ValueError(f"it has the unknown benchmark {min(unknown)!r}")
            runs.append(Run(content["conditions"], points))
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"{path}: cannot be read as results of `distsolve bench`: {error}. Move it away."
            ) from error
    return sorted(runs, key=lambda run: run.conditions["date"])


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

"""Writes docs/performance.md: the words of performance.md here, and the figures of JSON files.

A line ``<!-- NAME -->`` stands for what NAME.json says: command, hardware, versions, the table and
a picture. The files are what ``--json`` of a comparison leaves, and runs.json what ``--runs`` makes
of a folder of results of `python -m distsolve bench`: without the names and paths of the machine.

usage: python benchmarks/write_performance.py [--runs DIR] [--folder DIR] [--page FILE]
"""

import argparse
import json
import re
import sys
from dataclasses import asdict
from pathlib import Path

from report import head_lines, markdown, run_lines

from distsolve.commands.bench import plots, report, tables
from distsolve.commands.bench.points import Point, series

HERE = Path(__file__).resolve().parent
DOCS = HERE.parent / "docs"
WORDS = HERE / "performance.md"
NOTE = "<!-- Written by `make performance`: edit benchmarks/performance.md instead. -->\n\n"


def read(path):
    """The results in a file, or an exit that says how to make them."""
    if not path.exists():
        sys.exit(f"{path}: not there; `make performance` measures it, on an idle machine")
    results = json.loads(path.read_text())
    if results["quick"]:
        sys.exit(f"{path}: a quick run, whose figures compare nothing; `make performance`")
    return results


def head(command, facts):
    """How the figures were made, and on what."""
    return f"By `{command}`:\n\n" + "\n".join(f"- {fact}" for fact in facts)


def link(picture, page):
    """The path of a picture as the page must write it."""
    return picture.relative_to(page.parent)


def comparison(name, folder, page):
    """What stands for the rows of a comparison, and its picture."""
    results = read(folder / f"{name}.json")
    facts = [*head_lines(results), *run_lines(results["samples"])]
    parts = [head(results["command"], facts), markdown(results["rows"]).rstrip()]
    picture = folder / f"{name}.svg"
    if draw(results["rows"], picture):
        parts.append(f"![Times of the {name} beside those of others]({link(picture, page)})")
    return "\n\n".join(parts)


def prediction(name, folder, page):
    """What stands for the held-out points of a model."""
    results = read(folder / f"{name}.json")
    lines = [results["columns"], ["---"] * len(results["columns"]), *results["rows"]]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    worst, limit = results["worst"], results["limit"]
    verdict = "reached" if worst <= limit else "not reached"
    closing = f"The worst error is {worst:.1%}; at most {limit:.0%} is the aim: {verdict}."
    return "\n\n".join([head(results["command"], head_lines(results)), table, closing])


def keep(folder, path):
    """Write what a page needs of the runs in a folder."""
    runs = report.read(folder)
    if not runs:
        sys.exit(f"{folder}: no runs; `make performance` makes them, on an idle machine")
    commands = dict.fromkeys(run.conditions["command"].partition("-m ")[2] for run in runs)
    results = {
        "quick": False,
        "command": "; ".join(f"python -m {arguments}" for arguments in commands),
        "facts": list(dict.fromkeys(line for run in runs for line in tables.title(run.conditions))),
        "points": [asdict(point) for run in runs for point in run.points],
    }
    path.write_text(json.dumps(results, indent=1) + "\n")


def scaling(name, folder, page):
    """What stands for runs of `distsolve bench` on several numbers of ranks, and their pictures."""
    results = read(folder / f"{name}.json")
    found = series(Point(**record) for record in results["points"])
    text = "\n".join(tables.scaling(found)).strip()
    drawn = plots.draw(found, folder, ".svg")
    pictures = [f"![{path.stem}]({link(path, page)})" for path in drawn]
    table = f"```text\n{text}\n```"
    return "\n\n".join([head(results["command"], results["facts"]), table, *pictures])


SECTIONS = {
    "primitives": comparison,
    "solvers": comparison,
    "prediction": prediction,
    "runs": scaling,
}


def relative_times(rows):
    """For each row with a target for a time: its title, and each contender's time over ours."""
    found = {}
    for row in rows:
        times = {name: x for name, x in row["medians"].items() if not isinstance(x, str)}
        if (
            row["targets"]
            and row["figure"] == "seconds"
            and row["ours"] in times
            and len(times) > 1
        ):
            ours = times[row["ours"]]
            name = f"{row['row']}. {row['title']}"
            found[name] = {other: time / ours for other, time in times.items()}
    return found


def draw(rows, path):
    """Draw times over ours, as the same SVG for the same figures; returns whether there are any."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    times = relative_times(rows)
    if not times:
        return False
    mpl.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "distsolve"}
    figure = Figure(figsize=(10, 1.5 + 0.5 * len(times)), layout="constrained")
    axes = figure.add_subplot()
    ours = {row["ours"] for row in rows}
    for name in dict.fromkeys(name for row in times.values() for name in row if name not in ours):
        places = [i for i, row in enumerate(times.values()) if name in row]
        ratios = [row[name] for row in times.values() if name in row]
        axes.plot(ratios, places, "o", label=name)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_yticks(range(len(times)), list(times))
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("time / time of distsolve")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=4)
    figure.savefig(path, format="svg", metadata={"Date": None})
    return True


def main():
    """Write the page and its pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=DOCS / "performance", help="of the JSON")
    parser.add_argument("--page", type=Path, default=DOCS / "performance.md")
    parser.add_argument("--runs", type=Path, metavar="DIR", help="results of `distsolve bench`")
    options = parser.parse_args()
    if options.runs:
        keep(options.runs, options.folder / "runs.json")

    def figures(match):
        return SECTIONS[match[1]](match[1], options.folder, options.page)

    page = re.sub(r"^<!-- (\w+) -->$", figures, WORDS.read_text(), flags=re.MULTILINE)
    title, rest = page.split("\n\n", 1)
    options.page.write_text(f"{title}\n\n{NOTE}{rest}")


if __name__ == "__main__":
    main()

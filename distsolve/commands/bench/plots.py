"""The figures as pictures: time and efficiency over ranks, and the time of a message over bytes."""

from pathlib import Path
from typing import Any

from distsolve.commands.bench.cases import CASES
from distsolve.commands.bench.points import Key, Point, efficiency, ideal
from distsolve.commands.findings import plural


def draw(found: dict[Key, list[Point]], folder: Path, suffix: str = ".png") -> list[Path]:
    """Draw one picture for each case and kind of scaling.

    Parameters
    ----------
    found : dict of Key to list of Point
        From `series`.
    folder : Path
    suffix : str
        Of the files, for their format.

    Returns
    -------
    list of Path
        The pictures.

    Raises
    ------
    ImportError
        Without matplotlib.
    """
    from matplotlib.figure import Figure

    groups: dict[str, dict[Key, list[Point]]] = {}
    for key, points in found.items():
        groups.setdefault("-".join(filter(None, key[:2])), {})[key] = points
    written = []
    for name, group in groups.items():
        is_solve = CASES[next(iter(group)).case].is_solve
        figure = Figure(figsize=(10, 4.5) if is_solve else (6, 4.5), layout="constrained")
        (_scaling if is_solve else _messages)(figure, group)
        figure.suptitle(name.replace("-", ", "))
        written.append(folder / f"{name}{suffix}")
        figure.savefig(written[-1], dpi=150)
    return written


def _scaling(figure: Any, group: dict[Key, list[Point]]) -> None:
    left, right = figure.subplots(1, 2)
    every = sorted({point.ranks for points in group.values() for point in points})
    for key, points in group.items():
        ranks = [point.ranks for point in points]
        seconds = [point.seconds for point in points]
        around = [
            [point.seconds - point.lower for point in points],
            [point.upper - point.seconds for point in points],
        ]
        label = f"{CASES[key.case].unit} {key.size}, {key.words}"
        line = left.errorbar(ranks, seconds, around, marker="o", capsize=3, label=label)
        color = line.lines[0].get_color()
        first = points[0]
        lossless = [ideal(first, n) for n in ranks]
        left.plot(ranks, lossless, linestyle="--", linewidth=1, color=color)
        for point in points:
            left.annotate(
                f"{point.steps}",
                (point.ranks, point.seconds),
                xytext=(4, 5),
                textcoords="offset points",
                fontsize=8,
            )
        shares = [efficiency(first, point) for point in points]
        right.plot(ranks, shares, marker="o", color=color)
    right.axhline(1.0, linestyle="--", linewidth=1, color="gray")
    left.plot([], [], linestyle="--", linewidth=1, color="gray", label="ideal")
    left.set_title("numbers: iterations", fontsize=9)
    left.set_ylabel("seconds of a step")
    left.set_yscale("log")
    left.legend(fontsize=8)
    right.set_ylabel("efficiency")
    right.set_ylim(bottom=0)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(every, list(map(str, every)))
        axes.set_xticks([], minor=True)
        axes.set_xlabel("ranks")
        axes.grid(alpha=0.3)


def _messages(figure: Any, group: dict[Key, list[Point]]) -> None:
    axes = figure.subplots()
    lines: dict[tuple[int, str], list[Point]] = {}
    for points in group.values():
        for point in points:
            lines.setdefault((point.ranks, point.key.words), []).append(point)
    for (ranks, words), points in sorted(lines.items()):
        sizes, seconds = [p.size for p in points], [p.seconds for p in points]
        lower, upper = [p.lower for p in points], [p.upper for p in points]
        axes.plot(sizes, seconds, marker="o", label=f"{plural(ranks, 'rank')}, {words}")
        axes.fill_between(sizes, lower, upper, alpha=0.3)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("bytes")
    axes.set_ylabel("seconds of a call, slowest rank")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)

"""The prediction as a picture: time over ranks, and over parameters."""

from pathlib import Path

from distsolve.commands.findings import plural
from distsolve.commands.predict.crossings import METHODS, Problem, around, axis


def draw(problem: Problem, ranks: list[int], folder: Path) -> Path:
    """Draw the predicted times, and return where.

    Raises
    ------
    ImportError
        Without matplotlib.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    numbers = axis(1, 2 * max(ranks))
    plans = [problem.plan(p) for p in numbers]
    sizes = around(problem.parameters)
    others = [problem.plan(ranks[0], P) for P in sizes]
    for name in METHODS:
        (line,) = left.plot(numbers, [plan[name].seconds for plan in plans], label=name)
        right.plot(sizes, [plan[name].seconds for plan in others], color=line.get_color())
        asked = [problem.plan(p)[name].seconds for p in ranks]
        left.plot(ranks, asked, marker="o", linestyle="", color=line.get_color())
    left.set_xlabel("ranks")
    left.set_title(f"{problem.parameters} parameters", fontsize=10)
    left.legend()
    right.set_xlabel("parameters")
    right.set_title(plural(ranks[0], "rank"), fontsize=10)
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_ylabel("seconds of an SR step")
        axes.grid(alpha=0.3)
    figure.suptitle(f"predicted, not measured: {problem.samples} samples, {problem.dtype}")
    path = folder / "prediction.png"
    figure.savefig(path, dpi=150)
    return path

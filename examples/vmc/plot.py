"""The convergence of a run as a picture."""

from __future__ import annotations

from pathlib import Path

import numpy as np

# Not pyplot: a figure of its own draws with Agg, and so needs no display.
from matplotlib.figure import Figure


def plot_convergence(path: Path, name: str, history: np.ndarray, exact: float | None) -> None:
    """Write a PNG with the energy and the variance of the local energy against the step.

    Parameters
    ----------
    path : Path
        Of the PNG.
    name : str
        Of the molecule.
    history : (steps, 3) array
        Energy, its standard error (hartree) and the variance (hartree^2) of each step.
    exact : float or None
        Known energy in hartree, drawn as a line.
    """
    steps = np.arange(1, len(history) + 1)
    energy, error, variance = history.T
    figure = Figure(figsize=(7, 6), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    top.fill_between(steps, energy - error, energy + error, alpha=0.3, label="standard error")
    top.plot(steps, energy, linewidth=1, label="VMC energy")
    if exact is not None:
        top.axhline(exact, color="black", linestyle="--", linewidth=1, label=f"exact {exact:.6f}")
    # The first steps are far off and would flatten the rest.
    late = energy[len(energy) // 5 :]
    floor = min(late.min(), late.min() if exact is None else exact)
    margin = max(late.max() - floor, 1e-4)
    top.set_ylim(floor - 0.3 * margin, late.max() + 0.7 * margin)
    top.set_ylabel("energy (hartree)")
    top.set_title(f"{name}: variational Monte Carlo")
    top.legend()
    bottom.semilogy(steps, variance, linewidth=1, color="tab:red")
    bottom.set_ylabel("variance of the\nlocal energy (hartree$^2$)")
    bottom.set_xlabel("optimisation step")
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)

"""Ground state of a small molecule by variational Monte Carlo, on any number of MPI ranks.

    mpiexec -n 2 python examples/vmc_molecule.py examples/molecules/h2.xyz

The XYZ file is in angstrom, energies are in hartree. The walkers are split over the ranks; the
parameters are optimised by stochastic reconfiguration with `distsolve.natural_gradient`, by the
method that ``--method`` names; the last line gives the energy, its standard error and, where the
file states it, the exact value.

With ``--checkpoint FILE`` a run that was interrupted, at whatever moment, goes on from FILE when it
is started again with the same options on the same number of ranks. With the same versions on the
same machine it then gives the same energies, bit for bit.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import numpy as np
from jax.flatten_util import ravel_pytree
from tqdm import tqdm
from vmc import estimate, optimizer
from vmc.plot import plot_convergence
from vmc.progress import Progress, agreed, resume, save
from vmc.sampler import initial_walkers, share
from vmc.wavefunction import initial_parameters, log_psi
from vmc.xyz import Molecule, read_xyz

import distsolve.mpi as mpi
from distsolve import plan
from distsolve.linalg import UpdateInfo

MEASUREMENTS = 20  # per walker between two updates of the second progress bar
METHODS = ("cg", "dense", "kernel")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line.

    Parameters
    ----------
    arguments : list of str, optional
        Instead of the command line.

    Returns
    -------
    argparse.Namespace
    """
    parser = argparse.ArgumentParser(
        description="Ground state energy of a small molecule by variational Monte Carlo.",
        epilog="Start it with `mpiexec -n RANKS python` to split the walkers over ranks.",
    )
    parser.add_argument("file", type=Path, help="XYZ file, coordinates in angstrom")
    parser.add_argument("--steps", type=_positive, help="optimisation steps (300)")
    parser.add_argument("--walkers", type=_positive, help="walkers on all ranks together (2000)")
    parser.add_argument("--seed", type=int, default=0, help="of all random numbers (0)")
    parser.add_argument(
        "--method",
        choices=[*METHODS, "auto"],
        default="cg",
        help="how the linear systems are solved (cg); auto shows its plan",
    )
    parser.add_argument("--charge", type=int, help="total charge, instead of the file's")
    parser.add_argument("--output", type=Path, help="PNG (FILE's name with _convergence.png)")
    parser.add_argument(
        "--checkpoint", type=Path, help="file to write, and to go on from if it exists"
    )
    parser.add_argument("--every", type=_positive, help="steps between two checkpoints (10)")
    parser.add_argument(
        "--restart", action="store_true", help="begin anew, ignoring the checkpoint"
    )
    parser.add_argument("--quick", action="store_true", help="20 steps of 200 walkers, for a test")
    options = parser.parse_args(arguments)
    for name, value in {"--every": options.every, "--restart": options.restart}.items():
        if value and not options.checkpoint:
            parser.error(f"{name}: it belongs to --checkpoint FILE; add that or leave {name} out")
    options.steps = options.steps or (20 if options.quick else 300)
    options.walkers = options.walkers or (200 if options.quick else 2000)
    options.measurements = MEASUREMENTS * (2 if options.quick else 20)
    options.every = options.every or 10
    options.output = options.output or Path(options.file.stem + "_convergence.png")
    if options.walkers < 2:
        parser.error("--walkers 1: the error bar needs at least 2 walkers")
    if not options.output.parent.is_dir():
        parser.error(f"--output {options.output}: no such folder; make it or choose another one")
    return options


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {value}")
    return value


def settings_of(options: argparse.Namespace, molecule: Molecule) -> dict:
    """What decides the energies of a run to the last bit.

    Parameters
    ----------
    options : argparse.Namespace
        As from `parse_arguments`.
    molecule : Molecule
        Its nuclei and its charge count, not the name of its file.

    Returns
    -------
    dict
        Names as the user knows them, and values.
    """
    nuclei = zip(molecule.symbols, molecule.positions.tolist(), strict=True)
    return {
        "ranks": mpi.size(),
        "molecule": ", ".join(f"{symbol} at {position}" for symbol, position in nuclei),
        "charge": molecule.charge,
        "dtype": str(jax.dtypes.canonicalize_dtype(float)),
        "--seed": options.seed,
        "--walkers": options.walkers,
        "--steps": options.steps,
        "--method": options.method,
        "measurements per walker": options.measurements,
    }


def choose(options: argparse.Namespace, parameters: int) -> str:
    """The method of all solves; where it is left to the program, rank 0 shows the plan.

    Parameters
    ----------
    options : argparse.Namespace
        As from `parse_arguments`.
    parameters : int
        Of the wave function.

    Returns
    -------
    str
        One of `METHODS`.
    """
    if options.method != "auto":
        return options.method
    choice = plan(options.walkers, parameters, iterations=optimizer.CG_ITERATIONS)
    if mpi.rank() == 0:
        print(choice, flush=True)
    return choice.method


def optimise(progress: Progress, improve, keep: Callable, every: int) -> Progress:
    """Run the optimisation with a progress bar on rank 0.

    Parameters
    ----------
    progress : Progress
        The start.
    improve : callable
        ``improve(state, rate, shift)``, jitted.
    keep : callable
        ``keep(progress)``, called before every step whose number `every` divides.
    every : int
        Steps between two of these calls.

    Returns
    -------
    Progress
        After all steps.
    """
    steps, done = len(progress.history), int(progress.steps)
    history = np.array(progress.history)
    bar = tqdm(
        range(done, steps), desc="optimise", initial=done, total=steps, disable=mpi.rank() != 0
    )
    for k in bar:
        if k % every == 0:
            keep(progress)
        state, report = improve(progress.state, *optimizer.schedule(k, steps))
        history[k] = report.energy, report.error, report.variance
        # The energy is reduced, so that all ranks leave here or none.
        if not np.isfinite(history[k, 0]):
            bar.close()
            sys.exit(
                f"error: the energy of step {k + 1} is {history[k, 0]}; expected a finite number. "
                "Try another --seed or more --walkers."
                if mpi.rank() == 0
                else 1
            )
        bar.set_postfix_str(
            f"E = {report.energy:.5f} +- {report.error:.5f} Ha, {solver(report.update)}, "
            f"accepted {float(report.acceptance):.0%}",
            refresh=False,
        )
        progress = progress._replace(state=state, steps=np.array(k + 1), history=history)
    return progress


def solver(update: UpdateInfo) -> str:
    """The method of a step in a few words.

    Parameters
    ----------
    update : UpdateInfo
        The report of the solve.

    Returns
    -------
    str
    """
    return update.method if update.solve is None else f"CG {int(update.solve.iterations)}"


def evaluate(progress: Progress, extend, keep: Callable, measurements: int) -> tuple[float, float]:
    """Measure the energy with frozen parameters, with a progress bar on rank 0.

    Parameters
    ----------
    progress : Progress
        The end of the optimisation, or later.
    extend : callable
        ``extend(chains, theta, step, reference)``, jitted.
    keep : callable
        ``keep(progress)``, called before each update of the bar.
    measurements : int
        Per walker.

    Returns
    -------
    energy, error : float
        In hartree.
    """
    state, done = progress.state, int(progress.measured)
    bar = tqdm(
        range(done, measurements, MEASUREMENTS),
        desc="evaluate",
        initial=done // MEASUREMENTS,
        total=measurements // MEASUREMENTS,
        disable=mpi.rank() != 0,
    )
    for _ in bar:
        keep(progress)
        chains = estimate.Chains(progress.state.walkers, progress.sums, progress.measured)
        chains, energy, error = extend(chains, state.theta, state.step, state.energy)
        progress = progress._replace(
            state=state._replace(walkers=chains.walkers), sums=chains.sums, measured=chains.measured
        )
        bar.set_postfix_str(f"E = {energy:.6f} +- {error:.6f} Ha", refresh=False)
    return float(energy), float(error)


def main(arguments: list[str] | None = None) -> None:
    """Run the program.

    Parameters
    ----------
    arguments : list of str, optional
        Instead of the command line.
    """
    options = parse_arguments(arguments)
    jax.config.update("jax_enable_x64", True)
    begin = time.perf_counter()
    # The file may be missing on one node only: then the other ranks must not go on and wait.
    molecule = agreed(read_xyz, options.file, options.charge)

    parameter_key, walker_key = jax.random.split(jax.random.key(options.seed))
    parameters = jax.jit(initial_parameters, static_argnums=1)(parameter_key, molecule)
    theta, unravel = ravel_pytree(parameters)
    physics = {"log_psi": lambda theta, x: log_psi(unravel(theta), x, molecule)}
    physics["molecule"] = molecule
    counts = tuple(len(share(options.walkers, rank, mpi.size())) for rank in range(mpi.size()))
    mine = share(options.walkers, mpi.rank(), mpi.size())
    walkers = jax.jit(initial_walkers, static_argnums=(1, 2))(walker_key, molecule, mine)
    start = jax.jit(partial(optimizer.start, **physics))
    progress = Progress(
        state=jax.eval_shape(start, theta, walkers),
        method=np.array(0),
        steps=np.array(0),
        history=np.zeros((options.steps, 3)),
        sums=np.zeros(len(mine)),
        measured=np.zeros(()),
    )

    keep, saved = lambda progress: None, None
    if options.checkpoint:
        where = (options.checkpoint, settings_of(options, molecule), counts)
        keep = partial(save, *where)
        saved = None if options.restart else resume(*where, progress)
    if saved is None:
        method = np.array(METHODS.index(choose(options, theta.size)))
        progress = progress._replace(state=start(theta, walkers), method=method)
    else:
        progress = saved

    solving = {"method": METHODS[int(progress.method)], "counts": counts}
    improve = jax.jit(partial(optimizer.improve, **physics, **solving), donate_argnums=0)
    extend = jax.jit(partial(estimate.extend, **physics, n_measurements=MEASUREMENTS))
    progress = optimise(progress, improve, keep, options.every)
    energy, error = evaluate(progress, extend, keep, options.measurements)
    if mpi.rank() == 0:
        plot_convergence(options.output, molecule.name, progress.history, molecule.exact)
        seconds = time.perf_counter() - begin
        print(
            f"{molecule.name}: {theta.size} parameters, {options.walkers} walkers on "
            f"{mpi.size()} rank{'s'[: mpi.size() > 1]}, {options.steps} steps, {seconds:.0f} s; "
            f"plot in {options.output}"
        )
        print(summary(molecule, energy, error))


def summary(molecule: Molecule, energy: float, error: float) -> str:
    """The last line of a run.

    Parameters
    ----------
    molecule : Molecule
        Gives the name and the exact energy.
    energy, error : float
        In hartree.

    Returns
    -------
    str
    """
    line = f"{molecule.name}: E = {energy:.6f} +- {error:.6f} hartree"
    if molecule.exact is None:
        return line + ", exact value not stated in the file"
    difference = 1000 * (energy - molecule.exact)
    return line + f", exact {molecule.exact:.6f} hartree, difference {difference:+.3f} mHa"


if __name__ == "__main__":
    main()

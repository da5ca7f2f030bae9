"""Ground state of a small molecule by variational Monte Carlo, on any number of MPI ranks.

    mpiexec -n 2 python examples/vmc_molecule.py examples/molecules/h2.xyz

The XYZ file is in angstrom, energies are in hartree. The walkers are split over the ranks; the
parameters are optimised by stochastic reconfiguration with `distsolve.natural_gradient`, by the
method that ``--method`` names; the last line gives the energy, its standard error and, where the
file states it, the exact value.
"""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from pathlib import Path

import jax
import numpy as np
from jax.flatten_util import ravel_pytree
from tqdm import tqdm
from vmc import estimate, optimizer
from vmc.plot import plot_convergence
from vmc.sampler import initial_walkers, share
from vmc.wavefunction import initial_parameters, log_psi
from vmc.xyz import Molecule, MoleculeError, read_xyz

import distsolve.mpi as mpi
from distsolve import plan
from distsolve.linalg import UpdateInfo

MEASUREMENTS = 20  # per walker between two updates of the second progress bar


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
        choices=["cg", "dense", "kernel", "auto"],
        default="cg",
        help="how the linear systems are solved (cg); auto shows its plan",
    )
    parser.add_argument("--charge", type=int, help="total charge, instead of the file's")
    parser.add_argument("--output", type=Path, help="PNG (FILE's name with _convergence.png)")
    parser.add_argument("--quick", action="store_true", help="20 steps of 200 walkers, for a test")
    options = parser.parse_args(arguments)
    options.steps = options.steps or (20 if options.quick else 300)
    options.walkers = options.walkers or (200 if options.quick else 2000)
    options.measurements = MEASUREMENTS * (2 if options.quick else 20)
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


def load(options: argparse.Namespace) -> Molecule:
    """Read the molecule on all ranks, or end all of them with one message.

    Parameters
    ----------
    options : argparse.Namespace
        As from `parse_arguments`.

    Returns
    -------
    Molecule
    """
    molecule, message = None, ""
    try:
        molecule = read_xyz(options.file, options.charge)
    except MoleculeError as error:
        message = str(error)
    # The file may be missing on one node only: then the other ranks must not go on and wait.
    failed = np.zeros(mpi.size(), np.int32)
    failed[mpi.rank()] = bool(message)
    failed = np.asarray(mpi.allreduce(failed))
    if failed.any():
        if mpi.rank() == int(np.argmax(failed)):
            print(f"error: {message}", file=sys.stderr, flush=True)
        raise SystemExit(2)
    return molecule


def optimise(state: optimizer.State, improve, steps: int) -> tuple[optimizer.State, np.ndarray]:
    """Run the optimisation with a progress bar on rank 0.

    Parameters
    ----------
    state : optimizer.State
        The start.
    improve : callable
        ``improve(state, rate, shift)``, jitted.
    steps : int
        How often.

    Returns
    -------
    state : optimizer.State
    history : (steps, 3) array
        Energy, error and variance of each step.
    """
    history = []
    bar = tqdm(range(steps), desc="optimise", disable=mpi.rank() != 0)
    for k in bar:
        state, report = improve(state, *optimizer.schedule(k, steps))
        history.append((float(report.energy), float(report.error), float(report.variance)))
        # The energy is reduced, so that all ranks leave here or none.
        if not np.isfinite(history[-1][0]):
            bar.close()
            sys.exit(
                f"error: the energy of step {k + 1} is {history[-1][0]}; expected a finite number. "
                "Try another --seed or more --walkers."
                if mpi.rank() == 0
                else 1
            )
        bar.set_postfix_str(
            f"E = {report.energy:.5f} +- {report.error:.5f} Ha, {solver(report.update)}, "
            f"accepted {float(report.acceptance):.0%}",
            refresh=False,
        )
    return state, np.array(history)


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


def evaluate(state: optimizer.State, extend, measurements: int) -> tuple[float, float]:
    """Measure the energy with frozen parameters, with a progress bar on rank 0.

    Parameters
    ----------
    state : optimizer.State
        The end of the optimisation.
    extend : callable
        ``extend(chains, theta, step, reference)``, jitted.
    measurements : int
        Per walker.

    Returns
    -------
    energy, error : float
        In hartree.
    """
    chains = estimate.start_chains(state.walkers)
    bar = tqdm(range(0, measurements, MEASUREMENTS), desc="evaluate", disable=mpi.rank() != 0)
    for _ in bar:
        chains, energy, error = extend(chains, state.theta, state.step, state.energy)
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
    molecule = load(options)

    parameter_key, walker_key = jax.random.split(jax.random.key(options.seed))
    parameters = jax.jit(initial_parameters, static_argnums=1)(parameter_key, molecule)
    theta, unravel = ravel_pytree(parameters)
    physics = {"log_psi": lambda theta, x: log_psi(unravel(theta), x, molecule)}
    physics["molecule"] = molecule
    shares = [share(options.walkers, rank, mpi.size()) for rank in range(mpi.size())]
    walkers = jax.jit(initial_walkers, static_argnums=(1, 2))(
        walker_key, molecule, shares[mpi.rank()]
    )
    if options.method == "auto":  # measured here: inside jit nothing may be sent
        table = str(plan(options.walkers, theta.size, iterations=optimizer.CG_ITERATIONS))
        if mpi.rank() == 0:
            print(table, flush=True)
    state = jax.jit(partial(optimizer.start, **physics))(theta, walkers)
    solving = {"method": options.method, "counts": tuple(map(len, shares))}
    improve = jax.jit(partial(optimizer.improve, **physics, **solving), donate_argnums=0)
    extend = jax.jit(partial(estimate.extend, **physics, n_measurements=MEASUREMENTS))

    state, history = optimise(state, improve, options.steps)
    energy, error = evaluate(state, extend, options.measurements)
    if mpi.rank() == 0:
        plot_convergence(options.output, molecule.name, history, molecule.exact)
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

"""Ground state of the transverse-field Ising chain with NetKet, and `distsolve.cg` as its solver.

    python examples/netket_sr.py --sites 10 --field 1.0

``H = -h sum_i X_i - sum_i Z_i Z_(i+1)`` on a periodic chain. NetKet samples a translation-invariant
restricted Boltzmann machine and builds its quantum geometric tensor; `distsolve.cg` solves the
system of stochastic reconfiguration. The last line compares the energy with exact diagonalisation.

NetKet knows nothing of MPI. On several ranks each one runs NetKet on chains of its own, and the
solver averages the tensor and the force over them: see `over_ranks`.

    mpiexec -n 2 python examples/netket_sr.py
"""

from __future__ import annotations

import argparse
import math
from functools import partial
from typing import Any, NamedTuple

import jax
import netket as nk

import distsolve
import distsolve.mpi as mpi

CHAINS = 64  # Markov chains on each rank; their scatter gives the error bar
DENSITY = 4  # hidden units a site
RATE = 0.05  # of the gradient descent
SHIFT = 0.01  # on the diagonal of the geometric tensor
LARGEST = 20  # sites that are diagonalised within minutes


def over_ranks(solver: Any) -> Any:
    """Make a solver of the systems of all ranks together out of one for NetKet.

    ``mean_r(S_r) x = mean_r(f_r)`` over the ranks r, each with as many samples as any other. Every
    rank gets the same ``x``, so parameters that were equal stay equal. A rank takes ``S_r`` and
    ``f_r`` about its own sample means, which scales them by ``1 - 1 / n`` on average if it has n
    independent samples: as n samples of one rank do.

    Parameters
    ----------
    solver : callable
        ``solver(A, b, x0)``, such as `distsolve.cg` with its options.

    Returns
    -------
    callable
        The same, where ``A`` and ``b`` are this rank's own. NetKet's ``diag_scale`` cannot be used
        with it: it rescales the system by this rank's diagonal.

    Communication
    -------------
    One allreduce for ``b``, and one for each product with ``A``.
    """

    def mean(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf / mpi.size(), mpi.allreduce(tree))

    def solve(A: Any, b: Any, x0: Any = None) -> Any:
        return solver(lambda p: mean(A @ p), mean(b), x0)

    return solve


class Run(NamedTuple):
    """A chain, the state that is optimised, and the optimisation."""

    hamiltonian: Any
    state: Any
    reconfiguration: Any  # holds the solver's report on its last solve, `info`
    driver: Any


def prepare(
    sites: int, field: float, samples: int, *, solver: Any, density: int = DENSITY, seed: int = 0
) -> Run:
    """Set NetKet up on this rank: equal parameters on all ranks, and chains of its own.

    Parameters
    ----------
    sites : int
    field : float
        In units of the coupling, positive.
    samples : int
        In each step, on all ranks together; each rank takes the same number from each chain.
    solver : callable
        As for ``netket.optimizer.SR``.
    density : int
        Hidden units a site.
    seed : int

    Returns
    -------
    Run
    """
    graph = nk.graph.Chain(sites)
    hilbert = nk.hilbert.Spin(0.5, sites)
    hamiltonian = nk.operator.IsingJax(hilbert, graph=graph, h=field, J=-1.0)
    model = nk.models.RBMSymm(
        symmetries=graph.translation_group(), alpha=density, param_dtype=float
    )
    state = nk.vqs.MCState(
        nk.sampler.MetropolisLocal(hilbert, n_chains=CHAINS),
        model,
        n_samples=CHAINS * max(1, round(samples / (CHAINS * mpi.size()))),
        seed=seed,
        sampler_seed=mpi.size() * (seed + 1) + mpi.rank(),
    )
    reconfiguration = nk.optimizer.SR(solver=solver, diag_shift=SHIFT)
    driver = nk.driver.VMC(
        hamiltonian,
        nk.optimizer.Sgd(RATE),
        variational_state=state,
        preconditioner=reconfiguration,
    )
    return Run(hamiltonian, state, reconfiguration, driver)


def measure(run: Run, samples: int) -> tuple[float, float]:
    """Measure the energy with frozen parameters, on the chains of all ranks.

    Parameters
    ----------
    run : Run
    samples : int
        On each rank.

    Returns
    -------
    energy, error : float
        Equal on all ranks.
    """
    run.state.n_samples = samples
    stats = run.state.expect(run.hamiltonian)
    # Ranks are independent, and each has as many samples: variances add.
    energy, variance = mpi.allreduce((stats.mean.real, stats.error_of_mean**2))
    return float(energy) / mpi.size(), math.sqrt(variance) / mpi.size()


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
        description="Ground state energy of the transverse-field Ising chain with NetKet.",
        epilog="Start it with `mpiexec -n RANKS python` to split the samples over ranks.",
    )
    parser.add_argument("--sites", type=int, default=10, help="of the periodic chain (10)")
    parser.add_argument("--field", type=float, default=1.0, help="over the coupling (1, critical)")
    parser.add_argument("--steps", type=int, default=200, help="of the optimisation (200)")
    parser.add_argument("--samples", type=int, default=1024, help="a step, on all ranks (1024)")
    parser.add_argument(
        "--method", choices=["classic", "single_reduction", "pipelined"], default="classic"
    )
    parser.add_argument("--seed", type=int, default=0, help="of all random numbers (0)")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    options = parser.parse_args(arguments)
    if not 3 <= options.sites <= LARGEST:
        parser.error(
            f"--sites {options.sites}: expected 3 to {LARGEST}, to be diagonalised exactly"
        )
    if not 0 < options.field < math.inf:
        parser.error(
            f"--field {options.field}: expected a positive number, as the state that is optimised "
            "has no signs"
        )
    for name in ("steps", "samples"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: expected a positive number")
    return options


def main(arguments: list[str] | None = None) -> None:
    """Run the program.

    Parameters
    ----------
    arguments : list of str, optional
        Instead of the command line.
    """
    options = parse_arguments(arguments)
    lead = mpi.rank() == 0
    solver = partial(distsolve.cg, tol=1e-8, method=options.method)
    if mpi.size() > 1:
        solver = over_ranks(solver)
    run = prepare(options.sites, options.field, options.samples, solver=solver, seed=options.seed)
    run.driver.run(options.steps, out=None, show_progress=lead and not options.quiet)
    distsolve.check_replicated(run.state.parameters)
    energy, error = measure(run, 16 * run.state.n_samples)
    if lead:
        info = run.reconfiguration.info
        print(
            f"{run.state.n_parameters} parameters, {CHAINS} chains on each of {mpi.size()} "
            f"rank{'s'[: mpi.size() > 1]}, {options.steps} steps; last solve: {info.message}"
        )
        exact = float(nk.exact.lanczos_ed(run.hamiltonian)[0])
        print(summary(options.sites, options.field, energy, error, exact))


def summary(sites: int, field: float, energy: float, error: float, exact: float) -> str:
    """The last line of a run.

    Parameters
    ----------
    sites : int
    field, energy, error, exact : float
        In units of the coupling.

    Returns
    -------
    str
    """
    return (
        f"{sites} sites, field {field:g}: E = {energy:.6f} +- {error:.6f}, exact {exact:.6f}, "
        f"difference {energy - exact:+.6f} = {(energy - exact) / error:+.1f} error bars"
    )


if __name__ == "__main__":
    main()

"""The main job in parts: the XYZ reader, the physics of one walker, and its global averages."""

import functools
import importlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from spmd import EXAMPLES, agree, assert_allclose, assert_equal, load_example, ranks

pytestmark = [pytest.mark.few_ranks, pytest.mark.above_mpi]

MOLECULES = EXAMPLES / "molecules"


MODULES = ("estimate", "hamiltonian", "optimizer", "progress", "sampler", "wavefunction", "xyz")
load_example("vmc")
estimate, hamiltonian, optimizer, progress, sampler, wavefunction, xyz = (
    importlib.import_module(f"vmc.{name}") for name in MODULES
)


@pytest.fixture(autouse=True)
def default_promotion():
    """Run the example under the rules that a user has."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def write(tmp_path):
    def write(content):
        path = tmp_path / "molecule.xyz"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def molecule_of(symbols, positions, charge=0):
    numbers = np.array([xyz.ELEMENTS[s] for s in symbols], float)
    return xyz.Molecule(tuple(symbols), numbers, np.array(positions, float), charge)


HYDROGEN = molecule_of(["H"], [[0, 0, 0]])
H2 = molecule_of(["H", "H"], [[0, 0, -0.7], [0, 0, 0.7]])
LIH = molecule_of(["Li", "H"], [[0, 0, 0], [0, 0, 3.0]])
CHAIN = molecule_of(["H"] * 5, [[2.0 * k, 0, 0] for k in range(5)])  # three equal spins

# Operation by operation JAX takes seconds for these: compile each once.
initial_parameters = jax.jit(wavefunction.initial_parameters, static_argnums=1)
initial_walkers = jax.jit(sampler.initial_walkers, static_argnums=(1, 2))
metropolis = jax.jit(sampler.metropolis, static_argnums=(0, 3))


@functools.cache
def log_psi_of(molecule):
    """The wave function of one walker, with parameters at which every part of it counts."""
    theta, unravel = ravel_pytree(initial_parameters(jax.random.key(1), molecule))
    noise = np.random.default_rng(2).normal(size=theta.shape)
    shaken = unravel(theta + 0.2 * noise)
    return jax.jit(partial(wavefunction.log_psi, shaken, molecule=molecule))


def walker_of(molecule, seed=3):
    noise = np.random.default_rng(seed).normal(size=(molecule.n_electrons, 3))
    return jnp.asarray(noise + molecule.positions.mean(axis=0))


# XYZ files


@pytest.mark.once
def test_molecules_of_the_example():
    he = xyz.read_xyz(MOLECULES / "he.xyz")
    h2 = xyz.read_xyz(MOLECULES / "h2.xyz")
    agree((he.symbols, he.n_electrons, he.n_up, he.exact) == (("He",), 2, 1, -2.903724))
    agree((h2.symbols, h2.n_electrons, h2.n_up, h2.exact) == (("H", "H"), 2, 1, -1.174476))
    assert_allclose(np.linalg.norm(h2.positions[0] - h2.positions[1]), 1.4, rtol=1e-9)


@pytest.mark.once
def test_reader_takes_what_editors_write(write):
    path = write(b"\xef\xbb\xbf 2 \r\n\r\nhe\t0 0 0\r\nH 1e0 -.5 0.\r\n\r\n")
    molecule = xyz.read_xyz(path, charge=1)
    agree(molecule.symbols == ("He", "H"))
    agree(molecule.name == "HeH+1")
    assert_allclose(molecule.positions[1] * xyz.BOHR_IN_ANGSTROM, [1, -0.5, 0])


@pytest.mark.once
def test_exact_energy_belongs_to_the_charge_of_the_file(write):
    path = write("1\nhelium ion charge=1 exact_hartree=-2.0\nHe 0 0 0\n")
    same, other = xyz.read_xyz(path), xyz.read_xyz(path, charge=0)
    agree((same.n_electrons, same.exact) == (1, -2.0))
    agree((other.n_electrons, other.exact) == (2, None))


FAULTS = {
    "empty": ("", 1, "number of atoms"),
    "count_in_words": ("two\n\nH 0 0 0\n", 1, "'two'"),
    "count_negative": ("-1\n\n", 1, "'-1'"),
    "count_zero": ("0\n\n", 1, "positive integer"),
    "count_superscript": ("\u00b2\n\nH 0 0 0\n", 1, "positive integer"),
    "no_comment": ("1\n", 2, "comment line"),
    "exact_not_a_number": ("1\nexact_hartree=low\nH 0 0 0\n", 2, "'low'"),
    "charge_fraction": ("1\ncharge=0.5\nH 0 0 0\n", 2, "an integer"),
    "atom_missing": ("2\n\nH 0 0 0\n", 4, "atom 2 of 2"),
    "blank_line": ("2\n\n\nH 0 0 0\n", 3, "4 words"),
    "atom_too_many": ("1\n\nH 0 0 0\nH 0 0 1\n", 4, "line 1"),
    "word_missing": ("1\n\nH 0 0\n", 3, "got 3"),
    "word_too_many": ("1\n\nH 0 0 0 0\n", 3, "got 5"),
    "unknown_element": ("2\n\nH 0 0 0\nXx 0 0 1\n", 4, "'Xx'"),
    "element_not_treated": ("1\n\nFe 0 0 0\n", 3, "H, He, Li, Be"),
    "coordinate_word": ("1\n\nH 0 zero 0\n", 3, "for y, got 'zero'"),
    "coordinate_comma": ("1\n\nH 0 0 0,5\n", 3, "for z, got '0,5'"),
    "coordinate_nan": ("1\n\nH nan 0 0\n", 3, "finite"),
    "same_place": ("2\n\nH 0 0 0\nH 0 0 0.01\n", 4, "line 3"),
}


@pytest.mark.once
@pytest.mark.parametrize("fault", FAULTS)
def test_fault_names_file_and_line(write, fault):
    content, line, fragment = FAULTS[fault]
    path = write(content)
    with pytest.raises(xyz.MoleculeError) as caught:
        xyz.read_xyz(path)
    message = str(caught.value)
    agree(message.startswith(f"{path}, line {line}: expected "), message)
    agree(fragment in message, message)


@pytest.mark.once
def test_fault_of_the_whole_file(write, tmp_path):
    with pytest.raises(xyz.MoleculeError, match=r"nowhere\.xyz: cannot be read"):
        xyz.read_xyz(tmp_path / "nowhere.xyz")
    with pytest.raises(xyz.MoleculeError, match="not a text file"):
        xyz.read_xyz(write(b"\xff\xfe1"))
    path = write("1\n\nH 0 0 0\n")
    with pytest.raises(xyz.MoleculeError, match="charge 1 leaves 0 electrons"):
        xyz.read_xyz(path, charge=1)
    with pytest.raises(xyz.MoleculeError, match="2 spin-up electrons"):
        xyz.read_xyz(path, charge=-2)


# The wave function


def mean_slope(f, centre, direction, distance=1e-4):
    """Slope of the average of `f` over two opposite points, whose first orders cancel."""
    opposite = f(centre + distance * direction) + f(centre - distance * direction)
    return (opposite - 2 * f(centre)) / (2 * distance)


@pytest.mark.once
@pytest.mark.parametrize("molecule", [H2, LIH], ids=["H2", "LiH"])
def test_cusp_at_a_nucleus_is_its_charge(molecule):
    f = log_psi_of(molecule)
    direction = jnp.zeros((molecule.n_electrons, 3)).at[0].set(jnp.array([0.6, 0.0, 0.8]))
    for nucleus, charge in zip(molecule.positions, molecule.numbers, strict=True):
        centre = walker_of(molecule).at[0].set(nucleus)
        assert_allclose(mean_slope(f, centre, direction), -charge, rtol=2e-3)


@pytest.mark.once
def test_cusp_of_opposite_spins_is_a_half():
    f = log_psi_of(H2)
    half = jnp.array([0.3, 0.4, 0.0])
    centre = jnp.tile(jnp.array([0.2, 0.5, 0.1]), (2, 1))
    assert_allclose(mean_slope(f, centre, jnp.stack([half, -half])), 0.5, rtol=2e-3)


@pytest.mark.once
def test_cusp_of_equal_spins_is_a_quarter():
    # log |psi| = log r + c + r / 4 near the node of two equal spins, averaged over directions.
    f = log_psi_of(LIH)
    half = jnp.array([0.3, 0.4, 0.0])
    middle = walker_of(LIH).at[1].set(walker_of(LIH)[0])

    def at(distance):
        apart = jnp.zeros_like(middle).at[0].set(half).at[1].set(-half) * distance
        return (f(middle + apart) + f(middle - apart)) / 2

    assert_allclose((at(2e-3) - at(1e-3) - np.log(2)) / 1e-3, 0.25, rtol=2e-2)


@pytest.mark.once
def test_equal_spins_may_be_exchanged():
    f = log_psi_of(CHAIN)
    x = walker_of(CHAIN)
    assert_allclose(f(x[jnp.array([1, 2, 0, 4, 3])]), f(x), rtol=1e-10)


# The local energy


@pytest.mark.once
@pytest.mark.parametrize("molecule", [LIH, CHAIN], ids=["LiH", "H5"])
def test_laplacian_is_the_trace_of_the_hessian(molecule):
    f = log_psi_of(molecule)
    x = walker_of(molecule)
    compare = jax.jit(lambda x: (hamiltonian.gradient_and_laplacian(f, x), jax.hessian(f)(x)))
    (gradient, laplacian), hessian = compare(x)
    assert_allclose(gradient, jax.jit(jax.grad(f))(x).ravel(), rtol=1e-9)
    assert_allclose(laplacian, np.trace(hessian.reshape(x.size, x.size)), rtol=1e-9)


@pytest.mark.once
@pytest.mark.parametrize(("symbol", "charge", "energy"), [("H", 0, -0.5), ("He", 1, -2.0)])
def test_local_energy_of_the_exact_ion_is_constant(symbol, charge, energy):
    molecule = molecule_of([symbol], [[0.1, 0.2, 0.3]], charge)
    # exp(-Z r): a constant orbital, a cusp of infinite range and no neural part.
    exact = initial_parameters(jax.random.key(0), molecule)
    exact["log_exponent"] = jnp.array([-jnp.inf])
    exact["log_nuclear_range"] = jnp.array([-jnp.inf])
    exact["one"]["w3"] = jnp.zeros_like(exact["one"]["w3"])
    f = partial(wavefunction.log_psi, exact, molecule=molecule)
    x = jnp.asarray(np.random.default_rng(4).normal(size=(50, 1, 3)))
    energies = jax.jit(jax.vmap(lambda x: hamiltonian.local_energy(f, x, molecule)))(x)
    assert_allclose(energies, np.full(50, energy), rtol=1e-9)


@pytest.mark.once
def test_potential_counts_every_pair_once():
    x = jnp.array([[0.0, 0.0, 1.0], [0.0, 3.0, 1.0]])
    molecule = molecule_of(["He", "H"], [[0, 0, 0], [0, 0, 2]], charge=1)
    want = -2 / 1 - 1 / 1 - 2 / np.sqrt(10) - 1 / np.sqrt(10) + 1 / 3 + 2 / 2
    assert_allclose(hamiltonian.potential(x, molecule), want)


# Sampling


@pytest.mark.once
@pytest.mark.parametrize(("total", "size"), [(10, 1), (10, 3), (2, 3), (7, 4)])
def test_shares_are_the_whole(total, size):
    shares = [sampler.share(total, rank, size) for rank in range(size)]
    agree([k for mine in shares for k in mine] == list(range(total)))
    agree(max(map(len, shares)) - min(map(len, shares)) <= 1)


def distances(x):
    """The exact logarithm of psi for electrons that see one proton and not each other."""
    return -jnp.sum(jnp.linalg.norm(x, axis=-1))


@pytest.mark.once
def test_walkers_do_not_depend_on_the_number_of_ranks():
    def run(mine):
        walkers = initial_walkers(jax.random.key(5), H2, mine)
        return metropolis(distances, walkers, jnp.float64(0.5), 5)[0].x

    whole, share = run(range(7)), sampler.share(7, 1, 3)
    assert_allclose(run(share), whole[share.start : share.stop], rtol=1e-10)
    agree(len(np.unique(np.asarray(whole[:, 0, 0]))) == 7, "two walkers share a stream")


@pytest.mark.once
def test_electrons_start_at_their_nuclei():
    walkers = initial_walkers(jax.random.key(6), LIH, range(500))
    z = np.asarray(walkers.x[:, :, 2].mean(axis=0))
    assert_allclose(np.sort(np.rint(z)), [0, 0, 0, 3])


@pytest.mark.once
def test_metropolis_samples_the_square_of_psi():
    # |psi|^2 = exp(-2 r): the mean distance is 3/2, that of 1/r is 1, in bohr.
    walkers = initial_walkers(jax.random.key(7), HYDROGEN, range(2000))
    walkers, accepted = metropolis(distances, walkers, jnp.float64(0.9), 60)
    r = np.linalg.norm(walkers.x, axis=(1, 2))
    assert_allclose([r.mean(), (1 / r).mean()], [1.5, 1.0], rtol=0.06)
    agree(0.3 < float(accepted.mean()) < 0.8)


# What the ranks know together


@pytest.fixture
def samples():
    """Numbers of 11 walkers, and which of them this rank holds: none on rank 1."""
    generator = np.random.default_rng(8)
    energies, J = generator.normal(-3, 1, 11), generator.normal(size=(11, 4))
    energies[5] = 40.0
    size, rank = ranks().size, ranks().rank
    if size == 1:
        return energies, J, slice(None)
    cuts = [0, 4, 4, *(4 + 7 * k // (size - 2) for k in range(1, size - 1))]
    cuts[-1] = 11
    return energies, J, slice(cuts[rank], cuts[rank + 1])


def test_averages_are_those_of_all_walkers(samples):
    energies, J, mine = samples
    if ranks().size == 2:
        mine = slice(0, 11) if ranks().rank == 0 else slice(11, 11)
    e, accepted = jnp.asarray(energies[mine]), jnp.asarray(J[mine, 0])
    centred, got = jax.jit(optimizer.averages)(e, accepted, -2.5, 1.0)
    clipped = np.clip(energies, -7.5, 2.5)
    assert_allclose(got["count"], 11.0)
    assert_allclose(got["energy"], energies.mean())
    assert_allclose(got["variance"], energies.var())
    assert_allclose(got["deviation"], abs(energies + 2.5).mean())
    assert_allclose(got["accepted"], J[:, 0].mean())
    assert_allclose(centred, (clipped - clipped.mean())[mine], rtol=1e-10, atol=1e-13)


@pytest.mark.watchdog(240)
def test_each_method_gives_the_same_energies():
    size, rank = ranks().size, ranks().rank
    counts = tuple(len(sampler.share(9, r, size)) for r in range(size))
    mine = sampler.share(9, rank, size)
    theta = jnp.linspace(0.8, 1.2, 3)

    def log_psi(theta, x):
        r = jnp.linalg.norm(x, axis=-1)
        return -jnp.sum(theta[0] * r + theta[1] * r**2 / (1 + r) + theta[2] * r**3 / (1 + r**2))

    physics = {"log_psi": log_psi, "molecule": HYDROGEN}
    walkers = initial_walkers(jax.random.key(5), HYDROGEN, mine)
    step, energy, deviation = map(jnp.float64, (0.5, -0.4, 0.2))
    state = optimizer.State(theta, walkers, step, jnp.zeros(3), energy, deviation)
    energies = {}
    for method in ("cg", "dense", "kernel"):
        solving = {"method": method, "counts": counts, "tolerance": 1e-10, "n_moves": 3}
        improve = jax.jit(partial(optimizer.improve, **physics, **solving))
        now = state
        for _ in range(3):
            now, report = improve(now, 0.1, 1e-2)
        energies[method] = float(report.energy)
        assert_allclose(energies[method], energies["cg"], rtol=1e-7, message=method)
    agree(jnp.max(abs(now.theta - theta)) > 1e-3, "the parameters have not moved")


def test_error_bar_is_the_scatter_of_the_chains():
    size, rank = ranks().size, ranks().rank
    chains = np.random.default_rng(9).normal(1, 0.1, size * (size + 3) // 2)
    start = rank * (rank + 3) // 2  # rank r holds r + 2 chains
    mean, error = estimate.mean_and_error(jnp.asarray(chains[start : start + rank + 2]))
    assert_allclose(mean, chains.mean())
    assert_allclose(error, chains.std(ddof=1) / np.sqrt(len(chains)), rtol=1e-10)


# Checkpoints, of which `tests/jobs/test_checkpoint.py` has the kills


def test_all_of_a_run_comes_back_to_its_rank(tmp_path, capsys):
    size, rank = ranks().size, ranks().rank
    counts = tuple((4 - 2 * r) % 5 for r in range(size))
    mine = range(sum(counts[:rank]), sum(counts[: rank + 1]))
    generator = np.random.default_rng(rank)
    same = np.random.default_rng(9)
    walkers = initial_walkers(jax.random.key(5), H2, mine)._replace(moves=jnp.uint32(2**32 - 1))
    state = optimizer.State(
        theta=jnp.asarray(same.normal(size=3)),
        walkers=walkers,
        step=jnp.float64(0.1),
        direction=jnp.asarray(same.normal(size=3)),
        energy=jnp.float64(np.nan),
        deviation=jnp.float64(-0.0),
    )
    run = progress.Progress(
        state=state,
        method=np.array(2),
        steps=np.array(1),
        history=same.normal(size=(2, 3)),
        sums=jnp.asarray(generator.normal(size=len(mine))),
        measured=jnp.float64(20),
    )
    where = (tmp_path / "run.ckpt", {"--seed": 5}, counts)
    agree(progress.resume(*where, run) is None)
    progress.save(*where, run)
    again = progress.resume(*where, run)
    agree(capsys.readouterr().out.count("resumed after 1 of 2 steps and 20 ") == (rank == 0))
    agree(jax.tree.structure(again) == jax.tree.structure(run))
    for got, want in zip(*map(jax.tree.leaves, (again, run)), strict=True):
        if jnp.issubdtype(want.dtype, jax.dtypes.prng_key):
            got, want = jax.random.key_data(got), jax.random.key_data(want)
        assert_equal(got, want)


def test_bad_checkpoint_ends_all_ranks(tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        progress.agreed(progress.checkpoint.write, tmp_path / "nowhere/run.ckpt", {}, {})
    agree(caught.value.code == 2)
    errors = capsys.readouterr().err
    agree(errors.count("cannot be written (No such file") == (ranks().rank == 0), errors)


# The program


@pytest.fixture
def program():
    """The program itself; it needs the extra `examples`."""
    return load_example("vmc_molecule")


@pytest.mark.once
def test_summary(program):
    line = program.summary(xyz.read_xyz(MOLECULES / "he.xyz"), -2.9036, 0.00005)
    agree(
        line == "He: E = -2.903600 +- 0.000050 hartree, exact -2.903724 hartree, "
        "difference +0.124 mHa",
        line,
    )
    agree("not stated" in program.summary(H2, -1.17, 0.001))


@pytest.mark.once
def test_options(program, capsys):
    quick = program.parse_arguments(["folder/h2.xyz", "--quick", "--steps", "7"])
    agree((quick.steps, quick.walkers, str(quick.output)) == (7, 200, "h2_convergence.png"))
    agree((quick.checkpoint, quick.every) == (None, 10))
    for wrong in (["--walkers", "1"], ["--every", "2"], ["--restart"]):
        with pytest.raises(SystemExit):
            program.parse_arguments(["h2.xyz", *wrong])
        agree(f"{wrong[0]}" in capsys.readouterr().err.splitlines()[-1])


@pytest.mark.once
def test_settings_are_what_decides_the_energies(program):
    def settings(*options, molecule=H2):
        return program.settings_of(program.parse_arguments(["h2.xyz", *options]), molecule)

    alone = settings()
    agree(settings("--output", "x.png", "--checkpoint", "x", "--every", "3") == alone)
    agree(settings(molecule=molecule_of(["H", "H"], H2.positions)) == alone)
    others = [settings(*option.split()) for option in ("--seed 1", "--walkers 7", "--steps 7")]
    others += [settings("--method", "dense"), settings("--quick", "--walkers", "2000")]
    others += [settings(molecule=LIH), settings(molecule=molecule_of(["H", "H"], H2.positions, 1))]
    agree(all(other != alone for other in others))


@pytest.mark.once
def test_plot(program, tmp_path):
    history = np.array([[-2.8, 0.01, 0.1], [-2.9, 0.01, 0.01]])
    program.plot_convergence(tmp_path / "run.png", "He", history, None)
    agree((tmp_path / "run.png").read_bytes().startswith(b"\x89PNG"))

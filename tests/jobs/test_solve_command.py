"""`python -m distsolve solve`: real matrices, and files that cannot be solved."""

import re
from pathlib import Path

import numpy as np
import pyamg
import pytest
import scipy.io
import scipy.sparse
from launch import run_ranks

pytestmark = pytest.mark.once
COMMAND = """
import runpy, sys
sys.argv[0] = "distsolve"
runpy.run_module("distsolve", run_name="__main__", alter_sys=True)
"""


@pytest.fixture
def solve(tmp_path):
    def solve(*args, np=2):
        arguments = ["solve", *map(str, args)]
        return run_ranks(COMMAND, np=np, timeout=120, args=arguments, cwd=tmp_path)

    return solve


def save(path, matrix, **options):
    scipy.io.mmwrite(path, matrix, **options)
    return scipy.sparse.csr_array(matrix)


def field(report, name):
    return re.search(rf"^{name} +(.*)$", report, re.MULTILINE)[1]


def test_poisson_with_everything(solve, tmp_path):
    A = save(tmp_path / "poisson.mtx", pyamg.gallery.poisson((20, 17), format="csr"))
    b = np.random.default_rng(0).standard_normal(A.shape[0])
    save(tmp_path / "b.mtx", b[:, None])
    options = ["--rhs", "b.mtx", "--preconditioner", "jacobi", "--tol", "1e-9"]
    done = solve("poisson.mtx", *options, "--output", "x.mtx", "--plot", "residual.png").check()
    x = scipy.io.mmread(tmp_path / "x.mtx")[:, 0]
    assert np.linalg.norm(A @ x - b) <= 1.01e-9 * np.linalg.norm(b)
    assert (tmp_path / "residual.png").read_bytes().startswith(b"\x89PNG")
    said = done.stdout
    assert f"340 x 340, {A.nnz} entries, float64" in field(said, "matrix")
    assert sum(map(int, field(said, "rows per rank").split(", "))) == 340
    assert field(said, "result").startswith("Converged in ")
    assert float(re.search(r"[\d.]+", field(said, "condition"))[0]) > 10
    assert "residual" in done.stderr  # the live line
    assert "Traceback" not in done.stderr


def test_indefinite_complex_matrix_on_three_ranks(solve, tmp_path):
    A = scipy.sparse.csr_array(pyamg.gallery.load_example("helmholtz_2D")["A"])[:90, :90]
    A = save(tmp_path / "helmholtz.mtx", A + scipy.sparse.eye_array(90))
    done = solve("helmholtz.mtx", "--method", "gmres", "--output", "x.mtx", "--quiet", np=3).check()
    assert np.abs(scipy.io.mmread(tmp_path / "x.mtx") - 1).max() < 1e-5
    assert done.stdout == ""


def test_not_converged(solve, tmp_path):
    save(tmp_path / "airfoil.mtx", pyamg.gallery.load_example("airfoil")["A"])
    done = solve("airfoil.mtx", "--maxiter", "3", "--preconditioner", "block_jacobi", np=1)
    assert done.returncode == 1
    assert "Stopped after 3 iterations" in field(done.stdout, "result")
    assert "--maxiter" in field(done.stdout, "advice")
    assert done.stdout.count("maxiter") == 1


def test_nothing_is_said_of_steps_that_were_not_taken(solve, tmp_path):
    save(tmp_path / "negative.mtx", -pyamg.gallery.poisson((5, 4), format="csr"))
    done = solve("negative.mtx", np=1)
    assert done.returncode == 1
    assert field(done.stdout, "iterations") == "0"
    assert "per iteration" not in field(done.stdout, "time")
    assert "condition" not in done.stdout


def test_what_happened_and_advice_are_told_apart():
    from distsolve.commands.solve import ADVICE
    from distsolve.linalg import Info, Reason

    for reason in Reason:
        info = Info(True, reason, 3, 0.5, 2.0, 0.25, -1.5, 1.0, 0)
        outcome, said = info.outcome, info.message
        failed = reason not in (Reason.RUNNING, Reason.CONVERGED, Reason.FIXED_STEPS)
        assert (said == outcome) is not failed
        assert said.startswith(outcome)
        assert outcome.endswith(".")
        assert "{" not in said
        assert (info.reason_name in ADVICE) == failed
        assert ("3 iterations" in outcome) == (reason > 0)
    assert "<p, A p> = -1.5" in Info(True, 6, 3, 0.5, 2.0, 0.25, -1.5, 1.0, 0).outcome


HEAD = "%%MatrixMarket matrix coordinate real general\n"
FAULTS = {
    "missing.mtx": (None, "no such file"),
    "word.mtx": (HEAD + "2 2 2\n1 1 1.0\n2 2 x\n", "Line 4: Invalid floating-point value"),
    "square.mtx": (HEAD + "2 3 1\n1 1 1.0\n", "2 rows and 3 columns"),
    "nan.mtx": (HEAD + "2 2 2\n1 1 1.0\n2 2 nan\n", "row 2 and column 2 is nan"),
    "skew.mtx": (HEAD + "2 2 3\n1 1 1\n1 2 5\n2 2 9\n", "--method gmres"),
}


def test_fault_ends_all_ranks_with_one_sentence(solve, tmp_path):
    name = "skew.mtx"
    content, sentence = FAULTS[name]
    (tmp_path / name).write_text(content)
    done = solve(name)
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert name in lines[0]
    assert sentence in lines[0]
    assert "Traceback" not in done.stderr
    assert "Abort" not in done.stderr


@pytest.mark.parametrize("name", FAULTS)
def test_fault_names_the_file(tmp_path, name):
    from distsolve.commands.matrix_market import read_system
    from distsolve.commands.together import InputError

    content, sentence = FAULTS[name]
    path = tmp_path / name
    if content:
        path.write_text(content)
    with pytest.raises(InputError) as caught:
        read_system(path, None, None, hermitian=True)
    assert str(caught.value).startswith(f"{path}: ")
    assert sentence in str(caught.value)


def test_right_hand_side_that_does_not_fit(tmp_path):
    from distsolve.commands.matrix_market import read_system
    from distsolve.commands.together import InputError

    save(tmp_path / "A.mtx", pyamg.gallery.poisson((3, 3), format="csr"))
    for b, dtype, sentence in (
        (np.ones((8, 1)), None, "one column of 9 entries"),
        (np.ones((9, 2)), None, "9 rows and 2 columns"),
        (np.full((9, 1), np.inf), None, "entry 1 is inf"),
        (np.ones((9, 1)) * 1j, "float32", "--dtype complex128"),
    ):
        save(tmp_path / "b.mtx", b)
        with pytest.raises(InputError, match=sentence) as caught:
            read_system(tmp_path / "A.mtx", tmp_path / "b.mtx", dtype, hermitian=True)
        assert str(caught.value).startswith(f"{tmp_path / 'b.mtx'}: ")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("none/x.png", "the folder none does not exist"),
        (".", "is a folder"),
        ("x.foo", "its ending .foo is no picture .*Use one of .*.pdf, .*.png"),
    ],
)
def test_plot_that_cannot_be_written(name, sentence):
    from argparse import Namespace

    from distsolve.commands.solve import _check_targets
    from distsolve.commands.together import InputError

    with pytest.raises(InputError, match=sentence) as caught:
        _check_targets(Namespace(output=None, plot=Path(name)))
    assert str(caught.value).startswith(f"--plot {name}: ")
    for written in ("x.png", "x.PDF", "x"):
        _check_targets(Namespace(output=None, plot=Path(written)))


def test_pattern_and_symmetric_files(tmp_path):
    from distsolve.commands.matrix_market import read_system

    path = tmp_path / "A.mtx"
    path.write_text("%%MatrixMarket matrix coordinate pattern symmetric\n2 2 2\n1 1\n2 1\n")
    system = read_system(path, None, None, hermitian=True)
    assert system.matrix.toarray().tolist() == [[1, 1], [1, 0]]
    assert system.b.tolist() == [2, 1]
    assert system.note == "pattern entries taken as float64"

"""Run the test suite over environment x MPI x ranks, with one line per cell.

An environment is a folder that holds `bin/python`, named for the end of the supported range that
it stands for. A cell runs `tests` on its ranks under pytest, or `tests/jobs`, which start ranks of
their own. What a cell printed is kept under `build/tests`, and shown in full if it failed.

Tests marked `once` have cells of their own, on one rank of the first MPI; jobs marked so run under
that MPI in the first environment alone. What else is left out where it shows nothing new is told by
the other marks (`MARKERS` in spmd.py). The solvers reach MPI through the primitives alone. So what
depends on their number of ranks is tested in the first environment under the first MPI; under the
others a job solves (`tests/jobs/test_soak.py`), and in another environment those of their tests
that are not marked `once` run on one rank, where that is asked for. The other MPIs are tested in
the first environment only: what tells them apart is below JAX.

All combinations of a test's parameters run in the first environment: on two ranks, in the cells of
tests marked `once`, and in jobs. In its other cells those run that show every value of each
parameter, of the solvers' tests the first case; in other environments the first case of every test.
`--cases all` runs all of them.

    python tests/run.py --env lowest=.venv --env newest=.venv-newest --ranks newest=1,2 -- -k cg
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import quick
from launch import ROOT, Finished, cores, job_environment, mpiexec, run_command
from spmd import CASES

LOGS = ROOT / "build/tests"
COMPILED = LOGS / "compiled"
JOBS = "tests/jobs"
SOLVERS = "tests/linalg"
CELL_SECONDS = 2400.0
PYTEST = ["-m", "pytest", "-q", "--color=no", "--durations=5"]
CLOSING = re.compile(r"^(?:=+ )?((?:\d+ [a-z]+(?:, )?)+) in [\d.]+s", re.MULTILINE)
NO_TESTS = 5
VERSIONS = """
import platform
from importlib.metadata import version
names = ("jax", "jaxlib", "mpi4py", "numpy", "scipy")
print("Python", platform.python_version(), *(f"{name} {version(name)}" for name in names))
"""


def path_of(text: str) -> str:
    """Return the path below the root that an argument names, with its test; "" if it names none."""
    name, colons, test = text.partition("::")
    path = ROOT / name
    return f"{os.path.relpath(path, ROOT)}{colons}{test}" if path.exists() else ""


@dataclass(frozen=True)
class Cell:
    """One run of the suite; zero ranks stands for `tests/jobs`."""

    end: str
    python: str
    mpi: str
    ranks: int
    part: str  # "solvers", "primitives" for all but those, or "" for jobs
    once: bool  # the tests marked so, or the others
    select: str  # pytest's -m
    is_quick: bool
    cases: str  # one of `CASES` in spmd.py

    @property
    def name(self) -> str:
        """Name of this cell's line and log."""
        what = f"{self.ranks} rank{'s'[: self.ranks > 1]}" if self.ranks else "jobs"
        what = "once" if self.once else what
        return f"{self.end:7} {self.mpi:8} {what:7} {self.part:10}"

    @property
    def compiled(self) -> Path | None:
        """Folder for programs that other cells compile as well; jobs have few of those.

        Cells that run side by side share none: one would read what another has half written.
        """
        if not self.ranks:
            return None
        return COMPILED / ("several" if self.ranks > 1 else "-".join(self.name.split()))

    def paths(self, arguments: list[str]) -> list[str]:
        """Return the test paths of this cell: what is asked for in its folder, or all of that."""
        asked = list(filter(None, map(path_of, arguments))) or ["tests"]
        if self.part == "primitives":
            return [text for text in asked if not text.startswith((JOBS, SOLVERS))]
        folder = SOLVERS if self.part else JOBS
        kind = [text for text in asked if text.startswith(folder) or folder.startswith(text)]
        return [max(text, folder, key=len) for text in kind]

    def run(self, arguments: list[str], seconds: float) -> Finished:
        """Run this cell."""
        arguments = [text for text in arguments if not path_of(text)] + self.paths(arguments)
        environment = job_environment(self.mpi, {"DISTSOLVE_TEST_MPI": self.mpi})
        if self.is_quick:
            environment |= quick.variables(self.compiled)
        if self.ranks:
            command = [*mpiexec(self.mpi, self.ranks, self.python), self.python, *PYTEST]
            command += [f"--ignore={JOBS}"]
            command += [f"--ignore={SOLVERS}"] if self.part == "primitives" else []
        else:
            command = [self.python, *PYTEST]
        command += ["-m", self.select] if self.select else []
        command += ["--cases", self.cases]
        command += arguments
        return run_command(command, seconds, environment)


def counts(done: Finished) -> Counter[str]:
    """Return the numbers of pytest's closing line; a run that has none counts as one failure."""
    closing = CLOSING.findall(done.stdout)
    found: Counter[str] = Counter()
    for number, word in re.findall(r"(\d+) ([a-z]+)", closing[-1] if closing else ""):
        found[word] += int(number)
    failed = found["failed"] + found["error"] + found["errors"]
    passed_over = done.returncode == NO_TESTS and "deselected" in found
    if done.returncode and not failed and not passed_over:
        failed = 1
    return Counter(passed=found["passed"], failed=failed, skipped=found["skipped"])


def describe(total: Counter[str]) -> str:
    """Return the numbers as words, in the form of the closing line."""
    text = f"{total['passed']} passed, {total['failed']} failed"
    return text + (f", {total['skipped']} skipped" if total["skipped"] else "")


def report(cell: Cell, done: Finished, found: Counter[str]) -> None:
    """Print a cell's line, and all that it printed if it failed."""
    end = ", ended at its time limit" if done.timed_out else ""
    print(f"{cell.name}  {describe(found)} in {done.seconds:.0f} s{end}", flush=True)
    text = f"{done.stdout}\n{done.stderr}"
    LOGS.mkdir(parents=True, exist_ok=True)
    (LOGS / f"{'-'.join(cell.name.split())}.txt").write_text(text)
    if found["failed"]:
        print(text, flush=True)


def split(values: list[str]) -> dict[str, str]:
    """Return `name=value` arguments as a dictionary."""
    return dict(value.split("=", 1) for value in values)


def environments(options: argparse.Namespace) -> dict[str, str]:
    """Return the Python of each environment that exists, and say which ends are tested."""
    found = {}
    for end, folder in split(options.env).items():
        # Not resolved: the link inside the environment is what makes its packages visible.
        python = Path(os.path.abspath(folder), "bin/python")
        if not python.exists():
            print(f"{end}: NOT TESTED, there is no {folder}; {split(options.absent).get(end, '')}")
            continue
        done = subprocess.run(
            [python, "-c", VERSIONS], capture_output=True, text=True, check=True, timeout=120
        )
        print(f"{end}: {done.stdout.strip()}")
        found[end] = str(python)
    if not found:
        sys.exit(f"no environment to test in {options.env}: run `make test`")
    return found


def chosen(those: str, in_first: bool, under_first: bool = True, ranks: int = 1) -> str:
    """Return pytest's -m for those tests that show something new in this environment and MPI."""
    known = {"below_jax": not in_first, "above_mpi": not under_first, "few_ranks": ranks > 2}
    return " and ".join([those, *(f"not {mark}" for mark, is_known in known.items() if is_known)])


def cells(options: argparse.Namespace) -> list[Cell]:
    """Return the matrix: the ranks of an end, then its jobs, for each MPI."""
    ranks = split(options.ranks)
    found: list[Cell] = []
    first_mpi, *others = options.mpi.split(",")
    for end, python in environments(options).items():
        numbers = [int(n) for n in ranks.get(end, ranks.get("all", "1,2,3,0")).split(",")]
        is_first = not found
        is_quick = is_first and quick.is_known_to(python)
        rows = [(first_mpi, 1, True, chosen("once", is_first))] if any(numbers) else []
        for mpi in [first_mpi, *others] if is_first else [first_mpi]:
            for number in numbers:
                is_whole = number == 0 and is_first and mpi == first_mpi
                select = "" if is_whole else chosen("not once", is_first, mpi == first_mpi, number)
                rows.append((mpi, number, False, select))
        for mpi, number, once, select in rows:
            if number == 0:
                parts = [""]
            elif mpi != first_mpi or (not is_first and (once or (number > 1 and 1 in numbers))):
                parts = ["primitives"]
            elif number == 1 < max(numbers) and not is_first:
                parts = ["solvers"]
            else:
                parts = ["primitives", "solvers"]
            for part in parts:
                cases = options.cases or cases_of(is_first, number, once, part)
                found.append(Cell(end, python, mpi, number, part, once, select, is_quick, cases))
    return found


def cases_of(in_first: bool, ranks: int, once: bool, part: str) -> str:
    """Return how many cases of each test run in a cell."""
    if in_first and (once or ranks in (0, 2)):
        return "all"
    return "values" if in_first and part == "primitives" else "first"


def run_all(matrix: list[Cell], options: argparse.Namespace) -> Counter[str]:
    """Run jobs and then one rank side by side, cells of several ranks after them; sum the numbers.

    Cells of several ranks beside others took more of the cores than they saved.
    """
    total: Counter[str] = Counter()

    def run(cell: Cell) -> tuple[Cell, Finished]:
        return cell, cell.run(options.pytest, options.seconds)

    with ThreadPoolExecutor(cores() + 1) as pool:  # jobs often wait
        alone = sorted((cell for cell in matrix if cell.ranks < 2), key=lambda cell: cell.ranks)
        others = [cell for cell in matrix if cell.ranks > 1]
        for cell, done in chain(pool.map(run, alone), map(run, others)):
            found = counts(done)
            report(cell, done, found)
            total += found
    return total


def main() -> None:
    """Run the matrix, print the closing line, exit with 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--env", action="append", required=True, metavar="END=FOLDER")
    parser.add_argument("--absent", action="append", default=[], metavar="END=REASON")
    parser.add_argument("--mpi", default="mpich,openmpi")
    parser.add_argument(
        "--ranks", action="append", default=[], metavar="END=1,2,0", help="0: tests/jobs"
    )
    parser.add_argument("--seconds", type=float, default=CELL_SECONDS, help="limit of one cell")
    parser.add_argument("--cases", choices=CASES, help="the same in all cells")
    parser.add_argument("pytest", nargs="*", help="arguments for pytest, after --")
    options = parser.parse_args()
    shutil.rmtree(COMPILED, ignore_errors=True)
    total = run_all([cell for cell in cells(options) if cell.paths(options.pytest)], options)
    if not total["passed"] and not total["failed"]:
        total["failed"] = 1  # a run that tested nothing is no success
    print(describe(total))
    sys.exit(bool(total["failed"]))


if __name__ == "__main__":
    main()

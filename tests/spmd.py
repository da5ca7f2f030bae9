"""Pytest plugin for tests that run on all ranks: `mpiexec -n P python -m pytest tests`.

Every rank collects the same tests and runs them in the same order. The plugin makes each outcome
collective (a test that fails on one rank fails on all of them, with the text of that rank), ends a
deadlock with the stack traces of all ranks, and gives tests the communicators to run on. Rank 0
prints pytest's output; the others print nothing.

A session of `tests/jobs` alone runs on no ranks: it starts jobs, and MPI is not touched.
"""

import faulthandler
import functools
import os
import sys
import tempfile
import threading
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quick

JOBS = Path(__file__).resolve().parent / "jobs"
EXAMPLES = JOBS.parents[1] / "examples"
TEST_SECONDS = float(os.environ.get("DISTSOLVE_TEST_WATCHDOG", "60"))
JOBS_SECONDS = 300.0
MARKERS = (
    "watchdog(seconds): limit of this test",
    "once: the same on any ranks and MPI; run on one rank",
    "few_ranks: a third rank shows nothing new",
    "above_mpi: the same with any MPI; run under the first one",
    "below_jax: the same with any JAX; run in the first environment",
)
# The first rank that dies takes the job with it: leave the others time to print their traces.
TRACES_SECONDS = 2.0
OUTPUT_TAIL = 4000


class Watchdog:
    """Turns a hang into stack traces of all ranks and exit status 1."""

    def __init__(self) -> None:
        self.rank = 0
        self.stderr = 2
        self.timer: threading.Timer | None = None

    def arm(self, seconds: float, what: str) -> None:
        """Start to count anew."""
        self.disarm()
        self.timer = threading.Timer(seconds, self.bark, (seconds, what))
        self.timer.daemon = True
        self.timer.start()
        # A hang that holds the interpreter's lock stops the timer's thread; this one needs none.
        faulthandler.dump_traceback_later(seconds + 3 * TRACES_SECONDS, exit=True, file=self.stderr)

    def disarm(self) -> None:
        """Stop to count."""
        faulthandler.cancel_dump_traceback_later()
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def bark(self, seconds: float, what: str) -> None:
        """Print all stack traces in one piece, each line with the rank, and end the process."""
        with tempfile.TemporaryFile() as trace:
            faulthandler.dump_traceback(trace)
            trace.seek(0)
            lines = trace.read().decode(errors="replace").splitlines()
        lines.insert(0, f"watchdog: {what} has not ended after {seconds:g} s")
        os.write(self.stderr, "".join(f"[rank {self.rank}] {line}\n" for line in lines).encode())
        threading.Event().wait(TRACES_SECONDS)
        os._exit(1)


watchdog = Watchdog()
collect_errors: list[str] = []


@dataclass(frozen=True)
class Ranks:
    """The world of this session: two private duplicates, and the communicators for tests.

    Two, because a rank that raised goes on to report its outcome while another may still be in
    `agree`: on one communicator the two collectives would be taken for each other.
    """

    rank: int
    size: int
    agreeing: Any
    reporting: Any
    communicators: dict[str, Any]


@functools.cache
def ranks() -> Ranks:
    """Initialise MPI and make every communicator, once, in one order on all ranks."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    return Ranks(
        rank=world.rank,
        size=world.size,
        agreeing=world.Dup(),
        reporting=world.Dup(),
        communicators={
            "self": MPI.COMM_SELF,
            "world": world,
            "dup": world.Dup(),
            "halves": world.Split(world.rank % 2, world.rank),
        },
    )


def is_jobs(path: str | Path) -> bool:
    """Return whether a path, or a test id that starts with one, lies in `tests/jobs`."""
    path = Path(str(path).partition("::")[0]).resolve()
    return JOBS in (path, *path.parents)


def on_ranks(config: pytest.Config) -> bool:
    """Return whether this session's tests run on ranks."""
    return not all(map(is_jobs, config.args))


def agree(ok: Any, message: str = "") -> None:
    """Raise on all ranks of the world if `ok` is false on one of them; every rank must call it.

    The reduction comes first, so that no rank leaves while another waits in the next collective.
    A value that cannot be read (an array whose computation failed) counts as false.
    """
    from mpi4py import MPI

    try:
        mine = bool(ok)
    except Exception as error:
        mine, message = False, f"{message} {type(error).__name__}: {error}".strip()
    comm = ranks().agreeing
    if comm.allreduce(mine, op=MPI.LAND):
        return
    texts = comm.allgather(None if mine else message or "not ok")
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text is not None]
    raise AssertionError("failed on " + "\nand on ".join(failed))


def assert_allclose(
    actual: Any, desired: Any, rtol: float = 1e-12, atol: float = 0.0, message: str = ""
) -> None:
    """Compare shapes and values on every rank, and raise on all ranks if they differ on one."""
    try:
        got, want = (
            # NumPy compares neither bfloat16 nor float8.
            array.astype(np.float32) if array.dtype.kind == "V" else array
            for array in map(np.asarray, (actual, desired))
        )
        assert got.shape == want.shape, f"shape {got.shape}, expected {want.shape}"
        np.testing.assert_allclose(got, want, rtol=rtol, atol=atol)
    except Exception as error:
        kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
        return agree(False, f"{message} {kind}{error}".strip())
    return agree(True)


def assert_equal(actual: Any, desired: Any, message: str = "") -> None:
    """Compare dtypes, shapes and values exactly, like `assert_allclose`."""
    got, want = (getattr(value, "dtype", type(value)) for value in (actual, desired))
    if got != want:
        return agree(False, f"{message} dtype {got}, expected {want}".strip())
    return assert_allclose(actual, desired, rtol=0, message=message)


def load_example(name: str) -> Any:
    """Import a program or a package of `examples` anew; the folder is on no path."""
    spec = PathFinder.find_spec(name, [str(EXAMPLES)])
    module = module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses and the modules of a package look it up
    spec.loader.exec_module(module)
    return module


def jitted(function: Any) -> Any:
    """Give `jax.jit`; this module is imported where JAX is not needed."""
    import jax

    return jax.jit(function)


ROADS = {"eager": lambda function: function, "jitted": jitted}


@pytest.fixture(params=ROADS)
def road(request: pytest.FixtureRequest) -> Any:
    """Give the two ways to run a function."""
    return ROADS[request.param]


@pytest.fixture
def world() -> Any:
    """Give the communicator of all ranks."""
    return ranks().communicators["world"]


@pytest.fixture
def without_in_place() -> Any:
    """Treat this MPI as one whose MPI_IN_PLACE is broken."""
    from distsolve import mpi
    from distsolve.mpi.native import abi

    mpi.prepare()
    abi.set_in_place(False)
    yield
    abi.set_in_place(True)


@pytest.fixture(params=["self", "world", "dup", "halves"])
def comm(request: pytest.FixtureRequest) -> Any:
    """Give each kind of communicator; `halves` catches a hidden COMM_WORLD."""
    return ranks().communicators[request.param]


def on(*kinds: str) -> Any:
    """Give a test these kinds of communicator only."""
    return pytest.mark.parametrize("comm", kinds, indirect=True)


def values_of(item: pytest.Item) -> set[tuple[str, int, str]]:
    """Return the values of a test's parameters, as the parts of its name in brackets."""
    name = item.nodeid.partition("[")[0]
    callspec = getattr(item, "callspec", None)
    parts = callspec._idlist if callspec else [""]  # `indices` count all combinations
    return {(name, index, part) for index, part in enumerate(parts)}


# Of a test's cases run: all, those that show every value of every parameter, or the first.
CASES = {
    "all": lambda item: {item.nodeid},
    "values": values_of,
    "first": lambda item: {item.nodeid.partition("[")[0]},
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cases", choices=CASES, default="all", help="how many of a test with parameters run"
    )


@pytest.hookimpl(trylast=True)  # once there is a reporter
def pytest_configure(config: pytest.Config) -> None:
    for line in MARKERS:
        config.addinivalue_line("markers", line)
    watchdog.stderr = os.dup(2)  # capturing replaces descriptor 2 while a test runs
    if not on_ranks(config):
        return
    watchdog.arm(TEST_SECONDS, "the start of MPI and the collection of tests")
    watchdog.rank = ranks().rank
    quick.start(ranks().rank)
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if watchdog.rank and reporter is not None:
        config.pluginmanager.unregister(reporter)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if is_jobs(collection_path) and on_ranks(config) and ranks().size > 1:
        return True
    return None


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        collect_errors.append(report.longreprtext)


@pytest.hookimpl(trylast=True)  # after those that marks leave out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept = few_cases(items, config.getoption("cases"))
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def few_cases(items: list[pytest.Item], cases: str) -> set[pytest.Item]:
    """Return tests that show all that `CASES` tells apart, first those in which all is new."""
    shows = {item: CASES[cases](item) for item in items}
    kept, shown = set(), set()
    for is_all_new in (True, False):
        for item, values in shows.items():
            if values - shown and (not is_all_new or not values & shown):
                kept.add(item)
                shown |= values
    return kept


def pytest_collection_finish(session: pytest.Session) -> None:
    """Compare what the ranks collected: another list on one rank would deadlock the rest."""
    if not on_ranks(session.config):
        return
    mine = ([item.nodeid for item in session.items], collect_errors)
    everyone = ranks().reporting.allgather(mine)
    if all(theirs == everyone[0] for theirs in everyone):
        return
    lines = ["the ranks collected different tests"]
    for rank, (names, errors) in enumerate(everyone):
        others = set().union(*(names for names, _ in everyone))
        missing = sorted(others - set(names))
        lines.append(f"rank {rank}: {len(names)} tests, without {missing or 'none'}")
        lines += errors
    pytest.exit("\n".join(lines), returncode=1)


def limit_of(item: pytest.Item) -> float:
    """Return the watchdog's limit for one test."""
    marker = item.get_closest_marker("watchdog")
    if marker is not None:
        return float(marker.args[0])
    return JOBS_SECONDS if is_jobs(item.path) else TEST_SECONDS


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    watchdog.arm(limit_of(item), item.nodeid)
    try:
        return (yield)
    finally:
        # The time between tests, and the end of MPI after the last one, count too.
        watchdog.arm(TEST_SECONDS, f"what follows {item.nodeid}")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Make the outcome of each phase (setup, call, teardown) the same on all ranks."""
    report = yield
    # Armed anew: pytest stops the timer of faulthandler when a test raises.
    failure = f" after\n{report.longreprtext}\n" if report.failed else ""
    watchdog.arm(limit_of(item), f"{item.nodeid}, waiting for other ranks{failure}")
    if on_ranks(item.config):
        share_outcome(report)
    return report


def share_outcome(report: pytest.TestReport) -> None:
    """Fail on all ranks what failed on one, or had another outcome on one."""
    text = None
    if report.failed:
        output = [part[-OUTPUT_TAIL:] for part in (report.capstdout, report.capstderr) if part]
        text = "\n".join([report.longreprtext, *output])
    rows = ranks().reporting.allgather((report.outcome, text))
    outcomes = [outcome for outcome, _ in rows]
    if "failed" not in outcomes and len(set(outcomes)) == 1:
        return
    texts = {rank: text for rank, (_, text) in enumerate(rows) if text is not None}
    if report.failed:
        for rank, theirs in texts.items():
            if rank != ranks().rank:
                theirs = "with the same text" if theirs == text else theirs
                report.sections.append((f"failed on rank {rank}", theirs))
        return
    report.outcome = "failed"
    report.longrepr = f"the ranks disagree: {dict(enumerate(outcomes))}"
    for rank, theirs in texts.items():
        report.longrepr += f"\n\nfailed on rank {rank}: {theirs}"

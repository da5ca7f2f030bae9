"""``python -m distsolve doctor``: what is installed and running here, and whether it computes."""

import argparse
import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax

from distsolve import mpi
from distsolve.commands import facts, findings, selftest
from distsolve.commands.findings import plural, spans
from distsolve.commands.options import number
from distsolve.mpi.comm import live
from distsolve.mpi.launcher import is_first, mismatch

FEW_NODES = 16  # that are listed one by one
WIDTH = 22  # of the names in front
LAST_WORDS = 1.0  # seconds in which each rank can say where it is, before the job ends


def add(subparsers: Any) -> None:
    """Add this command to the command line.

    Parameters
    ----------
    subparsers : as from ``ArgumentParser.add_subparsers``
    """
    parser = subparsers.add_parser(
        "doctor",
        help="say what is installed and running, and test it for some seconds",
        description="Versions, MPI, cores and threads, with a warning where something is odd; then "
        "a self-test on all ranks. Exit status: 0, also with warnings; 1 if a test failed.",
        epilog="Start it as the program in doubt: `mpiexec -n RANKS python -m distsolve doctor`.",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the text")
    parser.add_argument(
        "--timeout", type=_seconds, default=60.0, help="seconds that a test may take (60)"
    )
    parser.set_defaults(run=run)


def _seconds(text: str) -> float:
    expected = "a positive number of seconds, such as 60"
    return number(text, float, lambda value: 0 < value <= threading.TIMEOUT_MAX, expected)


def run(options: argparse.Namespace) -> int:
    """Examine and test, on all ranks.

    Parameters
    ----------
    options : argparse.Namespace
        As `add` describes them, the same on all ranks.

    Returns
    -------
    int
        0, or 1 if a test failed on any rank.

    Communication
    -------------
    The facts of all ranks and the outcome of each test, by mpi4py: also where ours fails.
    """
    jax.config.update("jax_enable_x64", True)
    mine = facts.of_rank()
    jax.config.update("jax_platforms", "cpu")  # the self-test is one of host memory
    try:
        mine["mpi"] = facts.of_mpi()
    except (ImportError, RuntimeError, ValueError) as error:
        report = Report([mine | {"mpi": {"error": str(error)}}], options.json, is_first())
        report.end()
        _leave()
    rank, size, comm = mpi.rank(), mpi.size(), live(None)
    with _watched("the facts of all ranks", options.timeout):
        everyone = comm.allgather(mine) if comm else [mine]
    speaks = rank == 0 and (is_first() or not mismatch(size, mine["mpi"]["library"]))
    report = Report(everyone, options.json, speaks)
    for name, check in selftest.CHECKS.items():
        begin = time.perf_counter()
        with _watched(f"self-test `{name}`", options.timeout, report, name) as here:
            here.append(selftest.fault(check, rank, size))
            faults = comm.allgather(here[0]) if comm else here
        report.add(name, time.perf_counter() - begin, faults)
    return report.end()


@contextlib.contextmanager
def _watched(
    what: str, seconds: float, report: "Report | None" = None, test: str = ""
) -> Iterator[list[str]]:
    """End the job where a rank waits too long: the others may never come to where it is.

    The list takes what this rank found, from when it has done its part.
    """
    here: list[str] = []

    def end():
        state = "still in it"
        if here:
            state = f"done here, {here[0] or 'without a fault'}; waiting for other ranks"
        text = f"{what} is not over after {seconds:g} s: {state}"
        print(f"rank {mpi.rank()} of {mpi.size()}: {text}", file=sys.stderr, flush=True)
        if report:
            report.add(test, seconds, ["not over; on stderr each rank says where it is"])
            report.end()
        _leave()

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield here
    finally:
        timer.cancel()


def _leave():
    """End the job from this rank, although others may be waiting for it."""
    time.sleep(LAST_WORDS)
    MPI = getattr(sys.modules.get("mpi4py"), "MPI", None)
    if MPI and MPI.Is_initialized() and MPI.COMM_WORLD.Get_size() > 1:
        MPI.COMM_WORLD.Abort(1)
    os._exit(1)


class Report:
    """All that is said, as one object; printed as it grows, or at its end as JSON.

    Parameters
    ----------
    everyone : list of dict
        The facts of each rank.
    as_json : bool
    speaks : bool
        Whether this rank prints.
    """

    def __init__(self, everyone: list[findings.Facts], as_json: bool, speaks: bool):
        first, plugins = everyone[0], facts.gpu_plugins()
        self.as_json, self.speaks = as_json, speaks
        self.content: dict[str, Any] = {
            "verdict": "ok",
            "ranks": len(everyone),
            "versions": first["versions"],
            "package": first["package"],
            "mpi": first["mpi"],
            "nodes": findings.nodes(everyone),
            "gpu": {"plugins": plugins, "driver": first["driver"]},
            "extras": facts.extras(),
            "environment": first["environment"],
            "warnings": [
                {"about": about, "text": text}
                for about, text in findings.of_facts(everyone, plugins)
            ],
            "self_test": [],
        }
        self._print(*_head(self.content))

    def add(self, test: str, seconds: float, faults: list[str]) -> None:
        """Add the outcome of a test.

        Parameters
        ----------
        test : str
        seconds : float
        faults : list of str
            Of each rank, empty where there is none.
        """
        failures = [{"rank": rank, "text": text} for rank, text in enumerate(faults) if text]
        verdict = "FAIL" if failures else "ok"
        self.content["self_test"].append(
            {"name": test, "verdict": verdict, "seconds": round(seconds, 3), "failures": failures}
        )
        texts = [f"FAIL  rank {failure['rank']}: {failure['text']}" for failure in failures]
        self._print(*(_line(test, text) for text in texts or [f"ok    {seconds:.1f} s"]))

    def end(self) -> int:
        """Print the verdict, or the whole as JSON.

        Returns
        -------
        int
            The exit status.
        """
        content = self.content
        failed = sum(test["verdict"] == "FAIL" for test in content["self_test"])
        failed += "error" in content["mpi"]
        content["verdict"] = "FAIL" if failed else "WARN" if content["warnings"] else "ok"
        self._print("", _line("verdict", content["verdict"]))
        if self.speaks and self.as_json:
            print(json.dumps(content, indent=2), flush=True)
        return int(failed > 0)

    def _print(self, *lines):
        if self.speaks and not self.as_json:
            print("\n".join(lines), flush=True)


def _line(name, text):
    return f"  {name:{WIDTH}} {text}"


def _head(content):
    """Return the lines up to the self-test."""
    nodes, versions, plugins = content["nodes"], content["versions"], content["gpu"]["plugins"]
    sections = {
        "versions": versions | {"distsolve": f"{versions['distsolve']}, {content['package']}"},
        "MPI": _mpi(content["mpi"]),
        "nodes": {node["name"]: _node(node) for node in nodes[:FEW_NODES]},
        "GPU": {
            "plugins": ", ".join(plugins) or "no GPU plugin of JAX",
            "driver": content["gpu"]["driver"] or "none loaded",
        },
        "extras": {name: _extra(needs) for name, needs in content["extras"].items()},
        "environment": content["environment"],
    }
    if len(nodes) > FEW_NODES:
        sections["nodes"]["more"] = f"{len(nodes) - FEW_NODES}, in --json"
    job = f"{plural(content['ranks'], 'rank')} on {plural(len(nodes), 'node')}"
    lines = [f"distsolve doctor: {job}"]
    for heading, rows in sections.items():
        lines += ["", heading, *(_line(name, text) for name, text in rows.items() if text)]
    lines += ["", "warnings"]
    lines += [_line(w["about"], f"WARN  {w['text']}") for w in content["warnings"]]
    lines += [] if content["warnings"] else [_line("none", "ok")]
    return [*lines, "", "self-test"]


def _mpi(found):
    if "error" in found:
        return {"error": f"FAIL  {' '.join(found['error'].split())}"}
    rows = found | {"file": ", ".join(found["file"]), "chunk": f"{found['chunk']} bytes"}
    return {name.replace("_", " "): text for name, text in rows.items()}


def _node(node):
    threads = ", ".join(f"{number} {name}" for name, number in node["threads"].items())
    return (
        f"{plural(len(node['ranks']), 'rank')} ({spans(node['ranks'])}), "
        f"{plural(len(node['cores']), 'core')} ({spans(node['cores'])}), "
        f"threads per rank: {threads}; {node['cpu']}"
    )


def _extra(needs):
    missing = [name for name, version in needs.items() if version is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    return ", ".join(f"{name} {version}" for name, version in needs.items())

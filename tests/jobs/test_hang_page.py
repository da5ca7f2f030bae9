"""The tutorial about a hang shows the report that its program gives."""

import re

import pytest
from launch import ROOT, run_ranks

PAGE = ROOT / "docs/tutorials/hang.md"
PROGRAM = ROOT / "docs/examples/broken/hang.py"
CALL = re.compile(r"rank \d: (MPI_\w+ .*hang\.py:\d+)$", re.MULTILINE)
# What differs from run to run: folders, times, the address of a thread.
VARIES = ((r'[^\s"]*/', ""), (r"\d+\.\d+ s", "# s"), (r"0x\w+", "0x"))


def lines_of(report: str) -> list[str]:
    """Return the lines of a report without what differs from run to run."""
    for pattern, replacement in VARIES:
        report = re.sub(pattern, replacement, report)
    return report.splitlines()


@pytest.mark.once
def test_the_page_shows_the_report():
    blocks = PAGE.read_text().split("```")[1::2]
    (shown,) = (text for text in blocks if "Where the ranks" in text)
    (compared,) = (text for text in blocks if "different MPI calls" in text)
    done = run_ranks(PROGRAM, np=2, env={"DISTSOLVE_TIMEOUT": "2"})
    assert done.returncode not in (0, -1)
    report = lines_of(done.stderr)
    rest = iter(report)
    for line in lines_of(shown.strip()):
        assert line == "..." or line in rest, f"{line}\nnot, or not there, in\n{done.stderr}"
    calls = CALL.findall(compared)
    assert len(calls) == 2
    assert all(f"  rank {k}: in {call}, since # s" in report for k, call in enumerate(calls))

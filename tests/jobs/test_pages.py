"""What pages show of jobs: the reports of two programs that hang, and programs over all devices."""

import re

import pytest
from launch import ROOT, run_ranks

DOCS = ROOT / "docs"
BROKEN = DOCS / "examples/broken"
CALL = re.compile(r"MPI_\w+ .* at \w+\.py:\d+")
IN_A_JOB = re.compile(r"^<!-- runs in a job -->\n```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
# What differs from run to run: folders and times.
VARIES = ((r"\S*/", ""), (r"\d+\.\d+ s", "# s"))
# Stacks are written piece by piece, and those of two ranks may be mixed; the rest comes in lines.
LEFT_OUT = ("...", "File ", "Current thread ")

# The program, how it is started, and what its report is known by in the page.
REPORTS = {
    "tutorials/hang.md": ("hang.py", {"DISTSOLVE_TIMEOUT": "2"}, "Where the ranks of"),
    "diagnosis.md": ("train.py", {"DISTSOLVE_CHECK": "1"}, "The ranks make different"),
}


def blocks(page):
    """Return what stands between fences in a page."""
    return (DOCS / page).read_text().split("```")[1::2]


def lines_of(report):
    """Return the lines of a report without what differs from run to run."""
    for pattern, replacement in VARIES:
        report = re.sub(pattern, replacement, report)
    return [line.strip() for line in report.strip().splitlines()]


@pytest.mark.once
@pytest.mark.parametrize("page", REPORTS)
def test_a_page_shows_the_report_of_its_program(page):
    program, environment, words = REPORTS[page]
    (shown,) = (text for text in blocks(page) if words in text)
    done = run_ranks(BROKEN / program, np=2, env=environment)
    assert done.returncode not in (0, -1)
    report = "\n".join(lines_of(done.stderr))
    compared = [line for line in lines_of(shown) if not line.startswith(LEFT_OUT)]
    missing = [line for line in compared if line not in report]
    assert not missing, f"{missing}\nare not in\n{done.stderr}"
    assert len(compared) >= 3


@pytest.mark.parametrize("page", REPORTS)
@pytest.mark.once
def test_both_reports_of_a_page_tell_of_the_same_calls(page):
    waiting, compared = (
        next(text for text in blocks(page) if words in text)
        for words in ("Where the ranks of", "The ranks make different")
    )
    calls = CALL.findall(compared)
    assert len(calls) == 2
    assert all(call in waiting for call in calls)


@pytest.mark.once
def test_programs_over_the_devices_of_all_ranks():
    """One job for all of them: `initialize` does nothing the second time."""
    pages = [page.read_text() for page in sorted(DOCS.glob("**/*.md"))]
    programs = [code for page in pages for code in IN_A_JOB.findall(page)]
    assert len(programs) == 2
    done = run_ranks("\n".join(programs), np=2).check()
    assert done.stdout.count("CpuDevice") == 2, done.stdout

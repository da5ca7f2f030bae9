"""Prints figures and targets as plain text."""

BUSY = 0.05  # share of the cores


def seconds_text(value):
    """Seconds with three digits in a unit that suits them."""
    for factor, unit in ((1, "s"), (1e3, "ms")):
        if abs(value) * factor >= 1:
            return f"{value * factor:.3g} {unit}"
    return f"{value * 1e6:.3g} us"


FORMATS = {
    "seconds": seconds_text,
    "matvec_seconds": seconds_text,
    "peak_growth_mib": "{:.1f} MiB".format,
    "collectives": "{:g}".format,
    "sent_fraction": "{:.3f}".format,
}


def figure_text(figure, value):
    """A figure with its unit, or the reason why there is none."""
    if isinstance(value, str):
        return value
    return FORMATS[figure](value)


def ratio_text(ratio):
    """A ratio, also the other way round where that reads better."""
    return f"{ratio:.3g}" + (f" = 1/{1 / ratio:.3g}" if 0 < ratio < 0.1 else "")


def head_lines(conditions):
    """What the figures stand on."""
    machine = conditions["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    limits = ", ".join(f"{name}={value}" for name, value in conditions["environment"].items())
    lines = [
        f"{machine['date']}, {machine['cores']} cores of {machine['processor']}",
        f"{machine['system']}, {machine['memory_gib']} GiB, Python {machine['python']}",
        versions,
        f"{conditions['ranks']} ranks, median of {conditions['repeats']}, slowest rank",
        f"variables of each rank: {limits}",
    ]
    if conditions["quick"]:
        lines.append("QUICK RUN: small sizes, one repeat; compare nothing with it")
    return lines


def print_row(entry):
    """All figures of one row, as soon as they are there."""
    print(f"\n{entry['row']}. {entry['title']}")
    for name, text in entry["texts"].items():
        print(f"   {name:24} {text}", flush=True)


def print_table(table):
    """Every target with what was reached, one a line."""
    lines = [("row", "ours", "target", "ratio or excess", "reached")]
    for entry in table:
        title, ours = f"{entry['row']}. {entry['title']}", entry["texts"][entry["ours"]]
        for target in entry["targets"]:
            lines.append((title, ours, target["target"], target["value"], target["reached"]))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print()
    for line in lines:
        print("  ".join(map(str.ljust, line, widths)).rstrip())


def markdown(table):
    """The figures and targets as a Markdown table, for docs/performance.md."""
    lines = [
        "| row | measured | target | ratio or excess | reached |",
        "| --- | --- | --- | --- | --- |",
    ]
    for entry in table:
        figures = "<br>".join(f"{name}: {text}" for name, text in entry["texts"].items())
        columns = (
            "<br>".join(target[key] for target in entry["targets"])
            for key in ("target", "value", "reached")
        )
        lines.append(f"| {entry['row']}. {entry['title']} | {figures} | {' | '.join(columns)} |")
    return "\n".join(lines) + "\n"


def run_lines(samples):
    """The libraries that ran, and how much of the machine went elsewhere."""
    results = [result for group in samples.values() for result in group.values()]
    runs = [sample for result in results for sample in result.get("samples", ())]
    if not runs:
        return []
    libraries = {run[kind] for run in runs for kind in ("mpi", "petsc") if kind in run}
    shares = [run["other_load"] for run in runs]
    mean, worst = sum(shares) / len(shares), max(shares)
    lines = ["; ".join(sorted(libraries))] if libraries else []
    lines += [f"other processes took {mean:.1%} of the cores during the runs, {worst:.1%} at worst"]
    if mean > BUSY:
        lines.append("THE MACHINE WAS BUSY: ranks wait by spinning; repeat this on an idle machine")
    return lines

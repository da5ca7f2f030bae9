"""Check what the sdist and the wheel hold: `check_packages.py DIST PATH...`.

The sdist holds the sources of the compiled modules, but no generated C, and the programs of the
pages; the wheel holds the modules and the typing marker; neither mentions one of the given paths of
the machine that built them.
"""

import sys
import tarfile
import zipfile
from pathlib import Path


def files_of(archive: Path) -> dict[str, bytes]:
    """Return name and content of each file of a wheel or sdist."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return {name: wheel.read(name) for name in wheel.namelist()}
    with tarfile.open(archive) as sdist:
        members = [member for member in sdist.getmembers() if member.isfile()]
        return {member.name: sdist.extractfile(member).read() for member in members}


def faults(archive: Path, paths: list[str]) -> list[str]:
    """Return what is wrong with an archive, one sentence each."""
    files = files_of(archive)
    native = [name for name in files if "/native/" in name]
    modules = {Path(name).name.partition(".")[0] for name in native if name.endswith(".so")}
    sources = sorted(Path("distsolve").glob("*/native/*.pyx"))
    found = [f"holds generated C: {name}" for name in native if name.endswith(".c")]
    if archive.suffix == ".whl":
        found += [f"lacks the module {path.stem}" for path in sources if path.stem not in modules]
        found += [f"holds {name}" for name in files if not name.startswith("distsolve")]
        if "distsolve/py.typed" not in files:
            found.append("lacks distsolve/py.typed")
    else:
        names = {Path(name).name for name in native}
        found += [f"lacks {path.name}" for path in sources if path.name not in names]
        found += [f"holds the built module {name}" for name in sorted(modules)]
        if not any(name.endswith("/docs/examples/gradients.py") for name in files):
            found.append("lacks docs/examples/gradients.py")
    for name, content in files.items():
        found += [f"{name} mentions {path}" for path in paths if path.encode() in content]
    return found


def main() -> None:
    """Check both archives of a folder; exit with 1 and the faults if there are any."""
    folder, *paths = sys.argv[1:]
    # A home of `/root` would match unrelated words without the slash behind it.
    paths = [path.rstrip("/") + "/" for path in paths]
    archives = [*Path(folder).glob("*.whl"), *Path(folder).glob("*.tar.gz")]
    if len(archives) != 2:
        sys.exit(f"expected one wheel and one sdist in {folder}, found {archives}")
    found = [f"{archive.name} {fault}" for archive in archives for fault in faults(archive, paths)]
    if found:
        sys.exit("\n".join(found))
    print("sdist and wheel: as expected")


main()

"""Print requirements of pyproject.toml, one a line: `build-system`, `dependencies`, or extras."""

import sys
import tomllib
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())

for name in sys.argv[1:]:
    if name == "build-system":
        requirements = PROJECT["build-system"]["requires"]
    elif name == "dependencies":
        requirements = PROJECT["project"]["dependencies"]
    else:
        requirements = PROJECT["project"]["optional-dependencies"][name]
    print(*requirements, sep="\n")

"""Settings of Sphinx; `make docs` builds the pages, and neither the network nor MPI is needed."""

import enum
import os
import subprocess
import sys
from pathlib import Path

os.environ.update(DISTSOLVE_NO_MPI="1", JAX_PLATFORMS="cpu", MPLBACKEND="agg")

import distsolve

project = "distsolve"
author = "the distsolve developers"
version = release = distsolve.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = f"distsolve {version}"
html_copy_source = False

nitpicky = True
default_role = "py:obj"  # words in single quotes: a link if they name an entry
add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # docstrings say more: shapes, and who owns what
napoleon_google_docstring = False
napoleon_custom_sections = ["Communication", "Parameters of every solver"]
napoleon_use_param = napoleon_use_rtype = False  # types are in words


def show_as_text(app, env, node, text):
    """Show a name that is no entry as it is: a parameter, a type in words, a name of JAX."""
    return None if node["reftarget"].startswith("distsolve") else text


def drop_the_text_of_the_class(app, what, name, member, options, lines):
    """Leave the members of an enum without text: they have none of their own."""
    if isinstance(member, enum.Enum):
        lines.clear()


def draw(app):
    """Draw the pictures that come from runs: those of `plots`, into build/plots."""
    source = Path(app.srcdir)
    target = source.parent / "build/plots"
    target.mkdir(parents=True, exist_ok=True)
    for program in sorted((source / "plots").glob("*.py")):
        subprocess.run([sys.executable, program, target / f"{program.stem}.svg"], check=True)


def setup(app):
    """Called by Sphinx."""
    app.connect("builder-inited", draw)
    app.connect("missing-reference", show_as_text)
    app.connect("autodoc-process-docstring", drop_the_text_of_the_class)

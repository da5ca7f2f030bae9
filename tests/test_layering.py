"""Imports point downwards, and special knowledge stays in the one file that has it.

Import statements are read, not executed: a fault is found in branches that no test enters, too.
Imports under `TYPE_CHECKING` do not count.
"""

import ast
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.once

ROOT = Path(__file__).resolve().parents[1]

# From top to bottom. A file that is named here, or lies in a folder that is, imports no named file
# above it; between the others only a cycle is a fault.
ORDER = [
    "distsolve.linalg.krylov",
    "distsolve.linalg.driver",
    "distsolve.linalg.space",
    "distsolve.linalg.trees",
    "distsolve.mpi.messages",
    "distsolve.mpi.movement",
    "distsolve.mpi.ops",
    "distsolve.mpi.table",
    "distsolve.mpi.primitive",
    "distsolve.mpi.lowering",
    "distsolve.mpi.comm",
    "distsolve.mpi.library",
    "distsolve.mpi._jaxcompat",
    "distsolve.mpi.native",
]
MPI_FROM_LINALG = {"distsolve.linalg.space"}
FFI = "distsolve.mpi.native.ffi"  # XLA's call frames, which the handlers of linalg read as well
JAX_INTERNALS = {"distsolve.mpi._jaxcompat"}
HANDLES = {"distsolve.mpi.comm", "distsolve.mpi.library"}

CYTHON_IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+([\w.]+)[ \t]+c?import[ \t]+(?:\(([\w, \t\n]*)|([\w, \t]+))"
    r"|c?import[ \t]+([\w., \t]+))",
    re.MULTILINE,
)


class Reader(ast.NodeVisitor):
    """Collects what a Python file imports, and its use of handles and of JAX's version."""

    def __init__(self, module, is_package):
        self.module, self.is_package = module, is_package
        self.imports, self.attributes = set(), set()

    def visit_If(self, node):
        if "TYPE_CHECKING" not in ast.unparse(node.test):
            self.generic_visit(node)

    def visit_Import(self, node):
        self.imports |= {alias.name for alias in node.names}

    def visit_ImportFrom(self, node):
        source = node.module or ""
        if node.level:
            parts = self.module.split(".")
            above = parts[: len(parts) - node.level + self.is_package]
            source = ".".join([*above, *filter(None, [node.module])])
        self.imports |= {f"{source}.{alias.name}" for alias in node.names}

    def visit_Attribute(self, node):
        self.attributes.add(ast.unparse(node))
        self.generic_visit(node)


def read_python(path, module):
    reader = Reader(module, path.name == "__init__.py")
    reader.visit(ast.parse(path.read_text()))
    return reader.imports, reader.attributes


def read_cython(path):
    imports = set()
    for source, *names in CYTHON_IMPORT.findall(path.read_text()):
        listed = [words.split()[0] for words in "".join(names).split(",") if words.strip()]
        imports |= {f"{source}.{name}" if source else name for name in listed}
    return imports, set()


def read_package(root):
    """Return imports and attributes of each module; the .pyx and .pxd of one name are one."""
    modules, packages = {}, set()
    for path in sorted((root / "distsolve").rglob("*")):
        if path.suffix not in (".py", ".pyx", ".pxd"):
            continue
        module = ".".join(path.relative_to(root).with_suffix("").parts)
        if path.name == "__init__.py":
            module = module.removesuffix(".__init__")
            packages.add(module)
        found = read_python(path, module) if path.suffix == ".py" else read_cython(path)
        imports, attributes = modules.setdefault(module, (set(), set()))
        imports |= found[0]
        attributes |= found[1]
    return modules, packages


def holder(name, modules):
    """Return the module of this package that an imported name lies in, or None."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name or None


def place(module):
    """Return a module's place in `ORDER`, or None."""
    inside = (name for name in ORDER if f"{module}.".startswith(f"{name}."))
    return next(map(ORDER.index, inside), None)


def cycle(graph):
    """Return one cycle of the graph as a list of modules, or None."""
    done, path = set(), []

    def visit(module):
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return None
        path.append(module)
        found = next(filter(None, map(visit, sorted(graph[module]))), None)
        done.add(path.pop())
        return found

    return next(filter(None, map(visit, sorted(graph))), None)


def import_faults(module, below):
    """Yield what is wrong with the imports of one module."""
    for name in sorted(below):
        if f"{module}.".startswith(f"{name}."):
            yield f"{module} imports its own package {name}"
        upwards = (place(name), place(module))
        if None not in upwards and upwards[0] < upwards[1]:
            yield f"{module} imports {name}, which stands above it"
        if module.startswith("distsolve.mpi") and name.startswith("distsolve.linalg"):
            yield f"{module} imports {name}: mpi must not know linalg"
        from_linalg = module.startswith("distsolve.linalg") and module not in MPI_FROM_LINALG
        call_frames = f"{module}.".startswith("distsolve.linalg.native.") and name == FFI
        if from_linalg and name.startswith("distsolve.mpi") and not call_frames:
            yield f"{module} imports {name}: in linalg only space.py may know mpi"


def knowledge_faults(module, imports, attributes):
    """Yield what one module knows and should not."""
    versions = {"jax.__version__", "jax.__version_info__", "jaxlib.__version__"}
    if module not in JAX_INTERNALS:
        if any(f"{name}.".startswith("jax._src.") for name in imports):
            yield f"{module} imports jax._src: only _jaxcompat.py may"
        if versions & attributes:
            yield f"{module} tests the version of JAX: only _jaxcompat.py may"
    raw = {name for name in attributes if name.endswith(("._handleof", "._addressof"))}
    if raw and module not in HANDLES:
        yield f"{module} uses {sorted(raw)}: only comm.py and library.py know handles"


def violations(root):
    """Return every breach of the layering below `root`, one sentence each."""
    modules, packages = read_package(root)
    graph = {
        module: {holder(name, modules) for name in imports} - {None, module}
        for module, (imports, _) in modules.items()
    }
    found = []
    for module, (imports, attributes) in modules.items():
        # An __init__ collects the public names of what lies below it.
        if module not in packages:
            found += import_faults(module, graph[module])
        found += knowledge_faults(module, imports, attributes)
    if ring := cycle(graph):
        found.append("imports form a cycle: " + " -> ".join(ring))
    return found


def test_the_package_keeps_its_layers():
    assert violations(ROOT) == []


FAULTS = {
    "mpi/lowering.py": ("from distsolve.mpi import primitive", "stands above it"),
    "mpi/library.py": ("def f():\n    import distsolve.mpi.comm", "stands above it"),
    "mpi/native/engine.pyx": ("from distsolve.mpi.comm cimport (\n    a,\n    b)", "above it"),
    "mpi/rules.py": ("from ..linalg.trees import axpy", "mpi must not know linalg"),
    "mpi/status.py": ("from . import ops\nfrom . import SUM", "its own package"),
    "linalg/krylov/cg.py": ("from distsolve.mpi import allreduce", "only space.py may know mpi"),
    "linalg/trees.py": ("from distsolve.linalg.driver import drive", "stands above it"),
    "linalg/info.py": ("from jax._src import core", "only _jaxcompat.py"),
    "linalg/driver.py": ("import jax\nold = jax.__version_info__ < (0, 11)", "tests the version"),
    "mpi/inspect.py": ("from mpi4py import MPI\nh = MPI._handleof(MPI.SUM)", "know handles"),
}


def package_at(root, files):
    for name in ("", "mpi", "linalg", "linalg/krylov", "mpi/native"):
        (root / "distsolve" / name).mkdir(parents=True, exist_ok=True)
        (root / "distsolve" / name / "__init__.py").touch()
    for name in ("primitive", "comm", "ops"):
        (root / f"distsolve/mpi/{name}.py").touch()
    (root / "distsolve/linalg/driver.py").touch()
    (root / "distsolve/linalg/trees.py").touch()
    for name, text in files.items():
        (root / "distsolve" / name).write_text(text + "\n")
    return root


@pytest.mark.parametrize("name", FAULTS)
def test_a_breach_is_found(tmp_path, name):
    text, sentence = FAULTS[name]
    found = violations(package_at(tmp_path, {name: text}))
    assert any(sentence in fault for fault in found), found


def test_a_cycle_is_found(tmp_path):
    files = {"mpi/a.py": "from distsolve.mpi import b", "mpi/b.py": "import distsolve.mpi.a"}
    expected = "imports form a cycle: distsolve.mpi.a -> distsolve.mpi.b -> distsolve.mpi.a"
    assert violations(package_at(tmp_path, files)) == [expected]


def test_what_is_allowed_is_not_reported(tmp_path):
    files = {
        "__init__.py": "from distsolve import mpi\nfrom distsolve.linalg.trees import axpy",
        "mpi/__init__.py": "from distsolve.mpi.ops import allreduce",
        "mpi/ops.py": "from distsolve.mpi.primitive import bind",
        "mpi/lowering.py": "if TYPE_CHECKING:\n    from distsolve.mpi.primitive import OpSpec",
        "mpi/_jaxcompat.py": "from jax._src import core",
        "linalg/space.py": "from distsolve import mpi\nfrom distsolve.linalg import trees",
    }
    assert violations(package_at(tmp_path, files)) == []

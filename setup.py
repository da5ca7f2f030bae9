"""Build of the compiled modules; everything else about the package is in pyproject.toml."""

import importlib.util
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# Include folders, too: all handlers read XLA's call frame through the ffi.h of the first.
NATIVE = [Path("distsolve/mpi/native"), Path("distsolve/linalg/native")]

DIRECTIVES = {
    "language_level": "3",
    "binding": True,
    "boundscheck": False,
    "wraparound": False,
    "cdivision": True,
}

# Python adds its own flags, often with -g: debug information would store the paths of the
# machine that built a wheel. No -march=native: a wheel must run on every machine of its ABI.
COMPILE_ARGS = ["-O3", "-g0"]


def jaxlib_include() -> str:
    """Return the folder of XLA's FFI header, without importing jaxlib."""
    spec = importlib.util.find_spec("jaxlib")
    places = (spec.submodule_search_locations if spec else None) or []
    for place in places:
        include = Path(place) / "include"
        if (include / "xla/ffi/api/c_api.h").is_file():
            return str(include)
    raise RuntimeError(
        "building distsolve needs the header xla/ffi/api/c_api.h of an installed jaxlib >= 0.10, "
        f"searched in {[str(place) for place in places]}: run `pip install 'jaxlib>=0.10'`, or "
        "build without --no-build-isolation"
    )


def extensions() -> list[Extension]:
    """Return one extension per .pyx file of the native folders."""
    sources = sorted(path for folder in NATIVE for path in folder.glob("*.pyx"))
    if not sources:
        return []
    from Cython.Build import cythonize

    headers = sorted(str(path) for folder in NATIVE for path in folder.glob("*.h"))
    modules = [
        Extension(
            ".".join(source.with_suffix("").parts),
            [str(source)],
            include_dirs=[jaxlib_include(), *map(str, NATIVE)],
            depends=headers,
            extra_compile_args=COMPILE_ARGS,
        )
        for source in sources
    ]
    return cythonize(modules, compiler_directives=DIRECTIVES)


class BuildModules(build_ext):
    """Builds modules that find their libraries where they run, not where they were built."""

    def finalize_options(self) -> None:
        """Compile on all cores, unless told otherwise."""
        super().finalize_options()
        self.parallel = self.parallel or True

    def build_extensions(self) -> None:
        """Drop the library paths that some Pythons were built with, then build."""
        self.compiler.linker_so = [
            word for word in self.compiler.linker_so if not word.startswith(("-Wl,-rpath", "-L"))
        ]
        super().build_extensions()


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildModules})

# One command each: demo, test, lint, bench, docs. Each makes the environments that it needs; they
# live in .venv* and are made anew when what they are made from changes.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
# Only what environments take from elsewhere is installed side by side.
ifeq ($(filter %/.packages,$(MAKECMDGOALS)),)
.NOTPARALLEL:
endif
ENVIRONMENTS := .venv .venv-newest .venv-cuda .venv-newest-cuda .venv-openmpi .venv-bench .venv-docs
.SILENT: $(ENVIRONMENTS:%=%/.packages) $(ENVIRONMENTS:%=%/.ready) test

# The lowest end of the supported range where Python 3.11 is on the machine.
PYTHON ?= $(shell for name in python3.11 python3; do \
	if $$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo $$name; break; fi; done)
# Its lowest ml_dtypes as well: under Python 3.11 the import of 0.7.0 takes 1.3 s in every process.
LOWEST_JAX := jax==0.10.2 jaxlib==0.10.2 ml_dtypes==0.5.0
# The newest end: empty where no Python 3.12 or newer runs here.
NEWEST_PYTHON ?= $(shell $(PYTHON) .ci/newest_python.py)
MPI4JAX := mpi4jax==0.9.1.post2

NATIVE := $(foreach kind,pyx pxd h,$(wildcard distsolve/*/native/*.$(kind)))
BUILD_INPUTS := pyproject.toml setup.py $(NATIVE)
# Twice quiet: errors only.
PIP := -m pip install -qq --disable-pip-version-check
REQUIREMENTS := .ci/requirements.py
RUNTIME := build-system dependencies

# Each rank gets one thread: two ranks on two cores would otherwise fight for them.
LIMITS := JAX_PLATFORMS=cpu OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 PJRT_NPROC=1

# What `make test` covers; narrow it with e.g. make test ENDS=lowest MPI=mpich RANKS=2 ARGS='-k cg'
ENDS ?= lowest newest
MPI ?= mpich,openmpi
RANKS ?= lowest=1,2,3,0 newest=1,2,0
ARGS ?=
# all: every case of every test in every cell.
CASES ?=
# The programs of `make fuzz`, from a new seed each time, or PROGRAM of them alone; the solves of
# `make soak`.
EXAMPLES ?= 500
SEED ?= $(shell date +%s)
PROGRAM ?=
SOLVES ?= 10000
# What `make bench` compares: primitives, solvers, prediction.
COMPARE ?= primitives solvers
ENVIRONMENT_lowest := .venv
ENVIRONMENT_newest := .venv-newest
TESTED = $(foreach end,$(ENDS),$(ENVIRONMENT_$(end)) $(ENVIRONMENT_$(end))-cuda) $(if $(findstring openmpi,$(MPI)),.venv-openmpi)
# RANKS=2 alone stands for every end.
RANK_OPTIONS = $(foreach choice,$(RANKS),--ranks $(if $(findstring =,$(choice)),,all=)$(choice))

PEERS := mpi4jax shard-map c mpi4py petsc jax-scipy lineax

.PHONY: help demo test fuzz soak lint bench $(PEERS:%=compare-%) performance docs clean

help:
	@echo "make demo    the main job on 2 ranks: the energy of H2 by variational Monte Carlo"
	@echo "make test    all tests, on 1, 2 and 3 ranks, under MPICH and Open MPI"
	@echo "             fewer: make test ENDS=lowest MPI=mpich RANKS=2 ARGS='tests/mpi -k scan'"
	@echo "make fuzz    random programs, compared with a serial oracle: make fuzz EXAMPLES=2000 RANKS=2"
	@echo "make soak    many solves in one job, in which nothing may grow: make soak SOLVES=10000"
	@echo "make lint    ruff, cython-lint, mypy, codespell"
	@echo "make bench   the comparisons with mpi4jax, mpi4py, C, gloo, jax.scipy, lineax, NumPy, PETSc"
	@echo "             fewer: make bench COMPARE=solvers ARGS='--rows 1,6'"
	@echo "make compare-PEER  the rows in which one of them competes: $(PEERS)"
	@echo "make performance   measures everything and writes docs/performance.md"
	@echo "make docs    the pages, into build/docs"
	@echo "make clean   remove environments and build results"

demo: .venv/.ready
	$(LIMITS) .venv/bin/mpiexec -n 2 .venv/bin/python examples/vmc_molecule.py examples/molecules/h2.xyz

test:
	$(MAKE) --silent --jobs $(TESTED:%=%/.packages)
	$(MAKE) --silent $(TESTED:%=%/.ready)
	# Else each of some thousand processes would compile them, where none may write what it compiled.
	for folder in $(TESTED); do
		if [ -x $$folder/bin/python ]; then $$folder/bin/python -m compileall -q distsolve tests; fi
	done
	$(ENVIRONMENT_$(firstword $(ENDS)))/bin/python tests/run.py $(foreach end,$(ENDS),--env $(end)=$(ENVIRONMENT_$(end))) \
		--absent "newest=no Python 3.12 or newer runs on this machine" \
		--mpi $(MPI) $(RANK_OPTIONS) $(if $(CASES),--cases $(CASES)) $(if $(ARGS),-- $(ARGS))

fuzz soak: RANKS = 2

# One program that fails ends the run, and is printed with the command that repeats it.
fuzz: .venv/.ready
	echo "$(EXAMPLES) programs of seed $(SEED) on $(RANKS) ranks"
	$(LIMITS) DISTSOLVE_FUZZ_EXAMPLES=$(EXAMPLES) DISTSOLVE_FUZZ_SEED=$(SEED) \
		$(if $(PROGRAM),DISTSOLVE_FUZZ_PROGRAM=$(PROGRAM)) .venv/bin/mpiexec -n $(RANKS) \
		.venv/bin/python -m pytest -q tests/mpi/test_random_programs.py

soak: .venv/.ready
	$(LIMITS) .venv/bin/mpiexec -n $(RANKS) .venv/bin/python tests/jobs/soak.py $(SOLVES)

lint: .venv/.ready
	export PATH="$$PWD/.venv/bin:$$PATH"
	ruff format --check .
	ruff check .
	$(if $(NATIVE),cython-lint distsolve/mpi/native distsolve/linalg/native)
	mypy
	codespell

# Each comparison runs to its end, also after one in which a contender failed.
bench: .venv-bench/.ready
	status=0
	for name in $(COMPARE); do
		$(LIMITS) .venv-bench/bin/python benchmarks/compare_$$name.py $(ARGS) || status=1
	done
	exit $$status

$(PEERS:%=compare-%): compare-%: .venv-bench/.ready
	$(LIMITS) .venv-bench/bin/python benchmarks/compare.py $* $(ARGS)

# On an idle machine only. A contender that failed leaves the page as it is.
performance: .venv-bench/.ready .venv/.ready
	rm -rf build/runs docs/performance
	mkdir -p docs/performance
	for name in primitives solvers prediction; do
		$(LIMITS) .venv-bench/bin/python benchmarks/compare_$$name.py --json docs/performance/$$name.json
	done
	for n in 1 2; do
		$(LIMITS) .venv/bin/mpiexec -n $$n .venv/bin/python -m distsolve bench --output build/runs
	done
	.venv/bin/python benchmarks/write_performance.py --runs build/runs

docs: .venv-docs/.ready
	.venv-docs/bin/sphinx-build --fail-on-warning --keep-going --fresh-env --quiet docs build/docs

clean:
	rm -rf $(ENVIRONMENTS) build dist *.egg-info
	rm -f distsolve/*/native/*.c distsolve/*/native/*.so

# What an environment takes from elsewhere, by pip. Arguments: the environment, its Python, further
# requirements, and which lists of pyproject.toml: the build's requirements, ours, those of extras.
define packages
	echo "setting up $(1) (minutes)"
	test -n "$(2)" || { echo "no Python 3.11 or newer runs on this machine" >&2; exit 1; }
	test -x $(1)/bin/python || $(2) -m venv $(1)
	$(1)/bin/python $(REQUIREMENTS) $(4) | \
		$(1)/bin/python $(PIP) --upgrade -r /dev/stdin $(3)
	touch $@
endef

# An editable install with the environment's own jaxlib headers: the sources are what is tested.
# One after the other, as the generated C is the same file for all.
define install
	test -x $(1)/bin/python || exit 0
	$(1)/bin/python $(PIP) --no-build-isolation --no-deps --editable .
endef

.venv/.packages: pyproject.toml Makefile
	$(call packages,.venv,$(PYTHON),$$($(PYTHON) -c 'import sys; print("$(LOWEST_JAX)" if sys.version_info[:2] == (3, 11) else "jax")'),$(RUNTIME) mpich examples test lint dist)

# A machine without a newer Python leaves the environment out, and `make test` says so. One with a
# newer Python that cannot be set up fails here.
.venv-newest/.packages: pyproject.toml Makefile
	newest="$(NEWEST_PYTHON)"
	if [ -z "$$newest" ]; then exit 0; fi
	$(call packages,.venv-newest,$$newest,jax,$(RUNTIME) mpich examples test)

.venv-bench/.packages: pyproject.toml Makefile
	$(call packages,.venv-bench,$(PYTHON),$(LOWEST_JAX) nanobind lineax,$(RUNTIME) mpich bench)

# The reference is read from the library, which is imported for it.
.venv-docs/.packages: pyproject.toml Makefile
	$(call packages,.venv-docs,$(PYTHON),$(LOWEST_JAX),$(RUNTIME) docs)

.venv/.ready .venv-newest/.ready .venv-docs/.ready: %/.ready: %/.packages $(BUILD_INPUTS)
	$(call install,$*)
	touch $@

.venv-openmpi/.packages: pyproject.toml Makefile
	$(call packages,.venv-openmpi,$(PYTHON),,openmpi)

# JAX's plugin for CUDA alone, of the release of JAX in the environment beside it: tests add it to the
# path of a process, and the driver without a GPU stands for the libraries that it loads.
.venv-cuda/.packages: PLUGIN := jax-cuda12-plugin
.venv-newest-cuda/.packages: PLUGIN := jax-cuda13-plugin
.venv-cuda/.packages .venv-newest-cuda/.packages: %-cuda/.packages: %/.packages
	test -x $*/bin/python || exit 0
	$(call packages,$*-cuda,$*/bin/python,$$($*/bin/python -c 'from importlib.metadata import version; print("$(PLUGIN)==" + version("jaxlib"))'),)

.venv-openmpi/.ready .venv-cuda/.ready .venv-newest-cuda/.ready: %/.ready: %/.packages
	test ! -d $* || touch $@

# mpi4jax builds GPU parts where it finds nvcc, and fails where nvcc comes without CUDA headers:
# folders that hold nvcc, but no compiler, are left out of PATH. Its MPI is the mpich wheel. PETSc is
# the system's (Debian: python3-petsc4py, python3-mpi4py, openmpi-bin), or its row says that it is
# missing.
.venv-bench/.ready: .venv-bench/.packages $(BUILD_INPUTS)
	$(call install,.venv-bench)
	path=; IFS=:; for folder in $$PATH; do \
		if [ ! -x "$$folder/nvcc" ] || [ -x "$$folder/gcc" ]; then path="$$path:$$folder"; fi; done; unset IFS
	env -u CUDA_PATH -u CUDA_ROOT -u CUDA_HOME PATH="$$PWD/.venv-bench/bin$$path" \
		.venv-bench/bin/python $(PIP) --no-build-isolation $(MPI4JAX)
	touch $@

# SPDX-License-Identifier: Apache-2.0
# make demo    the main job, with stock DeepSpeed and with ours, and a table that compares them
# make test    every law, with a sample of what is too long, drawn anew each day from a seed that it prints. The
#              planner's tests run in an environment of their own that has no torch: make test-planning. What it leaves out:
# make test-long     whole trainings, and what the pages say
# make test-bench    the benchmarks' own tests, and each figure of the pages
# make test-clients  a framework with an environment of its own: LLaMA-Factory's own command, unmodified, with and without
#              DS_FSMOE=1: the losses of four families (not in CI)
# make nightly  all tests, every case of every matrix; it goes on where it stopped, and ends with a line for benchmarks/LOG.md
# make test-newest   make test with Python 3.13 and torch 2.15 (PYTHON=/path names the interpreter; a download of 3 GB);
#              make test-oldest with Python 3.11 and torch 2.11. The last results are in benchmarks/LOG.md
# make cluster-demo  the demo on a cluster on one machine: 2 nodes as network namespaces (Linux, root, iproute2)
# make bench   the benchmarks on that cluster, short (under ten minutes); make bench-full measures every case (hours),
#              says how long, and goes on where it stopped
# make soak    faults of all kinds that jobs survive, and thousands of steps after which nothing has grown (half an hour)
# make docs    the pages of docs/ as a site in site/, strictly: a dead link or an undocumented public name fails
# make lint    ruff: rules and layout; clang-format for csrc/. make format puts right what can be
# Each sets up .venv first, if that is not there or the requirements have changed.

VENV := .venv
READY := $(VENV)/.ready
PLANNING := $(VENV)-planning
PLANNING_READY := $(PLANNING)/.ready
DOCS := .venv-docs
DOCS_READY := $(DOCS)/.ready
LLAMAFACTORY := .venv-llamafactory
LLAMAFACTORY_READY := $(LLAMAFACTORY)/.ready
# With its folder on the PATH, for the launcher and for ninja.
RUN := PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(VENV)/bin/python

SOURCES = $(shell find csrc -name "*.cpp" -o -name "*.h" -o -name "*.cu" -o -name "*.cuh")

# Tests run in one process per core and one more, up to four: a test starts ranks of its own, and waits for them.
SIDE_BY_SIDE := -n $(shell python3 -c "import os; print(min(4, len(os.sched_getaffinity(0)) + 1))") --dist worksteal
OTHERS := --ignore tests/planning --ignore tests/benchmarks

# One thread per rank: the ranks share the cores. Ops are compiled into a folder of our own, so that a lock left behind
# by another program cannot hold us up.
export OMP_NUM_THREADS ?= 1
export TORCH_EXTENSIONS_DIR ?= $(CURDIR)/$(VENV)/torch_extensions
# Tests start hundreds of interpreters: each would compile the package anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup demo cluster-demo bench bench-full soak test test-planning test-long test-bench test-clients test-newest test-oldest nightly docs lint format clean

setup: $(READY)

$(READY): setup.py pyproject.toml ds_fsmoe/versions.py tools/setup_venv.sh
	@echo "== setup: a virtual environment in $(VENV) (some minutes, once)"
	@tools/setup_venv.sh $(patsubst .venv-%,%,$(filter-out .venv,$(VENV)))

demo: $(READY)
	@echo "== demo: the main job twice, stock DeepSpeed and ours (about two minutes)"
	@$(RUN) examples/demo.py $(if $(DEMO_STEPS),--steps $(DEMO_STEPS))

$(PLANNING_READY): setup.py ds_fsmoe/versions.py tools/setup_venv.sh
	@echo "== setup: a virtual environment without torch in $(PLANNING) (half a minute, once)"
	@tools/setup_venv.sh $(patsubst .venv-%,%,$(PLANNING))

cluster-demo: $(READY)
	@echo "== cluster-demo: the main job on 2 nodes of 2 ranks, stock DeepSpeed and ours (under five minutes)"
	@$(RUN) benchmarks/bed/demo.py $(if $(DEMO_STEPS),--steps $(DEMO_STEPS))

bench: $(READY)
	@echo "== bench: the benchmarks on 2 nodes of 2 ranks, a few cases of each (under ten minutes)"
	@$(RUN) benchmarks/everything.py

bench-full: $(READY)
	@echo "== bench-full: every case of every benchmark (hours; it goes on where it stopped)"
	@$(RUN) benchmarks/everything.py --full

soak: $(READY)
	@echo "== soak: faults that jobs have to survive, then thousands of steps (half an hour)"
	@$(RUN) benchmarks/faults/bench_faults.py
	@DS_ACCELERATOR=cpu $(RUN) $(VENV)/bin/deepspeed --num_accelerators 2 benchmarks/faults/soak_job.py

test: $(READY) test-planning
	@echo "== test: the laws: every part, a sample of every matrix (minutes are in CONTRIBUTING.md)"
	@$(RUN) -m pytest -m "not slow and not long" $(SIDE_BY_SIDE) --durations=10 $(OTHERS)

test-long: $(READY)
	@echo "== test-long: whole trainings, what README, docs and notebooks say, reports in a browser"
	@$(RUN) -m pytest -m "long and not slow" $(SIDE_BY_SIDE) --durations=10 $(OTHERS)

test-bench: $(READY)
	@echo "== test-bench: the benchmarks' own tests, and each figure of the pages"
	@$(RUN) -m pytest -m "not slow" $(SIDE_BY_SIDE) --durations=10 tests/benchmarks

test-planning: $(PLANNING_READY)
	@echo "== test: the planner, where there is no torch"
	@DS_FSMOE_EXPECT_NO_TORCH=1 $(PLANNING)/bin/python -m pytest -m "not slow and not long" $(SIDE_BY_SIDE) --durations=5 tests/planning

test-clients: $(LLAMAFACTORY_READY)
	@echo "== test-clients: LLaMA-Factory's own command, four families on two ranks, stock DeepSpeed and ours (about ten minutes)"
	@$(LLAMAFACTORY)/bin/python -m pip install --quiet --no-deps --force-reinstall .
	@$(LLAMAFACTORY)/bin/python tools/try_llamafactory.py

test-newest:
	@echo "== test-newest: make test on the newest Python and torch that are supported (downloads 3 GB, with CUDA libraries; 6 GB on disk)"
	@$(MAKE) --no-print-directory VENV=.venv-newest test

test-oldest:
	@echo "== test-oldest: make test on the oldest Python and torch that are supported (downloads 3 GB, with CUDA libraries; 6 GB on disk)"
	@$(MAKE) --no-print-directory VENV=.venv-oldest test

nightly: $(READY) $(PLANNING_READY)
	@echo "== nightly: all tests, every case of every matrix, file by file (hours; it goes on where it stopped)"
	@DS_FSMOE_EXPECT_NO_TORCH=1 $(PLANNING)/bin/python -m pytest $(SIDE_BY_SIDE) --durations=5 tests/planning
	@$(RUN) tools/nightly.py $(SIDE_BY_SIDE)

$(DOCS_READY): tools/docs_requirements.txt tools/setup_venv.sh
	@echo "== setup: a virtual environment with mkdocs in $(DOCS) (a minute, once)"
	@tools/setup_venv.sh docs

docs: $(DOCS_READY)
	@echo "== docs: the pages as a site in site/ (some seconds)"
	@NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs build --strict # not --quiet, which hides warnings from --strict

$(LLAMAFACTORY_READY): setup.py ds_fsmoe/versions.py tools/setup_venv.sh
	@echo "== setup: a virtual environment with LLaMA-Factory in $(LLAMAFACTORY) (some minutes, once)"
	@tools/setup_venv.sh llamafactory

lint: $(READY)
	@echo "== lint: ruff, clang-format"
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@$(VENV)/bin/clang-format --dry-run --Werror $(SOURCES)

format: $(READY)
	@$(RUN) -m ruff check --fix .
	@$(RUN) -m ruff format .
	@$(VENV)/bin/clang-format -i $(SOURCES)

clean:
	rm -rf $(VENV) $(PLANNING) .venv-newest* .venv-oldest* $(DOCS) $(LLAMAFACTORY) site build dist runs *.egg-info .pytest_cache .ruff_cache

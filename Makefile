# A fresh machine needs nothing but Python >= 3.10: each target sets up .venv by itself, once.
PYTHON ?= python3
VENV ?= .venv
ENGINES ?= .venv-engines
OLDEST ?= .venv-oldest
PYTEST_ARGS ?=
CONSTRAINTS ?= constraints.txt

PY := $(VENV)/bin/python
PIP := $(PY) -m pip
INSTALL := $(PIP) install --quiet --constraint $(CONSTRAINTS)
# One process per core (four at most), with one torch thread each: processes do not fight for cores.
PYTEST := OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(PY) -m pytest
# Of vLLM, a function of the sampler would be compiled, which takes longer than most tests.
ENGINES_PYTEST := OMP_NUM_THREADS=1 TORCHDYNAMO_DISABLE=1 $(ENGINES)/bin/python -m pytest
PARALLEL := -n logical --maxprocesses 4 --dist worksteal
OLDEST_PYTEST := OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(OLDEST)/bin/python -m pytest $(PARALLEL) $(PYTEST_ARGS)
OLDEST_INSTALL := $(OLDEST)/bin/python -m pip install --quiet --constraint constraints-oldest.txt --editable ".[demo,heif,http,parquet,s3]" --group test
# The lower bounds of the library alone, and tests that import none of what needs newer versions.
LOWER_BOUNDS = $$(sed -n '/^dependencies/,/^]/s/^  "\([a-z-]*\)>=\([0-9.]*\)".*/\1==\2/p' pyproject.toml)
LIBRARY_TESTS := tests/vitgraph/commands tests/vitgraph/embed tests/weights/fetching tests/vitgraph/search tests/weights/loading/test_load.py --ignore tests/vitgraph/commands/test_demo.py --ignore tests/vitgraph/embed/test_feature_store.py

MAKEFLAGS += --no-print-directory  # the last line of `make test` is a summary of pytest
# Images of containers often set it. Each process would compile vLLM's files anew, which takes 10 s.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo test suite lint types fast family notebooks outputs engines oldest docs clean

help: ## show this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

demo: $(VENV)/.demo ## encode photographs with every family, write demo/feature_maps.png
	$(PY) -m vitgraph demo --all --out demo

test: lint types engines suite ## everything CI runs: lint, types, engines, fast and slow tests, notebooks

suite: $(VENV)/.test ## the fast and the slow tests
	$(PYTEST) -m "not gpu and not engines" $(PARALLEL) $(PYTEST_ARGS)

lint: $(VENV)/.test ## ruff: rules and format; import-linter: what may import what
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(VENV)/bin/lint-imports --no-cache

types: $(VENV)/.test ## mypy --strict over the packages, the benchmarks, GPU tests and what tests share
	$(PY) -m mypy

fast: $(VENV)/.test ## the tests of a plain `pytest`
	$(PYTEST) $(PARALLEL) $(PYTEST_ARGS)

family: $(if $(NAME),$(VENV)/.test) ## the tests of one family, for example make family NAME=qwen3_vl
	@test -n "$(NAME)" || { echo "which family? make family NAME=qwen3_vl"; exit 1; }
	$(PYTEST) -m "not gpu and not engines" --family $(NAME) $(PARALLEL) $(PYTEST_ARGS)

notebooks: $(VENV)/.test ## execute every notebook on a small seeded checkpoint
	$(PYTEST) -m "not gpu" tests/documents/test_notebooks.py tests/package/test_bare_environment.py -k notebook

outputs: $(VENV)/.test ## execute every notebook, write its outputs in place and its picture into docs/notebooks
	$(PY) -m tests.support.notebooks

engines: $(ENGINES)/.installed ## vLLM and Dynamo with our towers, in an environment of their own
	$(ENGINES_PYTEST) -m "engines and not slow" --noconftest -n 2 --dist loadfile tests/engines

oldest: $(OLDEST)/.installed ## tests with the lower bounds of pyproject.toml; Python 3.10 or 3.11
	$(OLDEST)/bin/python -m pip uninstall --quiet --yes pillow_heif timm transformers
	$(OLDEST)/bin/python -m pip install --quiet --no-deps $(LOWER_BOUNDS)
	$(OLDEST_PYTEST) $(LIBRARY_TESTS)
	$(OLDEST_INSTALL)
	$(OLDEST_PYTEST)

docs: $(VENV)/.test ## build the site of the documentation, with strict links, into build/site
	$(PY) -m mkdocs build --strict

clean: ## remove the environments and all that was built
	rm -rf $(VENV) $(ENGINES) $(OLDEST) build dist demo .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info

$(VENV)/.pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "vitgraph needs Python >= 3.10 but $(PYTHON) is $$($(PYTHON) -V 2>&1): make PYTHON=/path/to/python3"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade "pip>=25.1"
	@touch $@

$(VENV)/.demo: pyproject.toml $(CONSTRAINTS) | $(VENV)/.pip
	$(INSTALL) --editable ".[demo]"
	@touch $@

$(VENV)/.test: pyproject.toml $(CONSTRAINTS) | $(VENV)/.pip
	$(INSTALL) --editable ".[demo]" --group test --group integrations --group lint --group docs
	@touch $@ $(VENV)/.demo

$(OLDEST)/.installed: pyproject.toml constraints-oldest.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 10), (3, 11)))' || { echo "the oldest versions have wheels for Python 3.10 and 3.11 but $(PYTHON) is $$($(PYTHON) -V 2>&1): make oldest PYTHON=/path/to/python3.10"; exit 1; }
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	$(OLDEST_INSTALL)
	@touch $@

$(ENGINES)/.installed: tests/engines/requirements.txt tests/engines/torchvision_on_cpu.py
	$(PYTHON) -m venv $(ENGINES)
	$(ENGINES)/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	$(ENGINES)/bin/python -m pip install --quiet --no-compile torch==2.13.0
	$(ENGINES)/bin/python -m pip install --quiet --no-deps --no-compile --requirement tests/engines/requirements.txt
	cp tests/engines/torchvision_on_cpu.* "$$($(ENGINES)/bin/python -c 'import site; print(site.getsitepackages()[0])')"
	$(ENGINES)/bin/python -m pip install --quiet --no-deps --editable .
	@touch $@

# Needs only make and Python 3.11 or newer; everything else goes into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CODE := src tests examples demo bench

.PHONY: help setup lint test test-fast layouts docs help-page demo bench clean
.DEFAULT_GOAL := help

help:
	@echo "make setup      a virtual environment in $(VENV) with evenstep and all it needs"
	@echo "make demo       trains digits on 1, 2 and 3 processes, once killed and resumed: one model (2 minutes on two idle cores)"
	@echo "make test       lint, types, layers and the whole test suite (20 minutes on two idle cores)"
	@echo "make test-fast  the test suite without the tests marked slow"
	@echo "make layouts    writes docs/layouts.md anew: which layouts give the same model"
	@echo "make docs       the documentation as a site, in site/"
	@echo "make help-page  writes docs/command-line.md anew: what --help prints"
	@echo "make bench      speed and memory against hand-written DDP and torchrun"

# Runs again only when what is to be installed has changed.
$(STAMP): pyproject.toml constraints.txt
	@echo "setup: installing torch and the rest into $(VENV): 2.2 GB, 2 minutes or, over a slow network, many"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "evenstep needs Python 3.11 or newer, and $(PYTHON) is older: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev,examples,trackers]'
	@touch $@

setup: $(STAMP)

lint: $(STAMP)
	$(BIN)/python -m ruff check $(CODE)
	$(BIN)/python -m ruff format --check $(CODE)
	$(BIN)/python -m mypy
	$(BIN)/lint-imports

# Two at a time: most tests wait for processes that they have started. A file's tests stay together.
test: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile --durations 30

test-fast: $(STAMP)
	$(BIN)/python -m pytest -m 'not slow'

layouts: $(STAMP)
	@$(BIN)/python -m tests.train.layouts

docs: help-page
	@$(BIN)/python -m zensical build --strict

help-page: $(STAMP)
	@$(BIN)/python -m tests.docs.command_line

demo: $(STAMP)
	@$(BIN)/python demo/demo.py

bench: $(STAMP)
	@$(BIN)/python -m bench

clean:
	rm -rf $(VENV) build site .cache runs .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis

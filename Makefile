# Everything runs from .venv, made on first use. To pick another build of torch:
#   make serve TORCH_SPEC='torch>=2.11' PIP_ARGS='--index-url URL'
PYTHON ?= python3
TORCH_SPEC ?= torch==2.13.0
PIP_ARGS ?=
MODEL ?= demo
ARGS ?=
# Processes that share the tests: auto is one a core, no more than memory is there for.
WORKERS ?= auto
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
# Clients that cap what others need at lower versions than they run with (pyproject.toml).
CAPPED := 'instructor>=1.17,<2' 'litellm>=1.109,<2'
# A stamp's name holds the choice of torch, so that another choice installs again.
CHOICE := $(shell printf '%s' '$(TORCH_SPEC) $(PIP_ARGS)' | cksum | cut -d' ' -f1)
INSTALLED := $(VENV)/.installed-$(CHOICE)
TESTABLE := $(VENV)/.testable-$(CHOICE)

# Tests start some hundred processes, and each would compile headrace and the tests again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install serve test test-all check fmt clean
.DEFAULT_GOAL := help

help:
	@echo 'make serve      serve the demo model on http://127.0.0.1:8000 (MODEL=..., ARGS=...)'
	@echo 'make install    what serving needs, in $(VENV); the command is $(BIN)/headrace (TORCH_SPEC=..., PIP_ARGS=...)'
	@echo 'make test       the test suite, without its longest sweeps (WORKERS=..., PYTEST_ARGS=...)'
	@echo 'make test-all   the longest sweeps too'
	@echo 'make check      ruff and Pyrefly'
	@echo 'make fmt        ruff, mending what it can'
	@echo 'make clean      remove $(VENV) and caches'

$(INSTALLED): pyproject.toml
	@echo 'Installing headrace and $(TORCH_SPEC) in $(VENV).'
	@echo 'A CPU build of torch: some 250 MB to download, 1 GB on disk. A CUDA or ROCm build: several GB.'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install $(PIP_ARGS) '$(TORCH_SPEC)' -e .
	@touch $@
	@echo 'Installed. The command is $(BIN)/headrace; `. $(BIN)/activate` makes it plain `headrace` in this shell.'

$(TESTABLE): $(INSTALLED)
	@echo 'Installing what tests and checks need too: some 400 MB to download, 1.7 GB on disk.'
	$(BIN)/pip install $(PIP_ARGS) '$(TORCH_SPEC)' -e '.[test,clients]'
	$(BIN)/pip install $(PIP_ARGS) --no-deps $(CAPPED)
	@touch $@

install: $(INSTALLED)

serve: $(INSTALLED)
	$(BIN)/headrace serve $(MODEL) $(ARGS)

test: $(TESTABLE)
	$(BIN)/python -m pytest -n $(WORKERS) $(PYTEST_ARGS)

test-all: $(TESTABLE)
	$(BIN)/python -m pytest -n $(WORKERS) -m '' $(PYTEST_ARGS)

check: $(TESTABLE)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check --summary=none

fmt: $(TESTABLE)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .ruff_cache .pytest_cache

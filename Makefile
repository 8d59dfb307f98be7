# Everything runs from .venv, made on first use. To pick another build of torch:
#   make serve TORCH_SPEC='torch>=2.11' PIP_ARGS='--index-url URL'
PYTHON ?= python3
TORCH_SPEC ?= torch==2.13.0
PIP_ARGS ?=
MODEL ?= demo
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
# The stamp's name holds the choice of torch, so that another choice installs again.
STAMP := $(VENV)/.installed-$(shell printf '%s' '$(TORCH_SPEC) $(PIP_ARGS)' | cksum | cut -d' ' -f1)

.PHONY: serve test check fmt bench-cpu clean
.DEFAULT_GOAL := help

help:
	@echo 'make serve   serve the demo model on http://127.0.0.1:8000 (MODEL=..., ARGS=...)'
	@echo 'make test    the whole test suite'
	@echo 'make check   ruff and mypy'

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q $(PIP_ARGS) '$(TORCH_SPEC)' -e '.[test]'
	@touch $@

serve: $(STAMP)
	$(BIN)/headrace serve $(MODEL) $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fmt: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache

# Everything starts from here, on a machine with python3 and make: each target sets up .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest

.PHONY: help setup test test-deep test-gpu lint check clean

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(VENV)/.installed ## create .venv and install powergrad with what its tests need

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

test: setup ## every test, in a few minutes on 2 cores
	$(PYTEST) -n 2

test-deep: setup ## the same, with 10,000 and more random cases
	HYPOTHESIS_PROFILE=deep $(PYTEST) -n 2

test-gpu: setup ## the same tests on CUDA
	POWERGRAD_TEST_DEVICE=cuda $(PYTEST)

lint: setup ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

check: lint test ## what CI runs

clean: ## remove .venv and what was built
	rm -rf $(VENV) build dist src/*.egg-info

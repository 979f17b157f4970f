# Everything starts from here, on a machine with python3 and make: each target sets up .venv first.
PYTHON ?= python3
VENV := .venv
export PIP_DISABLE_PIP_VERSION_CHECK := 1
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest
BENCHMARKS := loss compiled linear agc altering monitor planted imports decode train calibration run

.PHONY: help setup compare test test-core test-studies test-deep test-matrix test-processes test-torch test-triton test-gpu test-integrations test-browsers test-release dist bench bench-gpu pages docs docs-serve lint check clean

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 19

setup: $(VENV)/.installed ## create .venv and install powergrad with what its tests need

KERNEL := setup.py $(wildcard src/powergrad/kernels/*.[ch])

$(VENV)/.installed: pyproject.toml constraints.txt $(KERNEL)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt pip  # one that knows --group
	$(BIN)/pip install --quiet -c constraints.txt torch
	$(BIN)/pip install --quiet -c constraints.txt -e '.[lab]' --group dev
	touch $@

compare: setup ## does it help? the default comparison: 5 arms, 8 to 24 seeds each, on noisy digits
	$(BIN)/powergrad compare

# Two processes. The tests of a file stay in one of them, because they share slow fixtures, and files
# stay in order: tests/lab forks, which is not safe after other tests have loaded JAX.
TWO := -n 2 --dist loadfile --no-loadscope-reorder

# JAX in a process forbids it to fork, so the other libraries have a run of their own.
WITHOUT_OTHERS := --ignore=tests/integrations --ignore=tests/release --ignore=tests/browsers

QUICK := not matrix and not processes and not studies and not deep and not triton

test: setup ## the tests, with and without the C kernel
	@echo "tests/integrations (timm, transformers, Lightning, JAX) is left to make test-integrations,"
	@echo "tests/release (sdist and wheel in an empty environment) to make test-release,"
	@echo "compiled and exported programs to make test-matrix, split classes to make test-processes,"
	@echo "killed, resumed and shared studies to make test-studies, still longer ones to make test-deep,"
	@echo "the Triton kernels to make test-triton"
	$(PYTEST) $(TWO) $(WITHOUT_OTHERS) -m '$(QUICK)'

test-core: setup ## the core alone
	$(PYTEST) $(TWO) $(wildcard tests/test_*.py) -m '$(QUICK)'

test-studies: setup ## studies with worker processes: killed, resumed, shared, within a budget
	$(PYTEST) $(TWO) $(WITHOUT_OTHERS) -m studies

test-deep: setup ## like test, with 10,000 random cases, whole studies within their budgets, and more
	HYPOTHESIS_PROFILE=deep $(PYTEST) $(TWO) $(WITHOUT_OTHERS) -m 'not matrix and not processes and not triton'

test-matrix: setup ## PGT under compile, export, make_fx, DTensor and more: no gradient is plain
	$(PYTEST) -n 2 $(WITHOUT_OTHERS) -m matrix

test-processes: setup ## losses whose classes are split over two, three and four gloo processes
	$(PYTEST) $(WITHOUT_OTHERS) -m processes $(wildcard tests/test_*.py)

$(VENV)/.integrations: $(VENV)/.installed
	$(BIN)/pip install --quiet -c constraints.txt --group integrations
	$(BIN)/pip install --quiet -c constraints.txt --no-deps torchtitan  # only its loss
	touch $@

test-integrations: $(VENV)/.integrations ## timm, transformers, TRL, torchtitan, Keras, Lightning, JAX and the examples
	$(PYTEST) tests/integrations

tests/browsers/node_modules: tests/browsers/package-lock.json
	cd tests/browsers && npm ci --no-audit --no-fund --silent
	touch $@

test-browsers: docs tests/browsers/node_modules ## the page and the site in Firefox and Chromium, with axe-core
	$(PYTEST) tests/browsers

bench: setup ## every benchmark; rewrites results/bench_*.csv and the pages' tables
	for script in $(BENCHMARKS); do $(BIN)/python benchmarks/$$script.py || exit 1; done
	$(BIN)/python -m reproduction pages

pages: setup ## fill the generated parts of README.md and docs/ from results/
	$(BIN)/python -m reproduction pages

# The oldest version that pyproject.toml allows. PyPI's builds for Linux bring their CUDA libraries.
VERSION ?= 2.6.0
OTHER := build/torch-$(VERSION)

$(OTHER)/.installed:
	$(PYTHON) -m venv $(OTHER)
	$(OTHER)/bin/pip install --quiet torch==$(VERSION) hypothesis mpmath numpy pillow pydantic pytest pytest-xdist pyyaml rich safetensors scikit-learn
	touch $@

# What is not about PyTorch: documentation, API, packaging. Triton has an environment of its own.
ABOUT_TORCH := $(filter-out %_api.py %_docs.py %_package.py %_triton.py %_triton_offline.py,$(wildcard tests/test_*.py))
OTHER_PYTEST = PYTHONPATH=$(abspath src) $(OTHER)/bin/python -m pytest

test-torch: setup $(OTHER)/.installed ## the core, eager and compiled, with another torch: VERSION=2.6.0 (5 GB)
	$(OTHER_PYTEST) $(TWO) $(ABOUT_TORCH) -m '$(QUICK)'
	$(OTHER_PYTEST) -n 2 $(ABOUT_TORCH) -m matrix -k 'compil or checkpoint'

# Triton has no dependencies; torch stays the build that it is.
$(VENV)/.triton: $(VENV)/.installed
	$(BIN)/pip install --quiet --no-deps -c constraints.txt triton
	touch $@

INTERPRETED := POWERGRAD_TRITON=interpret TRITON_INTERPRET=1

test-triton: $(VENV)/.triton ## the Triton kernels: interpreted against float64, and compiled for named GPUs
	$(INTERPRETED) $(PYTEST) -n 2 -m triton tests/test_triton.py
	$(INTERPRETED) $(PYTEST) -n 2 -k 'value_and_gradient and cross_entropy: and not PowerGrad and not float64' tests/test_gradients.py
	$(INTERPRETED) $(PYTEST) -n 2 -m '$(QUICK)' -k 'not 128_000' tests/test_loss.py tests/test_linear.py
	$(PYTEST) -n 2 -m triton tests/test_triton_offline.py

test-gpu: setup ## like test, on CUDA
	POWERGRAD_TEST_DEVICE=cuda $(PYTEST) $(WITHOUT_OTHERS) -m '$(QUICK)'

bench-gpu: setup ## time and memory of the loss on CUDA; writes results/bench_gpu.csv
	$(BIN)/python benchmarks/gpu.py

$(VENV)/.release: $(VENV)/.installed
	$(BIN)/pip install --quiet -c constraints.txt --group release
	touch $@

# From a copy of what git knows, so that nothing that an earlier build left gets in.
dist: $(VENV)/.release ## the sdist and the wheel, in dist/
	rm -rf dist build/export && mkdir -p build/export
	git ls-files -coz --exclude-standard | tar --null -T - -c | tar x -C build/export
	$(BIN)/python -m build --outdir dist build/export
	if ls dist/*-linux_*.whl 2>/dev/null; then \
		PATH=$(abspath $(BIN)):$$PATH auditwheel repair --wheel-dir dist dist/*.whl && rm dist/*-linux_*.whl; fi
	$(BIN)/twine check --strict dist/*

test-release: dist ## what is in dist/, installed into empty environments
	$(PYTEST) -s tests/release

$(VENV)/.docs: $(VENV)/.installed
	$(BIN)/pip install --quiet -c constraints.txt --group docs
	touch $@

# The examples lie beside docs/; the site has copies.
docs: $(VENV)/.docs ## the documentation, into site/
	$(BIN)/zensical build --strict --clean
	mkdir -p site/examples && cp examples/*.py site/examples/
	$(BIN)/python -c "import pathlib; [p.write_text(p.read_text().replace('=\"../examples/', '=\"examples/')) for p in pathlib.Path('site').glob('*.html')]"
	@echo "open site/index.html"

docs-serve: $(VENV)/.docs ## the documentation at http://127.0.0.1:8000, rebuilt on every change
	$(BIN)/zensical serve

lint: setup ## style, types, and who imports whom
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/pyright

check: lint test ## what CI runs

clean: ## remove .venv and what was built
	rm -rf $(VENV) build dist site src/*.egg-info

# Everything runs in a virtual environment of its own, made on first use: nothing but Python 3.10 or
# newer and make is needed on the machine. Later runs find the environment ready and start at once.

PYTHON ?= python3
VENV ?= .venv
# Installed before the package, whose own requirement is a range. Naming one release keeps results
# comparable, and where a CPU build of that release is at hand (pip's find-links, or an index of CPU
# builds) pip prefers it. On Linux the default index serves CUDA builds: a download of some gigabytes.
# After a change of TORCH or PYTHON: make clean.
TORCH ?= torch==2.13.0
# Two workers with one thread each: the emulated devices are state of a process, so workers are safe.
PYTEST_ARGS ?= --numprocesses=2 --dist=loadgroup

BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help demo test lint typecheck clean

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

demo: $(VENV)/.demo ## train a network spread over two devices, compare with one device
	$(BIN)/python examples/digits_multidevice.py --check --out out/demo

test: $(VENV)/.dev ## the test suite and the docstrings' examples, with coverage
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_ARGS) --doctest-modules --cov=opacus --cov-report=term

lint: $(VENV)/.dev ## ruff: rules and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: $(VENV)/.dev ## mypy over the package
	$(BIN)/mypy

clean: ## remove the environment and everything that was built
	rm -rf $(VENV) out build dist *.egg-info .coverage .coverage.* htmlcov .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find opacus examples -type d -name __pycache__ -exec rm -rf {} +

# Stamps: written last, so that an install cut short is done again.
$(VENV)/.torch:
	$(PYTHON) -c 'import sys; sys.exit("$(PYTHON) is older than Python 3.10: make PYTHON=python3.x" if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	touch $@

$(VENV)/.demo: $(VENV)/.torch setup.py pyproject.toml opacus/version.py
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[demo]'
	touch $@

$(VENV)/.dev: $(VENV)/.torch setup.py pyproject.toml opacus/version.py
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,hf,quantized]'
	touch $@

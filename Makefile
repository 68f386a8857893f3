# make demo, make test: everything they need is installed into .venv on the first run (a few minutes, 1.7 GB).
# make demo ARGS="--quick --keep": arguments for the demo.

PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3.13 || command -v python3)
# The CPU build is enough and a tenth of the download. Where PyPI serves the CUDA build (most of Linux x86-64), use
#   make test TORCH="torch==2.13.0+cpu --extra-index-url https://download.pytorch.org/whl/cpu"
TORCH ?= torch==2.13.0
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check

.PHONY: venv test test-fast test-rdma lint demo bench clean

venv: $(INSTALLED)

$(INSTALLED): pyproject.toml hatch_build.py hicache_mooncake/native/copying.c testbed/requirements-lock.txt
	@echo "[1/4] virtual environment in $(VENV) with $(PYTHON)"
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed" if sys.version_info < (3, 11) else 0)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "[2/4] $(TORCH): up to a minute"
	@$(PIP) $(TORCH)
	@echo "[3/4] SGLang and what it imports on a CPU: one or two minutes"
	@$(PIP) --no-deps -r testbed/requirements-lock.txt
	@echo "[4/4] this package and its tools"
	@$(PIP) -e '.[ssd,test,bench]'
	@touch $@

test: venv
	$(BIN)/python -m pytest

test-fast: venv
	$(BIN)/python -m pytest -m "not server and not slow and not deep"

# In a guest with soft-RoCE, for hosts without RDMA: a few minutes. Says what is missing where there can be none.
test-rdma: venv
	$(BIN)/python -m tests.rdma.guest $(BIN)/python -m pytest -m rdma -p no:cacheprovider tests/rdma tests/transfer

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy testbed/*.py
	MYPYPATH=testbed/site $(BIN)/mypy --explicit-package-bases testbed/site/*.py testbed/site/sgl_kernel/*.py

demo: venv
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m benchmarks.demo $(ARGS)

bench: venv
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist

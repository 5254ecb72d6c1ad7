# `make train` and `make test` set up what they need: Python >= 3.10 and a C++ compiler are all they ask for.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_FLAGS := --no-input --disable-pip-version-check --no-compile -c constraints.txt
NATIVE := $(wildcard csrc/*.cpp csrc/*.h)

# Threads that wait should sleep: spinning ones take the cores that the I/O threads, or another program, need.
OMP_WAIT_POLICY ?= PASSIVE
export OMP_WAIT_POLICY

# The package with its core under AddressSanitizer and UBSan. PYTHONMALLOC: what a Python object gives back is given
# back, so that a transfer into it is seen. The format names the library of each frame: tests/support/lost_memory.py
# looks for ours.
# Tests: whatever uses the core directly, and one file of it all from the top; the others are about arithmetic. Those
# that are long and use it only to let a drive fail, or count what Python does, are left out, those of what ranks tell
# each other, and those on the simulated device, which is not there.
ASAN := build/asan
ASAN_ENVIRONMENT = PYTHONMALLOC=malloc UBSAN_OPTIONS=print_stacktrace=1 \
    ASAN_OPTIONS='detect_leaks=1:leak_check_at_exit=0:abort_on_error=1:allocator_may_return_null=1:stack_trace_format="    \#%n %p %F %L %M"'
# Sanitizers take places in memory where a kernel that places at random, with many bits, may have put something before.
FIXED_PLACES = $(shell setarch -R true 2>/dev/null && echo setarch -R)
USES_CORE := ^(from|import) swapper.*(_native|handle|buffers|checksums|host_memory|master_codec|deepnvme)
NOT_SANITIZED := $(addprefix %/test_,$(addsuffix .py,init gradient load_safetensors parameter_uses from_files unread \
    checkpoint_damage checkpoint_faults checkpoint_uses checkpoint_directory hostile_weights offload gathered scaling \
    cli_report devices device_parameters from_files_on_device device_step_waits device_writes direct_state drawn_faults \
    fsdp_gradients fsdp_device_gradients fsdp_parameter_failures offloaded_cache budget speeds_of_ranks agreement \
    collectives))
SANITIZED_TESTS = $(filter-out $(NOT_SANITIZED),\
    $(sort tests/optimizer/test_optimizer.py $(shell grep -lE '$(USES_CORE)' tests/test_*.py tests/*/test_*.py)))
# Each third file of them, from the n-th on.
part = $(shell echo $(SANITIZED_TESTS) | tr ' ' '\n' | awk 'NR % 3 == $(1) % 3')

# Three tests at a time on the two cores of CI: a quarter of their time they wait, for a drive or a set time. Those marked
# `alone` have the machine to themselves.
PYTEST := $(BIN)/python -m pytest -q -n 3 --dist worksteal

.PHONY: help build train train-xl train-lightning train-hf generate test test-all test-every checked sim-device rewritten-asserts lint sanitize sanitize-core schema clean
.DELETE_ON_ERROR:

help:
	@echo "make train      train a small GPT with its optimizer state on disk (under five minutes)"
	@echo "make train-xl   train a GPT of 1.3 billion parameters in 3 GB of memory, all of it on disk (19 GB of files)"
	@echo "make train-lightning  the same model under Lightning's command line"
	@echo "make generate   generate with a Llama of 2.2 GB in 1.2 GB of memory, and plain, and compare (two minutes)"
	@echo "make train-hf   fine-tune a Llama with the Trainer of transformers, everything on disk"
	@echo "make test       lint, then a sample of the tests that touches everything (minutes)"
	@echo "make test-all   lint, then every test, in many of its cases, a minute of fuzz among them (SWAPPER_FUZZ_SECONDS)"
	@echo "make test-every lint, then every case of every test: longer by far"
	@echo "make lint       ruff, mypy, clang-format"
	@echo "make sanitize   under ASan, UBSan and TSan: the native core's own tests, then those in Python that use it"
	@echo "make build      set up .venv and build the native core (DEBUG=1 for assertions)"
	@echo "make schema     write config/schema.json anew"
	@echo "make clean      remove what was built, but not .venv"

build: $(VENV)/.built

train: $(VENV)/.built
	@mkdir -p .swapper
	$(BIN)/python examples/train_gpt.py --nvme-path .swapper --compare

train-xl: $(VENV)/.built
	@mkdir -p .swapper
	$(BIN)/python examples/train_xl.py --nvme-path .swapper --picture .swapper/train-xl.png

train-lightning: $(VENV)/.built
	@mkdir -p .swapper
	$(BIN)/python examples/train_lightning.py fit --trainer.strategy swapper.lightning.SwapStrategy \
	    --trainer.strategy.config config/tiny.yaml

generate: $(VENV)/.built
	@mkdir -p .swapper
	$(BIN)/python examples/generate.py --nvme-path .swapper

train-hf: $(VENV)/.built
	@mkdir -p .swapper
	$(BIN)/python examples/train_hf.py --nvme-path .swapper --compare

# Of the core as it is built for tests: what another compiler warns of shall keep no user from it.
test test-all test-every sanitize: export WERROR := 1

test: checked
	$(PYTEST)

test-all: checked
	SWAPPER_TESTS=all SWAPPER_FUZZ_SECONDS=$${SWAPPER_FUZZ_SECONDS:-60} $(PYTEST)

test-every: checked
	SWAPPER_TESTS=every SWAPPER_FUZZ_SECONDS=$${SWAPPER_FUZZ_SECONDS:-60} $(PYTEST)

# What is before tests, beside each other, since mypy has one thread. The package is compiled once for the many processes
# that tests start, and the asserts of tests rewritten for those of pytest, also where PYTHONDONTWRITEBYTECODE is set.
checked: $(VENV)/.built
	@$(BIN)/python -m compileall -q swapper tests
	@$(MAKE) --no-print-directory -j2 --output-sync=target sim-device rewritten-asserts lint

rewritten-asserts: $(VENV)/.built
	@$(BIN)/python tests/support/rewritten_asserts.py

# Half a minute, once: an accelerator made of host memory, for tests of what runs on a GPU.
sim-device: $(VENV)/.built
	@$(MAKE) --no-print-directory -s $(if $(findstring jobserver,$(MAKEFLAGS)),,-j2) -C tests/sim_device \
	    PYTHON=$(abspath $(BIN)/python)

lint: $(VENV)/.built
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(NATIVE) \
	    $(wildcard tests/support/*.cpp $(addprefix tests/,$(foreach type,cpp h,cpp/*.$(type) sim_device/*.$(type))))

# Two at a time: the core's own tests, begun while the core is built for the others, and the tests in Python in three
# parts, each a process that its first finding ends.
SANITIZED_PARTS := sanitize-python-1 sanitize-python-2 sanitize-python-3
.PHONY: $(SANITIZED_PARTS)
sanitize: $(VENV)/.built
	@$(MAKE) --no-print-directory -j2 --output-sync=target sanitize-core $(SANITIZED_PARTS)

sanitize-core: build/.sanitizers
	@$(MAKE) --no-print-directory -C tests/cpp sanitize

# The package beside the core that is built for it.
$(ASAN)/.copied: $(VENV)/.built $(ASAN)/.built $(shell find swapper -name '*.py')
	@find $(ASAN)/swapper -name '*.py' -delete
	@$(BIN)/python setup.py -q build_py --build-lib $(ASAN)
	@touch $@

# In the tree's directory, which Python searches first: nothing shall find the package's other build. --capture=sys: else
# pytest would keep a sanitizer's report, which ends the process, to itself.
$(SANITIZED_PARTS): sanitize-python-%: $(ASAN)/.copied
	@preload=$$(ldd $(ASAN)/swapper/io/_native*.so | awk '/lib(asan|ubsan|stdc\+\+)\./ { printf "%s ", $$3 }'); \
	    cd $(ASAN) && $(FIXED_PLACES) env PYTHONPATH=$(CURDIR)/$(ASAN) LD_PRELOAD="$$preload" $(ASAN_ENVIRONMENT) \
	    SWAPPER_FUZZ_SECONDS=$${SWAPPER_FUZZ_SECONDS:-20} $(abspath $(BIN))/python -m pytest -q --capture=sys \
	    -c $(CURDIR)/pyproject.toml -p no:cacheprovider $(addprefix $(CURDIR)/,$(call part,$*))

build/.sanitizers:
	@mkdir -p build
	@for sanitizer in address undefined thread; do \
	    echo 'int main() {}' | $(CXX) -x c++ -fsanitize=$$sanitizer -o $@ - 2>/dev/null || { rm -f $@; \
	    echo "$(CXX) cannot link with -fsanitize=$$sanitizer: install its run-time (on Fedora: dnf install libasan" \
	        "libubsan libtsan; on Debian and Ubuntu it comes with g++), or name another compiler: make sanitize CXX=..."; \
	    exit 1; }; done

$(ASAN)/.built: $(VENV)/.made setup.py $(NATIVE) | build/.sanitizers
	@echo "Building the native core under AddressSanitizer and UBSan"
	@SANITIZE=address,undefined $(BIN)/python setup.py -q build_ext --force --build-lib $(ASAN) --build-temp $(ASAN)
	@touch $@

schema: $(VENV)/.built
	$(BIN)/python -W ignore -m swapper.config --schema config/schema.json

clean:
	rm -rf build dist *.egg-info swapper/io/*.so $(VENV)/.built .swapper
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
	@$(BIN)/python -m compileall -q -j 0 $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') \
	    >/dev/null || true  # Some of what others ship, as templates, is no program.
	@touch $@

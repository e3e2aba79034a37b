# Two commands on a fresh machine: `make train` and `make test`. Both set up what is missing, and only that.
#
# Needed: Python >= 3.11 with pip and venv, make, a C compiler. No account, no download but packages. A GPU is found.
#
#   PYTHON       which Python makes the virtual environment          make train PYTHON=python3.12
#   TORCH_BUILD  which build of PyTorch: cpu, cu126, cu130, rocm7.2   make train TORCH_BUILD=cu130
#                if not given, that of the GPU and driver here; what was taken once stays
#   TORCH_INDEX  where that build is, if pip's own sources lack it    make train TORCH_INDEX=https://mirror/cpu
#   RUN          what `make train` trains: a preset or file, and overrides
#   TESTS        what pytest gets beside its settings                 make test TESTS='tests/moe -x'
#
# How PyTorch's build is chosen and why: docs/decisions/0002-install.md.

PYTHON      ?= python3
TORCH_INDEX ?= https://download.pytorch.org/whl/$(TORCH_BUILD)
RUN         ?= debug
TESTS       ?=

BIN  := .venv/bin
CODE := penstock tests benchmarks tools
# One process more than there are cores, because tests also wait: for ranks, compilers and programs that they start.
# 900 s are far more than a test takes: the machine may do much else.
CORES   = $$(env -u OMP_NUM_THREADS nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
PYTEST  = OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest --numprocesses=$$(($(CORES) + 1)) --maxprocesses=8 --dist=loadgroup \
          --durations=10 --durations-min=2 --timeout=900
# Without bytecode each of hundreds of processes compiles every module that it imports.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# A driver that does not answer for once must not exchange the build; so the first choice is kept beside the stamps.
BUILD := .venv/stamps/build
ifeq ($(origin TORCH_BUILD),undefined)
  CHOICE      := $(shell cat $(BUILD) 2>/dev/null || $(PYTHON) tools/torch_build.py 2>/dev/null)
  TORCH_BUILD := $(or $(firstword $(CHOICE)),cpu)
  WHY         := $(wordlist 2,99,$(CHOICE))
else
  WHY         := asked for by TORCH_BUILD
endif

# Triton comes with a GPU build of PyTorch, in that build's version. Beside a CPU build the tests bring this one.
TRITON := triton==3.9.0
# Checks what PyPI would show; 18 packages that no other check needs.
TWINE  := $(BIN)/python -c 'import twine' 2>/dev/null || $(PIP) twine
TORCH  := $(shell sed -n 's/^torch==/torch==/p' constraints.txt)

# A stamp says what is installed. Its name holds a checksum of everything that decides what that is.
KEY   := $(TORCH_BUILD)-$(shell cat constraints.txt pyproject.toml | cksum | cut -d ' ' -f 1)
VENV  := .venv/stamps/made
READY := .venv/stamps/run-$(KEY)
DEV   := .venv/stamps/test-$(KEY)

.PHONY: help setup train test tests test-all test-newest test-cluster lint lint-types lint-rest
.PHONY: docs pictures site wheel clean

help: ## show this
	@echo "Penstock: make TARGET"
	@sed -n 's/^\([a-z-]*\):.*## /  \1\t/p' Makefile
	@echo "Variables (PYTHON, TORCH_BUILD, ...) are explained at the top of the Makefile."

train: $(READY) ## set up what is missing, then train the debug preset to the end
	$(BIN)/penstock train $(RUN)

test: $(DEV) ## set up what is missing, then run every check and every test that is not slow
	@$(MAKE) --no-print-directory --jobs=2 lint-types lint-rest tests  # two beside each other: no core is idle

tests:
	@echo "== pytest";      $(PYTEST) -m 'not slow' $(TESTS)

test-all: lint ## everything, the slow tests too
	@$(TWINE)
	@echo "== pytest, slow tests too"
	@$(PYTEST) $(TESTS)

test-newest: BIN := .venv-newest/bin
test-newest: ## the tests of `make test` with the newest release of every dependency, in .venv-newest: several GB
	@test -x $(BIN)/pip || $(PYTHON) -m venv .venv-newest
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade --upgrade-strategy eager --editable '.[dev]'
	@$(BIN)/python -m pip list --disable-pip-version-check | grep -E '^(numpy|torch|transformers|triton) '
	@$(PYTEST) -m 'not slow' $(TESTS)

test-cluster: $(DEV) ## runs on hosts in network namespaces and on a Slurm of their own; minutes, and root
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m cluster --durations=0 --durations-min=2 tests/cluster $(TESTS)

lint: $(DEV) ## the checks that run nothing: ruff, pyrefly, import-linter, house rules
	@$(MAKE) --no-print-directory --keep-going --jobs=2 lint-types lint-rest

lint-types: $(DEV)
	@echo "== types";       $(BIN)/pyrefly check --output-format min-text

lint-rest: $(DEV)
	@echo "== ruff check";  $(BIN)/ruff check --quiet $(CODE)
	@echo "== ruff format"; $(BIN)/ruff format --check --quiet $(CODE)
	@echo "== layers";      $(BIN)/lint-imports --no-logo
	@echo "== house rules"; $(BIN)/python -m tools.style

docs: $(DEV) ## write the generated documents anew
	$(BIN)/python -m tools.documents

pictures: $(DEV) ## draw the pictures of the documents anew; minutes, and Chromium
	@$(BIN)/python -c 'import matplotlib' 2>/dev/null || $(PIP) --no-build-isolation --editable '.[pictures]'
	$(BIN)/python -m tools.pictures

site: $(DEV) ## the documents as pages: build/site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "Ready: build/site/index.html"

wheel: $(DEV) ## what `pip install` takes, checked as PyPI does: dist/penstock-VERSION-py3-none-any.whl
	@rm -rf build/lib build/bdist.* dist/penstock-*.whl
	@$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir dist .
	@$(TWINE)
	@$(BIN)/python -m twine check --strict dist/penstock-*.whl
	@echo "Ready: pip install $$(ls dist/penstock-*.whl)"

setup: $(DEV) ## the environment of `make test`, and nothing more
	@echo "Ready: $(BIN)/penstock --help"

clean: ## remove caches and build outputs; .venv and runs stay
	rm -rf build dist *.egg-info .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Penstock needs Python 3.11 or newer; $(PYTHON) is: $$($(PYTHON) --version 2>&1)." \
	       "Name another: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@test -x $(BIN)/pip || { echo "Making .venv with $$($(PYTHON) --version)"; $(PYTHON) -m venv .venv; } || { \
	  rm -rf .venv; echo "$(PYTHON) lacks its venv module (Debian, Ubuntu: apt install python3-venv)" >&2; exit 1; }
	@mkdir -p $(@D) && touch $@

$(READY): $(VENV)
	@echo 'PyTorch build $(TORCH_BUILD): $(WHY). Another one: make $(MAKECMDGOALS) TORCH_BUILD=cpu (cu126, cu130, rocm7.2)'
	@echo "Installing $(TORCH) and what Penstock imports; a minute or two the first time, longer for a GPU"
	@$(PIP) '$(TORCH)+$(TORCH_BUILD)' 2>/dev/null || { \
	  echo "pip's own sources have no such build; looking at $(TORCH_INDEX)"; \
	  $(PIP) --retries 2 --extra-index-url $(TORCH_INDEX) '$(TORCH)'; }
	@$(PIP) setuptools
	@$(PIP) --no-build-isolation --editable .
	@echo '$(TORCH_BUILD) $(WHY)' > $(BUILD)
	@rm -f .venv/stamps/run-* && touch $@

$(DEV): $(READY)
	@echo "Installing what the checks and tests need"
	@$(BIN)/python -c 'import triton' 2>/dev/null || test "$$(uname -s)" != Linux || $(PIP) $(TRITON)
	@$(PIP) --no-build-isolation --editable '.[dev]'
	@rm -f .venv/stamps/test-* && touch $@

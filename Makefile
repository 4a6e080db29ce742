# Beam Workbench. `make lab` opens the notebooks, `make test` runs the tests; both fill .venv first.
#
#   PYTHON       the interpreter the environment is made from (3.11 or newer)
#   TORCH        the torch to install; by default the pin in constraints.txt, as a CPU build where
#                there is no NVIDIA GPU. Anything pip takes: TORCH='torch==2.14.0', TORCH=./torch.whl
#   TORCH_INDEX  an extra package index to look for torch in
#   PYTEST_ARGS  further arguments for pytest
#   WORKERS      processes the tests are spread over (a test file stays in one); 0: this one alone

PYTHON      ?= python3
TORCH       ?=
TORCH_INDEX ?=
PYTEST_ARGS ?=
WORKERS     ?= 2

VENV  := .venv
SERVING := .venv-cpu-serving
BIN   := $(VENV)/bin
# An environment stays what it was made with: a later `make` without TORCH keeps the chosen torch, and
# another choice is not ignored without a word.
-include $(VENV)/.choice.mk
ifneq ($(origin CHOSEN_PYTHON),undefined)
ifeq ($(filter clean help,$(MAKECMDGOALS)),)
ifeq ($(origin PYTHON),command line)
ifneq ($(PYTHON),$(CHOSEN_PYTHON))
$(error $(VENV) was made with PYTHON=$(CHOSEN_PYTHON): run `make clean` first, then this again)
endif
endif
ifeq ($(strip $(TORCH)),)
TORCH := $(CHOSEN_TORCH)
else ifneq ($(TORCH),$(CHOSEN_TORCH))
$(error $(VENV) was made with TORCH='$(CHOSEN_TORCH)' ('' is the default): run `make clean` first, then this again)
endif
endif
endif

SPREAD := -n $(WORKERS) --dist loadfile
NBVAL := --nbval-lax --nbval-current-env --nbval-cell-timeout=120
FILL  := scripts/fill_venv.py --venv $(VENV) --torch '$(TORCH)' --torch-index '$(TORCH_INDEX)'
LAB   := lab,train
TEST  := $(LAB),test
FULL  := $(TEST),bench,dev
NEEDS := pyproject.toml constraints.txt setup.py scripts/fill_venv.py

.PHONY: help lab test test-full test-serving lint engine format bench hooks clean
.DEFAULT_GOAL := help
.NOTPARALLEL:

help:
	@echo "make lab        open JupyterLab on the notebooks"
	@echo "make test       lint, types, tests, notebooks (under 10 minutes on 2 cores)"
	@echo "make test-full  the same and everything slow"
	@echo "make test-serving  a real vLLM server on this CPU (an environment of its own, 3.4 GB)"
	@echo "make lint       ruff and mypy only"
	@echo "make format     let ruff rewrite the source"
	@echo "make engine     check beam-tiny against vLLM's own model (optional, ENGINE_PYTHON=...)"
	@echo "make bench      benchmarks that run on a CPU"
	@echo "make hooks      install the pre-commit hooks"
	@echo "make clean      remove the environment, builds and caches (build/, what you made, stays)"

# A stamp is written only after everything is in; it is newer than what it was made from.
define fill
@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) was not found: install Python 3.11 or newer, or name one: make PYTHON=python3.12 ..." >&2; exit 1; }
@$(PYTHON) -V >/dev/null 2>&1 || { echo "$(PYTHON) does not run here: name another Python 3.11 or newer: make PYTHON=python3.12 ..." >&2; exit 1; }
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is $$($(PYTHON) -V 2>&1), older than 3.11: name a newer one: make PYTHON=python3.12 ..." >&2; exit 1; }
@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) has no venv module: install it (Debian, Ubuntu: apt install python3-venv)" >&2; exit 1; }
@$(PYTHON) $(FILL) --extras $(1)
@printf "CHOSEN_PYTHON := %s\nCHOSEN_TORCH := %s\n" '$(PYTHON)' '$(TORCH)' > $(VENV)/.choice.mk
endef

$(VENV)/.filled-lab: $(NEEDS)
	$(call fill,$(LAB))
	@touch $@

$(VENV)/.filled-test: $(NEEDS)
	$(call fill,$(TEST))
	@touch $(VENV)/.filled-lab $@

$(VENV)/.filled-full: $(NEEDS)
	$(call fill,$(FULL))
	@touch $(VENV)/.filled-lab $(VENV)/.filled-test $@

lab: $(VENV)/.filled-lab
	@$(BIN)/workbench lab

lint: $(VENV)/.filled-test
	@$(BIN)/ruff check --quiet --output-format=concise .
	@$(BIN)/ruff format --quiet --check .
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/python scripts/notebook_guard.py --check notebooks

test: lint
	@$(BIN)/python -m pytest $(SPREAD) $(NBVAL) tests notebooks $(PYTEST_ARGS)

test-full: $(VENV)/.filled-full lint
	@$(BIN)/python -m pytest $(SPREAD) $(NBVAL) -m "full or not full" tests notebooks $(PYTEST_ARGS)

# vLLM's CPU build serving beam-tiny on loopback (docs/serving.md). One test file after the other: a
# server takes 3 GB and both cores.
$(SERVING)/.filled: pyproject.toml constraints.txt scripts/fill_venv.py scripts/fill_serving_venv.py
	@$(PYTHON) scripts/fill_serving_venv.py --venv $(SERVING) --torch-index '$(TORCH_INDEX)'
	@touch $@

test-serving: $(VENV)/.filled-test $(SERVING)/.filled
	@SERVING_PYTHON=$(CURDIR)/$(SERVING)/bin/python $(BIN)/python -m pytest tests/serving_real $(PYTEST_ARGS)

# Optional: the bundled checkpoint through the engine's own classes (tests/engine/README.md).
engine: $(VENV)/.filled-test
	@test -n "$(ENGINE_PYTHON)" || { echo "name a Python that has the engine: make engine ENGINE_PYTHON=..., see tests/engine/README.md" >&2; exit 1; }
	@$(ENGINE_PYTHON) tests/engine/record_engine_vectors.py --check workbench/model/zoo/beam-tiny
	@ENGINE_PYTHON=$(ENGINE_PYTHON) $(BIN)/python -m pytest -q tests/test_engine_kv.py
	@ENGINE_PYTHON=$(ENGINE_PYTHON) $(BIN)/python -m pytest -q tests/serving/test_argument_check.py -k real

format: $(VENV)/.filled-test
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: $(VENV)/.filled-full
	@for script in benchmarks/cpu_*.py; do echo "== $$script"; $(BIN)/python "$$script" || exit 1; done

hooks: $(VENV)/.filled-full
	@$(BIN)/pre-commit install

clean:
	rm -rf $(VENV) $(VENV).lock $(SERVING) $(SERVING).lock build/lib build/bdist.* dist *.egg-info .cache .mypy_cache .pytest_cache .ruff_cache .hypothesis

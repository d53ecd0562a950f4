# make demo | make test | make lint: each installs what it needs into $(VENV) first, once.
PYTHON ?= python3
VENV ?= .venv

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.halp-installed

.PHONY: demo test lint install

# One thread: the tensors are small, and more only get in the way of whatever else runs.
demo: $(INSTALLED)
	rm -rf outputs/demo
	OMP_NUM_THREADS=1 $(BIN)/python exp_script/compare_runs.py --output=outputs/demo

test: $(INSTALLED)
	$(BIN)/python -m pytest

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

install: $(INSTALLED)

# An environment that exists is used as it is; pip brings in only what it lacks.
$(INSTALLED): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -e ".[test]"
	touch $@

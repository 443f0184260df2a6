# Every target sets up .venv by itself, once, through a stamp file that is older than pyproject.toml only when it must be
# renewed. PYTHON names the interpreter to build it with; without it the first Python 3.11 or newer that runs is taken.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory
BIN := .venv/bin
# Three processes whatever the machine has: the tests start daemons and terminals of their own, and wait for them.
PARALLEL := -n 3 --dist worksteal
STAMP := .venv/.stamp
# Tests start a thousand processes. Without bytecode on disk each of them would compile every module that it imports.
unexport PYTHONDONTWRITEBYTECODE
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

.PHONY: help setup demo quick test sim soak test-vllm matrix images check bench bench-tui bench-baseline test-full recordings screens docs site proto clean

help: ## this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:[^#]*## /\t/' | expand -t 16

setup: $(STAMP) ## .venv with everything installed

$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; name it with PYTHON=" >&2; exit 2; }
	@echo "setting up .venv with $(PYTHON), once" >&2
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

demo: $(STAMP) ## the console on a simulated engine; SECONDS=N ends it by itself
	@$(BIN)/kvbm-console demo $(if $(SECONDS),--seconds $(SECONDS))

test: $(STAMP) ## the tests, in two processes
	@$(BIN)/python -m pytest -q -m "not slow" $(PARALLEL)

quick: $(STAMP) ## lint, types and the core's tests, in a minute
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy
	@$(BIN)/python -m pytest -q -m "not slow" $(PARALLEL) tests/core tests/architecture --ignore=tests/core/properties \
		--ignore=tests/core/test_offload_law.py --ignore=tests/core/eviction/test_auto_default.py

sim: $(STAMP) ## the whole daemon under simulation; SEEDS=A:B for others
	@$(BIN)/python -m tests.sim --seeds $(or $(SEEDS),0:100)

soak: $(STAMP) ## a daemon beside processes that are killed and frozen; SECONDS=N, an hour by default
	@KVBM_SOAK_SECONDS=$(or $(SECONDS),3600) $(BIN)/python -m pytest -q -s tests/faults/test_soak_faults.py

test-full: $(STAMP) ## the tests with the long ones
	@KVBM_FULL=1 $(BIN)/python -m pytest -q

.venv-vllm/.stamp: tests/vllm/requirements.txt
	@test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	@.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check -r tests/vllm/requirements.txt
	@.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r tests/vllm/engines.txt
	@.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check -e '.[engines]' \
		pytest pytest-asyncio pytest-timeout hypothesis
	@touch $@

test-vllm: .venv-vllm/.stamp ## vLLM's own scheduler, with tap and event stream; SGLang's publisher, Dynamo's mocker (3 GB, no GPU)
	@.venv-vllm/bin/python -m pytest -q -p no:cacheprovider -W ignore -o filterwarnings=default \
		-o asyncio_default_fixture_loop_scope=function tests/vllm tests/sanitize

matrix: .venv-vllm/.stamp ## docs/matrix.md: releases of vLLM and SGLang; RELEASES="0.26.0 0.33.0" for some of vLLM
	@.venv-vllm/bin/python -m tests.vllm.matrix $(RELEASES)
	@test -n "$(RELEASES)" || .venv-vllm/bin/python -m tests.vllm.sglang_releases

images: $(STAMP) .venv-vllm/.stamp ## the image and the pod of deploy/, built and run by podman, without a GPU
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check helm-python-sdk
	@KVBM_IMAGES=1 $(BIN)/python -m pytest -q -rs tests/deploy tests/cli/test_deploy.py

check: $(STAMP) ## format, lint, types, import contracts, proto and documents fresh, tests, recordings
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache
	@$(BIN)/python -m tests.architecture.generate --check
	@$(BIN)/python -m recordings.regenerate --check
	@$(BIN)/python -m pytest -q -m "not slow" $(PARALLEL)

bench: $(STAMP) ## ratios against references measured in the same run, compared with the committed ones
	@$(BIN)/python -m tests.benchmarks

bench-tui: $(STAMP) ## the console in a terminal: frames, share of a core, keys, memory; REQUESTS=N for a longer run
	@$(BIN)/python -m tests.tui.pty_bench $(REQUESTS)

bench-baseline: $(STAMP) ## make this machine's ratios the committed ones
	@$(BIN)/python -m tests.benchmarks --write-baseline

docs: $(STAMP) ## generated documents: docs/kinds.md, JSON.md
	@$(BIN)/python -m tests.architecture.generate

site: $(STAMP) ## the documentation site in build/site, man pages in build/man
	@$(BIN)/python docs/site.py build
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

proto: $(STAMP) ## the contract's schema from core/, and kvbm_console/wire/v1 from the contract
	@$(BIN)/python proto/generate.py

recordings: $(STAMP) ## the recordings of recordings/, made again byte for byte
	@$(BIN)/python -m recordings.regenerate

screens: $(STAMP) ## the pictures of recordings/screens/, drawn from its recording
	@$(BIN)/python recordings/screens/make.py

clean: ## remove what the targets made
	@rm -rf .venv .venv-vllm .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist

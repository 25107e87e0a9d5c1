# `make`, `make test` and `make demo` work from a fresh clone: each sets up and builds what it needs first, and does
# nothing twice. The steps themselves are in scripts/ and CMakePresets.json.

JOBS ?= $(shell nproc)
PORT ?= 8000
PYTHON := .venv/bin/python
STAGE := scripts/stage.sh

export CMAKE_BUILD_PARALLEL_LEVEL := $(JOBS)
export GKA_BUILD_DIR := build/cpu

.DEFAULT_GOAL := build
.PHONY: help setup build wheel test test-setup demo serve bench asan fuzz format lint clean

define check_under_sanitizers
	@$(STAGE) "Sanitizers: build" scripts/build.sh asan
	@$(STAGE) "Sanitizers: tests" ctest --preset asan --parallel $(JOBS) --progress
endef

help: ## Show this list
	@echo "make TARGET, with JOBS=N for N compilers at a time:"
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 10

setup: ## Install the Debian packages and the .venv that are missing
	@$(STAGE) "Set up" scripts/setup.sh

build: setup ## Build everything and install the Python package into .venv (the default)
	@$(STAGE) "Build" scripts/build.sh cpu
	@$(STAGE) "Install into .venv" scripts/install.sh

wheel: setup ## Build a wheel into dist/, which installs in seconds; CUDA=ON: with the kernels for NVIDIA cards
	@$(STAGE) "Wheel" scripts/wheel.sh $(if $(filter ON on 1,$(CUDA)),cuda,cpu)

test: build lint test-setup ## Run every check there is: formatting, C++ tests, sanitizers, Python tests, examples
	@$(STAGE) "C++ tests" ctest --preset cpu --parallel $(JOBS) --progress
	$(check_under_sanitizers)
	@$(STAGE) "CUDA kernels: compile" scripts/check_cuda.sh
	@echo "==> Python tests, command line, installation and examples"
	@OMP_NUM_THREADS=1 $(PYTHON) -m pytest tests --numprocesses $(JOBS) --dist loadfile

demo: build ## Compare recall in four memories, then train four models to recall; tables and plots in out/
	@$(STAGE) "Demo: recall" $(PYTHON) experiments/recall/run.py
	@$(STAGE) "Demo: learning to recall (MQAR)" $(PYTHON) experiments/mqar/demo.py

serve: build ## Serve two chat models with their page on PORT (8000): SmolLM2-135M-Instruct, fetched once, and a small GKA hybrid
	@$(STAGE) "Fetch and import SmolLM2-135M-Instruct" scripts/smollm2.sh build/smollm2
	.venv/bin/gka serve build/smollm2 experiments/hybrid/recall-8m --weights bfloat16 --port $(PORT)

bench: build ## Measure this machine and write docs/benchmarks.md
	@$(STAGE) "Benchmark" $(PYTHON) bench/cpu.py
	@if $(PYTHON) -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then \
	  $(STAGE) "Benchmark: GPU" $(PYTHON) bench/gpu.py; fi

asan: setup ## Build and test the kernels and the code that reads files under the sanitizers
	$(check_under_sanitizers)

fuzz: setup ## Fuzz everything that reads files for MINUTES=n
	@$(STAGE) "Fuzz" scripts/fuzz.sh $(or $(MINUTES),10)

format: setup ## Format every source file
	@$(STAGE) "Format" scripts/format.sh

test-setup: setup
	@$(STAGE) "Set up: a browser and other people's tools, for tests" scripts/setup.sh --for-tests

lint: setup ## Check formatting and lint
	@$(STAGE) "Formatting and lint" scripts/format.sh --check

clean: ## Remove what was built (not .venv)
	rm -rf build out dist .pytest_cache .ruff_cache .hypothesis .venv/.gka-installed

# A fresh machine with Python, make and (for the kernels) a C++ compiler: `make demo`, then `make test`.
#   make demo PYTHON=python3.12                 another Python
#   make demo TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"   another build of torch
#   make test ARGS="tests/ops -k fuzz"          some of the tests
#   make test JOBS=6                            on four cores; tests wait a third of their time
#   make portable AS=ATEN_CPU_CAPABILITY=default   as on one other processor
#   make gpu-pack GPU_PYTHON=3.12               what a machine with a GPU and no network lacks, for tests/gpu/run.sh
#   make wheel TORCHES="2.13.0"                 the packages, tried with this torch only

PYTHON ?= python3
TORCH ?= torch==2.13.0
NPROC ?= 2
JOBS ?= 3
ARGS ?=
PROGRAMS ?= 2000
KERNELS ?= 30
LOSSES ?= 50
ONLY ?=
EXAMPLES ?=
SPHINX ?=
ENGINES ?= ray dask monarch
GPU_PYTHON ?= 3.12
GPU_ARCH ?= x86_64
DRY_PYTHON ?= $(BIN)/python
TORCHES ?= 2.11.0 2.13.0 newest

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH_STAMP := $(VENV)/.torch
INSTALL := $(BIN)/python -m pip install -q --no-compile # each module is compiled at its first import, and most have none
PYTEST := OMP_NUM_THREADS=1 TORCHINDUCTOR_VEC_ISA_OK=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --durations=20
# What computes, and the tests of calls and launches that promise equal bits; and how torch, oneDNN and MKL are told to
# compute as on another processor.
COMPUTING = tests/diff tests/ops tests/optim tests/transform tests/linalg tests/linear_solve tests/nonlinear_solve tests/schedule \
	tests/nn tests/checkpoint tests/docs/test_examples.py tests/formulas/test_normalization.py tests/core/test_random_turns.py \
	$(shell grep -rlE "torch\.equal|bit for bit" tests/distributed tests/launch --include="test_*.py")
AS ?= ATEN_CPU_CAPABILITY=default,ONEDNN_MAX_CPU_ISA=SSE41 ATEN_CPU_CAPABILITY=avx2,MKL_ENABLE_INSTRUCTIONS=AVX2 \
	MKL_CBWR=COMPATIBLE MKL_CBWR=SSE4_2,MKL_ENABLE_INSTRUCTIONS=SSE4_2 MKL_CBWR=AVX2
SOURCES := setup.py pyproject.toml $(shell find csrc -type f)

export PATH := $(CURDIR)/$(BIN):$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help demo test nightly without-rpc quick portable fuzz opinfo losses gpu-pack gpu-dry engines works-with examples lint types docs pictures gallery reproduce bench wheel clean

help: ## show these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

$(TORCH_STAMP):
	@test -x $(BIN)/python || { echo "making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing $(TORCH)"
	@$(INSTALL) $(TORCH)
	@$(INSTALL) "setuptools>=77,<82" ninja wheel # torch 2.11 refuses 82
	@touch $@

$(STAMP): $(SOURCES) | $(TORCH_STAMP)
	@echo "building and installing torchopt_dist"
	@$(INSTALL) --no-build-isolation -e ".[test]"
	@touch $@

demo: $(STAMP) ## install, then letters of unseen scripts after one example, on two worker processes: ARGS="--minutes 30"
	$(BIN)/torchrun --nproc_per_node=$(NPROC) examples/few_shot.py $(ARGS)

test: $(STAMP) ## install, then the tests, but for those that are left to `make nightly`
	$(PYTEST) $(ARGS)

nightly: $(STAMP) ## the other tests: rows of products that `make test` leaves out, whole experiments, builds
	$(PYTEST) -m nightly $(ARGS)
	if command -v nvcc; then $(BIN)/python setup.py compile_cuda --architectures="8.0;9.0"; fi

quick: $(STAMP) ## the tests that start no processes and compile nothing
	TODIST_FUZZ_SEED=0 TODIST_FUZZ_LOOPS=5 $(PYTEST) -m "not processes and not compiles and not nightly" $(ARGS)

without-rpc: $(STAMP) ## calls, launches, faults, trees and mirrors with a torch that has no RPC
	PYTHONPATH=tests/distributed/transport/torch_without_rpc $(PYTEST) tests/distributed tests/faults tests/launch tests/checkpoint \
		tests/attribution tests/seeds tests/diff/test_data_parallel.py $(ARGS)

portable: $(STAMP) ## the tests of what computes, as on other processors: AS="MKL_CBWR=COMPATIBLE ATEN_CPU_CAPABILITY=default"
	@for one in $(AS); do echo "as with $$one"; env $$(echo $$one | tr , ' ') $(PYTEST) $(COMPUTING) $(ARGS) || red="$$red $$one"; done; \
		test -z "$$red" || { echo "failed with$$red"; exit 1; }

fuzz: $(STAMP) ## random programs of calls, chains, inner loops and layers, against loops by hand: PROGRAMS=2000 of each, KERNELS=30 compiled
	TODIST_FUZZ_PROGRAMS=$(PROGRAMS) TODIST_FUZZ_CHAINS=$(PROGRAMS) TODIST_FUZZ_LOOPS=$(PROGRAMS) \
		TODIST_FUZZ_KERNELS=$(KERNELS) $(BIN)/python -m pytest \
		tests/distributed/calls/test_random_programs.py tests/transform/test_random_chains.py tests/diff/test_random_loops.py \
		tests/diff/test_random_estimates.py tests/diff/test_random_layers.py \
		tests/diff/test_random_changes.py $(ARGS)

opinfo: $(STAMP) ## every operation of torch's own database in an inner step, in vectorized tasks and in a call: five minutes
	$(INSTALL) expecttest # which torch's database imports
	TODIST_OPINFO=all TODIST_OPINFO_COMPILED=50 $(PYTEST) tests/diff/opinfo.py tests/distributed/calls/opinfo.py $(ARGS)

losses: $(STAMP) ## workers killed at random moments of 50 trainings and 50 random programs: LOSSES=50
	TODIST_FUZZ_LOSSES=$(LOSSES) TODIST_FUZZ_DEATHS=$(LOSSES) $(BIN)/python -m pytest tests/distributed/calls/test_random_losses.py \
		tests/distributed/calls/test_random_deaths.py tests/launch/test_replace.py -k "random or moments" $(ARGS)

gpu-pack: $(TORCH_STAMP) ## wheels that a machine with a GPU and no network lacks, into build/gpu-pack: GPU_PYTHON=3.12 GPU_ARCH=x86_64
	$(BIN)/python tests/gpu/pack.py --python $(GPU_PYTHON) --arch $(GPU_ARCH)

gpu-dry: $(STAMP) ## what tests/gpu/run.sh runs on a GPU, here on the CPU: ARGS="kernels calls" DRY_PYTHON=python3.12, which has torch
	PYTHON=$(DRY_PYTHON) tests/gpu/run.sh $(ARGS)

examples: $(STAMP) ## the tests that run the examples
	$(PYTEST) tests/examples $(ARGS)

lint: $(STAMP) ## style
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(STAMP) ## static types
	$(BIN)/mypy

docs: $(STAMP) ## the documentation, into docs/_build
	$(BIN)/sphinx-build -W --keep-going -n $(SPHINX) docs docs/_build

pictures: $(STAMP) ## draw README's pictures in docs/images anew
	$(BIN)/python docs/pictures.py

gallery: $(STAMP) ## run every example on one worker and on two, for the documentation's pictures; then that: EXAMPLES="lola adjoints"
	$(BIN)/python docs/pages.py $(EXAMPLES)
	$(MAKE) docs

reproduce: $(STAMP) ## write the tables of docs/reproductions.md, on a quiet machine, and make its pictures: ONLY="lola chaos"
	$(BIN)/python docs/reproduce.py $(ONLY)

engines: $(STAMP) ## install Ray, Dask and Monarch, each beside this torch, and run the programs of docs/launchers.md: ENGINES="ray dask"
	@for one in $(ENGINES); do test -x build/engines/$$one/bin/python || $(BIN)/python -m tests.packaging.engine $$one || exit 1; done
	$(BIN)/python -m pytest tests/launch/test_engines.py $(ARGS)

works-with: $(STAMP) ## install transformers, peft, accelerate, Lightning, Hydra and W&B, and run the programs of docs/works_with.md
	$(INSTALL) --no-build-isolation -e ".[test,works-with]"
	$(BIN)/python -m pytest tests/docs/test_works_with.py tests/diff/test_hugging_face.py $(ARGS)

bench: $(STAMP) ## write the tables of docs/benchmarks.md and docs/which_adjoint.md, on a quiet machine: ONLY="call_overhead launch"
	$(BIN)/python benchmarks $(ONLY)

wheel: $(STAMP) ## wheel and source distribution into dist, tried outside the tree: TORCHES="2.11.0 2.13.0 newest"
	$(BIN)/python -m tests.packaging.release $(TORCHES)

clean: ## remove what was built, but not .venv
	rm -rf build dist *.egg-info docs/_build docs/_pictures docs/_site outputs .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f torchopt_dist/_C*.so torchopt_dist/_build_note.txt torchopt_dist/_cuda_note.txt $(STAMP) $(TORCH_STAMP)
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

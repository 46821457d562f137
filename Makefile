# One target per thing a person does. `make demo` and `make test` make the environment they need.
VENV ?= .venv
PYTHON ?= python3
PY := $(VENV)/bin/python
# Two processes: compiling kernels for the simulator is most of the time, and each process has a compiler of its own.
PYTEST_ARGS ?= -n 2 --dist worksteal
# The NVIDIA and the Ascend DSL share an import name. This environment takes NVIDIA's (x86-64 wheels only need nvcc to
# compile, no GPU); the Ascend compiler lives in the cache directory, see `fa-multi sim setup`.
comma := ,
EXTRAS := demo,test,lint$(if $(filter x86_64,$(shell uname -m)),$(comma)cuda)

.PHONY: demo test lint format bench-gpu bench-cpu sim env clean help

help:  ## what there is to do
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

demo: env  ## attention inside MiniLM on every lane of this machine, against fp64
	@$(VENV)/bin/fa-multi sim setup || echo "going on without the npu-sim lane"
	@$(PY) examples/minilm_demo.py

test: env  ## every test this machine can run
	@$(VENV)/bin/fa-multi sim setup
	@OMP_NUM_THREADS=1 $(PY) -m pytest $(PYTEST_ARGS)

lint: env  ## formatting, lint, types
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

format: env  ## rewrite files the way lint wants them
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

bench-gpu:  ## speed against FlashAttention-3 and cuDNN, on an NVIDIA machine with both
	@for name in prefill decode variants; do \
	  $(or $(wildcard $(PY)),$(PYTHON)) benchmarks/$$name.py -o benchmarks/results/$${name}_h200.json || exit 1; \
	done

bench-cpu: env  ## the CPU lane against torch
	$(PY) benchmarks/cpu.py

sim: env  ## the Ascend compiler and simulator
	$(VENV)/bin/fa-multi sim setup

env: $(VENV)/.ready  ## the Python environment

$(VENV)/.ready: pyproject.toml ci/constraints.txt
	@echo "making $(VENV) (one to three minutes) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(PY) -m pip install -q -c ci/constraints.txt torch
	@$(PY) -m pip install -q -c ci/constraints.txt -e ".[$(EXTRAS)]"
	@touch $@

clean:  ## remove the environment (the cache directory stays: fa-multi cache clear)
	rm -rf $(VENV) build *.egg-info

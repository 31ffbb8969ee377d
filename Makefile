# make demo    train a small Llama on two processes, sharded, and compare with one process
# make test    the tests that CI runs          make test-all   the whole matrix
# make check   ruff and strict typing          make bench      side by side with DDP, FSDP2, DeepSpeed
# make bench-accuracy   predictions beside measurements, on a GPU where there is one: docs/accuracy.md
# make bench-links      what a line carries, compute beside that, stages by group, a step's timeline as predicted and as executed, hosts of several processes, compressed gradients: bench/results
# make bench-recompute  memory against time beside torch's ways to recompute, and peaks beside budgets: bench/results
# TORCH=2.11.0 any of these on another torch, where there is no GPU; its environment lies beside the first

TORCH ?= 2.13.0
VENV  := .venv$(if $(filter-out 2.13.0,$(TORCH)),-$(TORCH))
BIN   := $(VENV)/bin
export OMP_NUM_THREADS ?= 1
# Modules are compiled when they are imported; most never are.
export PIP_NO_COMPILE := 1

.PHONY: demo test test-all check bench bench-accuracy bench-links bench-recompute wheel clean

demo: $(VENV)/ready
	$(BIN)/torchrun --nproc-per-node 2 examples/train_llama.py --check --memory-budget $(or $(BUDGET),60MiB)

# Two at a time, also of those that start processes: these wait for each other a quarter of their time.
test: $(VENV)/ready
	$(BIN)/python -m pytest -q --durations 20 -n 2 --dist worksteal

test-all: $(VENV)/ready
	$(BIN)/python -m pytest -q --full -n 2 --dist worksteal

check: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(VENV)/ready
	$(BIN)/pip install -q --no-build-isolation -e ".[bench]"
	$(BIN)/python bench/run.py
	$(BIN)/python bench/optimizer.py
	if command -v nvidia-smi >/dev/null; then $(BIN)/python bench/gpu_kernels.py && $(BIN)/python bench/gpu_step.py; fi

bench-accuracy: $(VENV)/ready
	$(BIN)/python bench/accuracy.py

bench-links: $(VENV)/ready
	$(BIN)/pip install -q --no-build-isolation -e ".[bench]"
	$(BIN)/python bench/messages.py
	$(BIN)/python bench/sums.py
	$(BIN)/python bench/lanes.py
	$(BIN)/python bench/beside.py
	$(BIN)/python bench/stages.py
	$(BIN)/python bench/timeline.py
	$(BIN)/python bench/hierarchy.py
	$(BIN)/python bench/compression.py

bench-recompute: $(VENV)/ready
	$(BIN)/pip install -q --no-build-isolation -e ".[bench]"
	$(BIN)/python bench/recompute.py
	$(BIN)/python bench/recompute.py --closest
	$(BIN)/python bench/budgets.py

wheel: $(VENV)/ready
	$(BIN)/python -m build --wheel --no-isolation

# With a GPU, torch's own choice of build; without, the version in constraints.txt, or TORCH.
$(VENV)/ready: pyproject.toml constraints.txt
	python3 -m venv $(VENV)
	$(BIN)/pip install -q --upgrade "setuptools>=77" wheel
	$(BIN)/pip install -q $(if $(shell command -v nvidia-smi),"torch>=2.11","torch==$(TORCH)")
	$(BIN)/pip install -q --no-build-isolation -e ".[dev]"
	touch $@

clean:
	rm -rf .venv .venv-* build dist *.egg-info

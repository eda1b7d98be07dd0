# `make` alone lists the targets.
VENV := .venv
PY := $(VENV)/bin/python
# xdist and torch would otherwise fight over the cores.
TEST := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(PY) -m pytest -n 2 --dist loadgroup

.DEFAULT_GOAL := help
.PHONY: help setup study test test-all sweep faults lint docs bench bench-gpu clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 18

setup: $(VENV)/.installed ## create .venv with pinned dependencies and oelm itself

$(VENV)/.installed: pyproject.toml constraints.txt
	python3 -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps timm  # its torchvision is CUDA's
	touch $@

# The study needs oelm alone; an environment that has the development tools too will do.
$(VENV)/.base: pyproject.toml constraints.txt
	python3 -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

study: $(or $(wildcard $(VENV)/.installed),$(VENV)/.base) ## run the embedded study (about ten minutes on two cores; again: at once) and write its report
	$(VENV)/bin/oelm study run configs/quickstart.yaml

test: setup lint ## lint, types and the quick tests
	$(TEST) -m "not slow and not sweep and not faults"

test-all: setup lint ## the same with the heavy proofs (killed processes, DDP, torch.compile)
	$(TEST) -m "not sweep" --durations=30 --durations-min=8

sweep: setup ## every model class of transformers, built tiny and operated on (an hour); counts go to docs/sweep.md
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 PYTHONPATH=tests/sweep:tests $(PY) tests/sweep/table.py -o docs/sweep.md

HOURS := 1
faults: setup ## kills, damage and fuzzing for HOURS=1; the counts go to docs/reliability.md
	OELM_FAULT_HOURS=$(HOURS) OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(PY) -m pytest -n0 -m faults tests/faults

lint: setup ## ruff and mypy
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

docs: setup ## build the documentation as a site in site/; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build

bench: setup ## speed and memory, on a quiet machine; results go to benchmarks/results
	$(PY) benchmarks/run.py
	$(PY) benchmarks/prepare.py -o benchmarks/results/prepare-$$(date +%F).json
	$(PY) benchmarks/freeze.py
	$(PY) benchmarks/finetune.py
	$(PY) benchmarks/relative.py
	$(PY) benchmarks/loss.py
	$(PY) benchmarks/growth.py

bench-gpu: setup ## the table of step times for a machine with a GPU
	$(PY) benchmarks/gpu.py

clean: ## remove the environment and caches (runs and data stay)
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info

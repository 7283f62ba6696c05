# make setup   virtual environment, Triton and a small model (once; later runs take seconds)
# make run     serve the small model and ask it one question
# make bench   compare colocated and disaggregated serving here (about 5 minutes), write a report
# make test    what CI runs: ruff, mypy, pytest (real Triton server included)
# make soak    20 minutes of random requests while engines are killed (SECONDS=1200, SEED=1)
#
# PYTHON=python3.12             another Python (3.11 or 3.12 with a shared libpython)
# TORCH="torch==2.13.0 ..."     options of pip for torch, e.g. an index that has the CPU build

IS_SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))
PYTHON ?= $(or $(shell for python in python3 python3.12 python3.11; do \
	$$python -c '$(IS_SUPPORTED)' 2> /dev/null && echo $$python && break; done), python3)
TORCH ?= torch==2.13.0
BIN := .venv/bin

# One stamp per content of pyproject.toml: a change installs again, a fresh checkout does not.
STAMP := .venv/.setup-$(shell (cat pyproject.toml; echo '$(TORCH)') | sha256sum | cut -c1-16)

.PHONY: setup run bench test soak lint clean

setup: $(STAMP)
	@$(BIN)/tandem fetch triton
	@$(BIN)/tandem fetch smollm2

$(STAMP):
	@PYTHONPATH=scripts $(PYTHON) -m tandem_cli.setup_check
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --disable-pip-version-check -e '.[dev]'
	@rm -f .venv/.setup-*
	@touch $@

run: setup
	@$(BIN)/tandem run

BENCH ?= --workload mixed-60-40 --slo ttft=2,tpot=150ms --time-budget 300
bench: setup
	@$(BIN)/tandem bench compare $(BENCH) --out build/bench/$$(date +%Y%m%d-%H%M%S)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/mypy

test: lint
	$(BIN)/pytest

SECONDS ?= 1200
SEED ?= 1
soak: setup
	TANDEM_SOAK_SECONDS=$(SECONDS) TANDEM_SOAK_SEED=$(SEED) $(BIN)/pytest -s tests/server/test_server_soak.py

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info

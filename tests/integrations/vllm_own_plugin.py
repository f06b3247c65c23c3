"""Plugin of pytest under which vLLM's test of attention backends tests ours; vllm_own_tests.py loads it.

In: the module test_attention_backends as pytest has collected it, in vLLM's environment. Out: the same
tests, each of which checks the backend under CPU_ATTN, where `register` has put ours, against what vLLM
expects.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from vllm.config import VllmConfig, set_current_vllm_config

from attnkit.integrations.vllm import register


def pytest_configure() -> None:
    """Put our backend in its place, as vLLM does when it starts."""
    register()


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Exchange the backends of the one file that has a list of them."""
    name = "test_attention_backends"
    for module in {item.module for item in items if item.module.__name__.endswith(name)}:
        _exchange(module)


@pytest.fixture
def default_vllm_config() -> Iterator[Any]:
    """As in vLLM's conftest, which cannot be loaded without all that vLLM's tests need."""
    config = VllmConfig()
    with set_current_vllm_config(config):
        yield config


def _exchange(module: Any) -> None:
    ours = module.AttentionBackendEnum.CPU_ATTN
    check = module._test_backend_correctness

    def check_ours(
        batch_spec: Any, model: str, backend_to_test: Any, *rest: Any, **options: Any
    ) -> None:
        cache = options.get("kv_cache_dtype", "auto")
        if not ours.get_class().supports_kv_cache_dtype(cache):
            pytest.skip(f"attnkit takes no cache of {cache} inside vLLM")  # The test would pass.
        check(batch_spec, model, [ours], *rest, **options)

    module._test_backend_correctness = check_ours

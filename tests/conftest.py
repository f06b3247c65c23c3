"""What every test runs under: one torch thread a worker, and Triton's interpreter.

On a machine with a GPU too, unless `pytest -m gpu` asks for it. TRITON_INTERPRET must be set before
triton is imported; tests that compile kernels for a GPU do so in a process of their own without it.
"""

import os

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr != "gpu" or not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
        os.environ["CUDA_VISIBLE_DEVICES"] = ""

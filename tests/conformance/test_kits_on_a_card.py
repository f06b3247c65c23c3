"""The whole kit of each backend that has kernels for a GPU, on one: `pytest -m gpu`."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

BACKENDS = (
    "triton",
    "hopper",
    "triton_mla",
    "hopper_mla",
    "triton_mla_sparse",
    "hopper_mla_sparse",
)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_whole_kit(backend: str) -> None:
    if backend.startswith("hopper") and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs sm_90")
    jobs = str(min(16, os.cpu_count() or 1))
    command = [
        sys.executable,
        "-m",
        "attnkit",
        "verify",
        backend,
        "--device",
        "cuda",
        "--jobs",
        jobs,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr

"""What every test runs under: one torch thread a worker, Triton's interpreter where there is no GPU.

TRITON_INTERPRET must be set before triton is imported; tests that compile kernels for a GPU do so in
a process of their own without it.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch.set_num_threads(1)

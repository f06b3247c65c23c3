"""What every test runs under: one torch thread a worker, and Triton's interpreter.

On a machine with a GPU too, unless `pytest -m gpu` or TRITON_INTERPRET=0 asks for it. That variable
must be set before triton is imported, which conftests of folders do before pytest has a configuration;
workers inherit it. Tests that compile kernels for a GPU do so in a process of their own.
"""

import os
import signal
import sys

import torch

if "TRITON_INTERPRET" not in os.environ:
    on_gpu = "gpu" in sys.argv and torch.cuda.is_available()
    os.environ["TRITON_INTERPRET"] = "0" if on_gpu else "1"
if os.environ["TRITON_INTERPRET"] == "1":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # What a shell starts in the background ignores Ctrl-C, and so would all that tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)

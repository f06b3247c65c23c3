"""The backend as selection sees it, with and without Triton, and the interpreter it is tested in."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton_problem import DEVICE

from attnkit.backends.triton import interpreter, tile
from attnkit.backends.triton.backend import TritonBackend
from attnkit.contract import DeviceCapability
from attnkit.errors import UnsupportedConfiguration


def python(code: str, **environ: str) -> str:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**env, **environ}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_attnkit_and_asking_the_backend_import_no_triton() -> None:
    code = """
import sys
import attnkit
from attnkit.selection import resolve
from attnkit.matrix import capability_matrix
capability_matrix({"triton": resolve("triton")})
print("triton" in sys.modules)
"""
    assert python(code) == "False"


def test_without_triton_it_says_so() -> None:
    code = """
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name == "triton" else find(name, *a)
from attnkit.selection import resolve
print(resolve("triton").unavailable_reason())
"""
    assert python(code) == "triton is not installed"


def test_without_a_gpu_it_names_the_interpreter() -> None:
    code = """
import torch
torch.cuda.is_available = lambda: False
from attnkit.selection import resolve
from attnkit.contract import DeviceCapability
backend = resolve("triton")
print(backend.unavailable_reason(), backend.supports_compute_capability(DeviceCapability.cpu()))
"""
    reason = "needs a GPU, or TRITON_INTERPRET=1 to run in the interpreter"
    assert python(code) == f"{reason} False"
    assert python(code, TRITON_INTERPRET="1") == "None True"


def test_needs_ampere() -> None:
    for name, runs in (("sm_75", False), ("sm_80", True), ("sm_90", True), ("sm_120", True)):
        capability = DeviceCapability.parse(name)
        assert TritonBackend.supports_compute_capability(capability) is runs


def test_a_format_that_is_not_read_is_refused_at_construction() -> None:
    impl_cls = TritonBackend.get_impl_cls()
    with pytest.raises(UnsupportedConfiguration, match="fp8_ds_mla is not supported"):
        impl_cls(4, 32, 1.0, kv_cache_dtype="fp8_ds_mla")
    with pytest.raises(UnsupportedConfiguration, match=r"nvfp4 needs .* 16 divides, not 24"):
        impl_cls(4, 32, 1.0, kv_cache_dtype="nvfp4", head_size_v=24)


@triton.jit
def tanh_kernel(x_ptr, precise_ptr, fast_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    tl.store(precise_ptr + i, tile.tanh(x, True))
    tl.store(fast_ptr + i, tile.tanh(x, False))


def test_tanh_neither_overflows_nor_loses_small_arguments() -> None:
    sizes = torch.logspace(-6, 37, 1023)
    x = torch.cat([sizes, -sizes, torch.tensor([0.0, torch.inf])]).to(DEVICE)
    precise, fast = torch.empty_like(x), torch.empty_like(x)
    tanh_kernel[(1,)](x, precise, fast, N=2048)
    right = torch.tanh(x.double())
    assert ((precise.double() - right).abs() <= 6e-7 * right.abs()).all()
    assert ((fast.double() - right).abs() <= 6e-7).all()


@triton.jit
def dot_kernel(a_ptr, b_ptr, c_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    at = i[:, None] * N + i[None, :]
    product = tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at))
    tl.store(c_ptr + at, product.to(c_ptr.dtype.element_ty))


def test_bfloat16_products_and_roundings_are_those_of_torch() -> None:
    if interpreter.is_interpreting():
        interpreter.repair_small_floats()  # As importing the launchers does.
    a, b = torch.randn(2, 32, 32, generator=torch.Generator().manual_seed(0)).bfloat16().to(DEVICE)
    exact = a.float() @ b.float()
    for dtype, allowed in ((torch.float32, 1e-5), (torch.bfloat16, 2**-8)):
        c = torch.empty(32, 32, dtype=dtype, device=DEVICE)
        dot_kernel[(1,)](a, b, c, N=32)
        assert torch.allclose(c.float(), exact, rtol=allowed, atol=1e-5)


def test_the_interpreter_rounds_to_even_and_keeps_what_is_not_finite() -> None:
    halves = [1.0 + 2**-8, 1.0 + 3 * 2**-8, 1.0 + 2**-8 + 2**-20, -3.4e38, torch.inf, 1e-40, -0.0]
    x = torch.tensor([*halves, *torch.randn(1000).tolist()])
    patterns = interpreter._to_bfloat16(x.numpy())
    assert np.array_equal(patterns.view(np.int16), x.bfloat16().view(torch.int16).numpy())
    nan = interpreter._to_bfloat16(np.array([np.nan], dtype=np.float32))
    assert torch.isnan(torch.from_numpy(nan.view(np.int16)).view(torch.bfloat16)).all()

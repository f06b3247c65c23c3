"""Compile every Triton kernel for a GPU that need not be here, and report what the build uses.

In: an architecture such as "sm_90". Out: a `KernelReport` per kernel variant: registers, bytes that did
not fit into them, shared memory, and how many Hopper matrix instructions there are. The calls are made
by the launchers themselves, from tensors without memory, so what is compiled is what would be launched.

Needs Triton, no GPU, and a process without TRITON_INTERPRET, in which nothing is compiled:
`python -m attnkit.conformance.compile --arch sm_90 --json`.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from attnkit.backends.kernel_call import KernelCall
from attnkit.backends.stored import Stored
from attnkit.backends.triton import cache_launch, configs, launch
from attnkit.backends.triton.operands import Operands, OutputCodes, Parts
from attnkit.conformance.hopper_compile import hopper_variants
from attnkit.conformance.meta import empty
from attnkit.conformance.mla.compile import mla_variants
from attnkit.conformance.ptx import unset_halves
from attnkit.contract import (
    AttentionVariant,
    DeviceCapability,
    QuantKey,
    kFp8Dynamic64Sym,
    kFp8Dynamic128Sym,
    kFp8StaticTensorSym,
    kNvfp4Dynamic,
)
from attnkit.errors import ConfigurationError
from attnkit.kvcache.formats import CACHE_FORMATS, cache_format
from attnkit.output_quant import QuantizedOutput

_GPUS = {
    80: configs.Gpu(num_sms=108, shared_memory=166912, has_wgmma=False, has_e4m3=False),
    86: configs.Gpu(num_sms=84, shared_memory=101376, has_wgmma=False, has_e4m3=False),
    89: configs.Gpu(num_sms=128, shared_memory=101376, has_wgmma=False),
    90: configs.HOPPER,
}
"""Architecture -> its largest device's multiprocessors and shared memory (CUDA C++ Programming Guide,
technical specifications per compute capability)."""

_NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.int8: "i8",
    torch.uint8: "u8",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelReport:
    """What a compiled kernel uses.

    Attributes:
        name: of the variant.
        registers: per thread.
        spill_bytes: local memory per thread, which holds what registers could not.
        shared_bytes: shared memory per program.
        num_warps: of a program.
        wgmma: matrix instructions that read shared memory (sm_90).
        unset_halves: what the assembler may get wrong; see `ptx.unset_halves`.
    """

    name: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    num_warps: int
    wgmma: int
    unset_halves: int


def compile_kernels(arch: str = "sm_90") -> list[KernelReport]:
    """Compile a set of variants in which every kernel and every branch of a kernel occurs.

    Args:
        arch: sm_80, sm_86, sm_89 or sm_90.

    Raises:
        ConfigurationError: the architecture is not one of these, or TRITON_INTERPRET is set.
    """
    number = DeviceCapability.parse(arch).to_int()
    if number not in _GPUS:
        known = ", ".join(f"sm_{n}" for n in _GPUS)
        raise ConfigurationError(f"arch {arch} has no known limits here; use one of {known}")
    if not isinstance(launch.merge_kernel, triton.JITFunction):
        raise ConfigurationError(
            "TRITON_INTERPRET is set, so kernels are Python and nothing is compiled; unset it"
        )
    return [_report(name, call, number) for name, call in _variants(_GPUS[number])]


def _report(name: str, call: KernelCall, arch: int) -> KernelReport:
    compiled: Any = triton.compile(
        _source(call),
        target=GPUTarget("cuda", arch, 32),
        options=call.options,
    )
    registers, local = _resources(compiled.asm["cubin"])
    return KernelReport(
        name=name,
        registers=registers,
        spill_bytes=local,
        shared_bytes=compiled.metadata.shared,
        num_warps=call.options["num_warps"],
        wgmma=compiled.asm["ptx"].count("wgmma.mma_async"),
        unset_halves=len(unset_halves(compiled.asm["ptx"])),
    )


def _source(call: KernelCall) -> ASTSource:
    """What the runtime would compile for these arguments: 1 and None become constants, and multiples of
    16 are marked, unless the kernel asks not to."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for parameter in call.kernel.params:
        name, value = parameter.name, call.arguments[parameter.name]
        is_one = type(value) is int and value == 1 and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or is_one:
            signature[name] = "constexpr"
            constants[name] = value
        elif isinstance(value, torch.Tensor):
            signature[name] = "*" + _NAMES[value.dtype]
            if not parameter.do_not_specialize_on_alignment:
                attributes[(parameter.num,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and not parameter.do_not_specialize:
                attributes[(parameter.num,)] = [["tt.divisibility", 16]]
    return ASTSource(call.kernel, signature, constants, attributes)


def _resources(cubin: bytes) -> tuple[int, int]:
    """(registers, local bytes) of the one kernel in a cubin, as the CUDA tool of Triton's wheel says."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert found is not None, said
    return int(found[1]), int(found[2])


def _variants(gpu: configs.Gpu) -> Iterator[tuple[str, KernelCall]]:
    """Names and calls. "all" has every feature of a layer that adds code to the score or the
    mask, "masks" those of a batch too, "tree" the one that goes with no other."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    for size in (64, 128, 256, 512):
        yield _attention(gpu, f"attention-bf16-{size}", size)
    for size in (64, 128, 256):
        yield _attention(gpu, f"attention-bf16-{size}-all", size, features=True)
    for size in (128, 256):
        yield _attention(gpu, f"attention-bf16-{size}-masks", size, features=True, masks=True)
    yield _attention(gpu, "attention-bf16-128-tree", 128, tree=True)
    yield _attention(gpu, "attention-bf16-128-page128", 128, page=128)
    yield _attention(gpu, "attention-bf16-128-page5", 128, page=5)
    yield _attention(gpu, "attention-bf16-80", 80)
    yield _attention(gpu, "attention-bf16-192-128", 192, size_v=128)
    yield _attention(gpu, "attention-bf16-128-group71", 128, heads=71, kv_heads=1)
    yield _attention(gpu, "attention-bf16-64-encoder", 64, page=None)
    yield _attention(gpu, "attention-bf16-128-cache-fp32", 128, cache=fp32)
    yield _attention(gpu, "attention-bf16-256-cache-fp32", 256, cache=fp32)
    yield _attention(gpu, "attention-fp16-128", 128, dtype=fp16)
    yield _attention(gpu, "attention-fp16-128-cache-bf16", 128, dtype=fp16, cache=bf16)
    for size in (64, 128):
        yield _attention(gpu, f"attention-fp32-{size}", size, dtype=fp32)
    for size in (64, 128, 256, 512):
        for split in (False, True):
            name = f"decode-bf16-{size}" + ("-split" if split else "")
            yield from _decode(gpu, name, size, split=split)
    yield from _decode(gpu, "decode-bf16-128-all", 128, features=True)
    yield from _decode(gpu, "decode-bf16-128-masks", 128, features=True, masks=True, split=True)
    yield from _decode(gpu, "decode-bf16-128-tree", 128, query_len=8, tree=True, split=True)
    yield from _decode(gpu, "decode-bf16-128-page128", 128, page=128)
    yield from _decode(gpu, "decode-bf16-80-split", 80, split=True)
    yield from _decode(gpu, "decode-bf16-128-verify", 128, query_len=8, split=True)
    yield from _decode(gpu, "decode-bf16-256-verify", 256, query_len=8, split=True)
    yield from _decode(gpu, "decode-bf16-128-cache-fp32", 128, cache=fp32)
    yield from _decode(gpu, "decode-fp16-128", 128, dtype=fp16)
    yield from _decode(gpu, "decode-fp32-128-split", 128, dtype=fp32, split=True)
    # Formats that differ in the reading of a tile; fp8-e5m2 is as fp8, fp8 with scales as int8.
    for name in ("fp8", "int8_per_token_head", "int4_per_token_head", "nvfp4"):
        short = name.removesuffix("_per_token_head")
        yield _attention(gpu, f"attention-bf16-128-{short}", 128, cache=name)
        yield from _decode(gpu, f"decode-bf16-128-{short}", 128, cache=name)
    yield _attention(gpu, "attention-bf16-256-int8", 256, cache="int8_per_token_head")
    yield _attention(gpu, "attention-bf16-512-fp8", 512, cache="fp8")
    yield _attention(gpu, "attention-fp16-64-int8", 64, dtype=fp16, cache="int8_per_token_head")
    yield _attention(gpu, "attention-fp32-128-fp8", 128, dtype=fp32, cache="fp8")
    yield from _decode(gpu, "decode-bf16-128-fp8-split", 128, cache="fp8_e5m2", split=True)
    yield from _decode(gpu, "decode-bf16-128-fp8-verify", 128, query_len=8, cache="fp8")
    yield from _decode(gpu, "decode-fp32-128-fp8", 128, dtype=fp32, cache="fp8")
    for key, name in ((kFp8StaticTensorSym, "fp8"), (kNvfp4Dynamic, "nvfp4")):
        yield _attention(gpu, f"attention-bf16-128-to-{name}", 128, codes=key)
        *_, merge = _decode(gpu, f"decode-bf16-128-split-to-{name}", 128, codes=key, split=True)
        yield merge
    yield _attention(gpu, "attention-bf16-128-to-fp8-by-128", 128, codes=kFp8Dynamic128Sym)
    yield from _decode(gpu, "decode-bf16-128-to-fp8-by-64", 128, codes=kFp8Dynamic64Sym)
    for name, stored in CACHE_FORMATS.items():
        if stored.codec is not None:
            yield _write(gpu, f"write-bf16-128-{name}", 128, bf16, cache=name)
    # Had halves that nothing sets (see `ptx`) while its block scales were rounded by the device.
    yield _write(gpu, "write-fp32-256-nvfp4", 256, fp32, cache="nvfp4")
    yield _write(gpu, "write-bf16-128", 128, bf16)
    yield _write(gpu, "write-bf16-80", 80, bf16)
    yield _write(gpu, "write-fp32-128-cache-bf16", 128, fp32, cache=bf16)
    yield from mla_variants(gpu)
    if gpu == configs.HOPPER:
        yield from hopper_variants()


Cache = torch.dtype | str
"""Of pages: a dtype, or the name of a format with codes."""


def _operands(
    size: int,
    size_v: int,
    dtype: torch.dtype,
    cache: Cache,
    page: int | None,
    heads: int,
    kv_heads: int,
    gpu: configs.Gpu,
    masks: bool = False,
    tree: bool = False,
    codes: QuantKey | None = None,
) -> Operands:
    num_tokens, num_reqs = 4096, 64
    if page is None:
        stored = Stored(
            key=empty(num_tokens, kv_heads, size, dtype=dtype),
            value=empty(num_tokens, kv_heads, size_v, dtype=dtype),
        )
        table = None
    else:
        name = cache if isinstance(cache, str) else str(cache).removeprefix("torch.")
        made = cache_format(name)
        assert made.dtype is not None
        content = made.layout(size, size_v).num_bytes // made.dtype.itemsize
        pages = empty(64, page, kv_heads, content, dtype=made.dtype).transpose(1, 2)
        one = empty(1, dtype=torch.float32)
        stored = Stored.of(pages, made, size, size_v, one, one, has_e4m3=gpu.has_e4m3)
        table = empty(num_reqs, 256, dtype=torch.int32)
    output: torch.Tensor | OutputCodes = empty(num_tokens, heads, size_v, dtype=dtype)
    if codes is not None:
        scale = (
            empty(1, dtype=torch.float32) if codes in (kFp8StaticTensorSym, kNvfp4Dynamic) else None
        )
        made = QuantizedOutput.empty(codes, num_tokens, heads * size_v, scale=scale, device="meta")
        output = OutputCodes.of(made, heads, num_tokens)
    return Operands(
        query=empty(num_tokens, heads, size, dtype=dtype),
        stored=stored,
        output=output,
        lse=empty(num_tokens, heads, dtype=torch.float32),
        query_start_loc=empty(num_reqs + 1, dtype=torch.int32),
        kv_lens=empty(num_reqs, dtype=torch.int32),
        block_table=table,
        causal=True,
        spans=empty(num_tokens, 2, dtype=torch.int32) if masks else None,
        prefix_lens=empty(num_reqs, dtype=torch.int32) if masks else None,
        tree=empty(num_tokens, dtype=torch.int64) if tree else None,
    )


def _variant(size: int, heads: int, features: bool) -> AttentionVariant:
    scale = size**-0.5
    if not features:
        return AttentionVariant.from_impl_args(num_heads=heads, scale=scale)
    return AttentionVariant.from_impl_args(
        num_heads=heads,
        scale=scale,
        sliding_window=1000,
        logits_soft_cap=30.0,
        alibi_slopes=[0.1] * heads,
        sinks=torch.zeros(heads),
    )


def _attention(
    gpu: configs.Gpu,
    name: str,
    size: int,
    *,
    size_v: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    cache: Cache | None = None,
    page: int | None = 16,
    heads: int = 32,
    kv_heads: int = 8,
    features: bool = False,
    masks: bool = False,
    tree: bool = False,
    codes: QuantKey | None = None,
) -> tuple[str, KernelCall]:
    operands = _operands(
        size, size_v or size, dtype, cache or dtype, page, heads, kv_heads, gpu, masks, tree, codes
    )
    config = configs.attention_config(
        size, size_v or size, dtype.itemsize, operands.stored.key.element_size(), gpu
    )
    return name, launch.attention_call(operands, _variant(size, heads, features), 1, config)


def _decode(
    gpu: configs.Gpu,
    name: str,
    size: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    cache: Cache | None = None,
    page: int = 16,
    query_len: int = 1,
    features: bool = False,
    masks: bool = False,
    tree: bool = False,
    split: bool = False,
    codes: QuantKey | None = None,
) -> Iterator[tuple[str, KernelCall]]:
    heads, kv_heads = 32, 8
    operands = _operands(
        size, size, dtype, cache or dtype, page, heads, kv_heads, gpu, masks, tree, codes
    )
    rows = query_len * heads // kv_heads
    config = configs.decode_config(
        size, size, dtype.itemsize, operands.stored.key.element_size(), rows, gpu
    )
    parts = None
    if split:
        numel = Parts.numel(operands, query_len, config.max_segments)
        memory = empty(numel, dtype=torch.float32)
        parts = Parts.of(memory, operands, query_len, config.max_segments)
    variant = _variant(size, heads, features)
    work = launch.DecodeWork(
        max_query_len=query_len, config=config, num_splits=4 if split else 1, parts=parts
    )
    yield name, launch.decode_call(operands, variant, work)
    if split:
        yield f"{name}-merge", launch.merge_call(operands, variant, work)


def _write(
    gpu: configs.Gpu, name: str, size: int, dtype: torch.dtype, *, cache: Cache | None = None
) -> tuple[str, KernelCall]:
    operands = _operands(size, size, dtype, cache or dtype, 16, 8, 8, gpu)
    rows = empty(4096, 8, size, dtype=dtype)
    slots = empty(4096, dtype=torch.int64)
    return name, cache_launch.write_call(rows, rows, operands.stored, slots)


def main() -> None:
    """Print the reports, one a line, as text or JSON."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--arch", default="sm_90", help="sm_80, sm_86, sm_89 or sm_90")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    arguments = parser.parse_args()
    for report in compile_kernels(arguments.arch):
        print(json.dumps(asdict(report)) if arguments.json else report)


if __name__ == "__main__":
    main()

"""The backends attnkit ships: name -> "module:Class", strings only, in order of preference.

One table for layers that keep keys and values, one for layers that keep latents (MLA). Nothing is
imported until a name is asked for, so a machine without Triton lists it all the same.
"""

BACKENDS: dict[str, str] = {
    "hopper": "attnkit.backends.hopper.backend:HopperBackend",
    "triton": "attnkit.backends.triton.backend:TritonBackend",
    "cpu": "attnkit.backends.cpu.backend:CpuBackend",
    "flash_attn": "attnkit.backends.flash_attn:FlashAttnBackend",
    "flashinfer": "attnkit.backends.flashinfer:FlashInferBackend",
    "flex": "attnkit.backends.flex.backend:FlexBackend",
    "reference": "attnkit.backends.reference:ReferenceBackend",
}

MLA_BACKENDS: dict[str, str] = {
    "hopper_mla": "attnkit.backends.hopper.mla:HopperMLABackend",
    "triton_mla": "attnkit.backends.triton.mla:TritonMLABackend",
    "cpu_mla": "attnkit.backends.cpu.mla:CpuMLABackend",
    "reference_mla": "attnkit.backends.reference_mla:ReferenceMLABackend",
    "hopper_mla_sparse": "attnkit.backends.hopper.mla_sparse:HopperMLASparseBackend",
    "triton_mla_sparse": "attnkit.backends.triton.mla:TritonMLASparseBackend",
    "cpu_mla_sparse": "attnkit.backends.cpu.mla:CpuMLASparseBackend",
    "reference_mla_sparse": "attnkit.backends.reference_mla:ReferenceMLASparseBackend",
}

MLA_PREFILL_BACKENDS: dict[str, str] = {
    "hopper": "attnkit.backends.hopper.mla_prefill:HopperMLAPrefill",
    "triton": "attnkit.backends.triton.mla_prefill:TritonMLAPrefill",
    "cpu": "attnkit.backends.cpu.mla_prefill:CpuMLAPrefill",
    "flash_attn": "attnkit.backends.flash_attn_mla_prefill:FlashAttnMLAPrefill",
    "flashinfer": "attnkit.backends.flashinfer_mla_prefill:FlashInferMLAPrefill",
    "torch": "attnkit.backends.torch_mla_prefill:TorchMLAPrefill",
    "reference": "attnkit.backends.reference_mla:ReferenceMLAPrefill",
}
"""Who may prefill for layers over latents: `MLAPrefillBackend`s."""

INDEX_KERNELS: dict[str, str] = {
    "triton": "attnkit.backends.triton.indexer:TritonIndexKernels",
    "torch": "attnkit.mla.index_kernels:TorchIndexKernels",
}
"""Who may choose keys for sparse layers: `IndexKernels`."""

"""HopperBackend: paged attention for sm_90 in Gluon: copies by TMA, products by wgmma, roles for warps.

In: questions of selection and engines. Out: what the kernels do, every reason for what they do not, and
the builder and impl. Importing this needs neither Triton nor a GPU.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

from attnkit.backends.hopper.impl import HopperImpl
from attnkit.backends.hopper.plan import HopperMetadataBuilder
from attnkit.backends.hopper.sm90 import Sm90Backend
from attnkit.backends.hopper.tuning import (
    CACHE_DTYPES,
    CODED_CACHE_DTYPES,
    HEAD_SIZES,
    MAX_CODED_GROUP_SIZE,
    MAX_GROUP_SIZE,
)
from attnkit.contract import KVCacheLayout


class HopperBackend(Sm90Backend):
    """Dense causal and non-causal decoder attention on Hopper GPUs, 16-bit, pages of 16 and more."""

    supported_kv_cache_dtypes: ClassVar[list[str]] = list(CACHE_DTYPES)

    @staticmethod
    def get_name() -> str:
        return "hopper"

    @staticmethod
    def get_impl_cls() -> type[HopperImpl]:
        return HopperImpl

    @staticmethod
    def get_builder_cls() -> type[HopperMetadataBuilder]:
        return HopperMetadataBuilder

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return list(HEAD_SIZES)

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        # Decodes of float8 codes of head size 64 take 79 us so and 95 where a token's heads lie side by
        # side, which are pieces of 64 bytes; numbers 135 and 141 (B64 ctx 4096 32/8).
        return KVCacheLayout.heads_first()

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_alibi(cls) -> bool:
        return True

    @classmethod
    def supports_alibi_sqrt(cls) -> bool:
        return True

    @classmethod
    def supports_logits_soft_cap(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        # What is a decode, the device says; what is a prefill, the host. They must agree.
        return False

    @classmethod
    def estimate_cost(cls, request: Any) -> float:
        """Below the portable kernels: it ran 1.2 to 1.7 times as fast on prompts and 1.0 to 2.2 times on
        all but one decode (benchmarks/attention-h200.json).
        """
        coded = request.kv_cache_dtype in CODED_CACHE_DTYPES
        most = MAX_CODED_GROUP_SIZE if coded else MAX_GROUP_SIZE
        if request.num_heads > most * request.num_kv_heads:
            return math.inf  # The impl refuses: heads are known to selection only here.
        return 0.5

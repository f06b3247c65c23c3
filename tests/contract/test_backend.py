"""AttentionBackend: every reason at once, in one order, each with what was asked and what is allowed."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

from attnkit.contract import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionType,
    CommonMetadataBuilder,
    DeviceCapability,
    FullAttentionSpec,
    KVCacheSpec,
    MultipleOf,
    subclass_attention_backend,
)


class Impl(AttentionImpl[Any]):
    def __init__(self, *args: Any) -> None: ...

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise NotImplementedError


class Picky(AttentionBackend):
    """Does as little as a backend can, so that a request can lack everything."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        return "picky"

    @staticmethod
    def get_impl_cls() -> type[Impl]:
        return Impl

    @staticmethod
    def get_builder_cls() -> type[CommonMetadataBuilder]:
        return CommonMetadataBuilder

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [64, 128]

    @staticmethod
    def get_supported_kernel_block_sizes(
        kv_cache_spec: KVCacheSpec | None = None,
    ) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        return capability >= (9, 0)

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return False

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False

    @classmethod
    def supports_combination(cls, *args: Any) -> str | None:
        return "these do not go together"


class Plain(Picky):
    """The same without the wish to refuse a combination."""

    @classmethod
    def supports_combination(cls, *args: Any) -> str | None:
        return None


GOOD: dict[str, Any] = {
    "head_size": 64,
    "dtype": torch.bfloat16,
    "kv_cache_dtype": "auto",
    "block_size": 32,
    "use_mla": False,
    "has_sink": False,
    "use_sparse": False,
    "use_mm_prefix": False,
    "use_per_head_quant_scales": False,
    "device_capability": DeviceCapability(9, 0),
    "attn_type": AttentionType.DECODER,
}
# In the order in which reasons come: what is asked too much, and what the reason must name.
ASKED: list[tuple[dict[str, Any], list[str]]] = [
    ({"head_size": 80}, ["80", "64", "128"]),
    ({"dtype": torch.float16}, ["float16", "bfloat16"]),
    ({"kv_cache_dtype": "fp8"}, ["fp8", "auto", "bfloat16"]),
    ({"block_size": 100}, ["100", "multiples of 16"]),
    ({"use_mm_prefix": True}, ["multimodal"]),
    ({"use_mla": True}, ["MLA"]),
    ({"has_sink": True}, ["sink"]),
    ({"use_sparse": True}, ["sparse"]),
    ({"use_per_head_quant_scales": True}, ["per head"]),
    ({"device_capability": DeviceCapability(8, 0)}, ["sm_80", "sm_90"]),
    ({"attn_type": "encoder_only"}, ["encoder_only", "decoder"]),
    ({"has_sliding_window": True}, ["sliding window"]),
    ({"use_rswa": True}, ["R-SWA"]),
    ({"use_non_causal": True}, ["non-causal"]),
    ({"use_batch_invariant": True}, ["batch invariance"]),
    ({"use_kv_connector": True}, ["connector"]),
    ({"use_pcp": True}, ["PCP"]),
    ({"use_dcp": True}, ["DCP"]),
    ({"use_adaptive_verification": True}, ["adaptive verification"]),
]


def test_a_request_within_the_promises_meets_no_reason() -> None:
    assert Plain.validate_configuration(**GOOD) == []
    assert Picky.validate_configuration(**GOOD) == ["these do not go together"]


@pytest.mark.parametrize(("asked", "named"), ASKED, ids=[next(iter(a)) for a, _ in ASKED])
def test_each_lack_is_one_reason_with_value_and_alternatives(
    asked: dict[str, Any], named: list[str]
) -> None:
    reasons = Plain.validate_configuration(**{**GOOD, **asked})
    assert len(reasons) == 1
    assert all(word in reasons[0] for word in named)


def test_all_reasons_come_at_once_and_in_order() -> None:
    everything = {k: v for asked, _ in ASKED for k, v in asked.items()}
    reasons = Picky.validate_configuration(**{**GOOD, **everything})
    # MLA, non-causal and DCP together are one more lack, named after non-causal.
    apart = [named for _, named in ASKED]
    apart.insert(14, ["non-causal", "DCP"])
    apart.append(["these do not go together"])
    assert len(reasons) == len(apart)
    for reason, named in zip(reasons, apart, strict=True):
        assert all(word in reason for word in named), (reason, named)


def test_non_causal_over_ranks_is_one_question_more_for_latents_only() -> None:
    asked = {**GOOD, "use_non_causal": True, "use_dcp": True}
    assert len(Plain.validate_configuration(**asked)) == 2
    assert len(Plain.validate_configuration(**{**asked, "use_mla": True})) == 4


def test_mla_and_sparse_mismatch_is_refused_in_both_directions() -> None:
    class Latent(Plain):
        @classmethod
        def is_mla(cls) -> bool:
            return True

        @classmethod
        def is_sparse(cls) -> bool:
            return True

    reasons = Latent.validate_configuration(**GOOD)
    assert len(reasons) == 2
    assert "dense" in reasons[0]
    assert "not sparse" in reasons[1]
    assert Latent.validate_configuration(**{**GOOD, "use_mla": True, "use_sparse": True}) == []


def test_a_backend_that_overrides_only_the_question_still_says_what_is_allowed() -> None:
    class Rules(Plain):
        @classmethod
        def get_supported_head_sizes(cls) -> list[int]:
            return []

        @classmethod
        def supports_head_size(cls, head_size: int) -> bool:
            return head_size % 8 == 0 and head_size <= 256

        @classmethod
        def supports_dtype(cls, dtype: torch.dtype) -> bool:
            return dtype == torch.float32

        @classmethod
        def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None) -> bool:
            return kv_cache_dtype == "fp8_e5m2"

    head, dtype, cache = Rules.validate_configuration(**{**GOOD, "head_size": 81})
    assert "allowed: 8 to 256 in steps of 8" in head
    assert "allowed: float32" in dtype
    assert "allowed: fp8_e5m2" in cache


def test_absent_values_are_no_question() -> None:
    asked = {**GOOD, "kv_cache_dtype": None, "block_size": None}
    assert Plain.validate_configuration(**asked) == []


def test_empty_lists_mean_any() -> None:
    class Free(Plain):
        supported_kv_cache_dtypes: ClassVar[list[str]] = []

        @classmethod
        def get_supported_head_sizes(cls) -> list[int]:
            return []

        @staticmethod
        def get_supported_kernel_block_sizes(
            kv_cache_spec: KVCacheSpec | None = None,
        ) -> list[int | MultipleOf]:
            return []

    assert Free.supports_head_size(77)
    assert Free.supports_kv_cache_dtype("nvfp4")
    assert Free.supports_block_size(7)
    assert Free.get_preferred_block_size(7) == 7


def _reading(*sizes: int | MultipleOf) -> type[AttentionBackend]:
    class Reading(Plain):
        @staticmethod
        def get_supported_kernel_block_sizes(
            kv_cache_spec: KVCacheSpec | None = None,
        ) -> list[int | MultipleOf]:
            return list(sizes)

    return Reading


@pytest.mark.parametrize(
    ("sizes", "block_size", "works"),
    [
        ((64,), 128, True),  # Split into two.
        ((64,), 64, True),
        ((64,), 32, False),
        ((64,), 96, False),
        ((MultipleOf(16),), 100, False),
        ((MultipleOf(16),), 112, True),
        ((MultipleOf(32), 16), 48, True),
        ((64,), 0, False),
        ((), 0, False),
        ((MultipleOf(16),), -16, False),
        ((64,), None, True),
    ],
)
def test_blocks_that_split_into_kernel_blocks_are_taken(
    sizes: tuple[int | MultipleOf, ...], block_size: int | None, works: bool
) -> None:
    assert _reading(*sizes).supports_block_size(block_size) is works


@pytest.mark.parametrize(
    ("sizes", "default", "preferred"),
    [
        ((64,), 16, 64),
        ((MultipleOf(32),), 16, 32),
        ((MultipleOf(16),), 16, 16),
        ((128, 64), 256, 256),
        ((128, MultipleOf(48)), 16, 48),
    ],
)
def test_the_preferred_block_is_the_default_or_the_smallest(
    sizes: tuple[int | MultipleOf, ...], default: int, preferred: int
) -> None:
    assert _reading(*sizes).get_preferred_block_size(default) == preferred


def test_multiples_are_equal_by_value() -> None:
    assert MultipleOf(16) == MultipleOf(16) != MultipleOf(32)
    assert len({MultipleOf(16), MultipleOf(16), 16}) == 2
    assert MultipleOf(16) != 16


def test_graph_levels_are_ordered_by_value() -> None:
    assert [m.value for m in sorted(AttentionCGSupport, key=lambda m: m.value)] == [0, 1, 2, 3]
    assert min(AttentionCGSupport, key=lambda m: m.value) is AttentionCGSupport.NEVER


def test_attention_types_are_their_strings() -> None:
    for kind in AttentionType:
        assert kind == kind.value == f"{kind}" == str(kind)
        assert AttentionType(kind.value) is kind
    assert Plain.supports_attn_type("decoder")
    assert not any(Plain.supports_attn_type(t) for t in AttentionType if t != "decoder")


def test_parallelism_is_the_impls_to_claim() -> None:
    class Parallel(Impl):
        supports_pcp = True
        supports_dcp = True
        can_return_lse_for_decode = True

    class Claims(Plain):
        @staticmethod
        def get_impl_cls() -> type[Impl]:
            return Parallel

    assert not (Plain.supports_pcp())
    assert not (Plain.supports_dcp())
    assert not Plain.supports_lse()
    assert Claims.supports_pcp()
    assert Claims.supports_dcp()
    assert Claims.supports_lse()


def test_a_backend_without_impl_claims_nothing_of_it() -> None:
    class State(Plain):
        @staticmethod
        def get_impl_cls() -> type[Impl]:
            raise NotImplementedError

        @classmethod
        def is_ssm(cls) -> bool:
            return True

    assert not (State.supports_pcp())
    assert not (State.supports_dcp())
    assert not State.supports_lse()


def test_recurrent_states_are_planned_on_the_host_unless_they_say_otherwise() -> None:
    class State(AttentionBackend):
        @classmethod
        def is_ssm(cls) -> bool:
            return True

    assert AttentionBackend.supports_device_cpu_query_lens_mismatch()
    assert not State.supports_device_cpu_query_lens_mismatch()


def test_non_causal_dcp_is_the_builders_to_claim() -> None:
    class Builder(CommonMetadataBuilder):
        supports_non_causal_multi_token_dcp = True

    class Claims(Plain):
        @staticmethod
        def get_builder_cls() -> type[CommonMetadataBuilder]:
            return Builder

    assert not Plain.supports_non_causal_dcp()
    assert Claims.supports_non_causal_dcp()


def test_a_wrapped_backend_has_its_builder_and_a_name_of_its_own() -> None:
    class Builder(CommonMetadataBuilder): ...

    wrapped = subclass_attention_backend("Chunked", Plain, Builder)
    assert wrapped.get_builder_cls() is Builder
    assert wrapped().get_builder_cls() is Builder  # A plain function would receive the instance.
    assert Plain.get_builder_cls() is CommonMetadataBuilder
    assert wrapped.__name__ == "ChunkedPlain"
    assert wrapped.full_cls_name() == (__name__, "ChunkedPlain")
    assert wrapped.full_cls_name() != Plain.full_cls_name()
    assert wrapped.get_name() == "picky"
    assert wrapped.get_impl_cls() is Impl
    assert wrapped.validate_configuration(**GOOD) == []


def test_wraps_of_equally_named_backends_are_two_groups() -> None:
    elsewhere = type("Plain", (Plain,), {"__module__": "elsewhere"})
    names = {
        subclass_attention_backend("Chunked", cls, CommonMetadataBuilder).full_cls_name()
        for cls in (Plain, elsewhere)
    }
    assert len(names) == 2


def test_the_spec_is_left_alone_by_default() -> None:
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    assert Plain.customize_spec(spec) is spec
    assert Plain.supported_kv_cache_layouts() is None


def test_older_backends_make_metadata_from_its_own_arguments() -> None:
    class Metadata(AttentionMetadata):
        def __init__(self, slots: int, *, width: int) -> None:
            self.slots, self.width = slots, width

    class Old(Plain):
        @staticmethod
        def get_metadata_cls() -> type[Metadata]:
            return Metadata

    made = Old.make_metadata(3, width=4)
    assert isinstance(made, Metadata)
    assert (made.slots, made.width) == (3, 4)
    assert Plain.get_metadata_cls() is AttentionMetadata


def test_current_backends_have_no_cache_shape_of_their_own() -> None:
    with pytest.raises(NotImplementedError):
        Plain.get_kv_cache_shape(2, 16, 1, 8)
    with pytest.raises(NotImplementedError):
        Plain.get_kv_cache_stride_order()

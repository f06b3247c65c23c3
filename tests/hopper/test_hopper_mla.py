"""The kernels over latents in the emulator, judged by the kit; and what the backend says of itself."""

from __future__ import annotations

import pytest
import torch

from attnkit.backends.hopper.mla import HopperMLABackend
from attnkit.backends.hopper.mla_plan import LatentPlanner
from attnkit.conformance.checks import check_case
from attnkit.conformance.kit import claimed_checks, outcome_of
from attnkit.conformance.mla.subject import MLASubject
from attnkit.conformance.subject import LawBroken
from attnkit.contract import DeviceCapability, MLADimensions
from attnkit.errors import CacheError
from attnkit.selection import AttentionRequest, reasons_against
from conftest import EmulatedHopperMLA, emulate

DECODES = {"query_lens": (1, 2, 1, 8, 0, 3), "seq_lens": (700, 2, 129, 300, 0, 64)}
"""Whole tiles and cut ones, and drafts in their first pages."""

CODED = {"kv_cache_dtype": "fp8"}

CASES = {
    "128 heads": {"num_heads": 128, "query_lens": (1, 2), "seq_lens": (390, 2)},
    "96 heads": {"num_heads": 96, "block_size": 48, "query_lens": (1,), "seq_lens": (130,)},
    "20 heads": {"num_heads": 20, "block_size": 64},
    "8 heads": {"num_heads": 8, "block_size": 160},
    "narrow": {"num_heads": 4, "query_lens": (1, 2, 4, 0), "seq_lens": (700, 2, 129, 0)},
    "narrow, 16 heads": {"num_heads": 16, "query_lens": (1, 1), "seq_lens": (333, 5)},
    "codes": {"num_heads": 8, "query_lens": (1, 2, 1, 0), "seq_lens": (700, 2, 129, 0), **CODED},
    "codes, 20 heads": {"num_heads": 20, "query_lens": (1, 1), "seq_lens": (333, 5), **CODED},
    "codes, 40 heads": {"num_heads": 40, **CODED},
    # Maxima rise from block to block.
    "codes, loud": {"num_heads": 40, "query_lens": (2,), "seq_lens": (390,), "scale": 0.7, **CODED},
    "codes, 96 heads": {
        "num_heads": 96,
        "block_size": 48,
        "query_lens": (1,),
        "seq_lens": (130,),
        **CODED,
    },
}


def _case(subject: MLASubject, name: str):  # type: ignore[no-untyped-def]
    fields = {"return_lse": True, "block_size": 16, **DECODES, **CASES[name]}
    return subject.plain_case(name, **fields)


@pytest.mark.parametrize(
    ("name", "num_programs"),
    [
        ("128 heads", 7),
        ("96 heads", 2),
        ("20 heads", 2),
        ("20 heads", 7),
        ("20 heads", 40),
        ("8 heads", 2),
        ("8 heads", 40),
        ("narrow", 2),
        ("narrow", 40),
        ("narrow, 16 heads", 7),
        ("codes", 2),
        ("codes", 40),
        ("codes, 20 heads", 7),
        ("codes, 40 heads", 2),
        ("codes, 40 heads", 40),
        ("codes, loud", 2),
        ("codes, 96 heads", 2),
    ],
)
def test_decodes_are_right_in_few_pieces_and_in_many(
    emulated_mla: type[HopperMLABackend],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    num_programs: int,
) -> None:
    init = LatentPlanner.__init__

    def resized(self: LatentPlanner, *args: object) -> None:
        init(self, *args)  # type: ignore[arg-type]
        self._num_programs = num_programs

    monkeypatch.setattr(LatentPlanner, "__init__", resized)
    subject = MLASubject.of(emulated_mla)
    check_case(subject, _case(subject, name))


WANTED = (
    "claim:",
    "law:captured_steps_replay",
    "law:runs_are_repeatable",
    "case:drafts-mixed-bf16",
)


def test_the_kit_passes(emulated_mla: type[HopperMLABackend]) -> None:
    checks = [c for c in claimed_checks(MLASubject.of(emulated_mla)) if c.name.startswith(WANTED)]
    assert len(checks) > len(WANTED)
    failed = [o for o in map(outcome_of, checks) if o.status == "failed"]
    assert not failed, failed


FAULTS = {
    "tail is not zeroed": (
        "latent_decode",
        "zero_past_end(mine_boxes, ME, block, num_keys, HALF)",
        "pass",
    ),
    "others' tail is not zeroed": (
        "latent_decode",
        "zero_past_end(mine_boxes, OTHER, block, num_keys, HALF)",
        "pass",
    ),
    "the other's maximum is left out": (
        "latent_decode",
        "return acc, highest,",
        "return acc, top,",
    ),
    "sums are not brought together": (
        "latent_decode",
        "total = total + sums.index(OTHER).load(ROW_LAYOUT)",
        "pass",
    ),
    "weights are read before they are there": (
        "latent_decode",
        "named_barrier_sync(block, 8 + OTHER, 256)",
        "pass",
    ),
    "a half is released early": (
        "latent_decode",
        "            zero_past_end(mine_boxes, ME, block",
        "            mbarrier.arrive(empty.index(2 * ME + ME), count=1)\n"
        "            zero_past_end(mine_boxes, ME, block",
    ),
    "narrow: tail is not zeroed": (
        "latent_narrow",
        "zero_past_end(boxes, slot, tile, num_keys, ROW)",
        "pass",
    ),
    "narrow: Q is overwritten early": ("latent_narrow", "(num_done & 1) ^ 1", "num_done & 1"),
    "codes: scores stay multiplied": (
        "latent_narrow",
        "s = s * gl.expand_dims(inverse, 1)",
        "pass",
    ),
    "codes: keys are not scaled": ("latent_narrow", "base_scale = log2_scale * out_scale", "pass"),
    "codes, 40 heads: tail is not zeroed": (
        "latent_codes",
        "zero_past_end(boxes, slot, first_block + n, num_keys, CONFIG)",
        "pass",
    ),
    "codes, 40 heads: Q is overwritten early": (
        "latent_codes",
        "(num_done & 1) ^ 1)\n                mbarrier.expect",
        "num_done & 1)\n                mbarrier.expect",
    ),
    "codes, 40 heads: scores stay multiplied": (
        "code_scores",
        "scales.store(inverse * base_scale)",
        "scales.store(inverse * 0.0 + base_scale)",
    ),
    "codes, 40 heads: values are not scaled": (
        "latent_codes",
        "    out_scale = gl.load(k_scale_ptr)\n",
        "    out_scale = gl.load(k_scale_ptr) * 0.0 + 1.0\n",
    ),
    "codes, loud: what was summed is not faded": (
        "latent_codes",
        "faded = faded + (accs[i] * fade,)",
        "faded = faded + (accs[i],)",
    ),
    "codes, loud: sums are not faded": (
        "code_scores",
        "total = total * gl.max(of_own_rows(none + gl.expand_dims(fade, 0)), 1)",
        "pass",
    ),
    "codes, 40 heads: weights are read before they are there": (
        "latent_codes",
        "mbarrier.wait(p_full.index(turn), (step >> 1) & 1)",
        "pass",
    ),
    "codes, 40 heads: a block is freed early": (
        "latent_codes",
        "            zero_past_end(boxes, slot",
        "            mbarrier.arrive(empty.index(slot), count=1)\n"
        "            zero_past_end(boxes, slot",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    module, old, new = FAULTS[name]

    def edit(at: str, source: str) -> str:
        if at != module:
            return source
        assert source.count(old) == 1, f"{old!r} stands {source.count(old)} times in {module}"
        return source.replace(old, new)

    emulate(monkeypatch, edit)
    subject = MLASubject.of(EmulatedHopperMLA)
    prefixes = ("narrow", "codes, 40 heads", "codes, loud", "codes")
    case = _case(subject, next((p for p in prefixes if name.startswith(p)), "20 heads"))
    with pytest.raises((LawBroken, AssertionError, TimeoutError, IndexError)):
        check_case(subject, case)


def test_a_cache_that_the_copy_engine_cannot_read_is_named(
    emulated_mla: type[HopperMLABackend],
) -> None:
    subject = MLASubject.of(emulated_mla)
    case = _case(subject, "narrow")
    layer = subject.layer(case)
    inputs = subject.inputs(layer, case)
    blocks, heads, size, width = inputs.kv_cache.shape
    for given, named in (
        (torch.zeros(blocks, heads, size, width + 4, dtype=case.dtype)[..., :width], "has strides"),
        (torch.zeros(blocks, heads, size, width, dtype=torch.float32), "kv_cache is torch.float32"),
    ):
        with pytest.raises(CacheError, match=named):
            layer.impl.forward_mqa(  # type: ignore[attr-defined]
                inputs.query.new_zeros(case.num_tokens, case.num_heads, width),
                given[:, 0],
                layer.build(inputs.batch),
                layer,
            )


def _reasons(**fields: object) -> tuple[str, ...]:
    values = {
        "head_size": 576,
        "dtype": torch.bfloat16,
        "num_heads": 128,
        "num_kv_heads": 1,
        "block_size": 64,
        "use_mla": True,
        "mla": MLADimensions(
            kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
        ),
        "device_capability": DeviceCapability(9, 0),
    }
    request = AttentionRequest(**{**values, **fields})  # type: ignore[arg-type]
    return reasons_against(HopperMLABackend, request, here=False)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, None),
        ({"block_size": 8}, "block size 8"),
        ({"kv_cache_dtype": "fp8"}, None),
        ({"kv_cache_dtype": "fp8_ds_mla"}, "fp8_ds_mla"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "fp8_e5m2"),
        ({"device_capability": DeviceCapability(10, 0)}, "sm_100"),
        ({"use_sparse": True}, "sparse"),
    ],
)
def test_what_the_kernels_do_not_do_is_a_reason(fields: dict, words: str | None) -> None:
    reasons = _reasons(**fields)
    assert len(reasons) == (words is not None), reasons
    assert words is None or words in reasons[0]


def test_other_latents_are_left_to_other_backends() -> None:
    other = MLADimensions(kv_lora_rank=256, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64)
    reason = HopperMLABackend.supports_mla_dimensions(other, "auto")
    assert reason is not None
    assert "512 with 64" in reason

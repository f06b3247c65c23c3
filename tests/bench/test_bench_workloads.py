"""Counts, names and shapes of workloads; the presets."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attnkit.bench.presets import PRESETS, preset
from attnkit.bench.workloads import (
    KINDS,
    LayerShape,
    Workload,
    build,
    decode,
    mixed,
    parse_shape,
    prefill,
    verify,
    write,
)
from attnkit.errors import ConfigurationError

LAYER = LayerShape(num_heads=4, num_kv_heads=2, head_size=8, block_size=16, dtype="bfloat16")


def brute_pairs(workload: Workload) -> int:
    """Visible pairs, one by one."""
    return sum(
        key <= seq_len - query_len + row
        for query_len, seq_len in zip(workload.query_lens, workload.seq_lens, strict=True)
        for row in range(query_len)
        for key in range(seq_len)
    )


@pytest.mark.parametrize(
    "workload",
    [
        prefill(3, 17, LAYER),
        prefill(1, 5, LAYER, context=31),
        decode(7, 33, LAYER),
        verify(2, 4, 19, LAYER),
        mixed(9, 21, 3, 15, LAYER),
    ],
    ids=lambda w: w.name,
)
def test_flops_count_visible_pairs_once(workload: Workload) -> None:
    assert workload.num_flops == 4 * brute_pairs(workload) * 4 * 8


def test_attention_bytes_are_each_input_and_output_once() -> None:
    workload = decode(7, 33, LAYER)
    keys_and_values = 7 * 33 * 2 * 2 * 8 * 2
    query_and_output = 2 * 7 * 4 * 8 * 2
    assert workload.num_bytes == keys_and_values + query_and_output


def test_a_narrow_cache_halves_its_bytes_only() -> None:
    layer = LayerShape(num_heads=4, num_kv_heads=2, head_size=8, kv_cache_dtype="fp8")
    assert decode(7, 33, layer).num_bytes == 7 * 33 * 2 * 2 * 8 + 2 * 7 * 4 * 8 * 2


@pytest.mark.parametrize(("name", "content"), [("int8_per_token_head", 40), ("nvfp4", 18)])
def test_scales_beside_the_codes_and_halves_of_bytes_count(name: str, content: int) -> None:
    layer = LayerShape(num_heads=4, num_kv_heads=2, head_size=16, kv_cache_dtype=name)
    assert decode(7, 33, layer).num_bytes == 7 * 33 * 2 * content + 2 * 7 * 4 * 16 * 2
    with pytest.raises(ConfigurationError, match=f"{name} needs head sizes"):
        decode(7, 33, replace(layer, head_size=6))


def test_a_write_reads_and_writes_new_tokens_alone() -> None:
    workload = write(3, 1, LAYER)
    assert workload.num_bytes == 3 * (2 * 2 * 2 * 8 * 2 + 8)
    assert workload.num_flops == 0


def test_a_build_moves_nothing() -> None:
    assert build(5, 100, LAYER).num_bytes == 0


def test_pages_round_up() -> None:
    assert decode(2, 33, LAYER).num_pages == 6


def test_names_tell_workloads_apart_within_a_preset() -> None:
    for groups in PRESETS.values():
        for group, workloads in groups.items():
            names = [w.name for w in workloads]
            assert len(set(names)) == len(names), group


def test_one_name_means_one_workload_over_all_presets() -> None:
    seen: dict[str, Workload] = {}
    for groups in PRESETS.values():
        for workloads in groups.values():
            for workload in workloads:
                assert seen.setdefault(workload.name, workload) == workload


def test_presets_hold_the_shapes_that_bars_are_set_for() -> None:
    h200 = {name: [w.name for w in group] for name, group in preset("h200").items()}
    assert len(h200["prefill"]) == len(h200["prefill-page128"]) == 6
    assert len(h200["decode"]) == 8
    assert "mixed 1x2048 after 8192 + 63x1 ctx4096 32/8 D128 page16 bf16" in h200["mixed"]
    assert [w.query_lens[0] for w in preset("h200")["verify"]] == [1, 2, 4, 8]
    assert {w.num_reqs for w in preset("h200")["build"]} == {256}
    cpu = preset("cpu")
    assert [(w.num_reqs, w.seq_lens[0]) for w in cpu["decode"]] == [
        (8, 4096),
        (8, 16384),
        (1, 32768),
    ]


def test_a_preset_that_does_not_exist_names_those_that_do() -> None:
    with pytest.raises(ConfigurationError, match=r"'tpu'.*h200, cpu"):
        preset("tpu")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_a_default_shape(kind) -> None:
    assert parse_shape(kind, "").kind == kind


def test_a_shape_is_read_as_written() -> None:
    got = parse_shape("verify", "batch=3,q=5,ctx=70,heads=6/2,d=64,page=32,dtype=float16,kv=fp8")
    layer = LayerShape(
        num_heads=6,
        num_kv_heads=2,
        head_size=64,
        block_size=32,
        dtype="float16",
        kv_cache_dtype="fp8",
    )
    assert got == verify(3, 5, 70, layer)


def test_heads_without_a_slash_are_all_kv_heads() -> None:
    assert parse_shape("decode", "heads=6").num_kv_heads == 6


@pytest.mark.parametrize(
    ("kind", "text", "complaint"),
    [
        ("decode", "s=3", "no key 's'.*batch, ctx"),
        ("decode", "batch=x", "batch=x is not a whole number"),
        ("decode", "batch=0", "batch=0 leaves nothing to measure"),
        ("decode", "ctx=0", "1 new tokens in a sequence of 0"),
        ("decode", "heads=6/4", "6 query heads do not share 4"),
        ("decode", "d=0", "head_size 0"),
        ("decode", "dtype=int8", "'int8' is not known"),
        ("decode", "kv=fp7", "'fp7' is not known"),
        ("verify", "q=9,ctx=8", "9 new tokens in a sequence of 8"),
    ],
)
def test_a_bad_shape_says_what_is_allowed(kind, text: str, complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        parse_shape(kind, text)

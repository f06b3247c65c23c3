"""Laws of one call: how its arguments lie in memory, what it returns, what users call.

In: a `Subject`. Out: as of any law.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from attnkit.batch import make_batch
from attnkit.compiled import forward_context
from attnkit.conformance.case import Case
from attnkit.conformance.checks import bits, expect_same_bits, run_and_judge
from attnkit.conformance.laws.law import base_case, claimed, expect_same
from attnkit.conformance.subject import LawBroken, NotClaimed, Result, Subject
from attnkit.contract import kFp8StaticTensorSym, kNvfp4Dynamic
from attnkit.errors import UnsupportedConfiguration
from attnkit.layer import Attention
from attnkit.output_quant import OUTPUT_KEYS, QuantizedOutput


def strides_do_not_matter(subject: Subject) -> None:
    """q, k and v may be slices of one projection: rows further apart than they are long."""
    for layer, case in claimed(subject, coded=True):
        inputs = subject.inputs(layer, case)
        heads, kv_heads, size = case.num_heads, case.num_kv_heads, case.head_size
        fused = torch.full(
            (inputs.query.shape[0], heads + 2 * kv_heads + 1, size),
            math.nan,
            dtype=case.dtype,
            device=subject.device,
        )
        q, k, v, _ = fused.split([heads, kv_heads, kv_heads, 1], dim=1)
        strided = replace(
            inputs,
            query=q.copy_(inputs.query),
            key=k.copy_(inputs.key),
            value=v.copy_(inputs.value),
        )
        run_and_judge(subject, layer, strided)


def scales_of_what_is_not_quantised_do_not_matter(subject: Subject) -> None:
    """`_q_scale` belongs to queries that come as codes, `_prob_scale` to kernels that make codes of
    their weights: over queries that are numbers the answer is right whatever they are."""
    refusals: list[NotClaimed] = []
    for name in ("auto", "fp8"):
        case = base_case(subject, kv_cache_dtype=name)
        try:
            layer = subject.layer(case)
        except NotClaimed as refusal:
            refusals.append(refusal)
            continue
        layer._q_scale.fill_(3.0)
        layer._prob_scale.fill_(1 / 448)
        layer.process_weights_after_loading(case.dtype)
        run_and_judge(subject, layer, subject.inputs(layer, case))
    if len(refusals) == 2:
        raise refusals[0]


def lse_is_float32_per_token_and_head(subject: Subject) -> None:
    """What the impl itself returns: its output buffer, and an LSE of float32 (num_tokens, num_heads)."""
    for layer, case in claimed(subject):
        if not layer.return_lse:
            raise NotClaimed("the backend returns no LSE")
        assert isinstance(layer, Attention)
        inputs = subject.inputs(layer, case)
        subject.run(layer, inputs)  # The tokens are in the cache now.
        out = torch.empty_like(inputs.query[..., :1]).expand(-1, -1, layer.head_size_v).clone()
        returned = layer.impl.forward(
            layer,
            inputs.query,
            inputs.key,
            inputs.value,
            inputs.kv_cache,
            subject.plan(layer, inputs, inputs.batch),
            out,
        )
        if not isinstance(returned, tuple):
            raise LawBroken("forward returned no LSE although need_to_return_lse_for_decode is set")
        shape, dtype = tuple(returned[1].shape), returned[1].dtype
        if shape != (case.num_tokens, case.num_heads) or dtype != torch.float32:
            raise LawBroken(
                f"the LSE is {dtype} {shape}, not float32 {(case.num_tokens, case.num_heads)}"
            )


def codes_of_outputs_are_those_of_numbers(subject: Subject) -> None:
    """A quantised output is what quantising the output gives, to the bit, in every format the impl says
    it writes; others are refused. Groups of neighbours reach over heads, and lie within one."""
    padded = {"padding_tokens": 2, "padding_reqs": 1}
    _expect_codes(subject, base_case(subject, **padded, num_heads=16))
    if not subject.backend.is_mla() and subject.backend.supports_head_size(128):
        _expect_codes(subject, base_case(subject, **padded, head_size=128))


def _expect_codes(subject: Subject, case: Case) -> None:
    layer = subject.layer(case)
    inputs = subject.inputs(layer, case)
    want, _ = run_and_judge(subject, layer, inputs)
    plan = subject.plan(layer, inputs, inputs.batch)
    num_rows, written = inputs.query.shape[0], case.num_tokens
    width = case.num_heads * layer.head_size_v
    for key in OUTPUT_KEYS:
        scale = None
        if key in (kFp8StaticTensorSym, kNvfp4Dynamic):
            scale = torch.full((), 0.03, device=subject.device)
        made, expected = (
            QuantizedOutput.empty(key, num_rows, width, scale=scale, device=subject.device)
            for _ in range(2)
        )
        step: Any = (inputs.query, inputs.key, inputs.value, inputs.kv_cache, plan)
        if not layer.impl.fused_output_quant_supported(key):  # type: ignore[attr-defined]
            _expect_refused(lambda step=step, made=made: layer(*step, quantized=made))
            continue
        layer(*step, quantized=made)
        expected.write(want.out)
        for name in ("codes", "block_scale"):
            got, right = (getattr(x, name) for x in (made, expected))
            if got is not None and not torch.equal(bits(got[:written]), bits(right[:written])):
                raise LawBroken(f"{name} of {key} are not those of the output ({case})")


def the_users_path_is_the_same(subject: Subject) -> None:
    """`make_batch` and a call of the layer give what the kit's own batch and buffers gave."""
    for layer, case in claimed(subject):
        if case.freed_window:
            continue
        by_kit = subject.inputs(layer, case)
        kit, _ = run_and_judge(subject, layer, by_kit)
        inputs = subject.inputs(layer, case)
        num_pages = [-(-s // case.block_size) for s in case.seq_lens]
        table = inputs.batch.block_table_tensor.tolist()
        batch = make_batch(
            case.query_lens,
            case.seq_lens,
            [row[:n] for row, n in zip(table, num_pages, strict=True)],
            case.block_size,
            device=subject.device,
            causal=inputs.batch.causal,
            mm_req_doc_ranges=inputs.batch.mm_req_doc_ranges,
            rswa_prefix_lens=_prefixes(case),
            tree_parents=_parents(case),
        )
        answer = layer(inputs.query, inputs.key, inputs.value, inputs.kv_cache, layer.build(batch))
        out, lse = answer if isinstance(answer, tuple) else (answer, None)
        expect_same(Result(out=out, lse=lse), kit, case, "through Attention.forward")
        expect_same_bits(inputs.kv_cache, by_kit.kv_cache, "the cache after Attention.forward")


def profiling_writes_zeros(subject: Subject) -> None:
    """Without a plan a layer returns zeros and touches no cache."""
    for layer, case in claimed(subject):
        inputs = subject.inputs(layer, case)
        before = bits(inputs.kv_cache)
        with forward_context({}, {layer.cache_name: inputs.kv_cache}):
            answer = layer(inputs.query, inputs.key, inputs.value)
        out = answer[0] if isinstance(answer, tuple) else answer
        if bool((out != 0).any()):
            raise LawBroken("the output of a profiling run is not zero")
        result = torch.full_like(out, math.nan)
        assert isinstance(layer, Attention)
        if layer._passes_output:
            layer.impl.forward(
                layer,
                inputs.query,
                inputs.key,
                inputs.value,
                inputs.kv_cache,
                None,
                result,
            )
            if bool((result != 0).any()):
                raise LawBroken(
                    "the impl did not fill output with zeros when attn_metadata is None"
                )
        if not torch.equal(bits(inputs.kv_cache), before):
            raise LawBroken("a profiling run wrote to the cache")


def _expect_refused(call: Callable[[], object]) -> None:
    try:
        call()
    except UnsupportedConfiguration:
        return
    raise LawBroken("memory for codes was taken from an impl that says it writes none")


def _prefixes(case: Case) -> list[int] | None:
    """`rswa_prefix_lens` for `make_batch`."""
    return [case.prefix_of(r) for r in range(case.num_reqs)] if case.rswa else None


def _parents(case: Case) -> dict[int, tuple[int, ...]] | None:
    """`tree_parents` for `make_batch`."""
    if not case.tree:
        return None
    return {r: case.parents_of(r) for r in range(case.num_reqs) if case.parents_of(r)}

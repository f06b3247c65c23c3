"""Replays of public bug reports about latents, on every backend over latents that can run here."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from attnkit.backends import MLA_BACKENDS
from attnkit.conformance.checks import bits, run_and_judge
from attnkit.conformance.mla.case import MLACase
from attnkit.conformance.mla.indexer import KitIndexer
from attnkit.conformance.mla.subject import MLASubject
from attnkit.conformance.sequences import Tokens
from attnkit.conformance.subject import NotClaimed, Result
from attnkit.errors import BackendUnavailable
from attnkit.mla.prefill import merge_into


def _subjects() -> list[MLASubject]:
    found = []
    for name in MLA_BACKENDS:
        for device in ("cuda", "cpu") if torch.cuda.is_available() else ("cpu",):
            try:
                subject = MLASubject.of(name, device)
                subject.basis()
                subject.layer(subject.plain_case("runs", query_lens=(1,), seq_lens=(1,)))
            except (BackendUnavailable, NotClaimed):
                continue
            found.append(subject)
            break
    return found  # type: ignore[return-value]


SUBJECTS = _subjects()


@pytest.fixture(params=SUBJECTS, ids=lambda subject: subject.name)
def subject(request: pytest.FixtureRequest) -> MLASubject:
    return request.param


def replay(subject: MLASubject, case: MLACase, tokens: Sequence[Tokens] | None = None) -> Result:
    """Judged by the oracle."""
    try:
        layer = subject.layer(case)
    except NotClaimed as refusal:
        pytest.skip(f"refused, which is an answer: {refusal}")
    result, _ = run_and_judge(subject, layer, subject.inputs(layer, case, tokens=tokens))
    return result


def small(subject: MLASubject, name: str, **fields: Any) -> MLACase:
    """A case in the report's own sizes where the backend takes them, else in the backend's."""
    case = MLACase(name=name, **fields)
    return (
        case
        if subject.takes(case.dimensions, "auto")
        else subject.plain_case(name, **_without_sizes(fields))
    )


def _without_sizes(fields: dict[str, Any]) -> dict[str, Any]:
    sizes = ("head_size", "head_size_v", "qk_nope_head_dim", "v_head_dim")
    return {name: value for name, value in fields.items() if name not in sizes}


def test_br009_a_padding_request_is_zero_and_spoils_nothing(subject: MLASubject) -> None:
    fields: dict[str, Any] = {"num_heads": 16, "return_lse": subject.basis().lse}
    lens = ((1, 1, 1, 1), (5, 9, 2, 0))
    case = subject.plain_case("br009", query_lens=lens[0], seq_lens=lens[1], **fields)
    result = replay(subject, case)
    assert bool((result.out[3] == 0).all())
    assert math.isfinite(float(result.out.abs().amax()))
    if result.lse is not None:
        assert bool((result.lse[3] == -math.inf).all())
    # The real rows answer as without it.
    inputs = subject.inputs(subject.layer(case), case)
    real = replace(case, query_lens=lens[0][:3], seq_lens=lens[1][:3])
    tokens = [Tokens(q=s.q, k=s.k, v=s.v) for s in inputs.sequences[:3]]
    replay(subject, real, tokens)


def test_br011_br013_padding_is_written_nowhere(subject: MLASubject) -> None:
    """Slot -1 is neither the last slot nor the null block's; both keep their bits."""
    for name in subject.basis().formats:
        case = subject.plain_case(
            "br011",
            query_lens=(1, 1),
            seq_lens=(6, 1),
            padding_tokens=3,
            kv_cache_dtype=name,
            dimensions=subject.basis().tiled,
        )
        layer = subject.layer(case)
        inputs = subject.inputs(layer, case)
        inputs.key[2:], inputs.value[2:] = math.nan, math.nan
        pages = inputs.kv_cache.view(torch.uint8)
        pages[0] = 0x5A
        pages[-1, :, -1] = 0x3C
        before = bits(pages)
        layer.impl.do_kv_cache_update(
            inputs.key[:, 0],
            inputs.value,
            inputs.kv_cache[:, 0],
            inputs.batch.slot_mapping,
            name,
            layer._k_scale,
        )
        changed = (bits(pages) != before).any(-1).nonzero().tolist()
        written = [slot for slot in inputs.batch.slot_mapping.tolist() if slot >= 0]
        assert [b * case.block_size + n for b, _, n in changed] == sorted(written), name


@pytest.mark.parametrize("workspace", [1, 16, 1000])
def test_br090_context_in_chunks(subject: MLASubject, workspace: int) -> None:
    """Requests whose context ends earlier have empty parts in later chunks."""
    case = small(
        subject,
        "br090",
        query_lens=(8, 8, 8),
        seq_lens=(48, 8, 25),
        num_heads=2,
        head_size=16,
        head_size_v=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
        block_size=subject.basis().block_size,
        decode_query_len=1,
        workspace_pages=-(-workspace // subject.basis().block_size),
        return_lse=subject.basis().lse,
    )
    assert bool(torch.isfinite(replay(subject, case).out).all())


def test_br092_tables_are_indexed_by_request(subject: MLASubject) -> None:
    """Two requests of three tokens; rows behind the batch's own hold ids of no page. With equal scores
    and the position in every channel of the latent, a row is the mean of the positions it sees."""
    case = subject.plain_case(
        "br092", query_lens=(3, 3), seq_lens=(20, 9), num_heads=2, num_drafts=2, padding_reqs=4
    )
    layer = subject.layer(case)
    inputs = subject.inputs(layer, case, tokens=_positions(case))
    table = inputs.batch.block_table_tensor
    table[2:] = 1 << 30
    inputs.batch.seq_lens[2:] = 1 << 20
    _check_means(layer, case, subject.run(layer, inputs).out, [8.5, 9, 9.5, 3, 3.5, 4])


def _positions(case: MLACase) -> list[Tokens]:
    """Equal scores, and the position of a key in every channel of its latent."""
    d, tokens = case.dimensions, []
    for q_len, kv_len in zip(case.query_lens, case.seq_lens, strict=True):
        latent = torch.arange(kv_len)[:, None, None].expand(-1, 1, d.kv_lora_rank)
        tokens.append(
            Tokens(
                q=torch.zeros(q_len, case.num_heads, d.qk_head_dim, dtype=case.dtype),
                k=latent.to(case.dtype),
                v=torch.zeros(kv_len, 1, d.qk_rope_head_dim, dtype=case.dtype),
            )
        )
    return tokens


def _check_means(layer: Any, case: MLACase, out: torch.Tensor, means: Sequence[float]) -> None:
    """Each row is the value of the mean of the positions it sees."""
    weight = layer.projection.per_head[:, case.dimensions.qk_nope_head_dim :].sum(-1).double()
    want = torch.tensor(means, device=weight.device).double()[:, None, None] * weight
    off = (out.double() - want).abs()
    eps = torch.finfo(case.dtype).eps
    assert float((off / (want.abs() + 1)).max()) < 64 * eps, case.dtype


@pytest.mark.parametrize(
    "subject", [s for s in SUBJECTS if s.backend.is_sparse()], ids=lambda s: s.name
)
def test_br096_no_key_is_read_before_the_cache(
    subject: MLASubject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lists of nothing, of the first key, and of some keys among -1, over a cache that begins a page
    into memory of NaN and Inf."""
    case = subject.plain_case(
        "br096",
        query_lens=(1, 2, 1),
        seq_lens=(20, 9, 1),
        num_heads=2,
        return_lse=subject.basis().lse,
    )
    layer = subject.layer(case)
    layer.indexer.lists_are_whole_up_to = 0  # These leave keys out.
    inputs = subject.inputs(layer, case, tokens=_positions(case))
    lists = [[-1] * 6, [0, *[-1] * 5], [-1, 7, -1, 2, 3, -1], [-1, 0, -1, -1, -1, -1]]
    buffer = torch.tensor(lists, dtype=torch.int32, device=subject.device)
    monkeypatch.setattr(KitIndexer, "topk_indices_buffer", buffer)
    pages = inputs.kv_cache
    memory = pages.new_full((len(pages) + 1, *pages.shape[1:]), math.nan)
    memory[0, ..., ::2] = math.inf
    memory[1:] = pages
    result = subject.run(layer, replace(inputs, kv_cache=memory[1:]))
    assert bool((result.out[0] == 0).all())
    _check_means(layer, case, result.out, [0, 0, 4, 0])
    if result.lse is not None:
        want = torch.tensor([0, 1, 3, 1]).log()[:, None].expand(-1, 2)
        torch.testing.assert_close(result.lse.cpu(), want, atol=1e-3, rtol=0)


@pytest.mark.parametrize("q_len", [1, 2, 4])
def test_br094_absorbed_and_expanded_agree(subject: MLASubject, q_len: int) -> None:
    """On top of nine tokens, beside a context shorter than the query and a padding request."""
    for decode_query_len in (1, q_len):
        case = small(
            subject,
            f"br094-{q_len}",
            query_lens=(q_len, q_len, 0),
            seq_lens=(9 + q_len, max(1, q_len - 1), 0),
            num_heads=3,
            head_size=7,
            head_size_v=2,
            qk_nope_head_dim=4,
            v_head_dim=5,
            decode_query_len=decode_query_len,
            block_size=subject.basis().block_size,
            return_lse=subject.basis().lse,
        )
        replay(subject, case)


@pytest.mark.parametrize("strided", list(itertools.product((False, True), repeat=3)))
def test_parts_are_merged_by_their_own_strides(strided: tuple[bool, bool, bool]) -> None:
    """BR-046: what stands there, its LSE and the part may each be a view of a wider buffer."""
    draw = torch.Generator().manual_seed(46)
    into, part = torch.randn(2, 9, 3, 128, generator=draw)
    lse, part_lse = torch.randn(2, 9, 3, generator=draw)
    part_lse[4] = -math.inf
    right, right_lse = into.clone(), lse.clone()
    merge_into(right, right_lse, part, part_lse)

    def view(x: torch.Tensor, width: int) -> torch.Tensor:
        wide = x.new_full((*x.shape[:-1], width), math.nan)
        wide[..., : x.shape[-1]] = x
        return wide[..., : x.shape[-1]]

    got = view(into, 160) if strided[0] else into.clone()
    got_lse = view(lse, 5) if strided[1] else lse.clone()
    merge_into(got, got_lse, view(part, 192) if strided[2] else part, part_lse)
    assert torch.equal(bits(got), bits(right))
    assert torch.equal(bits(got_lse), bits(right_lse))

"""Public bug reports, replayed: mixed batches, drafts, selection, determinism.

Each test is named by its report in the list of replays (BR-nnn) and by the law that was broken, and
runs on every backend that can run here. The oracle judges every run (`replay`); numbers in a test
are answers worked out by hand. A backend that refuses the feature by name has answered.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from replays import InputsOf, LayerOf, Replay, mean, probe, rand, seen_keys

from attnkit.batch import make_batch
from attnkit.conformance.case import Case
from attnkit.conformance.checks import bits, judge, run_and_judge
from attnkit.conformance.sequences import Tokens, WholeSequence, meaning_of
from attnkit.conformance.subject import Subject
from attnkit.errors import BatchError, UnsupportedConfiguration
from attnkit.selection import AttentionRequest, reasons_against, select

# Mixed batches.


@pytest.mark.parametrize(
    ("query_lens", "seq_lens"),
    [((1, 1, 32), (40, 17, 32)), ((32, 1, 1), (32, 40, 17)), ((20, 15), (50, 15))],
    ids=["decodes_first", "prefill_first", "two_prefills"],
)
def test_br074_each_request_uses_its_own_rows(
    replay: Replay, query_lens: tuple[int, ...], seq_lens: tuple[int, ...]
) -> None:
    case = Case(name="br074", query_lens=query_lens, seq_lens=seq_lens)
    replay(case, rand(case, 17))


@pytest.mark.parametrize("lens", [(5, 9), (1, 16, 17)], ids=["two", "three"])
def test_br076_decodes_after_a_joint_prefill(
    subject: Subject, inputs_of: InputsOf, lens: tuple[int, ...]
) -> None:
    """The tensors of whole sequences, fed as one prefill and then decode by decode."""
    steps = 6
    seq_lens = tuple(n + steps for n in lens)
    case = Case(name="br076", query_lens=seq_lens, seq_lens=seq_lens)
    whole = rand(case, 76)
    layer, inputs = inputs_of(case, whole)
    pages = [
        row[: -(-n // case.block_size)]
        for row, n in zip(inputs.batch.block_table_tensor.tolist(), seq_lens, strict=True)
    ]
    done = [0] * len(lens)
    for query_lens in (lens, *[(1,) * len(lens)] * steps):
        start, done = done, [d + q for d, q in zip(done, query_lens, strict=True)]
        q, k, v = (
            torch.cat([getattr(t, name)[a:b] for t, a, b in zip(whole, start, done, strict=True)])
            for name in "qkv"
        )
        batch = make_batch(query_lens, done, pages, case.block_size, device=subject.device)
        step = replace(
            inputs,
            query=q.to(subject.device),
            key=k.to(subject.device),
            value=v.to(subject.device),
            batch=batch,
        )
        seen = tuple(
            WholeSequence(q=t.q[a:b], k=t.k[:b], v=t.v[:b], meaning=meaning_of(case, r))
            for r, (t, a, b) in enumerate(zip(whole, start, done, strict=True))
        )
        judge(seen, subject.run(layer, step))


# Speculative decode.


def test_br077_rejected_drafts_are_gone(subject: Subject, inputs_of: InputsOf) -> None:
    case = Case(name="br077", query_lens=(4,), seq_lens=(44,))
    layer, inputs = inputs_of(case, mean(case))
    run_and_judge(subject, layer, inputs)
    table = inputs.batch.block_table_tensor[0].tolist()
    for position in (41, 42, 43):
        inputs.kv_cache[table[position // 16], :, position % 16] = torch.nan
    batch = make_batch([1], [42], [table[:3]], 16, device=subject.device)
    value = torch.full_like(inputs.value[:1], 41.0)
    step = replace(inputs, query=inputs.query[:1], key=inputs.key[:1], value=value, batch=batch)
    out = subject.run(layer, step).out.cpu()
    assert torch.allclose(out, torch.full_like(out, 20.5))


def test_br079_a_smaller_batch_forgets_the_larger(subject: Subject, layer_of: LayerOf) -> None:
    base = Case(name="br079", query_lens=(80,), seq_lens=(80,))
    layer = layer_of(base)
    for query_lens, seq_lens in (((80,), (80,)), ((4,), (84,)), ((4, 3), (84, 20))):
        case = replace(base, query_lens=query_lens, seq_lens=seq_lens)
        inputs = subject.inputs(layer, case)
        run_and_judge(subject, layer, inputs)


def test_br081_more_drafts_than_tokens(replay: Replay) -> None:
    case = Case(name="br081", query_lens=(4,), seq_lens=(2,))
    out = replay(case, probe(case)).out
    assert (out[:2] == 0).all()
    assert seen_keys(out[2:]) == [{0}, {0, 1}]


# Selection, validation, messages.

LACKED: dict[str, dict[str, object]] = {
    "dtype_float64": {"dtype": torch.float64},
    "cache_format": {"kv_cache_dtype": "fp8_ds_mla"},
    "mla": {"use_mla": True},
    "sparse": {"use_sparse": True},
    "two_at_once": {"use_sparse": True, "dtype": torch.float64},
}


@pytest.mark.parametrize("lacked", LACKED.values(), ids=LACKED)
def test_br114_asked_for_by_name_it_runs_or_raises_every_reason(
    subject: Subject, lacked: dict[str, object]
) -> None:
    values = {"head_size": 64, "dtype": torch.float32, **lacked}
    request = AttentionRequest(**values)  # type: ignore[arg-type]
    reasons = reasons_against(subject.backend, request)
    assert len(reasons) >= len(lacked)
    with pytest.raises(UnsupportedConfiguration) as refusal:
        select(request, subject.name)
    assert subject.name in str(refusal.value)
    assert all(reason in str(refusal.value) for reason in reasons)
    assert refusal.value.reasons == reasons
    if "use_mla" in lacked:
        # Left to itself, selection looks among the backends over latents.
        assert select(request, environ={}).backend.is_mla()
        return
    with pytest.raises(UnsupportedConfiguration) as none_at_all:
        select(request, environ={})
    assert subject.name in str(none_at_all.value)
    assert all(reason in str(none_at_all.value) for reason in reasons)


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "tables", "named"),
    [
        ((3,), (2,), [[1]], ("request 0", "3", "2")),
        ((1, 1), (5, 6), [[1]], ("2 query lengths", "1 block")),
        ((-1,), (2,), [[1]], ("request 0", "-1")),
        ((1,), (33,), [[1, 2]], ("request 0", "33", "2")),
    ],
    ids=["fewer_tokens_than_queries", "fewer_tables", "negative", "short_table"],
)
def test_br116_a_batch_that_contradicts_itself_is_refused(
    query_lens: tuple[int, ...],
    seq_lens: tuple[int, ...],
    tables: list[list[int]],
    named: tuple[str, ...],
) -> None:
    with pytest.raises(BatchError) as error:
        make_batch(query_lens, seq_lens, tables, 16)
    for word in named:
        assert re.search(re.escape(word), str(error.value)), str(error.value)


@pytest.mark.parametrize("what", ["rows", "slots", "heads"])
def test_br116_tensors_that_do_not_fit_the_batch_are_refused(
    subject: Subject, inputs_of: InputsOf, what: str
) -> None:
    case = Case(name="br116", query_lens=(3, 9), seq_lens=(20, 9))
    layer, inputs = inputs_of(case)
    q, k, v, batch = inputs.query, inputs.key, inputs.value, inputs.batch
    named: tuple[str, ...]
    if what == "rows":
        q, k, v, named = q[:10], k[:10], v[:10], ("12", "10")
    elif what == "slots":
        batch, named = batch.replace(slot_mapping=batch.slot_mapping[:9]), ("12", "9")
    else:
        k, named = torch.cat([k, k], dim=1), (str(case.num_kv_heads), str(2 * case.num_kv_heads))
    before = bits(inputs.kv_cache)
    with pytest.raises(BatchError) as error:
        layer(q, k, v, inputs.kv_cache, layer.build(batch))
    for number in named:
        assert number in str(error.value), str(error.value)
    assert torch.equal(bits(inputs.kv_cache), before)


# Determinism, batch invariance.


@pytest.mark.parametrize("prefill", [9, 10, 63, 64, 65])
def test_br122_a_prefill_next_to_a_decode_leaves_its_bits(
    subject: Subject, inputs_of: InputsOf, prefill: int
) -> None:
    case = Case(
        name="br122",
        query_lens=(1, prefill),
        seq_lens=(500, prefill),
        num_heads=14,
        num_kv_heads=2,
        head_size=64,
        dtype=torch.bfloat16,
    )
    decode, prompt = rand(replace(case, query_lens=(1, 65), seq_lens=(500, 65)), 122)
    prompt = Tokens(q=prompt.q[:prefill], k=prompt.k[:prefill], v=prompt.v[:prefill])
    layer, inputs = inputs_of(case, [decode, prompt])
    together, _ = run_and_judge(subject, layer, inputs)
    layer, inputs = inputs_of(replace(case, query_lens=(1,), seq_lens=(500,)), [decode])
    alone, _ = run_and_judge(subject, layer, inputs)
    if subject.backend.supports_batch_invariance():
        assert torch.equal(together.out[:1], alone.out)


@pytest.mark.parametrize("heads", [(4, 4), (8, 2)], ids=["mha", "gqa"])
@pytest.mark.parametrize("num_mates", [1, 8])
def test_br124_a_decode_keeps_its_bits_among_others(
    subject: Subject, inputs_of: InputsOf, num_mates: int, heads: tuple[int, int]
) -> None:
    case = Case(
        name="br124",
        query_lens=(1,) * (1 + num_mates),
        seq_lens=(1024, *[5 + 30 * i for i in range(num_mates)]),
        num_heads=heads[0],
        num_kv_heads=heads[1],
    )
    tokens = rand(case, 124)
    layer, inputs = inputs_of(case, tokens)
    together, _ = run_and_judge(subject, layer, inputs)
    again = subject.run(layer, inputs)
    assert torch.equal(again.out, together.out)
    layer, inputs = inputs_of(replace(case, query_lens=(1,), seq_lens=(1024,)), tokens[:1])
    alone, _ = run_and_judge(subject, layer, inputs)
    if subject.backend.supports_batch_invariance():
        assert torch.equal(together.out[:1], alone.out)


# Threads and memory.


def test_br135_threads_and_affinity_are_the_processs_own(
    subject: Subject, inputs_of: InputsOf
) -> None:
    before = torch.get_num_threads(), os.sched_getaffinity(0)
    layer, inputs = inputs_of(Case(name="br135", query_lens=(1, 33), seq_lens=(300, 33)))
    subject.run(layer, inputs)
    assert (torch.get_num_threads(), os.sched_getaffinity(0)) == before


_LONG_PROMPT = """
import sys, torch
from attnkit import Attention, make_batch

def status(field):
    return next(int(x.split()[1]) for x in open("/proc/self/status") if x.startswith(field))

torch.set_num_threads(1)
length = int(sys.argv[2])
pages = length // 16
layer = Attention(2, 64, sliding_window=256, backend=sys.argv[1])
q = torch.randn(length, 2, 64)
cache = torch.zeros(pages + 1, 2, 16, 128)
batch = make_batch([17], [17], [[1, 2]], 16)
layer(q[:17], q[:17], q[:17], cache, layer.build(batch))
before = status("VmRSS")
batch = make_batch([length], [length], [list(range(1, pages + 1))], 16)
out = layer(q, q, q, cache, layer.build(batch))
assert torch.isfinite(out).all()
print((status("VmHWM") - before) // 1024)
"""


@pytest.mark.parametrize(
    ("backend", "length"), [("reference", 16_384), ("cpu", 16_384), ("flex", 4096)]
)
def test_br130_no_mask_of_length_squared(backend: str, length: int) -> None:
    """A bool mask of 16,384 squared alone is 256 MiB, numbers for one of 4,096 squared are 128 MiB."""
    command = [sys.executable, "-c", _LONG_PROMPT, backend, str(length)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) < 128

"""Judge one case: is the answer within its budget, and was nothing else touched?

In: a `Subject` and a `Case`. Out: how much of the budget was used, or `LawBroken` with the element
that is most wrong. Everything a single run can show is checked here; what needs two runs to show is
in `laws`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch

from attnkit.conformance.case import Case
from attnkit.conformance.inputs import Inputs
from attnkit.conformance.oracle import Array
from attnkit.conformance.pages import contents
from attnkit.conformance.sequences import WholeSequence
from attnkit.conformance.subject import LawBroken, Result, Subject
from attnkit.contract import AttentionType, CommonAttentionMetadata
from attnkit.paged_layer import PagedLayer


@dataclass(frozen=True, slots=True, kw_only=True)
class Margin:
    """The largest share of its budget that an element used; at most 1.

    Attributes:
        out: of the output.
        lse: of the LSE; 0 if none was asked for.
    """

    out: float
    lse: float


def check_case(subject: Subject, case: Case) -> Margin:
    """Run a case and judge output, LSE, cache bytes, padding rows and the batch.

    Raises:
        NotClaimed: the backend refuses the layer.
        LawBroken: something is not as it must be.
    """
    layer = subject.layer(case)
    inputs = subject.inputs(layer, case)
    return run_and_judge(subject, layer, inputs)[1]


def run_and_judge(subject: Subject, layer: PagedLayer, inputs: Inputs) -> tuple[Result, Margin]:
    """`check_case` on tensors that are there already."""
    cache = CacheWatch(inputs)
    batch = BatchWatch(inputs.batch)
    step = {name: bits(getattr(inputs, name)) for name in ("query", "key", "value")}
    result = subject.run(layer, inputs)
    batch.expect_unchanged()
    for name, before in step.items():
        if not torch.equal(bits(getattr(inputs, name)), before):
            raise LawBroken(f"the {name} of this step was changed in place")
    cache.expect_only_new_tokens_written()
    if layer._passes_output:
        expect_padding_untouched(inputs, result)
    return result, judge(inputs.sequences, result)


def judge(sequences: tuple[WholeSequence, ...], result: Result) -> Margin:
    """Compare every request's rows with the oracle.

    Args:
        sequences: the requests, in the order of the result's rows.
        result: of a run.
    """
    out = result.out.double().cpu().numpy()
    lse = None if result.lse is None else result.lse.double().cpu().numpy()
    worst_out = worst_lse = 0.0
    row = 0
    for request, s in enumerate(sequences):
        rows = slice(row, row + s.q.shape[0])
        row = rows.stop
        answer, budget = s.expected()
        where = f"request {request} of {len(sequences)}"
        used = _share(out[rows], answer.out, budget.out, f"output of {where}")
        worst_out = max(worst_out, used)
        if lse is not None:
            used = _share(lse[rows], answer.lse, budget.lse, f"LSE of {where}")
            worst_lse = max(worst_lse, used)
    return Margin(out=worst_out, lse=worst_lse)


def _share(got: Array, right: Array, allowed: Array, what: str) -> float:
    """Largest |got - right| / allowed; infinities must agree exactly.

    Raises:
        LawBroken: it is above 1, or something is NaN or wrongly infinite.
    """
    if got.size == 0:
        return 0.0
    comparable = np.isfinite(got) & np.isfinite(right)
    error = np.full(got.shape, np.inf)
    error[comparable] = np.abs(got[comparable] - right[comparable])
    error[got == right] = 0.0
    share = error / allowed
    worst = np.unravel_index(np.argmax(share), share.shape)
    if share[worst] > 1.0:
        at = f"row {worst[0]}, head {worst[1]}" + (
            f", channel {worst[2]}" if len(worst) > 2 else ""
        )
        num_wrong = int((share > 1.0).sum())
        raise LawBroken(
            f"{what}: {num_wrong} of {share.size} values are wrong; the worst is at {at}: "
            f"{got[worst]:.9g} instead of {right[worst]:.9g}, off by {error[worst]:.3g} where "
            f"{allowed[worst]:.3g} is allowed"
        )
    return float(share[worst])


class CacheWatch:
    """Bytes of the cache before a run, and what they must be after it.

    A cache in a shape of an older backend's own is not watched: only that backend can read it.
    """

    def __init__(self, inputs: Inputs) -> None:
        self._inputs = inputs
        self._watched = inputs.kv_cache.numel() > 0 and inputs.is_logical
        self._before = [bits(pages) for pages in inputs.cache_pages()] if self._watched else []
        self._other = None if inputs.other_cache is None else bits(inputs.other_cache)

    def expect_only_new_tokens_written(self) -> None:
        """Each real token is in its slot, in the cache's format; no other byte changed.

        Raises:
            LawBroken: naming the first block and offset that is not so.
        """
        inputs = self._inputs
        if not self._watched:
            return
        null_now, pages_now = (bits(p) for p in inputs.cache_pages())
        null_before, pages = self._before
        if not torch.equal(null_now, null_before):
            raise LawBroken("block 0, the null block, was written to")
        if inputs.case.attn_type is not AttentionType.ENCODER_DECODER:
            self._write_expected(pages)
        if not torch.equal(pages_now, pages):
            block, head, offset, channel = (pages_now != pages).nonzero()[0].tolist()
            block += max(1, inputs.first_block)
            slot = block * inputs.case.block_size + offset
            new = slot in inputs.batch.slot_mapping.tolist()
            what = "holds something else than this step's token" if new else "was written to"
            raise LawBroken(
                f"cache block {block}, offset {offset} (slot {slot}), head {head}, channel {channel} "
                f"{what}"
            )
        other = inputs.other_cache
        if (
            other is not None
            and self._other is not None
            and not torch.equal(bits(other), self._other)
        ):
            raise LawBroken("another layer's cache in the same memory was written to")

    def _write_expected(self, pages: torch.Tensor) -> None:
        """This step's tokens, in place into the bits from before."""
        inputs, block_size = self._inputs, self._inputs.case.block_size
        new = bits(contents(inputs.case, inputs.key, inputs.value))
        for row, slot in enumerate(inputs.batch.slot_mapping.tolist()):
            if slot >= 0:
                block = slot // block_size - max(1, inputs.first_block)
                pages[block, :, slot % block_size] = new[row]


class BatchWatch:
    """Copies of a batch's fields, to see that nobody wrote into it."""

    def __init__(self, batch: CommonAttentionMetadata) -> None:
        self._batch = batch
        self._before = {f.name: _copy(getattr(batch, f.name)) for f in _public_fields(batch)}

    def expect_unchanged(self) -> None:
        """Every field is as it was.

        Raises:
            LawBroken: naming the field.
        """
        for name, before in self._before.items():
            if not _equal(getattr(self._batch, name), before):
                raise LawBroken(f"the batch's {name} was changed; other layers read it too")


def expect_padding_untouched(inputs: Inputs, result: Result) -> None:
    """Output rows past the batch's tokens are what they were: NaN.

    Raises:
        LawBroken: some are not.
    """
    rows = result.out[inputs.batch.num_actual_tokens :]
    if not bool(torch.isnan(rows).all()):
        raise LawBroken(
            f"output rows past num_actual_tokens ({inputs.batch.num_actual_tokens}) were written to"
        )


def expect_same_bits(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    """Two tensors hold the same bits.

    Raises:
        LawBroken: they do not; `what` says whose and why they should.
    """
    if torch.equal(bits(got), bits(want)):
        return
    where = (bits(got) != bits(want)).nonzero()[0].tolist()
    raise LawBroken(
        f"{what}: differs at {where}: {got[tuple(where)].item():.9g} and "
        f"{want[tuple(where)].item():.9g}"
    )


def bits(x: torch.Tensor) -> torch.Tensor:
    """A compact copy as integers, so that NaN equals itself."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return x.detach().clone(memory_format=torch.contiguous_format).view(integer)


def _public_fields(batch: CommonAttentionMetadata) -> list:
    return [f for f in fields(batch) if not f.name.startswith("_")]


def _copy(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return value.clone()
    return value.copy() if isinstance(value, (np.ndarray, dict)) else value


def _equal(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return bool(np.array_equal(a, b))
    return a == b

"""From logits to token ids: greedy, temperature, top-k, top-p, min-p, repetition penalty, logprobs.

In: logits [num_rows, vocab_size] and one `SamplingState` per row. Out: one `Sampled` per row, through
one copy down, and before it has arrived the token ids on the device. A row's result depends on its own
logits and state alone, bit for bit: random numbers come from the request's own generator, one per token,
and every cut is made at a value of the row (ties are kept), never by a sort whose order could depend on
the other rows.

Order of the operations: repetition penalty, temperature, top-k, top-p over what top-k kept
(renormalised), min-p, draw. It is the order of transformers' logits processors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from attnkit.runner.sampling_params import SamplingParams

_MIN_CANDIDATES = 256
"""Largest logits looked at first for top-p; on a CPU a partial sort of 256 of 49,152 takes a tenth of
the full one, and nearly every distribution has its nucleus there. Grown by 8 where it has not."""


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural log of a token's probability under the model (before penalty and temperature).

    Attributes:
        logprob: the logarithm.
        rank: 1 for the likeliest token of the vocabulary.
    """

    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class Sampled:
    """One row's outcome.

    Attributes:
        token_id: the token, or None where the row's logits were not finite.
        logprobs: token id -> Logprob of the likeliest tokens and of `token_id`; None: not asked for.
    """

    token_id: int | None
    logprobs: dict[int, Logprob] | None = None


class SamplingState:
    """What sampling one request carries from token to token."""

    def __init__(
        self,
        params: SamplingParams,
        token_ids: Sequence[int],
        vocab_size: int,
        default_seed: Sequence[int],
        device: torch.device,
    ) -> None:
        """
        Args:
            params: the request's.
            token_ids: its prompt, which the repetition penalty counts too.
            vocab_size: width of the logits.
            default_seed: seeds the generator if `params.seed` is None.
            device: of the logits.
        """
        self.params = params
        self.greedy = params.is_greedy
        self.generator: np.random.Generator | None = None
        if not self.greedy:
            given = default_seed if params.seed is None else [params.seed]
            # SeedSequence takes no negative numbers, and numpy's own do not hold 2**64.
            seed = [int(number) % 2**64 for number in given]
            # Philox: streams of different seeds do not overlap, and PCG's do not promise that.
            self.generator = np.random.Generator(np.random.Philox(np.random.SeedSequence(seed)))
        self._taken_back: list[float] = []
        self.seen: torch.Tensor | None = None
        if params.repetition_penalty != 1:
            self.seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self.seen[torch.tensor(list(token_ids), dtype=torch.long, device=device)] = True

    @property
    def plain(self) -> bool:
        """An argmax is all this row needs."""
        return self.greedy and self.seen is None and self.params.logprobs is None

    def uniform(self) -> float:
        """The random number of the next token; 0 where none is drawn."""
        if self.generator is None:
            return 0.0
        return self._taken_back.pop() if self._taken_back else self.generator.random()

    def take_back(self, uniform: float) -> None:
        """Draw this number again: its token was never known. Later ones are taken back before."""
        if self.generator is not None:
            self._taken_back.append(uniform)

    def append(self, token_id: int) -> None:
        """Note a token that was sampled."""
        if self.seen is not None:
            self.seen[token_id] = True


class Draw:
    """Tokens that were chosen and are on their way down.

    Attributes:
        token_ids: int64 [num_rows], on the device; anything where a row's logits were not finite.
    """

    def __init__(
        self,
        token_ids: torch.Tensor,
        columns: Sequence[torch.Tensor],
        states: Sequence[SamplingState],
        uniforms: Sequence[float],
        num_top: int,
    ) -> None:
        """
        Args:
            token_ids: as the attribute.
            columns: float64 [num_rows, ...], what comes down beside them: a row's largest score, then
                those of `_logprob_columns`.
            states: one per row.
            uniforms: their random numbers.
            num_top: likeliest tokens among the columns.
        """
        self.token_ids = token_ids
        self._states, self._uniforms, self._num_top = states, uniforms, num_top
        # float64 holds every token id, so all comes down in one copy.
        rows = torch.cat([token_ids.double()[:, None], *columns], dim=1)
        self._arrival: torch.cuda.Event | None = None
        if rows.is_cuda:
            self._rows = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
            self._rows.copy_(rows, non_blocking=True)
            self._arrival = torch.cuda.Event()
            self._arrival.record()
        else:
            self._rows = rows

    def take_back(self) -> None:
        """Instead of `read`: the step is torn; another will choose its tokens by the same numbers."""
        take_back(self._states, self._uniforms)

    def read(self) -> list[Sampled]:
        """Wait for the tokens, and let their states note them. Once."""
        if self._arrival is not None:
            self._arrival.synchronize()
        outcome = []
        for row, state in zip(self._rows.tolist(), self._states, strict=True):
            if not math.isfinite(row[1]):
                outcome.append(Sampled(None))
                continue
            token_id = int(row[0])
            state.append(token_id)
            outcome.append(Sampled(token_id, _logprobs(row, self._num_top, state.params.logprobs)))
        return outcome


def draw(logits: torch.Tensor, states: Sequence[SamplingState]) -> Draw:
    """Choose the next token of each row; on a GPU nothing waits for it.

    Args:
        logits: [num_rows, vocab_size], any float dtype; not changed.
        states: one per row.
    """
    uniforms = [state.uniform() for state in states]
    try:
        return _choose(logits, states, uniforms)
    except BaseException:
        take_back(states, uniforms)
        raise


def take_back(states: Sequence[SamplingState], uniforms: Sequence[float]) -> None:
    """`SamplingState.take_back` of each row."""
    for state, uniform in zip(states, uniforms, strict=True):
        state.take_back(uniform)


def _choose(
    logits: torch.Tensor, states: Sequence[SamplingState], uniforms: Sequence[float]
) -> Draw:
    if all(state.plain for state in states):
        best, ids = logits.max(dim=-1)
        return Draw(ids, [best.double()[:, None]], states, uniforms, 0)
    raw = logits.float()
    scores = _penalise(raw, states)
    best, ids = scores.max(dim=-1)
    drawn = [r for r, state in enumerate(states) if not state.greedy]
    if len(drawn) == len(states):
        ids = _draw(scores, states, uniforms)
    elif drawn:
        index = torch.tensor(drawn, device=logits.device)
        rows = [states[r] for r in drawn], [uniforms[r] for r in drawn]
        ids = ids.index_copy(0, index, _draw(scores[index], *rows))
    columns = [best.double()[:, None]]
    num_top = max((s.params.logprobs or 0) for s in states)
    wanted = any(s.params.logprobs is not None for s in states)
    if wanted:
        columns += _logprob_columns(raw, ids, num_top)
    return Draw(ids, columns, states, uniforms, num_top)


def _penalise(scores: torch.Tensor, states: Sequence[SamplingState]) -> torch.Tensor:
    """Divide positive and multiply negative scores of seen tokens by the penalty (CTRL, section 4.1)."""
    rows = [r for r, state in enumerate(states) if state.seen is not None]
    if not rows:
        return scores
    index = torch.tensor(rows, device=scores.device)
    penalty = torch.tensor(
        [states[r].params.repetition_penalty for r in rows], device=scores.device
    )[:, None]
    seen = torch.stack([seen for r in rows if (seen := states[r].seen) is not None])
    part = scores[index]
    part = torch.where(seen, torch.where(part > 0, part / penalty, part * penalty), part)
    return scores.index_copy(0, index, part)


def _draw(
    scores: torch.Tensor, states: Sequence[SamplingState], uniforms: Sequence[float]
) -> torch.Tensor:
    """One token id per row, by inverting the distribution function at its uniform number."""
    vocab_size = scores.shape[1]
    numbers = [
        (
            s.params.temperature,
            min(s.params.top_k if s.params.top_k > 0 else vocab_size, vocab_size),
            s.params.top_p,
            s.params.min_p,
            uniform,
        )
        for s, uniform in zip(states, uniforms, strict=True)
    ]
    columns = torch.tensor(numbers, dtype=torch.float64).to(scores.device).unbind(1)
    temperature, top_k, top_p, min_p, uniform = (c[:, None] for c in columns)
    # Counted from the row's largest, so that no temperature can overflow: that one stays 0.
    scores = scores - scores.max(dim=1, keepdim=True).values
    scores = scores / temperature.float().clamp(min=torch.finfo(torch.float32).tiny)
    scores = _cut_top_k_top_p(scores, top_k.long(), top_p, numbers)
    # p >= min_p * p_max, in logs and with the largest at 0; log(0) = -inf cuts nothing.
    scores = scores.masked_fill(scores < min_p.log().float(), float("-inf"))
    cumulative = scores.softmax(dim=1).cumsum(dim=1, dtype=torch.float64)
    # right=True: the first entry above the number, so that no token of probability 0 is chosen.
    ids = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
    return ids[:, 0].clamp(max=vocab_size - 1)


def _cut_top_k_top_p(
    scores: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    numbers: Sequence[tuple[float, int, float, float, float]],
) -> torch.Tensor:
    """Set what lies below a row's k-th value, then below its nucleus, to -inf."""
    vocab_size = scores.shape[1]
    ks = [k for _, k, _, _, _ in numbers if k < vocab_size]
    nucleus_alone = any(p < 1 and k == vocab_size for _, k, p, _, _ in numbers)
    if not ks and not nucleus_alone:
        return scores
    width = max([*ks, min(_MIN_CANDIDATES, vocab_size) if nucleus_alone else 1])
    if nucleus_alone and scores.is_cuda:
        width = vocab_size  # a GPU sorts faster than it answers the question below
    while True:
        values = scores.topk(width, dim=1).values
        kth = values.gather(1, top_k.clamp(max=width) - 1)
        kth = torch.where(top_k < vocab_size, kth, float("-inf"))
        kept = scores.masked_fill(scores < kth, float("-inf"))
        total = kept.logsumexp(dim=1, keepdim=True).double()
        mass = (values.double() - total).exp().masked_fill(values < kth, 0.0)
        before = mass.cumsum(dim=1) - mass
        inside = ((before < top_p) & (mass > 0)).sum(dim=1, keepdim=True).clamp(min=1)
        open_ended = (inside == width) & (top_k > width) & (top_p < 1)
        # Without a row that may want more, nothing waits for the answer.
        if width == vocab_size or not nucleus_alone or not bool(open_ended.any()):
            break
        width = min(width * 8, vocab_size)
    edge = torch.where(top_p < 1, values.gather(1, inside - 1), float("-inf"))
    return kept.masked_fill(kept < edge, float("-inf"))


def _logprob_columns(raw: torch.Tensor, ids: torch.Tensor, num_top: int) -> list[torch.Tensor]:
    """Chosen logprob, its rank, then num_top ids and num_top logprobs, as float64 columns."""
    total = raw.logsumexp(dim=1, keepdim=True)
    chosen = raw.gather(1, ids[:, None])
    rank = 1 + (raw > chosen).sum(dim=1, keepdim=True)
    columns = [(chosen - total).double(), rank.double()]
    if num_top:
        values, top = raw.topk(min(num_top, raw.shape[1]), dim=1)
        columns += [top.double(), (values - total).double()]
    return columns


def _logprobs(row: list[float], num_top: int, wanted: int | None) -> dict[int, Logprob] | None:
    if wanted is None:
        return None
    width = (len(row) - 4) // 2
    wanted = min(wanted, width)
    ids, values = row[4 : 4 + wanted], row[4 + width : 4 + width + wanted]
    found = {
        int(i): Logprob(v, rank) for rank, (i, v) in enumerate(zip(ids, values, strict=True), 1)
    }
    found.setdefault(int(row[0]), Logprob(row[2], int(row[3])))
    return found

"""Request: one prompt on its way through the engine.

In: token ids and sampling parameters. Out: the growing output, and the state the scheduler keeps:
how many tokens are in the cache, in which blocks. Host only, but for images and sound; whoever holds a
Request may read all of it, and only the scheduler writes.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from enum import Enum

from attnkit.errors import AttnkitError, RequestError
from attnkit.kvcache.tables import RequestBlocks, TokenRange
from attnkit.runner.image_tokens import ImageTokens
from attnkit.runner.sampling_params import SamplingParams
from attnkit.runner.sound import Sound


class RequestStatus(Enum):
    """Where a request is."""

    WAITING = "waiting"
    """Not started."""
    RUNNING = "running"
    """Holds blocks."""
    PREEMPTED = "preempted"
    """Was running, lost its blocks to an earlier request, waits to be computed again."""
    FINISHED = "finished"
    """Has a finish reason."""


class FinishReason(str, Enum):
    """Why a request ended. A string too: its value is what outputs show."""

    STOP = "stop"
    """An end token or a stop string."""
    LENGTH = "length"
    """max_tokens were generated."""
    ABORT = "abort"
    """Cancelled."""
    ERROR = "error"
    """See `Request.error`."""

    def __str__(self) -> str:
        return self.value


class Request:
    """One prompt, its output and its place.

    Attributes:
        request_id: unique among those not finished.
        token_ids: prompt and output.
        encoder_token_ids: what the encoder of an encoder-decoder reads; empty: there is none, or it
            reads sound.
        sound: that it reads instead; None: none.
        num_prompt_tokens: how many of them are the prompt.
        sampling_params: how to go on.
        eos_token_ids: the model's own end tokens.
        extra_keys: what the cache depends on beside tokens (see `BlockManager.new_request`).
        ranges: prompt tokens that see each other in both directions, in order.
        images: what stands in the place of some prompt tokens' embeddings; None: nothing does.
        priority: lower runs sooner and is preempted later; equal ones go by arrival.
        arrival: counts up over all requests a scheduler was given.
        num_computed_tokens: tokens whose keys and values are in the cache.
        num_cached_tokens: tokens found in the prefix cache when it first ran.
        num_preemptions: how often it lost its blocks.
        blocks: block tables, one per group.
        status: where it is.
        finish_reason: why it ended; None: it has not.
        error: with FinishReason.ERROR, what happened.
    """

    __slots__ = (
        "_stop_token_ids",
        "arrival",
        "blocks",
        "encoder_token_ids",
        "eos_token_ids",
        "error",
        "extra_keys",
        "finish_reason",
        "images",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "priority",
        "ranges",
        "request_id",
        "sampling_params",
        "sound",
        "status",
        "token_ids",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling_params: SamplingParams,
        *,
        encoder_token_ids: Sequence[int] = (),
        sound: Sound | None = None,
        eos_token_ids: Iterable[int] = (),
        extra_keys: tuple[Hashable, ...] = (),
        ranges: Iterable[TokenRange] = (),
        images: ImageTokens | None = None,
        priority: int = 0,
    ) -> None:
        """A request that waits; arguments as the attributes, `ranges` in any order.

        Raises:
            RequestError: the prompt is empty or has something in it that is no token id; or a range is
                reversed, outside of the prompt or overlaps another.
        """
        if len(prompt_token_ids) == 0:
            raise RequestError(f"request {request_id}: the prompt has no tokens; give at least 1")
        for token_id in (*prompt_token_ids, *encoder_token_ids):
            if not isinstance(token_id, int) or token_id < 0:
                raise RequestError(
                    f"request {request_id}: prompt token {token_id!r} is not allowed; "
                    "give integers >= 0"
                )
        self.request_id = request_id
        self.token_ids = list(prompt_token_ids)
        self.encoder_token_ids = tuple(encoder_token_ids)
        self.sound = sound
        self.num_prompt_tokens = len(self.token_ids)
        self.sampling_params = sampling_params
        self.eos_token_ids = frozenset(eos_token_ids)
        self.extra_keys = extra_keys
        self.ranges = tuple(sorted(ranges, key=lambda r: (r.first, r.last)))
        self._check_ranges()
        self.images = images
        self.priority = priority
        self.arrival = 0
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.blocks: RequestBlocks | None = None
        self.status = RequestStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.error: AttnkitError | None = None
        self._stop_token_ids = frozenset(sampling_params.stop_token_ids)
        if not sampling_params.ignore_eos:
            self._stop_token_ids |= self.eos_token_ids

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id}, {self.num_prompt_tokens}+{self.num_output_tokens} tokens, "
            f"{self.num_computed_tokens} computed, {self.status.value})"
        )

    @property
    def encoder_len(self) -> int:
        """Tokens that cross attention reads."""
        return len(self.encoder_token_ids) if self.sound is None else self.sound.num_tokens

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt (a copy)."""
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> list[int]:
        """The output so far, an end token included (a copy)."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def is_prefilling(self) -> bool:
        """Prompt tokens, or after a preemption older output, have to be computed first."""
        return self.num_computed_tokens < max(self.num_prompt_tokens, self.num_tokens - 1)

    @property
    def is_finished(self) -> bool:
        """It has a finish reason."""
        return self.status is RequestStatus.FINISHED

    @property
    def max_computed_tokens(self) -> int:
        """Tokens in the cache at the end: all but the last one, which is never fed back."""
        return self.num_prompt_tokens + self.sampling_params.max_tokens - 1

    @property
    def order(self) -> tuple[int, int]:
        """Sorts requests: first comes first, preempted is the last."""
        return self.priority, self.arrival

    def uncut(self, start: int, num_new: int) -> int:
        """How many of the `num_new` tokens from position `start` on may be computed in one step so that
        no range is left in two: all, or those before the first range that would be; perhaps none."""
        end = start + num_new
        return next((r.first - start for r in self.ranges if r.first < end <= r.last), num_new)

    def append(self, token_id: int) -> FinishReason | None:
        """Take a sampled token; the reason to stop now, if there is one."""
        self.token_ids.append(token_id)
        if token_id in self._stop_token_ids:
            return FinishReason.STOP
        if self.num_output_tokens >= self.sampling_params.max_tokens:
            return FinishReason.LENGTH
        return None

    def _check_ranges(self) -> None:
        before: TokenRange | None = None
        for r in self.ranges:
            what = None
            if r.last < r.first:
                what = "is reversed; give (first, last) position, both inside"
            elif r.first < 0 or r.last >= self.num_prompt_tokens:
                what = f"is not inside the prompt's {self.num_prompt_tokens} tokens"
            elif before is not None and r.first <= before.last:
                what = (
                    f"overlaps ({before.first}, {before.last}); give ranges that have no position in "
                    "common"
                )
            if what is not None:
                raise RequestError(f"request {self.request_id}: range ({r.first}, {r.last}) {what}")
            before = r

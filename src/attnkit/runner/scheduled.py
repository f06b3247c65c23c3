"""SchedulerOutput: what one step computes, of which requests.

In: a scheduler's choice. Out: facts, frozen, for whoever builds, runs and commits the step. Host only.
"""

from __future__ import annotations

from dataclasses import dataclass

from attnkit.runner.image_tokens import ImageTokens
from attnkit.runner.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledRequest:
    """One request's part of a step.

    Attributes:
        request: its `num_computed_tokens` stays as it is until `commit`, and its block tables only grow.
        num_computed_tokens: of the request when this step begins.
        num_new_tokens: token_ids[num_computed_tokens : num_computed_tokens + num_new_tokens] are
            computed; of a step that is ahead, the token that the step before it samples.
        samples: the last of them is the last known token, so its logits give the next one.
    """

    request: Request
    num_computed_tokens: int
    num_new_tokens: int
    samples: bool

    @property
    def is_prefilling(self) -> bool:
        """`Request.is_prefilling`, when this step begins."""
        request = self.request
        return self.num_computed_tokens < max(request.num_prompt_tokens, request.num_tokens - 1)

    @property
    def images(self) -> ImageTokens | None:
        """What stands in the place of some of these tokens, at positions of the request."""
        images, start = self.request.images, self.num_computed_tokens
        return None if images is None else images.between(start, start + self.num_new_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOutput:
    """One step.

    Attributes:
        scheduled: in batch order. With a reorder threshold n: requests with context and at most n new
            tokens that decode, then those still in their prompt, then longer ones with context, then
            those without context; otherwise in the order of scheduling.
        preempted_ids: requests that lost their blocks to this step.
        finished_ids: requests that ended since the last step was scheduled, in whichever way.
        num_tokens: new tokens over all requests.
    """

    scheduled: tuple[ScheduledRequest, ...]
    preempted_ids: tuple[str, ...]
    finished_ids: tuple[str, ...]
    num_tokens: int

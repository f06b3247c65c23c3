"""Entry: one request in the engine, and what has come of it so far.

In: a request, its sampling state and its text, which the engine makes grow. Out: what is new since
somebody last took it, and everything so far.
"""

from __future__ import annotations

from attnkit.runner.detokenizer import TextStream
from attnkit.runner.output import CompletionOutput, RequestOutput, StreamOutput
from attnkit.runner.request import FinishReason, Request
from attnkit.runner.sampler import Logprob, SamplingState


class Entry:
    """One request and what has come of it. Made by `Engine.add`; the engine alone changes it."""

    def __init__(
        self,
        request: Request,
        prompt: str | None,
        state: SamplingState,
        text: TextStream | None,
    ) -> None:
        self.request = request
        self.prompt = prompt
        self.state = state
        self.text = text
        self.logprobs: list[dict[int, Logprob]] | None = (
            None if request.sampling_params.logprobs is None else []
        )
        self.error: str | None = None
        self._num_taken = 0

    @property
    def finish_reason(self) -> str | None:
        """A stop string beats max_tokens reached at the same token."""
        if self.text is not None and self.text.stopped_by is not None:
            return FinishReason.STOP.value
        reason = self.request.finish_reason
        return None if reason is None else reason.value

    @property
    def has_news(self) -> bool:
        """Tokens, or an end, that `take` has not given out."""
        return self.request.is_finished or self.request.num_output_tokens > self._num_taken

    def take(self) -> StreamOutput:
        """What is new since the last call."""
        finished = self.request.is_finished
        new_ids = self.request.output_token_ids[self._num_taken :]
        self._num_taken += len(new_ids)
        text = "" if self.text is None else self.text.take(final=finished)
        return StreamOutput(
            text=text, token_ids=new_ids, finish_reason=self.finish_reason, output=self.output()
        )

    def output(self) -> RequestOutput:
        """Everything so far."""
        request = self.request
        text = "" if self.text is None else self.text.text(final=request.is_finished)
        error = self.error
        if error is None and request.error is not None:
            error = str(request.error)
        completion = CompletionOutput(
            text=text,
            token_ids=request.output_token_ids,
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason(),
            logprobs=None if self.logprobs is None else list(self.logprobs),
        )
        return RequestOutput(
            request_id=request.request_id,
            prompt=self.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=[completion],
            num_cached_tokens=request.num_cached_tokens,
            finished=request.is_finished,
            error=error,
        )

    def _stop_reason(self) -> int | str | None:
        if self.text is not None and self.text.stopped_by is not None:
            return self.text.stopped_by
        request = self.request
        if request.finish_reason is not FinishReason.STOP:
            return None
        last = request.token_ids[-1]
        return last if last in request.sampling_params.stop_token_ids else None

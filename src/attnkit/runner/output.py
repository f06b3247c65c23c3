"""What a caller gets back: the outcome of one request, whole or as a stream of increments.

In: the engine fills them. Out: `RequestOutput` with one `CompletionOutput`, named as people know
them from other engines.
"""

from __future__ import annotations

from dataclasses import dataclass

from attnkit.runner.sampler import Logprob


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One continuation of a prompt.

    Attributes:
        index: its number among the prompt's continuations; always 0.
        text: the continuation. Stop strings, end tokens and stop tokens are not part of it.
        token_ids: its tokens, a stop token included.
        finish_reason: "stop" (end token, stop token or stop string), "length" (max_tokens or the
            model's longest sequence), "abort" (cancelled), "error" (see `RequestOutput.error`); None
            while it runs.
        stop_reason: the stop string or stop token id; None for the model's own end token.
        logprobs: per token, token id -> Logprob; None unless asked for.
    """

    index: int = 0
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """One request's outcome.

    Attributes:
        request_id: the engine's name for it.
        prompt: the text, or None if token ids were given.
        prompt_token_ids: as the model saw them.
        outputs: one CompletionOutput.
        num_cached_tokens: prompt tokens that the prefix cache spared.
        finished: nothing will follow.
        error: what went wrong, where finish_reason is "error".
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    finished: bool = True
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOutput:
    """One increment of a streamed request.

    Attributes:
        text: new text; may be empty while a character or a possible stop string is incomplete.
        token_ids: new tokens.
        finish_reason: as in CompletionOutput; set on the last increment.
        output: everything so far; on the last increment the whole outcome.
    """

    text: str
    token_ids: list[int]
    finish_reason: str | None
    output: RequestOutput

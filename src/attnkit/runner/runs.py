"""Runs: what becomes of the requests of one call, from the first step to the last output.

In: an engine, and prompts as it takes them. Out: all outputs at the end, or one request's as they come.
Whoever leaves early, by Ctrl-C, an error or the end of a loop, has the requests stopped and their pages
given back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from attnkit.arguments import check_kind
from attnkit.errors import RequestError
from attnkit.runner.engine import Engine
from attnkit.runner.entry import Entry
from attnkit.runner.interrupt import Interrupted, interrupts_after
from attnkit.runner.output import RequestOutput, StreamOutput
from attnkit.runner.prompts import EnginePrompt
from attnkit.runner.sampling_params import SamplingParams

Progress: TypeAlias = Callable[[int, int, int], None]


def check_progress(progress: object) -> None:
    """A function, or None.

    Raises:
        ConfigurationError: it is neither.
    """
    wanted = "a function of three numbers"
    # To pyright Callable is no class; isinstance takes it.
    check_kind("progress", progress, Callable, wanted, optional=True)  # type: ignore[arg-type]


def add_all(
    engine: Engine, prompts: Sequence[EnginePrompt], params: Sequence[SamplingParams]
) -> list[Entry]:
    """All or none: the first that is refused takes the others out again before anything runs.

    Raises:
        RequestError: a prompt or its parameters are not allowed, by its index.
    """
    entries: list[Entry] = []
    for index, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
        try:
            entries.append(
                engine.add(
                    prompt.token_ids,
                    param,
                    prompt.text,
                    prompt.encoder_token_ids,
                    token_type_ids=prompt.token_type_ids,
                    pixel_values=prompt.pixel_values,
                    input_features=prompt.input_features,
                )
            )
        except RequestError as error:
            engine.abort(entries)
            raise RequestError(f"prompt {index}: {error}") from error
    return entries


def run(engine: Engine, entries: list[Entry], progress: Progress | None) -> list[RequestOutput]:
    """Step until all have ended.

    Args:
        progress: called after each step with the requests finished, their number, and the tokens
            generated so far.

    Raises:
        Interrupted: Ctrl-C, with what there was.
    """
    try:
        unfinished = list(entries)
        while unfinished:
            with interrupts_after():
                engine.step()
            unfinished = [e for e in unfinished if not e.request.is_finished]
            if progress is not None:
                num_tokens = sum(e.request.num_output_tokens for e in entries)
                progress(len(entries) - len(unfinished), len(entries), num_tokens)
    except KeyboardInterrupt:
        engine.abort(entries)
        raise Interrupted([e.output() for e in entries]) from None
    except BaseException:
        engine.abort(entries)
        raise
    return [entry.output() for entry in entries]


def iterate(engine: Engine, entry: Entry) -> Iterator[StreamOutput]:
    """Step until this one has news, and give them out, to its end.

    Raises:
        Interrupted: Ctrl-C, with what there was.
    """
    try:
        while True:
            with interrupts_after():
                piece = engine.advance(entry)
            yield piece
            if piece.finish_reason is not None:
                return
    except KeyboardInterrupt:
        engine.abort([entry])
        raise Interrupted([entry.output()]) from None
    finally:
        engine.abort([entry])

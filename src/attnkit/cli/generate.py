"""`attnkit generate`: text from a model.

In: prompts as arguments, lines of a file, or stdin. Out: on stdout the text, streamed for one prompt,
or JSON; on stderr the chosen backend with the reasons, progress for many prompts, and tokens per second.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnkit.errors import ModelError, RequestError

if TYPE_CHECKING:
    from attnkit.runner.llm import LLM
    from attnkit.runner.output import RequestOutput
    from attnkit.runner.runs import Progress
    from attnkit.runner.sampling_params import SamplingParams

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells count it: 128 plus the signal's number."""


def generate(
    prompts: Annotated[
        list[str] | None,
        typer.Argument(help="Texts to continue or answer; - reads stdin as one text."),
    ] = None,
    file: Annotated[
        str | None, typer.Option(help="Read prompts from a file, one a line; - is stdin.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="A directory, Hugging Face id or GGUF file; left out: SmolLM2-135M."),
    ] = None,
    backend: Annotated[str, typer.Option(help="An attention backend, or auto.")] = "auto",
    dtype: Annotated[
        str, typer.Option(help="auto, float32, bfloat16 or float16; auto: the checkpoint's.")
    ] = "auto",
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda; left out: a GPU if there is one.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens per prompt.")] = 128,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Choose among so many tokens; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Choose among this much probability.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Leave out less than this part of the best.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="1: none.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Makes random choices repeatable.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="A string that ends the text; may be repeated.")
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on after the model's end token.")
    ] = False,
    logprobs: Annotated[
        int | None, typer.Option(help="With --json: so many likeliest tokens at each place.")
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--raw", help="Use the chat template, or not; left out: if any."),
    ] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens in a page.")] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(help="Tokens in a step; longer prompts go in chunks.")
    ] = None,
    index_cache_dtype: Annotated[
        str,
        typer.Option(
            help="Keys of a model's indexers (DeepSeek-V3.2): fp8, a dtype, or auto, the model's."
        ),
    ] = "auto",
    weights: Annotated[
        str | None,
        typer.Option(
            help="Keep weights in codes, on a CPU: int8 (half the memory) or int4 (one stream)."
        ),
    ] = None,
    compile: Annotated[
        bool,
        typer.Option(
            "--compile", help="Let torch.compile fuse the model: slow start, faster steps."
        ),
    ] = False,
    kv_load: Annotated[
        str | None,
        typer.Option(help="Take a prompt's beginning from this file instead of computing it."),
    ] = None,
    kv_save: Annotated[
        str | None,
        typer.Option(help="Write the keys and values of the prompt and its text to this file."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Continue or answer prompts with a model."""
    from attnkit.runner.interrupt import Interrupted
    from attnkit.runner.kv_file import SafetensorsFile
    from attnkit.runner.llm import LLM
    from attnkit.runner.sampling_params import SamplingParams

    texts = _read_prompts(prompts or [], file)
    if kv_save is not None and len(texts) > 1:
        raise RequestError(f"--kv-save keeps one prompt, and there are {len(texts)}; give one")
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=stop or (),
        ignore_eos=ignore_eos,
        logprobs=logprobs,
    )
    if logprobs is not None and not as_json:
        raise RequestError("--logprobs are printed with --json alone; give both, or neither")
    source, target = (None if p is None else SafetensorsFile(p) for p in (kv_load, kv_save))
    if source is not None:
        source.check_readable()
    if target is not None:
        target.check_writable()
    llm = LLM(
        model,
        dtype=dtype,
        backend=backend,
        device=device,
        block_size=block_size,
        max_num_batched_tokens=max_num_batched_tokens,
        kv_connector=kv_load is not None or kv_save is not None,
        index_cache_dtype=index_cache_dtype,
        weights=weights,
        compile=compile,
        notice=_say,
    )
    if chat and not llm.has_chat_template:
        raise ModelError(f"{llm.name} has no chat template; use --raw, or another model")
    packed = llm.engine.model
    kind = str(llm.dtype).removeprefix("torch.")
    _say(f"{llm.name}, {kind}, on {packed.device}, pages of {packed.block_size} tokens")
    _say(llm.explain())
    if source is not None:
        _say(f"{llm.load_kv(source)} tokens loaded from {kv_load}")
    encoded = _encode(llm, texts, llm.has_chat_template if chat is None else chat)
    if target is not None:
        _check_saved(len(encoded[0]), max_tokens, llm.engine.manager.hit_unit)
    start = time.perf_counter()
    interrupted = False
    try:
        if len(texts) == 1 and not as_json:
            outputs = [_stream(llm, encoded[0], params)]
        else:
            with _progress(len(texts)) as report:
                outputs = llm.generate(encoded, params, progress=report)
    except Interrupted as stopped:
        interrupted = True
        outputs = stopped.outputs
    seconds = time.perf_counter() - start
    if as_json:
        typer.echo(json.dumps(_document(llm, texts, outputs, seconds), ensure_ascii=False))
    elif len(texts) == 1:
        typer.echo()
    else:
        for text, output in zip(texts, outputs, strict=True):
            typer.echo(f"> {text}\n{output.outputs[0].text}\n")
    _say(_summary(outputs, seconds) + (", interrupted" if interrupted else ""))
    if target is not None:
        (output,) = outputs
        token_ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        _say(f"{llm.save_kv(target, token_ids)} tokens saved to {kv_save}")
    errors = [output.error for output in outputs if output.error is not None]
    for error in errors:
        _say(f"error: {error}")
    raise typer.Exit(INTERRUPTED if interrupted else 1 if errors else 0)


def _read_prompts(prompts: list[str], file: str | None) -> list[str]:
    if prompts.count("-") + (file == "-") > 1:
        raise RequestError("stdin was asked for more than once; give - once")
    texts = [sys.stdin.read() if prompt == "-" else prompt for prompt in prompts]
    if file is not None:
        try:
            lines = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(
                f"--file {file} cannot be read: {error}; give a text file"
            ) from error
        texts += [line for line in lines.splitlines() if line.strip()]
    if not texts:
        raise RequestError("there is no prompt; give texts, --file, or - for stdin")
    return texts


def _check_saved(num_prompt_tokens: int, max_tokens: int, page: int) -> None:
    """Whole pages are saved; the last token that is generated is never computed on."""
    if num_prompt_tokens + max_tokens - 1 < page:
        raise RequestError(
            f"--kv-save keeps whole pages of {page} tokens, and {num_prompt_tokens} of the prompt with "
            f"--max-tokens {max_tokens} fill none; give a longer prompt, more tokens or a smaller "
            "--block-size"
        )


def _encode(llm: LLM, texts: list[str], chat: bool) -> list[list[int]]:
    if not chat:
        return [llm.tokenizer.encode(text) for text in texts]
    return [llm.encode_chat([{"role": "user", "content": text}])[1] for text in texts]


def _stream(llm: LLM, ids: list[int], params: SamplingParams) -> RequestOutput:
    """Print increments as they come; returns the whole."""
    piece = None
    for piece in llm.iterate(ids, params):
        typer.echo(piece.text, nl=False)
        sys.stdout.flush()
    assert piece is not None, "a stream has a last increment"
    return piece.output


@contextmanager
def _progress(num_prompts: int) -> Iterator[Progress | None]:
    """A bar on stderr where that is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("prompts"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tokens]} tokens"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=num_prompts, tokens=0)
        yield lambda done, _, tokens: bar.update(task, completed=done, tokens=tokens)


def _summary(outputs: list[RequestOutput], seconds: float) -> str:
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_cached = sum(output.num_cached_tokens for output in outputs)
    cached = f" ({num_cached} from the prefix cache)" if num_cached else ""
    return (
        f"{num_tokens} tokens in {seconds:.2f} s, {num_tokens / seconds:.1f} tokens/s, after "
        f"{num_prompt} prompt tokens{cached}"
    )


def _document(
    llm: LLM, texts: list[str], outputs: list[RequestOutput], seconds: float
) -> dict[str, Any]:
    return {
        "model": llm.name,
        "model_path": str(llm.model_path),
        "dtype": str(llm.dtype).removeprefix("torch."),
        "backends": {name: len(layers) for name, layers in llm.backends.items()},
        "seconds": seconds,
        "outputs": [_output(text, output) for text, output in zip(texts, outputs, strict=True)],
    }


def _output(text: str, output: RequestOutput) -> dict[str, Any]:
    done = output.outputs[0]
    found = {
        "prompt": text,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
        "text": done.text,
        "token_ids": done.token_ids,
        "finish_reason": done.finish_reason,
        "stop_reason": done.stop_reason,
        "error": output.error,
    }
    if done.logprobs is not None:
        found["logprobs"] = [
            [{"token_id": t, "logprob": p.logprob, "rank": p.rank} for t, p in place.items()]
            for place in done.logprobs
        ]
    return found


def _say(line: str) -> None:
    typer.echo(line, err=True)

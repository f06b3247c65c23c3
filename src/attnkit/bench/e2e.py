"""End to end: tokens a second of whole generations, engines in turns on the same prompts.

In: engines that turn prompts of token ids into as many greedy tokens as asked. Out: rows with the
median over rounds, and the share of tokens in which ours differ from the first rival's. Prefix caching
is off: a round that found its prompts computed by the round before would measure something else.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from attnkit.bench.prompts import PROMPTS
from attnkit.bench.record import Row
from attnkit.bench.session import with_ratios
from attnkit.bench.timing import Timing
from attnkit.bench.workloads import DTYPES
from attnkit.errors import ConfigurationError

if TYPE_CHECKING:
    from attnkit.runner.llm import LLM

GROUP = "e2e"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextWorkload:
    """Prompts to be continued at once.

    Attributes:
        num_prompts: of `PROMPTS`, from the first.
        num_prompt_tokens: random tokens in each prompt instead, for any number of them; None: text.
        num_tokens: generated for each, end tokens ignored.
        dtype: of weights and activations: a key of `DTYPES`.
    """

    num_prompts: int = 16
    num_prompt_tokens: int | None = None
    num_tokens: int = 64
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigurationError(
                f"dtype {self.dtype!r} is not known; use one of {', '.join(DTYPES)}"
            )
        if self.num_prompt_tokens is None and self.num_prompts > len(PROMPTS):
            raise ConfigurationError(
                f"prompts={self.num_prompts} is not allowed; give at most {len(PROMPTS)}, or "
                "prompt_tokens=N for random ones"
            )
        for key in ("num_prompts", "num_prompt_tokens", "num_tokens"):
            if (value := getattr(self, key)) is not None and value < 1:
                raise ConfigurationError(f"{key} {value} is not allowed; give at least 1")

    @property
    def name(self) -> str:
        """What it is called in tables and records."""
        prompt = "" if self.num_prompt_tokens is None else f" of {self.num_prompt_tokens}"
        return f"e2e {self.num_prompts} prompts{prompt} x {self.num_tokens} tokens {self.dtype}"

    @classmethod
    def parse(cls, text: str) -> TextWorkload:
        """From `prompts=16,tokens=64,dtype=bfloat16,prompt_tokens=1024`; what is left out has its
        default.

        Raises:
            ConfigurationError: a key is not known or a value not allowed.
        """
        given: dict[str, Any] = {}
        for part in filter(None, (p.strip() for p in text.split(","))):
            key, _, value = part.partition("=")
            if key == "dtype":
                given["dtype"] = value
            elif key in ("prompts", "prompt_tokens", "tokens") and value.isdecimal():
                given[f"num_{key}"] = int(value)
            else:
                raise ConfigurationError(
                    f"shape of e2e has no {part!r}; use prompts=N, tokens=N, dtype=NAME, "
                    "prompt_tokens=N"
                )
        return cls(**given)


class TextEngine(Protocol):
    """What continues prompts."""

    @property
    def name(self) -> str: ...

    @property
    def is_rival(self) -> bool: ...

    @property
    def note(self) -> str: ...

    def generate(self, prompts: Sequence[list[int]], num_tokens: int) -> list[list[int]]:
        """Exactly `num_tokens` greedy tokens after each prompt, end tokens ignored."""
        ...


class AttnkitEngine:
    """attnkit's runner."""

    is_rival = False

    def __init__(
        self,
        model: str | os.PathLike[str] | None,
        dtype: str,
        backend: str = "auto",
        device: torch.device | str = "cpu",
        *,
        compile: bool = False,
        weights: str | None = None,
    ) -> None:
        from attnkit.runner.llm import LLM

        self.llm = LLM(
            model,
            dtype=dtype,
            backend=backend,
            device=device,
            enable_prefix_caching=False,
            compile=compile,
            weights=weights,
        )
        chosen = "+".join(self.llm.backends)
        words = ("attnkit", backend, weights, "compiled" if compile else None)
        self.name = " ".join(word for word in words if word)
        self.note = f"backend {chosen}"

    def generate(self, prompts: Sequence[list[int]], num_tokens: int) -> list[list[int]]:
        from attnkit.runner.sampling_params import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        return [output.outputs[0].token_ids for output in self.llm.generate(list(prompts), params)]


class TransformersEngine:
    """transformers' own `generate` on one padded batch, as people write it."""

    is_rival = True
    name = "transformers"

    def __init__(self, model: Any) -> None:
        """
        Args:
            model: a causal language model with an attention of transformers' own.
        """
        self.model = model.eval()
        self.note = f"padded generate, {model.config._attn_implementation}"

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], dtype: str, device: torch.device | str = "cpu"
    ) -> TransformersEngine:
        """From a directory with a checkpoint."""
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=DTYPES[dtype])
        return cls(model.to(device))

    def generate(self, prompts: Sequence[list[int]], num_tokens: int) -> list[list[int]]:
        width = max(len(prompt) for prompt in prompts)
        ids = torch.zeros(len(prompts), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        device = self.model.device
        with torch.inference_mode():
            out = self.model.generate(
                input_ids=ids.to(device),
                attention_mask=mask.to(device),
                do_sample=False,
                temperature=None,
                top_p=None,
                top_k=None,
                min_new_tokens=num_tokens,
                max_new_tokens=num_tokens,
                pad_token_id=0,
            )
        return out[:, width:].tolist()


def encode_prompts(llm: LLM, workload: TextWorkload) -> list[list[int]]:
    """The workload's prompts as token ids.

    Texts go through the chat template where the model has one.
    """
    if workload.num_prompt_tokens is not None:
        return random_prompts(
            workload.num_prompts, workload.num_prompt_tokens, llm.engine.model.vocab_size
        )
    texts = PROMPTS[: workload.num_prompts]
    if not llm.has_chat_template:
        return [llm.tokenizer.encode(text) for text in texts]
    return [llm.encode_chat([{"role": "user", "content": text}])[1] for text in texts]


def random_prompts(num_prompts: int, num_tokens: int, vocab_size: int) -> list[list[int]]:
    """Random token ids, without the first 100, where control tokens stand."""
    generator = torch.Generator().manual_seed(0)
    shape = (num_prompts, num_tokens)
    return torch.randint(min(100, vocab_size // 2), vocab_size, shape, generator=generator).tolist()


def measure(
    engines: Sequence[TextEngine],
    prompts: Sequence[list[int]],
    workload: TextWorkload,
    rounds: int,
    progress: Callable[[str], None] = lambda line: None,
    pause_s: float = 0.0,
) -> list[Row]:
    """Let engines generate in turns; the first round warms up and counts for nothing.

    Args:
        engines: ours and rivals.
        prompts: token ids.
        workload: what it is called, and how many tokens are wanted.
        rounds: that count.
        progress: called with a line after each generation.
        pause_s: between turns, for engines in other processes whose idle threads go on spinning.

    Raises:
        ConfigurationError: an engine returned another number of tokens than asked.
    """
    seconds: dict[str, list[float]] = {engine.name: [] for engine in engines}
    texts: dict[str, list[list[int]]] = {}
    for turn in range(rounds + 1):
        for engine in engines:
            time.sleep(pause_s)
            start = time.perf_counter()
            out = engine.generate(prompts, workload.num_tokens)
            elapsed = time.perf_counter() - start
            lengths = {len(tokens) for tokens in out}
            if len(out) != len(prompts) or lengths != {workload.num_tokens}:
                raise ConfigurationError(
                    f"{engine.name} returned {len(out)} outputs of {sorted(lengths)} tokens, not "
                    f"{len(prompts)} of {workload.num_tokens}; it cannot be compared"
                )
            texts[engine.name] = out
            total = len(out) * workload.num_tokens
            progress(f"  round {turn} {engine.name}: {total / elapsed:.1f} tokens/s")
            if turn:
                seconds[engine.name].append(elapsed)

    rival = next((engine.name for engine in engines if engine.is_rival), None)
    rows = []
    for engine in engines:
        timing = Timing.of([1e6 * s for s in seconds[engine.name]])
        row = Row(
            group=GROUP,
            workload=workload.name,
            contender=engine.name,
            is_rival=engine.is_rival,
            mode="wall",
            note=engine.note,
            median_us=timing.median_us,
            p10_us=timing.p10_us,
            p90_us=timing.p90_us,
            num_samples=timing.num_samples,
            tokens_per_s=len(prompts) * workload.num_tokens / timing.median_us * 1e6,
        )
        if rival is not None and engine.name != rival:
            row = replace(row, error=_difference(texts[engine.name], texts[rival]))
        rows.append(row)
    return with_ratios(rows)


def _difference(ours: Sequence[list[int]], theirs: Sequence[list[int]]) -> float:
    """Share of places at which tokens differ."""
    pairs = [
        (a, b)
        for left, right in zip(ours, theirs, strict=True)
        for a, b in zip(left, right, strict=True)
    ]
    return sum(a != b for a, b in pairs) / len(pairs)

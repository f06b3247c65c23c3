"""SamplingParams: how the tokens of one request are chosen and when it stops.

In: what a user asks for. Out: a frozen, checked value. Names and defaults are those that serving
engines share.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from attnkit.arguments import check_flags, is_count, is_number
from attnkit.errors import RequestError

_ABOVE_ZERO = math.ulp(0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Choices of one request.

    Attributes:
        max_tokens: most tokens to generate, at least 1.
        temperature: divides the logits; 0: always the likeliest token.
        top_p: choose among the likeliest tokens that together reach this probability; 1: among all.
        top_k: choose among this many likeliest tokens; 0 or -1: among all.
        min_p: leave out tokens less likely than this part of the likeliest; 0: none.
        repetition_penalty: above 1, tokens of the prompt and of the output become less likely.
        seed: makes the choices of this request repeatable in any batch; None: they differ each time.
        stop: strings that end the output and are cut off from it.
        stop_token_ids: tokens that end the output, beside the model's own.
        ignore_eos: the model's own end tokens do not end the output; `stop_token_ids` still do.
        logprobs: report so many likeliest tokens, and the chosen one, with log probabilities at each
            place; 0: the chosen one alone; None: nothing.
        n: outputs per prompt; only 1 is there.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int = 1

    def __post_init__(self) -> None:
        """Check everything; `stop` and `stop_token_ids` become tuples, numpy's numbers Python's.

        Raises:
            RequestError: a value is not allowed.
        """
        stop = (self.stop,) if isinstance(self.stop, str) else self._many("stop", "strings")
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", self._many("stop_token_ids", "token ids"))
        check_flags({"ignore_eos": self.ignore_eos}, error=RequestError)
        self._check_int("max_tokens", 1, "give at least 1")
        self._check_number("temperature", 0.0, math.inf, "give 0 for greedy choice, or more")
        self._check_number(
            "top_p", _ABOVE_ZERO, 1.0, "give more than 0 and at most 1; 1 turns it off"
        )
        self._check_int("top_k", -1, "give at least 1, or 0 to turn it off")
        self._check_number("min_p", 0.0, 1.0, "give 0 to 1; 0 turns it off")
        self._check_number(
            "repetition_penalty", _ABOVE_ZERO, math.inf, "give more than 0; 1 turns it off"
        )
        if self.seed is not None:
            self._check_int("seed", -(2**63), "give a 64-bit integer or None")
            if self.seed >= 2**64:
                raise RequestError(f"seed {self.seed} has more than 64 bits; give a smaller one")
        if self.logprobs is not None:
            self._check_int("logprobs", 0, "give at least 0, or None for no log probabilities")
        self._check_int("n", 1, "give 1")
        if self.n != 1:
            raise RequestError(
                f"n {self.n} is not supported; give 1 and submit the prompt {self.n} times"
            )
        for text in stop:
            if not isinstance(text, str) or not text:
                raise RequestError(f"stop {text!r} is not allowed; give non-empty strings")
        for token_id in self.stop_token_ids:
            if not is_count(token_id) or token_id < 0:
                raise RequestError(
                    f"stop_token_ids {token_id!r} is not allowed; give token ids >= 0"
                )

    @property
    def is_greedy(self) -> bool:
        """The likeliest token is always chosen; seed, top_p, top_k and min_p do not matter."""
        return self.temperature == 0

    def _many(self, name: str, what: str) -> tuple[Any, ...]:
        values = getattr(self, name)
        if values is not None and (isinstance(values, str) or not isinstance(values, Iterable)):
            raise RequestError(f"{name} {values!r} is not allowed; give a list of {what}")
        return () if values is None else tuple(values)

    def _check_int(self, name: str, lowest: int, hint: str) -> None:
        value = getattr(self, name)
        if not is_count(value) or value < lowest:
            raise RequestError(f"{name} {value!r} is not allowed; {hint}")
        object.__setattr__(self, name, int(value))

    def _check_number(self, name: str, lowest: float, highest: float, hint: str) -> None:
        value = getattr(self, name)
        if not is_number(value) or not lowest <= value <= highest:
            raise RequestError(f"{name} {value!r} is not allowed; {hint}")
        object.__setattr__(self, name, float(value))


def params_for(
    given: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    """Parameters for each of some prompts: one for all, or one each; None: the defaults.

    Raises:
        RequestError: these are none, or of another number.
    """
    if given is None:
        given = SamplingParams()
    if isinstance(given, SamplingParams):
        return [given] * num_prompts
    if not isinstance(given, Sequence) or not all(isinstance(p, SamplingParams) for p in given):
        raise RequestError(
            f"sampling_params is {given!r}; give SamplingParams, or one each in a list"
        )
    if len(given) != num_prompts:
        raise RequestError(
            f"{num_prompts} prompts but {len(given)} sampling_params were given; give one, or one each"
        )
    return list(given)

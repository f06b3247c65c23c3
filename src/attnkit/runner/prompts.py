"""What a user may give as a prompt, read into what the engine takes.

In: a text, token ids, or a mapping: what a model's processor makes of text and images or of sound, or
the two texts of an encoder-decoder. Out: `EnginePrompt`, or a RequestError that says what was given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, TypeAlias

import numpy as np
import torch

from attnkit.arguments import is_count
from attnkit.errors import RequestError

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EnginePrompt:
    """One prompt, in the words of `Engine.add`.

    Attributes:
        text: to be handed back; None: token ids were given.
        token_ids: of the decoder.
        encoder_token_ids: empty: the model has no encoder, or it reads sound.
        token_type_ids: of a PrefixLM, one for each token; None: none were given.
        pixel_values: of its images; None: there are none.
        input_features: of the recording that the encoder reads; None: it reads text.
    """

    text: str | None
    token_ids: list[int]
    encoder_token_ids: Sequence[int] = ()
    token_type_ids: list[int] | None = None
    pixel_values: Any = None
    input_features: Any = None


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt, or several.

    Raises:
        RequestError: these are none.
    """
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise RequestError(f"prompts is {prompts!r}; give a text, token ids, or a list of such")
    many: list[Any] = list(prompts)
    if many and all(is_count(p) for p in many):
        return [many]
    return many


def check_encodable(where: str, text: str) -> None:
    """Refuse half a surrogate pair, which no tokenizer reads.

    Raises:
        RequestError: there is one.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{where} is no text at character {error.start}, {text[error.start]!r}; decode it with "
            "errors='replace'"
        ) from error


def read_token_ids(where: str, token_ids: Any) -> list[int]:
    """A list, or an array or tensor, of whole numbers, as Python's own.

    Raises:
        RequestError: it is something else.
    """
    if isinstance(token_ids, torch.Tensor | np.ndarray) and token_ids.ndim == 1:
        token_ids = token_ids.tolist()
    if not isinstance(token_ids, Sequence) or isinstance(token_ids, str | bytes | bytearray):
        raise RequestError(
            f"{where} is {type(token_ids).__name__}; give a text or a list of token ids"
        )
    for token_id in token_ids:
        if not is_count(token_id):
            raise RequestError(f"{where} has {token_id!r} among its token ids; give whole numbers")
    return [int(token_id) for token_id in token_ids]


class PromptReader:
    """Reads prompts for one model."""

    def __init__(
        self,
        encode: Callable[[str, bool], list[int]],
        decoder_start: Sequence[int] | None,
        *,
        hears: bool = False,
    ) -> None:
        """
        Args:
            encode: text to token ids, with those that the tokenizer puts around a text or without.
            decoder_start: how the answers of an encoder-decoder begin; None: the model is a decoder.
            hears: its encoder reads sound.
        """
        self._encode = encode
        self._decoder_start = decoder_start
        self._hears = hears

    def read(self, index: int, prompt: Any) -> EnginePrompt:
        """
        Args:
            index: of the prompt among those given, for errors.

        Raises:
            RequestError: it is no prompt.
        """
        where = f"prompt {index}"
        if self._hears:
            return self._read_sound(where, prompt)
        if self._decoder_start is not None:
            return self._read_two_texts(where, prompt, self._decoder_start)
        if isinstance(prompt, Mapping):
            return _read_processed(where, prompt)
        text, ids = self._read_one(where, prompt)
        return EnginePrompt(text=text, token_ids=ids)

    def _read_two_texts(self, where: str, prompt: Any, start: Sequence[int]) -> EnginePrompt:
        if isinstance(prompt, Mapping):
            _check_keys(where, prompt, "encoder_prompt", ("decoder_prompt",), _TWO_TEXTS)
            start = self._read_start(where, prompt)
            where, prompt = f"{where}: encoder_prompt", prompt["encoder_prompt"]
        text, ids = self._read_one(where, prompt)
        return EnginePrompt(text=text, token_ids=list(start), encoder_token_ids=ids)

    def _read_sound(self, where: str, prompt: Any) -> EnginePrompt:
        if not isinstance(prompt, Mapping):
            raise RequestError(f"{where} is {type(prompt).__name__}; {_SOUND}")
        _check_keys(where, prompt, "input_features", ("decoder_prompt",), _SOUND)
        if prompt["input_features"] is None:
            raise RequestError(f"{where}: input_features is None; {_SOUND}")
        return EnginePrompt(
            text=None,
            token_ids=self._read_start(where, prompt),
            input_features=prompt["input_features"],
        )

    def _read_start(self, where: str, prompt: Mapping[str, Any]) -> list[int]:
        """How the answer begins: as the model says, and with a text behind that; or as token ids say."""
        where, given = f"{where}: decoder_prompt", prompt.get("decoder_prompt")
        assert self._decoder_start is not None
        if isinstance(given, str):
            check_encodable(where, given)
        if given is None or isinstance(given, str):
            return [*self._decoder_start, *(self._encode(given, False) if given else ())]
        return self._read_one(where, given)[1]

    def _read_one(self, where: str, prompt: Any) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            check_encodable(where, prompt)
            return prompt, self._encode(prompt, True)
        return None, read_token_ids(where, prompt)


_TWO_TEXTS = "give encoder_prompt and, if the answer's beginning is known, decoder_prompt"
_SOUND = (
    "give what the model's processor makes of one recording, input_features, and, if the answer's "
    "beginning is known (a language, a task), decoder_prompt"
)
_PROCESSED = (
    "give what the model's processor makes of one text: input_ids and, of a PrefixLM, token_type_ids "
    "and pixel_values"
)


def _read_processed(where: str, prompt: Mapping[str, Any]) -> EnginePrompt:
    """What a processor of transformers returns."""
    optional = ("attention_mask", "token_type_ids", "pixel_values")
    _check_keys(where, prompt, "input_ids", optional, _PROCESSED)
    mask = prompt.get("attention_mask")
    if mask is not None and not all(_row(where, "attention_mask", mask)):
        raise RequestError(f"{where} has an attention_mask that hides tokens; leave padding out")
    types = prompt.get("token_type_ids")
    return EnginePrompt(
        text=None,
        token_ids=read_token_ids(where, _row(where, "input_ids", prompt["input_ids"])),
        token_type_ids=None if types is None else _row(where, "token_type_ids", types),
        pixel_values=prompt.get("pixel_values"),
    )


def _check_keys(
    where: str, prompt: Mapping[str, Any], needed: str, optional: Sequence[str], advice: str
) -> None:
    if not {needed} <= prompt.keys() <= {needed, *optional}:
        given = ", ".join(map(str, prompt)) or "nothing"
        raise RequestError(f"{where} has {given}; {advice}")


def _row(where: str, name: str, values: Any) -> list[Any]:
    """A list, or a tensor or list of lists of one row, as a list."""
    if isinstance(values, torch.Tensor | np.ndarray):
        values = values.tolist()
    if isinstance(values, Sequence) and len(values) == 1 and isinstance(values[0], Sequence):
        values = values[0]
    if not isinstance(values, Sequence) or not all(isinstance(v, Real) for v in values):
        raise RequestError(f"{where}: {name} is not one row of integers; {_PROCESSED}")
    return list(values)

"""From token ids to text while they arrive, and the search for stop strings in it.

In: a tokenizer, and one request's output tokens one after another. Out: text that is final as far
as it is given out: half a character waits for its other bytes, and what may be the beginning of a
stop string waits until it is not. Nothing is decoded before somebody asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

_CONTEXT_TOKENS = 5
"""Prompt tokens decoded before the output: some tokenizers drop the space of a text's first word, and
give whole characters only together with the tokens before."""
_INCOMPLETE = "\ufffd"


class Tokenizer(Protocol):
    """What we use of transformers' tokenizers."""

    def decode(
        self,
        token_ids: list[int],
        *,
        skip_special_tokens: bool,
        clean_up_tokenization_spaces: bool,
    ) -> str: ...


class TextStream:
    """The output text of one request, without the tokenizer's special tokens.

    Tokens are decoded in a window that begins where text was last complete: `decode(window)` minus
    `decode(window without the new tokens)` is the new text. Decoding token by token would be wrong
    (characters of several tokens), decoding all each time slow.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        stop: Sequence[str] = (),
    ) -> None:
        """
        Args:
            prompt_token_ids: what the output continues.
            stop: strings that end the output, none of them empty.
        """
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._ids = list(prompt_token_ids[-_CONTEXT_TOKENS:])
        self._begin = 0  # of the window
        self._read = len(self._ids)  # tokens whose text is in _text
        self._text = ""
        self._searched = 0
        self._given = 0
        self.stopped_by: str | None = None

    def append(self, token_id: int) -> bool:
        """Take a token.

        Returns:
            True if a stop string is complete; the text then ends there and takes no more.
        """
        assert self.stopped_by is None, "appended after a stop string"
        self._ids.append(token_id)
        if not self._stop:
            return False
        self._advance(final=False)
        return self._search()

    def take(self, *, final: bool = False) -> str:
        """The text since the last call, as far as it can no longer change.

        Args:
            final: no token will follow: give everything.
        """
        self._advance(final)
        if final:
            self._search()
        end = len(self._text)
        if self._stop and not final and self.stopped_by is None:
            end -= self._possible_stop()
        piece = self._text[self._given : end]
        self._given = max(self._given, end)
        return piece

    def text(self, *, final: bool = True) -> str:
        """All text so far; with `final`, an incomplete last character shows as U+FFFD."""
        self._advance(final)
        if final:
            self._search()
        return self._text

    def _advance(self, final: bool) -> None:
        if self._read == len(self._ids) or self.stopped_by is not None:
            return
        before = self._decode(self._ids[self._begin : self._read])
        window = self._decode(self._ids[self._begin :])
        if not final and (window.endswith(_INCOMPLETE) or len(window) <= len(before)):
            return
        self._text += window[len(before) :]
        self._begin, self._read = self._read, len(self._ids)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def _search(self) -> bool:
        """Cut the text at the first stop string in what was not searched yet."""
        if self.stopped_by is not None or not self._stop:
            return self.stopped_by is not None
        begin = max(0, self._searched - max(len(s) for s in self._stop) + 1)
        found = [(at, s) for s in self._stop if (at := self._text.find(s, begin)) >= 0]
        self._searched = len(self._text)
        if not found:
            return False
        at, self.stopped_by = min(found)
        self._text = self._text[:at]
        return True

    def _possible_stop(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(self._text)), longest, -1):
                if self._text.endswith(stop[:size]):
                    longest = size
                    break
        return longest

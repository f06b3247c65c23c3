"""Conversations, and the text that a model's chat template makes of one.

In: messages, `{"role": ..., "content": ...}` each. Out: the prompt that the answer continues.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from attnkit.errors import RequestError
from attnkit.runner.prompts import check_encodable

Message: TypeAlias = Mapping[str, Any]


def as_conversations(
    messages: Sequence[Message] | Sequence[Sequence[Message]],
) -> list[Sequence[Message]]:
    """One conversation, or several.

    Raises:
        RequestError: these are none.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise RequestError(
            f"messages is {type(messages).__name__}; give a list of {{'role': ..., 'content': ...}}, or "
            "a list of such lists"
        )
    many: Any = [messages] if messages and isinstance(messages[0], Mapping) else messages
    return list(many)


def render(tokenizer: Any, name: str, messages: Sequence[Message]) -> str:
    """A conversation as the text that its answer continues.

    Args:
        tokenizer: transformers', with a chat template.
        name: of the model, for errors.

    Raises:
        RequestError: the template refuses these messages.
    """
    from jinja2 import TemplateError

    try:
        text = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=False
        )
    except (TemplateError, KeyError, TypeError, ValueError) as error:
        raise RequestError(
            f"the chat template of {name} refuses these messages: {error}; give a list of "
            "{'role': ..., 'content': ...}"
        ) from error
    check_encodable("the conversation", text)
    return text

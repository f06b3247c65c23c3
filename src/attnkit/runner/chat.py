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


def check_messages(messages: Any) -> None:
    """Refuse what templates make a text of that nobody meant: most print what they do not know.

    Raises:
        RequestError: this is no conversation, or a message says something else than a text.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise RequestError(
            f"a conversation is {type(messages).__name__}; give a list of "
            "{'role': ..., 'content': ...}"
        )
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(
                f"message {place} of a conversation is {type(message).__name__}; give "
                "{'role': ..., 'content': ...}"
            )
        # A call of a tool is a message without a text.
        may_lack = message.keys() - {"role", "content"}
        for key in ("role", "content"):
            said = message.get(key)
            if not isinstance(said, str) and not (said is None and key == "content" and may_lack):
                what = "is missing" if said is None else f"is {type(said).__name__}"
                raise RequestError(
                    f"{key} of message {place} of a conversation {what}; give a text"
                )


def render(tokenizer: Any, name: str, messages: Sequence[Message]) -> str:
    """A conversation as the text that its answer continues.

    Args:
        tokenizer: transformers', with a chat template.
        name: of the model, for errors.

    Raises:
        RequestError: these are no messages, or the template refuses them.
    """
    from jinja2 import TemplateError

    check_messages(messages)
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

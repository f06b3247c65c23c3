"""Backends like others with something changed: how wrappers change a plan, or an answer, not a kernel.

In: a backend class and what differs. Out: a class in whose name layers form a group of their own.
"""

from __future__ import annotations

from typing import Any

from attnkit.contract.backend import AttentionBackend
from attnkit.contract.builder import AttentionMetadataBuilder


def subclass_attention_backend(
    name_prefix: str,
    attention_backend_cls: type[AttentionBackend],
    builder_cls: type[AttentionMetadataBuilder],
) -> type[AttentionBackend]:
    """A backend like another with its own builder: how wrappers change a plan, not a kernel.

    Args:
        name_prefix: goes before the class name, so that wrapped layers form their own group; the
            module stays that of the wrapped class, so wraps of equally named classes stay apart.
        attention_backend_cls: what to wrap; everything else, `get_name` included, is inherited.
        builder_cls: what `get_builder_cls` of the new class returns.
    """
    return subclass_attention_backend_with_overrides(
        name_prefix, attention_backend_cls, {"get_builder_cls": staticmethod(lambda: builder_cls)}
    )


def subclass_attention_backend_with_overrides(
    name_prefix: str,
    attention_backend_cls: type[AttentionBackend],
    overrides: dict[str, Any],
) -> type[AttentionBackend]:
    """A backend like another with other methods, as `subclass_attention_backend` makes one.

    Args:
        name_prefix, attention_backend_cls: as there.
        overrides: attribute -> `staticmethod`, `classmethod` or value of the new class.
    """
    return type(
        name_prefix + attention_backend_cls.__name__,
        (attention_backend_cls,),
        {
            "__module__": attention_backend_cls.__module__,
            "__doc__": attention_backend_cls.__doc__,
            **overrides,
        },
    )

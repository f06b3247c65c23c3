"""Taking a transformers model's attention over, and giving it back.

In: a model. Out: what its attention layers are (`probe`), its attention calls under a name of ours
(`set_attention`), and its own attention again, also after an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from attnkit.errors import ModelError
from attnkit.paged_layer import PagedLayer
from attnkit.runner import hook, older_models
from attnkit.runner.discovery import LayerFacts, discover_layers


def probe(model: Any, max_model_len: int, *, encoder: bool = False) -> tuple[LayerFacts, ...]:
    """Make our attention functions known and run `discover_layers`; the model keeps `PROBE`.

    Raises:
        ModelError: the model cannot be driven.
    """
    hook.register()
    set_attention(model, hook.PROBE)
    return discover_layers(model, max_model_len, encoder=encoder)


_OTHER_SENSES = ("vision_config", "audio_config")


def set_attention(model: Any, name: str) -> None:
    """Let the model call the attention function registered as `name`, one of `hook.FUNCTIONS`; what
    turns images or sound into vectors keeps its own."""
    if older_models.call_function(model, hook.FUNCTIONS[name]):
        model.config._attn_implementation = name  # of which its masks depend
        return
    senses = [c for n in _OTHER_SENSES if (c := getattr(model.config, n, None)) is not None]
    own = [config._attn_implementation for config in senses]
    try:
        model.set_attn_implementation(name)
    except (AttributeError, ValueError) as error:
        raise ModelError(
            f"{type(model).__name__} does not let its attention be replaced ({error}); use a model of "
            "transformers' own classes"
        ) from error
    for config, former in zip(senses, own, strict=True):
        config._attn_implementation = former


def attention_names(model: Any) -> list[tuple[Any, Any]]:
    """Each configuration in the model, outer ones first, and the attention it names."""
    configs: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    return [(c, c._attn_implementation) for c in configs if hasattr(c, "_attn_implementation")]


def restore_attention(model: Any, names: list[tuple[Any, Any]]) -> None:
    """Undo `set_attention`, given what `attention_names` said before."""
    older_models.call_own(model)
    for config, name in names:
        config._attn_implementation = name


@contextmanager
def left_alone_on_error(model: Any) -> Iterator[None]:
    """Where the body raises, the model has its own attention again."""
    names = attention_names(model)
    try:
        yield
    except BaseException:
        restore_attention(model, names)
        raise


def explain_layers(layers: Mapping[str, PagedLayer]) -> str:
    """Which backend runs which layers, and why not the others."""
    kinds: dict[str, list[str]] = {}
    for name, layer in layers.items():
        kinds.setdefault(str(layer.selection), []).append(name)
    return "\n".join(f"{count_names(names)}: {record}" for record, names in kinds.items())


def count_names(names: Sequence[str]) -> str:
    """The first of some layers, and how many more."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more layers"

"""Images in prompts of PrefixLMs: the vectors that stand for image tokens, and the ranges around them.

In: a prompt as the model's processor makes it: token ids, `token_type_ids`, `pixel_values`. Out:
`ImageTokens`, computed by the model's own vision tower and projection when the prompt is taken, and the
prompt's `TokenRange`s, whose keys say which image they hold.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from attnkit.errors import RequestError
from attnkit.kvcache.tables import TokenRange
from attnkit.runner.image_tokens import ImageTokens

if TYPE_CHECKING:
    from attnkit.runner.model import PackedModel


def embed_images(packed: PackedModel, token_ids: Sequence[int], pixel_values: Any) -> ImageTokens:
    """Run the vision tower.

    Args:
        token_ids: of the prompt; its image tokens are where the vectors go.
        pixel_values: float (num_images, channels, height, width) of all its images, in order.

    Raises:
        RequestError: the model takes no images so, or makes more or fewer vectors of them than the
            prompt has image tokens.
    """
    model = packed.model
    kind, image_token = type(model).__name__, getattr(model.config, "image_token_id", None)
    sees = image_token is not None and hasattr(model, "get_image_features")
    if packed.token_types is None or not sees:
        raise RequestError(
            "pixel_values was given, and attnkit puts images into PrefixLMs alone (PaliGemma, Gemma 3), "
            f"which {kind} is not; give text"
        )
    try:
        pixels = torch.as_tensor(
            pixel_values if isinstance(pixel_values, torch.Tensor) else np.asarray(pixel_values)
        )
        parameter = next(model.parameters())
        with torch.inference_mode():
            outcome = model.get_image_features(pixels.to(parameter.device, parameter.dtype))
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise RequestError(
            f"{kind} cannot read pixel_values: {error}; give what its processor makes"
        ) from error
    vectors = getattr(outcome, "pooler_output", outcome).flatten(0, -2)
    positions = tuple(i for i, token in enumerate(token_ids) if token == image_token)
    if len(positions) != len(vectors):
        raise RequestError(
            f"the prompt has {len(positions)} image tokens (id {image_token}), and pixel_values of "
            f"shape {tuple(pixels.shape)} make {len(vectors)}; give both as the model's processor does"
        )
    return ImageTokens(positions, vectors)


def ranges_of_prompt(
    packed: PackedModel,
    token_ids: Sequence[int],
    token_type_ids: Sequence[int] | None,
    images: ImageTokens | None,
) -> tuple[TokenRange, ...]:
    """Which tokens of a prompt see each other in both directions.

    Args:
        token_type_ids: one for each token; None: all tokens see those before them alone.

    Raises:
        RequestError: the types do not fit the prompt or the model, an image token is in no range, the
            chosen backend does not do ranges, or one is longer than the model's sliding window.
    """
    if token_type_ids is None:
        if images is not None:
            raise RequestError(
                "pixel_values was given without token_type_ids, which say what sees an image in both "
                "directions; give both as the model's processor makes them"
            )
        return ()
    if packed.token_types is None:
        raise RequestError(
            f"token_type_ids was given, and {type(packed.model).__name__} is no PrefixLM, whose tokens "
            "see each other by type; leave it out"
        )
    if len(token_type_ids) != len(token_ids):
        raise RequestError(
            f"token_type_ids has {len(token_type_ids)} entries for {len(token_ids)} tokens; give one "
            "each"
        )
    spans = packed.token_types.ranges(token_type_ids)
    if spans and not packed.takes_ranges:
        backend = next(iter(packed.layers.values())).selection.name
        raise RequestError(
            f"token_type_ids asks for tokens that see each other in both directions, which backend "
            f"{backend} does not do; choose another, or leave the choice to auto"
        )
    windows = [w for layer in packed.layers.values() if (w := layer.sliding_window) is not None]
    for first, last in spans:
        if last - first >= min(windows, default=len(token_ids)):
            raise RequestError(
                f"tokens {first} to {last} see each other in both directions and are more than a "
                f"sliding window of {min(windows)}, where models differ in what they see; shorten the "
                "range"
            )
    marked = images.positions if images is not None else ()
    outside = [p for p in marked if not any(first <= p <= last for first, last in spans)]
    if outside:
        raise RequestError(
            f"the image token at position {outside[0]} is of a type that sees what is before it alone; "
            "give token_type_ids as the model's processor makes them"
        )
    return tuple(
        TokenRange(first, last, (tuple(token_ids[first : last + 1]), _digest(images, first, last)))
        for first, last in spans
    )


def _digest(images: ImageTokens | None, first: int, last: int) -> bytes | None:
    """Of the vectors in a range; None: there are none."""
    inside = None if images is None else images.between(first, last + 1)
    if inside is None:
        return None
    vectors = inside.vectors.cpu().contiguous()
    return hashlib.sha256(vectors.view(torch.uint8).numpy().data).digest()

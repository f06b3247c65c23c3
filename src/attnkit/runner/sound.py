"""Sound in the place of an encoder's text: Whisper.

In: `input_features`, as the model's processor makes them of one recording. Out: `Sound`, and what the
model's own encoder makes of those that begin in a step. Its convolutions mix frames, so each recording
is a row of its own, always of the model's one length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from attnkit.errors import RequestError


@dataclass(frozen=True, slots=True, eq=False)
class Sound:
    """One recording.

    Attributes:
        features: float (num_mel_bins, num_frames), on the model's device.
        num_tokens: vectors that the encoder makes of them.
    """

    features: torch.Tensor
    num_tokens: int


def reads_sound(config: Any) -> bool:
    """Whether the encoder of a model with this configuration reads sound of one length."""
    return config.model_type == "whisper"


def num_encoder_tokens(config: Any) -> int:
    """Vectors that such an encoder makes of every recording."""
    return int(config.max_source_positions)


def read_sound(model: Any, input_features: Any) -> Sound:
    """Check and move what a user gave.

    Args:
        input_features: (num_mel_bins, num_frames), or (1, num_mel_bins, num_frames).

    Raises:
        RequestError: it is something else, or the model reads no sound.
    """
    config, parameter = model.config, next(model.parameters())
    if not reads_sound(config):
        raise RequestError(
            "input_features was given, and attnkit reads sound with Whisper's models alone, which "
            f"{type(model).__name__} is not; give text"
        )
    wanted = _shape(model)
    is_tensor = isinstance(input_features, torch.Tensor)
    try:
        features = torch.as_tensor(input_features if is_tensor else np.asarray(input_features))
    except (TypeError, ValueError) as error:
        raise RequestError(f"input_features is no array ({error}); give one of {wanted}") from error
    if features.dim() == 3 and features.shape[0] == 1:
        features = features[0]
    if tuple(features.shape) != wanted or not features.is_floating_point():
        raise RequestError(
            f"input_features is {features.dtype} of shape {tuple(features.shape)}; give floats of shape "
            f"{wanted}, as the model's processor makes of one recording"
        )
    return Sound(features.to(parameter.device, parameter.dtype), num_encoder_tokens(config))


def encode(model: Any, features: torch.Tensor) -> torch.Tensor:
    """Run the encoder.

    Args:
        features: (num_recordings, num_mel_bins, num_frames).

    Returns:
        (1, num_recordings * num_tokens, hidden_size): one recording after the other.
    """
    return model.get_encoder()(features).last_hidden_state.flatten(0, 1)[None]


def silence(model: Any) -> torch.Tensor:
    """Features of one recording, to probe with."""
    return torch.zeros(1, *_shape(model), device=model.device, dtype=model.dtype)


def _shape(model: Any) -> tuple[int, int]:
    encoder = model.get_encoder()
    num_frames = (
        num_encoder_tokens(model.config) * encoder.conv1.stride[0] * encoder.conv2.stride[0]
    )
    return model.config.num_mel_bins, num_frames

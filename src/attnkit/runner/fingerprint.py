"""A name for a model's weights: whether keys and values that one process computed fit another's.

In: a loaded model. Out: a digest of its configuration and of samples of every weight.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

_NUM_SAMPLES = 64
_VOLATILE = ("transformers_version", "architectures", "dtype", "torch_dtype", "use_cache")


def model_fingerprint(model: Any) -> str:
    """Equal for equal weights and configurations, wherever they were loaded from.

    Of each weight `_NUM_SAMPLES` values at even distances are read: training changes nearly all of them.
    """
    config = {
        key: value
        for key, value in model.config.to_dict().items()
        if not key.startswith("_") and key not in _VOLATILE
    }
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, weight in sorted(model.state_dict().items()):
        flat = weight.detach().flatten()
        step = max(1, flat.numel() // _NUM_SAMPLES)
        values = flat[::step][:_NUM_SAMPLES].cpu().contiguous()
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        digest.update(values.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()

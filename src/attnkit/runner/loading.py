"""Weights and tokenizer of a checkpoint, through transformers.

In: a `Checkpoint`, a dtype and a device. Out: transformers' own objects, or a ModelError that says what
is wrong with the files. Code that comes with a checkpoint is never run.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from attnkit.errors import ConfigurationError, ModelError
from attnkit.runner.checkpoint import Checkpoint, check_loading_report
from attnkit.runner.sound import reads_sound

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(
    checkpoint: Checkpoint, dtype: str | torch.dtype, device: torch.device
) -> tuple[Any, torch.dtype]:
    """Load a checkpoint's weights.

    Args:
        dtype: a name of `DTYPES`, the dtype itself, or "auto": the checkpoint's own, but float32
            for float16 on a CPU, which has no fast float16 arithmetic.
        device: where to.

    Returns:
        The model and its dtype.

    Raises:
        ConfigurationError: the dtype is not known.
        ModelError: it generates no text, transformers cannot load it, or weights are missing.
    """
    auto, kind = find_auto_class(checkpoint)
    return _load(auto, kind, checkpoint, dtype, device)


def check_dtype_name(dtype: str | torch.dtype) -> None:
    """A dtype as `load_model` takes it.

    Raises:
        ConfigurationError: it is none that models run in.
    """
    is_kind = isinstance(dtype, str | torch.dtype)
    if not is_kind or dtype not in ("auto", *DTYPES, *DTYPES.values()):
        raise ConfigurationError(
            f"dtype {dtype!r} is not known; use auto, {', '.join(DTYPES)} or a torch.dtype of these"
        )


def load_encoder(
    checkpoint: Checkpoint, dtype: str | torch.dtype, device: torch.device
) -> tuple[Any, torch.dtype]:
    """Load an encoder without a head; arguments, result and errors as in `load_model`.

    A pooler may be missing: many checkpoints have none, and hidden states do not pass through it.
    """
    import transformers

    config = load_config(checkpoint)
    if config.is_encoder_decoder:
        raise ModelError(
            f"{checkpoint.source} is an encoder-decoder ({config.model_type}), which attnkit.Embedder "
            "does not take apart; give an encoder"
        )
    auto = transformers.AutoModel
    return _load(auto, "an encoder", checkpoint, dtype, device, optional="pooler.")


def _load(
    auto: Any,
    kind: str,
    checkpoint: Checkpoint,
    dtype: str | torch.dtype,
    device: torch.device,
    optional: str | None = None,
) -> tuple[Any, torch.dtype]:
    """Load with a class of transformers; weights whose names start with `optional` may be missing."""
    import transformers

    chosen = _dtype(checkpoint, dtype, device)
    try:
        with _quiet_loading():
            outcome: Any = auto.from_pretrained(
                checkpoint.source,
                dtype=chosen,
                output_loading_info=True,
                trust_remote_code=False,
            )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise ModelError(
            f"{checkpoint.source} cannot be loaded as {kind}: {error}; give another "
            f"model, or a transformers newer than {transformers.__version__}"
        ) from error
    model, report = outcome
    if optional is not None:
        missing = [n for n in report.get("missing_keys", ()) if not n.startswith(optional)]
        report = {**report, "missing_keys": missing}
    check_loading_report(checkpoint.source, type(model).__name__, report)
    return model.to(device), chosen


def load_tokenizer(checkpoint: Checkpoint) -> Any:
    """The checkpoint's tokenizer.

    Raises:
        ModelError: it has none that transformers can load.
    """
    import transformers

    try:
        return transformers.AutoTokenizer.from_pretrained(
            checkpoint.source, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise ModelError(
            f"{checkpoint.source} has no tokenizer that can be loaded: {error}; add the tokenizer's "
            "files to the directory"
        ) from error


def _dtype(checkpoint: Checkpoint, dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    check_dtype_name(dtype)
    if dtype != "auto":
        return dtype if isinstance(dtype, torch.dtype) else DTYPES[dtype]
    config = load_config(checkpoint)
    own: Any = config.get_text_config().dtype or config.dtype
    if isinstance(own, str):
        own = DTYPES.get(own)
    if own is torch.bfloat16 or (own is torch.float16 and device.type != "cpu"):
        return own
    return torch.float32


def load_config(checkpoint: Checkpoint) -> Any:
    """transformers' configuration of a checkpoint.

    Raises:
        ModelError: transformers cannot read it.
    """
    import transformers

    try:
        return transformers.AutoConfig.from_pretrained(checkpoint.source, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"{checkpoint.source} has a configuration that transformers {transformers.__version__} "
            f"cannot read: {error}; give another model, or a newer transformers"
        ) from error


def find_auto_class(checkpoint: Checkpoint) -> tuple[Any, str]:
    """transformers' class to load a model with that `attnkit.LLM` drives, and what such a model is.

    Raises:
        ModelError: it is none, so that transformers would load it in part, or not at all.
    """
    import transformers

    config = load_config(checkpoint)
    if config.is_encoder_decoder:
        if hasattr(config, "relative_attention_num_buckets"):
            raise ModelError(
                f"{checkpoint.source} is of type {config.model_type}, whose attention adds a learned "
                "bias for each distance, which attnkit's layers do not carry; use an encoder-decoder "
                "without one (BART, mBART, Pegasus, Marian)"
            )
        if type(config) in transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING:
            return transformers.AutoModelForSeq2SeqLM, "an encoder-decoder"
        if reads_sound(config):
            return transformers.AutoModelForSpeechSeq2Seq, "an encoder-decoder that reads sound"
        raise ModelError(
            f"{checkpoint.source} is an encoder-decoder ({config.model_type}) whose encoder does not "
            "read text, which attnkit's runner drives for Whisper alone; give a model from text to text"
        )
    if type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return transformers.AutoModelForCausalLM, "a causal language model"
    if type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        model: Any = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
        if "token_type_ids" in inspect.signature(model.forward).parameters:
            return transformers.AutoModelForImageTextToText, "a PrefixLM that sees images"
    raise ModelError(
        f"{checkpoint.source} is of type {config.model_type}, of which transformers "
        f"{transformers.__version__} has no causal language model or PrefixLM (it may have no head, or "
        "images of another kind); give a decoder, or an encoder to attnkit.Embedder"
    )


@contextmanager
def _quiet_loading() -> Iterator[None]:
    """transformers without its progress bar: loading from a local directory takes a moment."""
    from transformers.utils import logging

    had_bar = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if had_bar:
            logging.enable_progress_bar()


def eos_token_ids(model: Any, tokenizer: Any) -> set[int]:
    """The tokens that end an output: the generation config's and the tokenizer's, else the config's.

    Chat models end a turn with a token of their own, which some name in the one and some in the other.
    """
    found: set[int] = set()
    for source in (getattr(model, "generation_config", None), tokenizer):
        found |= _token_ids(getattr(source, "eos_token_id", None))
    return found or _token_ids(getattr(model.config, "eos_token_id", None))


def _token_ids(value: int | Sequence[int] | None) -> set[int]:
    if value is None:
        return set()
    return {value} if isinstance(value, int) else set(value)

"""Embedder: texts to vectors with an encoder, all texts of a step as one packed stream.

In: a Hugging Face directory or id of an encoder (BERT, ModernBERT, MiniLM, ...). Out: one vector per
text. No padding is computed: texts of any lengths lie one after the other, and attention keeps
them apart. How vectors are pooled is read from the checkpoint where it says so.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import torch

from attnkit.arguments import check_count, check_flags
from attnkit.contract import AttentionBackend
from attnkit.errors import ConfigurationError, ModelError, RequestError
from attnkit.garbage import collection_paused
from attnkit.runner.arguments import check_backend
from attnkit.runner.checkpoint import resolve_checkpoint
from attnkit.runner.encoder import EncoderModel
from attnkit.runner.linear import pack_linears
from attnkit.runner.loading import check_dtype_name, load_encoder, load_tokenizer
from attnkit.runner.memory import choose_device
from attnkit.runner.prompts import check_encodable, read_token_ids

Pooling: TypeAlias = Literal["mean", "cls"]
"""mean: over a text's tokens; cls: the first token's vector."""


class Embedder:
    """An encoder that turns texts into vectors.

    Attributes:
        model_path: the directory its files are in.
        max_model_len: most tokens in a text, special ones included.
        pooling: how a text's token vectors become one.
        normalize: vectors have length 1.
        dimension: of a vector.
    """

    @collection_paused()
    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        dtype: str | torch.dtype = "auto",
        backend: str | type[AttentionBackend] = "auto",
        device: str | torch.device | None = None,
        max_model_len: int | None = None,
        max_num_batched_tokens: int | None = None,
        pooling: Pooling | None = None,
        normalize: bool | None = None,
    ) -> None:
        """Load an encoder.

        Args:
            model: a Hugging Face directory or id.
            dtype: as in `attnkit.LLM`.
            backend: the attention backend, as in `attnkit.LLM`.
            device: None: a GPU if there is one, else the CPU.
            max_model_len: most tokens in a text; None: what the checkpoint says.
            max_num_batched_tokens: tokens in one step; None: 2048 on a CPU, 16384 on a GPU, and at
                least one text of `max_model_len`.
            pooling: None: as the checkpoint's sentence-transformers files say, else "mean".
            normalize: None: as those files say, else False.

        Raises:
            ModelError: the model cannot be found, loaded or driven, or pools in a way not known.
            ConfigurationError: a value is not allowed.
            BackendError: no such backend, or it cannot serve the model; with every reason.
        """
        if pooling is not None and (
            not isinstance(pooling, str) or pooling not in get_args(Pooling)
        ):
            raise ConfigurationError(
                f"pooling {pooling!r} is not known; use {' or '.join(get_args(Pooling))}"
            )
        where = choose_device(device)
        check_dtype_name(dtype)
        check_backend(backend, where, dtype)
        check_count("max_model_len", max_model_len, optional=True)
        check_count("max_num_batched_tokens", max_num_batched_tokens, optional=True)
        if normalize is not None:
            check_flags({"normalize": normalize})
        checkpoint = resolve_checkpoint(model)
        self.name = checkpoint.name
        self.model_path: Path = checkpoint.path
        self.tokenizer = load_tokenizer(checkpoint)
        loaded, self.dtype = load_encoder(checkpoint, dtype, where)
        asked = _sentence_length(checkpoint.path) if max_model_len is None else max_model_len
        self._encoder = EncoderModel(loaded, backend=backend, max_model_len=asked)
        pack_linears(loaded)
        self.max_model_len = self._encoder.max_model_len
        budget = 2048 if where.type == "cpu" else 16384
        budget = budget if max_num_batched_tokens is None else max_num_batched_tokens
        if max_num_batched_tokens is not None and max_num_batched_tokens < self.max_model_len:
            raise ConfigurationError(
                f"max_num_batched_tokens {max_num_batched_tokens} holds no text of max_model_len "
                f"{self.max_model_len}; give at least that, or a smaller max_model_len"
            )
        self._budget = max(budget, self.max_model_len)
        said_pooling, said_normalize = _pooling_files(checkpoint.path, given=pooling is not None)
        self.pooling: Pooling = pooling or said_pooling or "mean"
        self.normalize = said_normalize if normalize is None else normalize
        self.dimension = int(loaded.config.hidden_size)

    def explain(self) -> str:
        """Which backend runs which layers, and why not the others."""
        return self._encoder.explain()

    def embed(
        self, texts: Sequence[str | Sequence[int]], *, truncate: bool = False
    ) -> torch.Tensor:
        """Vectors of texts.

        Args:
            texts: texts, or lists of token ids, which are taken as they are.
            truncate: cut texts that are longer than `max_model_len`; else they are refused.

        Returns:
            float32 (num_texts, dimension), on the CPU.

        Raises:
            RequestError: a text is empty, too long, or has unknown token ids, by its index; nothing
                has run.
        """
        if not isinstance(texts, Iterable) or isinstance(texts, str | bytes):
            raise RequestError(f"texts is {type(texts).__name__}; give a list of texts")
        check_flags({"truncate": truncate}, error=RequestError)
        many = [self._encode(index, text, truncate) for index, text in enumerate(texts)]
        vectors = torch.empty(len(many), self.dimension)
        start = 0
        while start < len(many):
            end, num_tokens = start, 0
            while end < len(many) and num_tokens + len(many[end]) <= self._budget:
                num_tokens += len(many[end])
                end += 1
            vectors[start:end] = self._step(many[start:end])
            start = end
        return vectors

    def _encode(self, index: int, text: str | Sequence[int], truncate: bool) -> list[int]:
        longest = self.max_model_len if truncate else None
        if isinstance(text, str):
            check_encodable(f"text {index}", text)
            ids = self.tokenizer.encode(text, truncation=truncate, max_length=longest)
        else:
            ids = read_token_ids(f"text {index}", text)[:longest]
        if not ids:
            raise RequestError(f"text {index} has no tokens; give at least one")
        if len(ids) > self.max_model_len:
            raise RequestError(
                f"text {index} has {len(ids)} tokens, and the model takes {self.max_model_len}; "
                "shorten it, or pass truncate=True"
            )
        bad = next((i for i in ids if not 0 <= i < self._encoder.vocab_size), None)
        if bad is not None:
            raise RequestError(
                f"text {index}: token id {bad} is not of the model; give ids from 0 to "
                f"{self._encoder.vocab_size - 1}"
            )
        return ids

    def _step(self, many: Sequence[list[int]]) -> torch.Tensor:
        lens = [len(ids) for ids in many]
        hidden = self._encoder.forward([i for ids in many for i in ids], lens).float()
        if self.pooling == "cls":
            starts = torch.tensor([0, *lens[:-1]], device=hidden.device).cumsum(0)
            vectors = hidden[starts]
        else:
            vectors = torch.segment_reduce(
                hidden, "mean", lengths=torch.tensor(lens, device=hidden.device)
            )
        if self.normalize:
            vectors = torch.nn.functional.normalize(vectors, dim=1)
        return vectors.cpu()


def _sentence_length(path: Path) -> int | None:
    """Longest text by sentence-transformers' own file, which may say less than the model's."""
    file = path / "sentence_bert_config.json"
    said = _read(file).get("max_seq_length") if file.is_file() else None
    return said if isinstance(said, int) else None


def _pooling_files(path: Path, *, given: bool) -> tuple[Pooling | None, bool]:
    """Pooling and normalisation that sentence-transformers' modules.json describes.

    Args:
        given: the caller chose the pooling, so that one not known here does not matter.
    """
    file = path / "modules.json"
    if not file.is_file():
        return None, False
    pooling: Pooling | None = None
    normalize = False
    for module in _read(file):
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind == "Normalize":
            normalize = True
        elif kind == "Pooling":
            options = _read(path / str(module.get("path")) / "config.json")
            on = [k for k, v in options.items() if k.startswith("pooling_mode_") and v is True]
            if on == ["pooling_mode_mean_tokens"]:
                pooling = "mean"
            elif on == ["pooling_mode_cls_token"]:
                pooling = "cls"
            elif not given:
                raise ModelError(
                    f"{path} pools by {', '.join(on) or 'nothing'}; attnkit knows mean and cls: give "
                    "pooling= to choose one"
                )
        elif kind != "Transformer":
            raise ModelError(
                f"{path} has a sentence-transformers module {kind}, which attnkit does not run; use a "
                "model of Transformer, Pooling and Normalize alone"
            )
    return pooling, normalize


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {error}; download the model again") from error

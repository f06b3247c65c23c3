"""LightningIndexer: which keys each query of a sparse layer attends to, as in DeepSeek-V3.2.

In: per token a small key, and per query a few small heads with a weight each. Out: for every query the
positions of the `topk_tokens` best keys of its request, itself included, in `topk_indices_buffer`:

    score(query, key) = sum over heads h of weight[h] * relu(q[h] . key)

Keys live in pages of their own, with the block tables of the layer that is served: as float8 codes
with a float32 scale per token behind them (`head_size + 4` bytes), or as plain numbers.
"""

from __future__ import annotations

import importlib
from typing import ClassVar

import torch

from attnkit.arguments import check_count, check_dtype, check_kind, check_text
from attnkit.backends import INDEX_KERNELS
from attnkit.contract import (
    CommonAttentionMetadata,
    DeviceCapability,
    MLAAttentionSpec,
    kv_cache_torch_dtype,
)
from attnkit.errors import BatchError, ConfigurationError, UnknownBackend, UnsupportedConfiguration
from attnkit.kvcache.codecs import Fp8PerTokenHeadCodec
from attnkit.kvcache.layout import check_places
from attnkit.mla.index_kernels import IndexKernels

INDEX_FORMATS = ("fp8", "auto", "float16", "bfloat16", "float32")
"""What keys may be stored as: float8 codes with a scale per token, as they come ("auto"), or a dtype."""


class LightningIndexer:
    """The indexer of one layer, or of a group of layers that share its lists.

    Attributes:
        layer_name: unique name; key of its cache.
        topk_tokens: keys a query is told at most.
        topk_indices_buffer: int32 (max_num_batched_tokens, topk_tokens), rows in the step's order,
            positions ascending, -1 behind them.
        backend: the name of its kernels.
        kernels: they.
    """

    lists_are_distinct: ClassVar[bool] = True
    """No list names a position twice: it is as long as the query's context at most."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        topk_tokens: int,
        *,
        max_num_batched_tokens: int = 8192,
        kv_cache_dtype: str = "fp8",
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        layer_name: str = "indexer",
        block_size: int = 16,
        backend: str = "auto",
        topk_indices_buffer: torch.Tensor | None = None,
    ) -> None:
        """
        Args:
            num_heads: of queries; they share a key.
            head_size: of both.
            topk_tokens: keys a query is told at most.
            max_num_batched_tokens: most tokens of a step.
            kv_cache_dtype: one of `INDEX_FORMATS`; "auto" is `dtype`.
            dtype: of keys that are stored plainly.
            device: where it runs.
            layer_name: key of its cache.
            block_size: tokens in a block, as in the layer that it serves.
            backend: "torch", "triton", or "auto": Triton on a GPU that it compiles for, else torch.
            topk_indices_buffer: where lists go; layers that run one after the other may share it.
                None: memory of its own.

        Raises:
            ConfigurationError: a size below 1, a format that keys are not stored in, or a buffer of
                another shape, dtype or device.
            UnknownBackend: no kernels have this name.
            UnsupportedConfiguration: these cannot serve the indexer there.
        """
        sizes = {
            "num_heads": num_heads,
            "head_size": head_size,
            "topk_tokens": topk_tokens,
            "max_num_batched_tokens": max_num_batched_tokens,
            "block_size": block_size,
        }
        for name, size in sizes.items():
            check_count(name, size)
        check_text("layer_name", layer_name)
        check_text("backend", backend)
        check_dtype(dtype)
        check_index_format("kv_cache_dtype", kv_cache_dtype)
        check_kind(
            "topk_indices_buffer", topk_indices_buffer, torch.Tensor, "a tensor", optional=True
        )
        if kv_cache_dtype == "fp8" and head_size % 4:
            raise ConfigurationError(
                f"fp8 keys of {head_size} numbers would leave their scales unaligned; give a multiple "
                "of 4, or a plain kv_cache_dtype"
            )
        self.num_heads, self.head_size, self.topk_tokens = num_heads, head_size, topk_tokens
        self.kv_cache_dtype, self.layer_name, self.block_size = (
            kv_cache_dtype,
            layer_name,
            block_size,
        )
        self._codec = Fp8PerTokenHeadCodec() if kv_cache_dtype == "fp8" else None
        self._dtype = torch.uint8 if self._codec else kv_cache_torch_dtype(kv_cache_dtype, dtype)
        DeviceCapability.of(device)
        self.device = torch.device(device)
        self.backend, kernels = _kernels(backend, num_heads, head_size, self.device)
        self.kernels: IndexKernels = kernels()
        shape = (max_num_batched_tokens, topk_tokens)
        lists = topk_indices_buffer
        if lists is None:
            lists = torch.full(shape, -1, dtype=torch.int32, device=device)
        elif (lists.shape, lists.dtype, lists.device.type) != (
            shape,
            torch.int32,
            self.device.type,
        ):
            raise ConfigurationError(
                f"topk_indices_buffer is {lists.dtype} {tuple(lists.shape)} on {lists.device}; give "
                f"torch.int32 {shape} on {self.device}"
            )
        self.topk_indices_buffer = lists

    @property
    def lists_are_whole_up_to(self) -> int:
        """A query that sees no more keys is told all of them."""
        return self.topk_tokens

    def get_kv_cache_spec(self, block_size: int | None = None) -> MLAAttentionSpec:
        """What it keeps in the cache: one key a token.

        Args:
            block_size: tokens in a block; None: the indexer's.
        """
        codec = self._codec
        return MLAAttentionSpec(
            block_size=self.block_size if block_size is None else block_size,
            head_size=self.head_size,
            dtype=self._dtype,
            state_content_bytes=None if codec is None else self.head_size + codec.scale_bytes(1),
        )

    def choose(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        weights: torch.Tensor,
        kv_cache: torch.Tensor,
        batch: CommonAttentionMetadata,
    ) -> torch.Tensor:
        """Write this step's keys and fill `topk_indices_buffer`.

        Kernels of torch wait for lengths on the device; those of Triton read them there, so that the
        call may be captured, and replayed for lengths up to the `max_seq_len` of its batch.

        Args:
            q: (num_tokens, num_heads, head_size).
            k: (num_tokens, head_size).
            weights: (num_tokens, num_heads), scales of the score included.
            kv_cache: (num_blocks, 1, block_size, C), of `get_kv_cache_spec`.
            batch: the step, as the layer's builder gets it.

        Returns:
            The rows of this step, int32 (num_tokens, topk_tokens).

        Raises:
            BatchError: tensors that do not fit the indexer or the batch; nothing has been written.
        """
        if not isinstance(batch, CommonAttentionMetadata):
            raise BatchError(
                f"the batch of {self.layer_name} is {type(batch).__name__}; give what "
                "attnkit.make_batch makes"
            )
        for name, x in {"q": q, "k": k, "weights": weights, "kv_cache": kv_cache}.items():
            if not isinstance(x, torch.Tensor):
                raise BatchError(
                    f"{name} of {self.layer_name} is {type(x).__name__}; give a torch.Tensor"
                )
            is_cache = name == "kv_cache"
            if x.device.type != self.device.type or not (is_cache or x.is_floating_point()):
                raise BatchError(
                    f"{name} of {self.layer_name} is {x.dtype} on {x.device}; give "
                    f"{'one' if is_cache else 'floating-point numbers'} on {self.device}"
                )
        if batch.block_size not in (None, self.block_size):
            raise BatchError(
                f"the batch has blocks of {batch.block_size} tokens, {self.layer_name} of "
                f"{self.block_size}; make both with one block_size"
            )
        num_tokens = batch.num_actual_tokens
        shapes = {
            "q": (q, (self.num_heads, self.head_size)),
            "k": (k, (self.head_size,)),
            "weights": (weights, (self.num_heads,)),
        }
        for name, (x, shape) in shapes.items():
            if x.shape[1:] != shape or x.shape[0] < num_tokens:
                raise BatchError(
                    f"{name} of {self.layer_name} has shape {tuple(x.shape)}; give "
                    f"({num_tokens}, {', '.join(map(str, shape))}) for a batch of {num_tokens} tokens"
                )
        page = (1, self.block_size, self.get_kv_cache_spec().content_size)
        if kv_cache.shape[1:] != page or kv_cache.dtype != self._dtype:
            raise BatchError(
                f"{self.layer_name} got a kv_cache of {kv_cache.dtype} {tuple(kv_cache.shape)}; its "
                f"blocks are {page} of {self._dtype}"
            )
        check_places(self.layer_name, kv_cache)
        lists = self.topk_indices_buffer
        if num_tokens > lists.shape[0]:
            raise BatchError(
                f"the batch has {num_tokens} tokens, {self.layer_name} lists for {lists.shape[0]}; give "
                "fewer at once, or make it with a larger max_num_batched_tokens"
            )
        cache = kv_cache[:, 0]
        self.kernels.write(k, cache, batch.slot_mapping)
        self.kernels.choose(q, weights, cache, batch, lists[:num_tokens])
        return lists[:num_tokens]


def check_index_format(name: str, given: object) -> None:
    """Refuse what is none of `INDEX_FORMATS`.

    Raises:
        ConfigurationError: names the argument and the formats.
    """
    check_text(name, given)
    if given not in INDEX_FORMATS:
        raise ConfigurationError(
            f"{name} {given!r} is not one that keys of an indexer are stored in; use one of "
            f"{', '.join(INDEX_FORMATS)}"
        )


def _kernels(
    asked: str, num_heads: int, head_size: int, device: torch.device
) -> tuple[str, type[IndexKernels]]:
    """The kernels of a name, or those that "auto" stands for, and their name."""
    if asked != "auto" and asked not in INDEX_KERNELS:
        raise UnknownBackend(
            f"no kernels of an indexer are called {asked!r}; use auto or {', '.join(INDEX_KERNELS)}"
        )
    names = INDEX_KERNELS if asked == "auto" else (asked,)
    if asked == "auto" and device.type != "cuda":
        names = ("torch",)
    for name in names:
        module, _, attribute = INDEX_KERNELS[name].partition(":")
        kernels: type[IndexKernels] = getattr(importlib.import_module(module), attribute)
        refusal = kernels.refusal(num_heads, head_size, device)
        if refusal is None:
            return name, kernels
        if asked != "auto":
            raise UnsupportedConfiguration(
                f"kernels {name!r} cannot serve this indexer: {refusal}; use backend='auto'",
                (refusal,),
            )
    raise AssertionError("torch serves everything")

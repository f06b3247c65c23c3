"""Keys and values of a prefix outside of any pages, and the connector that carries them elsewhere.

In: token ids and each layer's contents in the order of the tokens, as `runner.engine` reads them out of
pages. Out: the same, for an engine with pages of another size or layout. A `KVConnector` keeps them: a
file (`runner.kv_file`), another process, a store of one's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from attnkit.errors import CacheError


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerContents:
    """What one layer keeps of a prefix.

    Attributes:
        first_token: position of the first row; above 0 where a window has left earlier ones behind.
        rows: (num_tokens - first_token, heads, elements), as they stand in a page: K, then V.
        kv_cache_dtype: the format of the rows.
        scales: `_k_scale` and `_v_scale` of the layer, which formats with codes read.
    """

    first_token: int
    rows: torch.Tensor
    kv_cache_dtype: str = "auto"
    scales: tuple[tuple[float, ...], tuple[float, ...]] = ((1.0,), (1.0,))


@dataclass(frozen=True, eq=False, kw_only=True)
class PrefixContents:
    """A computed prefix.

    Attributes:
        model: identifies the weights that computed it; contents of others are of no use.
        token_ids: of the prefix.
        layers: layer name -> its contents, on the CPU.
    """

    model: str
    token_ids: tuple[int, ...]
    layers: Mapping[str, LayerContents]


class KVConnector(Protocol):
    """Carries prefixes out of an engine and into one."""

    def save(self, contents: PrefixContents) -> None:
        """Keep a prefix."""
        ...

    def load(self, wanted: PrefixContents) -> PrefixContents:
        """Give a prefix back.

        Args:
            wanted: an empty prefix of the engine that asks: its model, and layers without rows that
                say which shape, dtype and format theirs have.

        Raises:
            CacheError: there is none, or it is damaged. That it fits, the engine finds out.
        """
        ...


def check_fits(contents: PrefixContents, wanted: PrefixContents, source: str) -> None:
    """Refuse contents of another model or shape.

    Raises:
        CacheError: names `source` and what differs.
    """
    if contents.model != wanted.model:
        theirs, ours = _dtypes(contents), _dtypes(wanted)
        if theirs != ours:
            raise CacheError(
                f"{source} holds keys and values in {theirs}, and the model was loaded in {ours}; load "
                "the model that saved it with the dtype it had then"
            )
        raise CacheError(
            f"{source} holds keys and values of another model (its weights or configuration differ); "
            "load it with the model that saved it"
        )
    if set(contents.layers) != set(wanted.layers):
        differ = sorted(set(contents.layers) ^ set(wanted.layers))
        raise CacheError(f"{source} has other layers than the model: {', '.join(differ[:3])}")
    num_tokens = len(contents.token_ids)
    for name, mine in wanted.layers.items():
        theirs = contents.layers[name]
        given = (
            tuple(theirs.rows.shape[1:]),
            theirs.rows.dtype,
            theirs.kv_cache_dtype,
            theirs.scales,
        )
        ours = (tuple(mine.rows.shape[1:]), mine.rows.dtype, mine.kv_cache_dtype, mine.scales)
        if given != ours:
            raise CacheError(
                f"{source} has rows of {given} (heads and elements, dtype, format, scales) for layer "
                f"{name}, whose own are {ours}; load it with the settings it was saved with"
            )
        if theirs.first_token + len(theirs.rows) != num_tokens or theirs.first_token < 0:
            raise CacheError(
                f"{source} has {len(theirs.rows)} rows from token {theirs.first_token} on for layer "
                f"{name}, but {num_tokens} tokens; it is damaged"
            )


def _dtypes(contents: PrefixContents) -> str:
    return ", ".join(sorted({str(x.rows.dtype)[6:] for x in contents.layers.values()}))


def whole_blocks(first_token: int, num_tokens: int, block_size: int) -> range:
    """Indices of the blocks whose every token lies between the two."""
    return range(-(-first_token // block_size), num_tokens // block_size)


def rows_of(contents: LayerContents, blocks: Sequence[int], block_size: int) -> torch.Tensor:
    """The rows of consecutive whole blocks."""
    start = blocks[0] * block_size - contents.first_token
    return contents.rows[start : start + len(blocks) * block_size]

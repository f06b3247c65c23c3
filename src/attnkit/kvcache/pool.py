"""PagedKVCache: the memory behind block ids.

In: one spec per layer (from `Attention.get_kv_cache_spec`) and a number of blocks, which
`KVCachePlan.num_blocks` makes of a byte budget.
Out: `cache[layer_name]`, a tensor of logical shape (num_blocks, num_kv_heads, block_size,
head_size + head_size_v). Which request owns which block is somebody else's business (`blocks`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeGuard

import torch

from attnkit.arguments import check_flags, is_count
from attnkit.contract import (
    AttentionBackend,
    AttentionSpec,
    DeviceCapability,
    KVCacheLayout,
    get_kv_quant_mode,
    kv_cache_torch_dtype,
)
from attnkit.errors import CacheError
from attnkit.kvcache import layout as _layout

_MAX_BLOCKS = 2**31 - 1


class PagedKVCache:
    """Pages of every layer, addressed by one set of block ids.

    Block 0 is the null block. With `poison`, fresh pages hold NaN instead of zeros, so that reading
    what nobody wrote shows in the output (`poison_blocks` does the same to freed ones).
    """

    def __init__(
        self,
        specs: Mapping[str, AttentionSpec],
        num_blocks: int,
        *,
        device: torch.device | str = "cpu",
        layout: KVCacheLayout = KVCacheLayout.LBHNC,
        kernel_block_size: int | None = None,
        overlays: Sequence[Sequence[str]] | None = None,
        backends: Mapping[str, type[AttentionBackend]] | None = None,
        kv_cache_dtype: str = "auto",
        poison: bool = False,
    ) -> None:
        """Allocate.

        Args:
            specs: what each layer keeps. Layers that share another's cache have none.
            num_blocks: blocks of `spec.block_size` tokens, the null block included.
            device: where pages live.
            layout: order in memory; the logical shape stays the same.
            kernel_block_size: split each block into blocks of this size for the kernels: block b
                becomes blocks b * r to b * r + r - 1, and slots stay what they are. None: as the
                spec says.
            overlays: layer names that lie over the same memory, each in its own shape, since a block
                belongs to one group of layers at a time. None: every layer has memory of its own.
            backends: layer name -> backend class, for older backends that ask for a cache shape of
                their own. These layers have memory of their own even where they are in `overlays`.
            kv_cache_dtype: handed to those; "auto", or what the specs of the others say anyway.
            poison: fill pages with NaN.

        Raises:
            CacheError: fewer than 2 blocks or more than int32 block ids, a page that cannot be
                split, overlaid layers whose pages differ in bytes, names that have no spec, a
                layout that cannot hold the specs, or a format that they do not have; or more
                memory than there is.
            ConfigurationError: there is no such device.
        """
        _check_kinds(specs, overlays, backends)
        check_flags({"poison": poison}, error=CacheError)
        if not is_count(num_blocks):
            raise CacheError(f"num_blocks {num_blocks!r} is not allowed; give a whole number")
        if num_blocks < 2:
            raise CacheError(
                f"{num_blocks} blocks leave no page beside the null block; give at least 2"
            )
        for name in backends or ():
            if name not in specs:
                raise CacheError(
                    f"backends names layer {name!r}, which has no spec; specs are of {', '.join(specs)}"
                )
        if not isinstance(layout, KVCacheLayout):
            raise CacheError(
                f"layout {layout!r} is no KVCacheLayout; give KVCacheLayout.LBHNC or another, or "
                "KVCacheLayout.parse('HND')"
            )
        DeviceCapability.of(device)
        self.specs = dict(specs)
        self.num_blocks = num_blocks
        self.layout = layout
        self.device = torch.device(device)
        block_size = next(iter(specs.values())).block_size
        self.blocks_per_block = _split(self.specs.values(), block_size, kernel_block_size)
        self.kernel_block_size = block_size // self.blocks_per_block
        if num_blocks * self.blocks_per_block > _MAX_BLOCKS:
            raise CacheError(
                f"{num_blocks} blocks of {self.blocks_per_block} kernel blocks are more than int32 "
                f"block ids can name; give at most {_MAX_BLOCKS // self.blocks_per_block}"
            )
        self._block_dims: dict[str, int] = {}
        self._tensors = self._allocate(overlays, backends or {}, kv_cache_dtype)
        if poison:
            for tensor in self._tensors.values():
                tensor.copy_(_nan_like(tensor).expand(tensor.shape))

    def __getitem__(self, layer_name: str) -> torch.Tensor:
        """The cache of a layer.

        Raises:
            CacheError: no layer of this name has a cache.
        """
        if layer_name not in self._tensors:
            raise CacheError(
                f"no layer {layer_name!r} in this cache; it has {', '.join(self._tensors)}"
            )
        return self._tensors[layer_name]

    def __contains__(self, layer_name: str) -> bool:
        return layer_name in self._tensors

    @property
    def by_layer(self) -> Mapping[str, torch.Tensor]:
        """Layer name -> its cache, for `forward_context`."""
        return self._tensors

    @property
    def num_bytes(self) -> int:
        """Bytes held by all layers together; overlaid memory counts once."""
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in self.values()}
        return sum(storage.nbytes() for storage in storages.values())

    def values(self) -> Iterable[torch.Tensor]:
        """The layers' tensors."""
        return self._tensors.values()

    def poison_blocks(self, block_ids: Iterable[int]) -> None:
        """Fill the pages of these blocks (ids of whole blocks, not kernel blocks) with NaN.

        Raises:
            CacheError: there is no such block; nothing has been written.
        """
        block_ids = list(block_ids)
        self._check_blocks(block_ids)
        if not block_ids:
            return
        ratio = self.blocks_per_block
        ids = [block * ratio + i for block in block_ids for i in range(ratio)]
        index = torch.tensor(ids, device=self.device)
        for name, tensor in self._tensors.items():
            tensor.movedim(self._block_dims.get(name, 0), 0)[index] = _nan_like(tensor)

    def read_blocks(self, layer_name: str, block_ids: Sequence[int]) -> torch.Tensor:
        """The contents of whole blocks, one after the other, whatever the layout.

        Returns:
            (num_blocks * block_size, num_kv_heads, elements), a copy.

        Raises:
            CacheError: there is no such block, or the layer's backend has a cache shape of its own.
        """
        pages = self._pages(layer_name, block_ids)
        return self._tensors[layer_name][pages].transpose(1, 2).flatten(0, 1)

    def write_blocks(self, layer_name: str, block_ids: Sequence[int], rows: torch.Tensor) -> None:
        """Fill whole blocks with what `read_blocks` returned, of this cache or of another.

        Raises:
            CacheError: as `read_blocks`; nothing has been written.
        """
        pages = self._pages(layer_name, block_ids)
        tensor = self._tensors[layer_name]
        filled = rows.to(self.device).unflatten(0, (len(pages), tensor.shape[2]))
        tensor[pages] = filled.transpose(1, 2)

    def _pages(self, layer_name: str, block_ids: Sequence[int]) -> torch.Tensor:
        """Kernel blocks of whole blocks, in order."""
        self._check_blocks(block_ids)
        if layer_name in self._block_dims:
            raise CacheError(
                f"layer {layer_name} has a cache of its backend's own shape, whose tokens nobody else "
                "can read; use a backend of the current generation"
            )
        ratio = self.blocks_per_block
        ids = torch.tensor(block_ids, dtype=torch.long, device=self.device)
        return (ids[:, None] * ratio + torch.arange(ratio, device=self.device)).flatten()

    def copy_blocks(self, source: PagedKVCache, moves: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks of every layer.

        Args:
            source: a cache of the same layers in blocks of the same shape; this one, or another.
            moves: (id in `source`, id here); no id is both read and written.

        Raises:
            CacheError: there is no such block; nothing has been written.
        """
        for cache, ids in ((source, [a for a, _ in moves]), (self, [b for _, b in moves])):
            cache._check_blocks(ids)
        if not moves:
            return
        ratio = self.blocks_per_block
        old, new = torch.tensor(moves, device=self.device).T[:, :, None] * ratio + torch.arange(
            ratio, device=self.device
        )
        for name, tensor in self._tensors.items():
            dim = self._block_dims.get(name, 0)
            pages = source._tensors[name].movedim(dim, 0)[old.flatten()]
            tensor.movedim(dim, 0)[new.flatten()] = pages

    def _check_blocks(self, block_ids: Iterable[int]) -> None:
        for block in block_ids:
            if not 0 <= block < self.num_blocks:
                raise CacheError(
                    f"there is no block {block}; ids run from 0 to {self.num_blocks - 1}"
                )

    def _allocate(
        self,
        overlays: Sequence[Sequence[str]] | None,
        backends: Mapping[str, type[AttentionBackend]],
        kv_cache_dtype: str,
    ) -> dict[str, torch.Tensor]:
        num_kernel_blocks = self.num_blocks * self.blocks_per_block
        kernel_specs = {
            name: spec.copy_with_new_block_size(spec.block_size // self.blocks_per_block)
            for name, spec in self.specs.items()
        }
        tensors: dict[str, torch.Tensor] = {}
        for name, backend in backends.items():
            spec = kernel_specs[name]
            assert isinstance(spec, AttentionSpec)
            own = _layout.allocate_old_generation(
                backend, spec, num_kernel_blocks, kv_cache_dtype, self.device
            )
            if own is not None:
                tensors[name], self._block_dims[name] = own
        names = [n for n in kernel_specs if n not in tensors]
        _check_format(kv_cache_dtype, {name: self.specs[name] for name in names})
        shared = _storages(names, overlays, self.specs)
        if shared:
            storages = _layout.allocate(
                [[kernel_specs[name] for name in members] for members in shared],  # type: ignore[misc]
                num_kernel_blocks,
                self.layout,
                self.device,
            )
            for members, views in zip(shared, storages, strict=True):
                tensors.update(zip(members, views, strict=True))
        return {name: tensors[name] for name in self.specs}


def _check_kinds(specs: object, overlays: object, backends: object) -> None:
    """Mappings and lists of what they should hold."""
    if not isinstance(specs, Mapping) or not all(
        isinstance(spec, AttentionSpec) for spec in specs.values()
    ):
        raise CacheError(
            f"specs is {specs!r}; give {{layer name: layer.get_kv_cache_spec()}} of layers that "
            "keep something"
        )
    if not specs:
        raise CacheError("a KV cache needs at least one layer's spec")
    if overlays is not None and not (
        _is_list(overlays) and all(_is_list(members) for members in overlays)
    ):
        raise CacheError(f"overlays is {overlays!r}; give lists of layer names, or None")
    if backends is not None and not (
        isinstance(backends, Mapping)
        and all(hasattr(backend, "get_kv_cache_shape") for backend in backends.values())
    ):
        raise CacheError(f"backends is {backends!r}; give {{layer name: backend class}}, or None")


def _is_list(value: object) -> TypeGuard[Sequence[object]]:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _check_format(kv_cache_dtype: str, specs: Mapping[str, AttentionSpec]) -> None:
    """A format is the specs' to say, which a layer made with `kv_cache_dtype` gives."""
    mode = get_kv_quant_mode(kv_cache_dtype)
    for name, spec in specs.items():
        wanted = kv_cache_torch_dtype(kv_cache_dtype, spec.dtype), mode
        if kv_cache_dtype != "auto" and wanted != (spec.dtype, spec.kv_quant_mode):
            raise CacheError(
                f"kv_cache_dtype {kv_cache_dtype!r} was given, and the spec of layer {name} says "
                f"{spec.dtype} ({spec.kv_quant_mode.name}); make the layer with kv_cache_dtype="
                f"{kv_cache_dtype!r} and take its get_kv_cache_spec()"
            )


def _storages(
    names: Sequence[str],
    overlays: Sequence[Sequence[str]] | None,
    specs: Mapping[str, AttentionSpec],
) -> list[list[str]]:
    """Layer names by the memory they lie in; layers in no overlay are alone."""
    overlaid = [n for members in overlays or () for n in members]
    for name in overlaid:
        if name not in specs or overlaid.count(name) > 1:
            raise CacheError(
                f"overlays name layer {name!r} {overlaid.count(name)} times; name each layer of the "
                f"specs ({', '.join(specs)}) at most once"
            )
    groups = [[n for n in members if n in names] for members in overlays or ()]
    groups = [g for g in groups if g] + [[n] for n in names if n not in overlaid]
    for members in groups:
        sizes = {specs[name].page_size_bytes for name in members}
        if len(sizes) > 1:
            raise CacheError(
                f"layers {', '.join(members)} overlay each other, but their pages have {sizes} bytes; "
                "give them pages of one size"
            )
    return groups


def _split(specs: Iterable[AttentionSpec], block_size: int, kernel_block_size: int | None) -> int:
    """Kernel blocks per block, the same number for every layer."""
    if kernel_block_size is None:
        return 1
    if not is_count(kernel_block_size) or kernel_block_size < 1 or block_size % kernel_block_size:
        raise CacheError(
            f"blocks of {block_size} tokens do not split into kernel blocks of {kernel_block_size}; "
            "give a divisor"
        )
    ratio = block_size // kernel_block_size
    for spec in specs:
        if spec.block_size % ratio:
            raise CacheError(
                f"blocks of {block_size} tokens split into {ratio}, but those of another layer have "
                f"{spec.block_size} tokens; give a kernel_block_size that splits both"
            )
        if ratio > 1 and spec.page_size_padded is not None:
            raise CacheError(
                "a padded page cannot be split into kernel blocks; give a smaller block size"
            )
    return ratio


def _nan_like(tensor: torch.Tensor) -> torch.Tensor:
    """An element of NaN; for integers one with every bit set, so that scales stored beside integer
    codes (`formats`) are NaN too."""
    if tensor.is_floating_point():
        return torch.tensor(float("nan"), device=tensor.device).to(tensor.dtype)
    return ~torch.zeros((), dtype=tensor.dtype, device=tensor.device)

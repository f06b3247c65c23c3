"""Subjects: attnkit backends, reached only by the way users reach them.

In: a backend by any name selection knows (or "auto"), and optionally a layout. Out: contenders that
run through layer, builder and impl. The plan is built once, outside the timed part of attention.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from attnkit.bench.contender import NotInstalled, Prepared, Refused
from attnkit.bench.inputs import Inputs
from attnkit.contract import KVCacheLayout
from attnkit.errors import BackendUnavailable, UnsupportedConfiguration
from attnkit.kvcache.pool import PagedKVCache
from attnkit.layer import Attention

_COUNTER = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A backend of attnkit's, or one that was plugged into it.

    Attributes:
        backend: the name it was asked for by.
        layout: of the pages; None: the one the backend prefers.
    """

    backend: str
    layout: KVCacheLayout | None = None
    is_rival: bool = False

    @property
    def name(self) -> str:
        # Of path/to/file.py:Class the path says nothing that a table has room for.
        name = self.backend.rsplit("/", 1)[-1]
        return name if self.layout is None else f"{name} {self.layout.name}"

    def prepare(self, inputs: Inputs) -> Prepared:
        """Build the layer, lay out its pages, plan the batch."""
        workload = inputs.workload
        owner = self._layer(inputs)
        layout = self._layout(owner)
        selected = owner.selection.name
        note = (
            f"{layout.name} pages"
            if selected == self.backend
            else f"{selected}, {layout.name} pages"
        )
        if workload.kind == "build":
            builder = owner.make_builder()
            return Prepared(run=lambda: builder.build(0, inputs.batch), note=note, capturable=False)

        pages = self._pages(owner, inputs, layout)
        key, value = inputs.new_tokens
        if workload.kind == "write":
            if owner.backend.forward_includes_kv_cache_update:
                raise Refused(
                    f"{selected} writes K and V inside its forward, not in a call of its own"
                )
            slots = inputs.batch.slot_mapping

            def write() -> torch.Tensor:
                owner.impl.do_kv_cache_update(owner, key, value, pages, slots)
                return pages

            return Prepared(run=write, note=note)

        # A layer that shares the owner's cache attends and writes nothing, which is what rivals do.
        reader = self._layer(inputs, kv_sharing_target_layer_name=owner.layer_name)
        plan = owner.build(inputs.batch)
        query = inputs.query
        return Prepared(run=lambda: reader(query, key, value, pages, plan), note=note)

    def _layer(self, inputs: Inputs, kv_sharing_target_layer_name: str | None = None) -> Attention:
        workload = inputs.workload
        try:
            return Attention(
                workload.num_heads,
                workload.head_size,
                None,
                workload.num_kv_heads,
                kv_cache_dtype=workload.kv_cache_dtype,
                kv_sharing_target_layer_name=kv_sharing_target_layer_name,
                dtype=workload.torch_dtype,
                device=inputs.device,
                backend=self.backend,
                layer_name=f"bench.{next(_COUNTER)}",
                block_size=workload.block_size,
            )
        except BackendUnavailable as absent:
            raise NotInstalled(str(absent)) from absent
        except UnsupportedConfiguration as refusal:
            raise Refused("; ".join(refusal.reasons) or str(refusal)) from refusal

    def _layout(self, layer: Attention) -> KVCacheLayout:
        allowed = layer.backend.supported_kv_cache_layouts()
        if self.layout is None:
            return KVCacheLayout.LBNHC if allowed is None else allowed[0]
        if allowed is not None and self.layout not in allowed:
            names = ", ".join(layout.name for layout in allowed)
            raise Refused(f"layout {self.layout.name} is not supported (allowed: {names})")
        return self.layout

    def _pages(self, layer: Attention, inputs: Inputs, layout: KVCacheLayout) -> torch.Tensor:
        """The shared pages where the backend packs a page as anybody does, else its own, filled by
        its own write."""
        spec = layer.get_kv_cache_spec()
        assert spec is not None
        plain = inputs.spec
        dense = (plain.head_slots, plain.num_states, plain.content_size, plain.dtype)
        if inputs.plain_format and dense == (
            spec.head_slots,
            spec.num_states,
            spec.content_size,
            spec.dtype,
        ):
            return inputs.pages(layout)
        if layer.backend.forward_includes_kv_cache_update:
            raise Refused(
                f"{layer.selection.name} packs its pages its own way and writes them inside forward, "
                "so they cannot be filled from outside"
            )
        num_blocks = inputs.workload.num_pages + 1
        pool = PagedKVCache(
            {layer.layer_name: spec}, num_blocks, device=inputs.device, layout=layout
        )
        pages = pool[layer.layer_name]
        offsets = torch.arange(spec.block_size, device=inputs.device)
        for request, ids in enumerate(inputs.block_tables):
            k, v = (x.to(layer.dtype).contiguous() for x in inputs.sequence(request))
            blocks = torch.tensor(ids, device=inputs.device)
            slots = (blocks[:, None] * spec.block_size + offsets).flatten()[: k.shape[0]]
            layer.impl.do_kv_cache_update(layer, k, v, pages, slots.contiguous())
        return pages

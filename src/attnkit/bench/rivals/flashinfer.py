"""FlashInfer: its batch wrappers over paged K and V, planned beforehand.

In: pages, shared or a copy. Out: the decode wrapper for one new token per request, the prefill wrapper
for everything else. Which kernel the prefill wrapper runs is part of the name, since neither wins
everywhere: "fa3" for long queries on Hopper, "fa2" packs short ones with their group.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from attnkit.bench.contender import Prepared, Refused
from attnkit.bench.inputs import Inputs
from attnkit.bench.rivals.pages import need, own_pages, refuse_coded, shared_pages
from attnkit.bench.workloads import ATTENTION_KINDS

_WORKSPACE = 512 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashInfer:
    """FlashInfer.

    Attributes:
        kernel: of the prefill wrapper; None: "fa3" on sm_90, else "fa2".
        own: on a copy of the pages in the layout it documents.
    """

    name: str
    kernel: str | None = None
    own: bool = False
    is_rival: bool = True

    def prepare(self, inputs: Inputs) -> Prepared:
        workload = inputs.workload
        flashinfer = need("cuda", inputs, "flashinfer")
        refuse_coded(inputs)
        single = workload.kind in ("decode", "build")
        if single and self.kernel is not None:
            raise Refused("differs from flashinfer only where queries are longer than one token")
        if workload.kind == "build":
            if self.own:
                raise Refused("plans as flashinfer does")
            return self._prepare_plan(flashinfer, inputs)
        if workload.kind not in ATTENTION_KINDS:
            raise Refused("attention only")
        wrapper = _decoder(flashinfer, inputs) if single else self._prefiller(flashinfer, inputs)
        _plan(wrapper, inputs, _paging(inputs), single=single)
        if self.own:
            pages: Any = own_pages(inputs)
            note = "a copy of the pages in its own layout"
        else:
            pages = shared_pages(inputs)
            note = f"the same {inputs.any_layout.name} pages"
        return Prepared(run=lambda: wrapper.run(inputs.query, pages), note=note)

    def _prefiller(self, flashinfer: ModuleType, inputs: Inputs) -> Any:
        kernel = self.kernel
        if kernel is None:
            hopper = torch.cuda.get_device_capability(inputs.device)[0] == 9
            kernel = "fa3" if hopper else "fa2"
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper
        return wrapper(_workspace(inputs), "NHD", backend=kernel)

    def _prepare_plan(self, flashinfer: ModuleType, inputs: Inputs) -> Prepared:
        wrapper, paging = _decoder(flashinfer, inputs), _paging(inputs)
        return Prepared(
            run=lambda: _plan(wrapper, inputs, paging, single=True), note="plan", capturable=False
        )


def _workspace(inputs: Inputs) -> torch.Tensor:
    # Zeros, as its documentation asks for before the first use.
    return torch.zeros(_WORKSPACE, dtype=torch.uint8, device=inputs.device)


def _decoder(flashinfer: ModuleType, inputs: Inputs) -> Any:
    return flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        _workspace(inputs), "NHD", use_tensor_cores=True
    )


Paging = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _paging(inputs: Inputs) -> Paging:
    """The block table in its terms: pages of all requests in one row, where each request's begin, and
    how many tokens its last page has. An engine that uses FlashInfer keeps it so."""
    workload, size = inputs.workload, inputs.workload.block_size
    lens = torch.tensor(workload.seq_lens, dtype=torch.int32)
    counts = (lens + size - 1) // size
    offsets = torch.zeros(workload.num_reqs + 1, dtype=torch.int32)
    offsets[1:] = counts.cumsum(0)
    ids = torch.tensor([i for ids in inputs.block_tables for i in ids], dtype=torch.int32)
    last = (lens - 1) % size + 1
    return offsets.to(inputs.device), ids.to(inputs.device), last.to(inputs.device)


def _plan(wrapper: Any, inputs: Inputs, paging: Paging, *, single: bool) -> None:
    workload, batch = inputs.workload, inputs.batch
    heads = (
        workload.num_heads,
        workload.num_kv_heads,
        workload.head_size,
        workload.block_size,
    )
    types = {"q_data_type": workload.torch_dtype, "kv_data_type": workload.cache_torch_dtype}
    if single:
        wrapper.plan(*paging, *heads, **types)
    else:
        wrapper.plan(batch.query_start_loc, *paging, *heads, causal=True, **types)


FLASHINFER = FlashInfer(name="flashinfer")
FLASHINFER_OWN = FlashInfer(name="flashinfer-own", own=True)
FLASHINFER_FA2 = FlashInfer(name="flashinfer-fa2", kernel="fa2")

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

from attnkit.backends.flashinfer import Paging, Wrappers, plan_wrapper
from attnkit.bench.contender import Prepared, Refused
from attnkit.bench.inputs import Inputs
from attnkit.bench.rivals.pages import need, own_pages, refuse_coded, shared_pages
from attnkit.bench.workloads import ATTENTION_KINDS


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
        wrappers = Wrappers(flashinfer, inputs.device, self._kernel_of(inputs))
        wrapper = _plan(wrappers, inputs, _paging(inputs), single=single)
        if self.own:
            pages: Any = own_pages(inputs)
            note = "a copy of the pages in its own layout"
        else:
            pages = shared_pages(inputs)
            note = f"the same {inputs.any_layout.name} pages"
        return Prepared(run=lambda: wrapper.run(inputs.query, pages), note=note)

    def _kernel_of(self, inputs: Inputs) -> str:
        if self.kernel is not None:
            return self.kernel
        if inputs.device.type != "cuda":
            return "fa2"
        return "fa3" if torch.cuda.get_device_capability(inputs.device)[0] == 9 else "fa2"

    def _prepare_plan(self, flashinfer: ModuleType, inputs: Inputs) -> Prepared:
        wrappers, paging = Wrappers(flashinfer, inputs.device, "fa2"), _paging(inputs)
        wrapper = wrappers.decode()
        return Prepared(
            run=lambda: _plan(wrappers, inputs, paging, single=True, wrapper=wrapper),
            note="plan",
            capturable=False,
        )


def _paging(inputs: Inputs) -> Paging:
    """The block table in its terms. An engine that uses FlashInfer keeps it so."""
    workload = inputs.workload
    lens = torch.tensor(workload.seq_lens, dtype=torch.int32)
    return Paging.of(inputs.batch.block_table_tensor, lens, workload.block_size)


def _plan(
    wrappers: Wrappers, inputs: Inputs, paging: Paging, *, single: bool, wrapper: Any = None
) -> Any:
    """As the flashinfer backend plans."""
    workload = inputs.workload
    return plan_wrapper(
        wrappers,
        paging,
        inputs.batch.query_start_loc_cpu,
        is_decode=single,
        num_heads=workload.num_heads,
        num_kv_heads=workload.num_kv_heads,
        head_size=workload.head_size,
        block_size=workload.block_size,
        scale=workload.head_size**-0.5,
        dtype=workload.torch_dtype,
        kv_dtype=workload.cache_torch_dtype,
        wrapper=wrapper,
    )


FLASHINFER = FlashInfer(name="flashinfer")
FLASHINFER_OWN = FlashInfer(name="flashinfer-own", own=True)
FLASHINFER_FA2 = FlashInfer(name="flashinfer-fa2", kernel="fa2")

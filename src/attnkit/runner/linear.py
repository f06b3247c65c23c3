"""PackedLinear: a linear layer whose weight lies the way the CPU's matrix product reads it.

In: a model on the CPU. Out: the same model with its 16-bit `nn.Linear` replaced. torch's own layer
sorts such a weight anew in every call, which takes as long as a decode step's product itself: with
16 rows, 576 x 1536 and 576 x 49,152 weights took 1.5 and 1.8 times as long.
"""

from __future__ import annotations

import torch
from torch import nn

_HINT_ROWS = 16
"""Rows the packing is chosen for: decode steps, where a weight is read for few rows."""


class PackedLinear(nn.Module):
    """y = x W^T + b with W packed for oneDNN. For inference; torch.compile packs by itself.

    Attributes:
        weight: (out_features, in_features); its shape and dtype can be read, its values not.
        bias: (out_features,) or None.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _HINT_ROWS)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


def pack_linears(model: nn.Module) -> int:
    """Replace the linear layers of `model` whose weights can be packed, in place.

    A weight that another module shares (an embedding tied to the output layer) is copied; of the
    others, only the packed form stays in memory.

    Returns:
        How many layers were replaced.
    """
    num_packed = 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and is_packable(child.weight):
                setattr(module, name, PackedLinear(child))
                num_packed += 1
    return num_packed


def is_packable(weight: torch.Tensor) -> bool:
    """A 16-bit weight on a CPU whose instructions oneDNN has kernels for."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype is torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype is torch.float16 and torch.ops.mkldnn._is_mkldnn_fp16_supported()

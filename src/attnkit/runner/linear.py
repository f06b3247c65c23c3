"""PackedLinear, BlockedLinear: linear layers whose weights lie the way a CPU's product reads them.

In: a model on the CPU. Out: the same model with its 16-bit `nn.Linear` replaced. torch's own layer
sorts such a weight anew in every call, which takes as long as a decode step's product itself: with
16 rows, 576 x 1536 and 576 x 49,152 weights took 1.5 and 1.8 times as long. In a compiled graph the
layer is one opaque node, `torch.ops.attnkit.linear`, with a handle instead of the weight: a graph
that holds packed weights cannot be kept on disk, and would be compiled at every start. Layers of the
same rows become one node, `torch.ops.attnkit.linears` (`join.py`).

On processors with a matrix unit few rows are multiplied by `backends/cpu/linear.c`, which reads oneDNN's
packed weight as it lies. oneDNN's call takes 14 us before it multiplies, seven times a layer: with ours,
compiled decode steps of SmolLM2-135M took 0.78 (16 rows) and 0.73 (one) of the time on two cores.

On processors that have vectors (AVX2, AVX-512) but no instructions for bfloat16, `linear.c` multiplies
all rows: there, two cores with AVX-512 gave SmolLM2-135M's products 0.6 of oneDNN's time with one row, a
quarter with 16 and with 128. That is less than float32's too, whose weights are twice as long.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn

from attnkit.backends.cpu.native import native_kernels
from attnkit.backends.cpu.operands import LINEAR_BLOCK, NativeLinear
from attnkit.backends.cpu.pages import give_back_freed, use_huge_pages_later

_HINT_ROWS = 16
"""Rows the packing is chosen for: decode steps, where a weight is read for few rows."""
_MOST_ROWS = 64
"""For more, oneDNN: ours took 0.5 to 0.9 of its time for 64 rows, 0.6 to 1.4 for 256."""
_FREED_BYTES = 32 << 20
"""Of weights, after which the system gets them back: what a thread that loads weights frees, others
cannot use."""


class OpaqueLinear(nn.Module):
    """A linear layer whose product a compiled graph does not look into. For inference.

    Attributes:
        in_features, out_features: sizes.
    """

    def __init__(self, linear: nn.Linear, name: str) -> None:
        """
        Args:
            linear: the layer to replace.
            name: its name in the model. Models loaded alike in two processes have equal handles, so
                that their graphs are the same to a cache.
        """
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._handle = f"{name}#{next(_COUNTER)}"
        _LAYERS[self._handle] = self

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """The product; what the node calls."""
        raise NotImplementedError

    @classmethod
    def multiply_all(cls, layers: Sequence[Any], x: torch.Tensor) -> list[torch.Tensor]:
        """Products of the same rows with the weights of several layers of this class."""
        return [layer.multiply(x) for layer in layers]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`multiply`, or in a graph the node that stands for it; the result has x's dtype."""
        if torch.compiler.is_compiling():
            return torch.ops.attnkit.linear(x, self._handle, self.out_features, x.dtype)
        return self.multiply(x)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


class PackedLinear(OpaqueLinear):
    """y = x W^T + b with W packed for oneDNN.

    Attributes:
        weight: (out_features, in_features); its shape and dtype can be read, its values not.
        bias: (out_features,) or None.
        native: the weight as our own kernel reads it; None: that does not serve here.
    """

    native: NativeLinear | None = None

    def __init__(self, linear: nn.Linear, name: str = "linear") -> None:
        super().__init__(linear, name)
        packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _HINT_ROWS)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias = linear.bias
        fits = self.bias is None or self.bias.dtype is packed.dtype
        if fits and _is_in_blocks(*linear.weight.shape, packed.dtype):
            self.native = NativeLinear.pack(packed, self.bias)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        return self.multiply_all([self], x)[0]

    @classmethod
    def multiply_all(cls, layers: Sequence[Any], x: torch.Tensor) -> list[torch.Tensor]:
        kernels, width = native_kernels(), x.shape[-1]
        natives = [layer.native for layer in layers if layer.native and layer.in_features == width]
        few = x.dtype is torch.bfloat16 and x.numel() <= _MOST_ROWS * width
        if kernels is None or not few or len(natives) < len(layers):
            multiply = torch.ops.mkldnn._linear_pointwise.default
            return [multiply(x, layer.weight, layer.bias, "none", [], "") for layer in layers]
        outputs = [x.new_empty(*x.shape[:-1], layer.out_features) for layer in layers]
        kernels.multiply(natives, x.contiguous(), outputs)
        return outputs


class BlockedLinear(OpaqueLinear):
    """y = x W^T + b in bfloat16 by our own vectors, which the processor is without instructions for.

    A row's bits do not depend on the rows beside it.

    Attributes:
        weight: (out_features, in_features); its shape and dtype can be read, its values are in blocks.
        bias: (out_features,) or None.
    """

    def __init__(self, linear: nn.Linear, name: str = "linear") -> None:
        super().__init__(linear, name)
        self.weight = nn.Parameter(_in_blocks(linear.weight.detach()), requires_grad=False)
        self.bias = linear.bias
        self.native = NativeLinear.pack(self.weight, self.bias)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        return self.multiply_all([self], x)[0]

    @classmethod
    def multiply_all(cls, layers: Sequence[Any], x: torch.Tensor) -> list[torch.Tensor]:
        kernels, width = native_kernels(), x.shape[-1]
        assert kernels is not None, "a layer of this kind is made where there are kernels"
        for layer in layers:
            if x.dtype is not torch.bfloat16 or width != layer.in_features:
                raise RuntimeError(
                    f"rows of {width} numbers of {x.dtype} do not fit a weight for {layer.in_features} "
                    "of bfloat16"
                )
        outputs = [x.new_empty(*x.shape[:-1], layer.out_features) for layer in layers]
        kernels.multiply([layer.native for layer in layers], x.contiguous(), outputs)
        return outputs


def pack_linears(model: nn.Module) -> int:
    """Replace the linear layers of `model` whose weights can be packed, in place.

    A weight that another module shares (an embedding tied to the output layer) is copied; of the
    others, only the packed form stays in memory.

    Returns:
        How many layers were replaced.
    """
    mkldnn, pieces = torch.ops.mkldnn, []

    def pack(linear: nn.Linear, name: str) -> nn.Module | None:
        if is_for_vectors(linear):
            blocked = BlockedLinear(linear, name)
            pieces.append((blocked.weight.data_ptr(), blocked.weight.nbytes))
            return blocked
        if not is_packable(linear.weight):
            return None
        layer = PackedLinear(linear, name)
        pieces.append((mkldnn.data_ptr(layer.weight), mkldnn._nbytes(layer.weight)))
        return layer

    num_replaced = replace_linears(model, pack)
    use_huge_pages_later(pieces)
    return num_replaced


def replace_linears(model: nn.Module, make: Callable[[nn.Linear, str], nn.Module | None]) -> int:
    """Put other layers in the place of linear ones, one by one: few weights are there in both forms.

    Args:
        make: from a layer and its name, the one to take its place; None: it stays.

    Returns:
        How many layers were replaced.
    """
    # Names alone: a list of modules would keep every weight until the end.
    every = model.named_modules(remove_duplicate=False)
    names = [name for name, module in every if name and type(module) is nn.Linear]
    num_replaced = num_freed = 0
    for name in names:
        linear: Any = model.get_submodule(name)
        layer = make(linear, name)
        if layer is None:
            continue
        model.set_submodule(name, layer)
        num_replaced += 1
        num_freed += linear.weight.nbytes
        del linear
        if num_freed > _FREED_BYTES:
            give_back_freed()
            num_freed = 0
    if num_freed:
        give_back_freed()
    return num_replaced


def is_for_vectors(linear: nn.Linear) -> bool:
    """A layer in bfloat16 on a CPU that is without instructions for it, of whole blocks."""
    weight, bias = linear.weight, linear.bias
    if weight.device.type != "cpu" or not _has_whole_blocks(
        linear.out_features, linear.in_features, weight.dtype
    ):
        return False
    kernels = native_kernels()
    fits = bias is None or bias.dtype is weight.dtype
    return fits and kernels is not None and kernels.has_vector_products


def is_packable(weight: torch.Tensor) -> bool:
    """A 16-bit weight on a CPU whose instructions oneDNN has kernels for."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype is torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype is torch.float16 and torch.ops.mkldnn._is_mkldnn_fp16_supported()


@functools.cache
def _is_in_blocks(out_features: int, in_features: int, dtype: torch.dtype) -> bool:
    """Whether there is a matrix unit and oneDNN packs weights of this shape as `linear.c` reads them,
    which it does not promise: found out by packing numbers that tell where they lie."""
    if not _has_whole_blocks(out_features, in_features, dtype):
        return False
    kernels = native_kernels()
    if kernels is None or not kernels.has_matrix_unit:
        return False
    size = out_features * in_features
    places = torch.arange(size, dtype=torch.int32).to(torch.int16).view(out_features, in_features)
    packed = torch.ops.mkldnn._reorder_linear_weight(places.view(dtype), _HINT_ROWS)
    if torch.ops.mkldnn._nbytes(packed) != 2 * size:
        return False
    numbers = (ctypes.c_int16 * size).from_address(torch.ops.mkldnn.data_ptr(packed))
    return torch.equal(torch.frombuffer(numbers, dtype=torch.int16), _in_blocks(places).flatten())


def _has_whole_blocks(out_features: int, in_features: int, dtype: torch.dtype) -> bool:
    whole = out_features % LINEAR_BLOCK == 0 and in_features % LINEAR_BLOCK == 0
    return whole and dtype is torch.bfloat16


def _in_blocks(weight: torch.Tensor) -> torch.Tensor:
    """Numbers of (out_features, in_features) in the order in which `linear.c` reads them."""
    pairs = weight.reshape(weight.shape[0] // LINEAR_BLOCK, LINEAR_BLOCK, -1, 2)
    return pairs.transpose(1, 2).contiguous().view(weight.shape)


_COUNTER = itertools.count()
_LAYERS: WeakValueDictionary[str, OpaqueLinear] = WeakValueDictionary()


def _linear(x: torch.Tensor, handle: str, out_features: int, dtype: torch.dtype) -> torch.Tensor:
    return _LAYERS[handle].multiply(x)


def _linear_fake(
    x: torch.Tensor, handle: str, out_features: int, dtype: torch.dtype
) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], out_features, dtype=dtype)


def _linears(
    x: torch.Tensor, handles: list[str], out_features: list[int], dtype: torch.dtype
) -> list[torch.Tensor]:
    layers = [_LAYERS[handle] for handle in handles]
    kind = type(layers[0])
    if any(type(layer) is not kind for layer in layers):
        return [layer.multiply(x) for layer in layers]
    return kind.multiply_all(layers, x)


def _linears_fake(
    x: torch.Tensor, handles: list[str], out_features: list[int], dtype: torch.dtype
) -> list[torch.Tensor]:
    return [x.new_empty(*x.shape[:-1], size, dtype=dtype) for size in out_features]


_LIBRARY = torch.library.Library("attnkit", "FRAGMENT")
_LIBRARY.define("linear(Tensor x, str handle, int out_features, ScalarType dtype) -> Tensor")
_LIBRARY.impl("linear", _linear, "CompositeExplicitAutograd")
torch.library.register_fake("attnkit::linear", _linear_fake, lib=_LIBRARY)
_LIBRARY.define(
    "linears(Tensor x, str[] handles, int[] out_features, ScalarType dtype) -> Tensor[]"
)
_LIBRARY.impl("linears", _linears, "CompositeExplicitAutograd")
torch.library.register_fake("attnkit::linears", _linears_fake, lib=_LIBRARY)

LINEAR, LINEARS = torch.ops.attnkit.linear.default, torch.ops.attnkit.linears.default
"""The operations, as nodes of a graph have them."""

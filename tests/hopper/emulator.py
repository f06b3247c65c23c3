"""Runs Gluon kernels on a CPU, roles as threads, so that their logic can be tested without a GPU.

In: a device module of the hopper backend, loaded with this module in the place of `gluon_api`. Out: the
same kernels as Python over numpy, with what makes Hopper hard kept: copies finish late and in any order
and poison their destination until then, products read their operands only when they are waited for,
barriers have phases, and a deadlock is an error. Loads and stores outside a tensor are errors, and so
are int32 values that do not fit.

What it cannot see: layouts, registers, proxy fences, memory order, and anything of the compiler.
"""

from __future__ import annotations

import itertools
import random
import re
import threading
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

PACKAGE = "attnkit.backends.hopper"
_TORCH = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "uint8": torch.uint8,
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "int1": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _TORCH.items()}
_FLOATS = ("fp16", "bf16", "fp32")
_WORDS = {"int32": np.int32, "fp32": np.float32}


class Value:
    """A scalar or tensor in registers. Floats are kept in float32, rounded to their dtype; integers in
    int64, checked against theirs."""

    __slots__ = ("array", "dtype")

    def __init__(self, array: Any, dtype: str) -> None:
        self.array = np.asarray(array)
        self.dtype = dtype
        if dtype == "int32" and not ((self.array >= -(1 << 31)) & (self.array < 1 << 31)).all():
            raise OverflowError("an int32 value does not fit")

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def reshape(self, shape: Sequence[int]) -> Value:
        return Value(self.array.reshape(shape), self.dtype)

    @property
    def type(self) -> Any:
        return types.SimpleNamespace(layout=None)

    def to(self, dtype: str, bitcast: bool = False) -> Value:
        if bitcast and dtype in ("int32", "fp32"):
            words = self.array.astype(_WORDS[self.dtype]).view(_WORDS[dtype])
            return Value(words.astype(np.int64) if dtype == "int32" else words, dtype)
        if bitcast:
            assert dtype == "fp8e4nv"
            codes = torch.from_numpy(self.array.astype(np.uint8))
            return Value(codes.view(torch.float8_e4m3fn).float().numpy(), "fp32")
        if dtype == "int8":
            return Value(self.array.astype(np.int8).astype(np.int64), dtype)
        if dtype in ("fp16", "bf16"):
            rounded = torch.from_numpy(np.array(self.array, np.float32)).to(_TORCH[dtype])
            return Value(rounded.float().numpy(), dtype)
        if dtype == "fp32":
            return Value(self.array.astype(np.float32), dtype)
        return Value(self.array.astype(np.int64), dtype)

    def __bool__(self) -> bool:
        assert self.array.ndim == 0, "a tensor is not a condition"
        return bool(self.array)

    def __index__(self) -> int:
        assert self.array.ndim == 0
        return int(self.array)

    __int__ = __index__

    def _with(self, other: Any, op: Callable[[Any, Any], Any], flip: bool = False) -> Value:
        a, b = self, _value(other, self.dtype)
        if flip:
            a, b = b, a
        kind = _wider(a.dtype, b.dtype)
        with np.errstate(all="ignore"):
            result = op(a.array, b.array)
        if result.dtype == np.bool_:
            return Value(result, "int1")
        if kind in _FLOATS:
            return Value(result.astype(np.float32), kind)
        return Value(result, kind)

    def __add__(self, other: Any) -> Any:
        if isinstance(other, Pointer):
            return other + self
        return self._with(other, np.add)

    def __radd__(self, other: Any) -> Value:
        return self._with(other, np.add, True)

    def __sub__(self, other: Any) -> Value:
        return self._with(other, np.subtract)

    def __rsub__(self, other: Any) -> Value:
        return self._with(other, np.subtract, True)

    def __mul__(self, other: Any) -> Value:
        return self._with(other, np.multiply)

    def __rmul__(self, other: Any) -> Value:
        return self._with(other, np.multiply, True)

    def __truediv__(self, other: Any) -> Value:
        return self._with(other, np.divide)

    def __rtruediv__(self, other: Any) -> Value:
        return self._with(other, np.divide, True)

    def __floordiv__(self, other: Any) -> Value:
        return self._with(other, _quotient)

    def __mod__(self, other: Any) -> Value:
        return self._with(other, _remainder)

    def __and__(self, other: Any) -> Value:
        return self._with(other, np.bitwise_and)

    __rand__ = __and__

    def __rshift__(self, other: Any) -> Value:
        return self._with(other, np.right_shift)

    def __lshift__(self, other: Any) -> Value:
        return self._with(other, np.left_shift)

    def __or__(self, other: Any) -> Value:
        return self._with(other, np.bitwise_or)

    def __xor__(self, other: Any) -> Value:
        return self._with(other, np.bitwise_xor)

    def __neg__(self) -> Value:
        return Value(-self.array, self.dtype)

    def __lt__(self, other: Any) -> Value:
        return self._with(other, np.less)

    def __le__(self, other: Any) -> Value:
        return self._with(other, np.less_equal)

    def __gt__(self, other: Any) -> Value:
        return self._with(other, np.greater)

    def __ge__(self, other: Any) -> Value:
        return self._with(other, np.greater_equal)

    def __eq__(self, other: object) -> Value:  # type: ignore[override]
        return self._with(other, np.equal)

    def __ne__(self, other: object) -> Value:  # type: ignore[override]
        return self._with(other, np.not_equal)

    __hash__ = None  # type: ignore[assignment]


def _quotient(a: Any, b: Any) -> Any:
    """Towards zero, as the GPU divides."""
    return np.sign(a) * np.sign(b) * (np.abs(a) // np.maximum(np.abs(b), 1))


def _remainder(a: Any, b: Any) -> Any:
    return a - _quotient(a, b) * b


def _wider(a: str, b: str) -> str:
    order = ("int1", "uint8", "int8", "int16", "int32", "int64", "fp16", "bf16", "fp32")
    return max(a, b, key=order.index)


def _value(x: Any, like: str = "int32") -> Value:
    if isinstance(x, Value):
        return x
    if isinstance(x, (bool, np.bool_)):
        return Value(x, "int1")
    if isinstance(x, float):
        return Value(np.float32(x), like if like in _FLOATS else "fp32")
    if like in _FLOATS:
        return Value(np.float32(x), like)
    return Value(np.int64(x), like if like in ("int64", "int16") else "int32")


class Pointer:
    """Places in a tensor's storage."""

    def __init__(self, flat: torch.Tensor, offset: Any) -> None:
        self.flat, self.offset = flat, np.asarray(offset, np.int64)
        self.dtype = types.SimpleNamespace(element_ty=_NAMES[flat.dtype])

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Pointer:
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        return cls(torch.as_strided(tensor, (size,), (1,), 0), tensor.storage_offset())

    def __add__(self, other: Any) -> Pointer:
        x = _value(other)
        return Pointer(self.flat, self.offset + x.array)

    def at(self, mask: Any) -> tuple[np.ndarray, np.ndarray]:
        offsets = self.offset
        if mask is None:
            keep = np.ones(offsets.shape, bool)
        else:
            offsets, keep = np.broadcast_arrays(offsets, _value(mask).array)
        inside = (offsets >= 0) & (offsets < self.flat.numel())
        if not inside[keep].all():
            raise IndexError("access outside a tensor")
        return np.where(keep, offsets, 0), keep


@dataclass(frozen=True)
class TensorDescriptor:
    """A tensor map: boxes of `block_shape`, zeros outside."""

    base: torch.Tensor
    shape: Sequence[int]
    strides: Sequence[int]
    block_shape: Sequence[int]
    layout: Any

    def __post_init__(self) -> None:
        assert self.base.data_ptr() % 16 == 0
        assert self.strides[-1] == 1
        assert all(s * self.base.element_size() % 16 == 0 for s in self.strides[:-1])
        assert all(n > 0 for n in self.shape)
        assert len(self.shape) == len(self.strides) == len(self.block_shape) <= 5

    @property
    def dtype(self) -> str:
        return _NAMES[self.base.dtype]

    def box(self, coordinates: Sequence[Any]) -> np.ndarray:
        result = np.zeros(self.block_shape, np.float32)
        starts = [int(c) for c in coordinates]
        lows = [max(0, -s) for s in starts]
        highs = [
            min(b, n - s) for b, n, s in zip(self.block_shape, self.shape, starts, strict=True)
        ]
        if any(low >= high for low, high in zip(lows, highs, strict=True)):
            return result
        view = torch.as_strided(
            self.base, tuple(self.shape), tuple(self.strides), self.base.storage_offset()
        )
        part = view[
            tuple(
                slice(s + low, s + high) for s, low, high in zip(starts, lows, highs, strict=True)
            )
        ]
        result[tuple(slice(a, b) for a, b in zip(lows, highs, strict=True))] = part.float().numpy()
        return result


class Shared:
    """Shared memory of matrices, as strips of columns: array (..., strips, rows, columns). Read as
    int16, it holds bytes, two of which are an element."""

    def __init__(self, array: np.ndarray, dtype: str, transposed: bool = False) -> None:
        self.array, self.dtype, self.transposed = array, dtype, transposed

    @property
    def shape(self) -> tuple[int, ...]:
        *lead, strips, rows, columns = self.array.shape
        return (*lead, rows, strips * columns // (2 if self.dtype == "int16" else 1))

    def index(self, i: Any) -> Shared:
        return Shared(self.array[int(i)], self.dtype)

    def permute(self, order: tuple[int, ...]) -> Shared:
        assert order == (1, 0)
        return Shared(self.array, self.dtype, True)

    def read(self) -> np.ndarray:
        matrix = np.concatenate(list(self.array), axis=1)
        if self.dtype == "int16":
            matrix = np.ascontiguousarray(matrix.astype(np.uint8)).view(np.int16)
        return matrix.T if self.transposed else matrix

    def load(self, layout: Any) -> Value:
        return Value(_in_registers(self.read(), self.dtype), self.dtype)

    def store(self, value: Value) -> None:
        assert value.dtype == self.dtype
        assert not self.transposed
        strips = np.split(value.array, self.array.shape[0], axis=1)
        self.array[...] = np.stack(strips)


def _in_registers(array: np.ndarray, dtype: str) -> np.ndarray:
    return array.copy() if dtype in _FLOATS else array.astype(np.int64)


class Boxes:
    """Shared memory as it is copied into: array (boxes, *box)."""

    def __init__(self, array: np.ndarray, dtype: str) -> None:
        self.array, self.dtype = array, dtype

    def index(self, i: Any) -> Boxes:
        i = int(i)
        assert 0 <= i < self.array.shape[0], "no such box"
        return Boxes(self.array[i], self.dtype)

    def load(self, layout: Any) -> Value:
        return Value(_in_registers(self.array, self.dtype), self.dtype)

    def store(self, value: Value) -> None:
        assert value.dtype == self.dtype
        self.array[...] = value.array

    def matrices(self, dtype: str, shape: Sequence[int]) -> Shared:
        *lead, rows, columns = shape
        if (self.dtype, dtype) == ("uint8", "int16"):
            columns *= 2
        elif dtype != self.dtype:  # Other numbers take their place.
            assert {self.dtype, dtype} == {"bf16", "fp16"}
        assert np.prod(lead) * rows * columns == self.array.size
        strip = self.array.shape[-1]
        return Shared(self.array.reshape(*lead, columns // strip, rows, strip), dtype)

    def poison(self) -> None:
        """NaN, or its code."""
        self.array[...] = np.nan if self.dtype in _FLOATS else 0x7F


class Barrier:
    """An mbarrier: arrivals and bytes of a phase."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.count = self.pending = self.bytes = self.phase = 0

    def init(self, count: int) -> None:
        self.count = self.pending = count

    def change(self, arrivals: int = 0, num_bytes: int = 0) -> None:
        with self.program.changed:
            assert self.count, "barrier was not initialised"
            self.pending -= arrivals
            self.bytes += num_bytes
            assert self.pending >= 0, "more arrivals than the barrier counts"
            if self.pending == 0 and self.bytes == 0:
                self.phase += 1
                self.pending = self.count
                self.program.notify()

    def wait(self, phase: int) -> None:
        self.program.wait(lambda: self.phase & 1 != phase & 1, f"barrier phase {phase}")


class BarrierArray:
    """Barriers of a ring."""

    def __init__(self, barriers: list[Barrier]) -> None:
        self.barriers = barriers

    def index(self, i: Any) -> Barrier:
        return self.barriers[int(i)]


class Product:
    """A product in flight. Its operands are read when it is waited for."""

    def __init__(self, a: Any, b: Any, acc: Any, use_acc: bool) -> None:
        self.a, self.b, self.acc, self.use_acc = a, b, acc, use_acc
        self.result: Value | None = None

    def run(self) -> None:
        a, b = (x.read() if isinstance(x, Shared) else x.array for x in (self.a, self.b))
        acc = self.acc.result if isinstance(self.acc, Product) else self.acc
        assert acc is not None
        assert acc.dtype == "fp32"
        with np.errstate(all="ignore"):
            product = torch.from_numpy(a) @ torch.from_numpy(b)
            result = product.numpy() + acc.array if self.use_acc else product.numpy()
            self.result = Value(result, "fp32")


class Program:
    """One running program: its roles, barriers and copies under way.

    Copies finish only when some role has nothing else to do, and then in any order.
    """

    def __init__(self, program_id: tuple[int, ...], grid: tuple[int, ...], seed: int) -> None:
        self.program_id, self.grid = program_id, grid
        self.changed = threading.Condition()
        self.copies: list[Callable[[], None]] = []
        self.random = random.Random(seed)
        self.named: dict[int, list[int]] = {}
        self.failed: BaseException | None = None
        self.num_roles = self.num_waiting = 0

    def notify(self) -> None:
        """Let every role that waits look again."""
        self.num_waiting = 0
        self.changed.notify_all()

    def wait(self, ready: Callable[[], bool], what: str) -> None:
        with self.changed:
            while not ready():
                if self.failed is not None:
                    raise RuntimeError("another role failed")
                if self.copies:
                    self.copies.pop(self.random.randrange(len(self.copies)))()
                    continue
                self.num_waiting += 1
                if self.num_waiting == self.num_roles:
                    raise TimeoutError(f"deadlock: the last role to wait waits for {what}")
                self.changed.wait()

    def run(self, roles: Sequence[Callable[[], None]]) -> None:
        """All roles at once; the first error of any of them."""

        def guarded(role: Callable[[], None]) -> None:
            _HERE.program, _HERE.products = self, []
            try:
                role()
                assert not _HERE.products, "a product was never waited for"
            except BaseException as error:  # noqa: BLE001 (raised again by `run`)
                self.failed = self.failed or error
            with self.changed:
                self.num_roles -= 1
                self.notify()

        threads = [threading.Thread(target=guarded, args=(role,)) for role in roles]
        self.num_roles = len(threads)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for copy in self.copies:
            copy()
        if self.failed is not None:
            raise self.failed


_HERE = threading.local()
_ATOMIC = threading.Lock()


# What device code calls `gl`.


def _constexpr(x: Any) -> Any:
    return x


def _layout(*args: Any, **kwargs: Any) -> Any:
    return types.SimpleNamespace(parent=args[1] if len(args) > 1 else None)


def _load(pointer: Pointer, mask: Any = None, other: Any = None, cache_modifier: str = "") -> Value:
    offsets, keep = pointer.at(mask)
    name = pointer.dtype.element_ty
    got = pointer.flat[torch.from_numpy(offsets)]
    array = got.float().numpy() if name in _FLOATS else got.to(torch.int64).numpy()
    if mask is not None and not keep.all():
        assert other is not None, "masked elements have no value"
        array = np.where(keep, array, _value(other, name).array)
    return Value(array, name)


def _store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    offsets, keep = pointer.at(mask)
    value = _value(value, pointer.dtype.element_ty)
    array = np.broadcast_to(value.array, offsets.shape)[keep]
    pointer.flat[torch.from_numpy(offsets[keep])] = torch.from_numpy(np.array(array)).to(
        pointer.flat.dtype
    )


def _atomic_add(pointer: Pointer, value: Any, sem: str, scope: str) -> Value:
    assert sem == "acq_rel"
    assert scope == "gpu"
    with _ATOMIC:
        before = _load(pointer)
        _store(pointer, before + value)
    return before


def _where(condition: Any, a: Any, b: Any) -> Value:
    like = next((x.dtype for x in (a, b) if isinstance(x, Value)), "int32")
    a, b = _value(a, like), _value(b, like)
    return Value(np.where(_value(condition).array, a.array, b.array), _wider(a.dtype, b.dtype))


def _elementwise(function: Callable[..., Any]) -> Callable[..., Value]:
    def apply(*args: Any) -> Value:
        like = next((x.dtype for x in args if isinstance(x, Value)), "int32")
        values = [_value(x, like) for x in args]
        kind = values[0].dtype
        for v in values[1:]:
            kind = _wider(kind, v.dtype)
        with np.errstate(all="ignore"):
            result = function(*(v.array for v in values))
        return Value(result.astype(np.float32) if kind in _FLOATS else result, kind)

    return apply


def _reduce(function: Callable[..., Any]) -> Callable[[Value, int], Value]:
    def apply(x: Value, axis: int) -> Value:
        with np.errstate(all="ignore"):
            return Value(function(x.array, axis=axis), x.dtype)

    return apply


def _allocate(dtype: str, shape: Sequence[int], layout: Any) -> Any:
    program = _HERE.program
    if dtype == "int64":
        barriers = [Barrier(program) for _ in range(shape[0])]
        return barriers[0] if len(shape) == 1 else BarrierArray(barriers)
    boxes = Boxes(np.empty(shape, np.float32), dtype)
    boxes.poison()
    return boxes


def _warp_specialize(
    roles: Sequence[tuple[Callable[..., None], tuple[Any, ...]]],
    num_warps: Sequence[int],
    registers: Sequence[int],
) -> None:
    assert len(roles) == len(num_warps) + 1 == len(registers) + 1
    _HERE.program.run([lambda f=f, args=args: f(*args) for f, args in roles])


gl = types.SimpleNamespace(
    constexpr=_constexpr,
    static_range=range,
    int8="int8",
    int16="int16",
    int32="int32",
    int64="int64",
    float8e4nv="fp8e4nv",
    float16="fp16",
    bfloat16="bf16",
    float32="fp32",
    NVMMASharedLayout=_layout,
    NVMMADistributedLayout=_layout,
    BlockedLayout=_layout,
    SwizzledSharedLayout=_layout,
    SliceLayout=_layout,
    DotOperandLayout=_layout,
    DistributedLinearLayout=_layout,
    num_programs=lambda axis: Value(_HERE.program.grid[axis], "int32"),
    program_id=lambda axis: Value(_HERE.program.program_id[axis], "int32"),
    arange=lambda start, end, layout: Value(np.arange(start, end), "int32"),
    zeros=lambda shape, dtype, layout: Value(np.zeros(shape, np.float32), dtype),
    full=lambda shape, x, dtype, layout: Value(
        np.full(shape, _value(x, dtype).array, np.float32), dtype
    ),
    zeros_like=lambda x: Value(np.zeros_like(x.array), x.dtype),
    load=_load,
    store=_store,
    atomic_add=_atomic_add,
    where=_where,
    # fmaxnm and fminnm: a number wins over NaN.
    maximum=_elementwise(lambda a, b: np.fmax(a, b)),
    minimum=_elementwise(lambda a, b: np.fmin(a, b)),
    exp2=_elementwise(lambda x: np.exp2(x)),
    log2=_elementwise(lambda x: np.log2(x)),
    expand_dims=lambda x, axis: (
        Pointer(x.flat, np.expand_dims(x.offset, axis))
        if isinstance(x, Pointer)
        else Value(np.expand_dims(x.array, axis), x.dtype)
    ),
    convert_layout=lambda x, layout: x,
    reshape=lambda x, shape: x.reshape(shape),
    join=lambda a, b: Value(np.stack([a.array, b.array], axis=-1), a.dtype),
    permute=lambda x, order: Value(x.array.transpose(order), x.dtype),
    max=_reduce(np.fmax.reduce),
    sum=_reduce(np.sum),
    allocate_shared_memory=_allocate,
    warp_specialize=_warp_specialize,
)


def _expect(barrier: Barrier, num_bytes: int) -> None:
    barrier.change(arrivals=1, num_bytes=int(num_bytes))


def _arrive(barrier: Barrier, *, count: int = 1, pred: Any = True) -> None:
    if pred:
        barrier.change(arrivals=count)


def _wait(barrier: Barrier, phase: Any, pred: Any = True) -> None:
    if pred:
        barrier.wait(int(phase))


mbarrier = types.SimpleNamespace(
    MBarrierLayout=_layout,
    init=lambda barrier, count: barrier.init(count),
    expect=_expect,
    arrive=_arrive,
    wait=_wait,
)


def tma_load(desc: TensorDescriptor, coordinates: Any, barrier: Barrier, place: Boxes) -> None:
    assert list(place.array.shape) == list(desc.block_shape), "the box does not fit its place"
    coordinates = [int(c) for c in coordinates]
    place.poison()

    def finish() -> None:
        place.array[...] = desc.box(coordinates)
        barrier.change(num_bytes=-place.array.size * desc.base.element_size())

    program = _HERE.program
    with program.changed:
        program.copies.append(finish)
        program.notify()


def warpgroup_mma(a: Any, b: Shared, acc: Any, *, use_acc: bool = True, is_async: bool) -> Product:
    assert is_async
    product = Product(a, b, acc, use_acc)
    _HERE.products.append(product)
    return product


def mma_v2(a: Value, b: Value, acc: Value) -> Value:
    product = Product(a, b, acc, use_acc=True)
    product.run()
    assert product.result is not None
    return product.result


def warpgroup_mma_wait(num_outstanding: int, deps: Sequence[Any]) -> Any:
    products = _HERE.products
    while len(products) > num_outstanding:
        products.pop(0).run()
    results = []
    for x in deps:
        # What is still in flight can only be waited for once more, or be added to.
        landed = isinstance(x, Product) and x.result is not None
        results.append(x.result if landed else x)
    return results[0] if len(results) == 1 else tuple(results)


def reinterpret(buffer: Boxes, dtype: str, shape: Sequence[int], layout: Any) -> Shared:
    return buffer.matrices(dtype, shape)


def _float16_of_codes(codes: Value) -> Value:
    return codes.to("int8").to("fp8e4nv", bitcast=True).to("fp16")


def _named_barrier(x: Any, barrier_id: int, num_threads: int, waits: bool) -> None:
    program = _HERE.program
    with program.changed:
        state = program.named.setdefault(barrier_id, [0, 0])
        state[0] += 128
        generation = state[1]
        if state[0] == num_threads:
            state[0] = 0
            state[1] += 1
            program.notify()
            return
    if waits:
        program.wait(lambda: state[1] != generation, f"named barrier {barrier_id}")


class Kernel:
    """A jitted function: called from device code, or launched over a grid."""

    seeds = itertools.count()

    def __init__(self, function: Callable[..., Any]) -> None:
        self.fn = function
        self.arg_names = list(function.__code__.co_varnames[: function.__code__.co_argcount])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(**arguments: Any) -> None:
            for option in ("num_warps", "maxnreg", "enable_fp_fusion", "launch_pdl"):
                arguments.pop(option, None)
            converted = {name: _argument(x) for name, x in arguments.items()}
            order = [(i,) for i in range(grid[0])]
            seed = next(self.seeds)
            random.Random(seed).shuffle(order)
            for program_id in order:
                _HERE.program, _HERE.products = Program(program_id, grid, seed), []
                self.fn(**converted)

        return launch


def _argument(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return Pointer.of(x)
    if isinstance(x, int) and not isinstance(x, bool):
        return Value(np.int64(x), "int32" if abs(x) < 1 << 31 else "int64")
    if isinstance(x, float):
        return Value(np.float32(x), "fp32")
    return x


def _jit(function: Any = None, **options: Any) -> Any:
    return Kernel(function) if function is not None else Kernel


def _api() -> types.ModuleType:
    api = types.ModuleType(f"{PACKAGE}.gluon_api")
    api.__dict__.update(
        TensorDescriptor=TensorDescriptor,
        barrier=lambda: None,
        fade_rows=lambda acc, fade, num: acc * gl.expand_dims(fade, 1),
        fence_async_shared=lambda: None,
        float16_of_codes=_float16_of_codes,
        float16_of_pairs=lambda pairs: (
            _float16_of_codes(pairs & 0xFF),
            _float16_of_codes(pairs >> 8),
        ),
        gl=gl,
        gluon=types.SimpleNamespace(jit=_jit, constexpr_function=_constexpr),
        mbarrier=mbarrier,
        mma_v2=mma_v2,
        named_barrier_arrive=lambda x, i, n: _named_barrier(x, i, n, False),
        named_barrier_sync=lambda x, i, n: _named_barrier(x, i, n, True),
        opaque=lambda x: x,
        let_next_start=lambda x: None,
        wait_for_kernel_before=lambda x: None,
        reciprocal=lambda x: 1.0 / x,
        reinterpret=reinterpret,
        square_root=_elementwise(np.sqrt),
        tma_load=tma_load,
        warpgroup_mma=warpgroup_mma,
        warpgroup_mma_wait=warpgroup_mma_wait,
    )
    return api


def load(
    *names: str, edit: Callable[[str, str], str] = lambda name, source: source
) -> dict[str, types.ModuleType]:
    """Device modules by name, over this emulator; each may import those before it.

    Args:
        edit: (name, source) -> source, to plant faults.
    """
    import attnkit.backends.hopper as package

    folder = Path(package.__file__).parent
    modules = {f"{PACKAGE}.gluon_api": _api()}
    with mock.patch.dict("sys.modules", modules):
        import sys

        for name in names:
            module = types.ModuleType(f"{PACKAGE}.{name}")
            source = edit(name, (folder / f"{name}.py").read_text())
            assert not re.search(r"^import triton", source, re.M), f"{name} goes around gluon_api"
            exec(compile(source, f"{folder / name}.py", "exec"), module.__dict__)
            sys.modules[f"{PACKAGE}.{name}"] = modules[f"{PACKAGE}.{name}"] = module
    return {name: modules[f"{PACKAGE}.{name}"] for name in names}

"""Follows what runs: the memory of its tensors, the arithmetic of its matrix products, the bytes that all other
operations move, and the calls.

It works on real tensors and on fake ones alike, forward and backward.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch

from hf_gpipe.adapters.observation import fake_operations
from hf_gpipe.libraries.torch import (
    ATEN_GROUPED_MM,
    CPU_FLASH_ATTENTION,
    CPU_FLASH_ATTENTION_BACKWARD,
    FakeTensor,
    TorchDispatchMode,
    flop_registry,
    no_functions,
    storage_id,
    tree_leaves,
    unsafe_view,
)
from hf_gpipe.planner.costs.gpu_attention import attention_backward_flops, attention_flops

_aten = torch.ops.aten
_UNSAFE_VIEW = unsafe_view.default
_DEVICE = torch.ops.prim.device.default


@dataclass
class Phase:
    """A part of a run under a `Tracker`.

    Attributes:
        start_bytes: the bytes that were alive when the phase began.
        flops: the operations of its matrix products, 2 for a multiplication and its addition.
        linear_flops: the operations of products that have the form of a linear layer.
        moved: the bytes that the other operations read and write.
        calls: the number of operations except views.
        moved_before, calls_before: the part of `moved` and `calls` before the first own layer was called.
        is_inside: whether an own layer was called, so that the layers make all tensors from now on.
        levels: the bytes that were alive beyond `start_bytes`, after each new tensor.
    """

    start_bytes: int
    flops: int = 0
    linear_flops: int = 0
    moved: int = 0
    calls: int = 0
    moved_before: int = 0
    calls_before: int = 0
    is_inside: bool = False
    levels: list[int] = field(default_factory=list)

    def enter_layers(self, *_: Any) -> None:
        """Note that an own layer is called. It is a hook of the first own layer."""
        if not self.is_inside:
            self.is_inside, self.moved_before, self.calls_before = True, self.moved, self.calls


class Tracker(TorchDispatchMode):
    """Follows every tensor's memory from the operation that makes it until it is freed.

    Args:
        as_on_gpu: whether operations need what they need on a GPU.

    Attributes:
        live_bytes: the bytes that were made while the mode was on and are still alive.
    """

    def __init__(self, *, as_on_gpu: bool = False) -> None:
        super().__init__()
        self.live_bytes = 0
        self._as_on_gpu = as_on_gpu
        self._phase: Phase | None = None
        self._known: dict[int, tuple[weakref.ref[Any], int, Phase | None, bool]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing here is compiled, and to find that out before each call takes as long as many calls."""
        return False

    def ignore(self, tensors: Any) -> None:
        """Never count the memory of these tensors, which was there before."""
        for tensor in tensors:
            self._note(tensor, is_counted=False)

    @contextmanager
    def phase(self) -> Iterator[Phase]:
        """Context manager that notes what runs in it."""
        self._phase = Phase(self.live_bytes)
        try:
            yield self._phase
        finally:
            self._phase = None

    def bytes_outside(self, phase: Phase) -> int:
        """The bytes that a phase made before its first own layer was called, and that are still alive."""
        return sum(size for _, size, made_in, is_inside in self._known.values() if made_in is phase and not is_inside)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # more than half of all calls
        # Modes above have seen the function; a tensor's attributes, which are read often here, are no matter to them.
        with no_functions():
            return self._run(func, args, kwargs or {})

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        phase = self._phase
        if func is _UNSAFE_VIEW:
            # Its memory is the same, and PyTorch keeps no result of the other one. Releases differ in which they call.
            func = _aten.view.default
        if phase is not None and not func.is_view:
            phase.calls += 1
        # A product by 4-bit weights converts them back first, as its backward does.
        weights = args[0].new_empty(args[2]) if func.name() == _QUANTISED else None
        if weights is not None:
            self._note(weights)
        count = _COUNT[self._as_on_gpu] if weights is None else partial(_count, self._as_on_gpu, weights=weights)
        if func.overloadpacket is ATEN_GROUPED_MM and isinstance(args[0], FakeTensor):
            result = _grouped_output(*args, **kwargs)
            counted = count(func, args, kwargs, result)
        else:
            result, counted = fake_operations.run(func, args, kwargs, None if phase is None else count)
        for tensor in _tensors(result):
            self._note(tensor)
        if phase is not None:
            if counted.converted:
                phase.levels.append(self.live_bytes + counted.converted - phase.start_bytes)
            phase.flops += counted.flops
            phase.linear_flops += counted.linear_flops
            phase.moved += counted.moved
        return result

    def _note(self, tensor: torch.Tensor, *, is_counted: bool = True) -> None:
        storage = tensor.untyped_storage()
        number = storage_id(storage)
        if number in self._known:
            return
        size = storage.nbytes() if is_counted else 0
        phase = self._phase
        is_inside = phase is not None and phase.is_inside
        self._known[number] = (weakref.ref(storage, lambda _: self._forget(number)), size, phase, is_inside)
        self.live_bytes += size
        if phase is not None:
            phase.levels.append(self.live_bytes - phase.start_bytes)

    def _forget(self, number: int) -> None:
        self.live_bytes -= self._known.pop(number)[1]


class _Counted(NamedTuple):
    """The counts of one operation: flops, linear_flops and moved as in `Phase`, and the bytes of `_converted_bytes`."""

    converted: int = 0
    flops: int = 0
    linear_flops: int = 0
    moved: int = 0


def _count(
    as_on_gpu: bool, func: Any, args: Any, kwargs: Any, result: Any, *, weights: torch.Tensor | None = None
) -> _Counted:
    converted = 0 if as_on_gpu else _converted_bytes(func, args, result)
    if func.is_view:
        return _Counted(converted)
    formula = _FLOPS.get(func.overloadpacket)
    is_linear = weights is not None or func.overloadpacket in _LINEAR
    if weights is not None:
        flops, moved = int(2 * args[0].numel() * args[2][0]), args[1].nbytes + weights.nbytes
        args = args[0], weights
    else:
        flops, moved = 0 if formula is None else int(formula(*args, **kwargs, out_val=result)), 0
    if not (as_on_gpu and func in _IN_DROPOUT):
        moved += moved_bytes(func.overloadpacket, args, kwargs, result, flops)
    return _Counted(converted, flops, flops if is_linear else 0, moved)


#: The function that counts an operation, by whether it counts as on a GPU.
_COUNT = {as_on_gpu: partial(_count, as_on_gpu) for as_on_gpu in (False, True)}


def _tensors(values: Any) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return [values]
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


_is_pointwise = functools.cache(lambda func: torch.Tag.pointwise in func.tags)


def _converted_bytes(func: Any, args: Any, result: Any) -> int:
    """The bytes of the tensors that a CPU's kernel converts: all that do not have the common type in a pointwise
    operation on several types, its output too. A GPU converts each number as it reads it."""
    if not (_is_pointwise(func) and isinstance(result, torch.Tensor) and result.is_floating_point()):
        return 0
    tensors = [given for given in args if isinstance(given, torch.Tensor) and given.dim() and given.is_floating_point()]
    if len({tensor.dtype for tensor in tensors}) < 2:
        return 0
    common = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    return sum(tensor.numel() * common.itemsize for tensor in (*tensors, result) if tensor.dtype != common)


def moved_bytes(operation: Any, args: Any, kwargs: Any, result: Any, flops: int) -> int:
    """The bytes that an operation reads from memory and writes to it; what is broadcast counts once.

    Args:
        operation: the operation, with any overload; no view.
        args, kwargs, result: the arguments and the result of its call.
        flops: the operations of a matrix product or of attention; else 0. A product that is not narrow reads and
            writes while it computes, so its bytes do not count, except a mask of attention, which every head reads.
    """
    if operation in _WITHOUT_KERNEL:
        return 0
    inputs, outputs = _tensors((args, kwargs)), _tensors(result)
    if flops and flops > 2 * _NARROW * max(tensor.numel() for tensor in (*inputs, *outputs)):
        mask = kwargs.get("attn_mask")
        return 0 if mask is None else args[0].shape[:-1].numel() * mask.shape[-1] * mask.itemsize
    if operation in _OF_TABLE:
        table = args[_OF_TABLE[operation]]
        return 2 * sum(_bytes(tensor) for tensor in (*inputs, *outputs) if tensor is not table)
    if operation in _OVERWRITE:
        inputs = inputs[1:]
    distinct = {(storage_id(tensor.untyped_storage()), tensor.storage_offset()): tensor for tensor in inputs}
    return sum(map(_bytes, (*distinct.values(), *outputs)))


def _bytes(tensor: torch.Tensor) -> int:
    return prod(size for size, step in zip(tensor.shape, tensor.stride(), strict=True) if step) * tensor.itemsize


def _attention(query: Any, key: Any, value: Any, _: Any = 0.0, is_causal: bool = False, **__: Any) -> int:
    return attention_flops(query, key, value, is_causal)


def _grouped_output(left: torch.Tensor, right: torch.Tensor, ends: Any = None, *_: Any, **__: Any) -> torch.Tensor:
    """The result of a product of groups of rows with a matrix each; PyTorch's own rule allows only bfloat16."""
    if left.dim() == right.dim() == 2:
        return left.new_empty((ends.shape[0], left.shape[0], right.shape[1]))
    return left.new_empty((*left.shape[:-1], right.shape[-1]))


def _grouped(left: Any, right: Any, *args: Any, **kwargs: Any) -> int:
    """The operations of products of groups of rows with a matrix each. A row, or a gradient's column, counts once."""
    return int(2 * left.shape[-2] * left.shape[-1] * right.shape[-1])


#: The operation of bitsandbytes' 4-bit layers.
_QUANTISED = "bitsandbytes::gemm_4bit"
_FLOPS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    _aten.addmm_: flop_registry[_aten.addmm],
    CPU_FLASH_ATTENTION: _attention,
    CPU_FLASH_ATTENTION_BACKWARD: attention_backward_flops,
    torch.ops.hf_gpipe.kernel_attention: attention_flops,
    torch.ops.hf_gpipe.kernel_attention_backward: attention_backward_flops,
    ATEN_GROUPED_MM: _grouped,
}
#: The rows, columns or terms of a sum up to which a product takes only the time to read and write its matrices.
_NARROW = 64
_WITHOUT_KERNEL = {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided}
#: A GPU draws dropout in the kernel that multiplies by it; a CPU makes it before by these two.
_IN_DROPOUT = {_aten.bernoulli_.float, _aten.div_.Scalar}
#: Operations that write their first argument without reading it.
_OVERWRITE = {_aten.copy_, _aten.fill_, _aten.zero_, _aten.bernoulli_}
#: Operations that read or write only some numbers of a table -> the table's place among their arguments.
_OF_TABLE = {
    **dict.fromkeys((_aten.embedding, _aten.index, _aten.index_select, _aten.gather, _aten.nll_loss_forward), 0),
    **dict.fromkeys((_aten.index_put_, _aten.index_add_, _aten.scatter_, _aten.scatter_add_), 0),
    _aten.nll_loss_backward: 1,
}
#: The products of linear layers and experts. Attention's products have a batch dimension.
_LINEAR = {_aten.mm, _aten.addmm, _aten.addmm_, ATEN_GROUPED_MM}

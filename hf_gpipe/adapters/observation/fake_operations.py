"""Operations on fake tensors, or on those of the meta device, that were run before, without running them again.

Such a tensor has no values, so an operation's output follows from the sizes, strides and types of its inputs and from
its other arguments. `FakeTensorMode` knows this and keeps outputs too, but takes four times as long to find one, which
is most of a trace. What it would not keep is left to it here: what depends on values, and tensors of known values. On
the meta device much is written in Python, and takes ten times as long.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

#: So many operations are kept; then all are forgotten.
_MOST = 1 << 16
_NUMBERS = (bool, int, float)
_ON_META = (torch.Tensor, nn.Parameter)
_PLAIN = (str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_DEPENDS_ON_MORE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}


class _Made(NamedTuple):
    """A tensor that an operation makes.

    Attributes:
        owner: the number of the input whose memory it shares; None: it has its own.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    owner: int | None


_Output = _Made | int | None
"""A new tensor, the number of the input that is returned, or None."""


class _UnlikeError(Exception):
    """An operation or an argument of which more matters than its form."""


#: By the operation and the form of its arguments the outputs, and the class of what they are in; None: it must run.
_kept: dict[Any, tuple[type | None, list[_Output]] | None] = {}


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The output of an operation, which runs unless it is known. Torch functions must be disabled."""
    inputs: list[torch.Tensor] = []
    form: list[Any] = [func, torch.get_default_dtype()]
    try:
        _add(form, inputs, args)
        for name, value in kwargs.items():
            form.append(name)
            _add(form, inputs, (value,))
        if len({isinstance(tensor, FakeTensor) for tensor in inputs}) > 1:
            raise _UnlikeError
    except _UnlikeError:
        return func(*args, **kwargs)
    key = tuple(form)
    if key in _kept and (kept := _kept[key]) is not None:
        cls, outputs = kept
        made = [_of(output, inputs) for output in outputs]
        return made[0] if cls is None else cls(made)
    before = _versions(inputs)
    result = func(*args, **kwargs)
    if inputs and key not in _kept:
        if len(_kept) >= _MOST:
            _kept.clear()
        try:
            # What changes an input by operations of its own, as a BatchNorm its averages, must change it each time.
            _kept[key] = _described(func, inputs, result) if _versions(inputs) == before else None
        except _UnlikeError:
            _kept[key] = None
    return result


def _versions(inputs: list[torch.Tensor]) -> list[int]:
    return [tensor._version for tensor in inputs if not tensor.is_inference()]


def _add(form: list[Any], inputs: list[torch.Tensor], values: tuple[Any, ...] | list[Any]) -> None:
    """Add the form of these arguments, and the tensors among them."""
    for value in values:
        cls = type(value)
        if cls is FakeTensor:
            _check(value)
            inputs.append(value)
            form += (value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device)
        elif cls in _ON_META and value.is_meta:
            _check(value)
            inputs.append(value)
            form += ("meta", value.shape, value.stride(), value.storage_offset(), value.dtype)
        elif cls in _NUMBERS:
            form += (cls, value)  # 1, 1.0 and True are equal
        elif cls in _PLAIN:
            form.append(value)
        elif cls is list or cls is tuple:
            form += (cls, len(value))
            _add(form, inputs, value)
        else:
            raise _UnlikeError


def _check(tensor: torch.Tensor) -> None:
    is_constant = isinstance(tensor, FakeTensor) and tensor.constant is not None
    if is_constant or tensor.layout is not torch.strided or tensor.dtype.is_complex:
        raise _UnlikeError


def _described(func: Any, inputs: list[torch.Tensor], result: Any) -> tuple[type | None, list[_Output]]:
    """Raises _UnlikeError where another run may return something else."""
    is_resized = any(argument.is_out for argument in func._schema.arguments)
    if func.namespace not in ("aten", "hf_gpipe") or is_resized or not _DEPENDS_ON_MORE.isdisjoint(func.tags):
        raise _UnlikeError
    if isinstance(result, tuple | list):
        return type(result), [_described_tensor(tensor, inputs) for tensor in result]
    return None, [_described_tensor(result, inputs)]


def _described_tensor(tensor: Any, inputs: list[torch.Tensor]) -> _Output:
    if tensor is None:
        return None
    is_fake = isinstance(inputs[0], FakeTensor)
    if type(tensor) is not FakeTensor if is_fake else type(tensor) not in _ON_META or not tensor.is_meta:
        raise _UnlikeError
    _check(tensor)
    for number, known in enumerate(inputs):
        if tensor is known:
            return number
    storage = tensor.untyped_storage()
    storages = [known.untyped_storage()._cdata for known in inputs]
    owner = storages.index(storage._cdata) if storage._cdata in storages else None
    shape, stride, offset = tensor.shape, tensor.stride(), int(tensor.storage_offset())
    output = _Made(shape, stride, offset, tensor.dtype, tensor.fake_device if is_fake else tensor.device, owner)
    made: Any = _of(output, inputs)
    again = made.untyped_storage().nbytes(), made.storage_offset(), torch._C._dispatch_key_set(made)
    if again != (storage.nbytes(), output.offset, torch._C._dispatch_key_set(tensor)):
        raise _UnlikeError
    return output


def _of(output: _Output, inputs: list[torch.Tensor]) -> torch.Tensor | None:
    """The output for other inputs of the same form."""
    if output is None or isinstance(output, int):
        return None if output is None else inputs[output]
    with torch._C._DisableTorchDispatch():
        if output.owner is None:
            memory = torch.empty_strided(output.shape, output.stride, dtype=output.dtype, device="meta")
        else:
            memory = torch.empty(0, dtype=output.dtype, device="meta")
            memory.set_(inputs[output.owner].untyped_storage(), output.offset, output.shape, output.stride)
    first = inputs[0]
    return FakeTensor(first.fake_mode, memory, output.device) if isinstance(first, FakeTensor) else memory

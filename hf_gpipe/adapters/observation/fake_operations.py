"""Operations on fake tensors, or on those of the meta device, that were run before, without running them again.

Such a tensor has no values, so an operation's output follows from the sizes, strides and types of its inputs and from
its other arguments. `FakeTensorMode` knows this and keeps outputs too, but takes four times as long to find one, which
is most of a trace. What it would not keep is left to it here: what depends on values, and tensors of known values. On
the meta device much is written in Python, and takes ten times as long.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from hf_gpipe.libraries.torch import (
    FakeTensor,
    TorchDispatchMode,
    fake_mode,
    guard_memory,
    key_set_of,
    no_dispatch,
    no_functions,
    schema_of,
    storage_id,
    subclass_of,
    version_of,
)

#: So many operations are kept; then all are forgotten.
_MOST = 1 << 16
_NUMBERS = (bool, int, float)
_ON_META = (torch.Tensor, nn.Parameter)
_PLAIN = (str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_PLACES = (torch.int64, torch.int32)
_DEPENDS_ON_MORE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}


class _Made(NamedTuple):
    """A tensor that an operation makes.

    Attributes:
        owner: the number of the input whose memory the tensor shares; None: it has its own memory.
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
    """Raised for an operation or an argument whose output does not follow from the form."""


Derive = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], Any]
"""The question about a call: a function of the operation, its arguments, its keyword arguments and its output."""


class _Known(NamedTuple):
    """An operation on arguments of one form.

    Attributes:
        cls: the class of the collection of the outputs; None: the operation has one output.
        outputs: all outputs.
        derived: the values of `Derive` for such calls.
    """

    cls: type | None
    outputs: list[_Output]
    derived: dict[Derive, Any]


#: The known operations, by the operation and the form of its arguments; None: the operation must run.
_kept: dict[Any, _Known | None] = {}
#: The attributes of a new fake tensor except its mode, by its device.
_new: dict[torch.device, dict[str, Any]] = {}


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], derive: Derive | None = None) -> tuple[Any, Any]:
    """The output of an operation, which runs unless it is known. Torch functions must be disabled.

    Args:
        derive: its value follows from the form where no two inputs share memory, and is kept with the output.

    Returns:
        The output, and the value of `derive` or None.
    """
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
        return _asked(None, inputs, func, args, kwargs, func(*args, **kwargs), derive)
    mode = _mode_of(inputs)
    key = (*form, mode is None)
    if key in _kept and (known := _kept[key]) is not None:
        made = [_of(output, inputs, mode) for output in known.outputs]
        return _asked(known, inputs, func, args, kwargs, made[0] if known.cls is None else known.cls(made), derive)
    before = _versions(inputs)
    result = func(*args, **kwargs)
    if (inputs or mode is not None) and key not in _kept:
        if len(_kept) >= _MOST:
            _kept.clear()
        try:
            # What changes an input by operations of its own, as a BatchNorm its averages, must change it each time.
            _kept[key] = _described(func, inputs, result, mode) if _versions(inputs) == before else None
        except _UnlikeError:
            _kept[key] = None
    return _asked(None, inputs, func, args, kwargs, result, derive)


class KnownOperations(TorchDispatchMode):
    """A mode in which an operation that is known does not run."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with no_functions():
            return run(func, args, kwargs or {})[0]


def _asked(
    known: _Known | None,
    inputs: list[torch.Tensor],
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: Any,
    derive: Derive | None,
) -> tuple[Any, Any]:
    if derive is None:
        return result, None
    if known is None:
        return result, derive(func, args, kwargs, result)
    if len(inputs) > 1 and len({storage_id(tensor.untyped_storage()) for tensor in inputs}) < len(inputs):
        return result, derive(func, args, kwargs, result)
    if derive not in known.derived:
        known.derived[derive] = derive(func, args, kwargs, result)
    return result, known.derived[derive]


def _versions(inputs: list[torch.Tensor]) -> list[int]:
    return [version_of(tensor) for tensor in inputs if not tensor.is_inference()]


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


def _mode_of(inputs: list[torch.Tensor]) -> Any:
    """The mode of the fake tensors, or that in which an operation without inputs makes one; None: on meta."""
    if inputs:
        return getattr(inputs[0], "fake_mode", None)
    return fake_mode()


def _described(func: Any, inputs: list[torch.Tensor], result: Any, mode: Any) -> _Known:
    """Describe an operation by its result. Raises _UnlikeError where another run may return something else."""
    is_resized = any(argument.is_out for argument in schema_of(func).arguments)
    # Places in a table, unlike a mask of it, are as many as their tensor has.
    has_places = func is torch.ops.aten.index.Tensor and all(tensor.dtype in _PLACES for tensor in inputs[1:])
    depends_on_more = not has_places and not _DEPENDS_ON_MORE.isdisjoint(func.tags)
    if func.namespace not in ("aten", "hf_gpipe") or is_resized or depends_on_more:
        raise _UnlikeError
    if isinstance(result, tuple | list):
        return _Known(type(result), [_described_tensor(tensor, inputs, mode) for tensor in result], {})
    return _Known(None, [_described_tensor(result, inputs, mode)], {})


def _described_tensor(tensor: Any, inputs: list[torch.Tensor], mode: Any) -> _Output:
    if tensor is None:
        return None
    is_fake = mode is not None
    if type(tensor) is not FakeTensor if is_fake else type(tensor) not in _ON_META or not tensor.is_meta:
        raise _UnlikeError
    _check(tensor)
    for number, known in enumerate(inputs):
        if tensor is known:
            return number
    storage = tensor.untyped_storage()
    storages = [storage_id(known.untyped_storage()) for known in inputs]
    owner = storages.index(storage_id(storage)) if storage_id(storage) in storages else None
    shape, stride, offset = tensor.shape, tensor.stride(), int(tensor.storage_offset())
    output = _Made(shape, stride, offset, tensor.dtype, tensor.fake_device if is_fake else tensor.device, owner)
    made: Any = _of(output, inputs, mode)
    again = made.untyped_storage().nbytes(), made.storage_offset(), key_set_of(made), vars(made)
    if again != (storage.nbytes(), output.offset, key_set_of(tensor), vars(tensor)):
        raise _UnlikeError
    return output


def _of(output: _Output, inputs: list[torch.Tensor], mode: Any) -> torch.Tensor | None:
    """Return the output for other inputs of the same form."""
    if output is None or isinstance(output, int):
        return None if output is None else inputs[output]
    with no_dispatch():
        if output.owner is None:
            memory = torch.empty_strided(output.shape, output.stride, dtype=output.dtype, device="meta")
        else:
            memory = torch.empty(0, dtype=output.dtype, device="meta")
            memory.set_(inputs[output.owner].untyped_storage(), output.offset, output.shape, output.stride)
    return memory if mode is None else _fake(mode, memory, output.device)


def _fake(mode: Any, memory: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A new fake tensor; its class takes three times as long to set the same attributes one by one."""
    if device not in _new:
        tensor = FakeTensor(mode, memory, device)
        _new[device] = {name: value for name, value in vars(tensor).items() if name != "fake_mode"}
        return tensor
    made = subclass_of(FakeTensor, memory, dispatch_device=True, device_for_backend_keys=device)
    guard_memory(made, mode)
    vars(made).update(_new[device], fake_mode=mode)
    return made

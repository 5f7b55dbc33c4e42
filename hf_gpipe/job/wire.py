"""Values that travel between processes: JSON and tensors, read strictly. Nothing is pickled.

A peer that has no business here may have sent a message. So a message can only become null, booleans, numbers, text,
lists, tuples, dictionaries, tensors and arrays, or the type that the reader names; anything else is a
`MessageError`. Whatever the bytes are, no code of theirs runs.

A message is a file in safetensors form. Its tensor "value" has the JSON text, in which {"tensor()": "3"} stands for the
tensor of the name "3", {"tuple()": [1, 2]} for a tuple, and {"dict()": [[1, 2]]} for {1: 2}.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import safetensors.torch
import torch
import torch.distributed as dist
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from torch.nn import functional as F

from hf_gpipe.errors import MessageError, UserError, error_of_data, error_to_data

#: The most bytes of a message. A longer message is refused before any memory is taken for it.
MOST_BYTES = 1 << 36
#: The most bytes of a message's JSON text.
MOST_TEXT_BYTES = 1 << 28

_TEXT, _TENSOR, _ARRAY, _TUPLE, _DICT = "value", "tensor()", "array()", "tuple()", "dict()"
_MALFORMED = (
    "a message of another process is not one of hf_gpipe's; see that all processes run the same version, and that "
    "nothing else reaches their ports"
)


def pack(value: object) -> torch.Tensor:
    """A value as one tensor of bytes; a number of numpy becomes one of Python.

    Raises:
        UserError: it has a part of a type that cannot travel; names the type.
    """
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(_plain(value, tensors), separators=(",", ":")).encode()
    tensors[_TEXT] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return torch.frombuffer(bytearray(safetensors.torch.save(tensors)), dtype=torch.uint8)


def unpack(data: torch.Tensor) -> Any:
    """The value that `pack` has made into bytes.

    Raises:
        MessageError: the bytes are anything else.
    """
    try:
        tensors = safetensors.torch.load(data.numpy().tobytes())
        text = tensors.pop(_TEXT)
        if text.dtype != torch.uint8 or text.dim() != 1 or text.numel() > MOST_TEXT_BYTES:
            raise ValueError(f"its text has the shape {tuple(text.shape)} and the type {text.dtype}")
        return json.loads(text.numpy().tobytes(), object_hook=functools.partial(_with_tensors, tensors))
    except (SafetensorError, KeyError, ValueError, TypeError, RuntimeError, RecursionError) as error:
        raise MessageError(f"{_MALFORMED}: {type(error).__name__}: {' '.join(str(error).split())[:200]}") from None


def is_sendable(value: object) -> bool:
    """Whether `pack` takes a value."""
    try:
        _plain(value, {})
    except UserError:
        return False
    return True


def _plain(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """A value as JSON, with its tensors in `tensors`."""
    if type(value) in (bool, int, float, str, type(None)):
        return value
    if isinstance(value, torch.Tensor | np.ndarray):
        return _plain_tensor(value, tensors)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):  # a named tuple means more than its values
        entries = [_plain(entry, tensors) for entry in value]
        return {_TUPLE: entries} if isinstance(value, tuple) else entries
    if isinstance(value, Mapping):
        if all(type(key) is str and not key.endswith("()") for key in value):
            return {key: _plain(entry, tensors) for key, entry in value.items()}
        return {_DICT: [[_plain(key, tensors), _plain(entry, tensors)] for key, entry in value.items()]}
    kind = type(value)
    raise UserError(
        f"a {kind.__module__}.{kind.__qualname__} cannot be sent to the other processes; numbers, text, tensors, "
        "arrays, and lists, tuples and dictionaries of these can"
    )


def _plain_tensor(value: torch.Tensor | np.ndarray, tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    name = str(len(tensors))
    try:
        tensor = torch.from_numpy(np.array(value, order="C")) if isinstance(value, np.ndarray) else value.detach()
        # A copy: safetensors raises an error for tensors that share memory.
        copy = tensor.cpu().clone(memory_format=torch.contiguous_format)
        _check_kind(copy.dtype, copy.layout, copy.is_nested)
    except (TypeError, KeyError, ValueError, NotImplementedError, SafetensorError, RuntimeError) as error:
        raise UserError(f"a {type(value).__name__} of type {value.dtype} cannot be sent: {error}") from None
    tensors[name] = copy
    return {_ARRAY if isinstance(value, np.ndarray) else _TENSOR: name}


@functools.cache
def _check_kind(dtype: torch.dtype, layout: torch.layout, is_nested: bool) -> None:
    """Raise what safetensors raises for tensors of a kind."""
    if is_nested:
        raise TypeError("it is a nested tensor")
    safetensors.torch.save({"0": torch.empty(0, dtype=dtype, layout=layout)})


def _with_tensors(tensors: Mapping[str, torch.Tensor], entries: dict[str, Any]) -> Any:
    """A dictionary of a message, or what it stands for. Raises KeyError or TypeError."""
    for word, kind in (_TUPLE, tuple), (_DICT, dict):
        if word in entries:
            if not isinstance(inside := entries[word], list):
                raise TypeError(f"{word} of {str(inside)[:80]!r}")
            return kind(inside)
    if _TENSOR in entries:
        return tensors[entries[_TENSOR]]
    return tensors[entries[_ARRAY]].numpy() if _ARRAY in entries else entries


# ---------------------------------------------------------------------- values of a type


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def to_plain(value: object, kind: Any) -> Any:
    """The JSON form of a value of a type that pydantic knows, such as a dataclass."""
    return _adapter(kind).dump_python(value, mode="json")


def from_plain(plain: Any, kind: Any) -> Any:
    """The value of a JSON form. Raises MessageError where it is not of the type."""
    try:
        return _adapter(kind).validate_json(json.dumps(plain), strict=True)
    except (ValidationError, UserError) as error:
        raise MessageError(f"{_MALFORMED}: {' '.join(str(error).split())[:200]}") from None


# ---------------------------------------------------------------------- messages


def gather(value: object, group: dist.ProcessGroup) -> list[Any]:
    """The value of every process of a group, in order of its ranks, on each of them.

    Raises:
        UserError: on every process: the value of one of them cannot travel.
        MessageError: another process has sent something else.
    """
    own, size = _message(value), dist.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(sizes, torch.tensor([own.numel()]), group=group)
    counts = [checked_size(int(one)) for one in sizes]
    everyone = [torch.empty(max(counts), dtype=torch.uint8) for _ in counts]
    dist.all_gather(everyone, F.pad(own, (0, max(counts) - own.numel())), group=group)
    return [_value(data[:count]) for data, count in zip(everyone, counts, strict=True)]


def send(value: object, dst: int, group: dist.ProcessGroup) -> None:
    """Send a value to a process of a group, which calls `receive`. Raises UserError on both if it cannot travel."""
    data = _message(value)
    dist.send(torch.tensor([data.numel()]), group_dst=dst, group=group)
    dist.send(data, group_dst=dst, group=group)
    _value(data)


def receive(src: int, group: dist.ProcessGroup) -> Any:
    """The value that a process of a group has sent. Raises as `gather`."""
    size = torch.zeros(1, dtype=torch.int64)
    dist.recv(size, group_src=src, group=group)
    data = torch.empty(checked_size(int(size)), dtype=torch.uint8)
    dist.recv(data, group_src=src, group=group)
    return _value(data)


def _message(value: object) -> torch.Tensor:
    """A value in its envelope, or the reason why it cannot travel: the others must not wait for it."""
    try:
        return pack({"value": value})
    except UserError as error:
        return pack({"problem": error_to_data(error)})


def _value(data: torch.Tensor) -> Any:
    envelope = unpack(data)
    if isinstance(envelope, dict) and len(envelope) == 1:
        if "problem" in envelope:
            raise error_of_data(*from_plain(envelope["problem"], tuple[str, str, dict[str, Any]]))
        if "value" in envelope:
            return envelope["value"]
    raise MessageError(f"{_MALFORMED}: it has no envelope")


def checked_size(count: int) -> int:
    """The number of bytes that a peer has announced. Raises MessageError where there cannot be so many."""
    if not 0 < count <= MOST_BYTES:
        raise MessageError(f"{_MALFORMED}: it would have {count} bytes")
    return count

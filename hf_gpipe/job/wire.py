"""Values that travel between processes: JSON and tensors, read strictly. Nothing is pickled.

A peer that has no business here may have sent a message. So a message can only become one of the types below, each part
of it is checked, and what does not fit is a `MessageError`: whatever the bytes are, no code of theirs runs.

A message is a file in safetensors form. Its tensor "value" has JSON text; the other tensors have numbers, by which the
text names them. In the text, null, booleans, numbers and strings stand for themselves. Everything else is an array,
whose first entry is one of the words in `_READERS`:

    {"loss": (0.5, None)}  ->  ["dict", [["loss", ["tuple", [0.5, null]]]]]
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import numpy as np
import safetensors.torch
import torch
import torch.distributed as dist
from pydantic import ConfigDict, TypeAdapter, ValidationError
from safetensors import SafetensorError

from hf_gpipe.errors import MessageError, UserError, error_of_data, error_to_data
from hf_gpipe.partition.cluster import Level
from hf_gpipe.recipe import DecidedConfig
from hf_gpipe.schedule.actions import Action
from hf_gpipe.schedule.kinds import ActionKind, kind_of
from hf_gpipe.schedule.placement import Placement
from hf_gpipe.schedule.table import Schedule

Class = TypeVar("Class", bound=type)

#: The most bytes of a message. A longer message is refused before any memory is taken for it.
MOST_BYTES = 1 << 36
#: The most bytes of a message's JSON text.
MOST_TEXT_BYTES = 1 << 28
#: So many bytes of what every process gathers come with its size; a longer value takes a second exchange.
_FIRST_BYTES, _SIZE_BYTES = 4096, 8
#: Values within values.
MOST_LEVELS = 50

_TEXT = "value"
_PLAIN = (bool, int, float, str, type(None))
_SEQUENCES: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
#: Data type, layout and whether it is nested, of tensors that safetensors has taken.
_SENDABLE_KINDS: set[tuple[torch.dtype, torch.layout, bool]] = set()
#: The classes that may be made of a message: dataclasses, named tuples and enumerations, by their names.
_CLASSES: dict[str, type] = {}


def sendable(cls: Class) -> Class:
    """Decorator that allows objects of a dataclass, named tuple or enumeration in messages.

    An object is made anew of its fields, whose values must be of the types that the class declares.
    """
    assert _CLASSES.setdefault(cls.__name__, cls) is cls, f"two classes have the name {cls.__name__}"
    return cls


# Modules that know nothing of processes have these.
for _cls in (Action, ActionKind, DecidedConfig, Level, Placement, Schedule):
    sendable(_cls)


# ---------------------------------------------------------------------- a value as bytes


def pack(value: object) -> torch.Tensor:
    """A value as one tensor of bytes.

    Raises:
        UserError: it has a part of a type that cannot travel; names the type.
    """
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(_written(value, tensors), separators=(",", ":")).encode()
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
            raise MessageError(f"its text has the shape {tuple(text.shape)} and the type {text.dtype}")
        return _read(json.loads(text.numpy().tobytes()), tensors, 0)
    except MessageError as error:
        raise MessageError(f"{_MALFORMED}: {error}") from None
    except (SafetensorError, KeyError, ValueError, TypeError, RuntimeError, UserError) as error:
        raise MessageError(f"{_MALFORMED}: {type(error).__name__}: {' '.join(str(error).split())[:200]}") from None


_MALFORMED = (
    "a message of another process is not one of hf_gpipe's; see that all processes run the same version, and that "
    "nothing else reaches their ports"
)


def is_sendable(value: object) -> bool:
    """Whether `pack` takes a value."""
    try:
        _written(value, {})
    except UserError:
        return False
    return True


def _written(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """The JSON form of a value, whose tensors are put into `tensors`."""
    kind: Any = type(value)
    if kind in _PLAIN:
        return value
    name: str = kind.__name__
    if _CLASSES.get(name) is kind:
        if isinstance(value, ActionKind):
            return ["enum", name, value.letter]
        if isinstance(value, Enum):
            return ["enum", name, value.value]
        return ["object", name, [_written(getattr(value, name_of_field), tensors) for name_of_field in _fields(kind)]]
    if isinstance(value, torch.Tensor | np.ndarray):
        return _written_tensor(value, tensors)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return ["dict", [[_written(k, tensors), _written(v, tensors)] for k, v in value.items()]]
    for name, sequence in _SEQUENCES.items():
        # A list of a subclass becomes a list; a named tuple that is not known has a meaning beside its values.
        if isinstance(value, sequence) and not hasattr(value, "_fields"):
            return [name, [_written(entry, tensors) for entry in value]]
    if isinstance(value, Path):
        return ["path", str(value)]
    if isinstance(value, torch.dtype):
        return ["dtype", str(value).removeprefix("torch.")]
    if isinstance(value, UserError):
        return ["error", *error_to_data(value)]
    raise UserError(
        f"a {kind.__module__}.{kind.__qualname__} cannot be sent to the other processes; numbers, text, tensors, "
        "arrays, and lists, tuples, sets and dictionaries of these can"
    )


def _written_tensor(value: torch.Tensor | np.ndarray, tensors: dict[str, torch.Tensor]) -> list[str]:
    name = str(len(tensors))
    try:
        tensor = torch.from_numpy(np.array(value, order="C")) if isinstance(value, np.ndarray) else value.detach()
        # A copy: safetensors raises an error for tensors that share memory.
        tensors[name] = tensor.cpu().clone(memory_format=torch.contiguous_format)
        kind = tensor.dtype, tensor.layout, tensor.is_nested
        if kind not in _SENDABLE_KINDS:
            safetensors.torch.save({name: tensors[name][:0] if tensor.dim() else tensors[name]})
            _SENDABLE_KINDS.add(kind)
    except (TypeError, KeyError, ValueError, NotImplementedError, SafetensorError, RuntimeError) as error:
        raise UserError(f"a {type(value).__name__} of type {value.dtype} cannot be sent: {error}") from None
    return ["array" if isinstance(value, np.ndarray) else "tensor", name]


def _read(value: Any, tensors: Mapping[str, torch.Tensor], level: int) -> Any:
    """The value of a JSON form."""
    if type(value) in _PLAIN:
        return value
    if level > MOST_LEVELS:
        raise MessageError(f"it has more than {MOST_LEVELS} levels")
    if not isinstance(value, list) or not value or not isinstance(value[0], str) or value[0] not in _READERS:
        raise MessageError(f"it has {str(value)[:80]!r} in place of a value")
    word, *rest = value
    reader, kinds = _READERS[word]
    if len(rest) != len(kinds) or not all(isinstance(entry, kind) for entry, kind in zip(rest, kinds, strict=True)):
        raise MessageError(f"it has a malformed {word}")
    return reader(rest, lambda entry: _read(entry, tensors, level + 1), tensors)


#: Makes the value of the rest of an array, of a function that reads a value within it, and of the tensors.
_Reader = Callable[[list[Any], Callable[[Any], Any], Mapping[str, torch.Tensor]], Any]


def _sequence_reader(sequence: Callable[[Any], Any]) -> _Reader:
    return lambda rest, read, tensors: sequence(map(read, rest[0]))


def _read_dict(rest: list[Any], read: Callable[[Any], Any], tensors: Mapping[str, torch.Tensor]) -> dict[Any, Any]:
    entries = {}
    for pair in rest[0]:
        if not isinstance(pair, list) or len(pair) != 2:
            raise MessageError("it has a malformed entry of a dict")
        entries[read(pair[0])] = read(pair[1])
    return entries


def _read_enum(rest: list[Any], read: Callable[[Any], Any], tensors: Mapping[str, torch.Tensor]) -> Any:
    cls = _known(rest[0])
    if cls is ActionKind:
        return kind_of(str(rest[1]))
    if not issubclass(cls, Enum):
        raise MessageError(f"{rest[0]} is no enumeration")
    return cls(rest[1])


def _read_object(rest: list[Any], read: Callable[[Any], Any], tensors: Mapping[str, torch.Tensor]) -> Any:
    cls: Any = _known(rest[0])
    checks = {} if issubclass(cls, Enum | ActionKind) else _fields(cls)
    if len(checks) != len(rest[1]) or not checks:
        raise MessageError(f"it has a {rest[0]} of {len(rest[1])} values")
    values = dict(zip(checks, map(read, rest[1]), strict=True))
    for name, check in checks.items():
        try:
            if check is not None:
                check.validate_python(values[name])
        except ValidationError:
            raise MessageError(f"{rest[0]}.{name} is {str(values[name])[:80]!r}") from None
    return cls(**values)


def _read_dtype(rest: list[Any], read: Callable[[Any], Any], tensors: Mapping[str, torch.Tensor]) -> torch.dtype:
    dtype = getattr(torch, rest[0], None)
    if not isinstance(dtype, torch.dtype):
        raise MessageError(f"torch has no type {rest[0][:80]!r}")
    return dtype


#: The function that makes the value of an array, and the types of its other entries, by its first word.
_READERS: dict[str, tuple[_Reader, tuple[Any, ...]]] = {
    **{name: (_sequence_reader(sequence), (list,)) for name, sequence in _SEQUENCES.items()},
    "dict": (_read_dict, (list,)),
    "tensor": (lambda rest, read, tensors: tensors[rest[0]], (str,)),
    "array": (lambda rest, read, tensors: tensors[rest[0]].numpy(), (str,)),
    "path": (lambda rest, read, tensors: Path(rest[0]), (str,)),
    "dtype": (_read_dtype, (str,)),
    "enum": (_read_enum, (str, (str, int))),
    "object": (_read_object, (str, list)),
    "error": (lambda rest, read, tensors: error_of_data(*rest), (str, str, dict)),
}


def _known(name: str) -> type:
    if name not in _CLASSES:
        raise MessageError(f"no class {name[:80]!r} may be made of a message")
    return _CLASSES[name]


@functools.cache
def _fields(cls: type) -> dict[str, TypeAdapter[Any] | None]:
    """The fields of a class, and what checks the value of each; None where the class checks it itself."""
    names = [field.name for field in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else list(cls._fields)  # type: ignore[attr-defined]
    if hasattr(cls, "__pydantic_fields__"):
        return dict.fromkeys(names)
    hints = get_type_hints(cls)
    config = ConfigDict(strict=True, arbitrary_types_allowed=True)
    return {name: _adapter(hints[name], config) for name in names}


def _adapter(hint: Any, config: ConfigDict) -> TypeAdapter[Any]:
    if dataclasses.is_dataclass(hint):  # it was checked when it was read
        return TypeAdapter(hint)
    return TypeAdapter(hint, config=config)


# ---------------------------------------------------------------------- messages


def gather(value: object, group: dist.ProcessGroup) -> list[Any]:
    """The value of every process of a group, in order of its ranks, on each of them.

    Raises:
        UserError: on every process: the value of one of them cannot travel.
        MessageError: another process has sent something else.
    """
    own = _message(value)
    first = torch.zeros(_SIZE_BYTES + _FIRST_BYTES, dtype=torch.uint8)
    first[:_SIZE_BYTES] = torch.tensor([own.numel()]).view(torch.uint8)
    first[_SIZE_BYTES:][: own.numel()] = own[:_FIRST_BYTES]
    heads = [torch.empty_like(first) for _ in range(dist.get_world_size(group))]
    dist.all_gather(heads, first, group=group)
    counts = [checked_size(int(head[:_SIZE_BYTES].view(torch.int64))) for head in heads]
    everyone = [torch.empty(max(_FIRST_BYTES, *counts), dtype=torch.uint8) for _ in counts]
    for data, head in zip(everyone, heads, strict=True):
        data[:_FIRST_BYTES] = head[_SIZE_BYTES:]
    if max(counts) > _FIRST_BYTES:
        rest = torch.zeros(max(counts) - _FIRST_BYTES, dtype=torch.uint8)
        rest[: max(0, own.numel() - _FIRST_BYTES)] = own[_FIRST_BYTES:]
        dist.all_gather([data[_FIRST_BYTES:] for data in everyone], rest, group=group)
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
        return pack({"problem": error})


def _value(data: torch.Tensor) -> Any:
    envelope = unpack(data)
    if isinstance(envelope, dict) and len(envelope) == 1:
        if isinstance(problem := envelope.get("problem"), UserError):
            raise problem
        if "value" in envelope:
            return envelope["value"]
    raise MessageError(f"{_MALFORMED}: it has no envelope")


def checked_size(count: int) -> int:
    """The number of bytes that a peer has announced. Raises MessageError where there cannot be so many."""
    if not 0 < count <= MOST_BYTES:
        raise MessageError(f"{_MALFORMED}: it would have {count} bytes")
    return count

"""Processes that were given different things say so before they train: a pipeline of two models is none.

Each process runs the user's script, so each has arguments of its own. What must be the same in all is compared when it
is given: as text, by the name under which the user knows it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch

from hf_gpipe.errors import DisagreementError
from hf_gpipe.job.facts import disagreements
from hf_gpipe.job.world import World

#: A longer text of a value is cut, and its digest tells it from another.
_MOST_CHARACTERS = 160
#: Where an object is in memory is not what it is.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
#: So many values of each tensor of a model in memory are compared.
_NUM_SAMPLES = 32


class Noted(NamedTuple):
    """A value that is compared, and what a message says beside it, such as where it comes from."""

    value: str
    note: str


def compare(given: Callable[[], Mapping[str, Any]], what: str) -> None:
    """Compare what must be the same in all processes. Every process calls it, once it has joined its job.

    Args:
        given: makes the values by their names, where there are other processes. They are compared as text.
        what: these are, such as "arguments of the Pipeline".

    Raises:
        DisagreementError: on every process: the first of the names under which they differ, with the values and the
            processes that have them. A script that does not catch it ends with exit code 2.
    """
    world = World.current()
    if world.num_processes == 1:
        return
    settings = given()
    mine = {name: value.value if isinstance(value, Noted) else text_of(value) for name, value in settings.items()}
    if len(set(world.gather_objects(hashlib.sha256(repr(sorted(mine.items())).encode()).hexdigest()))) == 1:
        return
    notes = {name: value.note for name, value in settings.items() if isinstance(value, Noted)}
    told = world.gather_objects((mine, notes))
    differing = {name for own, _ in told for name, value in own.items() if value != told[0][0].get(name)}
    everyone = [
        (host, {n: f"{noted[n]} ({v})" if n in noted and n in differing else v for n, v in own.items()})
        for host, (own, noted) in zip(world.hosts, told, strict=True)
    ]
    if problems := disagreements(everyone):
        raise DisagreementError(f"{what}: {'; '.join(problems)}; give all processes the same")


def text_of(value: Any) -> str:
    """The text of a value, which is the same in every process that was given the same."""
    if isinstance(value, FunctionType | MethodType | type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, Mapping):
        text = f"{{{', '.join(f'{key!r}: {text_of(entry)}' for key, entry in value.items())}}}"
    elif isinstance(value, set | frozenset):
        text = f"{{{', '.join(sorted(map(text_of, value)))}}}"
    elif isinstance(value, torch.Tensor):
        text = f"tensor {digest_of_tensors({'': value})}"
    elif callable(getattr(value, "to_dict", None)):
        text = f"{type(value).__name__} {text_of(value.to_dict())}"
    else:
        text = _ADDRESS.sub("", repr(value))
    if len(text) > _MOST_CHARACTERS:
        return f"{text[:_MOST_CHARACTERS]}... (digest {hashlib.sha256(text.encode()).hexdigest()[:8]})"
    return text


def digest_of_tensors(tensors: Mapping[str, torch.Tensor]) -> str:
    """A digest of some values of each tensor."""
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        if tensor.is_meta or not tensor.numel():
            continue
        values = tensor.detach().reshape(-1)
        samples = values[:: max(1, values.numel() // _NUM_SAMPLES)][: 2 * _NUM_SAMPLES].contiguous().cpu()
        digest.update(samples.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]

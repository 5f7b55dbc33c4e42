"""How the rows of a generation are spread over replicas: number i of each stage form a pipeline, which has its part.

There are as many pipelines as the stage with the fewest replicas has replicas; processes in no pipeline wait. A process
can be in one pipeline only, so if pipelines would share a process, the first pipeline generates all rows alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from hf_gpipe.adapters import Adapter
from hf_gpipe.schedule.placement import Placement

#: Arguments and settings whose effect on a row may depend on the other rows, or whose results have other dimensions.
_OF_ALL_ROWS = (
    *("do_sample", "return_dict_in_generate", "streamer"),
    *("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn"),
)


def pipelines(placement: Placement) -> tuple[tuple[int, ...], ...]:
    """The workers of each pipeline; number i runs the stages as replica i."""
    every = [tuple(dict.fromkeys(own[i] for own in placement.workers)) for i in range(min(placement.replicas))]
    are_apart = len({worker for workers in every for worker in workers}) == sum(map(len, every))
    return tuple(every if are_apart else every[:1])


def number_of_parts(arguments: Mapping[str, Any], adapter: Adapter, setting: Callable[[str], Any], most: int) -> int:
    """How many parts the rows of a call of `generate` are cut into; 1 where a row's tokens may depend on other rows.

    Args:
        setting: the value in effect of an argument or a setting, by its name.
        most: the number of pipelines.
    """
    of_rows = {"token_type_ids", *chain(*adapter.text_keys.values())}
    has_others = any(isinstance(value, torch.Tensor) and name not in of_rows for name, value in arguments.items())
    starts_alike = isinstance(setting("decoder_start_token_id"), int | None)
    if has_others or not starts_alike or any(setting(name) for name in _OF_ALL_ROWS):
        return 1
    return min(most, len(adapter.main_input(arguments)))


def part_of(arguments: Mapping[str, Any], number: int, count: int) -> dict[str, Any]:
    """The arguments for one of `count` parts of the rows, whose sizes differ by at most one."""
    if count == 1:
        return dict(arguments)
    return {
        name: torch.tensor_split(value, count)[number] if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    }


def joined(parts: Sequence[torch.Tensor], setting: Callable[[str], Any]) -> torch.Tensor:
    """The tokens (N, T) of all parts, filled up as transformers fills rows that ended before the longest one.

    Args:
        parts: token ids (n, t) of each.
        setting: as for `number_of_parts`.
    """
    length = max(part.shape[1] for part in parts)
    pad, ends = setting("pad_token_id"), setting("eos_token_id")
    end = ends[0] if isinstance(ends, list | tuple) else ends
    if pad is None or (pad == 0 and end is not None and (setting("num_beams") or 1) > 1):
        # Beam search takes a pad token of 0 for a missing one, and fills rows with the end token.
        pad = end
    return torch.cat([torch.nn.functional.pad(part, (0, length - part.shape[1]), value=pad or 0) for part in parts])

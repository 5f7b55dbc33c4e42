"""The length beyond which a model's rotary frequencies follow from the length of its rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedConfig


def rotary_parts(rope: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """The parameters of each kind of rotary embeddings: some families have one for each type of layer."""
    nested = [part for part in (rope or {}).values() if isinstance(part, dict)]
    yield from nested or filter(None, [rope])


def limit_field(rope: dict[str, Any]) -> str | None:
    """The field that has the longest row with the frequencies of shorter ones; None: the length changes nothing.

    Args:
        rope: of `rotary_parts`.
    """
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "longrope":
        return "original_max_position_embeddings"
    return "max_position_embeddings" if "dynamic" in kind else None


def length_limit(config: PreTrainedConfig) -> int | None:
    """The smallest limit among a configuration's rotary embeddings and its parts'; None: there is none."""
    parts = rotary_parts(getattr(config, "rope_parameters", None))
    fields = [(rope, field) for rope in parts if (field := limit_field(rope)) is not None]
    limits = [rope.get(field) or getattr(config, field, None) for rope, field in fields]
    inner = (getattr(config, name, None) for name in config.sub_configs)
    limits += [length_limit(part) for part in inner if isinstance(part, PreTrainedConfig)]
    return min((limit for limit in limits if limit is not None), default=None)

"""Random changes of a configuration's own fields, whatever the family calls them.

A field is changed only where the code of the model reads it. The values of a text are those that this code compares the
field with, so that no family needs a list.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from random import Random
from typing import Any

from transformers import PreTrainedConfig

from hf_gpipe.adapters.observation.length_limit import limit_field
from hf_gpipe.adapters.observation.tiny import DERIVED, NUM_BLOCKS

#: Fields that say what comes in or out, which other options of a case draw.
_SKIPPED = frozenset(
    {
        *("is_encoder_decoder", "use_cache", "return_dict", "output_attentions", "output_hidden_states"),
        *("model_type", "transformers_version", "torch_dtype", "dtype", "architectures", "problem_type"),
        "pretraining_tp",
    }
)
_ACTIVATIONS = ("relu", "gelu", "gelu_new", "silu", "tanh", "relu2", "sigmoid")
_ROPE_TYPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8},
    "longrope": {"factor": 4.0},
}
#: The lengths beyond which frequencies of dynamic NTK and LongRoPE depend on the length; rows are shorter and longer.
_LIMITS = (4, 8, 16)
#: Optional numbers, which are None in a configuration that does without.
_OPTIONAL: dict[str, tuple[Any, ...]] = {
    "sliding_window": (2, 4, 6),
    **dict.fromkeys(("final_logit_softcapping", "attn_logit_softcapping"), (5.0, 30.0)),
    **{"logit_scale": (0.5, "inv_sqrt_d_model"), "clip_qkv": (0.5, 2.0), "attention_chunk_size": (2, 4)},
    **{"n_inner": (48,), "head_dim": (8, 16), "q_lora_rank": (8,), "num_ln_in_parallel_attn": (1, 2)},
    "softmax_scale": (0.3,),
}


def changes(config: PreTrainedConfig, rng: Random, count: int) -> dict[str, Any]:
    """Draw `count` changes: dotted name of a field -> its new value."""
    candidates = sorted(_candidates(config, "", _source(config)), key=lambda candidate: candidate[0])
    new_values: dict[str, Any] = {}
    for _ in range(count if candidates else 0):
        name, kind, value = rng.choice(_of_a_kind(candidates, rng))
        if kind == "rope":
            new_values |= _other_rope(config, name, value, rng)
            continue
        new = _changed(name, kind, value, rng, _source(config))
        if new != value:
            new_values[name] = new
    return new_values


def _other_rope(config: PreTrainedConfig, name: str, value: dict[str, Any], rng: Random) -> dict[str, Any]:
    """Rotary embeddings of another type, for one of the types of layers where these have their own."""
    prefix = name.removesuffix("rope_parameters")
    for part in prefix.split(".")[:-1]:
        config = getattr(config, part)
    nested = sorted(key for key, entry in value.items() if isinstance(entry, dict))
    which = rng.choice(nested) if nested else None
    old = value if which is None else value[which]
    rope_type = rng.choice(list(_ROPE_TYPES))
    rope = {key: entry for key, entry in old.items() if key in ("rope_theta", "partial_rotary_factor")}
    rope |= {"rope_type": rope_type} | _ROPE_TYPES[rope_type]
    field = limit_field(rope)
    others: dict[str, Any] = {}
    if field is not None:
        limit = rng.choice(_LIMITS)
        if rope_type == "longrope":
            width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            count = len(range(0, int(width * rope.get("partial_rotary_factor", 1.0)), 2))
            rope |= {"short_factor": [1.0 + 0.1 * i for i in range(count)], field: limit}
            rope["long_factor"] = [1.0 + 2.0 * i for i in range(count)]
        if getattr(config, field, None) is not None:
            others[f"{prefix}{field}"] = limit
    return {name: rope if which is None else value | {which: rope}, **others}


def _of_a_kind(candidates: list[tuple[str, str, Any]], rng: Random) -> list[tuple[str, str, Any]]:
    """The candidates of a random kind, so that rare kinds are drawn as often as frequent ones."""
    kinds = sorted({kind for _, kind, _ in candidates})
    weights = {"bool": 4, "int": 3, "list": 2, "text": 2, "rope": 2, "optional": 2, "float": 1}
    chosen = rng.choices(kinds, [weights[kind] for kind in kinds])[0]
    return [candidate for candidate in candidates if candidate[1] == chosen]


def apply(config: PreTrainedConfig, changed: Mapping[str, Any]) -> PreTrainedConfig:
    """A configuration of the same class with `changed`.

    Raises whatever transformers does for values that do not fit.
    """
    values = config.to_diff_dict() | {"model_type": config.model_type}
    full = config.to_dict()
    for name, value in changed.items():
        *path, leaf = name.split(".")
        target, of = values, full
        for part in path:
            of = of[part]
            target = target.setdefault(part, dict(of))
            target.update({key: entry for key, entry in of.items() if key not in target})
        target[leaf] = value
        if _is_number_of_blocks(leaf, of.get(leaf)):
            # Lists with one entry per block follow the number of blocks.
            for other, entries in of.items():
                is_changed = ".".join([*path, other]) in changed
                if isinstance(entries, list) and len(entries) == NUM_BLOCKS and not is_changed:
                    target[other] = [entries[i % len(entries)] for i in range(value)]
            for derived in DERIVED:
                if not isinstance(of.get(derived), list):
                    target.pop(derived, None)
    return type(config).from_dict(values)


def _is_number_of_blocks(name: str, value: Any) -> bool:
    return "layer" in name and value == NUM_BLOCKS and not isinstance(value, bool)


def _candidates(config: PreTrainedConfig, prefix: str, source: str) -> Iterator[tuple[str, str, Any]]:
    """(dotted name, kind, value) of each field that may be changed, also in the parts of a configuration."""
    for name, value in config.to_dict().items():
        part = getattr(config, name, None)
        if isinstance(part, PreTrainedConfig):
            if name in ("text_config", "encoder", "decoder"):
                yield from _candidates(part, f"{prefix}{name}.", source + _source(part))
            continue
        if name in _SKIPPED or name.startswith("_") or name.endswith(("_token_id", "_token_index")):
            continue
        if name != "rope_parameters" and not re.search(rf"\b{name}\b", source):
            continue
        if (kind := _kind(name, value)) is not None:
            yield prefix + name, kind, value


def _kind(name: str, value: Any) -> str | None:
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return "int"
    if isinstance(value, float):
        return "float" if 0 < abs(value) < 1e6 and "drop" not in name and "jitter" not in name else None
    if isinstance(value, str):
        return "text"
    if name == "rope_parameters" and isinstance(value, dict):
        return "rope"
    if value is None:
        return "optional" if name in _OPTIONAL else None
    is_flat = isinstance(value, list) and len(value) > 1 and not any(isinstance(entry, list | dict) for entry in value)
    return "list" if is_flat else None


def _changed(name: str, kind: str, value: Any, rng: Random, source: str) -> Any:
    leaf = name.rpartition(".")[2]
    if kind == "bool":
        return not value
    if kind == "int":
        if leaf in _OPTIONAL and rng.random() < 0.2:
            return None
        return rng.choice([1, 2, 3, 4, max(1, value - 1), value + 1, max(1, value // 2), 2 * value, 0])
    if kind == "float":
        return rng.choice([value / 2, value * 2, 1.0, 0.1])
    if kind == "text":
        if "act" in leaf and value in (*_ACTIVATIONS, "swish", "gelu_pytorch_tanh", "quick_gelu"):
            return rng.choice(_ACTIVATIONS)
        return rng.choice([value, *_compared_with(leaf, source)])
    if kind == "optional":
        return rng.choice(_OPTIONAL[leaf])
    distinct = sorted(set(value), key=str)
    if leaf.endswith("layer_types"):
        distinct += [layer_type for layer_type in ("full_attention", "sliding_attention") if layer_type not in distinct]
    return [rng.choice(distinct) for _ in value]


@cache
def _source_of(module: str) -> str:
    return inspect.getsource(sys.modules[module]) if module in sys.modules else ""


def _source(config: PreTrainedConfig) -> str:
    """The code of the model of a configuration."""
    module = type(config).__module__
    modeling = module.replace(".configuration_", ".modeling_")
    try:
        __import__(modeling)
    except ImportError:
        return _source_of(module)
    return _source_of(modeling)


def _compared_with(name: str, source: str) -> list[str]:
    """The texts that the code compares a field with."""
    texts: list[str] = []
    for text in re.findall(rf"\b{name}\b\s*(?:==|!=|in|not in)\s*([\[({{]?\s*(?:[\"'][\w.-]+[\"'][,\s]*)+)", source):
        texts += re.findall(r"[\"']([\w.-]+)[\"']", text)
    return sorted(set(texts))

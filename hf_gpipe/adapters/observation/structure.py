"""Which code of its family a configuration runs: switches, kinds, and what is left out; not sizes and factors."""

from __future__ import annotations

import functools
from typing import Any

from transformers import PreTrainedConfig

from hf_gpipe.libraries.transformers import OF_SOURCE

#: Fields that change nothing of a training forward; ties, which are read from the model itself; and the auxiliary loss,
#: with and without which `scripts/families.py` compares.
_INERT = frozenset(
    {
        *("use_cache", "return_dict", "output_attentions", "output_hidden_states", "output_router_logits"),
        *("transformers_version", "architectures", "dtype", "torch_dtype", *OF_SOURCE),
        *("id2label", "label2id", "is_encoder_decoder", "pretraining_tp", "chunk_size_feed_forward", "early_stopping"),
        *("tie_word_embeddings", "task_specific_params", "tokenizer_class", "problem_type", "langs", "languages"),
    }
)
#: Parts of names: what is random, which a comparison turns off; initial values; and heads for other tasks.
_INERT_PARTS = ("drop", "noise", "jitter", "initializer", "init_std", "summary_", "classifier_")
#: Ends of names: of tokens, which are data, and of functions of single values.
_TOKENS, _FUNCTIONS = ("_token_id", "_token_index"), ("_act", "act_fn", "activation", "activation_function")


def unlike_default(config: PreTrainedConfig) -> list[str]:
    """Names of the fields by which a configuration runs other code than its family's default configuration does."""
    cls: Any = type(config)
    try:
        default = _default(cls)
    except Exception:  # a family whose configuration needs values
        return ["model_type"]
    return _unlike(config.to_dict(), default, "")


@functools.cache
def _default(cls: type[PreTrainedConfig]) -> dict[str, Any]:
    return dict(cls().to_dict())


def _unlike(values: dict[str, Any], default: dict[str, Any], prefix: str) -> list[str]:
    names: list[str] = []
    for name, value in values.items():
        is_inert = name in _INERT or name.endswith(_TOKENS) or any(part in name for part in _INERT_PARTS)
        is_function = isinstance(value, str) and name.endswith(_FUNCTIONS)
        if is_inert or is_function or name not in default:
            continue
        other = default[name]
        if isinstance(value, dict) and isinstance(other, dict):
            names += _unlike(value, other, f"{prefix}{name}.")
        elif _kind(value) != _kind(other):
            names.append(prefix + name)
    return names


def _kind(value: Any) -> Any:
    """The part of a value that decides which code runs."""
    if isinstance(value, bool | str) or value is None:
        return value
    if isinstance(value, int | float):
        return "0" if value == 0 else "a number"
    if isinstance(value, list | tuple):
        return sorted({str(_kind(entry)) for entry in value})
    return type(value).__name__

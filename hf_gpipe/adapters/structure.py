"""Which code of its family a configuration runs: switches, kinds, and what is left out; not sizes and factors."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

#: Fields that change nothing of a training forward, or whose every value `scripts/families.py` compares.
_INERT = frozenset(
    {
        *(
            "use_cache",
            "return_dict",
            "output_attentions",
            "output_hidden_states",
            "output_router_logits",
            "tokenizer_class",
        ),
        *(
            "transformers_version",
            "architectures",
            "dtype",
            "torch_dtype",
            "_name_or_path",
            "name_or_path",
            "problem_type",
        ),
        *("id2label", "label2id", "is_encoder_decoder", "pretraining_tp", "chunk_size_feed_forward", "early_stopping"),
        *("tie_word_embeddings", "task_specific_params", "prefix", "langs", "languages"),
    }
)
#: Parts of names: tokens are data, what is random is turned off, and a function of single values is one or the other.
_INERT_NAMES = ("token", "drop", "noise", "jitter", "init", "_act", "act_fn", "activation", "summary_", "classifier_")


def unlike_default(config: PreTrainedConfig) -> list[str]:
    """Names of the fields by which a configuration runs other code than its family's default configuration does."""
    try:
        default = type(config)().to_dict()
    except Exception:  # a family whose configuration needs values
        return ["model_type"]
    return _unlike(config.to_dict(), default, "")


def _unlike(values: dict[str, Any], default: dict[str, Any], prefix: str) -> list[str]:
    found: list[str] = []
    for name, value in values.items():
        if name in _INERT or any(part in name for part in _INERT_NAMES) or name not in default:
            continue
        other = default[name]
        if isinstance(value, dict) and isinstance(other, dict):
            # An empty one is as good as any: parts of a configuration are told by their own fields.
            found += _unlike(value, other, f"{prefix}{name}.")
        elif _kind(value) != _kind(other):
            found.append(prefix + name)
    return found


def _kind(value: Any) -> Any:
    """What of a value decides which code runs."""
    if isinstance(value, bool | str) or value is None:
        return value
    if isinstance(value, int | float):
        return "0" if value == 0 else "a number"
    if isinstance(value, list | tuple):
        return sorted({str(_kind(one)) for one in value})
    return type(value).__name__

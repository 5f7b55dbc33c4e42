"""Configurations of T(L, H, A) for users of the API."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from hf_gpipe.recipe.transformer import with_transformer


def transformer_config(size: str, *, model_type: str = "t5", **fields: Any) -> PreTrainedConfig:
    """The configuration of a T(L, H, A) Transformer: L encoder and L decoder layers, H wide, A heads of width 64.

    Args:
        size: for example "T(24, 8192, 16)".
        model_type: t5, mt5 or umt5.
        fields: of the family's configuration, such as d_model and vocab_size; `d_kv` replaces the head width of 64.
            `decoder_start_token_id` is the padding token's unless it is given, as in pretrained T5 models.

    Raises:
        RecipeError: the size does not parse, the family is another one, or the size decides one of the fields.
    """
    values = with_transformer({"model_type": model_type, **fields}, size, name="the size", prefix="")
    config = AutoConfig.for_model(**values)
    if getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = config.pad_token_id
    return config

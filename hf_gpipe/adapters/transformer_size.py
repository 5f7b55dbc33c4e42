"""Configurations of T(L, H, A) for users of the API, and the number of parameters of a configuration's model."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import AutoConfig, PreTrainedConfig

from hf_gpipe.adapters.observation.skeleton import Blueprint, build_skeleton
from hf_gpipe.recipe.transformer import with_transformer

PAPER_SIZES = {
    "T(6, 8192, 16)": 400_000_000,
    "T(24, 8192, 16)": 1_300_000_000,
    "T(12, 16384, 32)": 1_300_000_000,
    "T(32, 16384, 32)": 3_000_000_000,
    "T(64, 16384, 32)": 6_000_000_000,
}
"""GPipe's translation models -> their number of parameters as the paper rounds it (arXiv 1811.06965, section 5)."""


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


def body_parameters(config: PreTrainedConfig) -> int:
    """Number of parameters in the matrices of attention and feed-forward layers, counted on the meta device.

    Embeddings, the head, norms, biases and tables do not count.
    """
    model = build_skeleton(Blueprint(config))
    tables = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    if (head := model.get_output_embeddings()) is not None:
        tables |= {id(p) for p in head.parameters()}
    return sum(p.numel() for p in model.parameters() if p.dim() > 1 and id(p) not in tables)


def total_parameters(config: PreTrainedConfig) -> int:
    """Number of parameters of the model, a tied one once, counted on the meta device."""
    return sum(p.numel() for p in build_skeleton(Blueprint(config)).parameters())

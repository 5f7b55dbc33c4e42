"""Tiny configurations for the emulated devices."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig, T5Config

from tests.oracle import VOCABULARY, tiny_config


def config_of(family: str, **overrides: Any) -> PreTrainedConfig:
    """A tiny configuration; of T5 too."""
    if family != "t5":
        return tiny_config(family, **overrides)
    dropout = overrides.pop("dropout", 0.0)
    return T5Config(
        vocab_size=VOCABULARY,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=overrides.pop("num_layers", 2),
        num_heads=2,
        dropout_rate=dropout,
        pad_token_id=0,
        decoder_start_token_id=0,
        tie_word_embeddings=overrides.pop("tied", True),
        **overrides,
    )

"""Hugging Face models as lists of layers, and stages that keep the library's own forward and names."""

from __future__ import annotations

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hf_gpipe.adapters.base import IGNORED_LABEL, Adapter, StageModel
from hf_gpipe.adapters.decoder_only import DecoderOnly
from hf_gpipe.adapters.encoder_decoder import EncoderDecoder


def build_adapter(
    config: PreTrainedConfig,
    dtype: torch.dtype = torch.float32,
    attn_implementation: str | None = None,
    model_class: type[PreTrainedModel] | None = None,
    *,
    trust_remote_code: bool = False,
) -> Adapter:
    kind = EncoderDecoder if config.is_encoder_decoder else DecoderOnly
    return kind(config, dtype, attn_implementation, model_class, trust_remote_code=trust_remote_code)


adapter_for = build_adapter

__all__ = ["IGNORED_LABEL", "Adapter", "StageModel", "adapter_for"]

"""Hugging Face models as lists of layers, and stages that keep the library's own forward and names."""

from __future__ import annotations

import torch
from transformers import PreTrainedConfig

from hf_gpipe.adapters.base import IGNORED_LABEL, Adapter, StageModel
from hf_gpipe.adapters.decoder_only import DecoderOnly
from hf_gpipe.adapters.encoder_decoder import EncoderDecoder
from hf_gpipe.errors import UnsupportedModelError, nearest

#: Families whose split is tested to be exact, with the adapter each needs.
FAMILIES: dict[str, type[Adapter]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), DecoderOnly),
    **dict.fromkeys(("bart", "m2m_100", "marian", "mbart", "pegasus"), EncoderDecoder),
}


def adapter_for(
    config: PreTrainedConfig,
    dtype: torch.dtype = torch.float32,
    attn_implementation: str | None = None,
    *,
    trust_remote_code: bool = False,
) -> Adapter:
    """The adapter of a model's family.

    Raises UnsupportedModelError for a family that is not known to split exactly, by name.
    """
    family = config.model_type
    if family not in FAMILIES:
        raise UnsupportedModelError(
            f"the model family {family!r} is not supported; supported are {', '.join(sorted(FAMILIES))}"
            f"{nearest(family, FAMILIES)}"
        )
    return FAMILIES[family](config, dtype, attn_implementation, trust_remote_code=trust_remote_code)


__all__ = ["FAMILIES", "IGNORED_LABEL", "Adapter", "StageModel", "adapter_for"]

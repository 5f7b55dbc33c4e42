"""The number of parameters of a configuration's model."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedConfig

from hf_gpipe.adapters.observation.skeleton import Blueprint, build_skeleton


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

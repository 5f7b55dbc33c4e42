"""The tiny clone of a model on which checks run, with nothing random in its forward, and a mini-batch for it."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hf_gpipe.adapters import IGNORED_LABEL, build_adapter
from hf_gpipe.adapters.image_text import FORMS, example_batch
from hf_gpipe.adapters.observation.skeleton import Blueprint, build
from hf_gpipe.adapters.observation.tiny import tiny_config
from hf_gpipe.adapters.text import TextAdapter
from hf_gpipe.adapters.text_entries import text_entries
from hf_gpipe.libraries.torch import AnyDropout
from hf_gpipe.libraries.transformers import attention_implementation, with_eager_experts

ROWS, SOURCE_LENGTH, TARGET_LENGTH = 4, 9, 7

Batch = dict[str, torch.Tensor]


def exact_clone(
    config: PreTrainedConfig,
    dtype: torch.dtype,
    model_class: type[PreTrainedModel] | None = None,
    *,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Build the tiny clone with random weights and without dropout, in training mode.

    Raises UnsupportedModelError if transformers cannot build it.
    """
    tiny = tiny_config(config)
    turn_randomness_off(tiny)
    with_eager_experts(tiny)  # grouped matrix products do not support float64
    blueprint = Blueprint(tiny, dtype, "eager", model_class, trust_remote_code)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = randomise(build(blueprint))
    for module in model.modules():
        if isinstance(module, AnyDropout):
            module.p = 0.0
    return model


def randomise(model: PreTrainedModel) -> PreTrainedModel:
    """Add noise to the weights of a new model: among zeros and ones a missing bias or norm would not be noticed."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and not name.endswith("embed_positions.weight"):
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
    model.tie_weights()
    return model.train()


def clone_of(adapter: TextAdapter, dtype: torch.dtype) -> tuple[PreTrainedModel, TextAdapter]:
    """A tiny clone of an adapter's model in training mode, and its adapter, with the attention that the model has."""
    given = adapter.blueprint
    model = exact_clone(given.config, dtype, given.model_class, trust_remote_code=given.trust_remote_code)
    model.set_attn_implementation(attention_of(adapter))
    return model, build_adapter(Blueprint(model.config, dtype, attention_of(adapter), type(model)))


def attention_of(adapter: TextAdapter) -> str:
    """The attention of a model's clone: that of the model where a CPU has it, else eager."""
    return "sdpa" if attention_implementation(adapter.reference.config) == "sdpa" else "eager"


def padded_batch(model: PreTrainedModel, *, with_images: bool = True) -> Batch:
    """Return a mini-batch with rows of unequal length, padded on the right.

    Args:
        model: the model.
        with_images: whether rows have images, if it reads any.
    """
    if with_images and model.config.model_type in FORMS:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            # Several images in a row, a row without one beside it, and a micro-batch without any.
            return example_batch(model, [2, 0, *[0] * (ROWS - 2)])
    config = model.config.get_text_config()
    generator = torch.Generator().manual_seed(1)
    vocabulary = min(config.vocab_size, model.get_input_embeddings().weight.shape[0])
    ids = torch.randint(3, vocabulary, (ROWS, SOURCE_LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    labels = torch.randint(3, vocabulary, (ROWS, TARGET_LENGTH), generator=generator)
    for row in range(ROWS):
        mask[row, SOURCE_LENGTH - row :] = 0
        labels[row, TARGET_LENGTH - row :] = IGNORED_LABEL
    ids = ids.masked_fill(mask == 0, config.pad_token_id if isinstance(config.pad_token_id, int) else 0)
    if not model.config.is_encoder_decoder:
        labels = ids.masked_fill(mask == 0, IGNORED_LABEL)
    return text_entries(ids, mask, labels)


def narrowed(batch: Batch, width: int | None) -> Batch:
    """A mini-batch of text with at most so many columns; 0 or None: all."""
    return {name: tensor[:, : width or None] for name, tensor in batch.items()}


def turn_randomness_off(config: Any) -> None:
    """Set what is random in the forward of a configuration's model to what is not."""
    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            turn_randomness_off(value)
        elif isinstance(value, float) and any(word in name for word in ("drop", "noise", "jitter")):
            setattr(config, name, 0.0)
        elif name == "second_expert_policy":
            # NLLB-MoE's others than this draw whether a token has a second expert.
            setattr(config, name, "all")

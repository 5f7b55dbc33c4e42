"""The tiny clone of a model on which checks run, with nothing random in its forward, and a mini-batch for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hf_gpipe.adapters import IGNORED_LABEL, Adapter, build_adapter, is_listed
from hf_gpipe.adapters.image_text import FORMS, example_batch
from hf_gpipe.adapters.observation.skeleton import Blueprint, build
from hf_gpipe.adapters.observation.tiny import tiny_config
from hf_gpipe.adapters.text import TextAdapter
from hf_gpipe.adapters.text_entries import text_entries, token_ids
from hf_gpipe.errors import UnsupportedModelError
from hf_gpipe.libraries.torch import AnyDropout
from hf_gpipe.libraries.transformers import attention_implementation, with_eager_experts
from hf_gpipe.libraries.verified import install_advice

ROWS, SOURCE_LENGTH, TARGET_LENGTH = 4, 9, 7
#: Together longer than the tables of positions of tiny clones: only a document must not be longer.
PACKED_LENGTHS = (30, 25, 20)

Batch = dict[str, torch.Tensor]
Result = TypeVar("Result")

#: The result of each comparison of a clone that was made in this process, or the error.
_compared: dict[str, Any] = {}


def compared_once(adapter: TextAdapter, what: str, compare: Callable[[], Result]) -> Result:
    """The result of a comparison, which is made once in a process for equal clones of listed families.

    Its error says which versions of libraries hf_gpipe was not tested with, if any.

    Args:
        adapter: the model's.
        what: names the comparison and its options.
        compare: makes it.

    Raises:
        UnsupportedModelError: the comparison raises it.
    """
    config = adapter.given_config
    tiny = tiny_config(config).to_json_string(use_diff=False)
    trusts = adapter.blueprint.trust_remote_code
    identity = f"{what} {adapter.compared_class} {type(config).__qualname__} {trusts} {tiny}"
    result = _compared.get(identity)
    if result is None:
        try:
            with torch.random.fork_rng(devices=[]):  # the process goes on as if nothing had been drawn
                result = compare()
        except UnsupportedModelError as error:
            result = error
            if advice := install_advice():
                result = UnsupportedModelError(f"{error}{advice}")
                result.__cause__ = error
        if is_listed(config):
            _compared[identity] = result
    if isinstance(result, UnsupportedModelError):
        raise result
    return cast(Result, result)


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


def packed_documents(model: PreTrainedModel, adapter: Adapter) -> list[Batch]:
    """Documents of unlike lengths, as of `Adapter.packed`."""
    ids = token_ids(padded_batch(model, with_images=False)).flatten().repeat(PACKED_LENGTHS[0])
    # Longer ones than the limit of rotary embeddings are not packed.
    limit = adapter.padding_matters_beyond
    lengths = [min(size, limit - place) if limit else size for place, size in enumerate(PACKED_LENGTHS)]
    sources = [ids[size : 2 * size] for size in lengths]
    if not adapter.target_keys:
        return [{"position_ids": torch.arange(len(ids)), **text_entries(ids, labels=ids)} for ids in sources]
    return [text_entries(source, labels=other) for source, other in zip(sources, reversed(sources), strict=True)]


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

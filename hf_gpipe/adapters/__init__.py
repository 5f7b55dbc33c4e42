"""Hugging Face models as lists of layers, and stages that keep the library's own forward and names."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hf_gpipe.adapters.auto_classes import HEADLESS, SEQUENCE_CLASSIFICATION, TOKEN_CLASSIFICATION
from hf_gpipe.adapters.base import IGNORED_LABEL as IGNORED_LABEL
from hf_gpipe.adapters.base import Adapter as Adapter
from hf_gpipe.adapters.classifiers import kind_of_classifier
from hf_gpipe.adapters.decoder_only import DecoderOnly
from hf_gpipe.adapters.embedders import Embedder
from hf_gpipe.adapters.encoder_decoder import EncoderDecoder
from hf_gpipe.adapters.families import EXACT, REFUSED
from hf_gpipe.adapters.image_text import FORMS, ImageText
from hf_gpipe.adapters.modules.autocast import Autocast as Autocast
from hf_gpipe.adapters.modules.quantised import Quantisation, find_quantisation, quantised_layers
from hf_gpipe.adapters.observation.skeleton import Blueprint as Blueprint
from hf_gpipe.adapters.observation.structure import unlike_default
from hf_gpipe.adapters.stage_model import StageModel as StageModel
from hf_gpipe.adapters.text import TextAdapter
from hf_gpipe.adapters.token_classifiers import TokenClassifier, check_token_classifier
from hf_gpipe.errors import UnsupportedModelError, UserError
from hf_gpipe.libraries.verified import unverified

_WELL_KNOWN = ("llama", "mistral", "qwen3", "gemma3", "gpt2", "mixtral", "t5", "mt5", "bart", "m2m_100", "marian")


def adapter_for(
    config: PreTrainedConfig,
    dtype: torch.dtype = torch.float32,
    attn_implementation: str | None = None,
    model_class: type[PreTrainedModel] | None = None,
    *,
    trust_remote_code: bool = False,
    autocast: Autocast | None = None,
    quantization_config: Any = None,
) -> TextAdapter:
    """Return the adapter of a model.

    Args:
        config, dtype, attn_implementation, model_class, trust_remote_code: the attributes of `Blueprint`.
        autocast: mixed precision of every forward; None: everything computes in the type of the weights.
        quantization_config: a transformers.BitsAndBytesConfig to quantise the weights; None: as the configuration says.

    Raises:
        UnsupportedModelError: the family cannot be split exactly, or the weights are quantised in another way than
            bitsandbytes', with the reason.
        UserError: `quantization_config` is not supported.
    """
    if (reason := REFUSED.get(config.model_type)) is not None:
        raise unsupported(config, reason)
    quantisation = find_quantisation(config, quantization_config, dtype)
    if quantisation is not None and quantisation.is_done:
        config = copy.deepcopy(config)
        del config.quantization_config
    blueprint = Blueprint(config, dtype, attn_implementation, model_class, trust_remote_code)
    adapter = build_adapter(blueprint, autocast, quantisation)
    head = adapter.layers[-1].name
    if quantisation is not None and any(quantised_layers(adapter.reference.get_submodule(head))):
        raise UserError(
            f"quantization_config would quantise the head {head!r}, whose logits a pipeline computes in slices; add it "
            "to llm_int8_skip_modules, or leave that out"
        )
    return adapter


def build_adapter(
    blueprint: Blueprint, autocast: Autocast | None = None, quantisation: Quantisation | None = None
) -> TextAdapter:
    """The adapter of a model, whatever the lists of families say; the arguments are those of `TextAdapter`."""
    config, model_class = blueprint.config, blueprint.model_class
    name = "" if model_class is None else model_class.__name__
    kind: type[TextAdapter] = EncoderDecoder if config.is_encoder_decoder else DecoderOnly
    if name in SEQUENCE_CLASSIFICATION.names:
        kind = kind_of_classifier(config, name)
    elif name in HEADLESS.names:
        kind = Embedder
    elif name in TOKEN_CLASSIFICATION.names:
        check_token_classifier(config, name)
        kind = TokenClassifier
    elif config.model_type in FORMS:
        kind = ImageText
    return kind(blueprint, autocast, quantisation)


def is_listed(config: PreTrainedConfig) -> bool:
    """Whether the split of a family's default configuration is known to be exact."""
    return config.model_type in EXACT


def is_known_exact(adapter: Adapter) -> bool:
    """Whether the model's code is transformers' own, and its split was verified with these libraries.

    Only a family's default configuration was verified, and another one may run other code. A chain is always exact,
    because every tensor of its forward was followed.
    """
    if not isinstance(adapter, TextAdapter):
        return True
    is_own_code = type(adapter.reference).__module__.startswith("transformers.")
    config = adapter.given_config
    return is_own_code and not unverified() and is_listed(config) and not unlike_default(config)


def unsupported(config: PreTrainedConfig, reason: str) -> UnsupportedModelError:
    """Return the error for a family that is not supported, with the reason."""
    return UnsupportedModelError(
        f"the model family {config.model_type!r} is not supported: {reason}; among the {len(EXACT)} families that are: "
        f"{', '.join(_WELL_KNOWN)}"
    )

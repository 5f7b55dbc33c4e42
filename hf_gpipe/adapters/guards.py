"""What a model's configuration, or a model in memory, may not ask for, because stages could not do it exactly."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_gpipe.errors import UnsupportedModelError, UserError


def check_config(config: PreTrainedConfig) -> None:
    """Raise UnsupportedModelError where a configuration asks for something that differs between splits."""
    family, text = config.model_type, config.get_text_config(decoder=True)
    for rate in ("encoder_layerdrop", "decoder_layerdrop", "layerdrop"):
        if getattr(config, rate, 0.0):
            raise UnsupportedModelError(
                f"{family}: {rate} is {getattr(config, rate)}, and a layer left out at random cannot be the same on "
                f"every split; set {rate} to 0.0 in the model's configuration"
            )
    for flag in ("output_hidden_states", "output_attentions"):
        if getattr(config, flag, False) or getattr(text, flag, False):
            raise UnsupportedModelError(
                f"{family}: {flag} is set, and a pipeline returns the loss and logits only; set {flag} to false in the "
                "model's configuration"
            )
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModelError(
            f"{family}: the weights are quantised, and a pipeline trains floating point weights; start from the "
            "model's unquantised checkpoint"
        )
    if config.is_encoder_decoder and getattr(config, "output_router_logits", False):
        raise UnsupportedModelError(
            f"{family}: output_router_logits is set; the routers' losses of an encoder-decoder are not supported, and "
            "transformers adds them only where forward is asked to; set it to false in the model's configuration"
        )
    for name, what in (
        ("num_kv_shared_layers", "blocks that use the keys and values of earlier blocks"),
        ("hidden_size_per_layer_input", "an embedding that every block reads"),
    ):
        if getattr(text, name, 0):
            raise UnsupportedModelError(f"{family}: {name} is above 0, and {what} cannot be on another stage")


def check_model(model: Any) -> None:
    """Raise UserError where a model in memory is not one plain transformers model."""
    if isinstance(model, nn.Module) and not isinstance(model, PreTrainedModel):
        raise UserError(
            f"the model is a {type(model).__name__}, not a transformers model; give the model itself, before anything "
            "is wrapped around it (the .module of DistributedDataParallel)"
        )
    if not isinstance(model, PreTrainedModel):
        return
    if getattr(model, "is_quantized", False):
        raise UnsupportedModelError(
            f"{model.config.model_type}: the model's weights are quantised; load it without quantisation"
        )
    if len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1:
        raise UserError(
            "the model is spread over devices by its device_map; load it without device_map, or give its directory"
        )

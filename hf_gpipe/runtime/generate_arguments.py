"""Checks the arguments of `generate`, and sends those of the main process to every process."""

from __future__ import annotations

import inspect
import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel

from hf_gpipe.adapters import Adapter
from hf_gpipe.errors import UserError, check_count, check_number, nearest
from hf_gpipe.job import wire
from hf_gpipe.job.agreement import compare
from hf_gpipe.job.world import World
from hf_gpipe.runtime.spread_rows import number_of_parts

_SECOND_MODEL = "drafts tokens with another model or head, which the pipeline does not have"
_OUTSIDE = "its method is not part of transformers itself"
_ONE_PASS = "needs a second forward pass beside the pipeline's"
_INSIDE = "asks for tensors that do not leave their stage"
_OWN_CACHE = "every stage keeps its own cache"
_COMPILED = "stages are not compiled"

#: Arguments of `generate` that raise an error, with the reason: they would change its result or lead to a hang.
UNSUPPORTED = {
    "assistant_model": _SECOND_MODEL,
    "assistant_early_exit": _SECOND_MODEL,
    "prompt_lookup_num_tokens": "needs the logits of several positions at a time",
    "use_mtp": _SECOND_MODEL,
    "constraints": _OUTSIDE,
    "custom_generate": _OUTSIDE,
    "dola_layers": _OUTSIDE,
    "force_words_ids": _OUTSIDE,
    "num_beam_groups": _OUTSIDE,
    "penalty_alpha": _OUTSIDE,
    "guidance_scale": _ONE_PASS,
    "negative_prompt_ids": _ONE_PASS,
    "token_healing": _ONE_PASS,
    "output_attentions": _INSIDE,
    "output_hidden_states": _INSIDE,
    "encoder_outputs": "the encoder's stages run inside the pipeline; give input_ids",
    "inputs": "give input_ids",
    "inputs_embeds": "the embedding is a layer of the first stage; give input_ids",
    "decoder_inputs_embeds": "the embedding is a layer of a stage; give decoder_input_ids",
    "cache_implementation": _OWN_CACHE,
    **dict.fromkeys(("cache", "cache_params", "past_key_values"), _OWN_CACHE),
    "compile_config": _COMPILED,
    "max_time": "processes would stop at different tokens; use max_new_tokens",
    "synced_gpus": "the processes of a pipeline run in lock-step already",
}
_CONFIG = "generation_config"
#: Values of these arguments that change nothing.
_HARMLESS: dict[str, tuple[object, ...]] = {
    "num_beam_groups": (1,),
    "guidance_scale": (1,),
    "penalty_alpha": (0,),
    # "hybrid", in older generation configurations, is what transformers does by default today.
    "cache_implementation": ("dynamic", "hybrid"),
}


@dataclass(frozen=True)
class GenerateArguments:
    """The checks of the arguments of a pipeline's `generate`, which become the same on every process.

    Attributes:
        model: the model whose `generate` is called.
        num_pipelines: the largest number of pipelines that may generate side by side.
    """

    adapter: Adapter
    model: PreTrainedModel
    world: World
    num_pipelines: int

    def shared(self, inputs: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
        """The main process's arguments, and how many pipelines generate.

        Objects that cannot be sent, such as a stopping criterion, are each process's own.

        Raises:
            UserError: on every process: an argument is not supported, or an object has not the same class everywhere.
            DisagreementError: on every process: a process was given another option than the main process.
        """
        own = {name: value for name, value in inputs.items() if name != "streamer"}
        if self.world.num_processes == 1:
            return own, self._checked(own)

        def read() -> tuple[dict[str, Any], dict[str, str], int]:
            num_parts = self._checked(own)
            data = {name: _as_data(value) for name, value in own.items() if _travels(value)}
            return data, {name: _class_of(value) for name, value in own.items() if name not in data}, num_parts

        data, objects, num_parts = self.world.from_main(read)
        # The other processes may leave options out, and their tensors are not read.
        options = {name: value for name, value in data.items() if not isinstance(value, torch.Tensor)}
        compare(lambda: options | {n: _as_data(own[n]) for n in options if n in own}, "arguments of generate")
        if objects:
            missing = [name for name, cls in objects.items() if _class_of(own.get(name)) != cls]
            for rank, names in enumerate(self.world.gather_objects(missing)):
                if names:
                    raise UserError(
                        f"generate({names[0]}=...) is an object of {objects[names[0]]}, which cannot be sent to other "
                        f"processes, and process {rank} was given none; give it on every process"
                    )
        if isinstance(values := data.get(_CONFIG), dict):
            data[_CONFIG] = GenerationConfig.from_dict(values)
        return data | {name: own[name] for name in objects}, num_parts

    def _checked(self, arguments: Mapping[str, Any]) -> int:
        """How many pipelines generate. Raises UserError for arguments that would be ignored, give wrong results or lead
        to a hang."""
        for name, reason in UNSUPPORTED.items():
            value = self.setting(arguments, name)
            if value is not None and value is not False and value not in _HARMLESS.get(name, ()):
                raise UserError(f"generate({name}={reprlib.repr(value)}) is not supported by a pipeline: {reason}")
        if not isinstance(arguments.get("input_ids"), torch.Tensor):
            given = ", ".join(sorted(arguments)) or "nothing"
            raise UserError(f"generate() needs input_ids, a tensor of (B, T); it was given {given}")
        if images := sorted(arguments.keys() & set(self.adapter.image_keys)):
            raise UserError(
                f"generate({images[0]}): a pipeline generates from text alone; save the model, and "
                f"generate with transformers"
            )
        known = {
            *inspect.signature(GenerationMixin.generate).parameters,
            *inspect.signature(self.model.forward).parameters,
            *vars(GenerationConfig()),
            "tokenizer",
        }
        for name in arguments:
            if name not in known:
                raise UserError(f"generate() has no argument {name!r}{nearest(name, known)}")
        self._check_numbers(arguments)
        return number_of_parts(arguments, self.adapter, lambda name: self.setting(arguments, name), self.num_pipelines)

    def _check_numbers(self, arguments: Mapping[str, Any]) -> None:
        """Raise UserError for numbers that transformers does not check before it computes with them."""
        for name in ("max_new_tokens", "num_beams", "num_return_sequences"):
            if (value := self.setting(arguments, name)) is not None:
                check_count(f"generate: {name}", value, 1)
        samples = self.setting(arguments, "do_sample")
        for name, most in (("temperature", math.inf), ("top_p", 1)):
            if (value := self.setting(arguments, name)) is None:
                continue
            if samples:
                check_number(f"generate: {name}", value, most=most, is_above=True)
            elif arguments.get(name) not in (None, 1):
                raise UserError(
                    f"generate: {name}={value!r} is of sampling, and do_sample is not set; set do_sample, or leave "
                    f"{name} out"
                )

    def setting(self, arguments: Mapping[str, Any], name: str) -> Any:
        """The value that `generate` would use: the argument's, the given configuration's or the model's own."""
        if name in arguments:  # also None, which overrides the configurations
            return arguments[name]
        for config in (arguments.get(_CONFIG), self.model.generation_config):
            if (value := getattr(config, name, None)) is not None:
                return value
        return None


def _travels(value: object) -> bool:
    """Whether an argument can be sent to the other processes. Otherwise each process must be given its own object."""
    return isinstance(value, GenerationConfig) or wire.is_sendable(value)


def _as_data(value: object) -> object:
    return value.to_dict() if isinstance(value, GenerationConfig) else value


def _class_of(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"

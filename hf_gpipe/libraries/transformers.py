"""The private and undocumented names of transformers."""

from __future__ import annotations

from inspect import signature

from transformers import GenerationMixin, PreTrainedModel

from hf_gpipe.errors import UnsupportedModelError


def cache_argument(model: PreTrainedModel) -> str:
    """The argument by which `generate` gives a model its cache; the model's output has a field of the same name.

    It is `cache` since transformers 5.24; before, it is `past_key_values`, or `cache_params` of Mamba and its like.

    Raises UnsupportedModelError where the model's forward has no such argument.
    """
    given = signature(GenerationMixin.prepare_inputs_for_generation).parameters
    names = [name for name in ("cache", "past_key_values") if name in given] + ["cache_params"]
    for name in names:
        if name in signature(model.forward).parameters:
            return name
    raise UnsupportedModelError(
        f"{type(model).__name__}: its forward has no argument {names[0]!r}, by which generate gives a model its keys "
        "and values; generate with use_cache=False"
    )

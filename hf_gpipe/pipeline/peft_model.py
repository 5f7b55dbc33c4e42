"""peft's model around the whole model of a pipeline with adapters, as peft's `get_peft_model` returns one.

Scripts of Trainer and TRL call its methods, and know parameters by its names, `base_model.model.` before the model's.
"""

from __future__ import annotations

import copy
from typing import Any, NoReturn

from torch import nn

from hf_gpipe.adapters.peft import PeftAdapter
from hf_gpipe.errors import UserError

_GIVE = "change the model before it is given to the Pipeline or the trainer"
_MERGE = "save the adapters, and merge them by hf-gpipe merge"

#: Methods that raise an error, because the pipeline would not notice what they change -> what to do instead.
_REFUSED = {
    "push_to_hub": "use push_to_hub of the trainer, or save_pretrained and huggingface_hub",
    **dict.fromkeys(("add_adapter", "load_adapter", "delete_adapter", "set_adapter", "add_weighted_adapter"), _GIVE),
    **dict.fromkeys(("merge_adapter", "unmerge_adapter", "unload"), _MERGE),
}
#: Attributes that belong to the model inside.
_OF_MODEL = ("config", "generation_config", "model_tags")


class _Around:
    """Mixed into a class of peft's models: sends calls to the whole model inside, or raises an error for them."""

    get_base_model: Any
    peft_config: Any

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OF_MODEL:
            setattr(self.get_base_model(), name, value)
        else:
            super().__setattr__(name, value)

    def generate(self, *inputs: Any, **options: Any) -> Any:
        """Call `Pipeline.generate`; every process must call it."""
        return self.get_base_model().generate(*inputs, **options)

    def save_pretrained(self, save_directory: Any, **options: Any) -> None:
        """Call `Pipeline.save_pretrained`, which writes the adapters; every process must call it."""
        self.get_base_model().save_pretrained(save_directory, **options)

    def merge_and_unload(self, *options: Any, **named_options: Any) -> Any:
        """A plain model, which is a copy with the adapters merged into its weights.

        Raises UserError where the layers are on several processes or devices.
        """
        if not self.get_base_model()._weights.are_in_one_place:
            raise UserError(f"merge_and_unload: the layers of this model are on several processes or devices; {_MERGE}")
        return copy.deepcopy(self).merge_and_unload(*options, **named_options)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a model of peft's own class that does not belong to a pipeline."""
        from hf_gpipe.libraries.peft import model_around

        (name, config), *_ = copy.deepcopy(self.peft_config, memo).items()
        return model_around(copy.deepcopy(self.get_base_model(), memo), name, config)


def model_of_peft(model: nn.Module, peft: PeftAdapter) -> Any:
    """peft's model, a `PeftModel`, around a whole model that has the adapters."""
    from hf_gpipe.libraries.peft import model_around

    shown = model_around(model, peft.name, peft.config)
    cls = type(shown)
    methods = {name: _refusal(name) for name in _REFUSED}
    shown.__class__ = type(cls.__name__, (_Around, cls), {"__module__": cls.__module__, **methods})
    return shown


def _refusal(name: str) -> Any:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise UserError(f"{name} is not supported by a pipeline's model; {_REFUSED[name]}")

    return refuse

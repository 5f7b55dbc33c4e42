"""The methods and attributes of transformers' Trainer and Seq2SeqTrainer that `PipelineTrainer` has.

A method that is overridden but never called would train with something else than its author expects, so overriding it
raises an error; so does overriding a private method. docs/reference/trainer.md has every public name, with what to use
instead; scripts/trainer_tables.py has its notes.
"""

from __future__ import annotations

import inspect
from typing import Any

from transformers import Seq2SeqTrainer, Trainer

from hf_gpipe.errors import MissingAttributeError, UserError

_PAGE = "docs/reference/trainer.md says what to use instead"
#: Methods that the trainer has, and that may not be overridden since it would not call them.
FIXED = (
    *("num_examples", "is_local_process_zero"),
    *("get_num_trainable_parameters", "get_total_train_batch_size", "is_world_process_zero"),
)
#: Attributes that the trainer has, and that may not be set.
READ_ONLY = (
    *("model", "model_wrapped", "compute_loss_func", "hub_model_id", "is_in_train", "label_names", "deepspeed"),
    *("is_deepspeed_enabled", "is_fsdp_enabled", "is_fsdp_xla_enabled", "is_fsdp_xla_v1_enabled"),
    *("is_fsdp_xla_v2_enabled", "accelerator"),
)
#: Attributes that Trainer sets on itself, so that its class does not have them, and that the trainer lacks.
LACKING = (
    *("label_smoother", "model_accepts_loss_kwargs", "can_return_loss", "loss_is_scaled_for_ga", "gather_function"),
    *("compute_loss_context_manager", "current_gradient_accumulation_steps", "current_flos"),
    *("place_model_on_device", "is_model_parallel", "neftune_noise_alpha", "neftune_hook_handle", "push_in_progress"),
    *("is_distributed_loading_by_transformers", "hp_name", "hp_search_backend", "hp_space", "compute_objective"),
    *("objective", "model_preparation_time"),
)

_ABSENT = object()


class Surface:
    """The attributes of a trainer that may be overridden and set.

    Args:
        base: the trainer, whose own public names may be overridden and set, but for `FIXED` and `READ_ONLY`.
    """

    def __init__(self, base: type) -> None:
        self._base = base
        library = {n for cls in (Trainer, Seq2SeqTrainer) for n in vars(cls) if not n.startswith("__")}
        unknown = library - {name for name in dir(base) if not name.startswith("_")}
        names = unknown.union(FIXED, READ_ONLY, LACKING)
        #: The attributes of `base` that may not be overridden or set, before anybody replaces them.
        self._own = {name: inspect.getattr_static(base, name, _ABSENT) for name in names}

    def has(self, method: Any) -> bool:
        """Whether a method of a trainer is that of `base`."""
        function = getattr(method, "__func__", None)
        return function is not None and function is getattr(self._base, function.__name__, None)

    def check_class(self, cls: type) -> None:
        """Raise UserError where a trainer's class has a method that would not be called."""
        base = self._base.__name__
        if issubclass(cls, Trainer):
            raise UserError(
                f"{cls.__name__} derives from transformers' Trainer as well, whose methods are not called; derive it "
                f"from {base} only"
            )
        own = self._own.items()
        overridden = sorted(name for name, here in own if inspect.getattr_static(cls, name, _ABSENT) is not here)
        if overridden:
            names = " and ".join(overridden)
            raise UserError(f"{cls.__name__} overrides {names}, which {base} does not call; {_PAGE}")
        parameters = inspect.signature(cls.save_model).parameters.values()  # type: ignore[attr-defined]  # of a trainer
        if not any(given.name == "_internal_call" or given.kind == given.VAR_KEYWORD for given in parameters):
            raise UserError(
                f"save_model of {cls.__name__} has no parameter _internal_call, which it is given for checkpoints, as "
                "in transformers; define it as save_model(self, output_dir=None, _internal_call=False)"
            )

    def check_assignment(self, trainer: object, name: str) -> None:
        """Raise UserError where a script sets an attribute that the trainer would not read."""
        if name in self._own:
            raise UserError(f"{type(trainer).__name__}.{name} cannot be set, for it would not be used; {_PAGE}")

    def missing(self, trainer: object, name: str) -> AttributeError:
        """The error for an attribute that a trainer does not have."""
        cls = type(trainer).__name__
        if name in self._own:
            return MissingAttributeError(f"{cls} has no {name}; {_PAGE}")
        return AttributeError(f"{cls!r} object has no attribute {name!r}")

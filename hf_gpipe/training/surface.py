"""Which methods and attributes of transformers' Trainer and Seq2SeqTrainer `PipelineTrainer` has.

Each public one is in one of the tables below. Overriding a method that is never called would train with something
else than its author expects, so it raises an error; so does overriding a private method.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

from transformers import Seq2SeqTrainer, Trainer

from hf_gpipe.errors import MissingAttributeError, UserError

#: Methods that are here and may be overridden: they are called where Trainer calls them. Name -> note.
METHODS = {
    "train": "`trial` raises an error",
    "evaluate": "",
    "predict": "",
    "log": "",
    "log_metrics": "",
    "metrics_format": "",
    "save_metrics": "",
    "save_state": "",
    "save_model": "every process calls it; also for each checkpoint, with the checkpoint's directory",
    "push_to_hub": "every process calls it",
    "create_model_card": "the main process writes it",
    "init_hf_repo": "every process calls it",
    "add_callback": "",
    "pop_callback": "",
    "remove_callback": "",
    "call_model_init": "",
    "create_optimizer": "it makes one of the parameters of this process's stages, `pipe.parameters()`",
    "create_scheduler": "",
    "create_optimizer_and_scheduler": "",
    "get_optimizer_cls_and_kwargs": "",
    "get_decay_parameter_names": "it is given the model of each stage",
    "get_learning_rates": "",
    "get_optimizer_group": "",
    "end": "it leaves the job that the processes have joined",
}

_ROWS = "give the trainer the dataset and a data_collator; train_sampling_strategy sets the order"
#: Methods that are here and may not be overridden, since the trainer would not ask them. Name -> note.
FIXED = {
    "get_train_dataloader": f"the mini-batches, iterated over those of epoch 0; to change them {_ROWS}",
    "get_eval_dataloader": "the mini-batches; to change them give another eval_dataset or data_collator",
    "get_test_dataloader": "the mini-batches; to change them give another dataset or data_collator",
    "num_examples": "rows of a dataset",
    "get_num_trainable_parameters": "of the whole model, in every process",
    "get_total_train_batch_size": "rows of an update; set per_device_train_batch_size",
    "is_local_process_zero": "the processes are the launcher's",
    "is_world_process_zero": "the processes are the launcher's",
}

#: Attributes that are here and may be set. Name -> note.
ATTRIBUTES = {
    "args": "",
    "callback_handler": "",
    "compute_metrics": "",
    "control": "",
    "data_collator": "",
    "eval_dataset": "",
    "lr_scheduler": "",
    "model_init": "",
    "optimizer": "of the parameters of this process's stages",
    "optimizer_cls_and_kwargs": "",
    "preprocess_logits_for_metrics": "",
    "processing_class": "",
    "state": "",
    "train_dataset": "",
}

#: Attributes that are here and may not be set. Name -> note.
READ_ONLY = {
    "model": "the Hugging Face model over the trained tensors, `Pipeline.model`; other processes' are on meta",
    "model_wrapped": "the same as `model`: nothing is wrapped around it",
    "compute_loss_func": "give it to the constructor",
    "hub_model_id": "set `hub_model_id` of the arguments",
    "is_in_train": "",
    "label_names": "the labels of a mini-batch are its entry 'labels'",
    "deepspeed": "None",
    "is_deepspeed_enabled": "False",
    "is_fsdp_enabled": "False",
    "is_fsdp_xla_enabled": "False",
    "is_fsdp_xla_v1_enabled": "False",
    "is_fsdp_xla_v2_enabled": "False",
}

_LOSS = "give the constructor a compute_loss_func, or set label_smoothing_factor or logit_clipping"
_STEP = "a step is a pass over stages and micro-batches; use a callback, such as on_step_end or on_pre_optimizer_step"
_EVALUATION = "use compute_metrics, preprocess_logits_for_metrics, or override evaluate or predict"
_PRECISION = "use bf16 or fp16"
_NO_ACCELERATOR = "no Accelerator is used; the processes are `trainer.world`, the stages `trainer.pipe`"
_SEARCH = "run one training for each choice"
_TOKENS = "include_num_input_tokens_seen and metrics.jsonl have tokens; state.total_flos has operations"
_ORDER = "train_sampling_strategy sets the order of rows; an iterable dataset has its own"
_COLUMNS = "set remove_unused_columns, or give another data_collator"
_SAVING = "override save_model, or use a callback's on_save"
_RESUMING = "use train(resume_from_checkpoint=...), or a callback's on_train_begin"
_OTHER_ENGINE = "it belongs to another way to spread a model over devices"
_CLIPPING = "set max_grad_norm; callbacks have on_pre_optimizer_step"
_UPLOADS = "use push_to_hub; set hub_strategy"

#: Methods and attributes that are not here. Name -> why, and what to use instead. Private ones are those that are
#: overridden most; the others get `_PRIVATE`.
REFUSED = {
    "compute_loss": _LOSS,
    "compute_loss_context_manager": _PRECISION,
    "autocast_smart_context_manager": _PRECISION,
    "label_smoother": _LOSS,
    "model_accepts_loss_kwargs": _LOSS,
    "can_return_loss": _LOSS,
    "loss_is_scaled_for_ga": _LOSS,
    "training_step": _STEP,
    "get_batch_samples": "gradient_accumulation_steps sets how many mini-batches a step has",
    "set_initial_training_values": "set max_steps or num_train_epochs",
    "current_gradient_accumulation_steps": "read gradient_accumulation_steps of the arguments",
    "evaluation_loop": _EVALUATION,
    "prediction_step": _EVALUATION,
    "gather_function": "predict gives every process all predictions",
    "load_generation_config": "set generation_config of the arguments",
    "floating_point_ops": _TOKENS,
    "store_flos": _TOKENS,
    "current_flos": _TOKENS,
    "accelerator": _NO_ACCELERATOR,
    "create_accelerator_and_postprocess": _NO_ACCELERATOR,
    "place_model_on_device": "the Pipeline chooses the device; set use_cpu, or give a Pipeline with device",
    "is_model_parallel": "look at trainer.world",
    "is_distributed_loading_by_transformers": _OTHER_ENGINE,
    "get_cp_size": _OTHER_ENGINE,
    "get_sp_size": _OTHER_ENGINE,
    "get_tp_size": _OTHER_ENGINE,
    "neftune_noise_alpha": "set neftune_noise_alpha of the arguments",
    "neftune_hook_handle": "set neftune_noise_alpha of the arguments; the noise is that of the stages' models",
    "push_in_progress": _UPLOADS,
    "hyperparameter_search": _SEARCH,
    "hp_name": _SEARCH,
    "hp_search_backend": _SEARCH,
    "hp_space": _SEARCH,
    "compute_objective": _SEARCH,
    "objective": _SEARCH,
    "model_preparation_time": "nothing is prepared for an evaluation",
    "_inner_training_loop": _STEP,
    "_run_epoch": _STEP,
    "_prepare_input": _COLUMNS,
    "_prepare_inputs": _COLUMNS,
    "_set_signature_columns_if_needed": _COLUMNS,
    "_remove_unused_columns": _COLUMNS,
    "_get_collator_with_removed_columns": _COLUMNS,
    "_get_dataloader": _ROWS,
    "_get_train_sampler": _ORDER,
    "_get_eval_sampler": "an evaluation takes the rows in their order; give the dataset in another",
    "_get_num_items_in_batch": _LOSS,
    "_get_learning_rate": "use get_learning_rates, or lr_scheduler.get_last_lr()",
    "_maybe_log_save_evaluate": "use a callback, or override log, evaluate or save_model",
    "_evaluate": "override evaluate",
    "_determine_best_metric": "set metric_for_best_model and greater_is_better",
    "_save": _SAVING,
    "_save_checkpoint": _SAVING,
    "_save_rng_state": _SAVING,
    "_save_scaler": _SAVING,
    "_save_optimizer_and_scheduler": _SAVING,
    "_load_from_checkpoint": _RESUMING,
    "_load_best_model": _RESUMING,
    "_load_rng_state": _RESUMING,
    "_load_scaler": _RESUMING,
    "_load_callback_state": _RESUMING,
    "_load_optimizer_and_scheduler": _RESUMING,
    "_wrap_model": "the stages' models are `trainer.pipe.models`",
    "_move_model_to_device": "the Pipeline chooses the device",
    "_clip_grad_norm": _CLIPPING,
    "_get_grad_norm": _CLIPPING,
    "_push_from_checkpoint": _UPLOADS,
    "_finish_current_push": _UPLOADS,
    "_hp_search_setup": _SEARCH,
    "_report_to_hp_search": _SEARCH,
    "_tune_save_checkpoint": _SEARCH,
    "_pad_tensors_to_max_len": _EVALUATION,
}

_PRIVATE = "the training loop is another one; use a callback, or a method that docs/trainer.md lists"
_NEW = "this version of hf_gpipe does not know it; docs/trainer.md lists what may be overridden"

_ABSENT = object()


@cache
def refused_names() -> dict[str, str]:
    """Every name of the installed Trainer that may not be overridden or set, and what to do instead."""
    library = {n for cls in (Trainer, Seq2SeqTrainer) for n in vars(cls) if not n.startswith("__")}
    unknown = library - METHODS.keys() - ATTRIBUTES.keys()
    notes = {name: _PRIVATE if name.startswith("_") else _NEW for name in unknown}
    return notes | FIXED | READ_ONLY | REFUSED


def check_class(cls: type, base: type, own: dict[str, Any]) -> None:
    """Raise UserError where a class of trainer has a method that would not be called.

    Args:
        cls: the class.
        base: the trainer that it derives from.
        own: what `base` itself had under the refused names when it was made.
    """
    if issubclass(cls, Trainer):
        raise UserError(
            f"{cls.__name__} derives from transformers' Trainer as well, whose methods are not called; derive it from "
            f"{base.__name__} only"
        )
    found = [
        name
        for name in sorted(refused_names())
        if inspect.getattr_static(cls, name, _ABSENT) is not own.get(name, _ABSENT)
    ]
    if found:
        notes = "; ".join(f"{name}: {refused_names()[name]}" for name in found)
        names = " and ".join(found)
        raise UserError(f"{cls.__name__} overrides {names}, which {base.__name__} does not call ({notes})")
    parameters = inspect.signature(cls.save_model).parameters.values()  # type: ignore[attr-defined]  # of a trainer
    if not any(one.name == "_internal_call" or one.kind == one.VAR_KEYWORD for one in parameters):
        raise UserError(
            f"save_model of {cls.__name__} has no parameter _internal_call, which it is given for checkpoints, as in "
            "transformers; define it as save_model(self, output_dir=None, _internal_call=False)"
        )


def own_attributes(base: type) -> dict[str, Any]:
    """The attributes of a class under the names that may not be overridden."""
    found = {name: inspect.getattr_static(base, name, _ABSENT) for name in refused_names()}
    return {name: value for name, value in found.items() if value is not _ABSENT}


def check_assignment(trainer: object, name: str) -> None:
    """Raise UserError where somebody sets an attribute of a trainer that it would not read."""
    if (note := refused_names().get(name)) is not None:
        raise UserError(f"{type(trainer).__name__}.{name} cannot be set, for it would not be used: {note}")


def missing(trainer: object, name: str) -> AttributeError:
    """The error for an attribute that a trainer does not have."""
    cls = type(trainer).__name__
    if (note := refused_names().get(name)) is not None:
        return MissingAttributeError(f"{cls} has no {name}: {note}")
    return AttributeError(f"{cls!r} object has no attribute {name!r}")

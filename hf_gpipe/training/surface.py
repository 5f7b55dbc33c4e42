"""The methods and attributes of transformers' Trainer and Seq2SeqTrainer that `PipelineTrainer` has.

Each public name is a method or attribute of `PipelineTrainer`, or in a table below with what to do instead. A method
that is overridden but never called would train with something else than its author expects, so overriding it raises an
error; so does overriding a private method.
"""

from __future__ import annotations

import inspect

from transformers import Seq2SeqTrainer, Trainer

from hf_gpipe.errors import MissingAttributeError, UserError

_ROWS = "give the trainer the dataset and a data_collator; train_sampling_strategy sets the order"
_STEP = "a step is a pass over stages and micro-batches; use a callback, such as on_step_end or on_pre_optimizer_step"
#: Methods that the trainer has, and that may not be overridden since it would not call them. Name -> note.
FIXED = {
    "get_train_dataloader": f"the mini-batches of epoch 0; to change them {_ROWS}",
    "get_eval_dataloader": "the mini-batches; to change them give another eval_dataset or data_collator",
    "get_test_dataloader": "the mini-batches; to change them give another dataset or data_collator",
    "num_examples": "the rows of a dataset",
    "get_num_trainable_parameters": "counts the whole model, in every process",
    "get_total_train_batch_size": "the rows of an update; set per_device_train_batch_size",
    "is_local_process_zero": "the processes are the launcher's",
    "is_world_process_zero": "the processes are the launcher's",
}

#: Attributes that the trainer has, and that may not be set. Name -> note.
READ_ONLY = {
    "model": "`Pipeline.model`, the Hugging Face model with the trained tensors; other processes' tensors are on meta",
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

#: Methods and attributes that the trainer lacks. Name -> why, and what to use instead. Of private methods it has those
#: that are overridden most; the others get `_PRIVATE`.
REFUSED = {
    name: note
    for note, names in {
        "give the constructor a compute_loss_func, or set label_smoothing_factor or logit_clipping": (
            "compute_loss label_smoother model_accepts_loss_kwargs can_return_loss loss_is_scaled_for_ga "
            "_get_num_items_in_batch"
        ),
        "use bf16 or fp16": "compute_loss_context_manager autocast_smart_context_manager",
        _STEP: "training_step _inner_training_loop _run_epoch",
        "gradient_accumulation_steps sets how many mini-batches a step has": "get_batch_samples",
        "set max_steps or num_train_epochs": "set_initial_training_values",
        "read gradient_accumulation_steps of the arguments": "current_gradient_accumulation_steps",
        "use compute_metrics, preprocess_logits_for_metrics, or override evaluate or predict": (
            "evaluation_loop prediction_step _pad_tensors_to_max_len"
        ),
        "predict gives every process all predictions": "gather_function",
        "set generation_config of the arguments": "load_generation_config",
        "include_num_input_tokens_seen and metrics.jsonl have tokens; state.total_flos has operations": (
            "floating_point_ops store_flos current_flos"
        ),
        "no Accelerator is used; the processes are `trainer.world`, the stages `trainer.pipe`": (
            "accelerator create_accelerator_and_postprocess"
        ),
        "the Pipeline chooses the device; set use_cpu, or give a Pipeline with device": "place_model_on_device",
        "look at trainer.world": "is_model_parallel",
        "it belongs to another way to spread a model over devices": (
            "is_distributed_loading_by_transformers get_cp_size get_sp_size get_tp_size"
        ),
        "set neftune_noise_alpha of the arguments": "neftune_noise_alpha",
        "set neftune_noise_alpha of the arguments; the noise is that of the stages' models": "neftune_hook_handle",
        "use push_to_hub; set hub_strategy": "push_in_progress _push_from_checkpoint _finish_current_push",
        "run one training for each choice": (
            "hyperparameter_search hp_name hp_search_backend hp_space compute_objective objective _hp_search_setup "
            "_report_to_hp_search _tune_save_checkpoint"
        ),
        "nothing is prepared for an evaluation": "model_preparation_time",
        "set remove_unused_columns, or give another data_collator": (
            "_prepare_input _prepare_inputs _set_signature_columns_if_needed _remove_unused_columns "
            "_get_collator_with_removed_columns"
        ),
        _ROWS: "_get_dataloader",
        "train_sampling_strategy sets the order of rows; an iterable dataset has its own": "_get_train_sampler",
        "an evaluation takes the rows in their order; give the dataset in another": "_get_eval_sampler",
        "use get_learning_rates, or lr_scheduler.get_last_lr()": "_get_learning_rate",
        "use a callback, or override log, evaluate or save_model": "_maybe_log_save_evaluate",
        "override evaluate": "_evaluate",
        "set metric_for_best_model and greater_is_better": "_determine_best_metric",
        "override save_model, or use a callback's on_save": (
            "_save _save_checkpoint _save_rng_state _save_scaler _save_optimizer_and_scheduler"
        ),
        "use train(resume_from_checkpoint=...), or a callback's on_train_begin": (
            "_load_from_checkpoint _load_best_model _load_rng_state _load_scaler _load_callback_state "
            "_load_optimizer_and_scheduler"
        ),
        "the stages' models are `trainer.pipe.models`": "_wrap_model",
        "the Pipeline chooses the device": "_move_model_to_device",
        "set max_grad_norm; callbacks have on_pre_optimizer_step": "_clip_grad_norm _get_grad_norm",
    }.items()
    for name in names.split()
}

_PRIVATE = "the training loop is another one; use a callback, or a method that docs/reference/trainer.md lists"
_NEW = "this version of hf_gpipe does not know it; docs/reference/trainer.md lists what may be overridden"

_ABSENT = object()


class Surface:
    """The attributes of a trainer that may be overridden and set.

    Args:
        base: the trainer, whose own public names may be overridden and set, unless a table says otherwise.
    """

    def __init__(self, base: type) -> None:
        self._base = base
        library = {n for cls in (Trainer, Seq2SeqTrainer) for n in vars(cls) if not n.startswith("__")}
        unknown = library - {name for name in dir(base) if not name.startswith("_")}
        notes = {name: _PRIVATE if name.startswith("_") else _NEW for name in unknown}
        #: Every name of the installed Trainer that may not be overridden or set, and what to do instead.
        self._notes = notes | FIXED | READ_ONLY | REFUSED
        #: The attributes of `base` under these names, before anybody replaces them.
        self._own = {name: inspect.getattr_static(base, name, _ABSENT) for name in self._notes}

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
            notes = "; ".join(f"{name}: {self._notes[name]}" for name in overridden)
            names = " and ".join(overridden)
            raise UserError(f"{cls.__name__} overrides {names}, which {base} does not call ({notes})")
        parameters = inspect.signature(cls.save_model).parameters.values()  # type: ignore[attr-defined]  # of a trainer
        if not any(given.name == "_internal_call" or given.kind == given.VAR_KEYWORD for given in parameters):
            raise UserError(
                f"save_model of {cls.__name__} has no parameter _internal_call, which it is given for checkpoints, as "
                "in transformers; define it as save_model(self, output_dir=None, _internal_call=False)"
            )

    def check_assignment(self, trainer: object, name: str) -> None:
        """Raise UserError where a script sets an attribute that the trainer would not read."""
        if (note := self._notes.get(name)) is not None:
            raise UserError(f"{type(trainer).__name__}.{name} cannot be set, for it would not be used: {note}")

    def missing(self, trainer: object, name: str) -> AttributeError:
        """The error for an attribute that a trainer does not have."""
        cls = type(trainer).__name__
        if (note := self._notes.get(name)) is not None:
            return MissingAttributeError(f"{cls} has no {name}: {note}")
        return AttributeError(f"{cls!r} object has no attribute {name!r}")

"""The tables of transformers' arguments, and of Trainer's methods and attributes, which the package itself need
not know. scripts/reference.py writes these tables into pages, and tests compare them with the code.
"""

from __future__ import annotations

#: Fields that a pipeline supports.
SUPPORTED = frozenset(
    (
        *("output_dir", "per_device_train_batch_size", "num_train_epochs", "max_steps", "learning_rate"),
        *("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "optim", "optim_args", "weight_decay"),
        *("adam_beta1", "adam_beta2", "adam_epsilon", "gradient_accumulation_steps", "max_grad_norm"),
        *("label_smoothing_factor", "neftune_noise_alpha", "bf16", "fp16", "tf32", "activation_checkpointing"),
        *("gradient_checkpointing", "torch_compile", "torch_compile_backend", "use_liger_kernel"),
        *("torch_empty_cache_steps",),
        *("log_level", "log_level_replica", "log_on_each_node", "logging_strategy", "logging_steps"),
        *("logging_first_step", "logging_nan_inf_filter", "include_num_input_tokens_seen", "disable_tqdm"),
        *("report_to", "run_name", "project", "trackio_space_id", "trackio_bucket_id"),
        *("trackio_static_space_id", "eval_strategy", "eval_steps", "eval_delay", "eval_on_start"),
        *("per_device_eval_batch_size", "prediction_loss_only", "include_for_metrics", "batch_eval_metrics"),
        *("eval_do_concat_batches", "save_strategy", "save_steps", "save_total_limit", "save_only_model"),
        *("enable_jit_checkpoint", "push_to_hub", "hub_model_id", "hub_strategy", "hub_token"),
        *("hub_private_repo", "hub_always_push", "hub_revision", "load_best_model_at_end"),
        *("metric_for_best_model", "greater_is_better", "ignore_data_skip"),
        *("restore_callback_states_from_checkpoint", "full_determinism", "seed", "data_seed", "use_cpu"),
        *("dataloader_drop_last", "dataloader_num_workers", "dataloader_prefetch_factor"),
        *("dataloader_multiprocessing_context", "dataloader_in_order", "remove_unused_columns"),
        *("train_sampling_strategy", "length_column_name", "ddp_timeout"),
    )
)

#: Of these, what is supported only in part.
LIMITS = {
    "optim": "optimizers that treat each parameter alone: {optimizers}; with bitsandbytes {bitsandbytes}",
    "use_liger_kernel": "norms, rotary embeddings and feed-forwards, on GPUs",
    "neftune_noise_alpha": "for decoder-only models; the noise depends on the seed, the step and the row",
    "dataloader_num_workers": "for a map-style dataset; the main process reads an iterable dataset",
}

_SCRIPTS = "Trainer does not read it either; it is for scripts"

#: Field -> why it has no effect that could be missed.
IRRELEVANT = {
    "average_tokens_across_devices": "the loss is always the mean over all target tokens of the step",
    "eval_use_gather_object": "all predictions are tensors, or texts as their tokens",
    "eval_accumulation_steps": "predictions go to the CPU after every mini-batch",
    "dataloader_persistent_workers": "it saves only the time to start the loader's workers in each epoch",
    "dataloader_pin_memory": "mini-batches travel between processes and are copied to each device from there",
    "do_train": _SCRIPTS,
    "do_eval": _SCRIPTS,
    "do_predict": _SCRIPTS,
    "resume_from_checkpoint": _SCRIPTS,
    "local_rank": "the launcher's environment says it",
}

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
    "save_model": "every process calls it, also for each checkpoint, with the checkpoint's directory",
    "push_to_hub": "every process calls it",
    "create_model_card": "the main process writes it",
    "init_hf_repo": "every process calls it",
    "add_callback": "",
    "pop_callback": "",
    "remove_callback": "",
    "call_model_init": "",
    "create_optimizer": "it makes an optimizer of the parameters of this process's stages, `pipe.parameters()`",
    "create_scheduler": "",
    "create_optimizer_and_scheduler": "",
    "get_optimizer_cls_and_kwargs": "",
    "get_decay_parameter_names": "it is given the model of each stage",
    "get_learning_rates": "",
    "get_optimizer_group": "",
    "end": "it leaves the job that the processes have joined",
    "get_train_dataloader": "the mini-batches of epoch 0; of an override, each item of the loader is a mini-batch",
    "get_eval_dataloader": "as get_train_dataloader; the main process calls it in each evaluation",
    "get_test_dataloader": "as get_train_dataloader; the main process calls it in each prediction",
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
    "optimizer": "has the parameters of this process's stages",
    "optimizer_cls_and_kwargs": "",
    "preprocess_logits_for_metrics": "",
    "processing_class": "",
    "state": "",
    "train_dataset": "",
}

_STEP = "a step is a pass over stages and micro-batches; use a callback, such as on_step_end or on_pre_optimizer_step"
#: Methods that the trainer has, and that may not be overridden since it would not call them. Name -> note.
FIXED = {
    "num_examples": "the rows of a dataset",
    "get_num_trainable_parameters": "counts the whole model, in every process",
    "get_total_train_batch_size": "the rows of an update; set per_device_train_batch_size",
    "is_local_process_zero": "the processes are the launcher's",
    "is_world_process_zero": "the processes are the launcher's",
}

#: Attributes that the trainer has, and that may not be set. Name -> note.
READ_ONLY = {
    "model": "`Pipeline.peft_model`, the Hugging Face model with the trained tensors, in a `PeftModel` with adapters",
    "model_wrapped": "the same as `model`: nothing is wrapped around it",
    "compute_loss_func": "give it to the constructor",
    "hub_model_id": "set `hub_model_id` of the arguments",
    "is_in_train": "",
    "label_names": "the labels of a mini-batch are its entry 'labels'",
    "accelerator": "a view of the processes: facts, `gather`, `wait_for_everyone`, `unwrap_model`; it prepares nothing",
    "deepspeed": "None",
    "is_deepspeed_enabled": "False",
    "is_fsdp_enabled": "False",
    "is_fsdp_xla_enabled": "False",
    "is_fsdp_xla_v1_enabled": "False",
    "is_fsdp_xla_v2_enabled": "False",
}

#: Public methods and attributes that the trainer lacks. Name -> why, and what to use instead.
LACKING = {
    name: note
    for note, names in {
        "give the constructor a compute_loss_func, or set label_smoothing_factor or logit_clipping": (
            "compute_loss label_smoother model_accepts_loss_kwargs can_return_loss loss_is_scaled_for_ga"
        ),
        "use bf16 or fp16": "compute_loss_context_manager autocast_smart_context_manager",
        _STEP: "training_step",
        "gradient_accumulation_steps sets how many mini-batches a step has": "get_batch_samples",
        "set max_steps or num_train_epochs": "set_initial_training_values",
        "read gradient_accumulation_steps of the arguments": "current_gradient_accumulation_steps",
        "use compute_metrics, preprocess_logits_for_metrics, or override evaluate or predict": (
            "evaluation_loop prediction_step"
        ),
        "predict gives every process all predictions": "gather_function",
        "set generation_config of the arguments": "load_generation_config",
        "include_num_input_tokens_seen and metrics.jsonl have tokens; state.total_flos has operations": (
            "floating_point_ops store_flos current_flos"
        ),
        "`trainer.accelerator` is a view of the processes; the stages are `trainer.pipe`": (
            "create_accelerator_and_postprocess"
        ),
        "the Pipeline chooses the device; set use_cpu, or give a Pipeline with device": "place_model_on_device",
        "look at trainer.world": "is_model_parallel",
        "it belongs to another way to spread a model over devices": (
            "is_distributed_loading_by_transformers get_cp_size get_sp_size get_tp_size"
        ),
        "set neftune_noise_alpha of the arguments": "neftune_noise_alpha",
        "set neftune_noise_alpha of the arguments; the noise is that of the stages' models": "neftune_hook_handle",
        "use push_to_hub; set hub_strategy": "push_in_progress",
        "run one training for each choice": (
            "hyperparameter_search hp_name hp_search_backend hp_space compute_objective objective"
        ),
        "nothing is prepared for an evaluation": "model_preparation_time",
    }.items()
    for name in names.split()
}

"""Which of transformers' training arguments a pipeline honours: each field is in one of three tables.

A field that is refused may keep its default; anything else is an error that names it. A field that is irrelevant has
no effect here that its reader could miss, for the reason given.
"""

from __future__ import annotations

HONOURED = frozenset(
    {
        "output_dir",
        "per_device_train_batch_size",
        "num_train_epochs",
        "max_steps",
        "learning_rate",
        "lr_scheduler_type",
        "lr_scheduler_kwargs",
        "warmup_steps",
        "optim",
        "optim_args",
        "weight_decay",
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
        "gradient_accumulation_steps",
        "max_grad_norm",
        "label_smoothing_factor",
        "tf32",
        "torch_empty_cache_steps",
        "logging_strategy",
        "logging_steps",
        "logging_first_step",
        "logging_nan_inf_filter",
        "include_num_input_tokens_seen",
        "disable_tqdm",
        "report_to",
        "run_name",
        "project",
        "trackio_space_id",
        "trackio_bucket_id",
        "trackio_static_space_id",
        "eval_strategy",
        "eval_steps",
        "eval_delay",
        "eval_on_start",
        "per_device_eval_batch_size",
        "prediction_loss_only",
        "include_for_metrics",
        "save_strategy",
        "save_steps",
        "save_total_limit",
        "save_only_model",
        "enable_jit_checkpoint",
        "load_best_model_at_end",
        "metric_for_best_model",
        "greater_is_better",
        "ignore_data_skip",
        "restore_callback_states_from_checkpoint",
        "full_determinism",
        "seed",
        "data_seed",
        "use_cpu",
        "dataloader_drop_last",
        "dataloader_num_workers",
        "dataloader_prefetch_factor",
        "dataloader_multiprocessing_context",
        "dataloader_in_order",
        "remove_unused_columns",
        "train_sampling_strategy",
        "length_column_name",
        "ddp_timeout",
    }
)

_DTYPE = "the model's own dtype is the type of all arithmetic: load or create the model in bfloat16 or float16 instead"
_RECOMPUTE = "use recompute='block', which is the same, or recompute='stage', which keeps less"
_COMPILE = "stages are not compiled"
_LIGER = "stages keep transformers' own layers"
_REPLICAS = "a pipeline has one replica of each stage"
_OTHER_ENGINE = "it is another way to spread a model over devices"
_LOG_LEVEL = "call transformers.logging.set_verbosity instead"

#: Field -> why it cannot be honoured, or what to use instead.
REFUSED = {
    "optim_target_modules": "only optimizers that treat each parameter alone are supported",
    "bf16": _DTYPE,
    "fp16": _DTYPE,
    "bf16_full_eval": _DTYPE,
    "fp16_full_eval": _DTYPE,
    "activation_checkpointing": _RECOMPUTE,
    "activation_checkpointing_kwargs": _RECOMPUTE,
    "gradient_checkpointing": _RECOMPUTE,
    "gradient_checkpointing_kwargs": _RECOMPUTE,
    "torch_compile": _COMPILE,
    "torch_compile_backend": _COMPILE,
    "torch_compile_mode": _COMPILE,
    "use_liger_kernel": _LIGER,
    "liger_kernel_config": _LIGER,
    "use_cache": "no key-value cache is kept in training",
    "neftune_noise_alpha": "its noise would depend on where the embedding is",
    "auto_find_batch_size": "a stage that ran out of memory cannot tell the others; raise num_micro_batches instead",
    "eval_do_concat_batches": "predictions are always concatenated",
    "eval_use_gather_object": "predictions are tensors",
    "batch_eval_metrics": "metrics are computed once, over all predictions",
    "save_on_each_node": "each process writes its own stages into one directory, which all machines must share",
    "push_to_hub": "save the model and upload its directory, which is in Hub format",
    "accelerator_config": "no Accelerator is used",
    "parallelism_config": _OTHER_ENGINE,
    "label_names": "the labels of a mini-batch are its entry 'labels'",
    "ddp_find_unused_parameters": _REPLICAS,
    "ddp_bucket_cap_mb": _REPLICAS,
    "ddp_broadcast_buffers": _REPLICAS,
    "ddp_static_graph": _REPLICAS,
    "ddp_backend": "gloo serves the CPU and NCCL the GPUs",
    "fsdp": _OTHER_ENGINE,
    "fsdp_config": _OTHER_ENGINE,
    "deepspeed": _OTHER_ENGINE,
    "log_level": _LOG_LEVEL,
    "log_level_replica": _LOG_LEVEL,
    "debug": "its tools look into one whole model",
    "skip_memory_metrics": "memory is not tracked",
}

_HUB = "it is read by push_to_hub alone, which is refused"
_SCRIPTS = "Trainer does not read it either; it is for scripts"
_MAIN = "the main process alone reports"

#: Field -> why it has no effect that could be missed.
IRRELEVANT = {
    "average_tokens_across_devices": "the loss is always the mean over all target tokens of the mini-batch",
    "eval_accumulation_steps": "predictions go to the CPU after every mini-batch",
    "dataloader_persistent_workers": "it saves only the time to start the loader's workers in each epoch",
    "dataloader_pin_memory": "mini-batches travel between processes and are copied to each device from there",
    "log_on_each_node": _MAIN,
    "hub_model_id": _HUB,
    "hub_strategy": _HUB,
    "hub_token": _HUB,
    "hub_private_repo": _HUB,
    "hub_always_push": _HUB,
    "hub_revision": _HUB,
    "do_train": _SCRIPTS,
    "do_eval": _SCRIPTS,
    "do_predict": _SCRIPTS,
    "resume_from_checkpoint": _SCRIPTS,
    "local_rank": "the launcher's environment says it",
}

#: Optimizers that treat each parameter alone, so that a stage's update is the whole model's.
OPTIMIZERS = ("adamw_torch_fused", "adamw_torch", "adafactor", "sgd", "adagrad", "rmsprop")

SAMPLING = ("random", "sequential", "group_by_length")

#: Variable of accelerate's environment -> what it turns on, unless its value is one of the harmless ones.
REFUSED_ENVIRONMENT = {
    "ACCELERATE_MIXED_PRECISION": "mixed precision",
    "ACCELERATE_DYNAMO_BACKEND": "torch.compile",
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "another form of parallelism",
}
HARMLESS_VALUES = ("", "no", "false", "0")

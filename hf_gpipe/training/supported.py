"""The training arguments of transformers that a pipeline does not support, or supports in part.

A field that is not supported may keep its default; anything else is an error that names it.
scripts/trainer_tables.py has the other fields.
"""

from __future__ import annotations

from hf_gpipe.libraries.transformers_trainer import AcceleratorConfig

_FULL_EVAL = "evaluation computes in the precision of training: use bf16 or fp16, or a model in bfloat16"
_BLOCKS = "recompute='block' checkpoints each block in the one way there is, without reentrance"
_REPLICAS = "the pipeline itself sums the gradients of replicas; DistributedDataParallel is not used"
_OTHER_ENGINE = "it is another way to spread a model over devices"

#: Field -> why it is not supported, or what to use instead.
REFUSED = {
    "optim_target_modules": "only optimizers that treat each parameter alone are supported",
    "bf16_full_eval": _FULL_EVAL,
    "fp16_full_eval": _FULL_EVAL,
    "activation_checkpointing_kwargs": _BLOCKS,
    "gradient_checkpointing_kwargs": _BLOCKS,
    "torch_compile_mode": "CUDA graphs of other modes would overwrite micro-batches under way, and no mode is tested",
    "liger_kernel_config": "use_liger_kernel takes every kernel that fits, and the head never makes its logits whole",
    "use_cache": "no key-value cache is kept in training",
    "auto_find_batch_size": "a stage that ran out of memory cannot tell the others; raise num_micro_batches instead",
    "save_on_each_node": "each process writes its own stages into one directory, which all machines must share",
    "accelerator_config": "no Accelerator divides mini-batches or loads data",
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
    "debug": "its tools look into one whole model",
    "skip_memory_metrics": "every log has peak_memory_bytes",
}

_SFT_ONLY = "only PipelineSFTConfig has it"

_AUTOCAST = "fp16=True and bf16=True compute under torch.autocast; leave it out"

_NO_VLLM = "completions come from the pipeline, or from rollout_server; use that"
_ADAPTIVE = "it is for use_adaptive_entropy, which is not supported; leave it out"
_ENTROPIES = "it needs the entropies of all tokens of a step before its loss; entropy_coef weights their mean"

#: Arguments of TRL's configurations, and of older releases, that do not exist here -> why, and what to do instead.
MISSING_ARGUMENTS = {
    "group_by_length": "write train_sampling_strategy='group_by_length'",
    "evaluation_strategy": "write eval_strategy",
    "warmup_ratio": "write warmup_steps, which may be a share of all steps below 1",
    "no_cuda": "write use_cpu",
    "overwrite_output_dir": "a training begins anew unless resume_from_checkpoint is given; leave it out",
    "adafactor": "write optim='adafactor'",
    "include_inputs_for_metrics": "write include_for_metrics=['inputs']",
    "save_safetensors": "weights are always saved so; leave it out",
    "tokenizer": "give it to the trainer as processing_class",
    "push_to_hub_token": "write hub_token",
    "push_to_hub_model_id": "write hub_model_id",
    "memory_save_steps": "write save_steps; checkpoints are on disk alone",
    "logging_dir": "set the variable TENSORBOARD_LOGGING_DIR",
    "fp16_backend": _AUTOCAST,
    "half_precision_backend": _AUTOCAST,
    "truncation_mode": f"rows are cut at their end; {_SFT_ONLY}",
    "padding_free": f"packing=True of PipelineTrainingArguments leaves padding out; {_SFT_ONLY}",
    "pad_to_multiple_of": "each micro-batch is as wide as its longest row; leave it out",
    "pad_token": f"set tokenizer.pad_token, and give the tokenizer as processing_class; {_SFT_ONLY}",
    "eos_token": f"set tokenizer.eos_token, and give the tokenizer as processing_class; {_SFT_ONLY}",
    "chat_template_path": f"set tokenizer.chat_template, and give the tokenizer as processing_class; {_SFT_ONLY}",
    "model_init_kwargs": "make a Pipeline with these options, such as dtype, and give it as the model",
    "trust_remote_code": "make a Pipeline with trust_remote_code=True, and give it as the model",
    "router_aux_loss_coef": "set it in the model's configuration, with output_router_logits=True",
    "dataset_num_proc": "rows are tokenised in the main process; leave it out",
    "dataset_text_field": "texts are for PipelineSFTTrainer; use PipelineSFTConfig",
    "dataset_kwargs": "use PipelineSFTConfig with PipelineSFTTrainer",
    "assistant_only_loss": "use PipelineSFTConfig with PipelineSFTTrainer",
    "completion_only_loss": "use PipelineSFTConfig with PipelineSFTTrainer",
    "max_length": "use PipelineSFTConfig with PipelineSFTTrainer, or cut the rows",
    "packing_strategy": "use PipelineSFTConfig with PipelineSFTTrainer",
    "eval_packing": "use PipelineSFTConfig with PipelineSFTTrainer",
    "shuffle_dataset": "train_sampling_strategy='random' draws the rows in another order in each epoch",
    "activation_offloading": "recompute='host' does it; leave it out",
    "steps_per_generation": "each step trains on completions of its own; use num_iterations for more updates from them",
    "generation_batch_size": "the completions of a step are made together; leave it out",
    "use_vllm": _NO_VLLM,
    "vllm_mode": _NO_VLLM,
    "vllm_server_base_url": _NO_VLLM,
    "vllm_server_host": _NO_VLLM,
    "vllm_server_port": _NO_VLLM,
    "vllm_server_timeout": "write rollout_timeout",
    "vllm_importance_sampling_correction": "the loss reads the pipeline's own log-probabilities; leave it out",
    "use_transformers_continuous_batching": _NO_VLLM,
    "cache_implementation": "each stage keeps the keys and values of its own layers; leave it out",
    "top_entropy_quantile": _ENTROPIES,
    "use_adaptive_entropy": "a checkpoint would not have the weight that changes; set entropy_coef, which stays",
    **dict.fromkeys(("entropy_target", "entropy_coef_min", "entropy_coef_max", "entropy_coef_delta"), _ADAPTIVE),
    "cast_lm_head_to_fp32": "losses are computed in float32; bf16=False computes the head in float32 too",
    "max_tool_calling_iterations": "completions have one turn; rollout_func may make others",
    "log_unique_prompts": "completions are written to files alone; leave it out",
    "log_multimodal": "prompts are texts; leave it out",
    "log_completions_hub_repo": "completions are written to output_dir/completions; upload that folder",
}

#: Values of these arguments that ask for what a pipeline does anyway; of a dict, a part of its entries may be given.
HARMLESS_ARGUMENTS: dict[str, tuple[object, ...]] = {
    "accelerator_config": (AcceleratorConfig(), AcceleratorConfig().to_dict()),
    # Without reentrance the gradients are the same.
    "activation_checkpointing_kwargs": ({"use_reentrant": False}, {"use_reentrant": True}),
    "gradient_checkpointing_kwargs": ({"use_reentrant": False}, {"use_reentrant": True}),
    "label_names": (["labels"],),
    "torch_compile_mode": ("default",),
    "liger_kernel_config": ({"fused_linear_cross_entropy": True},),
}

#: Orders of rows. With no_duplicates a mini-batch has no text twice; rows of embeddings alone can tell.
SAMPLING = ("random", "sequential", "group_by_length", "no_duplicates")

#: Variable of accelerate's environment -> what it turns on, unless its value is a harmless value.
REFUSED_ENVIRONMENT = {
    "ACCELERATE_DYNAMO_BACKEND": "torch.compile",
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "another form of parallelism",
}
HARMLESS_VALUES = ("", "no", "false", "0")

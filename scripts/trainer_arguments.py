"""Writes the tables of docs/trainer.md. What is refused is read from supported.py and surface.py, the arguments of
fine-tuning from sft_config.py, all in hf_gpipe/training; what is honoured, and what has no effect, stands here.

python scripts/trainer_arguments.py            the tables are written
python scripts/trainer_arguments.py --check    exit code 1 where the page says something else
"""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path

from transformers import TrainingArguments

from hf_gpipe.training.arguments import PipelineTrainingArguments
from hf_gpipe.training.sft_config import PipelineSFTConfig
from hf_gpipe.training.supported import BITSANDBYTES_OPTIMIZERS, HARMLESS_ARGUMENTS, OPTIMIZERS, REFUSED
from hf_gpipe.training.surface import FIXED, READ_ONLY
from hf_gpipe.training.surface import REFUSED as SURFACE_REFUSED

#: Fields that a pipeline honours.
HONOURED = frozenset(
    (
        *("output_dir", "per_device_train_batch_size", "num_train_epochs", "max_steps", "learning_rate"),
        *("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "optim", "optim_args", "weight_decay"),
        *("adam_beta1", "adam_beta2", "adam_epsilon", "gradient_accumulation_steps", "max_grad_norm"),
        *("label_smoothing_factor", "neftune_noise_alpha", "bf16", "fp16", "tf32", "activation_checkpointing"),
        *("gradient_checkpointing", "torch_compile", "torch_compile_backend", "torch_empty_cache_steps"),
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

#: Of these, what is honoured only in part.
LIMITS = {
    "optim": "those of optimizers that treat each parameter alone: {optimizers}; with bitsandbytes {bitsandbytes}",
    "neftune_noise_alpha": "of decoder-only models; the noise depends on the seed, the step and the row",
    "dataloader_num_workers": "of a map-style dataset; an iterable one is read by the main process",
}

_SCRIPTS = "Trainer does not read it either; it is for scripts"

#: Field -> why it has no effect that could be missed.
IRRELEVANT = {
    "average_tokens_across_devices": "the loss is always the mean over all target tokens of the step",
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

SURFACE = {
    "called, also an override": METHODS,
    "here, an override is refused": FIXED,
    "attribute, may be set": ATTRIBUTES,
    "attribute, only to be read": READ_ONLY,
    "refused": {name: note for name, note in SURFACE_REFUSED.items() if not name.startswith("_")},
}

PAGE = Path(__file__).parents[1] / "docs" / "trainer.md"


def arguments() -> str:
    """Both tables as Markdown: the pipeline's own arguments, and transformers' in their order."""
    library = [argument.name for argument in fields(TrainingArguments)]
    own = [argument for argument in fields(PipelineTrainingArguments) if argument.name not in library]
    lines = ["| the pipeline's own | |", "|---|---|"]
    lines += [f"| `{argument.name}` | {argument.metadata['help']} |" for argument in own]
    lines += ["", "| argument | | why, and what to do instead |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| `{name}` | {_verdict(name)} |" for name in library)])


def _verdict(name: str) -> str:
    if name in HONOURED:  # the limit is the part that is; empty: all of it
        names = {"optimizers": ", ".join(OPTIMIZERS), "bitsandbytes": ", ".join(BITSANDBYTES_OPTIMIZERS)}
        return f"honoured | {LIMITS.get(name, '').format(**names)}"
    if name in REFUSED:
        accepted = "".join(f"; {value!r} is accepted" for value in HARMLESS_ARGUMENTS.get(name, ()))
        return f"refused | {REFUSED[name]}{accepted}"
    return f"no effect | {IRRELEVANT[name]}"


def surface() -> str:
    """Every public method and attribute of Trainer and Seq2SeqTrainer as a Markdown table, by name."""
    rows = {name: f"{verdict} | {note}" for verdict, notes in SURFACE.items() for name, note in notes.items()}
    lines = ["| method or attribute | | note, and what to use instead |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| `{name}` | {rows[name]} |" for name in sorted(rows))])


def fine_tuning() -> str:
    """The arguments that PipelineSFTConfig adds, or has other defaults of, as a Markdown table."""
    base = {argument.name: argument for argument in fields(PipelineTrainingArguments)}
    lines = ["| argument | default | |", "|---|---|---|"]
    for argument in fields(PipelineSFTConfig):
        if argument.name not in base or argument.metadata["help"] != base[argument.name].metadata["help"]:
            lines.append(f"| `{argument.name}` | `{argument.default!r}` | {argument.metadata['help']} |")
    return "\n".join(lines)


def with_table(page: str, name: str, table: str) -> str:
    """The page with another table between the marks of this name."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, _, rest = page.partition(begin)
    return f"{before}{begin}\n{table}\n{end}{rest.partition(end)[2]}"


def main() -> int:
    page = before = PAGE.read_text(encoding="utf-8")
    for name, table in (("arguments", arguments()), ("surface", surface()), ("fine-tuning", fine_tuning())):
        page = with_table(page, name, table)
    if "--check" in sys.argv[1:]:
        return int(page != before)
    PAGE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""A Pipeline that is given to a trainer: an explicit argument is what the Pipeline is, or an error; and the seed."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import HfArgumentParser, TrainingArguments

from hf_gpipe import Pipeline, PipelineTrainer, PipelineTrainingArguments
from hf_gpipe.errors import UserError
from hf_gpipe.settings.pipeline import PipelineConfig
from hf_gpipe.training.given import check_given, decided_by, take_seed
from scripts.trainer_tables import SUPPORTED
from tests.oracle import padded_batch, plain_model, tiny_config

#: Arguments that a given Pipeline does not decide: they are the trainer's own. (`seed` is both's: `take_seed`.)
OF_THE_TRAINER = frozenset(
    {
        *("timeline_steps", "slow_machine_steps", "fp32_master_weights", "offload_optimizer", "batch_tokens"),
        *("fp16_accumulation", "sampling_temperature", "stop_seconds", "save_in_background", "on_nonfinite_loss"),
        "optimizer_state_dir",
        *("predict_with_generate", "generation_max_length", "generation_num_beams", "generation_config"),
        *("output_dir", "per_device_train_batch_size", "num_train_epochs", "max_steps", "learning_rate"),
        *("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "optim", "optim_args", "weight_decay"),
        *(
            "neftune_noise_alpha",
            "adam_beta1",
            "adam_beta2",
            "adam_epsilon",
            "gradient_accumulation_steps",
            "max_grad_norm",
            "tf32",
        ),
        *("torch_empty_cache_steps", "log_level", "log_level_replica", "log_on_each_node", "logging_strategy"),
        *("logging_steps", "logging_first_step", "logging_nan_inf_filter", "include_num_input_tokens_seen"),
        *("disable_tqdm", "report_to", "run_name", "project", "trackio_space_id", "trackio_bucket_id"),
        *("trackio_static_space_id", "eval_strategy", "eval_steps", "eval_delay", "eval_on_start"),
        *("per_device_eval_batch_size", "prediction_loss_only", "include_for_metrics", "batch_eval_metrics"),
        *("eval_do_concat_batches", "save_strategy", "save_steps", "save_total_limit", "save_only_model"),
        *("enable_jit_checkpoint", "push_to_hub", "hub_model_id", "hub_strategy", "hub_token", "hub_private_repo"),
        *("hub_always_push", "hub_revision", "load_best_model_at_end", "metric_for_best_model", "greater_is_better"),
        *("ignore_data_skip", "restore_callback_states_from_checkpoint", "full_determinism", "seed", "data_seed"),
        *("dataloader_drop_last", "dataloader_num_workers", "dataloader_prefetch_factor"),
        *("dataloader_multiprocessing_context", "dataloader_in_order", "remove_unused_columns"),
        *("length_column_name", "ddp_timeout"),
    }
)

WITH_REPLICAS = {"replicas": 2, "zero": 1}
VISITING = {"offload_weights": "all"}
DIVIDED = {"tensor_parallel": 2}
#: Argument -> options of a Pipeline, a value that is another one, and a value that is the same.
CASES: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "num_stages": ({}, 3, 2),
    "num_micro_batches": ({}, 1, 4),
    "schedule": ({"schedule": "1f1b"}, "gpipe", "1f1b"),
    "recompute": ({"recompute": "none"}, "stage", "none"),
    "partition": ({"partition": [2, 4]}, "count", [2, 4]),
    "memory": ({"memory": 1 << 30}, "2GiB", "1GiB"),
    "replicas": (WITH_REPLICAS, 1, 2),
    "zero": (WITH_REPLICAS, 0, 1),
    "tensor_parallel": (DIVIDED, 1, 2),
    "sequence_chunks": ({"sequence_chunks": 3, "schedule": "1f1b"}, 2, 3),
    "chunk_taper": ({"sequence_chunks": 3, "chunk_taper": 0.5, "schedule": "1f1b"}, 0.0, 0.5),
    "offload_weights": (VISITING, "frozen", "all"),
    "resident_stages": (VISITING, 1, 0),
    "offload_pinned": (VISITING, False, True),
    "boundary_dtype": ({"boundary_dtype": "bfloat16"}, "float16", "bfloat16"),
    "torch_compile": ({}, True, False),
    "torch_compile_backend": ({"torch_compile": "eager"}, "aot_eager", "eager"),
    "use_liger_kernel": ({}, True, False),
    "packing": ({"packing": True}, False, True),
    "label_smoothing_factor": ({"label_smoothing": 0.1}, 0.2, 0.1),
    "logit_clipping": ({"logit_clipping": 5.0}, 4.0, 5.0),
    "bf16": ({"autocast": torch.float16}, True, False),
    "fp16": ({}, True, False),
    "activation_checkpointing": ({"recompute": "none"}, True, False),
    "gradient_checkpointing": ({"recompute": ("none", "block")}, True, False),
    "train_sampling_strategy": ({}, "group_by_length", "random"),
    "use_cpu": ({}, True, True),  # there is no other device here
}


def pipeline(**options: Any) -> Pipeline:
    if options in (
        WITH_REPLICAS,
        VISITING,
        DIVIDED,
    ):  # a Pipeline of several processes, or many stages, is not needed
        pipe = pipeline()
        pipe.given = PipelineConfig(2, 4, "gpipe", "stage", **options)
        pipe.config = pipe.given.decided(partition=(3, 3))
        return pipe
    return Pipeline(tiny_config("llama"), 2, 4, device="cpu", **options)


def arguments(folder: Path, **values: Any) -> PipelineTrainingArguments:
    return PipelineTrainingArguments(str(folder), **{"use_cpu": True, **values})


def test_every_argument_is_compared_or_the_trainer_s_own() -> None:
    """A new argument must be decided by a Pipeline, or named above: none passes beside one without a decision."""
    known, compared = {one.name for one in fields(PipelineTrainingArguments)}, set(decided_by(pipeline()))
    own = known - {one.name for one in fields(TrainingArguments)}
    assert own | (SUPPORTED & known) == (compared | OF_THE_TRAINER) & known
    assert not compared & OF_THE_TRAINER
    assert set(CASES) == compared


@pytest.mark.parametrize("name", sorted(CASES))
def test_an_explicit_argument_is_compared(name: str, tmp_path: Path) -> None:
    """Explicit values that equalled a default passed silently, such as one micro-batch beside a Pipeline with four."""
    options, other, same = CASES[name]
    if name not in PipelineTrainingArguments.__dataclass_fields__:
        pytest.skip(f"this release of transformers has no {name}")
    pipe = pipeline(**options)
    check_given(pipe, arguments(tmp_path))
    check_given(pipe, arguments(tmp_path, **{name: same}))
    if other != same:
        # Newer releases of transformers copy the old name of checkpointing to the new one.
        shown = name.replace("gradient_", "(gradient|activation)_")
        with pytest.raises(UserError, match=rf"^{shown}=.*but the given Pipeline has .*; set it when"):
            check_given(pipe, arguments(tmp_path, **{name: other}))


def test_what_is_left_to_the_planner_agrees_with_what_it_chose(tmp_path: Path) -> None:
    batch = padded_batch(tiny_config("llama"))
    pipe = Pipeline(tiny_config("llama"), 2, "auto", device="cpu", partition="auto", example=batch)
    check_given(pipe, arguments(tmp_path, num_micro_batches="auto", partition="auto"))
    check_given(pipe, arguments(tmp_path, num_micro_batches=pipe.num_micro_batches))
    with pytest.raises(UserError, match="num_micro_batches='auto', but the given Pipeline has 4"):
        check_given(pipeline(), arguments(tmp_path, num_micro_batches="auto"))
    compiled = pipeline(torch_compile=True)
    check_given(compiled, arguments(tmp_path, torch_compile=True))


def test_the_command_line_tells_given_values_from_others() -> None:
    parser = HfArgumentParser(PipelineTrainingArguments)
    words = ["--output_dir", "out", "--use_cpu", "True"]
    (args,) = parser.parse_args_into_dataclasses(words)
    given = "num_stages num_micro_batches schedule recompute partition memory replicas zero boundary_dtype packing"
    assert [getattr(args, name) for name in (*given.split(), "sequence_chunks")] == [None] * 11
    (args,) = parser.parse_args_into_dataclasses([*words, "--packing", "False", "--zero", "0", "--replicas", "1"])
    assert (args.packing, args.zero, args.replicas) == (False, 0, 1)
    (args,) = parser.parse_args_into_dataclasses([*words, "--packing", "--zero", "1", "--replicas", "2"])
    assert (args.packing, args.config.zero, args.config.replicas) == (True, 1, 2)


def losses(pipe: Pipeline, folder: Path, **values: Any) -> list[float]:
    """The losses of two steps, with dropout."""
    rows = [{"input_ids": [5, 6, 7, 8], "labels": [5, 6, 7, 8]}] * 4
    common = {"max_steps": 2, "logging_steps": 1, "report_to": "none", "save_strategy": "no", "data_seed": 0}
    trainer = PipelineTrainer(pipe, arguments(folder, **{**common, **values}), train_dataset=rows)
    trainer.train()
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


def test_dropout_follows_the_trainer_s_seed(tmp_path: Path) -> None:
    """`args.seed` did not reach a given Pipeline: the seeds 1 and 2 gave the same dropout."""
    config = tiny_config("llama", dropout=0.3)

    def run(of_trainer: int, **options: Any) -> list[float]:
        model = plain_model(config, dtype=torch.float32)
        return losses(Pipeline(model, 2, 2, device="cpu", **options), tmp_path, seed=of_trainer)

    assert run(1) == run(1)
    assert run(1) != run(2)
    assert run(2) == run(2, seed=2), "the seed of either is that of both"


def test_two_seeds_that_are_given_are_an_error(tmp_path: Path) -> None:
    pipe = Pipeline(tiny_config("llama"), 2, 4, device="cpu", seed=7)
    take_seed(pipe, arguments(tmp_path))
    assert pipe.seed == 7, "transformers' default is no seed that somebody gave"
    with pytest.raises(UserError, match="seed=3, but the given Pipeline has seed=7; give both the same"):
        take_seed(pipe, arguments(tmp_path, seed=3))


def test_new_weights_cannot_follow_a_later_seed(tmp_path: Path) -> None:
    """`args.seed` did not reach a given Pipeline: the seeds 1 and 2 gave the same LoRA weights."""
    model = plain_model(tiny_config("llama"), dtype=torch.float32)
    lora = LoraConfig(target_modules=["q_proj"])
    new = (
        Pipeline(model, 2, 4, device="cpu", peft_config=lora),
        Pipeline(tiny_config("llama"), 2, 4, device="cpu"),
    )
    for pipe in new:
        with pytest.raises(UserError, match=r"seed=1, .* new weights with seed=0.*give the Pipeline seed=1 too"):
            take_seed(pipe, arguments(tmp_path, seed=1))
        take_seed(pipe, arguments(tmp_path))
        assert pipe.seed == 42, "dropout is transformers' all the same"
    whole = Pipeline(model, 2, 4, device="cpu")
    assert whole.weights_seed is None
    take_seed(whole, arguments(tmp_path, seed=1))
    assert whole.seed == 1

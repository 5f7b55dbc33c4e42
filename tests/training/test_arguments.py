"""Training arguments: every one of transformers' fields is honoured, refused by name, or irrelevant for a reason."""

from __future__ import annotations

import copy
import math
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from transformers import HfArgumentParser, TrainingArguments

from hf_gpipe import PipelineTrainer, PipelineTrainingArguments
from hf_gpipe.errors import UserError
from hf_gpipe.libraries.transformers_trainer import AcceleratorConfig
from hf_gpipe.training import arguments as arguments_module
from hf_gpipe.training.supported import REFUSED
from scripts.trainer_tables import IRRELEVANT, SUPPORTED
from tests.gloo import run_gloo
from tests.oracle import tiny_config
from tests.training.toy import arguments, trainer

#: A value that is not the default, for fields whose default does not suggest one.
OTHER_VALUES: dict[str, Any] = {
    "accelerator_config": {"split_batches": True},
    "parallelism_config": object(),
    "deepspeed": "zero.json",
    "fsdp": "full_shard",
    "fsdp_config": {"version": 2},
    "debug": "underflow_overflow",
    "neftune_noise_alpha": 5.0,
    "label_names": ["targets"],
    "optim_target_modules": ["q_proj"],
    "torch_compile_mode": "max-autotune",
    "liger_kernel_config": {"rope": True},
    "gradient_checkpointing_kwargs": {"determinism_check": "none"},
    "activation_checkpointing_kwargs": {"determinism_check": "none"},
    "ddp_backend": "mpi",
    "ddp_bucket_cap_mb": 25,
}


def library_fields() -> dict[str, Any]:
    return {field.name: field for field in fields(TrainingArguments)}


def test_every_field_is_in_one_table() -> None:
    known = [*SUPPORTED, *REFUSED, *IRRELEVANT]
    assert len(known) == len(set(known)), "a field is in two tables"
    missing = set(library_fields()) - set(known)
    assert not missing, f"transformers has fields that nobody has decided about: {sorted(missing)}"


@pytest.mark.parametrize("name", sorted(set(REFUSED) & set(library_fields())))
def test_what_cannot_be_honoured_is_refused_by_name(name: str, tmp_path: Path) -> None:
    value = OTHER_VALUES.get(name, not library_fields()[name].default)
    with pytest.raises(UserError, match=rf"^{name}="):
        PipelineTrainingArguments(output_dir=str(tmp_path), **{name: value})


@pytest.mark.parametrize("name", sorted(set(REFUSED) & set(library_fields())))
def test_a_refused_field_may_be_given_its_default(name: str, tmp_path: Path) -> None:
    default = library_fields()[name].default
    PipelineTrainingArguments(output_dir=str(tmp_path), **{name: default})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"optim": "adamw_8bit"}, "optim='adamw_8bit' keeps its state in 8 bits.*bitsandbytes.*adamw_torch_fused"),
        ({"optim": "galore_adamw"}, "optim='galore_adamw' is not supported.*adamw_torch_fused"),
        ({"on_nonfinite_loss": "halt"}, "on_nonfinite_loss='halt': expected 'ignore', 'skip' or 'stop'"),
        ({"recompute": "none", "gradient_checkpointing": True}, "activation_checkpointing=True contradicts"),
        ({"save_only_model": True, "enable_jit_checkpoint": True}, "save_only_model=True contradicts enable_jit"),
        ({"bf16": True, "fp16": True}, "At most one of fp16 and bf16"),
        ({"train_sampling_strategy": "batch_rebalance"}, "train_sampling_strategy='batch_rebalance'"),
        ({"lr_scheduler_type": "linnear"}, "linnear"),
        ({"group_by_length": True}, "no argument 'group_by_length': write train_sampling_strategy='group_by_length'"),
        ({"per_device_train_batch_size": -1}, "per_device_train_batch_size=-1: expected a whole number of at least 1"),
        ({"per_device_eval_batch_size": 0}, "per_device_eval_batch_size=0: expected a whole number of at least 1"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps=0: expected a whole number of at least 1"),
        ({"stop_seconds": "soon"}, "stop_seconds='soon': expected a number above 0"),
        ({"ddp_timeout": 0}, "ddp_timeout=0: expected a number above 0 and at most 1000000000"),
        ({"generation_max_length": 0}, "generation_max_length=0: expected a whole number of at least 1"),
        ({"seed": -1}, "seed=-1: expected a whole number of at least 0 and at most 4294967295"),
        ({"num_train_epochs": math.nan}, "num_train_epochs=nan: expected a finite number"),
        ({"max_steps": 0}, "max_steps=0: expected a whole number of at least 1, or -1: num_train_epochs decides"),
        ({"data_seed": 1.5}, r"data_seed=1\.5: expected a whole number of at least 0"),
        ({"warmup_steps": "few"}, "training arguments: .*'str'"),
        ({"max_grad_norm": "1"}, "max_grad_norm='1': expected a number; 0 or None: no clipping"),
        ({"weight_decay": math.nan}, "weight_decay=nan: expected a finite number of at least 0"),
        ({"max_grad_norm": math.nan}, "max_grad_norm=nan: expected a number; 0 or None: no clipping"),
        ({"neftune_noise_alpha": -5.0}, r"neftune_noise_alpha=-5\.0: expected a number of at least 0"),
    ],
)
def test_a_value_that_is_not_supported(
    values: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arguments_module, "is_bitsandbytes_available", lambda: False)
    with pytest.raises(UserError, match=message):
        PipelineTrainingArguments(output_dir=str(tmp_path), **values)


def test_what_an_optimizer_or_a_schedule_does_not_take(tmp_path: Path) -> None:
    made = trainer(tmp_path, family="llama", optim="rmsprop")
    for name, value, message in (
        ("optim_args", "momentum", "optim='rmsprop' does not take optim_args='momentum'.*give it as name=value"),
        ("learning_rate", -1.0, "RMSprop does not take {'lr': -1.0}: Invalid learning rate: -1.0"),
        ("lr_scheduler_kwargs", {"rate": 2}, r"'linear' does not take lr_scheduler_kwargs={'rate': 2}.*'rate'"),
    ):
        before = getattr(made.args, name)
        setattr(made.args, name, value)
        with pytest.raises(UserError, match=message):
            made.create_optimizer_and_scheduler(3)
        setattr(made.args, name, before)


@pytest.mark.parametrize(
    ("variable", "value"), [("ACCELERATE_DYNAMO_BACKEND", "inductor"), ("ACCELERATE_USE_FSDP", "true")]
)
def test_what_accelerate_is_told_to_do_is_refused_too(
    variable: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(UserError, match=f"{variable}={value}"):
        PipelineTrainingArguments(output_dir=str(tmp_path))


def test_values_that_are_set_later_are_checked_by_the_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments_module, "is_bitsandbytes_available", lambda: False)

    def change(method: str, **values: Any) -> str:
        args = arguments(tmp_path)
        args.check()
        getattr(args, method)(**values)
        with pytest.raises(UserError) as caught:
            PipelineTrainer(tiny_config("llama"), args)
        return str(caught.value)

    assert change("set_optimizer", name="adamw_8bit").startswith("optim='adamw_8bit'")
    args = arguments(tmp_path)
    args.liger_kernel_config = {"rope": True}
    with pytest.raises(UserError, match=r"liger_kernel_config=.'rope': True"):
        PipelineTrainer(tiny_config("llama"), args)
    args = arguments(tmp_path)
    with pytest.raises(AttributeError, match="PipelineTrainingArguments has no argument 'max_length': use PipelineSFT"):
        args.max_length  # noqa: B018
    args.max_length = 8
    with pytest.raises(UserError, match="no argument 'max_length', which was set: use PipelineSFTConfig"):
        PipelineTrainer(tiny_config("llama"), args)
    with pytest.raises(UserError, match="no argument 'memory_save_steps': write save_steps"):
        arguments(tmp_path, memory_save_steps=1)
    args = arguments(tmp_path).set_logging(strategy="steps", steps=3, level="error")
    assert PipelineTrainer(tiny_config("llama"), args).args.logging_steps == 3
    assert transformers.logging.get_verbosity() == transformers.logging.ERROR
    transformers.logging.set_verbosity_warning()


def test_arguments_are_copied(tmp_path: Path) -> None:
    args = arguments(tmp_path, learning_rate=0.5)
    other = replace(args, output_dir=str(tmp_path / "other"), num_stages=3)
    assert (other.learning_rate, other.num_stages, args.num_stages) == (0.5, 3, 2)
    copy.deepcopy(other).check()
    with pytest.raises(UserError, match="accelerator_config="):
        replace(args, accelerator_config={"split_batches": True})


def test_the_mode_of_torch_compile_may_be_the_default(tmp_path: Path) -> None:
    args = arguments(tmp_path, torch_compile_mode="default")
    assert args.config.compiled.backend == "inductor"


def test_recomputation_of_blocks_may_be_asked_for_as_in_the_library(tmp_path: Path) -> None:
    for is_reentrant in (False, True):
        kwargs = {"use_reentrant": is_reentrant}
        args = arguments(tmp_path, gradient_checkpointing=True, gradient_checkpointing_kwargs=kwargs, recompute="block")
        args.check()
    with pytest.raises(UserError, match="checkpointing_kwargs="):
        arguments(tmp_path, gradient_checkpointing=True, gradient_checkpointing_kwargs={"preserve_rng_state": False})


def test_settings_of_accelerate_that_are_its_defaults_change_nothing(tmp_path: Path) -> None:
    """A script that wrote a default of accelerate's down was refused."""
    for value in ({}, {"split_batches": False}, AcceleratorConfig(), AcceleratorConfig().to_dict()):
        arguments(tmp_path, accelerator_config=value).check()


def test_no_process_group_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' own arguments join a job as soon as they are asked for their device."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    args = PipelineTrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    assert args.device == torch.device("cpu")
    assert (args.world_size, args.process_index, args.train_batch_size) == (1, 0, 8)
    assert args.should_save
    assert not dist.is_initialized()


@pytest.mark.parametrize(("tf32", "calls"), [(None, []), (True, [True]), (False, [False])])
def test_tf32_is_honoured(
    tf32: bool | None, calls: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[bool] = []
    monkeypatch.setattr("transformers.training_args.is_torch_tf32_available", lambda: True)
    monkeypatch.setattr("transformers.training_args.enable_tf32", made.append)
    arguments(tmp_path, tf32=tf32)
    assert made == calls


def test_the_device_is_chosen_by_the_pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments that are made before the job is joined cannot know which GPU is free; they make no context on one."""
    args = arguments(tmp_path, use_cpu=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert args.device == torch.device("cuda")
    assert args.config.device == "auto"


def test_from_a_command_line() -> None:
    parser = HfArgumentParser(PipelineTrainingArguments)
    words = ["--output_dir", "out", "--num_stages", "2", "--use_cpu", "True"]
    (args,) = parser.parse_args_into_dataclasses([*words, "--partition", "3", "4"])
    assert (args.num_stages, args.partition) == (2, [3, 4])
    (args,) = parser.parse_args_into_dataclasses([*words, "--replicas", "2"])
    assert args.config.replicas == 2
    (args,) = parser.parse_args_into_dataclasses([*words, "--replicas", "2", "1"])
    assert args.config.replicas == (2, 1)
    (args,) = parser.parse_args_into_dataclasses(words)
    assert (args.partition, args.config.partition) == (None, None)
    assert args.config.replicas == 1
    # The meaning that keys and arguments share once hid their types: "--bf16" alone was an error, the norm a text.
    (args,) = parser.parse_args_into_dataclasses([*words, "--bf16", "--max_grad_norm", "0.5"])
    assert (args.bf16, args.max_grad_norm) == (True, 0.5)


def _main_first(folder: str) -> bool:
    """Whether the main process's file is there when this process's turn has come."""
    args = PipelineTrainingArguments(folder, use_cpu=True)
    with args.main_process_first():
        if args.process_index == 0:
            time.sleep(0.3)
            (Path(folder) / "made").touch()
        return (Path(folder) / "made").exists()


def test_the_main_process_is_first_where_the_processes_have_joined(tmp_path: Path) -> None:
    assert run_gloo(_main_first, 2, str(tmp_path)) == [True, True]

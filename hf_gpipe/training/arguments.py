"""`PipelineTrainingArguments`: transformers' TrainingArguments with the pipeline's own fields."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, Self

import torch
import torch.distributed as dist
from transformers import GenerationConfig, TrainingArguments
from transformers.training_args import ParallelMode
from transformers.utils import is_bitsandbytes_available

from hf_gpipe.errors import UserError, nearest
from hf_gpipe.recipe import DataSection, PipelineConfig, TrainingSection, keys_of
from hf_gpipe.recipe.pipeline import PLANNED
from hf_gpipe.runtime.loss import TokenLoss
from hf_gpipe.runtime.world import World
from hf_gpipe.training.supported import (
    BITSANDBYTES_OPTIMIZERS,
    HARMLESS_ARGUMENTS,
    HARMLESS_VALUES,
    MISSING_ARGUMENTS,
    OPTIMIZERS,
    REFUSED,
    REFUSED_ENVIRONMENT,
    SAMPLING,
)

#: The help of fields that are also keys of a recipe.
_PIPELINE = {name: {"help": key.text} for name, key in keys_of(PipelineConfig).items()}
_TRAINING = {name: {"help": key.text} for name, key in keys_of(TrainingSection).items()}
#: The default of all that a given Pipeline decides: what is given beside it can then be compared with it.
_NOT_GIVEN: Any = None
#: Where nothing can be planned.
_CANNOT_PLAN = (
    "Nothing can be planned where the training dataset, such as a stream, does not tell how long its rows are, and "
    "with an asynchronous schedule, the file of a table, or an optimizer of bitsandbytes."
)


def _planned(name: str) -> dict[str, str]:
    return {"help": f"{_PIPELINE[name]['help'].replace('null:', 'None:')} {_CANNOT_PLAN}"}


def _pipeline(name: str) -> dict[str, str]:
    return {"help": f"{_PIPELINE[name]['help']} None: {getattr(PipelineConfig, name)}."}


@dataclass
class PipelineTrainingArguments(TrainingArguments):
    """Arguments of `PipelineTrainer`: those of transformers' Trainer, and how the model is cut into stages.

    `per_device_train_batch_size` is the rows of a mini-batch of the whole pipeline, `gradient_accumulation_steps` the
    number of mini-batches in one step. hf_gpipe/training/supported.py says which of transformers' arguments are
    honoured; any other raises an error that names it.

    Raises:
        UserError: an argument, or a setting of `accelerate launch`, that a pipeline cannot honour.
    """

    num_stages: int | str = field(default=PipelineConfig.num_stages, metadata=_PIPELINE["num_stages"])
    num_micro_batches: int | str = field(default=_NOT_GIVEN, metadata=_planned("num_micro_batches"))
    schedule: str = field(default=_NOT_GIVEN, metadata=_planned("schedule"))
    recompute: str = field(default=_NOT_GIVEN, metadata=_planned("recompute"))
    partition: list[int] | str = field(default=_NOT_GIVEN, metadata=_planned("partition"))
    memory: str | None = field(default=None, metadata=_PIPELINE["memory"])
    replicas: int | list[int] | str = field(default=_NOT_GIVEN, metadata=_pipeline("replicas"))
    zero: int = field(default=_NOT_GIVEN, metadata=_pipeline("zero"))
    boundary_dtype: str | None = field(default=PipelineConfig.boundary_dtype, metadata=_PIPELINE["boundary_dtype"])
    timeline_steps: int | None = field(default=TrainingSection.timeline_steps, metadata=_TRAINING["timeline_steps"])
    slow_machine_steps: int | None = field(
        default=TrainingSection.slow_machine_steps, metadata=_TRAINING["slow_machine_steps"]
    )
    logit_clipping: float | None = field(default=TrainingSection.logit_clipping, metadata=_TRAINING["logit_clipping"])
    fp32_master_weights: bool = field(
        default=TrainingSection.fp32_master_weights, metadata=_TRAINING["fp32_master_weights"]
    )
    offload_optimizer: bool = field(default=TrainingSection.offload_optimizer, metadata=_TRAINING["offload_optimizer"])
    batch_tokens: int | None = field(
        default=TrainingSection.batch_tokens,
        metadata={
            "help": "Target tokens of a training mini-batch, about, in place of per_device_train_batch_size rows; "
            "None: rows."
        },
    )
    packing: bool | None = field(
        default=_NOT_GIVEN,
        # On a command line `--packing` alone means True.
        metadata={
            "help": f"{_TRAINING['packing']['help']} None: {TrainingSection.packing}.",
            "nargs": "?",
            "const": True,
        },
    )
    sampling_temperature: float = field(
        default=DataSection.temperature,
        metadata={
            "help": "T: a language with a share s of the rows is drawn in proportion to s ** (1 / T); 1: every row "
            "once an epoch. Other values need a dataset with `languages`, the language of each row."
        },
    )
    stop_seconds: float = field(
        default=TrainingSection.stop_seconds,
        metadata={
            "help": "With enable_jit_checkpoint: how long after SIGTERM or SIGINT a training may take to end its step "
            "and save, before it ends without."
        },
    )
    save_in_background: str = field(
        default=TrainingSection.save_in_background, metadata=_TRAINING["save_in_background"]
    )
    memory_save_steps: int | None = field(
        default=TrainingSection.memory_save_steps, metadata=_TRAINING["memory_save_steps"]
    )
    on_nonfinite_loss: str = field(default=TrainingSection.on_nonfinite_loss, metadata=_TRAINING["on_nonfinite_loss"])
    # The default is the library's, and one with that of recipes.
    ddp_timeout: int = field(default=int(PipelineConfig.timeout_seconds), metadata=_PIPELINE["timeout_seconds"])
    predict_with_generate: bool = field(
        default=False, metadata={"help": "Whether evaluation and prediction generate, for metrics of texts."}
    )
    generation_max_length: int | None = field(
        default=None, metadata={"help": "`max_length` of that generation; None: of the model's generation_config."}
    )
    generation_num_beams: int | None = field(
        default=None, metadata={"help": "`num_beams` of that generation; None: of the model's generation_config."}
    )
    generation_config: str | GenerationConfig | None = field(
        default=None, metadata={"help": "In place of the model's own: the object, or a directory or Hub id to load."}
    )

    def __new__(cls, *args: Any, **given: Any) -> Self:
        """Raise UserError for arguments that there are not; a dataclass would raise a TypeError."""
        known = {one.name for one in fields(cls) if one.init}
        for name in given.keys() - known:
            note = MISSING_ARGUMENTS.get(name)
            reason = f": {note}" if note else f"{nearest(name, known)}; leave it out"
            raise UserError(f"{cls.__name__} has no argument {name!r}{reason}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if self.num_train_epochs is None:
            raise UserError("num_train_epochs=None: give a number above 0, or leave it out; max_steps goes before it")
        if isinstance(self.replicas, list) and len(self.replicas) == 1:
            # One number of a command line.
            self.replicas = self.replicas[0]
        self._take_mixed_precision_of_launcher()
        # Before the library's own checks, which replace values and could act on them.
        self._settled: dict[str, Any] = {}
        self.check()
        if self.bf16 and self.device.type == "cpu":
            # The library wants to be told so, where bfloat16 is asked for and it finds no GPU.
            self.use_cpu = True
        try:
            super().__post_init__()
        except ValueError as error:
            raise UserError(f"training arguments: {error}") from error
        self._settled = {name: copy.copy(getattr(self, name, None)) for name in REFUSED}

    def check(self) -> None:
        """Raise UserError for a value that a pipeline cannot honour, wherever it was set: a trainer asks again."""
        for argument in fields(TrainingArguments):
            if argument.name in REFUSED:
                self._refuse_unless_default(argument)
        choose("optim", str(getattr(self.optim, "value", self.optim)), (*OPTIMIZERS, *BITSANDBYTES_OPTIMIZERS))
        if self.optim in BITSANDBYTES_OPTIMIZERS and not is_bitsandbytes_available():
            raise UserError(
                f"optim={str(getattr(self.optim, 'value', self.optim))!r} keeps its state in 8 bits, or in pages, by "
                "the package bitsandbytes, which is not installed; install it, or choose one of "
                f"{', '.join(OPTIMIZERS)}"
            )
        choose("train_sampling_strategy", self.train_sampling_strategy, SAMPLING)
        choose("save_in_background", self.save_in_background, ("auto", "always", "never"))
        choose("on_nonfinite_loss", self.on_nonfinite_loss, ("ignore", "skip", "stop"))
        for name in ("timeline_steps", "slow_machine_steps", "memory_save_steps"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)}; it must be at least 1, or None")
        TokenLoss(logit_clipping=self.logit_clipping)
        self._check_sampling()
        if self.recompute == "none" and self.is_checkpointing:
            raise UserError(
                "activation_checkpointing=True contradicts recompute='none'; leave one of them out (recompute='block' "
                "is the same, recompute='stage' keeps less)"
            )
        if self.save_only_model and (self.enable_jit_checkpoint or self.memory_save_steps is not None):
            other = "enable_jit_checkpoint=True" if self.enable_jit_checkpoint else "memory_save_steps"
            raise UserError(
                f"save_only_model=True contradicts {other}: what is saved when the training is stopped would not be "
                "enough to go on from; leave one of them out"
            )
        for variable, feature in REFUSED_ENVIRONMENT.items():
            value = os.environ.get(variable, "")
            if value.lower() not in HARMLESS_VALUES:
                raise UserError(
                    f"{variable}={value}: accelerate's launcher was told to use {feature}, which a pipeline does not "
                    "support; launch without it"
                )

    def _check_sampling(self) -> None:
        if not self.sampling_temperature >= 1:
            raise UserError(f"sampling_temperature={self.sampling_temperature}; it must be at least 1")
        if self.sampling_temperature != 1 and self.train_sampling_strategy == "sequential":
            raise UserError(
                f"sampling_temperature={self.sampling_temperature} draws rows, and "
                "train_sampling_strategy='sequential' keeps their order; use random or group_by_length"
            )
        if self.batch_tokens is None:
            return
        if self.batch_tokens < 1:
            raise UserError(f"batch_tokens={self.batch_tokens}; it must be at least 1, or None")
        if self.dataloader_drop_last:
            raise UserError(
                "dataloader_drop_last=True with batch_tokens: its mini-batches are about equal, so there is none to "
                "drop; leave one of them out"
            )

    @property
    def is_checkpointing(self) -> bool:
        """Whether activations are to be recomputed, by one of the library's two names for it."""
        # Older releases of transformers have the second name alone.
        return bool(getattr(self, "activation_checkpointing", False) or self.gradient_checkpointing)

    @property
    def config(self) -> PipelineConfig:
        """The pipeline that these arguments ask for."""
        same_name = (
            *("num_stages", "num_micro_batches", "schedule", "recompute", "partition", "memory", "replicas", "zero"),
            *("boundary_dtype", "torch_compile"),
        )
        given = {name: getattr(self, name) for name in same_name}
        if self.is_checkpointing and given["recompute"] is None:
            given["recompute"] = PLANNED["recompute"]  # the planner could choose none
        return PipelineConfig(
            **{name: value for name, value in given.items() if value is not None},
            device="cpu" if self.device.type == "cpu" else "auto",
            torch_compile_backend=self.torch_compile_backend if self.torch_compile else None,
        )

    @property
    def packs_rows(self) -> bool:
        """Whether micro-batches are rows of documents without padding."""
        return bool(self.packing)

    @property
    def autocast(self) -> torch.dtype | None:
        """The half precision that forwards compute in, by `bf16` or `fp16`."""
        return torch.bfloat16 if self.bf16 else torch.float16 if self.fp16 else None

    def _take_mixed_precision_of_launcher(self) -> None:
        """`accelerate launch --mixed_precision bf16` asks for what `bf16` does."""
        value = os.environ.get("ACCELERATE_MIXED_PRECISION", "").lower()
        if value in HARMLESS_VALUES or self.bf16 or self.fp16:
            return
        if value not in ("bf16", "fp16"):
            raise UserError(
                f"ACCELERATE_MIXED_PRECISION={value}: accelerate's launcher was told to use a mixed precision which a "
                "pipeline does not support; use bf16 or fp16"
            )
        setattr(self, value, True)

    def _refuse_unless_default(self, argument: Field[Any]) -> None:
        name = argument.name
        default = argument.default if argument.default_factory is MISSING else argument.default_factory()
        value = getattr(self, name)
        accepted = (default, *HARMLESS_ARGUMENTS.get(name, ()), *([self._settled[name]] if self._settled else []))
        if value not in accepted and (default or value):
            raise UserError(f"{name}={value!r} is not supported by a pipeline ({REFUSED[name]}); leave it out")

    # What the library derives from accelerate's state, which would start a process group of its own.

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        if self.use_cpu or os.environ.get("ACCELERATE_USE_CPU", "").lower() not in HARMLESS_VALUES:
            return torch.device("cpu")
        if not torch.cuda.is_available():
            return torch.device("cpu")
        # Without a number: which one is the pipeline's to choose, once the process has joined its job.
        return torch.device("cuda")

    @property
    def n_gpu(self) -> int:
        """Devices that the library may split a mini-batch over: none beside this process's own."""
        return 1 if self.device.type == "cuda" else 0

    @property
    def parallel_mode(self) -> ParallelMode:
        return ParallelMode.DISTRIBUTED if self.world_size > 1 else ParallelMode.NOT_PARALLEL

    @property
    def world_size(self) -> int:
        """Processes of the pipeline."""
        return dist.get_world_size() if dist.is_initialized() else 1

    @property
    def process_index(self) -> int:
        """Rank of this process."""
        return dist.get_rank() if dist.is_initialized() else 0

    @property
    def local_process_index(self) -> int:
        """Rank of this process on its machine; among all where no launcher says it."""
        return dist.get_node_local_rank(fallback_rank=dist.get_rank()) if dist.is_initialized() else 0

    @contextmanager
    def main_process_first(self, local: bool = True, desc: str = "work") -> Iterator[None]:
        """Run a block in the main process before the others run it, however long it takes.

        Before the processes have joined, nothing waits.

        Args:
            local: whether the first process of each machine counts as a main one.
            desc: the work, for the library's signature.
        """
        is_first = (self.local_process_index if local else self.process_index) == 0
        with World.of_job().working():
            if is_first:
                yield
        if not is_first:
            yield


def choose(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise UserError for a value of an argument that is not among the allowed ones."""
    if value not in allowed:
        raise UserError(
            f"{name}={value!r} is not supported by a pipeline; choose one of {', '.join(allowed)}"
            f"{nearest(value, allowed)}"
        )

"""`PipelineTrainingArguments`: transformers' TrainingArguments with the pipeline's own fields."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cache
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeVar, get_args, get_type_hints

import torch
import torch.distributed as dist
from pydantic import Field as Limit
from transformers import GenerationConfig, TrainingArguments

from hf_gpipe.errors import MissingAttributeError, UserError, check_choice, check_count, nearest
from hf_gpipe.job.world import World
from hf_gpipe.libraries.transformers import is_bitsandbytes_available
from hf_gpipe.libraries.transformers_trainer import ParallelMode
from hf_gpipe.losses.loss import Loss, TokenLoss
from hf_gpipe.planner.workload import PlanInputs
from hf_gpipe.recipe import DataSection, TrainingSection
from hf_gpipe.recipe.batch_size import BatchSize
from hf_gpipe.recipe.data import Temperature
from hf_gpipe.recipe.training import TrainingMeaning
from hf_gpipe.settings.optimizers import OPTIMIZERS
from hf_gpipe.settings.pipeline import PLANNED, PipelineConfig, Seconds
from hf_gpipe.settings.section import OF_RECIPE, Count, CountOrZero, NotNegative, Settings, check_value, keys_of
from hf_gpipe.training.supported import (
    HARMLESS_ARGUMENTS,
    HARMLESS_VALUES,
    MISSING_ARGUMENTS,
    REFUSED,
    REFUSED_ENVIRONMENT,
    SAMPLING,
)

T = TypeVar("T")

#: The error where nothing can be planned.
_CANNOT_PLAN = (
    "Nothing can be planned where the training dataset, such as a stream, does not tell how long its rows are, and "
    "with an asynchronous schedule or the file of a table."
)


#: What the library has made of fields that are not supported, in arguments that were checked: `dataclasses.replace`
#: gives it to new ones.
_SETTLED: dict[str, Any] = {}


def argument(default: Any, text: str, **metadata: Any) -> Any:
    """Make a field of arguments; `text` is its help."""
    return field(default=default, metadata={"help": text, **metadata})


def key_of(section: type[Settings], name: str, text: str = "", **metadata: Any) -> Any:
    """Make a field that is also a key of a recipe, with the key's default and, where `text` is empty, its help.

    What a given Pipeline decides is None where it is not given: a value is compared with the Pipeline's.
    """
    key = keys_of(section)[name]
    text = text or key.text.replace("null:", "None:")
    if section is not PipelineConfig and name != "packing":
        return argument(key.default, text, **metadata)
    otherwise = _CANNOT_PLAN if name in PLANNED else f"None: {key.default}."
    return argument(None, text if name not in PLANNED and key.default is None else f"{text} {otherwise}", **metadata)


def with_keys_of(section: type[Settings], but: Sequence[str] = ()) -> Callable[[type[T]], type[T]]:
    """Make a decorator, for below `dataclass`, that gives a class of arguments a field for each key of a section.

    Args:
        section: of a recipe.
        but: the keys that are no arguments; neither are those that the class, or the library's, has itself, or that are
            marked.
    """

    def decorate(cls: type[T]) -> type[T]:
        taken = {known.name for known in fields(TrainingArguments)} | cls.__annotations__.keys() | {*but}
        own = {name: key for name, key in keys_of(section).items() if name not in taken and OF_RECIPE not in key.marks}
        cls.__annotations__ = {name: _type_of_word(key.schema) for name, key in own.items()} | cls.__annotations__
        for name in own:
            setattr(cls, name, key_of(section, name))
        return cls

    return decorate


def _type_of_word(schema: Mapping[str, Any]) -> Any:
    """The narrowest type that a key allows, which a parser of a command line makes of a word, or of several."""
    options = schema.get("anyOf", [schema])
    for option in options:
        if (of_each := option.get("items", {}).get("type")) in ("integer", "number"):
            return list[int] if of_each == "integer" else list[float]
    types = {option.get("type") for option in options}
    return next((kind for name, kind in _TYPES_OF_WORDS.items() if name in types), str)


def _of_library(name: str) -> Any:
    """Make a field that the library has, with its default and help, because it has limits here."""
    known = TrainingArguments.__dataclass_fields__[name]
    return argument(known.default, known.metadata["help"])


_TYPES_OF_WORDS: dict[str, type] = {"boolean": bool, "integer": int, "number": float}
_TIMEOUT = keys_of(PipelineConfig)["timeout_seconds"]


#: The keys that the launcher of the processes decides, and those that the library has by other names.
_OF_LAUNCHER = (
    *("placement", "num_processes", "speeds", "device", "devices"),
    *("timeout_seconds", "measure_links", "threads_per_process"),
)
_RENAMED = ("batch_size", "length_bucketing", "decay_steps", "resume")


@dataclass
@with_keys_of(PipelineConfig, but=_OF_LAUNCHER)
@with_keys_of(TrainingSection, but=_RENAMED)
class PipelineTrainingArguments(TrainingMeaning, TrainingArguments):
    """Arguments of `PipelineTrainer`: the arguments of transformers' Trainer, and how the model is cut into stages.

    `per_device_train_batch_size` is the rows of a mini-batch of the whole pipeline, `gradient_accumulation_steps` the
    number of mini-batches in one step. hf_gpipe/training/supported.py says which of transformers' arguments raise an
    error that names them.

    Raises:
        UserError: an argument, or a setting of `accelerate launch`, that a pipeline does not support.
    """

    num_train_epochs: Annotated[float, Limit(allow_inf_nan=False)] = _of_library("num_train_epochs")
    per_device_train_batch_size: Count = _of_library("per_device_train_batch_size")
    per_device_eval_batch_size: Count = _of_library("per_device_eval_batch_size")
    gradient_accumulation_steps: int = _of_library("gradient_accumulation_steps")
    weight_decay: float = _of_library("weight_decay")
    seed: int = _of_library("seed")
    data_seed: CountOrZero | None = _of_library("data_seed")
    dataloader_num_workers: CountOrZero = _of_library("dataloader_num_workers")
    neftune_noise_alpha: NotNegative | None = _of_library("neftune_noise_alpha")
    batch_tokens: int | None = key_of(
        TrainingSection,
        "batch_tokens",
        "Approximate number of target tokens in a training mini-batch; None: per_device_train_batch_size rows.",
    )
    # On a command line `--packing` alone means True.
    packing: bool | None = key_of(TrainingSection, "packing", nargs="?", const=True)
    sampling_temperature: Temperature = key_of(
        DataSection,
        "temperature",
        "T: a language with a share s of the rows is drawn in proportion to s ** (1 / T); 1: each epoch has every row "
        "once. Other values need a dataset whose attribute `languages` or column `language` names each row's language.",
    )
    stop_seconds: float = key_of(
        TrainingSection,
        "stop_seconds",
        "With enable_jit_checkpoint: seconds that a training has after SIGTERM or SIGINT to end its step and save; "
        "then it ends without saving.",
    )
    # The default is the library's, and recipes have the same.
    ddp_timeout: Seconds = argument(int(_TIMEOUT.default), _TIMEOUT.text)
    predict_with_generate: bool = argument(False, "Whether evaluation and prediction generate texts for the metrics.")
    generation_max_length: Count | None = argument(
        None, "`max_length` of this generation; None: as in the model's generation_config."
    )
    generation_num_beams: Count | None = argument(
        None, "`num_beams` of this generation; None: as in the model's generation_config."
    )
    generation_config: str | GenerationConfig | None = argument(
        None, "Replaces the model's own: a GenerationConfig, or a directory or Hub id to load it from."
    )

    def __new__(cls, *args: Any, **given: Any) -> Self:
        """Raise UserError for arguments that do not exist; a dataclass would raise a TypeError."""
        known = {known_field.name for known_field in fields(cls) if known_field.init}
        for name in given.keys() - known:
            note = MISSING_ARGUMENTS.get(name)
            reason = f": {note}" if note else f"{nearest(name, known)}; leave it out"
            raise UserError(f"{cls.__name__} has no argument {name!r}{reason}")
        return super().__new__(cls)

    @classmethod
    def of(cls, given: TrainingArguments) -> Self:
        """The given arguments, made anew with the further arguments' defaults if they are of a class above this one.

        Raises UserError where they are of another class, such as another trainer's.
        """
        if isinstance(given, cls):
            return given
        if not isinstance(given, TrainingArguments) or not issubclass(cls, type(given)):
            raise UserError(f"args is a {type(given).__name__}; this trainer needs a {cls.__name__}")
        values = {known.name: getattr(given, known.name) for known in fields(given) if known.init}
        plain = type(given)(output_dir=given.output_dir, use_cpu=given.use_cpu)
        unset = {name for name in REFUSED if name in values and values[name] == getattr(plain, name)}
        return cls(**{name: value for name, value in values.items() if name not in unset})

    if not TYPE_CHECKING:  # a type checker goes on finding what is misspelt

        def __getattr__(self, name: str) -> Any:
            """Raise AttributeError. For an argument that only TRL has, the error says what to do instead."""
            if (note := MISSING_ARGUMENTS.get(name)) is not None:
                raise MissingAttributeError(f"{type(self).__name__} has no argument {name!r}: {note}")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __post_init__(self) -> None:
        if self.num_train_epochs is None:
            raise UserError("num_train_epochs=None: give a number above 0, or leave it out; max_steps goes before it")
        if isinstance(given := self.__dict__["replicas"], list) and len(given) == 1:
            # It is a single number of a command line.
            self.__dict__["replicas"] = given[0]
        self._take_mixed_precision_of_launcher()
        # These checks come before the library's own checks, which replace values and could act on them.
        self._settled: dict[str, Any] = {}
        self.check()
        if self.bf16 and self.device.type == "cpu":
            # The library wants to be told so, where bfloat16 is asked for and it finds no GPU.
            self.use_cpu = True
        try:
            super().__post_init__()
        except (ValueError, TypeError) as error:
            raise UserError(f"training arguments: {error}") from error
        self._settled = {name: copy.copy(getattr(self, name, None)) for name in REFUSED}
        _SETTLED.update(self._settled)

    def check(self) -> None:
        """Raise UserError for a value that a pipeline does not support, wherever it was set: a trainer asks again."""
        for library_s in fields(TrainingArguments):
            if library_s.name in REFUSED:
                self._refuse_unless_default(library_s)
        optim = str(getattr(self.optim, "value", self.optim))
        check_choice("optim", optim, tuple(OPTIMIZERS))
        if OPTIMIZERS[optim].needs_bitsandbytes and not is_bitsandbytes_available():
            others = ", ".join(name for name, state in OPTIMIZERS.items() if not state.needs_bitsandbytes)
            raise UserError(
                f"optim={optim!r} keeps its state in 8 bits, or in pages, by "
                f"the package bitsandbytes, which is not installed; install it, or choose one of {others}"
            )
        for name in MISSING_ARGUMENTS.keys() & vars(self).keys() - type(self).__dataclass_fields__.keys():
            raise UserError(f"{type(self).__name__} has no argument {name!r}, which was set: {MISSING_ARGUMENTS[name]}")
        self._check_numbers()
        check_choice("train_sampling_strategy", self.train_sampling_strategy, SAMPLING)
        self.token_loss  # noqa: B018  # raises UserError for other numbers
        self._check_sampling()
        if self.recompute in ("none", "host") and self.is_checkpointing:
            raise UserError(
                f"activation_checkpointing=True contradicts recompute={self.recompute!r}; leave one of them out "
                "(recompute='block' is the same as it, recompute='stage' keeps less)"
            )
        if self.save_only_model and self.enable_jit_checkpoint:
            raise UserError(
                "save_only_model=True contradicts enable_jit_checkpoint=True: what is saved when the training is "
                "stopped would not be enough to go on from; leave one of them out"
            )
        for variable, feature in REFUSED_ENVIRONMENT.items():
            value = os.environ.get(variable, "")
            if value.lower() not in HARMLESS_VALUES:
                raise UserError(
                    f"{variable}={value}: accelerate's launcher was told to use {feature}, which a pipeline does not "
                    "support; launch without it"
                )

    def _check_numbers(self) -> None:
        """Raise UserError for a number that the library lets pass, and that no training can have."""
        for name, allowed in _limits().items():
            if getattr(self, name) is not None or getattr(type(self), name) is not None:
                check_value(name, getattr(self, name), allowed)
        if self.max_steps != -1:
            check_count("max_steps", self.max_steps, 1, otherwise=", or -1: num_train_epochs decides")
        bound = 0 if self.max_grad_norm is None else self.max_grad_norm
        if not isinstance(bound, int | float) or math.isnan(bound):
            raise UserError(f"max_grad_norm={self.max_grad_norm!r}: expected a number; 0 or None: no clipping")

    def _check_sampling(self) -> None:
        if self.sampling_temperature != 1 and self.train_sampling_strategy == "sequential":
            raise UserError(
                f"sampling_temperature={self.sampling_temperature} draws rows, and "
                "train_sampling_strategy='sequential' keeps their order; use random or group_by_length"
            )
        if self.batch_tokens is not None and self.dataloader_drop_last:
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
        given = {name: getattr(self, name) for name in PIPELINE_ARGUMENTS}
        given["device"] = "cpu" if self.device.type == "cpu" else "auto"
        if self.is_checkpointing and given["recompute"] is None:
            given["recompute"] = PLANNED["recompute"]  # the planner could choose none
        if not self.torch_compile:
            given["torch_compile_backend"] = None
        return PipelineConfig(**{name: value for name, value in given.items() if value is not None})

    def planned(self, inputs: PlanInputs) -> PlanInputs:
        """Add to the planner's inputs what a step does beside its table."""
        return inputs

    @property
    def token_loss(self) -> TokenLoss:
        """The cross-entropy with the options of these arguments."""
        return TokenLoss.from_settings(self)

    def make_loss(self) -> Loss | None:
        """The loss that these arguments ask for; None: the cross-entropy."""
        return None

    @property
    def size(self) -> BatchSize:
        """The size of a mini-batch of the training, and of its steps."""
        return BatchSize(self.per_device_train_batch_size, self.batch_tokens, self.gradient_accumulation_steps)

    @property
    def sorts_rows(self) -> bool:
        """Whether rows of similar length share a mini-batch and a micro-batch."""
        return self.train_sampling_strategy == "group_by_length"

    @property
    def of_text(self) -> list[str]:
        """The names of the given arguments that a model of text alone can have."""
        names = ("batch_tokens", "neftune_noise_alpha", "predict_with_generate")
        return [name for name in names if getattr(self, name)] + ["train_sampling_strategy"] * self.sorts_rows

    @property
    def packs_rows(self) -> bool:
        """Whether micro-batches are rows of documents without padding."""
        return bool(self.packing)

    @property
    def autocast(self) -> torch.dtype | None:
        """The half precision that forwards compute in, if any."""
        return None if self.half_precision is None else getattr(torch, self.half_precision)

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

    def _refuse_unless_default(self, library_s: Field[Any]) -> None:
        name = library_s.name
        default = library_s.default if library_s.default_factory is MISSING else library_s.default_factory()
        value = getattr(self, name)
        settled = [known[name] for known in (self._settled, _SETTLED) if name in known]
        accepted = (default, *HARMLESS_ARGUMENTS.get(name, ()), *settled)
        parts = [one for one in accepted if isinstance(one, dict) and isinstance(value, dict)]
        if value not in accepted and not any(value.items() <= one.items() for one in parts) and (default or value):
            raise UserError(f"{name}={value!r} is not supported by a pipeline ({REFUSED[name]}); leave it out")

    # What the library derives from accelerate's state, which would start a process group of its own.

    @property
    def device(self) -> torch.device:
        """The device on which this process computes."""
        if self.use_cpu or os.environ.get("ACCELERATE_USE_CPU", "").lower() not in HARMLESS_VALUES:
            return torch.device("cpu")
        if not torch.cuda.is_available():
            return torch.device("cpu")
        # It has no number: the pipeline chooses the device once the process has joined its job.
        return torch.device("cuda")

    @property
    def n_gpu(self) -> int:
        """The number of devices that the library may split a mini-batch over: 1, the process's own, or 0 on the CPU."""
        return 1 if self.device.type == "cuda" else 0

    @property
    def parallel_mode(self) -> ParallelMode:
        return ParallelMode.DISTRIBUTED if self.world_size > 1 else ParallelMode.NOT_PARALLEL

    @property
    def world_size(self) -> int:
        """The number of processes of the pipeline."""
        return dist.get_world_size() if dist.is_initialized() else 1

    @property
    def process_index(self) -> int:
        """The rank of this process."""
        return dist.get_rank() if dist.is_initialized() else 0

    @property
    def local_process_index(self) -> int:
        """The rank of this process on its machine, or among all processes where no launcher says it."""
        return dist.get_node_local_rank(fallback_rank=dist.get_rank()) if dist.is_initialized() else 0

    @contextmanager
    def main_process_first(self, local: bool = True, desc: str = "work") -> Iterator[None]:
        """Run a block in the main process before the others run it, however long it takes.

        No process waits before the processes have joined.

        Args:
            local: whether the first process of each machine counts as a main process.
            desc: the work, for the library's signature.
        """
        is_first = (self.local_process_index if local else self.process_index) == 0
        with World.current().working():
            if is_first:
                yield
        if not is_first:
            yield


#: The keys of `PipelineConfig` that are arguments too.
PIPELINE_ARGUMENTS = tuple(
    name for name in keys_of(PipelineConfig) if name in PipelineTrainingArguments.__dataclass_fields__
)


@cache
def _limits() -> dict[str, Any]:
    """The limits of arguments, as annotations or the keys of their names say; a default of None is allowed too."""
    cls, keys = PipelineTrainingArguments, keys_of(TrainingSection)
    hints, types = get_type_hints(cls, include_extras=True), get_type_hints(cls)
    limits = {name: key.allowed for name, key in keys.items() if name in cls.__annotations__}
    said = {name: hints[name] for name in cls.__annotations__ if hints[name] != types[name]}
    without_none = {name: get_args(hint)[0] for name, hint in said.items() if NoneType in get_args(hint)}
    return limits | said | without_none

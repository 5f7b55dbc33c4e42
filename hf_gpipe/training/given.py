"""A Pipeline that is given to a trainer: arguments must agree with its settings, or an error is raised.

A pipeline's own arguments are None where they are not given, so whatever is given is compared, also a value that equals
a default. The default of an argument of transformers counts as not given, because it cannot be told from a value.

The seed decides two things. Dropout reads it in each step, so the trainer's seed counts for it, as it does for
transformers' Trainer, unless the Pipeline was given a seed. New weights were made with the Pipeline's seed, so
another seed comes too late.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import TrainingArguments

from hf_gpipe.errors import UserError
from hf_gpipe.losses.vocabulary import SETTINGS
from hf_gpipe.partition import partition as cut
from hf_gpipe.pipeline import Pipeline
from hf_gpipe.training.arguments import PIPELINE_ARGUMENTS, PipelineTrainingArguments

Values = Callable[[Pipeline], tuple[Any, ...]]
"""A Pipeline -> the values of an argument that agree with it; the first value is shown in messages."""


def _field(name: str) -> Values:
    """Make the function that gives the value of a field of the configuration, and the value that was asked for."""
    return lambda pipe: (getattr(pipe.config, name), getattr(pipe.given, name))


def _of_loss(name: str) -> Values:
    return lambda pipe: (getattr(pipe.loss.of_tokens, name),)


def _partition(pipe: Pipeline) -> tuple[Any, ...]:
    sizes = tuple(map(len, pipe.partition))
    counted = cut(sum(sizes), pipe.num_stages, "count", divides_head=pipe.config.divides_head)
    return sizes, pipe.given.partition, *(["count"] if tuple(map(len, counted)) == sizes else [])


def _half(name: str) -> Values:
    return lambda pipe: (pipe.adapter.autocast is not None and str(pipe.adapter.autocast.dtype) == f"torch.{name}",)


def _recomputes(pipe: Pipeline) -> tuple[Any, ...]:
    """Whether every stage recomputes something."""
    chosen = pipe.recompute
    return ({"none", "host"}.isdisjoint((chosen,) if isinstance(chosen, str) else chosen),)


#: The arguments that a given Pipeline decides. tests/training/test_given.py lists all other arguments.
COMPARED: dict[str, Values] = {
    **{name: _field(name) for name in PIPELINE_ARGUMENTS},
    "partition": _partition,
    "memory": lambda pipe: (pipe.config.memory_bytes,),
    # The arguments name the default backend as soon as they ask for torch.compile.
    "torch_compile_backend": lambda pipe: (pipe.config.compiled.backend,),
    "packing": lambda pipe: (pipe.packing,),
    **{name: _of_loss(own) for name, own in SETTINGS.items()},
    "bf16": _half("bfloat16"),
    "fp16": _half("float16"),
    "activation_checkpointing": _recomputes,
    "gradient_checkpointing": _recomputes,
    "train_sampling_strategy": lambda pipe: ("group_by_length",) if pipe.length_bucketing else ("random", "sequential"),
    "use_cpu": lambda pipe: (pipe.world.device.type == "cpu",),
}
#: Arguments -> what a Pipeline has in their place, in words.
_OF_PIPELINE: dict[str, Callable[[Pipeline], str]] = {
    **dict.fromkeys(
        ("activation_checkpointing", "gradient_checkpointing"), lambda pipe: f"recompute={pipe.recompute!r}"
    ),
    **dict.fromkeys(
        ("bf16", "fp16"), lambda pipe: f"autocast={pipe.adapter.autocast and pipe.adapter.autocast.dtype!r}"
    ),
    "train_sampling_strategy": lambda pipe: f"length_bucketing={pipe.length_bucketing!r}",
    "use_cpu": lambda pipe: f"device={pipe.world.device.type!r}",
}


def take_given(pipe: Pipeline, args: PipelineTrainingArguments, **options: Any) -> None:
    """Raise UserError where the trainer's arguments differ from the given pipeline's settings.

    Args:
        pipe: the given pipeline; its dropout follows the trainer's seed from now on.
        args: the trainer's arguments.
        options: other arguments of the trainer that a pipeline decides; None: not given.
    """
    if given := [name for name, value in options.items() if value is not None]:
        raise UserError(
            f"{given[0]} is given, and the model is a Pipeline, which has its own; set it when the Pipeline is "
            "made (a compute_loss_func as loss=LogitsLoss(compute_loss_func))"
        )
    check_given(pipe, args)
    take_seed(pipe, args)


def check_given(pipe: Pipeline, args: PipelineTrainingArguments) -> None:
    """Raise UserError where the arguments differ from the given pipeline's settings."""
    for name, agreeing in COMPARED.items():
        if _is_asked(args, name) and (asked := _value(args, name)) not in (values := agreeing(pipe)):
            shown = _OF_PIPELINE.get(name, lambda _, value=values[0]: repr(value))(pipe)
            raise UserError(f"{name}={asked!r}, but the given Pipeline has {shown}; set it when the Pipeline is made")


def take_seed(pipe: Pipeline, args: PipelineTrainingArguments) -> None:
    """Let a given pipeline's dropout follow the arguments' seed, unless the pipeline was given a seed of its own.

    Raises:
        UserError: the arguments ask for another seed than the pipeline was given, or has made new weights with.
    """
    is_asked = _is_asked(args, "seed")
    if pipe.has_given_seed:
        if is_asked and args.seed != pipe.seed:
            raise UserError(
                f"seed={args.seed}, but the given Pipeline has seed={pipe.seed}; give both the same (data_seed is for "
                "the order of the rows alone)"
            )
        return
    if is_asked and pipe.weights_seed not in (None, args.seed):
        raise UserError(
            f"seed={args.seed}, but the given Pipeline has made new weights with seed={pipe.weights_seed}; give the "
            f"Pipeline seed={args.seed} too (data_seed is for the order of the rows alone)"
        )
    pipe.seed = args.seed


def _is_asked(args: PipelineTrainingArguments, name: str) -> bool:
    """Whether an argument of this name exists, and was given."""
    known = args.__dataclass_fields__
    if name not in known:  # of another release of transformers
        return False
    value = getattr(args, name)
    is_library_s = name in TrainingArguments.__dataclass_fields__
    return value is not None and not (is_library_s and value in (False, known[name].default))


def _value(args: PipelineTrainingArguments, name: str) -> Any:
    """The value of an argument, in the form of the configuration."""
    if name == "memory":
        return args.config.memory_bytes
    if name == "packing":
        return args.packs_rows
    value = getattr(args, name)
    return tuple(value) if isinstance(value, list) else value

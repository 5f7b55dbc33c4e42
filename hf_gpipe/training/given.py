"""A Pipeline that is given to a trainer: arguments must agree with its settings, or an error is raised.

A pipeline's own arguments are None where they are not given, so whatever is given is compared, also a value that equals
a default. The default of an argument of transformers counts as not given, because it cannot be told from a value.

The seed decides two things. Dropout reads it in each step, so the trainer's seed counts for it, as it does for
transformers' Trainer, unless the Pipeline was given a seed. New weights were made with the Pipeline's seed, so
another seed comes too late.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import TrainingArguments

from hf_gpipe.errors import UserError
from hf_gpipe.losses.vocabulary import SETTINGS
from hf_gpipe.partition import partition as cut
from hf_gpipe.pipeline import Pipeline
from hf_gpipe.training.arguments import PIPELINE_ARGUMENTS, PipelineTrainingArguments
from hf_gpipe.training.supported import SAMPLING


def decided_by(pipe: Pipeline) -> Mapping[str, tuple[Sequence[Any], str]]:
    """The arguments that a Pipeline decides: the values that agree with it, and what it has, in words.

    tests/training/test_given.py lists all other arguments.
    """
    config, given, autocast = pipe.config.values(), pipe.given.values(), pipe.adapter.autocast
    values: dict[str, list[Any]] = {name: [config[name], given[name]] for name in PIPELINE_ARGUMENTS}
    sizes = [len(layers) for layers in pipe.partition]
    counted = cut(sum(sizes), pipe.num_stages, "count", shares_last=pipe.config.shares_last_layer)
    values["partition"] += ["count"] * ([len(layers) for layers in counted] == sizes)
    values["memory"] = [pipe.config.memory_bytes]
    # The arguments name the default backend as soon as they ask for torch.compile.
    values["torch_compile_backend"] = [pipe.config.compiled.backend]
    values["packing"] = [pipe.packing]
    values |= {name: [getattr(pipe.loss.token_loss, own)] for name, own in SETTINGS.items()}

    modes = {pipe.recompute} if isinstance(pipe.recompute, str) else {*pipe.recompute}
    recomputes = [modes.isdisjoint({"none", "host"})], f"recompute={pipe.recompute!r}"
    dtype = None if autocast is None else autocast.dtype
    samplings = [name for name in SAMPLING if (name == "group_by_length") == pipe.length_bucketing]
    return {name: (agreeing, repr(agreeing[0])) for name, agreeing in values.items()} | {
        "bf16": ([dtype == torch.bfloat16], f"autocast={dtype!r}"),
        "fp16": ([dtype == torch.float16], f"autocast={dtype!r}"),
        "activation_checkpointing": recomputes,
        "gradient_checkpointing": recomputes,
        "train_sampling_strategy": (samplings, f"length_bucketing={pipe.length_bucketing!r}"),
        "use_cpu": ([pipe.world.device.type == "cpu"], f"device={pipe.world.device.type!r}"),
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
    for name, (agreeing, shown) in decided_by(pipe).items():
        if _is_asked(args, name) and (asked := _value(args, name)) not in agreeing:
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

"""The optimizer of a process's parameters, and its learning rate: they compute what one optimizer for all would."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel, Trainer, get_scheduler

from hf_gpipe.errors import StageError, UserError
from hf_gpipe.libraries.transformers_trainer import AdafactorSchedule
from hf_gpipe.pipeline import Pipeline
from hf_gpipe.runtime.shards import SETTING, treats_elements_alone
from hf_gpipe.training.arguments import PipelineTrainingArguments
from hf_gpipe.training.disk_state import DiskState
from hf_gpipe.training.master_weights import MasterWeights
from hf_gpipe.training.trainer_interface import TrainerInterface

logger = transformers.logging.get_logger(__name__)

Optimizer = torch.optim.Optimizer
Scheduler = torch.optim.lr_scheduler.LRScheduler


def make_optimizer(
    pipe: Pipeline,
    args: PipelineTrainingArguments,
    cls_and_kwargs: tuple[type[Optimizer], dict[str, Any]] | None = None,
    master_weights: MasterWeights | None = None,
    get_cls_and_kwargs: Callable[..., Any] = Trainer.get_optimizer_cls_and_kwargs,
    get_decayed: Callable[[PreTrainedModel], Collection[str]] | None = None,
) -> Optimizer:
    """Make an optimizer of this process's parameters. Weight decay spares the same parameters as in Trainer.

    Args:
        pipe: the pipeline.
        args: the arguments, of which `optim` and its settings are read.
        cls_and_kwargs: another class and its arguments, in place of `args.optim`.
        master_weights: the copies to update in place of the parameters.
        get_cls_and_kwargs: (arguments, None) -> the class that they ask for and its arguments.
        get_decayed: model of a stage -> the names of the parameters that weight decay is for; None: Trainer's function.

    Raises:
        UserError: the class does not take these arguments.
    """
    try:
        cls, kwargs = cls_and_kwargs or get_cls_and_kwargs(args, None)
    except ValueError as error:
        text = f"optim={_word(args.optim)!r} does not take optim_args={args.optim_args!r}: {error}"
        raise UserError(f"{text}; give it as name=value,name=value") from error
    get_decayed = get_decayed or partial(Trainer.get_decay_parameter_names, None)
    # The names come from the stages' models, since the kind of a module decides as well as its parameter's name, and a
    # stage's model has the modules that PEFT has put there.
    models = [model for stage in pipe.models.values() for model in stage.models]
    decays = {name for model in models for name in get_decayed(model)}
    named = pipe.named_parameters() if master_weights is None else master_weights.copies.items()
    trainable = [(name, p) for name, p in named if p.requires_grad]
    groups = [
        {"params": [p for name, p in trainable if name in decays], "weight_decay": args.weight_decay},
        {"params": [p for name, p in trainable if name not in decays], "weight_decay": 0.0},
    ]
    try:
        optimizer = cls(groups, **kwargs)
    except (TypeError, ValueError) as error:
        given = {name: value for name, value in kwargs.items() if isinstance(value, bool | int | float | str | tuple)}
        raise UserError(f"{cls.__name__} does not take {given}: {error}; change these arguments") from error
    if master_weights is not None:
        master_weights.serve(optimizer)
    if kwargs.get("optim_bits") == 8:
        _keep_embeddings_exact(pipe)
    return optimizer


def _keep_embeddings_exact(pipe: Pipeline) -> None:
    """Let an 8-bit optimizer keep the state of embeddings in 32 bits, as transformers' Trainer does."""
    from bitsandbytes.optim import GlobalOptimManager

    for stage_model in pipe.models.values():
        for module in stage_model.model.modules():
            if isinstance(module, torch.nn.Embedding):
                GlobalOptimManager.get_instance().register_module_override(module, "weight", {"optim_bits": 32})


def shard_optimizer(trainer: TrainerInterface) -> None:
    """Let the replicas of a stage share the steps of its optimizer and its state, if the pipeline's `zero` is 1.

    Raises:
        UserError: the class of the optimizer is not known to treat each parameter alone, or each element alone
            where processes have parts of a parameter; or the scheduler reads state that another replica has.
    """
    optimizer, division = trainer.made_optimizer(), trainer.pipe.config.division
    if not (division.is_whole or treats_elements_alone(optimizer, division.text)):
        raise UserError(
            f"{division.text} and the optimizer is {type(optimizer).__name__}, whose update of an element depends on "
            "others of its parameter, which other processes have; use one like AdamW, or leave that setting out"
        )
    shards = trainer.pipe.weights.shards_of(optimizer)
    if shards is None:
        return
    if isinstance(trainer.lr_scheduler, AdafactorSchedule):
        raise UserError(
            f"{SETTING} and the scheduler is AdafactorSchedule, which reads the optimizer's state of parameters that "
            "another replica may update: leave that setting out, or use another scheduler, such as lr_scheduler_type "
            "constant"
        )
    if trainer.master_weights is not None:
        trainer.master_weights.shard(shards, optimizer)
    else:
        shards.serve(optimizer)


def keep_state_on_disk(trainer: TrainerInterface) -> None:
    """Move the optimizer's state to the disk, if the arguments ask for it. Raises UserError where that is not possible.

    A second call does nothing.
    """
    folder, optimizer, masters = trainer.args.optimizer_state_dir, trainer.made_optimizer(), trainer.master_weights
    if folder is None or (trainer.disk_state is not None and trainer.disk_state.optimizer is optimizer):
        return
    # Copies of the weights are cut already.
    shards = trainer.pipe.weights.shards_of(optimizer) if masters is None else None
    trained = {name: p for name, p in updated_parameters(trainer).items() if p.requires_grad and p.numel()}
    values = {p: p.data if shards is None else shards.own(name, p.data) for name, p in trained.items()}
    trainer.disk_state = DiskState(optimizer, folder, {p: own for p, own in values.items() if own is not None})


def updated_parameters(trainer: TrainerInterface) -> dict[str, torch.nn.Parameter]:
    """The parameters that the optimizer of this process updates, by name."""
    masters = trainer.master_weights
    return dict(trainer.pipe.weights.named_parameters()) if masters is None else masters.copies


def step_stage(trainer: TrainerInterface, stage: int, options: Sequence[Mapping[str, Any]] | None = None) -> None:
    """Step the optimizer for the parameters of a stage alone, while other gradients may come and go in another thread.

    Other parameters are hidden behind parameters without gradient, so that each parameter keeps its place in its group.

    Args:
        trainer: the trainer.
        stage: the stage.
        options: the options of each group, such as its learning rate; None: the present ones.
    """
    updated, optimizer = updated_parameters(trainer), trainer.made_optimizer()
    own = {updated[name] for name in trainer.pipe.weights.names_of(stage) if name in updated}
    absent, groups = torch.nn.Parameter(torch.empty(0)), optimizer.param_groups
    optimizer.param_groups = [
        {**own_options, "params": [parameter if parameter in own else absent for parameter in group["params"]]}
        for group, own_options in zip(groups, options or groups, strict=True)
    ]
    try:
        optimizer.step()
    finally:
        optimizer.param_groups = groups


def step_all(trainer: TrainerInterface) -> None:
    """Step the optimizer. Where master weights are on a disk, one stage follows another, so that only one stage has
    gradients of master weights in memory at a time; replicas that share updates step together."""
    optimizer, weights = trainer.made_optimizer(), trainer.pipe.weights
    by_stage = trainer.disk_state is not None and trainer.master_weights is not None
    if not by_stage or weights.shards_of(optimizer) is not None:
        optimizer.step()
        return
    for stage in weights.models:
        step_stage(trainer, stage)


def step_late(trainer: TrainerInterface, number: int) -> None:
    """Do what `step_all` does, but let the stages whose trained weights visit wait for the next step's forwards.

    Args:
        trainer: the trainer. What an update reads is as it is now: the gradients, the learning rate, the loss's scale.
        number: of this step, for an error of a stage's update.
    """
    late, groups = trainer.pipe.weights.late, trainer.made_optimizer().param_groups
    options = [
        {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in group.items()}
        for group in groups
    ]

    def update(stage: int, gradients: Mapping[torch.nn.Parameter, torch.Tensor]) -> None:
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        try:
            step_stage(trainer, stage, options)
        except Exception as error:
            raise StageError(f"stage {stage}, update of step {number}: {type(error).__name__}: {error}") from error
        finally:
            for parameter in gradients:
                parameter.grad = None

    for stage, parameters in late.parameters.items():
        gradients = {parameter: parameter.grad for parameter in parameters if parameter.grad is not None}
        for parameter in gradients:
            parameter.grad = None
        late.add(stage, partial(update, stage, gradients))
    step_all(trainer)


def check_optimizer(optimizer: Optimizer, parameters: Iterable[torch.nn.Parameter]) -> None:
    """Raise UserError unless an optimizer holds exactly the trainable parameters of this process's `parameters`."""
    held = {p for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    wanted = {p for p in parameters if p.requires_grad}
    if held != wanted:
        raise UserError(
            f"optimizers: the optimizer holds {len(held & wanted)} of the {len(wanted)} trainable parameters of this "
            f"process's stages and {len(held - wanted)} others; make a Pipeline first, the optimizer of "
            "pipe.parameters(), and pass that pipeline as model; or pass optimizer_cls_and_kwargs"
        )


def prepare_optimizer(trainer: TrainerInterface, num_steps: int) -> Optimizer:
    """Make the optimizer and its scheduler for so many updates, where they do not exist yet, and check both.

    Raises UserError where they do not fit the model.
    """
    trainer.create_optimizer_and_scheduler(num_steps)
    if trainer.optimizer is None or trainer.lr_scheduler is None:
        missing = "optimizer" if trainer.optimizer is None else "lr_scheduler"
        raise UserError(f"there is no {missing}: create_{missing.removeprefix('lr_')} has to set trainer.{missing}")
    for group in trainer.optimizer.param_groups:
        # Parameters of other processes are left out, where it was made of all parameters of the whole model.
        group["params"] = [parameter for parameter in group["params"] if not parameter.is_meta]
    check_optimizer(trainer.optimizer, updated_parameters(trainer).values())
    trainer.optimizer.register_state_dict_pre_hook(lambda _: trainer.pipe.weights.late.make())
    warn_of_lost_updates(trainer)
    shard_optimizer(trainer)
    if trainer.master_weights is not None:
        trainer.master_weights.restore(trainer.optimizer)
    keep_state_on_disk(trainer)
    return trainer.optimizer


#: Elements of a parameter that are looked at, at most.
_NUM_SAMPLED = 2**14


def warn_of_lost_updates(trainer: TrainerInterface) -> None:
    """Warn if rounding would lose the updates of most elements that are trained. Every process calls it.

    Adam, and optimizers like it, change an element by about the learning rate. In bfloat16, which has 8 bits of
    precision, a change below 2^-9 of the element is rounded away; in float16 it is one below 2^-12.
    """
    counts = torch.zeros(2, dtype=torch.float64)
    for group in trainer.made_optimizer().param_groups:
        rate = group.get("initial_lr", group.get("lr"))
        # The updates of SGD depend on the size of the gradients, and those of some Adafactors on the weights'.
        is_known = bool({"betas", "alpha"} & group.keys()) or group.get("scale_parameter") is False
        for parameter in group["params"] if is_known and rate else ():
            num_elements = parameter.numel()
            elements = parameter.detach().flatten()[:: -(-num_elements // _NUM_SAMPLED) or 1].abs()
            counts[0] += num_elements
            if num_elements and parameter.dtype in (torch.bfloat16, torch.float16):
                is_lost = elements * (torch.finfo(parameter.dtype).eps / 4) > rate
                counts[1] += num_elements * float(is_lost.double().mean())
    of_all, of_lost = trainer.world.all_reduce(counts).tolist()
    if of_lost > of_all / 2 and trainer.world.is_main:
        logger.warning(
            f"learning_rate={trainer.args.learning_rate:g}: {of_lost / of_all:.0%} of the elements of the trained "
            "weights are in half precision and so large that rounding loses updates of this size; set "
            "fp32_master_weights=True, or read the model in float32 (dtype='float32') and set bf16=True"
        )


def check_optimizers(
    optimizer: Optimizer | None, scheduler: Scheduler | None, master_weights: MasterWeights | None, pipe: Pipeline
) -> None:
    """Raise UserError where the given optimizer and scheduler cannot be used."""
    if optimizer is not None:
        check_optimizer(optimizer, pipe.parameters())
        if master_weights is not None:
            asked = master_weights.asked_by
            raise UserError(f"optimizers: {asked} needs an optimizer that the trainer makes; leave one out")
    elif scheduler is not None:
        raise UserError("optimizers: a scheduler needs its optimizer; give both or leave both out")


def make_scheduler(args: PipelineTrainingArguments, optimizer: Optimizer, max_steps: int) -> Scheduler:
    """The learning rate's schedule over `max_steps` updates. It sees no gradients, so it is the same everywhere."""
    try:
        return get_scheduler(
            args.lr_scheduler_type,
            optimizer=optimizer,
            num_warmup_steps=args.get_warmup_steps(max_steps),
            num_training_steps=max_steps,
            scheduler_specific_kwargs=args.lr_scheduler_kwargs,
        )
    except (TypeError, ValueError) as error:
        raise UserError(
            f"lr_scheduler_type {_word(args.lr_scheduler_type)!r} does not take lr_scheduler_kwargs="
            f"{args.lr_scheduler_kwargs} and warmup_steps={args.warmup_steps}: {error}; change these arguments"
        ) from error


def _word(value: Any) -> str:
    """The written form of an argument whose values are an enumeration of the library."""
    return str(getattr(value, "value", value))


def set_rates(optimizer: Optimizer, scheduler: Scheduler | None) -> None:
    """Give the next update the learning rate that the schedule has for it.

    A resumed training may have another number of updates than when it was saved. The saved rate is from the old
    schedule, and is 0 at the end of that schedule.
    """
    if isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR):
        rates = zip(optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
        for group, base, factor in rates:
            group["lr"] = base * factor(scheduler.last_epoch)


def takes_metric(scheduler: Any) -> bool:
    """Whether a scheduler steps with a metric of evaluations, and not with every update."""
    return "metrics" in inspect.signature(scheduler.step).parameters

"""The section `training` of a recipe."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from hf_gpipe.errors import UserError
from hf_gpipe.recipe.batch_size import BatchSize
from hf_gpipe.settings.kinds import OF_ROWS_ALONE, OF_TEXT, PACKED, uses
from hf_gpipe.settings.optimizers import OPTIMIZERS
from hf_gpipe.settings.section import (
    MAY_CHANGE,
    Count,
    CountOrZero,
    Fraction,
    NotNegative,
    Place,
    Positive,
    Settings,
    Text,
    one_of,
    refuse_given,
)
from hf_gpipe.text import show


class TrainingMeaning:
    """The meaning of keys of `training`, which arguments of a trainer have by the same names."""

    if TYPE_CHECKING:  # a parser of a command line would take these types for those of the arguments
        bf16: Any
        fp16: Any
        fp16_accumulation: Any
        max_grad_norm: Any
        on_nonfinite_loss: Any

    @property
    def half_precision(self) -> str | None:
        """The type that forwards compute in under autocast; None: there is no autocast."""
        return "bfloat16" if self.bf16 else "float16" if self.fp16 else None

    def check_accumulation(self) -> None:
        """Raise UserError where products are to sum in float16, and are not computed in it with a scaled loss."""
        if self.fp16_accumulation and not self.fp16:
            raise UserError(
                "fp16_accumulation is true and fp16 is false, so no product is in float16; set fp16 to true, or leave "
                "fp16_accumulation out"
            )

    @property
    def clips(self) -> bool:
        """Whether a gradient may be scaled down."""
        return (self.max_grad_norm or 0) > 0

    @property
    def needs_norm(self) -> bool:
        """Whether an update needs the loss or the norm of the whole gradient."""
        return self.clips or bool(self.fp16) or self.on_nonfinite_loss == "skip"


class TrainingSection(TrainingMeaning, Settings):
    """Optimization, logging and checkpoints; names have their meaning in transformers.TrainingArguments."""

    output_dir: Annotated[Place, MAY_CHANGE]
    """Directory for the trained model, checkpoints, metrics and the resolved recipe."""

    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = 0
    """Seed of the initial weights, of dropout and of the order of examples; independent of the number of stages."""

    max_steps: Annotated[Count | None, MAY_CHANGE] = None
    """Number of optimizer steps; null: `num_train_epochs` decides."""

    num_train_epochs: Annotated[Positive, MAY_CHANGE] = 3.0
    """Number of epochs, if `max_steps` is null."""

    batch_size: Count = 32
    """Number of examples in a mini-batch of the training, and of evaluations during the training."""

    batch_tokens: Annotated[Count | None, PACKED] = None
    """Approximate number of target tokens per training mini-batch, instead of `batch_size`; null: use `batch_size`."""

    gradient_accumulation_steps: Count = 1
    """Number of mini-batches whose gradients are accumulated before an update."""

    length_bucketing: Annotated[bool, OF_TEXT] = True
    """Whether examples of similar length share a mini-batch and a micro-batch, which saves padding."""

    packing: Annotated[bool, PACKED] = False
    """Whether the rows of a training mini-batch are packed: each micro-batch is one row of whole examples without
    padding. Examples do not attend to each other, and loss and gradients stay the same. Models that cannot keep
    examples apart are not supported."""

    learning_rate: NotNegative = 5e-5
    """Peak learning rate."""

    lr_scheduler_type: Literal[
        "linear",
        "cosine",
        "cosine_with_restarts",
        "polynomial",
        "constant",
        "constant_with_warmup",
        "inverse_sqrt",
        "warmup_stable_decay",
    ] = "linear"
    """Schedule of the learning rate after the warm-up. warmup_stable_decay: constant, and at the end it falls over
    `decay_steps`."""

    decay_steps: Annotated[CountOrZero, MAY_CHANGE] = 0
    """With warmup_stable_decay: number of optimizer steps at the end over which the learning rate falls to 0, by a
    cosine."""

    warmup_steps: NotNegative = 0.0
    """Number of optimizer steps over which the learning rate rises from 0; a value below 1 is a share of all steps."""

    optim: Annotated[str, one_of(*OPTIMIZERS)] = "adamw_torch_fused"
    """The optimizer. Those of 8 or 32 bits, in pages or not, ademamix and rmsprop_bnb need the package bitsandbytes."""

    weight_decay: NotNegative = 0.0
    """Weight decay of all parameters except biases and norms; AdamW and Adafactor decouple it from the gradient."""

    adam_beta1: Fraction = 0.9
    """Decay of Adam's first moment."""

    adam_beta2: Fraction = 0.999
    """Decay of Adam's second moment."""

    adam_epsilon: NotNegative = 1e-8
    """Epsilon in the denominator of Adam's update."""

    bf16: bool = False
    """Whether forwards run under autocast in bfloat16; weights and gradients keep `model.dtype`."""

    fp16: bool = False
    """Whether forwards run under autocast in float16, with one loss scale for all stages. The weights are in float32,
    or in float16 with `fp32_master_weights` or under adapters."""

    fp16_accumulation: bool = False
    """With fp16: whether products also sum in float16, which is up to twice as fast on GeForce cards and less exact.
    Other devices gain nothing, and refuse it."""

    fp32_master_weights: bool = False
    """Whether the optimizer updates float32 copies of bfloat16 or float16 weights."""

    offload_optimizer: Annotated[bool, MAY_CHANGE] = False
    """Whether the optimizer's state is in CPU memory, where copies of the weights are updated: for GPUs that have too
    little memory for it. A step then waits for the CPU's update and for the copies of gradients and weights."""

    optimizer_state_dir: Annotated[Place | None, MAY_CHANGE] = None
    """Folder on a fast disk of each machine, in whose files the optimizer's state and master weights are that would be
    in CPU memory: with `offload_optimizer`, with `offload_weights: all`, and on a CPU. Updates then read and write the
    files; what CPU memory has room for stays in the operating system's cache. The files have no names, and are gone
    when the run ends. null: they are in CPU memory."""

    on_nonfinite_loss: Annotated[Literal["ignore", "skip", "stop"], MAY_CHANGE] = "ignore"
    """Action if a step's loss or gradient is inf or NaN. ignore: update anyway, as transformers' Trainer does; skip: no
    update, on all stages; stop: fail."""

    max_grad_norm: NotNegative = 1.0
    """Maximum norm of the gradient over all stages; a larger gradient is scaled down to it; 0: no clipping."""

    label_smoothing_factor: Annotated[Fraction, OF_ROWS_ALONE] = 0.0
    """Share of the target's probability that is spread over the whole vocabulary."""

    logit_clipping: Annotated[Positive | None, OF_ROWS_ALONE] = None
    """Magnitude to which logits are clipped in the training loss, but not in evaluation or in the saved model; null: no
    clipping."""

    logging_steps: Annotated[Count, MAY_CHANGE] = 10
    """Number of optimizer steps between two lines of metrics."""

    timeline_steps: Annotated[Count | None, MAY_CHANGE] = 10
    """With several processes, every n-th optimizer step is timed to log its idle share (`bubble`); null: no step is
    timed."""

    slow_machine_steps: Annotated[Count | None, MAY_CHANGE] = 100
    """On several machines, the number of optimizer steps between two comparisons of the time that each machine
    computes. A message names a slow machine. Ten of these steps are timed. null: machines are not compared."""

    report_to: Annotated[list[Text], MAY_CHANGE] = Field(default_factory=list)
    """Services that get the metrics besides the console and metrics.jsonl, such as [tensorboard], [wandb] or [mlflow],
    by transformers' names."""

    run_name: Annotated[Text | None, MAY_CHANGE] = None
    """Name of the run in these services; null: the service's own."""

    push_to_hub: Annotated[bool, MAY_CHANGE] = False
    """Whether the trained model and the model of each checkpoint are uploaded to the Hugging Face Hub."""

    hub_model_id: Annotated[Text | None, MAY_CHANGE] = None
    """Repository of the upload, such as me/model, which is made if it does not exist; null: named like `output_dir`."""

    hub_private_repo: Annotated[bool | None, MAY_CHANGE] = None
    """Whether a repository that is made is private; null: the account's default."""

    eval_steps: Annotated[Count | None, MAY_CHANGE] = None
    """Number of optimizer steps between two evaluations of the validation loss; null: none during training."""

    save_steps: Annotated[Count | None, MAY_CHANGE] = 500
    """Number of optimizer steps between two checkpoints; null: none during training."""

    save_total_limit: Annotated[Count | None, MAY_CHANGE] = 2
    """Number of checkpoints to keep, the newest ones; null: all."""

    load_best_model_at_end: Annotated[bool, MAY_CHANGE] = False
    """Whether the result is the model of the checkpoint with the least validation loss instead of the last model;
    `save_steps` and `eval_steps` must then be equal."""

    save_in_background: Annotated[Literal["auto", "always", "never"], MAY_CHANGE] = "auto"
    """Whether a checkpoint is copied to CPU memory and written while training goes on. auto: if the copies take at most
    half of the available memory, and no callback of the script has an `on_save`."""

    stop_seconds: Annotated[Positive, MAY_CHANGE] = 30.0
    """Seconds that a training has after SIGTERM or SIGINT to end its step and save; then it ends without saving."""

    resume: Annotated[Literal["auto", "never"], MAY_CHANGE] = "auto"
    """auto: resume from the newest valid checkpoint in `output_dir`, if there is one; never: start from scratch and
    delete the checkpoints in `output_dir`."""

    @property
    def size(self) -> BatchSize:
        """The size of a mini-batch and of a step of the training."""
        return BatchSize(self.batch_size, self.batch_tokens, self.gradient_accumulation_steps)

    def sorts_rows(self, kind: str) -> bool:
        """Whether rows of similar length share a mini-batch, where the data are of this kind; images are all alike."""
        return self.length_bucketing and uses(kind, OF_TEXT)

    def model_post_init(self, context: Any, /) -> None:
        if not self.push_to_hub:
            refuse_given(self, ("hub_model_id", "hub_private_repo"), "push_to_hub is false; set it to true")
        if not self.report_to:
            refuse_given(self, ("run_name",), "report_to is empty; name a service, such as [tensorboard]")
        if self.lr_scheduler_type != "warmup_stable_decay":
            why = f"lr_scheduler_type is {self.lr_scheduler_type}, which does not use it; use warmup_stable_decay"
            refuse_given(self, ("decay_steps",), why)
        if self.lr_scheduler_type == "constant":
            why = "lr_scheduler_type is constant, which has no warm-up; use constant_with_warmup"
            refuse_given(self, ("warmup_steps",), why)
        if not OPTIMIZERS[self.optim].has_betas:
            why = f"optim is {self.optim}, which does not use it; use adamw_torch_fused"
            refuse_given(self, ("adam_beta1", "adam_beta2", "adam_epsilon"), why)
        if self.bf16 and self.fp16:
            raise UserError("bf16 and fp16 are both true; set one of them to false.")
        self.check_accumulation()
        every, saved = self.eval_steps, self.save_steps
        if self.load_best_model_at_end and (every is None or saved != every):
            raise UserError(
                f"load_best_model_at_end is true, eval_steps is {show(every)} and save_steps is {show(saved)}; every "
                "model that is evaluated must have a checkpoint: set both to the same number."
            )

"""`PipelineTrainer`: transformers' Trainer, over a pipeline.

A class of its own with Trainer's constructor, methods, callbacks and files. All processes of the pipeline run it in
step: the main process reads the data, and the loss and the decisions of callbacks are shared, so that every process
logs, evaluates, saves and stops at the same step.
"""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers
from transformers import (
    EvalPrediction,
    PreTrainedModel,
    TrainerCallback,
    TrainerControl,
    enable_full_determinism,
    set_seed,
)

from hf_gpipe.checkpoint.lock import owned
from hf_gpipe.checkpoint.run_state import DataPosition, RunState
from hf_gpipe.errors import UserError
from hf_gpipe.job.calls import by_every_process
from hf_gpipe.libraries.transformers_trainer import CallbackHandler, TrainOutput
from hf_gpipe.losses.custom import loss_of_function
from hf_gpipe.losses.loss import Loss
from hf_gpipe.model.spec import ModelSpec
from hf_gpipe.pipeline import ModelSource, Pipeline
from hf_gpipe.runtime.device_choice import world_for
from hf_gpipe.training.arguments import PipelineTrainingArguments
from hf_gpipe.training.base import (
    align_special_tokens,
    callbacks_of,
    default_collator,
    join_with,
    loss_scaler,
    make_pipeline,
    options_of,
    restore_callbacks,
    set_up_model,
)
from hf_gpipe.training.checkpoints import Checkpoints
from hf_gpipe.training.evaluating_trainer import EvaluatingTrainer
from hf_gpipe.training.given import take_given
from hf_gpipe.training.hub import HubUploads
from hf_gpipe.training.loader import Collate
from hf_gpipe.training.logs import Logs
from hf_gpipe.training.loop import TrainingLoop
from hf_gpipe.training.master_weights import MasterWeights
from hf_gpipe.training.optim import (
    check_optimizer,
    check_optimizers,
    make_optimizer,
    make_scheduler,
    shard_optimizer,
    updated_parameters,
    warn_of_lost_updates,
)
from hf_gpipe.training.predicting import Preprocess
from hf_gpipe.training.steps import TrainingLength, data_facts
from hf_gpipe.training.surface import Surface
from hf_gpipe.training.windows import check_asynchronous


class PipelineTrainer(EvaluatingTrainer):
    """Trains a model in stages, with the interface of transformers' Trainer.

    Under torchrun or `accelerate launch` every process makes the same trainer and calls the same methods. Only the main
    process reads data: the other processes may pass None for datasets. Without a launcher one process has all stages.

    Args:
        model: a PreTrainedModel, a configuration, a Hub id or directory, or a Pipeline, whose own settings then count.
        args: the arguments; None: all defaults.
        data_collator: rows -> a mini-batch, a dict of tensors with `input_ids` and `labels`; None: Trainer's default.
        train_dataset: the dataset to train on, map-style or iterable.
        eval_dataset: the dataset to evaluate on, map-style or iterable, or a dict of several by name.
        processing_class: the tokenizer; it is saved with the model.
        model_init: a function that makes the model, where `model` is None; each training calls it anew.
        compute_loss_func: (outputs, labels, num_items_in_batch=...) -> the loss, in place of the cross-entropy. It is
            called for each micro-batch, and the results are added up: it must be a sum over tokens or rows, divided by
            `num_items_in_batch`, the number of target tokens of the whole step. `outputs` has only the logits (B, T,
            V), which are then in memory in one piece. Give a function that compares neighbouring rows as
            LogitsLoss(function, rows_per_unit=...). Another `Loss` is accepted too.
        compute_metrics: EvalPrediction with the predictions of all rows -> metrics. It is called in the process of the
            last stage's first replica.
        callbacks: the callbacks, which are called in every process, with `Pipeline.model` as `model`.
        optimizers: an optimizer of `pipe.parameters()` and its scheduler, in place of what `args` asks for.
        optimizer_cls_and_kwargs: a class of optimizer and its arguments, in place of `args.optim`.
        preprocess_logits_for_metrics: a function that reduces the logits (B, T, V) of a micro-batch before they are
            stored, such as to their argmax.
        peft_config, quantization_config: the arguments of `Pipeline` with these names.

    Raises:
        UserError: an argument that is not supported, by its name.
    """

    #: The class of the trainer's arguments.
    _arguments: ClassVar[type[PipelineTrainingArguments]] = PipelineTrainingArguments

    def __init__(
        self,
        model: Pipeline | ModelSource | None = None,
        args: PipelineTrainingArguments | None = None,
        data_collator: Collate | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[[], PreTrainedModel] | None = None,
        compute_loss_func: Callable[..., Any] | Loss | None = None,
        compute_metrics: Callable[[EvalPrediction], dict[str, Any]] | None = None,
        callbacks: list[TrainerCallback | type[TrainerCallback]] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LRScheduler | None] = (None, None),
        optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Preprocess | None = None,
        peft_config: Any = None,
        quantization_config: Any = None,
    ) -> None:
        self._surface.check_class(type(self))
        self.args = args if args is not None else self._arguments()
        if not isinstance(self.args, self._arguments):
            expected = self._arguments.__name__
            raise UserError(f"args is a {type(args).__name__}; {type(self).__name__} needs a {expected}")
        # The arguments may have been changed since, by args.set_training(...) and the like.
        self.args.check()
        transformers.logging.set_verbosity(self.args.get_process_log_level())
        parameters = {} if compute_metrics is None else inspect.signature(compute_metrics).parameters
        if self.args.batch_eval_metrics and compute_metrics is not None and "compute_result" not in parameters:
            raise UserError(
                "batch_eval_metrics=True calls compute_metrics for each mini-batch, with compute_result=True for the "
                "last; give the function that parameter, or leave batch_eval_metrics out"
            )
        if (model is None) == (model_init is None):
            raise UserError("give either model or model_init")
        self._set_seed()
        self.job = join_with(
            self.args,
            optimizer=options_of(optimizers[0]),
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
        )
        self.model_init = model_init
        self.processing_class = processing_class
        self.data_collator = data_collator
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        model = self.call_model_init() if model is None else model
        self._given_loss = loss_of_function(compute_loss_func)
        self._model_options = {"peft_config": peft_config, "quantization_config": quantization_config}
        self.world = model.world if isinstance(model, Pipeline) else world_for(self.args.config)
        self._prepare_data(model)
        self._set_model(model)
        self.compute_metrics = compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self.optimizer = optimizers[0]
        self.lr_scheduler = optimizers[1]
        check_optimizers(*optimizers, self.master_weights, self.pipe)
        self._makes_scheduler = self.lr_scheduler is None
        self.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs

        self.callback_handler = CallbackHandler(
            callbacks_of(self.args, callbacks or []),
            self.model,
            self.processing_class,
            self.optimizer,
            self.lr_scheduler,
        )
        self.uploads = HubUploads(self.args, self.world)
        if self.args.push_to_hub:
            self.init_hf_repo()
        self.control = TrainerControl()
        self.state = self.new_state()
        self._is_in_train = False
        self.fire("on_init_end")

    # ------------------------------------------------------------------ parts of the constructor

    def _set_seed(self) -> None:
        (enable_full_determinism if self.args.full_determinism else set_seed)(self.args.seed)

    def _set_model(self, model: Any) -> None:
        """Make the pipeline of a model, or take a given one, and make what depends on its weights."""
        loss, options = self._given_loss, self._model_options
        if isinstance(model, Pipeline):
            init_kwargs = getattr(self.args, "model_init_kwargs", None)
            take_given(model, self.args, loss=loss, model_init_kwargs=init_kwargs, **options)
            self.pipe = model
        else:
            source, own = self._source(model)
            if twice := [name for name in own if options.get(name) is not None]:
                raise UserError(
                    f"{twice[0]} is an argument of the trainer and in model_init_kwargs; leave one of them out"
                )
            options = own | {name: value for name, value in options.items() if value is not None}
            spec = ModelSpec.of(source, autocast=self.args.autocast, **options)
            loss = self.args.make_loss() if loss is None else loss
            self.pipe = make_pipeline(spec, self.args, lambda: self._example(spec), self.world, loss)
        self.world = self.pipe.world
        #: The function that has made the weights, as long as they are not trained.
        self._untrained_init = self.model_init
        set_up_model(self.pipe, self.args)
        self._take_pipeline()
        self.scaler = loss_scaler(self.pipe)
        self.master_weights = MasterWeights.of(self.args, self.pipe)

    def _init_model_anew(self) -> None:
        """Begin with the weights that `model_init` makes, as Trainer does in each training."""
        if self.model_init is not None and self.model_init is not self._untrained_init:
            self._set_seed()
            self._set_model(self.call_model_init())
            self.optimizer = self.lr_scheduler = None
            self.callback_handler.model = self.model
        self._untrained_init = None

    def _prepare_data(self, model: Any) -> None:
        """Prepare the datasets for a model or a Pipeline, and the collator. Every process calls it."""
        if self.data_collator is None:
            self.data_collator = default_collator(self.processing_class)

    def _source(self, model: Any) -> tuple[Any, dict[str, Any]]:
        """The model to make a Pipeline of, and more options of `ModelSpec` for it."""
        return model, {}

    def _take_pipeline(self) -> None:
        """Check that the pipeline fits, and make what depends on it."""

    # ------------------------------------------------------------------ training

    @by_every_process
    def train(
        self,
        resume_from_checkpoint: str | os.PathLike[str] | bool | None = None,
        trial: None = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train to the end of the training.

        Args:
            resume_from_checkpoint: a checkpoint's directory, or True for the newest valid checkpoint in `output_dir`.
                If there is none, True starts from the beginning, so the same script starts a run and resumes it.
            trial: must be None, since there is no search over hyperparameters.
            ignore_keys_for_eval: `ignore_keys` of the evaluations.

        Returns:
            The number of updates, the mean training loss of this call, and metrics; the same in every process.

        Raises:
            UserError: there is nothing to train on; another run has the output directory, or it cannot be written into;
                a checkpoint is missing, damaged or does not fit.
            TrainingStopped: with `enable_jit_checkpoint`, after SIGTERM or SIGINT, when the last step is saved. It is a
                SystemExit: a script that does not catch it ends with exit code 75.
        """
        if trial is not None:
            raise UserError("trial: there is no search over hyperparameters; run one training for each choice")
        return self._train(resume_from_checkpoint, ignored_keys=ignore_keys_for_eval)

    def train_from(self, checkpoint: Path | None, resume_hint: str) -> TrainOutput:
        """Train as `train` does, from a checkpoint that was already found to be complete; None: from the beginning.

        Args:
            checkpoint: the checkpoint's directory, the same in every process.
            resume_hint: what to do after a stop, for its message.
        """
        return self._train(checkpoint, is_whole=True, resume_hint=resume_hint)

    def _train(self, asked: str | os.PathLike[str] | bool | None, **options: Any) -> TrainOutput:
        self._check_surface()
        self._is_in_train = True
        try:
            with owned(Path(self.args.output_dir), self.world):
                return self._loop(asked, **options).train()
        finally:
            self._is_in_train = False

    def _loop(
        self,
        asked: Any,
        is_whole: bool = False,
        ignored_keys: list[str] | None = None,
        resume_hint: str = "start again",
    ) -> TrainingLoop:
        """Make the loop, with everything ready for the first step."""
        start_time = time.time()
        self._check_evaluations()
        self._init_model_anew()
        align_special_tokens(self.pipe, self.processing_class)
        batches = self.train_batches()
        length = TrainingLength.make(
            self.args, self.world.from_main(lambda: None if batches is None else batches.count())
        )
        checkpoints = Checkpoints(self)
        # This comes first, since it gives back a checkpoint that was being replaced.
        checkpoints.tidy()
        checkpoint = asked if is_whole else checkpoints.find(asked)
        optimizer = self._make_optimizer_and_scheduler(length.max_steps)
        check_asynchronous(self)
        self.callback_handler.optimizer, self.callback_handler.lr_scheduler = optimizer, self.lr_scheduler
        self.callback_handler.train_dataloader = batches
        run = RunState(
            DataPosition(), self.pipe.step, data_facts(self.args, length), num_micro_batches=self.pipe.num_micro_batches
        )
        self.state = self.new_state()
        if checkpoint is not None:
            run, saved = checkpoints.resume(checkpoint, run)
            saved.is_local_process_zero = self.state.is_local_process_zero
            saved.is_world_process_zero = self.state.is_world_process_zero
            self.state = saved
            if self.args.restore_callback_states_from_checkpoint:
                restore_callbacks(self.callback_handler.callbacks, self.state.stateful_callbacks, self.world)
            checkpoints.find_best(checkpoint)
        self.state.compute_steps(self.args, length.max_steps)
        self.state.max_steps, self.state.num_train_epochs = length.max_steps, length.num_epochs
        checkpoints.check(run)
        self._first_num_tokens = self.state.num_input_tokens_seen
        self.pipe.zero_grad()
        logs = Logs(self, start_time)
        return TrainingLoop(self, length, batches, run, checkpoints, logs, ignored_keys, resume_hint)

    @property
    def is_in_train(self) -> bool:
        """Whether `train` is under way."""
        return self._is_in_train

    def end(self) -> None:
        """Wait for uploads and leave the job. It is called last, by every process."""
        self.uploads.finish()
        self.job.leave()

    def call_model_init(self, trial: Any = None) -> Any:
        """Call `model_init`. If it takes an argument, it gets `trial`, which is always None."""
        assert self.model_init is not None
        return self.model_init(*[trial] * len(inspect.signature(self.model_init).parameters))

    # ------------------------------------------------------------------ the optimizer

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Make the optimizer and its scheduler, unless they exist."""
        self.create_optimizer()
        self.create_scheduler(num_training_steps, self.optimizer)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Make `self.optimizer`, unless it exists, for the parameters of this process's stages.

        Args:
            model: must be None; the pipeline's stages are trained.
        """
        if model is not None and model is not self.model:
            raise UserError("create_optimizer: model is not supported; the optimizer is for the pipeline's stages")
        if self.optimizer is None:
            self.optimizer = make_optimizer(
                self.pipe,
                self.args,
                self.optimizer_cls_and_kwargs,
                self.master_weights,
                self.get_optimizer_cls_and_kwargs,
                self.get_decay_parameter_names,
            )
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """Make `self.lr_scheduler` over `num_training_steps` updates, unless it exists."""
        if self.lr_scheduler is None:
            optimizer = self.made_optimizer() if optimizer is None else optimizer
            self.lr_scheduler = make_scheduler(self.args, optimizer, num_training_steps)
        return self.lr_scheduler

    def _make_optimizer_and_scheduler(self, num_steps: int) -> torch.optim.Optimizer:
        """Make what does not exist yet, and check both. Raises UserError where they do not fit the model."""
        if self._makes_scheduler:
            self.lr_scheduler = None
        self.create_optimizer_and_scheduler(num_steps)
        if self.optimizer is None or self.lr_scheduler is None:
            missing = "optimizer" if self.optimizer is None else "lr_scheduler"
            raise UserError(f"there is no {missing}: create_{missing.removeprefix('lr_')} has to set trainer.{missing}")
        for group in self.optimizer.param_groups:
            # Parameters of other processes are left out, where it was made of all parameters of the whole model.
            group["params"] = [parameter for parameter in group["params"] if not parameter.is_meta]
        check_optimizer(self.optimizer, updated_parameters(self).values())
        warn_of_lost_updates(self)
        shard_optimizer(self)
        return self.optimizer


#: The attributes of the class before anybody changes them.
PipelineTrainer._surface = Surface(PipelineTrainer)

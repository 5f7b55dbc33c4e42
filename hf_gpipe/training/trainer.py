"""`PipelineTrainer`: transformers' Trainer, over a pipeline.

A class of its own with Trainer's constructor, methods, callbacks and files. Its parts do the work: a `TrainingLoop`,
which has `Checkpoints`, `Updates` and `Logs`, an `Evaluator`, `HubUploads`, and the callbacks. All processes of the
pipeline run it in step: the main process reads the data, and the loss and the decisions of callbacks are shared, so
that every process logs, evaluates, saves and stops at the same step.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
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
from hf_gpipe.errors import UserError
from hf_gpipe.job.calls import by_every_process
from hf_gpipe.libraries.transformers_trainer import CallbackHandler, PredictionOutput, TrainOutput
from hf_gpipe.losses.custom import loss_of_function
from hf_gpipe.losses.loss import Loss
from hf_gpipe.model.spec import ModelSpec
from hf_gpipe.pipeline import ModelSource, Pipeline
from hf_gpipe.planner.workload import Workload
from hf_gpipe.recipe.batch_size import BatchSize
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
    set_up_model,
    sum_in_float16,
)
from hf_gpipe.training.batches import batches_of, by_name, example_of_training, loaded, named, required
from hf_gpipe.training.evaluator import Evaluator, check_evaluations, check_metrics
from hf_gpipe.training.given import take_given
from hf_gpipe.training.hub import HubUploads
from hf_gpipe.training.loader import Batch, Collate, MiniBatches
from hf_gpipe.training.loop import TrainingLoop
from hf_gpipe.training.master_weights import MasterWeights
from hf_gpipe.training.optim import check_optimizers, make_optimizer, make_scheduler
from hf_gpipe.training.own_loader import OwnLoader
from hf_gpipe.training.predicting import Preprocess
from hf_gpipe.training.surface import Surface
from hf_gpipe.training.trainer_interface import TrainerInterface


class PipelineTrainer(TrainerInterface):
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
        self.args = self._arguments() if args is None else self._arguments.of(args)
        # The arguments may have been changed since, by args.set_training(...) and the like.
        self.args.check()
        transformers.logging.set_verbosity(self.args.get_process_log_level())
        check_metrics(self.args, compute_metrics)
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
        self.fire("on_init_end")

    # ------------------------------------------------------------------ parts of the constructor

    def _set_seed(self) -> None:
        (enable_full_determinism if self.args.full_determinism else set_seed)(self.args.seed)

    def _set_model(self, model: Any) -> None:
        """Make the pipeline of a model, or take a given one, and make what depends on its weights."""
        sum_in_float16(self.args, self.world.device)
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
        self.scaler = loss_scaler(self.pipe, self.args)
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

    def _loop(self, asked: Any, **options: Any) -> TrainingLoop:
        """Make the loop, with everything ready for the first step; the arguments are those of `TrainingLoop`."""
        start_time = time.time()
        check_evaluations(self, has_own_rows=self._has_own_rows)
        self._init_model_anew()
        align_special_tokens(self.pipe, self.processing_class)
        if self._makes_scheduler:
            self.lr_scheduler = None
        return TrainingLoop(self, self.train_batches(), asked, start_time, **options)

    def end(self) -> None:
        """Wait for uploads and leave the job. It is called last, by every process."""
        self.uploads.finish()
        self.job.leave()

    # ------------------------------------------------------------------ evaluation

    @by_every_process
    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
        **generation: Any,
    ) -> dict[str, float]:
        """Loss and the metrics of `compute_metrics`; the same in every process.

        The loss is the training's loss, without dropout. As in transformers' Trainer, it is the mean over rows of the
        loss of their mini-batch.

        Args:
            eval_dataset: a dataset in place of the trainer's, or a name of the trainer's dict. A dict of datasets gives
                the metrics of each dataset under its name.
            ignore_keys: without effect: a pipeline returns no other outputs than logits.
            metric_key_prefix: goes before the metrics' names.
            generation: with `predict_with_generate`, keyword arguments of `generate`.
        """
        self._check_surface()
        dataset = by_name(self, self.eval_dataset if eval_dataset is None else eval_dataset)
        if not isinstance(dataset, Mapping):
            return self._evaluate_one(dataset, metric_key_prefix, generation)
        metrics: dict[str, float] = {}
        for name, part in dataset.items():
            metrics |= self._evaluate_one(part, f"{metric_key_prefix}_{name}", generation)
        return metrics

    def _evaluate_one(self, dataset: Any, prefix: str, generation: Mapping[str, Any]) -> dict[str, float]:
        batches = self._evaluated(dataset, generation, "eval")
        with self.job.during("evaluating"):
            metrics = Evaluator(self, prefix, generation).evaluate(batches)
        return self._end_evaluation(metrics)

    def _end_evaluation(self, metrics: dict[str, float]) -> dict[str, float]:
        """Log the metrics of an evaluation."""
        self.log(metrics)
        self.fire("on_evaluate", metrics=metrics)
        return metrics

    @by_every_process
    def predict(
        self,
        test_dataset: Any,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "test",
        **generation: Any,
    ) -> PredictionOutput:
        """Predictions, labels and metrics of a dataset; the same in every process.

        A dataset without labels gives only predictions, and the metrics of speed.

        Args:
            test_dataset: the examples.
            ignore_keys: without effect: a pipeline returns no other outputs than logits.
            metric_key_prefix: goes before the metrics' names.
            generation: with `predict_with_generate`, keyword arguments of `generate`.

        Returns:
            The logits of all rows, what `preprocess_logits_for_metrics` left of them, or the tokens with
            `predict_with_generate`; and the labels. Shorter rows are filled with -100, tokens with the padding token.
            With `eval_do_concat_batches=False` they are lists with an entry for each mini-batch.
        """
        self._check_surface()
        batches = self._evaluated(test_dataset, generation, "test")
        with self.job.during("evaluating"):
            prediction = Evaluator(self, metric_key_prefix, generation).predict(batches)
        self.fire("on_predict", metrics=prediction.metrics)
        return prediction

    def _evaluated(self, dataset: Any, generation: Mapping[str, Any], part: str) -> Iterable[Batch] | None:
        """The mini-batches of a dataset, by `get_eval_dataloader` or `get_test_dataloader`, as `part` says.

        None in processes that do not read data. Raises UserError where no process has a dataset, or where options of
        generation are not used.
        """
        if generation and not self.args.predict_with_generate:
            raise UserError(f"{next(iter(generation))}: generation needs predict_with_generate=True")
        batches = loaded(self, part, dataset)
        self.callback_handler.eval_dataloader = batches
        return None if batches is None else batches.epoch(0)

    # ------------------------------------------------------------------ the data

    def _example(self, spec: ModelSpec) -> Batch | Workload | None:
        """A mini-batch, or its shape, for the planner."""
        return example_of_training(self, spec)

    def get_train_dataloader(self) -> MiniBatches:
        """The mini-batches of the training. Iterating over them gives the first epoch.

        A subclass may return a loader of its own, such as a torch DataLoader: each of its items is a mini-batch of all
        rows. The main process alone calls it.

        Raises UserError in a process that has no training dataset.
        """
        args, dataset = self.args, required("train", self.train_dataset)
        return replace(
            batches_of(self, dataset, args.size, args.train_sampling_strategy),
            drop_last=args.dataloader_drop_last,
            temperature=args.sampling_temperature,
        )

    def get_eval_dataloader(self, eval_dataset: Any = None) -> MiniBatches:
        """The mini-batches of an evaluation; `eval_dataset` may be a name of the trainer's dict of datasets.

        Raises UserError in a process that has no such dataset.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        return self._eval_batches(required("eval", named(self, dataset)))

    def get_test_dataloader(self, test_dataset: Any) -> MiniBatches:
        """The mini-batches of a prediction."""
        return self._eval_batches(required("test", test_dataset))

    def train_batches(self) -> MiniBatches | OwnLoader | None:
        """The mini-batches of the training; None in processes that do not read data."""
        return loaded(self, "train")

    @property
    def _has_own_rows(self) -> bool:
        """Whether an evaluation may need no dataset."""
        return self.overrides("evaluate") or self.overrides("get_eval_dataloader")

    def _eval_batches(self, dataset: Any) -> MiniBatches:
        batches = batches_of(self, dataset, BatchSize(self.args.per_device_eval_batch_size))
        return replace(batches, drop_last=self.args.dataloader_drop_last)

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


#: The attributes of the class before anybody changes them.
PipelineTrainer._surface = Surface(PipelineTrainer)

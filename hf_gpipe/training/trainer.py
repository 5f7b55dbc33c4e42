"""`PipelineTrainer`: transformers' Trainer, over a pipeline.

A class of its own with Trainer's constructor, methods, callbacks and files. All processes of the pipeline run it in
step: the main process reads the data, and the loss and the decisions of callbacks are shared, so that every process
logs, evaluates, saves and stops at the same step.
"""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import (
    EvalPrediction,
    PreTrainedModel,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    enable_full_determinism,
    set_seed,
)
from transformers.trainer_callback import CallbackHandler, ExportableState
from transformers.trainer_utils import PredictionOutput, TrainOutput, speed_metrics

from hf_gpipe.adapters import Adapter
from hf_gpipe.checkpoint.copies import PendingWrite
from hf_gpipe.checkpoint.lock import owned
from hf_gpipe.checkpoint.run_state import DataPosition, RunState
from hf_gpipe.errors import UserError
from hf_gpipe.model.opening import chain_of
from hf_gpipe.model.spec import ModelSpec
from hf_gpipe.pipeline import ModelSource, Pipeline
from hf_gpipe.planner.workload import Workload
from hf_gpipe.runtime.batches import tensors_of
from hf_gpipe.runtime.calls import by_every_process
from hf_gpipe.runtime.custom_loss import loss_of_function
from hf_gpipe.runtime.loss import Loss
from hf_gpipe.runtime.world import World
from hf_gpipe.training.arguments import PipelineTrainingArguments
from hf_gpipe.training.base import (
    callbacks_of,
    check_optimizers,
    default_collator,
    example_of,
    join_with,
    loss_scaler,
    master_weights_of,
    name_of_callback,
    options_of,
    pipeline_of,
    restore_callbacks,
)
from hf_gpipe.training.checkpoints import Checkpoints, model_to_save
from hf_gpipe.training.evaluator import Evaluator
from hf_gpipe.training.hub import HubUploads
from hf_gpipe.training.loader import LABEL_COLUMNS, Batch, MiniBatches
from hf_gpipe.training.logs import Logs
from hf_gpipe.training.loop import TrainingLoop
from hf_gpipe.training.optim import check_optimizer, make_optimizer, make_scheduler, shard_optimizer, updated_parameters
from hf_gpipe.training.pools import has_index
from hf_gpipe.training.predicting import Preprocess
from hf_gpipe.training.steps import TrainingLength, data_facts, data_seed
from hf_gpipe.training.surface import check_assignment, check_class, missing, own_attributes
from hf_gpipe.training.trainer_interface import TrainerInterface
from hf_gpipe.training.windows import check_asynchronous


class PipelineTrainer(TrainerInterface):
    """Trains a model by pipeline parallelism, with the interface of transformers' Trainer.

    Under torchrun, `accelerate launch` or `python -m hf_gpipe.train` every process makes the same trainer and calls the
    same methods. Only the main process reads data: the other processes may pass None for datasets.

    Args:
        model: a PreTrainedModel, a configuration, a Hub id or directory, or a Pipeline (whose own settings then count).
        args: the arguments; None: all defaults.
        data_collator: rows to a mini-batch, a dict of tensors with `input_ids` and `labels`; None: Trainer's default.
        train_dataset: map-style or iterable.
        eval_dataset: the same, or a dict of several by name.
        processing_class: the tokenizer; it is saved with the model.
        model_init: makes the model, where `model` is None.
        compute_loss_func: (outputs, labels, num_items_in_batch=...) -> the loss, in place of the cross-entropy: a sum
            over tokens or rows, for it is called for each micro-batch. `num_items_in_batch` is the number of target
            tokens of the whole step. Of the outputs there are the logits, which are made whole. Give a function that
            compares neighbouring rows as LogitsLoss(function, rows_per_unit=...). It may also be another `Loss`.
        compute_metrics: metrics of an EvalPrediction; it is called in the process of the last stage, or of its first
            replica, which gets the predictions of all rows.
        callbacks: called in every process, with `Pipeline.model` as `model`.
        optimizers: an optimizer of `pipe.parameters()` and its scheduler, in place of those of `args`.
        optimizer_cls_and_kwargs: a class of optimizer and its arguments, in place of `args.optim`.
        preprocess_logits_for_metrics: makes less of the logits (B, T, V) of a micro-batch before they are kept.
        peft_config: as for `Pipeline`.

    Raises:
        UserError: an argument that is not supported, by its name.
    """

    args: PipelineTrainingArguments

    #: Columns of rows that the collator reads beside those of the model.
    _collated_columns: tuple[str, ...] = ()

    def __init__(
        self,
        model: Pipeline | ModelSource | None = None,
        args: PipelineTrainingArguments | None = None,
        data_collator: Callable[[list[Any]], Batch] | None = None,
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
    ) -> None:
        check_class(type(self), PipelineTrainer, _OWN)
        self.args = args if args is not None else PipelineTrainingArguments()
        if not isinstance(self.args, PipelineTrainingArguments):
            raise UserError(f"args is a {type(args).__name__}; PipelineTrainer needs PipelineTrainingArguments")
        # They may have been changed since, by args.set_training(...) and the like.
        self.args.check()
        transformers.logging.set_verbosity(self.args.get_process_log_level())
        if (model is None) == (model_init is None):
            raise UserError("give either model or model_init")
        seed = enable_full_determinism if self.args.full_determinism else set_seed
        seed(self.args.seed)
        self.job = join_with(
            self.args,
            optimizer=options_of(optimizers[0]),
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
        )
        self.model_init = model_init
        self.processing_class = processing_class
        self.data_collator = data_collator or default_collator(processing_class)
        self.train_dataset = train_dataset
        self.eval_dataset = eval_dataset
        model = self.call_model_init() if model is None else model
        self.pipe = pipeline_of(
            model,
            self.args,
            lambda: self._example(model, peft_config),
            loss=loss_of_function(compute_loss_func),
            peft_config=peft_config,
        )
        self.world = self.pipe.world
        self.scaler = loss_scaler(self.pipe)
        self.master_weights = master_weights_of(self.pipe, self.args)
        self.compute_metrics = compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self.optimizer = optimizers[0]
        self.lr_scheduler: Any = optimizers[1]
        check_optimizers(*optimizers, self.args, self.pipe)
        self._makes_scheduler = self.lr_scheduler is None
        self.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs

        self.callback_handler = CallbackHandler(
            callbacks_of(self.args, callbacks or []), self.model, processing_class, self.optimizer, self.lr_scheduler
        )
        self.uploads = HubUploads(self.args, self.world)
        if self.args.push_to_hub:
            self.init_hf_repo()
        self.control = TrainerControl()
        self.state = self.new_state()
        self._is_in_train = False
        #: Tokens without padding that this trainer has trained on.
        self.num_trained_tokens = 0
        #: Tokens that earlier trainings had seen.
        self._first_num_tokens = 0
        self.fire("on_init_end")

    if not TYPE_CHECKING:  # a type checker goes on finding what is misspelt

        def __getattr__(self, name: str) -> Any:
            raise missing(self, PipelineTrainer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        check_assignment(self, PipelineTrainer, name)
        super().__setattr__(name, value)

    # ------------------------------------------------------------------ the model

    @property
    def model(self) -> PreTrainedModel:
        """The Hugging Face model over the tensors that are trained: `Pipeline.model`."""
        return self.pipe.model

    @property
    def model_wrapped(self) -> PreTrainedModel:
        """The same model: nothing is wrapped around it."""
        return self.pipe.model

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
            resume_from_checkpoint: a checkpoint's directory, or True for the newest one in `output_dir` that is whole,
                where there are any, so that the same script starts a run and goes on with it.
            trial: raises an error; there is no search over hyperparameters.
            ignore_keys_for_eval: `ignore_keys` of the evaluations.

        Returns:
            The number of updates, the mean training loss of this call, and metrics; the same in every process.

        Raises:
            UserError: nothing to train on; another run has the output directory, or it cannot be written into; a
                checkpoint that is missing, damaged or does not fit.
            TrainingStopped: with `enable_jit_checkpoint`, SIGTERM or SIGINT came and the last step is saved. It is a
                SystemExit, so that a script that does nothing about it ends, with exit code 75.
        """
        if trial is not None:
            raise UserError("trial: there is no search over hyperparameters; run one training for each choice")
        return self._train(resume_from_checkpoint, ignored_keys=ignore_keys_for_eval)

    def train_from(self, checkpoint: Path | None, resume_hint: str) -> TrainOutput:
        """Train as `train` does, from a checkpoint that was already found to be whole; None: from the beginning.

        Args:
            checkpoint: the same in every process.
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
        batches = self.train_batches()
        length = TrainingLength.make(
            self.args, self.world.from_reader(lambda: None if batches is None else batches.count())
        )
        checkpoints = Checkpoints(self.args, self.pipe, self.master_weights, self.scaler)
        # First, for it gives back a checkpoint that was being replaced.
        checkpoints.tidy()
        checkpoint = asked if is_whole else checkpoints.find(asked)
        checkpoints.forget_memory(checkpoint)
        optimizer = self._make_optimizer_and_scheduler(length.max_steps)
        check_asynchronous(self.pipe, self.args, self.callback_handler.callbacks, self.scaler, optimizer)
        self.callback_handler.optimizer, self.callback_handler.lr_scheduler = optimizer, self.lr_scheduler
        self.callback_handler.train_dataloader = batches
        run = RunState(
            DataPosition(), self.pipe.step, data_facts(self.args, length), num_micro_batches=self.pipe.num_micro_batches
        )
        self.state = self.new_state()
        if checkpoint is not None:
            run, saved = checkpoints.resume(checkpoint, run, optimizer, self.lr_scheduler)
            saved.is_local_process_zero = self.state.is_local_process_zero
            saved.is_world_process_zero = self.state.is_world_process_zero
            self.state = saved
            if self.args.restore_callback_states_from_checkpoint:
                restore_callbacks(self.callback_handler.callbacks, self.state.stateful_callbacks)
        self.state.compute_steps(self.args, length.max_steps)
        self.state.max_steps, self.state.num_train_epochs = length.max_steps, length.num_epochs
        self._first_num_tokens = self.state.num_input_tokens_seen
        self.pipe.zero_grad()
        logs = Logs(self.pipe, self.args, self.state.global_step, start_time)
        return TrainingLoop(self, length, batches, run, checkpoints, logs, ignored_keys, resume_hint)

    @property
    def is_in_train(self) -> bool:
        """Whether `train` is under way."""
        return self._is_in_train

    def train_batches(self) -> MiniBatches | None:
        """The mini-batches of the training dataset; None in processes that do not read data."""
        if not self.world.from_reader(lambda: self.train_dataset is not None):
            raise UserError("training requires a train_dataset")
        return self.get_train_dataloader() if self.world.is_reader else None

    def end(self) -> None:
        """Wait for uploads and leave the job. It is called last, by every process."""
        self.uploads.finish()
        self.job.leave()

    def call_model_init(self, trial: Any = None) -> Any:
        """Call `model_init`. If it takes an argument, it gets `trial`, which is None: there are no trials."""
        assert self.model_init is not None
        return self.model_init(*[trial] * len(inspect.signature(self.model_init).parameters))

    def _check_surface(self) -> None:
        """Raise UserError for an override, or for a parameter of `model`, that came since and would not be used."""
        check_class(type(self), PipelineTrainer, _OWN)
        self.pipe.model  # noqa: B018  # the property checks

    # ------------------------------------------------------------------ the optimizer

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Make the optimizer and its scheduler, unless they are there."""
        self.create_optimizer()
        self.create_scheduler(num_training_steps, self.optimizer)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Make `self.optimizer`, unless it is there, for the parameters of this process's stages.

        Args:
            model: refused; the pipeline's stages are trained.
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
        """Make `self.lr_scheduler`, unless it is there, over so many updates."""
        if self.lr_scheduler is None:
            optimizer = self._made_optimizer() if optimizer is None else optimizer
            self.lr_scheduler = make_scheduler(self.args, optimizer, num_training_steps)
        return self.lr_scheduler

    def _make_optimizer_and_scheduler(self, num_steps: int) -> torch.optim.Optimizer:
        """Make what is not there yet, and check it. Raises UserError where it does not fit the model."""
        if self._makes_scheduler:
            self.lr_scheduler = None
        self.create_optimizer_and_scheduler(num_steps)
        if self.optimizer is None or self.lr_scheduler is None:
            missing = "optimizer" if self.optimizer is None else "lr_scheduler"
            raise UserError(f"there is no {missing}: create_{missing.removeprefix('lr_')} has to set trainer.{missing}")
        for group in self.optimizer.param_groups:
            # Those of other processes, where it was made of all parameters of the whole model.
            group["params"] = [parameter for parameter in group["params"] if not parameter.is_meta]
        check_optimizer(self.optimizer, updated_parameters(self.pipe, self.master_weights).values())
        shard_optimizer(self.pipe, self.optimizer, self.lr_scheduler, self.master_weights)
        return self.optimizer

    # ------------------------------------------------------------------ callbacks and logs

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Add metrics to the state's history and give them to the callbacks of this process.

        Args:
            logs: the metrics.
            start_time: of the training; with `include_num_input_tokens_seen` the tokens per second are added.
        """
        if "loss" in logs:
            logs.update(self._metrics_of_loss(is_training=True))
        logs["epoch"] = self.state.epoch
        if self.args.include_num_input_tokens_seen != "no":
            seen = logs["num_input_tokens_seen"] = self.state.num_input_tokens_seen
            if start_time is not None:
                logs |= speed_metrics("train", start_time, num_tokens=seen - self._first_num_tokens)
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.fire("on_log", logs=logs)

    def _metrics_of_loss(self, *, is_training: bool) -> dict[str, float]:
        """Metrics that the loss has noted since the last call, the same in every process, which calls it; none here."""
        return {}

    @property
    def updates_per_step(self) -> int:
        """Updates from the mini-batches of a step."""
        return 1

    def prepared(self, group: Sequence[Batch]) -> Sequence[Batch]:
        """The mini-batches of a step as they are trained on, from those of the loader; every process calls it."""
        return group

    def prepared_to_evaluate(self, batch: Batch) -> Batch:
        """A mini-batch as it is evaluated, from one of the loader; every process calls it."""
        return batch

    def fire(self, event: str, **kwargs: Any) -> None:
        """Call an event of the callbacks of this process."""
        try:
            self.control = getattr(self.callback_handler, event)(self.args, self.state, self.control, **kwargs)
        except Exception as error:
            self.job.note(f"{self.job.work}, in {name_of_callback(error)}.{event}".removeprefix(", "))
            raise

    def new_state(self) -> TrainerState:
        """The state before a training, with the present state of callbacks that keep one."""
        callbacks = [*self.callback_handler.callbacks, self.control]
        return TrainerState(
            is_local_process_zero=self.args.local_process_index == 0,
            is_world_process_zero=self.world.is_reporter,
            stateful_callbacks=[callback for callback in callbacks if isinstance(callback, ExportableState)],
            train_batch_size=self.args.per_device_train_batch_size,
        )

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

        The loss is the one trained on, without dropout, and like transformers' Trainer's the mean over rows of the loss
        of their mini-batch.

        Args:
            eval_dataset: in place of the trainer's; a dict of datasets, or a name of the trainer's dict, gives each
                one's metrics under its name.
            ignore_keys: without effect: a pipeline returns no other outputs than logits.
            metric_key_prefix: goes before the metrics' names.
            generation: with `predict_with_generate`, keyword arguments of `generate`.
        """
        self._check_surface()
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, str):
            dataset = {dataset: self.eval_dataset[dataset] if isinstance(self.eval_dataset, Mapping) else None}
        names = self.world.from_reader(lambda: list(dataset) if isinstance(dataset, Mapping) else None)
        if names is None:
            return self._evaluate_one(dataset, metric_key_prefix, generation)
        metrics: dict[str, float] = {}
        for name in names:
            part = dataset[name] if isinstance(dataset, Mapping) else None
            metrics |= self._evaluate_one(part, f"{metric_key_prefix}_{name}", generation)
        return metrics

    def _evaluate_one(self, dataset: Any, prefix: str, generation: Mapping[str, Any]) -> dict[str, float]:
        batches = self._evaluated(dataset, generation, "evaluation requires an eval_dataset")
        with self.job.during("evaluating"):
            metrics = self._evaluator().evaluate(batches, prefix, generation)
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
        """Predictions, labels and metrics of a dataset with labels; the same in every process.

        Args:
            test_dataset: the examples.
            ignore_keys: without effect: a pipeline returns no other outputs than logits.
            metric_key_prefix: goes before the metrics' names.
            generation: with `predict_with_generate`, keyword arguments of `generate`.

        Returns:
            Of all rows, or with `eval_do_concat_batches=False` in lists with an entry per mini-batch: the logits, what
            `preprocess_logits_for_metrics` left of them, or with `predict_with_generate` the tokens; and the labels.
            Shorter rows are filled with -100, tokens with the padding token.
        """
        self._check_surface()
        batches = self._evaluated(test_dataset, generation, "prediction requires a test_dataset")
        with self.job.during("evaluating"):
            prediction = self._evaluator().predict(batches, metric_key_prefix, generation)
        self.fire("on_predict", metrics=prediction.metrics)
        return prediction

    def _evaluated(self, dataset: Any, generation: Mapping[str, Any], required: str) -> Iterable[Batch] | None:
        """The mini-batches of a dataset; None in processes that do not read data.

        Raises UserError where no process has a dataset, or where options of generation are not used.
        """
        if not self.world.from_reader(lambda: dataset is not None):
            raise UserError(required)
        if generation and not self.args.predict_with_generate:
            raise UserError(f"{next(iter(generation))}: generation needs predict_with_generate=True")
        batches = None
        if dataset is not None:
            batches = self._eval_batches(dataset)
        self.callback_handler.eval_dataloader = batches
        return None if batches is None else batches.epoch(0)

    def _evaluator(self) -> Evaluator:
        """Make an evaluator for each call: a script may have set another `compute_metrics` since the last one."""
        self._metrics_of_loss(is_training=False)  # those of other calls are not of this evaluation
        pad_token_id = self.world.from_reader(lambda: getattr(self.processing_class, "pad_token_id", None))
        return Evaluator(
            self.pipe,
            self.args,
            self.compute_metrics,
            self.preprocess_logits_for_metrics,
            pad_token_id,
            on_batch=lambda: self.fire("on_prediction_step"),
            metrics_of_loss=lambda: self._metrics_of_loss(is_training=False),
            prepared=self.prepared_to_evaluate,
        )

    # ------------------------------------------------------------------ saving

    @by_every_process
    def save_model(self, output_dir: str | os.PathLike[str] | None = None, _internal_call: bool = False) -> None:
        """Write model and tokenizer in Hub format, by default into `args.output_dir`. Every process calls it.

        With `push_to_hub` the model is then uploaded, as transformers' Trainer does.

        Args:
            output_dir: where to.
            _internal_call: whether the trainer calls it, for a checkpoint or an upload, and uploads nothing itself.
        """
        directory = Path(output_dir) if output_dir is not None else self._output_dir
        self._check_surface()
        self._own_model_to_save(directory, self.world).write()
        if self.args.push_to_hub and not _internal_call:
            self._push(directory, "Model save", {})

    def model_to_save(self, directory: Path, world: World) -> PendingWrite | None:
        """The model of a checkpoint, to be written into its directory; `world` is for the messages of the writing.

        A `save_model` that is overridden writes at once, and nothing is left: None.
        """
        if getattr(self.save_model, "__func__", None) is PipelineTrainer.save_model:
            self._check_surface()
            return self._own_model_to_save(directory, world)
        self.save_model(str(directory), _internal_call=True)
        return None

    def _own_model_to_save(self, directory: Path, world: World) -> PendingWrite:
        return model_to_save(directory, self.pipe, self._files_beside_model(), world)

    def _files_beside_model(self) -> list[Callable[[Path], Any]]:
        """Functions that write more small files of the main process into the model's directory."""
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        return [] if tokenizer is None else [tokenizer.save_pretrained]

    # ------------------------------------------------------------------ the data

    def get_train_dataloader(self) -> MiniBatches:
        """The mini-batches of the training; iterated over, those of the first epoch.

        Raises UserError in a process that has no training dataset.
        """
        return self._train_batches(_given(self.train_dataset, "training requires a train_dataset"))

    def get_eval_dataloader(self, eval_dataset: Any = None) -> MiniBatches:
        """The mini-batches of an evaluation; `eval_dataset` may be a name of the trainer's dict of datasets.

        Raises UserError in a process that has no such dataset.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, str):
            dataset = self.eval_dataset[dataset]
        return self._eval_batches(_given(dataset, "evaluation requires an eval_dataset"))

    def get_test_dataloader(self, test_dataset: Any) -> MiniBatches:
        """The mini-batches of a prediction."""
        return self._eval_batches(_given(test_dataset, "prediction requires a test_dataset"))

    def _example(self, model: Any, peft_config: Any) -> Batch | Workload | None:
        """A mini-batch, or its shape: of a model that reads no tokens, from the first training row."""
        chain = chain_of(ModelSpec.of(model, peft_config=peft_config))
        if chain is None:
            return example_of(self.train_dataset, self.args)
        if not has_index(self.train_dataset) or not len(self.train_dataset):
            return None
        read = {*inspect.signature(chain.forward).parameters, *Adapter.loss_keys}
        row = next(iter(self._batches(self.train_dataset, 1, read=read)))
        return Workload.of_entries(tensors_of(row)).of_rows(self.args.per_device_train_batch_size)

    def _train_batches(self, dataset: Any) -> MiniBatches:
        args = self.args
        return replace(
            self._batches(dataset, args.per_device_train_batch_size, args.train_sampling_strategy),
            drop_last=args.dataloader_drop_last,
            batch_tokens=args.batch_tokens,
            temperature=args.sampling_temperature,
        )

    def _eval_batches(self, dataset: Any) -> MiniBatches:
        return self._batches(dataset, self.args.per_device_eval_batch_size)

    def _batches(
        self,
        dataset: Any,
        batch_size: int,
        order: str = "sequential",
        read: set[str] | None = None,
    ) -> MiniBatches:
        """Mini-batches of a dataset; `read` has the columns that a model reads, of a pipeline that is not made yet."""
        columns = None
        if self.args.remove_unused_columns:
            if read is None:
                adapter = self.pipe.adapter
                read = {*inspect.signature(adapter.reference.forward).parameters, *adapter.loss_keys}
            columns = read | LABEL_COLUMNS | {*self._collated_columns}
            if getattr(self.data_collator, "padding_free", False):
                # TRL's collator reads the lengths of packed documents from it.
                columns.add("seq_lengths")
        names = ("num_workers", "prefetch_factor", "multiprocessing_context", "in_order")
        options = {name: getattr(self.args, f"dataloader_{name}") for name in names}
        return MiniBatches(
            dataset,
            self.data_collator,
            batch_size,
            order,
            seed=data_seed(self.args),
            columns=columns,
            length_column=self.args.length_column_name,
            workers=options if options["num_workers"] else None,
        )

    # ------------------------------------------------------------------ the Hub

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Make the repository on the Hub, unless it exists. Every process calls it.

        Raises UserError, in every process, if the Hub does not accept it.
        """
        self.uploads.create(token, private)

    @by_every_process
    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **card: Any,
    ) -> Any:
        """Save the model into `args.output_dir` and upload it to `args.hub_model_id`. Every process calls it.

        Args:
            commit_message: of the commit.
            blocking: whether to wait until all is uploaded.
            token: in place of `hub_token`.
            revision: branch, in place of `hub_revision`.
            private: whether a new repository is private, in place of `hub_private_repo`.
            card: arguments of `create_model_card`.

        Returns:
            In the main process what `huggingface_hub.HfApi.upload_folder` returns: the commit, or its future.

        Raises:
            UserError: in every process, where the Hub does not accept the model.
        """
        if self.hub_model_id is None:
            self.init_hf_repo(token, private)
        self.save_model(_internal_call=True)
        options = {"blocking": blocking, "token": token, "revision": revision}
        return self._push(self._output_dir, commit_message or "End of training", card, **options)

    def _push(self, directory: Path, message: str, card: dict[str, Any], **options: Any) -> Any:
        """Upload a saved model; `options` are those of `HubUploads.push`."""
        self.fire("on_push_begin")
        if directory == self._output_dir:
            name = (self.args.hub_model_id or directory.absolute().name).rpartition("/")[2]
            self.world.from_writer(lambda: self.create_model_card(**{"model_name": name, **card}))
        return self.uploads.push(directory, message, **options)


def _given(dataset: Any, required: str) -> Any:
    if dataset is None:
        raise UserError(required)
    return dataset


#: What the class itself has under the names that a subclass may not override.
_OWN = own_attributes(PipelineTrainer)

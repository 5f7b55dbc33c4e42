"""`PipelineTrainer`: transformers' Trainer, over a pipeline.

A class of its own with Trainer's constructor, methods, callbacks and files. All processes of the pipeline run it in
step: the main process reads the data, and the loss and the decisions of callbacks are shared, so that every process
logs, evaluates, saves and stops at the same step.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import NoReturn

import torch
import transformers
from transformers.trainer_utils import TrainOutput, speed_metrics

from hf_gpipe.checkpoint.directory import check_shared, checkpoint_path, tidy
from hf_gpipe.errors import NonFiniteError, UserError
from hf_gpipe.runtime.batches import shared_stream
from hf_gpipe.training.evaluating import metric_of, note_best
from hf_gpipe.training.loader import Batch, MiniBatches, in_groups
from hf_gpipe.training.meter import Meter
from hf_gpipe.training.optim import learning_rate, takes_metric
from hf_gpipe.training.optimizing import OptimizingTrainer
from hf_gpipe.training.steps import Plan, Position
from hf_gpipe.training.stopping import StopRequest, TrainingStopped
from hf_gpipe.training.surface import check_class, own_attributes

logger = transformers.logging.get_logger(__name__)


class PipelineTrainer(OptimizingTrainer):
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
        compute_loss_func: refused; the loss is cross-entropy over all target tokens of the mini-batch.
        compute_metrics: metrics of an EvalPrediction; it is called in the process of the last stage, which has the
            predictions.
        callbacks: called in every process, with `Pipeline.model` as `model`.
        optimizers: an optimizer of `pipe.parameters()` and its scheduler, in place of those of `args`.
        optimizer_cls_and_kwargs: a class of optimizer and its arguments, in place of `args.optim`.
        preprocess_logits_for_metrics: makes less of the logits (B, T, V) of a micro-batch before they are kept.

    Raises:
        UserError: what cannot be honoured, by name.
    """

    #: `ignore_keys` of the evaluations during a training.
    _ignored_keys: list[str] | None = None
    #: What to do after a stop, for its message.
    how_to_go_on = "start again"

    # ------------------------------------------------------------------ training

    def train(
        self,
        resume_from_checkpoint: str | os.PathLike[str] | bool | None = None,
        trial: None = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train to the end of the plan.

        Args:
            resume_from_checkpoint: a checkpoint's directory, or True for the newest one in `output_dir` that is whole,
                where there are any, so that the same script starts a run and goes on with it.
            trial: raises an error; there is no search over hyperparameters.
            ignore_keys_for_eval: `ignore_keys` of the evaluations.

        Returns:
            The number of updates, the mean training loss of this call, and metrics; the same in every process.

        Raises:
            UserError: nothing to train on; a checkpoint that is missing, damaged or does not fit.
            TrainingStopped: with `enable_jit_checkpoint`, SIGTERM or SIGINT came and the last step is saved. It is a
                SystemExit, so that a script that does nothing about it ends, with exit code 75.
        """
        if trial is not None:
            raise UserError("trial: there is no search over hyperparameters; run one training for each choice")
        self._check_surface()
        self._ignored_keys = ignore_keys_for_eval
        self._is_in_train = True
        try:
            return self._train(resume_from_checkpoint)
        finally:
            self._is_in_train = False

    def _train(self, resume_from_checkpoint: str | os.PathLike[str] | bool | None) -> TrainOutput:
        start_time = time.time()
        batches = self.train_batches()
        plan = Plan.make(self.args, self._shared(batches.count() if batches is not None else None))
        if self.args.save_strategy != "no" or self.args.enable_jit_checkpoint:
            check_shared(self._output_dir, self.topology)
        # First, for it gives back a checkpoint that was being replaced.
        self.topology.from_main(lambda: tidy(self._output_dir))
        checkpoint = self._checkpoint_to_resume(resume_from_checkpoint)
        self._make_optimizer_and_scheduler(plan.max_steps)
        self.callback_handler.optimizer, self.callback_handler.lr_scheduler = self.optimizer, self.lr_scheduler
        self.callback_handler.train_dataloader = batches
        self.state, self._position = self._new_state(), Position()
        self._mini_batches_per_epoch = plan.mini_batches_per_epoch
        self._last_saved_step = -1
        self._evaluation_is_due = False
        if checkpoint is not None:
            self._resume(checkpoint)
        self.state.compute_steps(self.args, plan.max_steps)
        self.state.max_steps, self.state.num_train_epochs = plan.max_steps, plan.num_epochs
        self._first_num_tokens = self.state.num_input_tokens_seen
        first_step = self._last_logged_step = self.state.global_step
        self._loss_since_log = self._loss_logged = 0.0
        self._num_rows = 0
        self.pipe.zero_grad()

        with self._stopping_on_request(), self.pipe.advising_on_memory():
            self._fire("on_train_begin")
            if self.args.eval_on_start:
                self._evaluate_now()
            self._meter = Meter(self.pipe, self.args.timeline_steps)
            if self._evaluation_is_due:
                self._make_up_for_evaluation()
            for epoch in range(self._position.epoch, plan.num_epochs):
                if self.control.should_training_stop or self.state.global_step >= plan.max_steps:
                    break
                self._run_epoch(epoch, batches, plan)
        return self._finish(first_step, start_time)

    def end(self) -> None:
        """Wait for uploads and leave the job. It is called last, by every process."""
        self.uploads.finish()
        self.job.leave()

    def _check_overrides(self) -> None:
        check_class(type(self), PipelineTrainer, _OWN)

    def _make_up_for_evaluation(self) -> None:
        """Do what the step that was resumed from has left undone, for the training was stopped there."""
        self._evaluation_is_due = False
        self._evaluate_in_training()
        if self.state.best_global_step == self.state.global_step:
            # Saved again: its checkpoint does not know yet that it is the best one.
            self._save_in_training()

    def train_batches(self) -> MiniBatches | None:
        """The mini-batches of the training dataset; None in processes that do not read data."""
        if not self._shared(self.train_dataset is not None):
            raise UserError("training requires a train_dataset")
        return self.get_train_dataloader() if self.topology.is_main else None

    def _run_epoch(self, epoch: int, batches: MiniBatches | None, plan: Plan) -> None:
        self._fire("on_epoch_begin")
        begin = self._position if epoch == self._position.epoch else Position(epoch)
        done = begin.mini_batches
        source = None
        if batches is not None:
            groups = in_groups(batches.epoch(epoch, done, begin.place), plan.accumulation)
            source = self.job.noting(islice(groups, plan.max_steps - self.state.global_step), "reading a mini-batch")
        norm, rate = None, None
        for group in shared_stream(source, self.topology):
            self.job.note(f"training step {self.state.global_step + 1}")
            self._fire("on_step_begin")
            norm, rate = self._step(group)
            done += len(group)
            # Of the mini-batches trained on: those that are read ahead are read again.
            self._position = Position(epoch, done, None if batches is None else batches.place(done))
            self.state.global_step += 1
            self.state.epoch = epoch + plan.fraction_of_epoch(done)
            self._fire("on_step_end")
            self._log_evaluate_save(norm, rate)
            if self.control.should_epoch_stop or self.control.should_training_stop:
                break
        if done == 0:
            # An iterable dataset that is exhausted: another epoch would give nothing either.
            self.control.should_training_stop = True
        # A training that stops inside an epoch, at max_steps say, has the rest of it before it.
        if done == plan.mini_batches_per_epoch or not self.control.should_training_stop:
            self._position = Position(epoch + 1)
        self._fire("on_epoch_end")
        self._log_evaluate_save(norm, rate)

    def _step(self, group: Sequence[Batch]) -> tuple[float, float]:
        """One update from one or more mini-batches; the norm of the gradient and the learning rate it was made with."""
        norm = rate = 0.0

        def update(loss: torch.Tensor) -> None:
            nonlocal norm, rate
            for _ in group[1:]:
                self._fire("on_substep_end")
            norm, rate = self._update(float(loss))

        self.pipe.loss_scale = 1.0 if self.scaler is None else self.scaler.scale
        self.pipe.train_on(group, self._meter.times(self.state.global_step + 1), update)
        self.pipe.zero_grad()
        self._count(group)
        self._meter.count(group)
        return norm, rate

    def _update(self, loss: float) -> tuple[float, float]:
        """What the table's U does, once the gradients of all processes are complete: clip, step, schedule the rate."""
        assert self.optimizer is not None
        norm = self._clipped_norm()
        makes_update = self._makes_update(loss, norm)
        if self.args.logging_nan_inf_filter and not math.isfinite(loss):
            # As Trainer does: the mean of the steps since the last log stands in for a loss that is not a number.
            loss = self._loss_since_log / (1 + self.state.global_step - self._last_logged_step)
        self._loss_since_log += loss
        self._fire("on_pre_optimizer_step")
        if makes_update:
            self.optimizer.step()
        self._fire("on_optimizer_step")
        rate = learning_rate(self.optimizer)
        if makes_update and not takes_metric(self.lr_scheduler):
            self.lr_scheduler.step()
        return norm, rate

    def _clipped_norm(self) -> float:
        """Divide the gradients by the loss's scale and clip them; their norm before, over the whole model."""
        if self.scaler is not None:
            self.scaler.unscale_(self.pipe.parameters())
        clips = self.args.max_grad_norm is not None and self.args.max_grad_norm > 0
        return float(self.pipe.clip_grad_norm_(self.args.max_grad_norm) if clips else self.pipe.grad_norm())

    def _makes_update(self, loss: float, norm: float) -> bool:
        """Whether a step's gradients are applied. It follows from numbers that every process has, so that all agree."""
        has_overflowed = self.scaler is not None and not math.isfinite(norm)
        if self.scaler is not None:
            self.scaler.update(has_overflowed)
        # With a scale, an infinite gradient of a finite loss only says that the scale is too large.
        if math.isfinite(loss) and (has_overflowed or math.isfinite(norm)):
            return not has_overflowed
        if self.args.on_nonfinite_loss == "stop":
            raise NonFiniteError(
                f"step {self.state.global_step + 1}: the loss is {loss} and the gradient's norm {norm}; lower "
                "learning_rate or max_grad_norm, look at the data, or set on_nonfinite_loss to skip"
            )
        if self.args.on_nonfinite_loss == "skip" and self.topology.is_main:
            logger.warning(
                f"step {self.state.global_step + 1} is skipped: its loss is {loss}, its gradient's norm {norm}"
            )
        return self.args.on_nonfinite_loss == "ignore" and not has_overflowed

    def _count(self, group: Sequence[Batch]) -> None:
        """Note how much a step has read and computed."""
        for batch in group:
            ids, mask = batch["input_ids"], batch.get("attention_mask")
            self._num_rows += len(ids)
            self.state.total_flos += 6 * ids.numel() * self._num_parameters
            if self.args.include_num_input_tokens_seen == "non_padding" and mask is not None:
                self.state.num_input_tokens_seen += int(mask.sum())
            elif self.args.include_num_input_tokens_seen != "no":
                self.state.num_input_tokens_seen += ids.numel()
        every = self.args.torch_empty_cache_steps
        if every and self.topology.device.type == "cuda" and self.state.global_step % every == 0:
            torch.cuda.empty_cache()

    def _log_evaluate_save(self, norm: float | None, rate: float | None) -> None:
        """Do what callbacks have asked for, in every process."""
        self._agree()
        if self._stop_signal:
            self._log_training(norm, rate)
            self._stop()
        if not (self.control.should_log or self.control.should_evaluate or self.control.should_save):
            return
        if self.control.should_log:
            self._log_training(norm, rate)
        if self.control.should_evaluate:
            self._evaluate_in_training()
        if self.control.should_save:
            self._save_in_training()
        # What was just called may have asked to stop.
        self._agree()
        if self._stop_signal:
            self._stop()

    def _evaluate_in_training(self) -> None:
        """Evaluate, and draw the consequences."""
        with self._meter.paused():
            metrics = self._evaluate_now()
        is_best = note_best(self.state, self.args, metrics)
        if takes_metric(self.lr_scheduler):
            self.lr_scheduler.step(metric_of(self.args, metrics))
        if self.args.save_strategy == "best":
            self.control.should_save = is_best

    def _evaluate_now(self) -> dict[str, float]:
        # An override need not know the argument, where nothing is asked for.
        return self.evaluate(ignore_keys=self._ignored_keys) if self._ignored_keys else self.evaluate()

    def _save_in_training(self) -> None:
        with self._meter.paused():
            self._save_checkpoint()
        self._fire("on_save")

    def _log_training(self, norm: float | None, rate: float | None) -> None:
        """Log the mean loss since the last time."""
        steps = self.state.global_step - self._last_logged_step
        if steps > 0:
            logs = {"loss": self._loss_since_log / steps, "grad_norm": norm, "learning_rate": rate}
            self._loss_logged += self._loss_since_log
            self._loss_since_log, self._last_logged_step = 0.0, self.state.global_step
            self.log({name: value for name, value in logs.items() if value is not None} | self._meter.read())

    @contextmanager
    def _stopping_on_request(self) -> Iterator[None]:
        """A scope in which SIGTERM and SIGINT ask the training to stop, where the arguments say so."""
        self._stop_signal = 0
        if not self.args.enable_jit_checkpoint:
            yield
            return
        with StopRequest(self.topology, self.args.stop_seconds) as self._stop_request:
            try:
                yield
            finally:
                self._stop_request = None

    def _stop(self) -> NoReturn:
        """Save this step, where that is not done yet, and end the program."""
        checkpoint = checkpoint_path(self._output_dir, self.state.global_step)
        self._evaluation_is_due = self.control.should_evaluate
        if self._last_saved_step != self.state.global_step:
            self._save_checkpoint()
            self._fire("on_save")
        self._fire("on_train_end")
        assert self._stop_request is not None
        self._stop_request.forget_peers()
        self.topology.barrier()
        if self.topology.is_main:
            name, step, steps = signal.Signals(self._stop_signal).name, self.state.global_step, self.state.max_steps
            print(
                f"stopped by {name} after step {step} of {steps}; all of it is saved in {checkpoint}: "
                f"{self.how_to_go_on} to go on from there",
                file=sys.stderr,
                flush=True,
            )
        raise TrainingStopped(self.state.global_step, checkpoint)

    def _finish(self, first_step: int, start_time: float) -> TrainOutput:
        steps = self.state.global_step - first_step
        loss = (self._loss_logged + self._loss_since_log) / max(steps, 1)
        rows = steps * self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps
        if self.args.batch_tokens is not None:
            rows = self._num_rows
        metrics = speed_metrics("train", start_time, num_samples=rows, num_steps=steps)
        metrics |= {"total_flos": self.state.total_flos, "train_loss": loss}
        metrics = self._shared(metrics)
        self.log(metrics)
        if self.args.load_best_model_at_end and self.state.best_model_checkpoint is not None:
            self.pipe.load_pretrained(self.state.best_model_checkpoint)
        self._fire("on_train_end")
        self.uploads.finish()
        return TrainOutput(self.state.global_step, loss, metrics)


#: What the class itself has under the names that a subclass may not override.
_OWN = own_attributes(PipelineTrainer)

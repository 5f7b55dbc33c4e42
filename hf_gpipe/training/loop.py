"""The loop of a training: steps over the mini-batches, and the work between steps that callbacks ask for."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import torch
import transformers
from transformers import TrainerControl, TrainerState

from hf_gpipe.adapters.text import num_tokens
from hf_gpipe.checkpoint.directory import step_of
from hf_gpipe.checkpoint.state import DataPosition, RunState
from hf_gpipe.job.job import Job
from hf_gpipe.libraries.transformers_trainer import TrainOutput
from hf_gpipe.planner.search.advice import advising
from hf_gpipe.registry import functions_of_modes
from hf_gpipe.runtime.batches import shared_stream
from hf_gpipe.training.base import restore_callbacks
from hf_gpipe.training.checkpoints import Checkpoints
from hf_gpipe.training.evaluator import metric_of, note_best
from hf_gpipe.training.loader import Batch, MiniBatches, in_groups
from hf_gpipe.training.logs import Logs
from hf_gpipe.training.optim import prepare_optimizer, takes_metric
from hf_gpipe.training.own_loader import OwnLoader
from hf_gpipe.training.steps import TrainingLength, data_facts
from hf_gpipe.training.stopping import StopRequest, TrainingStopped
from hf_gpipe.training.trainer_interface import TrainerInterface
from hf_gpipe.training.updates import updates_of
from hf_gpipe.training.windows import windows

logger = transformers.logging.get_logger(__name__)

#: The decisions that callbacks take.
_FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")


class TrainingLoop:
    """Runs a training from its first step to its last. Every process has one and calls it in step with the others.

    Args:
        trainer: the trainer, with its model and optimizer as they are before the training.
        batches: the mini-batches; None in processes that do not read data.
        asked: the checkpoint to resume from, as of `PipelineTrainer.train`.
        start_time: the start of this training, by `time.time`.
        is_whole: whether `asked` was already found to be complete; it is then the same in every process.
        ignored_keys: `ignore_keys` of the evaluations.
        resume_hint: what to do after a stop, for its message.
    """

    def __init__(
        self,
        trainer: TrainerInterface,
        batches: MiniBatches | OwnLoader | None,
        asked: Any,
        start_time: float,
        *,
        is_whole: bool = False,
        ignored_keys: list[str] | None = None,
        resume_hint: str = "start again",
    ) -> None:
        self._trainer, self._batches = trainer, batches
        self._ignored_keys, self._resume_hint = ignored_keys, resume_hint
        self._args, self._pipe, self._world = trainer.args, trainer.pipe, trainer.pipe.world
        per_epoch = self._world.from_main(lambda: None if batches is None else batches.count())
        self._length = TrainingLength.make(self._args, per_epoch)
        self._checkpoints = Checkpoints(trainer)
        # This comes first, since it gives back a checkpoint that was being replaced.
        self._checkpoints.tidy()
        checkpoint = asked if is_whole else self._checkpoints.find(asked)
        facts = data_facts(self._args, self._length)
        if checkpoint is not None:
            self._length = self._checkpoints.length_from(checkpoint, self._length, facts)
        optimizer, handler = prepare_optimizer(trainer, self._length.max_steps), trainer.callback_handler
        for check in functions_of_modes("training", "check"):
            check(trainer)
        handler.optimizer, handler.lr_scheduler, handler.train_dataloader = optimizer, trainer.lr_scheduler, batches
        self._run = RunState(
            position=DataPosition(epoch=0, mini_batches=0),
            pipeline_step=self._pipe.step,
            data=facts,
            further_steps=self._length.further_steps,
            num_micro_batches=self._pipe.num_micro_batches,
        )
        trainer.state = trainer.new_state()
        if checkpoint is not None:
            self._resume(checkpoint)
        state = trainer.state
        state.compute_steps(self._args, self._length.max_steps)
        state.max_steps, state.num_train_epochs = self._length.max_steps, self._length.num_epochs
        self._checkpoints.check(self._run)
        trainer.num_tokens_before = state.num_input_tokens_seen
        self._pipe.zero_grad()
        self._logs = Logs(trainer, start_time)
        self._logs.announce(self._length)
        self._first_step = state.global_step
        #: The padding token of the tokenizer, which the main process has.
        self._padding = self._world.from_main(lambda: getattr(trainer.processing_class, "pad_token_id", None))
        self._num_parameters = self._pipe.adapter.num_parameters(exclude_embeddings=True)
        self._updates = updates_of(trainer, self._logs)
        #: Gives the requests that `_agree` has sent last, if they may still have to be met; else None.
        self._sent: Callable[[], torch.Tensor] | None = None
        self._stop_request = StopRequest(self._world, self._args.stop_seconds, is_on=self._args.enable_jit_checkpoint)

    def _resume(self, checkpoint: Path) -> None:
        """Go on from a checkpoint: weights, optimizer, position in the data, callbacks and the best model so far."""
        trainer = self._trainer
        self._run, saved = self._checkpoints.resume(checkpoint, self._run)
        saved.train_batch_size = trainer.state.train_batch_size
        saved.is_local_process_zero = trainer.state.is_local_process_zero
        saved.is_world_process_zero = trainer.state.is_world_process_zero
        trainer.state = saved
        if self._args.restore_callback_states_from_checkpoint:
            restore_callbacks(trainer.callback_handler.callbacks, saved.stateful_callbacks, trainer.world)
        self._checkpoints.find_best(checkpoint)

    def train(self) -> TrainOutput:
        """Train to the end of the training.

        Raises:
            TrainingStopped: a signal came, and the last step is saved.
        """
        try:
            with self._stop_request, advising(self._pipe.plan, self._pipe.world.worker):
                self._run_epochs()
                self._end_save()
            self._pipe.weights.late.make()
            return self._finish()
        except BaseException as error:
            with suppress(Exception):  # the cause is `error`
                self._pipe.weights.late.make()
            self._checkpoints.give_up(error, self._args.stop_seconds)
            raise

    @property
    def _state(self) -> TrainerState:
        return self._trainer.state

    @property
    def _control(self) -> TrainerControl:
        return self._trainer.control

    # ------------------------------------------------------------------ steps

    def _run_epochs(self) -> None:
        with self._logs.meter.paused():
            self._trainer.fire("on_train_begin")
            if self._args.eval_on_start:
                self._evaluate_now()
        if self._run.evaluation_is_due:
            self._make_up_for_evaluation()
        for epoch in range(self._run.position.epoch, self._length.num_epochs):
            if self._control.should_training_stop or self._state.global_step >= self._length.max_steps:
                break
            self._run_epoch(epoch)

    def _run_epoch(self, epoch: int) -> None:
        self._trainer.fire("on_epoch_begin")
        begin = self._run.position if epoch == self._run.position.epoch else DataPosition(epoch=epoch, mini_batches=0)
        done, job, batches = begin.mini_batches, Job.current(), self._batches
        source = None
        if batches is not None:
            groups = in_groups(batches.epoch(epoch, done, begin.place), self._length.accumulation)
            source = islice(groups, self._length.max_steps - self._state.global_step)
        for window in windows(shared_stream(source, self._world), self._trainer):
            job.note(f"training step {self._state.global_step + 1}")
            self._trainer.fire("on_step_begin")
            window = [self._trainer.prepared(group) for group in window]
            self._updates.run(window)
            asked: set[str] = set()
            for number, group in enumerate(window):
                if number:
                    self._trainer.fire("on_step_begin")
                self._updates.note_step(number, len(group))
                self._count(group)
                self._trainer.num_trained_tokens += self._logs.count(group)
                done += len(group)
                # The position is after the last trained mini-batch: those that are read ahead are read again.
                place = None if batches is None else batches.place(done)
                self._run.position = DataPosition(epoch=epoch, mini_batches=done, place=place)
                self._state.global_step += 1
                self._state.epoch = epoch + self._length.fraction_of_epoch(done)
                self._trainer.fire("on_step_end")
                asked |= {flag for flag in _FLAGS if getattr(self._control, flag)}
            for flag in asked:
                # What a step before the last one asked for is done at the end of the window.
                setattr(self._control, flag, True)
            if self._state.global_step == self._first_step + len(window):
                # An optimizer makes its state in its first step, and a stream tells its place.
                self._checkpoints.check_state(self._run)
            self._log_evaluate_save(waits=self._updates.wait)
            if self._control.should_epoch_stop or self._control.should_training_stop:
                break
        if done == 0:
            # An iterable dataset is exhausted, so another epoch would give nothing either.
            self._control.should_training_stop = True
        # A training that stops inside an epoch, at max_steps say, has not had the rest of the epoch.
        if done == self._length.mini_batches_per_epoch or not self._control.should_training_stop:
            self._run.position = DataPosition(epoch=epoch + 1, mini_batches=0)
        self._trainer.fire("on_epoch_end")
        self._log_evaluate_save(waits=True)

    def _count(self, group: Sequence[Batch]) -> None:
        """Add to the state how much a step has computed and read."""
        for batch in group:
            inputs = self._pipe.adapter.main_input(batch)
            self._state.total_flos += 6 * inputs.numel() * self._num_parameters
            counted = self._args.include_num_input_tokens_seen
            if counted == "non_padding" and "attention_mask" in batch:
                self._state.num_input_tokens_seen += num_tokens(batch, decoder_only=True)
            elif counted == "non_padding" and self._padding is not None:
                self._state.num_input_tokens_seen += int((inputs != self._padding).sum())
            elif counted != "no":
                self._state.num_input_tokens_seen += inputs.numel()
            if counted == "non_padding" and self._padding is None and "attention_mask" not in batch:
                logger.warning_once(
                    "include_num_input_tokens_seen='non_padding' counts all tokens, since the mini-batches have no "
                    "attention_mask and the processing_class has no padding token"
                )
        every = self._args.torch_empty_cache_steps
        if every and self._world.device.type == "cuda" and self._state.global_step % every == 0:
            torch.cuda.empty_cache()

    # ------------------------------------------------------------------ between steps

    def _log_evaluate_save(self, *, waits: bool) -> None:
        """Do what callbacks have asked for, in every process; `waits` as for `_agree`."""
        is_written, stop_signal = self._agree(waits=waits)
        if waits or is_written or stop_signal or any(getattr(self._control, flag) for flag in _FLAGS):
            self._updates.read_late_numbers()
        if stop_signal:
            self._log()
            self._stop(stop_signal)
        control = self._control
        if not (is_written or control.should_log or control.should_evaluate or control.should_save):
            return
        if self._control.should_log:
            self._log()
        if self._control.should_evaluate or self._control.should_save:
            self._pipe.weights.late.make()
        if self._control.should_evaluate:
            self._evaluate()
        if self._control.should_save:
            self._save()
        elif is_written:
            self._end_save()
        # What was just called may have asked to stop.
        _, stop_signal = self._agree(waits=True)
        if stop_signal:
            self._stop(stop_signal)

    def _agree(self, *, waits: bool) -> tuple[bool, int]:
        """Agree on what callbacks or a signal asked for in any process: a process that did it alone would hang.

        Args:
            waits: whether to wait for the other processes, in all of them. If not, a process without requests goes on
                at once. Then requests that every process has are met now, and others at the next call, when all
                processes know of them.

        Returns:
            Whether a checkpoint that was begun is written, and the signal on which the training stops; 0: no signal.
        """
        asked = [int(getattr(self._control, flag)) for flag in _FLAGS]
        # When the first process has seen that the checkpoint is written, all processes are done or have failed.
        asked += [int(self._checkpoints.is_written), self._stop_request.signal]
        if self._sent is not None:
            asked = [max(pair) for pair in zip(asked, self._sent().amax(dim=1).tolist(), strict=True)]
        # A row for each kind of request, a column for each process.
        requests = torch.zeros(len(asked), self._world.num_processes, dtype=torch.int64)
        requests[:, self._world.rank] = torch.tensor(asked)
        self._sent, agreed = self._world.begin_sum(requests), [0] * len(asked)
        if waits or any(asked):
            everyone = self._sent()
            if waits or everyone.any(dim=0).all():
                self._sent, agreed = None, everyone.amax(dim=1).tolist()
        for flag, value in zip(_FLAGS, agreed, strict=False):
            setattr(self._control, flag, bool(value))
        return bool(agreed[-2]), agreed[-1]

    def _log(self) -> None:
        logs = self._logs.read(self._updates.norm, self._updates.rate)
        if logs is not None:
            self._trainer.log(logs)

    def _evaluate(self) -> None:
        """Evaluate, and update the best metric and the learning rate."""
        with self._logs.meter.paused():
            metrics = self._evaluate_now()
        is_best = note_best(self._trainer, metrics)
        if takes_metric(self._trainer.lr_scheduler):
            self._trainer.lr_scheduler.step(metric_of(self._args, metrics))
        if self._args.save_strategy == "best":
            self._control.should_save = is_best

    def _evaluate_now(self) -> dict[str, float]:
        # An override need not know the argument, where nothing is asked for.
        return (
            self._trainer.evaluate(ignore_keys=self._ignored_keys) if self._ignored_keys else self._trainer.evaluate()
        )

    def _make_up_for_evaluation(self) -> None:
        """Run the evaluation that was due when the training was stopped."""
        self._run.evaluation_is_due = False
        self._evaluate()
        if self._state.best_global_step == self._state.global_step:
            # The step is saved again, since its checkpoint does not know yet that it is the best.
            self._save()

    def _save(self) -> None:
        """Write a checkpoint, or begin to write it in the background, once the one before is written."""
        self._end_save()
        trainer, state = self._trainer, self._state
        self._control.should_save = False
        with self._logs.meter.paused():
            if self._args.save_total_limit is not None:
                # What is being uploaded must not be deleted.
                trainer.uploads.finish()
            if state.best_global_step == state.global_step:
                state.best_model_checkpoint = str(self._checkpoints.path(state.global_step))
            # A new state has the present state of callbacks that keep one.
            state.stateful_callbacks = trainer.new_state().stateful_callbacks
            self._checkpoints.begin(self._run)
        if not self._checkpoints.is_in_background:
            self._end_save()

    def _end_save(self) -> None:
        """Wait until the checkpoint that was begun, if any, is written; upload it, and tell the callbacks."""
        trainer, state = self._trainer, self._state
        with self._logs.meter.paused():
            saved = self._checkpoints.end()
            if saved is not None and self._args.push_to_hub:
                trainer.fire("on_push_begin")
                if self._world.is_main:
                    trainer.uploads.push_checkpoint(saved.path, f"Training in progress, step {saved.step}")
        if saved is None:
            return
        # The callbacks find the checkpoint by the state's step.
        now, asks_again = (state.global_step, state.epoch), self._control.should_save
        state.global_step, state.epoch = saved.step, saved.epoch
        try:
            trainer.fire("on_save")
        finally:
            state.global_step, state.epoch = now
        self._control.should_save |= asks_again

    # ------------------------------------------------------------------ the end

    def _stop(self, stop_signal: int) -> NoReturn:
        """Save this step, unless it is saved, and end the program."""
        step, steps = self._state.global_step, self._state.max_steps
        checkpoint = self._checkpoints.path(step)
        self._run.evaluation_is_due = self._control.should_evaluate
        if self._checkpoints.saved_step != step:
            self._save()
        self._end_save()
        self._trainer.fire("on_train_end")
        self._stop_request.peers = []  # all is saved, so they may end now
        self._world.barrier()
        if self._world.is_main:
            print(
                f"stopped by {signal.Signals(stop_signal).name} after step {step} of {steps}; all of it is saved in "
                f"{checkpoint}: {self._resume_hint} to go on from there",
                file=sys.stderr,
                flush=True,
            )
        raise TrainingStopped(step, checkpoint)

    def _load_best_model(self) -> None:
        state = self._state
        if self._checkpoints.find_best() is not None:
            self._pipe.load_pretrained(Path(state.best_model_checkpoint or ""))
        saved = None if state.best_model_checkpoint is None else step_of(Path(state.best_model_checkpoint))
        if state.best_global_step is None and self._world.is_main:
            logger.warning(
                f"no evaluation gave a number as {self._args.metric_for_best_model!r}, so none is the best; the model "
                f"is that of step {state.global_step}"
            )
        elif saved != state.best_global_step and self._world.is_main:
            logger.warning(
                f"the best evaluation was that of step {state.best_global_step}, of which there is no checkpoint; the "
                f"model is that of step {state.global_step if saved is None else saved}. Save as often as you evaluate "
                "to get the best one"
            )

    def _finish(self) -> TrainOutput:
        mine = self._logs.summary()
        metrics = self._world.broadcast_value(mine, self._world.main)
        if self._logs.has_more_steps:
            metrics |= self._trainer.metrics_of_loss(is_training=True)
        self._trainer.log(metrics)
        if self._args.load_best_model_at_end:
            self._load_best_model()
        self._trainer.fire("on_train_end")
        self._trainer.uploads.finish()
        return TrainOutput(self._state.global_step, mine["train_loss"], metrics)

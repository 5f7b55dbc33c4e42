"""The checkpoints of a training: found, checked, resumed from, written and rotated."""

from __future__ import annotations

import copy
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import transformers
from transformers import TrainerState

from hf_gpipe import strict_json
from hf_gpipe.checkpoint.directory import (
    check_shared,
    check_whole,
    checkpoint_path,
    find_model_damage,
    last_checkpoint,
    rotate,
    tidy,
)
from hf_gpipe.checkpoint.save import remove, temporary_path, write_once, written_whole
from hf_gpipe.checkpoint.state import DataPosition, RunState, check_state, load_state, read_state, read_trainer_state
from hf_gpipe.checkpoint.writer import CheckpointWriter
from hf_gpipe.errors import CheckpointError, UserError
from hf_gpipe.job import failures
from hf_gpipe.job.facts import available_memory
from hf_gpipe.job.job import Job
from hf_gpipe.libraries.transformers import CONFIG_NAME
from hf_gpipe.settings.mode import AUTO
from hf_gpipe.text import size_text
from hf_gpipe.training.master_weights import SLOT
from hf_gpipe.training.optim import set_rates, updated_parameters
from hf_gpipe.training.steps import TrainingLength, changed_sizes, resumed_position
from hf_gpipe.training.trainer_interface import TrainerInterface, may_read_weights

logger = transformers.logging.get_logger(__name__)

#: The share of a machine's available memory that copies may take: the files that are written need as much again until
#: they are on the disk.
_COPIES_SHARE = 0.5


class Saving(NamedTuple):
    """A checkpoint that was begun.

    Attributes:
        path: its directory, once it is written.
        step: the number of updates that had been made.
        epoch: the epoch at that step.
        outcome: the future of the thread that writes it; None: it is written.
    """

    path: Path
    step: int
    epoch: float | None
    outcome: Future[None] | None


class Checkpoints:
    """The checkpoints in an output directory. Every process has one and calls it in step with the others.

    Args:
        trainer: the trainer, whose state, optimizer's state and weights are saved and loaded.

    Attributes:
        saved_step: the step whose checkpoint was begun last; None: none so far.
    """

    def __init__(self, trainer: TrainerInterface) -> None:
        self._trainer, self._args, self._pipe = trainer, trainer.args, trainer.pipe
        self._world, self._for_saving = trainer.pipe.world, trainer.pipe.world.for_thread("saving")
        self._output_dir = Path(trainer.args.output_dir)
        self._saving: Saving | None = None
        self._has_warned = False
        args = trainer.args
        self._saves = args.save_strategy != "no" or args.enable_jit_checkpoint
        self.saved_step: int | None = None

    def path(self, step: int) -> Path:
        """The directory of the checkpoint after `step` updates."""
        return checkpoint_path(self._output_dir, step)

    def tidy(self) -> None:
        """Make the output directory ready. Raises CheckpointError where checkpoints cannot be written there."""
        if self._saves:
            check_shared(self._output_dir, self._world)
        self._world.from_main(lambda: tidy(self._output_dir))

    def find(self, wanted: str | os.PathLike[str] | bool | None) -> Path | None:
        """Find the checkpoint that the main process asks for, and check that it is complete. True: the newest."""
        asked = self._world.from_main(lambda: os.fspath(wanted) if isinstance(wanted, os.PathLike) else wanted)
        if asked is None or asked is False:
            return None
        if asked is not True and (not isinstance(asked, str) or "\0" in asked):
            raise UserError(
                f"resume_from_checkpoint={asked!r}: expected the directory of a checkpoint, or True for the newest one "
                "in output_dir"
            )
        with Job.current().during("checking the checkpoint"):
            if asked is True:
                return last_checkpoint(self._output_dir, self._world)
            check_whole(Path(asked), self._world)
        return Path(asked)

    def length_from(self, checkpoint: Path, length: TrainingLength, facts: Mapping[str, Any]) -> TrainingLength:
        """The length of a training that resumes, whose steps may have had another size before; this is a warning.

        Args:
            checkpoint: the checkpoint to resume from.
            length: of a training that begins anew with the present arguments.
            facts: of its data.

        Raises CheckpointError where the checkpoint's place in the data means other rows.
        """
        saved, step = read_state(checkpoint).run, read_trainer_state(checkpoint).global_step
        has_max_steps = self._args.max_steps > 0 or length.mini_batches_per_epoch is None
        if not (sizes := changed_sizes(saved.data, facts)):
            return length if has_max_steps else length.with_further_steps(saved.further_steps)
        if not has_max_steps:
            before = length.steps_before(self._position(checkpoint, saved, facts))
            length = length.with_further_steps(step - before)
        if self._world.is_main:
            logger.warning(
                f"{sizes}: the training goes on with the rows that are left, and step {step} is followed by steps of "
                f"the new size up to step {length.max_steps}, by which the learning rate changes"
            )
        return length

    def _position(self, checkpoint: Path, saved: RunState, facts: Mapping[str, Any]) -> DataPosition:
        if self._args.ignore_data_skip:
            return DataPosition(epoch=saved.position.epoch, mini_batches=0)
        return resumed_position(checkpoint, saved, facts)

    def resume(self, checkpoint: Path, new: RunState) -> tuple[RunState, TrainerState]:
        """Load the weights, the loss's scale, and the state of the optimizer and its scheduler.

        Args:
            checkpoint: the checkpoint to resume from.
            new: the state of a run that begins anew with the present arguments.

        Returns:
            The state of the run, which says how far it had come, and transformers' state.

        Raises:
            CheckpointError: the checkpoint cannot be read, or does not fit.
        """
        saved = read_state(checkpoint).run
        state = read_trainer_state(checkpoint)
        saved.position = self._position(checkpoint, saved, new.data)
        before, now = saved.num_micro_batches, new.num_micro_batches
        if self._args.num_micro_batches in (None, AUTO) and before not in (None, now) and self._world.is_main:
            logger.warning(
                f"num_micro_batches is {now} here, and {checkpoint} was trained with {before}: dropout will be "
                f"another; give num_micro_batches={before} for the same run"
            )
        _check_dtype(checkpoint, str(self._pipe.adapter.dtype).removeprefix("torch."))
        self._pipe.load_pretrained(checkpoint)
        trainer, weights = self._trainer, self._pipe.weights
        optimizer, scheduler = trainer.made_optimizer(), trainer.lr_scheduler
        updated, shards = updated_parameters(trainer), weights.shards_of(optimizer)
        load_state(checkpoint, updated, optimizer, scheduler, shards, weights.part)
        set_rates(optimizer, scheduler)
        if trainer.master_weights is not None:
            trainer.master_weights.restore(optimizer)
        else:
            # A run with float32 copies has saved them; kept, they would be saved again, and be those of old weights.
            for slots in optimizer.state.values():
                slots.pop(SLOT, None)
        if trainer.scaler is not None and saved.loss_scale is not None:
            trainer.scaler.load_state_dict(saved.loss_scale)
        self._pipe.step = saved.pipeline_step
        saved.data, saved.num_micro_batches, saved.further_steps = new.data, now, new.further_steps
        return saved, state

    def find_best(self, resumed: Path | None = None) -> Path | None:
        """The checkpoint of the best model, if it can be read; otherwise the state forgets it. Every process calls it.

        Args:
            resumed: the checkpoint that the training goes on from. The best one may have been moved together with it.
        """
        state = self._trainer.state
        if state.best_model_checkpoint is None:
            return None
        best, problems = Path(state.best_model_checkpoint), []
        for path in (best, *([] if resumed is None else [resumed.parent / best.name])):
            with Job.current().during("checking the best checkpoint"):
                problem = find_model_damage(path, self._world, checks_bytes=resumed is None)
            if not problem:
                state.best_model_checkpoint = str(path)
                return path
            problems.append(problem)
        state.best_model_checkpoint = None
        if self._world.is_main:
            logger.warning(
                f"the best model so far, of step {state.best_global_step}, cannot be loaded: {problems[0]}; what "
                "is trained is not lost, and a later model takes its place if it is better"
            )
        return None

    def check(self, run: RunState) -> None:
        """Raise UserError where no checkpoint of this training could be written; all but the tensors is tried.

        Without checkpoints the model may be saved at the end, and what would hinder it is a warning.
        """
        directory = temporary_path(self.path(0))
        with Job.current().during("preparing for checkpoints"):
            self.check_state(run)
            try:
                self._trainer.try_to_save(self._pipe.weights.writer(self._for_saving), directory)
            except UserError as error:
                if self._saves:
                    raise
                if self._world.is_main:
                    logger.warning(f"the trained model could not be saved: {error}")
            finally:
                if self._world.is_main:
                    remove(directory)

    def check_state(self, run: RunState) -> None:
        """Raise CheckpointError for a value of the optimizer, its scheduler or the data that cannot be saved."""
        if self._saves and not self._args.save_only_model:
            self._pipe.weights.late.make()
            check_state(self._trainer.made_optimizer(), self._trainer.lr_scheduler, run)

    def begin(self, run: RunState) -> None:
        """Write the checkpoint of this step, or copy it and write it in the background; then rotate. `end` follows.

        With `save_only_model` it has nothing that a training needs to resume.

        Args:
            run: how far the run has come. The pipeline's state and the loss's scale are added to it.
        """
        assert self._saving is None, "at most one checkpoint is being written"
        run.pipeline_step = self._pipe.step
        state, scaler = self._trainer.state, self._trainer.scaler
        run.loss_scale = None if scaler is None else scaler.state_dict()
        final = self.path(state.global_step)
        with Job.current().during(f"saving {final.name}"), ExitStack() as stack:
            directory = stack.enter_context(written_whole(final, self._for_saving))
            writer = self._pipe.weights.writer(self._for_saving)
            self._trainer.begin_to_save(writer, directory)
            if not self._args.save_only_model:
                self._add_state(writer, run)
            if is_in_background := self._may_copy(writer.num_bytes):
                writer.copy()
            # The state changes, and other checkpoints become the best one, while this one is written.
            snapshot = copy.deepcopy(state) if self._world.is_main else state
            # A checkpoint with a higher number may be there from an earlier run, and be damaged.
            keep = final, Path(state.best_model_checkpoint or final)
            write = partial(self._write, stack.pop_all(), writer, snapshot, keep)
            self.saved_step = state.global_step
            outcome: Future[None] | None = None
            if is_in_background:
                outcome = Future()
                # A daemon: a thread that waits for a process that is lost must not keep this one from ending.
                threading.Thread(target=_run, args=(write, outcome), name="hf_gpipe-saving", daemon=True).start()
            else:
                write()
            self._saving = Saving(final, state.global_step, state.epoch, outcome)

    @property
    def is_in_background(self) -> bool:
        """Whether a checkpoint is being written in the background, or its end was not noted yet."""
        return self._saving is not None and self._saving.outcome is not None

    @property
    def is_written(self) -> bool:
        """Whether a checkpoint that was begun is written, or failed, in this process: all may call `end`."""
        return self._saving is not None and (self._saving.outcome is None or self._saving.outcome.done())

    def end(self) -> Saving | None:
        """Wait until the checkpoint that was begun is written, and return it. None: no checkpoint was begun.

        Raises:
            CheckpointError: on every process, if one of them could not write.
        """
        saving, self._saving = self._saving, None
        if saving is not None and saving.outcome is not None:
            with Job.current().during(f"saving {saving.path.name}"):
                saving.outcome.result()
        return saving

    def give_up(self, error: BaseException, within: float) -> None:
        """Before the training ends by an error, let a checkpoint be written that all processes have copied.

        A process waits for other processes for `within` seconds at most, since they may have ended.
        """
        if self._saving is None or self._saving.outcome is None:
            return
        if isinstance(error, Exception):
            # Other processes may fail because this one does, while it waits.
            failures.note(error)
        with Job.current().during(f"saving {self._saving.path.name}"):
            wait([self._saving.outcome], within if self._world.num_processes > 1 else None)

    def _add_state(self, writer: CheckpointWriter, run: RunState) -> None:
        masters, optimizer = self._trainer.master_weights, self._trainer.made_optimizer()
        with masters.in_state_of(optimizer) if masters is not None else nullcontext():
            updated, shards = updated_parameters(self._trainer), self._pipe.weights.shards_of(optimizer)
            writer.add_state(updated, optimizer, self._trainer.lr_scheduler, run, shards)

    def _may_copy(self, num_bytes: int) -> bool:
        """Whether a checkpoint is copied, and written in the background. The same in every process.

        Args:
            num_bytes: of this process's copies.
        """
        asked = self._args.save_in_background
        if asked != "auto":
            return asked == "always"
        # The model that `on_save` sees must be that of the checkpoint.
        looks = any(may_read_weights(callback, "on_save") for callback in self._trainer.callback_handler.callbacks)
        copied = Counter[str]()
        hosts, everyone = self._world.hosts, self._world.gather_objects((num_bytes, available_memory(), looks))
        if any(looks for _, _, looks in everyone):
            return False
        for host, (size, _, _) in zip(hosts, everyone, strict=True):
            copied[host] += size
        may = all(copied[host] <= _COPIES_SHARE * there for host, (_, there, _) in zip(hosts, everyone, strict=True))
        if not may and not self._has_warned and self._world.is_main:
            self._has_warned = True
            logger.warning(
                f"the training waits while a checkpoint is written: for copies of {size_text(num_bytes)} in this "
                'process, and those of the others, too little memory is available (save_in_background="auto")'
            )
        return may

    def _write(self, stack: ExitStack, writer: CheckpointWriter, state: TrainerState, keep: Sequence[Path]) -> None:
        """Write a checkpoint, give it its name by leaving the context managers of `stack`, and rotate."""
        with stack:
            writer.write(state)
        limit = self._args.save_total_limit
        write_once(self._output_dir, self._for_saving, lambda: rotate(self._output_dir, limit, keep))


def _run(write: Callable[[], None], outcome: Future[None]) -> None:
    try:
        write()
        outcome.set_result(None)
    except BaseException as error:  # told by the thread that waits
        outcome.set_exception(error)


def _check_dtype(checkpoint: Path, now: str) -> None:
    """Raise CheckpointError if the weights were trained in another type, by their configuration."""
    file = checkpoint / CONFIG_NAME
    before = strict_json.read(file, dict[str, Any], allows_nan=True).get("dtype") if file.is_file() else None
    if before not in (None, now):
        raise CheckpointError(f"{checkpoint} has weights of {before}, and this run of {now}; give dtype={before!r}")

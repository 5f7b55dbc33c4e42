"""The checkpoints of a training: found, checked, resumed from, written and rotated."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import TrainerState

from hf_gpipe.checkpoint import digests
from hf_gpipe.checkpoint.directory import (
    check_shared,
    check_whole,
    checkpoint_path,
    last_checkpoint,
    rotate,
    tidy,
    written_whole,
)
from hf_gpipe.checkpoint.run_state import Position, RunState
from hf_gpipe.checkpoint.save import write_files
from hf_gpipe.checkpoint.state import load_state, read_state, save_state
from hf_gpipe.checkpoint.together import write_once
from hf_gpipe.errors import CheckpointError
from hf_gpipe.pipeline import Pipeline
from hf_gpipe.recipe import AUTO
from hf_gpipe.runtime.job import Job
from hf_gpipe.training.arguments import PipelineTrainingArguments
from hf_gpipe.training.loss_scaling import LossScaler
from hf_gpipe.training.master_weights import MasterWeights
from hf_gpipe.training.optim import set_rates, updated_parameters
from hf_gpipe.training.steps import OLDER_DATA_FACTS

logger = transformers.logging.get_logger(__name__)

STATE_NAME = "trainer_state.json"

Scheduler = torch.optim.lr_scheduler.LRScheduler


class Checkpoints:
    """The checkpoints in an output directory. Every process has one and calls it in step with the others.

    Args:
        args: the trainer's arguments.
        pipe: whose weights are saved and loaded.
        master_weights: the float32 copies that the optimizer updates, if any.
        scaler: of the loss, if any.

    Attributes:
        saved_step: the step that was saved last; None: none so far.
    """

    def __init__(
        self,
        args: PipelineTrainingArguments,
        pipe: Pipeline,
        master_weights: MasterWeights | None,
        scaler: LossScaler | None,
    ) -> None:
        self._args, self._pipe, self._master_weights, self._scaler = args, pipe, master_weights, scaler
        self._topology = pipe.topology
        self._output_dir = Path(args.output_dir)
        self.saved_step: int | None = None

    def path(self, step: int) -> Path:
        """Where the checkpoint after `step` updates is."""
        return checkpoint_path(self._output_dir, step)

    def tidy(self) -> None:
        """Make the output directory ready. Raises CheckpointError where checkpoints cannot be written there."""
        if self._args.save_strategy != "no" or self._args.enable_jit_checkpoint:
            check_shared(self._output_dir, self._topology)
        self._topology.from_writer(lambda: tidy(self._output_dir))

    def find(self, wanted: str | os.PathLike[str] | bool | None) -> Path | None:
        """The checkpoint that the main process asks for, found to be whole; with True the newest one, if any."""
        asked = self._topology.from_reader(lambda: wanted)
        if asked is None or asked is False:
            return None
        with Job.current().during("checking the checkpoint"):
            if asked is True:
                return last_checkpoint(self._output_dir, self._topology)
            check_whole(Path(asked), self._topology)
        return Path(asked)

    def resume(
        self, checkpoint: Path, new: RunState, optimizer: torch.optim.Optimizer, scheduler: Scheduler | None
    ) -> tuple[RunState, TrainerState]:
        """Load the weights, the loss's scale, and the state of the optimizer and its scheduler.

        Args:
            checkpoint: to resume from.
            new: of a run that begins anew with the present arguments.
            optimizer: of the parameters of this process.
            scheduler: of the optimizer.

        Returns:
            How far the run had come, and transformers' state.

        Raises:
            CheckpointError: the checkpoint cannot be read, or does not fit.
        """
        saved = read_state(checkpoint).run
        try:
            state = TrainerState.load_from_json(checkpoint / STATE_NAME)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{checkpoint}: no training state that can be read: {error!r}") from error
        if not self._args.ignore_data_skip:
            _check_data(checkpoint, saved.data, new.data)
        before, now = saved.num_micro_batches, new.num_micro_batches
        if self._args.num_micro_batches == AUTO and before not in (None, now) and self._topology.is_reporter:
            logger.warning(
                f"num_micro_batches='auto' is {now} here, and {checkpoint} was trained with {before}: dropout will be "
                f"another; give num_micro_batches={before} for the same run"
            )
        self._pipe.load_pretrained(checkpoint)
        updated, shards = updated_parameters(self._pipe, self._master_weights), self._pipe.shards_of(optimizer)
        load_state(checkpoint, updated, optimizer, scheduler, shards)
        set_rates(optimizer, scheduler)
        if self._master_weights is not None:
            self._master_weights.restore(optimizer)
        if self._scaler is not None and saved.loss_scale is not None:
            self._scaler.load_state_dict(saved.loss_scale)
        self._pipe.step = saved.pipeline_step
        position = Position(saved.position.epoch) if self._args.ignore_data_skip else saved.position
        return replace(saved, position=position, data=new.data, num_micro_batches=now), state

    def write(
        self,
        run: RunState,
        state: TrainerState,
        optimizer: torch.optim.Optimizer,
        scheduler: Scheduler | None,
        save_model: Callable[[str], None],
    ) -> Path:
        """Write the checkpoint of this step; with `save_only_model` without what a training needs to resume.

        Args:
            run: how far the run has come; what the pipeline and the loss's scale are at is noted in it.
            state: transformers' state.
            optimizer: of the parameters of this process.
            scheduler: of the optimizer.
            save_model: writes model and tokenizer into a directory.
        """
        run.pipeline_step = self._pipe.step
        run.loss_scale = None if self._scaler is None else self._scaler.state_dict()
        final = self.path(state.global_step)
        with Job.current().during(f"saving {final.name}"), written_whole(final, self._topology) as directory:
            save_model(str(directory))
            written: dict[str, digests.Entry] = {}
            if not self._args.save_only_model:
                masters = self._master_weights
                updated, stage_of = updated_parameters(self._pipe, masters), self._pipe.ties.owner_stage
                shards = self._pipe.shards_of(optimizer)
                with masters.in_state_of(optimizer) if masters is not None else nullcontext():
                    written = save_state(
                        directory, updated, stage_of, optimizer, scheduler, run, self._topology, shards
                    )

            def complete() -> None:
                with digests.updated(directory, state.global_step) as entries:
                    state.save_to_json(directory / STATE_NAME)
                    entries |= written | {STATE_NAME: digests.entry_of_file(directory / STATE_NAME)}

            write_once(directory, self._topology, complete)
        self.saved_step = state.global_step
        return final

    def rotate(self, *keep: str | os.PathLike[str]) -> None:
        """Delete the oldest checkpoints but `save_total_limit`; those in `keep` stay."""
        limit, paths = self._args.save_total_limit, [Path(path) for path in keep]
        write_once(self._output_dir, self._topology, lambda: rotate(self._output_dir, limit, paths))


def write_model(directory: Path, pipe: Pipeline, tokenizer: Any) -> None:
    """Write a model and its tokenizer, if any, in Hub format. Every process calls it."""
    pipe.save_pretrained(directory)

    def write() -> None:
        if tokenizer is not None:
            with digests.updated(directory) as entries:
                entries |= write_files(directory, tokenizer.save_pretrained)

    write_once(directory, pipe.topology, write)


def _check_data(checkpoint: Path, saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise CheckpointError if a position in the data stands for other rows now."""
    for name, value in now.items():
        before = saved.get(name, OLDER_DATA_FACTS.get(name))
        if before != value:
            raise CheckpointError(
                f"{checkpoint} was written with {name}={before!r} and this run has {value!r}, so its "
                "place in the data means other rows; use the same value, or ignore_data_skip=True to begin its "
                "epoch anew"
            )

"""Checkpoints of the trainer: saved, uploaded, and resumed from."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import TrainerState, trainer_pt_utils
from transformers.trainer_callback import ExportableState

from hf_gpipe.checkpoint import digests
from hf_gpipe.checkpoint.directory import check_whole, checkpoint_path, last_checkpoint, rotate, written_whole
from hf_gpipe.checkpoint.save import make_directory, write_files
from hf_gpipe.checkpoint.state import load_progress, load_state, save_state
from hf_gpipe.checkpoint.together import write_on_main
from hf_gpipe.errors import CheckpointError
from hf_gpipe.recipe import AUTO
from hf_gpipe.training.evaluating import EvaluatingTrainer
from hf_gpipe.training.model_card import write_model_card
from hf_gpipe.training.steps import Position

logger = transformers.logging.get_logger(__name__)

STATE_NAME = "trainer_state.json"

#: Arguments that older checkpoints do not mention, and what they were then.
_SAMPLING = {"batch_tokens": None, "sampling_temperature": 1.0}


class SavingTrainer(EvaluatingTrainer):
    """A trainer whose model and progress can be saved, and that goes on from what was saved."""

    #: Where in the data the training stands, the mini-batches of an epoch, and the step that was saved last.
    _position: Position
    _mini_batches_per_epoch: int | None
    _last_saved_step: int
    #: A checkpoint that was found to be whole before there was a trainer.
    checked_checkpoint: Path | None = None
    #: Whether the training is being stopped before the evaluation of its last step.
    _evaluation_is_due = False

    def save_model(self, output_dir: str | os.PathLike[str] | None = None, _internal_call: bool = False) -> None:
        """Write model and tokenizer in Hub format, by default into `args.output_dir`. Every process calls it.

        With `push_to_hub` the model is then uploaded, as transformers' Trainer does.

        Args:
            output_dir: where to.
            _internal_call: whether the trainer calls it, for a checkpoint or an upload, and uploads nothing itself.
        """
        directory = Path(output_dir) if output_dir is not None else self._output_dir
        self._write_model(directory)
        if self.args.push_to_hub and not _internal_call:
            self._push(directory, "Model save", {})

    def create_model_card(
        self,
        language: str | None = None,
        license: str | None = None,
        tags: str | list[str] | None = None,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        tasks: str | list[str] | None = None,
        dataset_tags: str | list[str] | None = None,
        dataset: str | list[str] | None = None,
        dataset_args: str | list[str] | None = None,
    ) -> None:
        """Draft the model card, README.md in `args.output_dir`, as transformers' Trainer does; the main process does.

        Args:
            language: of the model.
            license: of the model.
            tags: of the model.
            model_name: the card's title; None: the output directory's name.
            finetuned_from: the model that was trained further; None: what its configuration says.
            tasks: of the model; None: what its class is for.
            dataset_tags: names of the datasets on the Hub.
            dataset: names of the datasets for people.
            dataset_args: their configurations.

        Raises:
            UserError: the directory cannot be made.
        """
        if not self.is_world_process_zero():
            return
        make_directory(self._output_dir)
        write_model_card(
            self,
            self._output_dir / "README.md",
            language=language,
            license=license,
            tags=tags,
            model_name=model_name,
            finetuned_from=finetuned_from,
            tasks=tasks,
            dataset_tags=dataset_tags,
            dataset=dataset,
            dataset_args=dataset_args,
        )

    #: Makes the values of metrics readable, for `log_metrics`.
    metrics_format = staticmethod(trainer_pt_utils.metrics_format)

    def log_metrics(self, split: str, metrics: dict[str, Any]) -> None:
        """Print metrics as a table, as transformers' Trainer does; the main process does."""
        trainer_pt_utils.log_metrics(self, split, metrics)

    def save_metrics(self, split: str, metrics: dict[str, Any], combined: bool = True) -> None:
        """Write metrics into `{split}_results.json` of `args.output_dir`; the main process does.

        Args:
            split: "train", "eval", "test" or "all".
            metrics: what `train`, `evaluate` or `predict` gave.
            combined: whether they are also added to all_results.json.

        Raises:
            UserError: the directory cannot be made.
        """
        if self.is_world_process_zero():
            make_directory(self._output_dir)
        trainer_pt_utils.save_metrics(self, split, metrics, combined)

    def save_state(self) -> None:
        """Write the state of the training, with its log, into `args.output_dir`; the main process does.

        Raises UserError where the directory cannot be made.
        """
        if self.is_world_process_zero():
            make_directory(self._output_dir)
        trainer_pt_utils.save_state(self)

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
        return self._push(self._output_dir, commit_message or "End of training", card, blocking, token, revision)

    def _push(
        self,
        directory: Path,
        message: str,
        card: dict[str, Any],
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
    ) -> Any:
        self._fire("on_push_begin")
        if directory == self._output_dir:
            name = (self.args.hub_model_id or directory.absolute().name).rpartition("/")[2]
            self.topology.from_main(lambda: self.create_model_card(**{"model_name": name, **card}))
        return self.uploads.push(directory, message, blocking=blocking, token=token, revision=revision)

    def _write_model(self, directory: Path) -> None:
        self._check_surface()
        self.pipe.save_pretrained(directory)
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)

        def write() -> None:
            if tokenizer is not None:
                with digests.updated(directory) as entries:
                    entries |= write_files(directory, tokenizer.save_pretrained)

        write_on_main(directory, self.topology, write)

    def _save_checkpoint(self) -> None:
        assert self.optimizer is not None
        final = checkpoint_path(self._output_dir, self.state.global_step)
        if self.state.best_global_step == self.state.global_step:
            self.state.best_model_checkpoint = str(final)
        with self.job.during(f"saving {final.name}"), written_whole(final, self.topology) as directory:
            self.save_model(str(directory), _internal_call=True)
            written: dict[str, digests.Entry] = {}
            if not self.args.save_only_model:
                progress = {
                    "has_digests": True,
                    "position": asdict(self._position),
                    "pipeline_step": self.pipe.step,
                    "data": self._data_facts(),
                    "evaluation_is_due": self._evaluation_is_due,
                    "num_micro_batches": self.pipe.num_micro_batches,
                }
                progress["loss_scale"] = None if self.scaler is None else self.scaler.state_dict()
                stage_of, masters = self.pipe.ties.owner_stage, self.master_weights
                with masters.in_state_of(self.optimizer) if masters is not None else nullcontext():
                    updated = self._updated_parameters()
                    written = save_state(
                        directory, updated, stage_of, self.optimizer, self.lr_scheduler, progress, self.topology
                    )
            # The constructor takes the present state of callbacks that keep one.
            self.state.stateful_callbacks = TrainerState(stateful_callbacks=self._stateful()).stateful_callbacks

            def complete() -> None:
                with digests.updated(directory, self.state.global_step) as entries:
                    self.state.save_to_json(directory / STATE_NAME)
                    entries |= written | {STATE_NAME: digests.entry_of_file(directory / STATE_NAME)}

            write_on_main(directory, self.topology, complete)
        self._last_saved_step = self.state.global_step
        if self.args.push_to_hub:
            self._fire("on_push_begin")
            if self.topology.is_main:
                self.uploads.push_checkpoint(final, f"Training in progress, step {self.state.global_step}")
        best, limit = self.state.best_model_checkpoint, self.args.save_total_limit
        # One with a higher number may lie there since an earlier run, and be damaged.
        keep = [final, *([Path(best)] if best is not None else [])]
        if limit is not None:
            # What is being uploaded must not be deleted.
            self.uploads.finish()
        write_on_main(self._output_dir, self.topology, lambda: rotate(self._output_dir, limit, keep))

    def _checkpoint_to_resume(self, asked: str | os.PathLike[str] | bool | None) -> Path | None:
        """Where to resume from, as the main process sees it: a checkpoint that is whole."""
        asked = self._shared(asked)
        if asked is None or asked is False:
            return None
        with self.job.during("checking the checkpoint"):
            if asked is True:
                return last_checkpoint(self._output_dir, self.topology)
            checkpoint = Path(asked)
            if checkpoint != self.checked_checkpoint:
                check_whole(checkpoint, self.topology)
        return checkpoint

    def _resume(self, checkpoint: Path) -> None:
        assert self.optimizer is not None
        progress = load_progress(checkpoint)
        try:
            position, pipeline_step = Position(**progress["position"]), progress["pipeline_step"]
            data = progress["data"]
            state = TrainerState.load_from_json(checkpoint / STATE_NAME)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{checkpoint}: no training state that can be read: {error!r}") from error
        self._check_data(checkpoint, data)
        before, now = progress.get("num_micro_batches"), self.pipe.num_micro_batches
        if self.args.num_micro_batches == AUTO and before not in (None, now) and self.topology.is_main:
            logger.warning(
                f"num_micro_batches='auto' is {now} here, and {checkpoint} was trained with {before}: dropout will be "
                f"another; give num_micro_batches={before} for the same run"
            )
        self.pipe.load_pretrained(checkpoint)
        load_state(checkpoint, self._updated_parameters(), self.optimizer, self.lr_scheduler)
        if self.master_weights is not None:
            self.master_weights.restore(self.optimizer)
        if self.scaler is not None and progress.get("loss_scale") is not None:
            self.scaler.load_state_dict(progress["loss_scale"])
        self.pipe.step = pipeline_step
        self._evaluation_is_due = progress.get("evaluation_is_due", False)
        self._position = Position(position.epoch) if self.args.ignore_data_skip else position
        state.is_local_process_zero = self.state.is_local_process_zero
        state.is_world_process_zero = self.state.is_world_process_zero
        self.state = state
        if self.args.restore_callback_states_from_checkpoint:
            self._restore_callbacks()

    def _updated_parameters(self) -> dict[str, torch.nn.Parameter]:
        """What the optimizer of this process updates, by name."""
        return dict(self.pipe.named_parameters()) if self.master_weights is None else self.master_weights.copies

    def _restore_callbacks(self) -> None:
        """Give each callback that keeps a state the one saved under its class's name, in order."""
        callbacks = self.callback_handler.callbacks
        saved = {n: list(s) if isinstance(s, list) else [s] for n, s in self.state.stateful_callbacks.items()}
        for index, callback in enumerate(callbacks):
            states = saved.get(type(callback).__name__)
            if states and isinstance(callback, ExportableState):
                callbacks[index] = type(callback).from_state(states.pop(0))

    def _data_facts(self) -> dict[str, Any]:
        """What decides which rows a place in the data stands for."""
        names = ("per_device_train_batch_size", "gradient_accumulation_steps", "train_sampling_strategy")
        return {name: getattr(self.args, name) for name in (*names, "dataloader_drop_last", *_SAMPLING)} | {
            "data_seed": self._data_seed,
            "mini_batches_per_epoch": self._mini_batches_per_epoch,
        }

    def _check_data(self, checkpoint: Path, saved: Mapping[str, Any]) -> None:
        if self.args.ignore_data_skip:
            return
        for name, value in self._data_facts().items():
            before = saved.get(name, _SAMPLING.get(name))
            if before != value:
                raise CheckpointError(
                    f"{checkpoint} was written with {name}={before!r} and this run has {value!r}, so its "
                    "place in the data means other rows; use the same value, or ignore_data_skip=True to begin its "
                    "epoch anew"
                )

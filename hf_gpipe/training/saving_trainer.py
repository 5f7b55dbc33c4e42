"""The files that a trainer writes into its output directory, and their upload."""

from __future__ import annotations

import copy
import inspect
import os
import sys
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub import ModelCard
from transformers import PreTrainedModel, Trainer

from hf_gpipe.checkpoint.copies import PendingWrite
from hf_gpipe.checkpoint.save import make_directory, prepare
from hf_gpipe.checkpoint.state import TRAINER_STATE_FILE
from hf_gpipe.job.calls import by_every_process
from hf_gpipe.libraries.transformers_trainer import TrainingSummary, save_metrics, save_state
from hf_gpipe.runtime.mesh import Mesh
from hf_gpipe.training.hub import HubUploads
from hf_gpipe.training.trainer_interface import TrainerInterface

logger = transformers.logging.get_logger(__name__)

_CARD = "README.md"


class SavingTrainer(TrainerInterface):
    """Writes the model, its card, metrics and the state, by the methods of transformers' Trainer."""

    uploads: HubUploads

    @property
    def _output_dir(self) -> Path:
        return Path(self.args.output_dir)

    @by_every_process
    def save_model(self, output_dir: str | os.PathLike[str] | None = None, _internal_call: bool = False) -> None:
        """Write model and tokenizer in Hub format, by default into `args.output_dir`. Every process calls it.

        With `push_to_hub` the model is then uploaded, as transformers' Trainer does. A directory without a README.md
        gets a model card, which names the base model of PEFT adapters as peft does.

        Args:
            output_dir: the directory to write to; None: `args.output_dir`.
            _internal_call: whether the trainer calls it for a checkpoint or an upload; then nothing is uploaded here,
                and there is no card.
        """
        directory = Path(output_dir) if output_dir is not None else self._output_dir
        self._check_surface()
        self._own_model_to_save(directory, self.pipe.world).write()
        if _internal_call:
            return
        self.world.from_main(lambda: self._add_card(directory))
        if self.world.is_main:
            print(f"the model is saved in {directory}", file=sys.stderr, flush=True)
        if self.args.push_to_hub:
            self._push(directory, "Model save", {})

    def model_to_save(self, directory: Path, world: Mesh) -> PendingWrite | None:
        """Prepare the model of a checkpoint for writing into its directory; `world` is for the messages of the writing.

        Returns None where `save_model` is overridden, since it then writes at once.
        """
        if self._saves_model_itself:
            self._check_surface()
            return self._own_model_to_save(directory, world)
        self.save_model(str(directory), _internal_call=True)
        return None

    def try_to_save(self, directory: Path, world: Mesh) -> None:
        """Write what a checkpoint has beside tensors into a directory. Every process calls it.

        Raises UserError where something has no form in a file, such as the state of a callback.
        """
        state = copy.deepcopy(self.state)
        state.stateful_callbacks = self.new_state().stateful_callbacks

        def write(folder: Path) -> None:
            self._write_beside_model(folder)
            state.save_to_json(folder / TRAINER_STATE_FILE)

        if self._saves_model_itself:
            self.pipe.weights.prepare_write(directory, world, write)
        else:
            prepare(directory, world, write)

    @property
    def _saves_model_itself(self) -> bool:
        """Whether `save_model` is not overridden."""
        return getattr(self.save_model, "__func__", None) is SavingTrainer.save_model

    def _own_model_to_save(self, directory: Path, world: Mesh) -> PendingWrite:
        return self.pipe.weights.pending_write(directory, world, self._write_beside_model)

    def _write_beside_model(self, folder: Path) -> None:
        """Write the small files of the main process that belong to the model."""
        if (tokenizer := self.processing_class or getattr(self.data_collator, "tokenizer", None)) is not None:
            tokenizer.save_pretrained(folder)

    def create_model_card(self, *entries: Any, **named_entries: Any) -> None:
        """Draft the model card, README.md in `args.output_dir`. Only the main process writes.

        The arguments, such as `language`, `tags` and `dataset`, are those of transformers' `Trainer.create_model_card`.
        The tags of an existing card are kept.

        Raises UserError where the directory cannot be made.
        """
        given = inspect.signature(Trainer.create_model_card).bind(self, *entries, **named_entries).arguments
        if not self.is_world_process_zero():
            return
        make_directory(self._output_dir)
        self._write_card(self._output_dir / _CARD, {name: value for name, value in given.items() if name != "self"})

    def _add_card(self, directory: Path) -> None:
        """Write the card of a saved model, unless there is one. What goes wrong is a warning: the model is saved."""
        if (directory / _CARD).exists() or not isinstance(self.pipe.adapter.reference, PreTrainedModel):
            return
        try:
            # Without a name of the base model, transformers asks the Hub for nothing.
            self._write_card(directory / _CARD, {"model_name": directory.absolute().name, "finetuned_from": ""})
        except Exception as error:  # the library reads the dataset and the history, which may be of any kind
            logger.warning(f"{directory} has no model card: {type(error).__name__}: {error}")

    def _write_card(self, path: Path, kept: dict[str, Any]) -> None:
        """Write a card; `kept` is the arguments of `TrainingSummary.from_trainer`."""
        base = self.pipe.adapter.config.name_or_path
        if path.exists():
            before = ModelCard.load(path, ignore_metadata_errors=True).data.tags
            tags = kept.get("tags")
            if before and tags is not None:
                tags = [tags] if isinstance(tags, str) else list(tags)
                kept["tags"] = [*tags, *(tag for tag in before if tag not in tags)]
        summary: Any = TrainingSummary.from_trainer(self, **kept)
        summary.finetuned_from = summary.finetuned_from or (None if os.path.isdir(base) else base) or None
        # Trainer counts every process as a replica, which a stage is not.
        for name in ("distributed_type", "num_devices", "total_train_batch_size", "total_eval_batch_size"):
            summary.hyperparameters.pop(name, None)
        if (size := self.args.size).rows_of_step not in (None, size.rows):
            summary.hyperparameters["total_train_batch_size"] = size.rows_of_step
        summary.hyperparameters |= self.pipe.config.in_short
        path.write_text(summary.to_model_card(), encoding="utf-8")
        if self.pipe.adapter.peft is not None:
            card = ModelCard.load(path)
            card.data.library_name = "peft"
            card.data.base_model = card.data.base_model or base or None
            card.save(path)

    def save_metrics(self, split: str, metrics: dict[str, Any], combined: bool = True) -> None:
        """Write metrics into `{split}_results.json` of `args.output_dir`. Only the main process writes.

        Args:
            split: "train", "eval", "test" or "all".
            metrics: the metrics that `train`, `evaluate` or `predict` returned.
            combined: whether the metrics are also added to all_results.json.

        Raises:
            UserError: the directory cannot be made.
        """
        if self.is_world_process_zero():
            make_directory(self._output_dir)
        save_metrics(self, split, metrics, combined)

    def save_state(self) -> None:
        """Write the state of the training, with its log, into `args.output_dir`. Only the main process writes.

        Raises UserError where the directory cannot be made.
        """
        if self.is_world_process_zero():
            make_directory(self._output_dir)
        save_state(self)

    # ------------------------------------------------------------------ the Hub

    @property
    def hub_model_id(self) -> str | None:
        """The repository on the Hub; None before it is made."""
        return self.uploads.repo_id

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
            commit_message: the message of the commit.
            blocking: whether to wait until all is uploaded.
            token: the token of the Hub, in place of `hub_token`.
            revision: the branch, in place of `hub_revision`.
            private: whether a new repository is private, in place of `hub_private_repo`.
            card: the arguments of `create_model_card`.

        Returns:
            The result of `huggingface_hub.HfApi.upload_folder` in the main process: the commit, or its future.

        Raises:
            UserError: in every process, where the Hub does not accept the model.
        """
        if self.hub_model_id is None:
            self.init_hf_repo(token, private)
        self.save_model(_internal_call=True)
        options = {"blocking": blocking, "token": token, "revision": revision}
        return self._push(self._output_dir, commit_message or "End of training", card, **options)

    def _push(self, directory: Path, message: str, card: dict[str, Any], **options: Any) -> Any:
        """Upload a saved model; `options` as for `HubUploads.push`."""
        self.fire("on_push_begin")
        if directory == self._output_dir:
            name = (self.args.hub_model_id or directory.absolute().name).rpartition("/")[2]
            self.world.from_main(lambda: self.create_model_card(**{"model_name": name, **card}))
        return self.uploads.push(directory, message, **options)

"""Uploading what a training saves to the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub import HfApi

from hf_gpipe.checkpoint.lock import LOCK_FILE
from hf_gpipe.errors import UserError
from hf_gpipe.job.world import World
from hf_gpipe.libraries.transformers_trainer import HubStrategy
from hf_gpipe.training.arguments import PipelineTrainingArguments

#: The files of a checkpoint, and of an output directory, that are not part of the model.
_STATE = ("training_state/*", "trainer_state.json")
_CHECKPOINTS = ("_*", "checkpoint-*", LOCK_FILE)

logger = transformers.logging.get_logger(__name__)


class HubUploads:
    """The repository of a training. Every process has one and calls it; the main process talks to the Hub.

    Args:
        args: the arguments, of which `hub_model_id`, by default the output directory's name, `hub_strategy` and the
            others of the Hub are read.
        world: the processes.
    """

    def __init__(self, args: PipelineTrainingArguments, world: World) -> None:
        self._args, self._world = args, world
        #: The repository; None before it is made.
        self.repo_id: str | None = None
        self._pending: list[Future[Any]] = []

    def create(self, token: str | None = None, private: bool | None = None) -> None:
        """Make the repository, unless it exists. Raises UserError, in every process, if the Hub does not accept it."""
        name = self._args.hub_model_id or Path(self._args.output_dir).absolute().name
        if private is None:
            private = self._args.hub_private_repo

        def create() -> str:
            made = HfApi().create_repo(name, token=token or self._args.hub_token, private=private, exist_ok=True)
            return str(made.repo_id)

        self.repo_id = self._world.from_main(lambda: _asking(create, name))

    def push(
        self,
        directory: Path,
        message: str,
        *,
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
    ) -> Any:
        """Upload a saved model without its checkpoints. Returns `HfApi.upload_folder`'s result, in the main process."""
        assert self.repo_id is not None, "the repository has been made"
        outcome: list[Any] = []
        self.finish()

        def upload() -> None:
            options = {"run_as_future": not blocking, "ignore_patterns": list(_CHECKPOINTS)}
            outcome.append(self._upload(directory, message, token, revision, **options))

        self._world.from_main(lambda: _asking(upload, str(self.repo_id)))
        return outcome[0] if outcome else None

    def push_checkpoint(self, checkpoint: Path, message: str) -> None:
        """Begin to upload a checkpoint as `hub_strategy` says, without waiting; the main process only.

        No upload begins while the last upload is under way, unless `hub_always_push` is set.
        """
        strategy = self._args.hub_strategy
        is_busy = any(not future.done() for future in self._pending)
        if strategy == HubStrategy.END or (is_busy and not self._args.hub_always_push):
            return
        self._pending.append(self._upload(checkpoint, message, ignore_patterns=list(_STATE)))
        if strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
            place = "last-checkpoint" if strategy == HubStrategy.CHECKPOINT else checkpoint.name
            self._pending.append(self._upload(checkpoint, f"{message}, checkpoint", path_in_repo=place))

    def _upload(
        self, folder: Path, message: str, token: str | None = None, revision: str | None = None, **options: Any
    ) -> Any:
        """Begin to upload a folder; `options` go to `HfApi.upload_folder`, which may wait for the end."""
        return HfApi().upload_folder(
            repo_id=str(self.repo_id),
            folder_path=str(folder),
            commit_message=message,
            token=token or self._args.hub_token,
            revision=revision or self._args.hub_revision,
            **{"run_as_future": True, **options},
        )

    def finish(self) -> None:
        """Wait for the uploads of checkpoints. A failed upload is a warning, since the training can go on."""
        for future in self._pending:
            if (error := future.exception()) is not None:
                logger.warning(f"a checkpoint was not uploaded to {self.repo_id}: {error}")
        self._pending.clear()


def _asking(ask: Callable[[], Any], repository: str) -> Any:
    """Return the Hub's answer. Raises UserError if it does not accept the request or cannot be reached."""
    try:
        return ask()
    except Exception as error:  # of the library, of its client for HTTP, or of the network
        raise UserError(
            f"hub_model_id: the Hub did not accept {repository!r} ({type(error).__name__}: {error}); look at "
            "hub_token and hub_model_id"
        ) from error

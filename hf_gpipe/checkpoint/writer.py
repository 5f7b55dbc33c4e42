"""The way of a model, and of the state of its training, into a new directory, from all processes.

writer = pipe.weights.writer()
writer.begin(directory)     # all that is not a tensor is settled
writer.copy()               # the training may go on; without it the training waits for write
writer.write()
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from transformers import PreTrainedModel

from hf_gpipe.adapters import Adapter, StageModel
from hf_gpipe.checkpoint import digests, peft
from hf_gpipe.checkpoint.save import (
    Shard,
    complete_model,
    make_directory,
    write_configuration,
    write_files,
    write_once,
    write_shard,
    write_together,
)
from hf_gpipe.checkpoint.state import (
    FOLDER,
    TRAINER_STATE_FILE,
    RunState,
    Scheduler,
    as_json,
    json_of_state,
    write_state,
)
from hf_gpipe.errors import UserError
from hf_gpipe.libraries.transformers import revert_weight_conversion, unsaved_keys
from hf_gpipe.runtime.mesh import Mesh
from hf_gpipe.runtime.shards import Shards
from hf_gpipe.runtime.ties import Ties

if TYPE_CHECKING:
    from transformers import TrainerState

Key = TypeVar("Key")


class _Written(NamedTuple):
    """The files that a process has written, sent to the other processes."""

    weights: dict[str, Shard]
    """The files of the model's tensors."""
    slots: dict[str, Shard]
    """The files of the optimizer's state."""
    values: dict[str, dict[str, Any]]
    """The optimizer's state that is not tensors, by parameter."""


class CheckpointWriter:
    """Writes one shard of weights and one file of the optimizer's state for each stage, the index, and all digests.

    With PEFT adapters only those are written, into one file, because PEFT has no sharded adapters. Every process makes
    a writer and calls it in step with the others.

    Args:
        adapter: of the model.
        models: the stages of this process, by number.
        ties: between stages.
        world: the processes, whose messages the writing uses.
    """

    def __init__(self, adapter: Adapter, models: Mapping[int, StageModel], ties: Ties, world: Mesh) -> None:
        self._adapter, self._models, self._ties, self._world = adapter, models, ties, world
        self._directory, self._has_model = Path(), False
        #: The tensors of each stage's files, by name, from the parameters until `copy`.
        self._weights: dict[int, dict[str, torch.Tensor]] = {}
        self._slots: dict[int, dict[str, torch.Tensor]] = {}
        self._values: dict[str, dict[str, Any]] = {}
        #: What state.json has; None: no state is written.
        self._state: dict[str, Any] | None = None

    def prepare(self, directory: Path, write_more: Callable[[Path], Any] | None = None, *, has_model: bool) -> None:
        """Write the model's small files.

        Args:
            directory: of `written_whole` or `written_into`.
            write_more: writes other small files that belong to the model, such as the tokenizer's, into the directory
                that it gets; called in the main process.
            has_model: whether the model is written, and not a training's state alone.

        Raises:
            UserError: on every process, if the model or a file cannot be saved.
        """
        self._directory, self._has_model = directory, has_model
        writes = [write_more]
        if has_model:
            check_not_quantised(self._adapter, "save_pretrained")
            write = write_configuration if self._adapter.peft is None else peft.write_adapter_configuration
            writes.insert(0, partial(write, self._adapter))
        self._world.from_main(lambda: make_directory(directory))
        write_once(directory, self._world, lambda: write_files(directory, *writes))

    def begin(
        self, directory: Path, write_more: Callable[[Path], Any] | None = None, *, has_model: bool = True
    ) -> None:
        """Settle everything but the values of the weights; arguments and errors are those of `prepare`."""
        if not has_model:
            self._directory = directory
            return
        self.prepare(directory, write_more, has_model=True)
        self._ties.refresh_copies()
        world, adapters = self._world, self._adapter.peft
        for stage, model in self._models.items():
            if not world.is_in_first_replica(stage):  # each file is written once
                continue
            if adapters is None:
                own = (n for n in (*model.parameters, *model.buffers) if self._ties.owner_stage.get(n, stage) == stage)
                tensors = saved_tensors(model, list(own))
            else:
                named = peft.adapter_tensors(model, adapters)
                tensors = {saved: model.division.whole(name, tensor) for saved, name, tensor in named}
            if world.leads(stage):
                self._weights[stage] = tensors

    def add_state(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        optimizer: torch.optim.Optimizer,
        scheduler: Scheduler | None,
        run: RunState,
        shards: Shards | None = None,
    ) -> None:
        """Let `write` also write the state from which a training resumes. What is not a tensor is read now.

        Args:
            parameters: this process's, by name.
            optimizer: of these parameters.
            scheduler: of this optimizer, if any.
            run: how far the training has come. The main process's is kept.
            shards: whose state the optimizer of each replica has; the file has that of whole parameters. None: it has
                all.

        Raises:
            CheckpointError: a value of the optimizer or the scheduler has no JSON form.
        """
        self._state = json_of_state(optimizer, scheduler, run)
        names: dict[torch.Tensor, str] = {parameter: name for name, parameter in parameters.items()}
        states = {names[parameter]: slots for parameter, slots in optimizer.state.items()}
        for name, slots in (states if shards is None else shards.gathered(states)).items():
            stage = self._ties.owner_stage[name]
            if not self._world.is_in_first_replica(stage):  # replicas have the same state
                continue
            model, leads = self._models[stage], self._world.leads(stage)
            for slot, value in slots.items():
                if isinstance(value, torch.Tensor):
                    is_like = value.dim() == model.parameters[name].dim()
                    whole = model.division.whole(name, value) if is_like else value
                    if leads and model.division.writes(name):
                        self._slots.setdefault(stage, {})[f"{name}/{slot}"] = whole
                elif leads:
                    self._values.setdefault(name, {})[slot] = as_json(value, f"optimizer state {slot!r} of {name}")

    @property
    def num_bytes(self) -> int:
        """Size of the copies that `copy` makes."""
        files = (*self._weights.values(), *self._slots.values())
        return sum(tensor.nbytes for tensors in files for tensor in tensors.values())

    def copy(self) -> None:
        """Replace the tensors by copies in CPU memory, so that the training can go on."""
        self._weights = {stage: copied(tensors) for stage, tensors in self._weights.items()}
        self._slots = {stage: copied(tensors) for stage, tensors in self._slots.items()}

    def write(self, trainer_state: TrainerState | None = None) -> None:
        """Write the files. Every process calls it, once.

        Args:
            trainer_state: transformers' state of a training, whose checkpoint this is.

        Raises:
            CheckpointError: on every process, if one of them cannot write.
        """
        adapters: dict[str, torch.Tensor] = {}
        if self._adapter.peft is not None and self._has_model:
            mine = {name: t for own in self._weights.values() for name, t in on_cpu(own).items()}
            self._weights.clear()
            for part in self._world.gather_objects(mine):  # they are small
                adapters |= part
        parts = write_together(self._directory, self._world, self._write_mine, _Written)
        write_once(self._directory, self._world, lambda: self._complete(parts, adapters, trainer_state))

    def _write_mine(self) -> _Written:
        """Write the files of this process's stages. Each stage's tensors are dropped when they are written."""
        directory, written = self._directory, _Written({}, {}, self._values)
        for stage in sorted(self._weights):
            if tensors := in_hub_form(self._models[stage], self._weights.pop(stage)):
                file = f"model-{self._number(stage)}.safetensors"
                written.weights[file] = write_shard(directory / file, tensors)
        for stage in sorted(self._slots):
            (directory / FOLDER).mkdir(exist_ok=True)
            file = f"{FOLDER}/optimizer-{self._number(stage)}.safetensors"
            written.slots[file] = write_shard(directory / file, on_cpu(self._slots.pop(stage)), metadata=None)
        return written

    def _number(self, stage: int) -> str:
        return f"{stage + 1:05d}-of-{self._world.placement.num_stages:05d}"

    def _complete(
        self, parts: list[_Written], adapters: dict[str, torch.Tensor], trainer_state: TrainerState | None
    ) -> None:
        """Write, in the main process, what makes a checkpoint of the files of all, and the digests."""
        directory = self._directory
        slots = {file: shard for part in parts for file, shard in part.slots.items()}
        entries = {file: shard.entry for file, shard in slots.items()}
        if self._has_model and self._adapter.peft is not None:
            entries[peft.WEIGHTS_NAME] = write_shard(directory / peft.WEIGHTS_NAME, _apart(adapters)).entry
        elif self._has_model:
            shards = {file: shard for part in parts for file, shard in part.weights.items()}
            entries |= complete_model(directory, shards)
        if self._state is not None:
            files = sorted(file.removeprefix(f"{FOLDER}/") for file in slots)
            values = {name: own for part in parts for name, own in part.values.items()}
            self._state["optimizer"] |= {"files": files, "values": values}
            write_state(directory, self._state)
        if trainer_state is not None:
            trainer_state.save_to_json(directory / TRAINER_STATE_FILE)
        digests.write(directory, entries, None if trainer_state is None else trainer_state.global_step)


def saved_tensors(stage: StageModel, owned: Sequence[str]) -> dict[str, torch.Tensor]:
    """The tensors that a stage writes, those it owns, under the model's own names.

    Divided ones are gathered; then every rank of the worker calls it, or every process where the head is divided.
    """
    ignored = unsaved_keys(stage.model)
    tensors = {**stage.parameters, **stage.buffers}
    whole_tensors = {name: stage.division.whole(name, tensors[name].detach()) for name in owned if name not in ignored}
    return {name: whole for name, whole in whole_tensors.items() if stage.division.writes(name)}


def in_hub_form(stage: StageModel, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of a stage, or copies of them, with the names and in the form of the Hub format, on the CPU."""
    is_converted = isinstance(stage.model, PreTrainedModel)
    return on_cpu(revert_weight_conversion(stage.model, tensors) if is_converted else tensors)


def on_cpu(tensors: Mapping[Key, torch.Tensor]) -> dict[Key, torch.Tensor]:
    """Put the values into contiguous tensors on the CPU. A tensor that is one already is not copied.

    From CUDA all copies go into pinned memory, which torch keeps for the next save, and the host waits once per device.
    """
    return _ready(tensors, {key: t.detach().contiguous().to("cpu", non_blocking=True) for key, t in tensors.items()})


def copied(tensors: Mapping[Key, torch.Tensor]) -> dict[Key, torch.Tensor]:
    """Copies on the CPU, from CUDA in pinned memory, which stay as they are when the tensors change."""
    copies = {key: t.detach().to("cpu", non_blocking=True, copy=True) for key, t in tensors.items()}
    return _ready(tensors, copies)


def _ready(tensors: Mapping[Key, torch.Tensor], copies: dict[Key, torch.Tensor]) -> dict[Key, torch.Tensor]:
    """Wait until the copies, which `non_blocking` has in pinned memory, have their values."""
    for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    return copies


def _apart(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same tensors in order, without shared memory, which the format does not have."""
    apart: dict[str, torch.Tensor] = {}
    for name, tensor in sorted(tensors.items()):
        is_tied = any(tensor.data_ptr() == other.data_ptr() for other in apart.values())
        apart[name] = tensor.clone() if is_tied else tensor.contiguous()
    return apart


def check_not_quantised(adapter: Adapter, what: str) -> None:
    """Raise UserError where the weights of a model are quantised: they never change, and have their files already."""
    if adapter.peft is None and adapter.quantisation is not None:
        raise UserError(
            f"{what}: the model's weights are quantised and never change; only adapters on them are saved and "
            "loaded, with peft_config"
        )

"""The state from which a training resumes: that of the optimizer by parameter name, and everything else as JSON.

    checkpoint-N/training_state/
        state.json                             optimizer's class and options, scheduler, counters, position in the data
        optimizer-00001-of-00002.safetensors   one file per stage: "model.norm.weight/exp_avg" ...

Names are the Hugging Face parameter names, so the state of K stages can be loaded on any other number of stages.
Nothing is unpickled, so a checkpoint of unknown origin cannot run code.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Required

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat
from safetensors import safe_open
from typing_extensions import TypedDict

from hf_gpipe import strict_json
from hf_gpipe.checkpoint.digests import check_tensors
from hf_gpipe.errors import CheckpointError
from hf_gpipe.runtime.shards import Shards
from hf_gpipe.text import show

if TYPE_CHECKING:
    from transformers import TrainerState

FOLDER, STATE_FILE = "training_state", "state.json"
#: The file of transformers' trainer.
TRAINER_STATE_FILE = "trainer_state.json"
FORMAT = 1
_FILE = re.compile(r"optimizer-\d{5}-of-\d{5}\.safetensors")

Scheduler = torch.optim.lr_scheduler.LRScheduler
Parameters = Mapping[str, torch.nn.Parameter]
OfParameter = Callable[[str, torch.Tensor], torch.Tensor]
"""(name of a parameter, tensor of its optimizer's state) -> the tensor in another form."""

Values = dict[str, Any]
Positive = Annotated[FiniteFloat, Field(gt=0)]
_Optimizer = TypedDict(
    "_Optimizer", {"class": str, "groups": list[Values], "files": list[str], "values": dict[str, Values]}
)


class Place(TypedDict):
    """Where an iterable dataset stands (`MiniBatches.place`)."""

    state: Any
    """The dataset's own state at the start of a pool of rows; None: at the beginning of its epoch."""
    done: strict_json.Number
    """The mini-batches of the pool that are done."""


class DataPosition(BaseModel):
    """A place in the data: so many mini-batches of this epoch have been trained on."""

    model_config = ConfigDict(frozen=True)

    epoch: strict_json.Number
    mini_batches: strict_json.Number
    place: Place | None = None
    """Where an iterable dataset stands there, in the main process; None: not known."""


class _LossScale(TypedDict):
    scale: Positive
    growth_factor: Positive
    backoff_factor: Positive
    growth_interval: strict_json.Number
    _growth_tracker: strict_json.Number


class RunState(BaseModel):
    """Everything of a run's progress that a resumed run needs, besides weights, optimizer and transformers' state.

    The fields with a default are those that older checkpoints do not have.
    """

    position: DataPosition
    pipeline_step: strict_json.Number
    """`Pipeline.step`, which dropout depends on."""
    data: dict[str, Any]
    """The settings that decide which rows a position stands for."""
    further_steps: int = 0
    """How many more steps the training has than its epochs have steps of the present size."""
    evaluation_is_due: bool = False
    """Whether the training was stopped before the evaluation of its last step."""
    num_micro_batches: strict_json.Number | None = None
    loss_scale: _LossScale | None = None
    """The state of the `LossScaler`; None without one."""
    has_digests: bool = False
    """Whether a file of digests belongs to the checkpoint."""


class SavedState(BaseModel):
    """The content of a checkpoint's state.json."""

    optimizer: _Optimizer
    """Its class, groups and files, and the values of its state that are not tensors."""
    run: RunState = Field(alias="progress")
    scheduler: Values | None = None


class _LogLine(TypedDict, total=False):
    """The keys that are read of a line of the history; other keys may have anything."""

    step: Required[strict_json.Number]
    tokens_per_second: float
    training_seconds: float


class _TrainerState(TypedDict, total=False):
    """Fields of trainer_state.json that are used here; transformers refuses those that it does not know."""

    epoch: FiniteFloat | None
    global_step: Required[strict_json.Number]
    max_steps: strict_json.Number
    num_train_epochs: strict_json.Number
    num_input_tokens_seen: strict_json.Number | float
    total_flos: float
    log_history: list[_LogLine]
    best_metric: float | None
    best_global_step: strict_json.Number | None
    best_model_checkpoint: str | None
    stateful_callbacks: dict[str, Values | list[Values]]


def has_state(checkpoint: Path) -> bool:
    """Whether a training can resume from this directory."""
    return (checkpoint / FOLDER / STATE_FILE).is_file()


def json_of_state(optimizer: torch.optim.Optimizer, scheduler: Scheduler | None, run: RunState) -> dict[str, Any]:
    """The content of state.json, but for the files and the values of the optimizer's state.

    Raises CheckpointError for a value that has no JSON form.
    """
    schedule = None if scheduler is None else as_json(scheduler.state_dict(), "the scheduler's state")
    groups = as_json(options_of_groups(optimizer), "an optimizer's option")
    progress = as_json({**dict(run), "position": dict(run.position), "has_digests": True}, "progress")
    saved = {"class": _class_name(optimizer), "groups": groups}
    return {"format": FORMAT, "optimizer": saved, "scheduler": schedule, "progress": progress}


def write_state(checkpoint: Path, content: dict[str, Any]) -> None:
    """Write state.json."""
    (checkpoint / FOLDER).mkdir(exist_ok=True)
    (checkpoint / FOLDER / STATE_FILE).write_text(json.dumps(content, indent=1) + "\n")


def check_state(optimizer: torch.optim.Optimizer, scheduler: Scheduler | None, run: RunState) -> None:
    """Raise CheckpointError for a value that could not be saved."""
    json_of_state(optimizer, scheduler, run)
    for slots in optimizer.state.values():
        for slot, value in slots.items():
            if not isinstance(value, torch.Tensor):
                as_json(value, f"optimizer state {slot!r}")


def options_of_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The options of each of an optimizer's groups of parameters."""
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def load_state(
    checkpoint: Path,
    parameters: Parameters,
    optimizer: torch.optim.Optimizer,
    scheduler: Scheduler | None,
    shards: Shards | None = None,
    part_of: OfParameter = lambda name, tensor: tensor,
) -> None:
    """Load the state of a checkpoint, written with any number of stages, into an optimizer and its scheduler.

    Args:
        checkpoint: a directory that `CheckpointWriter` has written.
        parameters: this process's, by name; only their state is read.
        optimizer: of these parameters, of the class that was saved.
        scheduler: of this optimizer, if any.
        shards: of which it keeps the state; None: of whole parameters.
        part_of: the part of a whole tensor that this process has; see `StageParameters.part`.

    Raises:
        CheckpointError: there is no state, it has another class of optimizer or number of groups, or a file is missing
            or damaged.
    """
    content = read_state(checkpoint)
    saved = content.optimizer
    if saved["class"] != _class_name(optimizer):
        raise CheckpointError(
            f"{checkpoint} holds the state of {saved['class']} and the optimizer is {_class_name(optimizer)}; resume "
            "with the same optimizer, or start a new run from the checkpoint's weights"
        )
    state = optimizer.state_dict()
    if len(saved["groups"]) != len(state["param_groups"]):
        raise CheckpointError(
            f"{checkpoint} holds {len(saved['groups'])} groups of parameters and the optimizer has "
            f"{len(state['param_groups'])}; resume with the optimizer that was saved"
        )
    file = checkpoint / FOLDER / STATE_FILE
    for number, (group, options) in enumerate(zip(state["param_groups"], saved["groups"], strict=True)):
        for key, value in options.items():
            _check_like(group.get(key), value, f"{file} is damaged: optimizer.groups[{number}].{key}")
            if key == "amsgrad" and value != group.get(key):  # it says which tensors the state has
                raise CheckpointError(
                    f"{file}: optimizer.groups[{number}].amsgrad is {show(value)} and the optimizer's is "
                    f"{show(group.get(key))}; resume with the optimizer that was saved"
                )
            group[key] = _like(group.get(key), value)
    names = {parameter: name for name, parameter in parameters.items()}
    wanted = {name for name in parameters if shards is None or shards.has_part(name)}
    slots = _read_slots(checkpoint, saved["files"], wanted, shards, part_of)
    for name, scalars in saved["values"].items():
        if name in wanted:
            slots.setdefault(name, {}).update(scalars)
    state["state"] = {}
    for group, numbered in zip(optimizer.param_groups, state["param_groups"], strict=True):
        for parameter, number in zip(group["params"], numbered["params"], strict=True):
            if names[parameter] in slots:
                state["state"][number] = slots[names[parameter]]
    try:
        optimizer.load_state_dict(state)
        if scheduler is not None and content.scheduler is not None:
            current = scheduler.state_dict()
            for name, value in content.scheduler.items():
                if name not in current:  # its own loading takes any name
                    raise ValueError(f"the scheduler has no {name!r}")
                _check_like(current[name], value, what := f"{file} is damaged: scheduler.{name}")
                if name in _OF_GROUPS and len(value) != len(optimizer.param_groups):
                    groups = len(optimizer.param_groups)
                    raise CheckpointError(f"{what} has {len(value)} entries, expected {groups}, one for each group")
            scheduler.load_state_dict(content.scheduler)
    except CheckpointError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RuntimeError) as error:
        raise CheckpointError(
            f"{file} does not fit the optimizer and its scheduler: {error!r}; resume with "
            "those that were saved, or from another checkpoint"
        ) from error


#: What a scheduler has for each of the optimizer's groups of parameters.
_OF_GROUPS = ("base_lrs", "_last_lr")


def _check_like(current: Any, saved: Any, what: str) -> None:
    """Raise CheckpointError if one of the two values is text, a number or a list, and the other is another of these.

    Without this, text in place of a learning rate would be found in the first step only, by a TypeError.
    """
    if isinstance(current, list | tuple) and isinstance(saved, list | tuple):
        for number, entry in enumerate(saved):
            # A list may have grown; its entries are of one kind, unless it is as long as before.
            _check_like(current[min(number, len(current) - 1)] if current else None, entry, f"{what}[{number}]")
    else:
        expected, kind = _kind(current), _kind(saved)
        # Null leaves a choice to the optimizer, such as whether kernels are fused. It never stands for a rate.
        is_open = kind is None and not isinstance(current, float)
        if expected is not None and kind != expected and not is_open:
            raise CheckpointError(f"{what} is {show(saved)}, expected {expected}")
    if isinstance(saved, float) and math.isnan(saved):
        raise CheckpointError(f"{what} is {show(saved)}, expected a number")


def _kind(value: Any) -> str | None:
    kinds: dict[str, Any] = {"a number": int | float, "a string": str, "a list": list | tuple, "a mapping": dict}
    return next((name for name, types in kinds.items() if isinstance(value, types)), None)


def read_state(checkpoint: Path) -> SavedState:
    """The content of a checkpoint's state.json, with the types of its values checked.

    Raises:
        CheckpointError: there is none, it cannot be read, or it has other content.
    """
    path = checkpoint / FOLDER / STATE_FILE
    if not checkpoint.is_dir():
        raise CheckpointError(f"there is no checkpoint {checkpoint}; give the path of a directory that a run has saved")
    if not path.exists():
        raise CheckpointError(
            f"{checkpoint} has no {FOLDER}/{STATE_FILE}, so no training can resume from it; its weights can be loaded "
            "as a model"
        )
    # A scheduler may keep an infinite number, such as the best loss so far before the first one.
    content = strict_json.read(path, dict[str, Any], allows_nan=True)
    if content.get("format") != FORMAT:
        raise CheckpointError(f"{path} has format {content.get('format')!r}; this version reads format {FORMAT}")
    saved: SavedState = strict_json.fit(content, SavedState, str(path))
    for file in saved.optimizer["files"]:
        # The checkpoint may be of unknown origin: a name must not lead out of it.
        if not _FILE.fullmatch(file):
            raise CheckpointError(f"{path}: optimizer.files names {file!r}, which is not a file of a training's state")
    return saved


def read_trainer_state(checkpoint: Path) -> TrainerState:
    """The state of transformers' trainer in a checkpoint, with the types of its values checked.

    Raises:
        CheckpointError: there is none, it cannot be read, or it has other content.
    """
    from transformers import TrainerState  # the trainer's modules bring in peft: 60 MB that a pipeline does not need

    path = checkpoint / TRAINER_STATE_FILE
    content = strict_json.read(path, _TrainerState, allows_nan=True)  # a loss that was logged may be neither
    try:
        return TrainerState(**content)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: it is not the state of a trainer: {error}") from error


def _read_slots(
    checkpoint: Path,
    files: list[str],
    names: set[str],
    shards: Shards | None,
    part_of: OfParameter,
) -> dict[str, dict[str, Any]]:
    """The saved tensors of these parameters, or of their shards, checked by digests: {name: {slot: tensor}}."""
    slots: dict[str, dict[str, Any]] = {}
    folder = checkpoint / FOLDER
    check_tensors(checkpoint, [f"{FOLDER}/{file}" for file in files], lambda key: key.rpartition("/")[0] in names)
    for file in files:
        try:
            with safe_open(folder / file, framework="pt") as tensors:
                for key in tensors.keys():  # noqa: SIM118  (not a mapping)
                    name, _, slot = key.rpartition("/")
                    if name in names:
                        own = {slot: part_of(name, tensors.get_tensor(key))}
                        slots.setdefault(name, {}).update(own if shards is None else shards.cut(name, own))
        except Exception as error:  # safetensors raises its own class, which is not an OSError
            raise CheckpointError(f"{folder / file} cannot be read: {error}") from error
    return slots


def _class_name(optimizer: torch.optim.Optimizer) -> str:
    return type(optimizer).__name__


def as_json(value: Any, what: str) -> Any:
    """Return `value` in a form that JSON restores unchanged, except that tuples become lists, and scalars numbers."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor | np.generic) and value.ndim == 0:  # of Adafactor's own schedule, say
        return value.item()
    if isinstance(value, list | tuple):
        return [as_json(entry, what) for entry in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: as_json(entry, what) for key, entry in value.items()}
    raise CheckpointError(f"{what} is a {type(value).__name__}, which a checkpoint cannot hold")


def _like(current: Any, saved: Any) -> Any:
    """Return a saved option in the type that the optimizer has for it, because JSON has no tuples and tensors."""
    if isinstance(current, torch.Tensor) and isinstance(saved, int | float):
        return torch.full_like(current, saved)
    return tuple(saved) if isinstance(current, tuple) and isinstance(saved, list) else saved

"""The head of a model, divided by the vocabulary over the stages of a pipeline: whether it can be, and its parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import nn

from hf_gpipe.adapters import Adapter, StageModel
from hf_gpipe.adapters.guards import check_hooks
from hf_gpipe.adapters.tensor_parallel.cuts import Cut
from hf_gpipe.adapters.tensor_parallel.head_part import HeadDivision, HeadRows, replace_tensor
from hf_gpipe.adapters.tensor_parallel.ranks import ProcessRanks
from hf_gpipe.adapters.text import TextAdapter
from hf_gpipe.errors import UserError
from hf_gpipe.losses.loss import Loss, Reads, whole_logits
from hf_gpipe.runtime.mesh import Mesh
from hf_gpipe.schedule.placement import Placement
from hf_gpipe.settings.division import Division
from hf_gpipe.settings.mode import DIVIDED_HEAD

if TYPE_CHECKING:
    from hf_gpipe.settings.pipeline import DecidedConfig


def why_not_divided(adapter: Adapter, loss: Loss) -> str:
    """Why the head of a model cannot be divided over the stages; empty: it can."""
    is_text = isinstance(adapter, TextAdapter) and not adapter.is_classifier
    others = {
        "the model is no Hugging Face model that gives tokens": not is_text,
        "quantization_config quantises its layers": adapter.quantisation is not None,
        "functions of its modules were replaced": bool(adapter.patches),
        "its PEFT adapters are saved with the head": _is_saved_with_adapters(adapter),
        "the model has an auxiliary loss of routers": bool(adapter.routers),
        "the loss reads more than the losses of tokens": loss.reads not in (Reads.TOKENS, Reads.ROWS),
    }
    if problem := next((what for what, is_so in others.items() if is_so), ""):
        return problem
    if reason := whole_logits(adapter, loss):
        return f"training makes the logits whole ({reason})"
    is_linear = adapter.layers[-1].all_modules == adapter.projection.names
    return "" if is_linear else "the head is more than one linear layer"


def _is_saved_with_adapters(adapter: Adapter) -> bool:
    """Whether the file of PEFT adapters has the head, as where the vocabulary is another than the base model's."""
    if adapter.peft is None or not adapter.peft.saves_embeddings:
        return False
    adapter.lay_out(whole := adapter.skeleton())
    heads = tuple(f"base_model.model.{name}." for name in adapter.projection.names)
    return any(name.startswith(heads) for name in adapter.peft.saved_names(whole))


def check_divides_head(adapter: Adapter, loss: Loss, config: DecidedConfig) -> None:
    """Raise UserError where the head of a model cannot be divided over the stages.

    Args:
        adapter: of the model.
        loss: of training.
        config: its schedule divides the head.
    """
    if reason := why_not_divided(adapter, loss):
        raise _cannot(config.schedule, reason)
    config.check_beside(DIVIDED_HEAD)


def check_stages(schedule: str, partition: Sequence[range], placement: Placement) -> None:
    """Raise UserError where the stages do not fit a head that is divided over them."""
    if len(partition[-1]) < 2:
        raise _cannot(
            schedule,
            "the last stage has the head alone",
            "give it another layer, such as the norm before the head",
        )
    if placement.devices is not None:
        raise _cannot(schedule, "a process has several devices", "start a process for each device")
    for process in range(placement.num_processes):
        stages = placement.stages_of(process)
        if tuple(stages) != tuple(range(stages[0], stages[-1] + 1)):
            raise _cannot(schedule, f"process {process} has the stages {list(stages)}", "let them be consecutive")


def _cannot(schedule: str, what: str, instead: str = "use another schedule, such as 1f1b") -> UserError:
    return UserError(f"schedule {schedule!r} divides the head of the model over the stages, and {what}; {instead}")


def head_ranks(world: Mesh) -> tuple[list[tuple[int, ...]], ProcessRanks | None]:
    """The stages of each process of the first replicas; and these processes, unless it is one. Every process must call
    it."""
    placement = world.placement
    leaders = list(dict.fromkeys(workers[0] for workers in placement.workers))
    stages_of = [tuple(placement.stages_of(worker)) for worker in leaders]
    if len(leaders) == 1:
        return stages_of, None
    group = world.new_group([world.peer(worker) for worker in leaders], world.device)
    place = stages_of.index(tuple(world.local_stages))
    return stages_of, ProcessRanks(Division(len(leaders)), place, group, world.device)


def divide_head(heads: Mapping[int, StageModel], models: Mapping[int, StageModel], world: Mesh) -> dict[int, HeadRows]:
    """Give each stage of this process its part of the head; returns its rows. Every process must call it.

    Args:
        heads: for each stage the head alone, whole.
        models: the stages without it.
        world: the processes.
    """
    stages_of, ranks = head_ranks(world)
    num_stages = world.placement.num_stages
    own = tuple(models)
    # Of several, the one that stages on one device will share.
    held = {name: p for number in reversed(own) for name, p in models[number].parameters.items()}
    size = len(heads[own[0]].projection.weight)
    names = heads[own[0]].parameters
    parts = () if ranks is None else tuple(name for name in names if name not in held)
    cut = Cut(
        0, tuple(((size * stages[0] // num_stages, size * (stages[-1] + 1) // num_stages),) for stages in stages_of)
    )
    division = HeadDivision(cut, parts, tuple(heads[own[0]].buffers), ranks)
    for name in names:
        tensor = held.get(name)
        if tensor is None:
            check_hooks(name, names[name], "a part of the divided head")
            tensor = nn.Parameter(division.part(name, names[name].detach()), names[name].requires_grad)
        for head in heads.values():
            head.replace_parameter(name, tensor)
    rows = {}
    for number, head in heads.items():
        rows[number] = HeadRows(own, number, num_stages, size, is_whole=not parts)
        head.projection.out_features = rows[number].rows.stop - rows[number].rows.start
        start = rows[number].first
        for buffer in head.buffers.values():
            replace_tensor(head.model, buffer, buffer[..., start : start + head.projection.out_features])
    for number, stage in models.items():
        stage.adopt(heads[number], division, is_first=number == own[0])
    return rows

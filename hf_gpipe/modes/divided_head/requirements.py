"""Whether the head of a model can be divided by the vocabulary over the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hf_gpipe.adapters import Adapter
from hf_gpipe.adapters.text import TextAdapter
from hf_gpipe.errors import UserError
from hf_gpipe.losses.loss import Loss, Reads, TokenLoss, whole_logits
from hf_gpipe.schedule.placement import Placement

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
        "the loss changes the logits in a way of its own": type(loss.token_loss) is not TokenLoss,
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
    config.check_beside("divided_head")


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

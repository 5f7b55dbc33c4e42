"""A micro-batch, and the data that its actions read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from hf_gpipe.adapters import StageModel
from hf_gpipe.adapters.modules.dropout import NoisyRows
from hf_gpipe.adapters.modules.head import DeferredLogits
from hf_gpipe.losses.loss import PLAIN, Loss

Batch = Mapping[str, torch.Tensor]
LogitsCallback = Callable[[torch.Tensor, Mapping[str, torch.Tensor]], None]
"""(logits (B, T, V), the micro-batch's inputs), called in evaluation."""


class Shared(Protocol):
    """An object that a stage keeps for several micro-batches."""

    def tensors(self) -> list[torch.Tensor]:
        """The tensors in memory."""


SharedStates = dict[int, Shared]
"""The objects that a stage keeps for several micro-batches, under numbers that these choose."""


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch of a mini-batch, the same on every stage.

    Attributes:
        index: its number in the table, from 0: in the step, or counted over the steps of a window.
        inputs: its rows, as returned by `Adapter.prepare`, with masks as `KnownMask`.
        seed: its seed for dropout, from (seed, step, number in the step).
        rows: for noise on their embeddings, with a seed of each from (seed, step, number of the row in the step), which
            is the same for any number of micro-batches; packed documents are one row, with the micro-batch's seed.
        num_units: units of the loss in the whole mini-batch, by which its sum is divided; at least 1.
        num_tokens: in the whole mini-batch, as the loss counts them (`Loss.row_tokens`); at least 1.
        num_micro_batches: of the step; an auxiliary loss is the mean over them.
        mini_batch: the number of the step, or of the evaluation, and that of its mini-batch in it.
        group_size: how many consecutive micro-batches depend on each other, of which it is one (`Placement`).
        loss: of its mini-batch.
        shapes: of what crosses each boundary, by name, for those that were asked for.
    """

    index: int
    inputs: Mapping[str, torch.Tensor]
    seed: int
    num_units: int
    num_micro_batches: int
    mini_batch: tuple[int, int] = (0, 0)
    rows: NoisyRows = NoisyRows()
    group_size: int = 1
    num_tokens: int = 1
    loss: Loss = PLAIN
    shapes: dict[int, Mapping[str, tuple[int, ...]]] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def alone(cls, inputs: Mapping[str, torch.Tensor]) -> MicroBatch:
        """The only micro-batch of a step that does not count, with these prepared inputs."""
        num_targets = inputs["labels"].numel() if "labels" in inputs else 1
        return cls(0, inputs, seed=0, num_units=num_targets, num_micro_batches=1)

    def run(
        self,
        stage: StageModel,
        carry: Mapping[str, torch.Tensor],
        deferred: DeferredLogits | None,
        shared: SharedStates,
    ) -> dict[str, torch.Tensor]:
        """Run a stage's model on it; carry, `deferred` and the result are those of `StageModel`.

        Args:
            shared: what the stage keeps for several micro-batches, to which this one may add.
        """
        return stage(self.inputs, carry, self.seed, deferred, self.rows)

    def leave(self, shared: SharedStates) -> None:
        """Drop what no other micro-batch needs of `shared`, once the backward of this one has run on a stage."""

    def with_inputs(self, inputs: Mapping[str, torch.Tensor]) -> MicroBatch:
        """Replace the inputs by others that have the same shapes at the boundaries."""
        changed = replace(self, inputs=inputs)
        changed.shapes.update(self.shapes)
        return changed

    @property
    def num_rows(self) -> int:
        # Other entries may be of images, of which a row has any number.
        named = "labels" if "labels" in self.inputs else next(iter(self.inputs))
        return len(self.inputs[named])

    @property
    def is_packed(self) -> bool:
        """Whether its only row is made of documents."""
        return getattr(self.inputs.get("attention_mask"), "documents", None) is not None


@dataclass(frozen=True)
class StepOptions:
    """Options of all actions of one step.

    Attributes:
        loss_scale: factor of the loss before backward, and so of the gradients.
        on_logits: called on the last stage in evaluation, for each micro-batch.
        is_first_pass: whether forwards give what a loss that compares units reads of each row.
        gives_log_probs: whether forwards give the log-probability of each target, as the loss reads it.
        is_likelihood_only: whether an evaluation gives the rows' negative log-likelihood alone, whatever the loss is.
    """

    loss_scale: float = 1.0
    on_logits: LogitsCallback | None = None
    is_likelihood_only: bool = False
    is_first_pass: bool = False
    gives_log_probs: bool = False


PLAIN_STEP = StepOptions()


@dataclass(frozen=True)
class Context:
    """The data that F, R and B of one (stage, micro-batch) read. It never changes.

    Attributes:
        micro_batch: the micro-batch, its tensors on the stage's device.
        carry: the tensors received from the previous stage.
        companion: the logits of a model beside the trained one, on the last stage.
    """

    micro_batch: MicroBatch
    carry: Mapping[str, torch.Tensor]
    options: StepOptions = PLAIN_STEP
    companion: Any = None


def on_devices(
    micro_batches: Sequence[MicroBatch], devices: Collection[torch.device]
) -> dict[torch.device, dict[int, MicroBatch]]:
    """The micro-batches, by number, on each device of this process; the host does not wait for copies to CUDA.

    Such a copy needs pinned memory. Torch keeps its pinned blocks for reuse, and none is reused before its copies are
    done (CachingHostAllocator).
    """
    on_host = micro_batches
    if any(device.type == "cuda" for device in devices):
        on_host = [
            _changed(micro_batch, lambda tensor: tensor.contiguous().pin_memory()) for micro_batch in micro_batches
        ]
    return {
        device: {micro_batch.index: _on_device(micro_batch, device) for micro_batch in on_host} for device in devices
    }


def _on_device(micro_batch: MicroBatch, device: torch.device) -> MicroBatch:
    if device.type == "cpu":
        return micro_batch
    return _changed(micro_batch, lambda tensor: tensor.to(device, non_blocking=True))


def _changed(micro_batch: MicroBatch, change: Callable[[torch.Tensor], torch.Tensor]) -> MicroBatch:
    return replace(micro_batch, inputs={name: change(tensor) for name, tensor in micro_batch.inputs.items()})

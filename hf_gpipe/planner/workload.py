"""The planner's inputs beside the model and its `PipelineConfig`: shapes of mini-batches, and the optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from hf_gpipe.adapters import Adapter
from hf_gpipe.adapters.attention.documents import attends_by_document
from hf_gpipe.adapters.base import IGNORED_LABEL, RowImages, Tensors
from hf_gpipe.adapters.layers import StackName
from hf_gpipe.adapters.observation.observations import Shapes
from hf_gpipe.adapters.packing import is_flattened, packed_parts
from hf_gpipe.adapters.text import TextAdapter
from hf_gpipe.adapters.text_entries import text_entries, token_ids
from hf_gpipe.errors import UserError, nearest
from hf_gpipe.planner.parameters import Parameters
from hf_gpipe.registry import functions_of_modes
from hf_gpipe.runtime.batches import tensors_of
from hf_gpipe.runtime.micro_batch import MicroBatch
from hf_gpipe.schedule import Schedule
from hf_gpipe.schedule.groups import Groups
from hf_gpipe.settings.optimizers import OPTIMIZERS
from hf_gpipe.settings.pipeline import PipelineConfig

#: A token id that no family gives a meaning: past the special tokens, inside of the smallest vocabulary.
_TOKEN = 5

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one weight."""


def sent_share(config: PipelineConfig, dtype: str) -> float:
    """The bytes of a message per byte that crosses a boundary, where hidden states have the type of the weights."""
    sent = config.boundary.boundary_dtype
    return 1.0 if sent is None else ITEM_BYTES[sent] / ITEM_BYTES[dtype]


def largest_micro_batch(num_rows: int, num_micro_batches: int) -> int:
    """Rows of the largest of the min(M, n) parts that a mini-batch of n rows is cut into."""
    return -(-num_rows // min(num_micro_batches, num_rows))


@dataclass(frozen=True)
class Workload:
    """The shape of one micro-batch, padding included.

    Attributes:
        rows: the number of rows, B.
        source_tokens: the columns of an encoder's ids; a decoder-only model does not read this number.
        target_tokens: the columns of a decoder's ids and labels: T of a decoder-only model.
        has_padding: whether some row is shorter than the others, so that attention needs a mask.
        is_packed: whether the rows are packed, without padding: the numbers of tokens are then rounded mean lengths.
        longest_source, longest_target: the tokens of the longest packed row; 0 without packing.
        groups: the groups that micro-batches are cut into.
        member: the number of the member of a group that is run.
        entries: the entries of a mini-batch of a model that reads no tokens: name, shape of a row, and type. Each row
            then counts as one token.
        row_images: the images that each row has; None: the rows are text alone.

    Raises:
        UserError: a size below 1.
    """

    rows: int
    source_tokens: int
    target_tokens: int
    has_padding: bool = True
    is_packed: bool = False
    longest_source: int = 0
    longest_target: int = 0
    groups: Groups = Groups()
    member: int = 0
    entries: tuple[tuple[str, tuple[int, ...], str], ...] = ()
    row_images: RowImages | None = None

    def __post_init__(self) -> None:
        for name in ("rows", "source_tokens", "target_tokens"):
            if getattr(self, name) < 1:
                raise UserError(f"workload: {name}={getattr(self, name)}; expected at least 1")

    @classmethod
    def packed(cls, rows: int, source: tuple[int, int], target: tuple[int, int]) -> Workload:
        """Rows without padding, whose sources and targets have these (mean, greatest) lengths."""
        return cls(rows, source[0], target[0], False, True, longest_source=source[1], longest_target=target[1])

    @classmethod
    def from_batch(cls, batch: Tensors, *, packing: bool = False, adapter: Adapter | None = None) -> Workload:
        """The workload of a whole mini-batch. Tokens are in input_ids (N, T), labels (N, T'), perhaps with a mask.

        Args:
            batch: the mini-batch; a flattened one is always packed.
            packing: whether its rows are packed.
            adapter: the model's adapter; None: the model is decoder-only.
        """
        on_cpu = {name: tensor.cpu() for name, tensor in tensors_of(batch).items()}
        if adapter is not None and not isinstance(adapter, TextAdapter):
            return cls.from_entries(on_cpu).with_rows(len(on_cpu["labels"]))
        target_keys = () if adapter is None else adapter.target_keys
        if packing or is_flattened(on_cpu):
            documents = packed_parts(on_cpu, 1, target_keys)[0]
            sources = [len(token_ids(document)) for document in documents]
            targets = [len(document["labels"]) for document in documents] if target_keys else sources
            sizes = ((-(-sum(lengths) // len(lengths)), max(lengths)) for lengths in (sources, targets))
            return cls.packed(len(documents), *sizes)
        images = None if adapter is None else adapter.row_images(on_cpu)
        rows, source = token_ids(batch).shape
        mask = batch.get("attention_mask")
        has_padding = mask is not None and not bool(mask.all())
        return cls(rows, source, on_cpu["labels"].shape[-1], has_padding, row_images=images)

    @classmethod
    def from_entries(cls, batch: Tensors) -> Workload:
        """The workload of a whole mini-batch of a model that reads no tokens."""
        entries = tuple((n, tuple(t.shape[1:]), str(t.dtype).removeprefix("torch.")) for n, t in batch.items())
        return cls(max(map(len, batch.values())), 1, 1, has_padding=False, entries=entries)

    @property
    def shapes(self) -> Shapes:
        """The shapes and types of the entries of a mini-batch."""
        return tuple((name, (self.rows, *shape), getattr(torch, dtype)) for name, shape, dtype in self.entries)

    @property
    def num_target_tokens(self) -> int:
        """The number of target tokens, B T of the decoder, padding included."""
        return self.rows * self.target_tokens

    def with_rows(self, rows: int) -> Workload:
        """The workload of a micro-batch of `rows` of these rows, the longest included where rows are packed."""
        # The longest lengths of rows that are not packed are 0.
        source = max(self.source_tokens, -(-self.longest_source // rows))
        target = max(self.target_tokens, -(-self.longest_target // rows))
        return replace(self, rows=rows, source_tokens=source, target_tokens=target)

    def within(self, adapter: Adapter) -> Workload:
        """The part of the workload that the model has positions for; longer rows cannot be trained on."""
        if self.entries:
            return self
        if adapter.labels_rows:  # its labels are no tokens
            self = replace(self, target_tokens=self.source_tokens)
        reader: StackName = "encoder" if adapter.config.is_encoder_decoder else "decoder"
        stacks: list[tuple[StackName, int]] = [(reader, self.source_tokens), ("decoder", self.target_tokens)]
        source, target = (min(length, adapter.num_positions.get(stack, length)) for stack, length in stacks)
        return replace(self, source_tokens=source, target_tokens=target)

    def members(self, groups: Groups) -> Sequence[Workload]:
        """The workload of each member of a group, which has at least one token of each row."""
        groups = groups.within(self.target_tokens)
        return [replace(self, groups=groups, member=number) for number in range(groups.size)]

    def micro_batch(self, adapter: Adapter) -> MicroBatch:
        """A micro-batch of this shape, or the member of its group, with one arbitrary token everywhere."""
        whole = MicroBatch.alone(self.inputs(adapter))
        (members,) = functions_of_modes("cutting", "members")
        return members(whole, self.groups, adapter)[self.member] if self.groups.size > 1 else whole

    def inputs(self, adapter: Adapter) -> dict[str, torch.Tensor]:
        """The output of `Adapter.prepare` for a micro-batch of this shape: ids, mask, labels of one arbitrary token.

        Attention that runs document by document costs the same for packed rows and for rows of a batch.
        """
        if self.entries:
            return adapter.prepare({name: torch.zeros(shape, dtype=dtype) for name, shape, dtype in self.shapes})
        length = self.source_tokens if adapter.config.is_encoder_decoder else self.target_tokens
        ids = torch.full((self.rows, length), _TOKEN)
        labels = torch.full((self.rows, self.target_tokens), _TOKEN)
        if adapter.labels_rows:
            labels = torch.zeros(self.rows, dtype=torch.long)
        inputs = text_entries(ids, labels=labels)
        if self.is_packed and not attends_by_document(adapter.reference):
            if adapter.config.is_encoder_decoder:
                return adapter.packed([text_entries(ids[row], labels=labels[row]) for row in range(self.rows)])
            inputs["position_ids"] = torch.arange(length).expand(ids.shape)
            inputs = {name: tensor.reshape(1, -1) for name, tensor in inputs.items()}
        if self.has_padding:
            mask = torch.ones_like(ids)
            if length > 1 and self.rows > 1:
                mask[-1, -1] = 0
                if not adapter.config.is_encoder_decoder and not adapter.labels_rows:
                    labels[-1, -1] = IGNORED_LABEL
            inputs["attention_mask"] = mask
        return adapter.prepare(inputs if self.row_images is None else adapter.with_row_images(inputs, self.row_images))


#: Fields of `PlanInputs` that only the process that reads the data needs, or that follow from what it tells.
OF_THE_READER = ("example", "tables")


@dataclass(frozen=True)
class PlanInputs:
    """The planner's inputs beside the model and its `PipelineConfig`.

    Attributes:
        example: a mini-batch as long as the longest to come, or its shape; read in the main process. None: nothing is
            known, so nothing can be planned.
        optim: the optimizer, by transformers' name.
        fp32_master_weights: whether the optimizer updates float32 copies of the weights.
        offload_optimizer: whether the optimizer's state and the copies are in CPU memory.
        fp16_accumulation: whether products of float16 sum in float16.
        state_on_disk: whether the state and the copies that would be in CPU memory are on a disk.
        accumulation: the number of mini-batches in a step.
        packing: whether the rows of a mini-batch are packed.
        saved: the weights of the model that a checkpoint has.
        saves_in_background: whether checkpoints are written from copies in CPU memory.
        tables: the tables that were read from files, by the path that names them as a schedule.
        new_tokens: the tokens that are generated for each row before a step; the mini-batch's lengths include them.
        vocabulary: the number of tokens that the model knows, where any are generated.
        forwards: the number of times that all forwards run before a step, beside the forwards that the loss needs.
        updates: the number of updates of a step, each from the same rows.
        needs_norm: whether an update needs the loss or the norm of the whole gradient, as clipping does. Else
            the host may update stages beside backwards.
    """

    example: Mapping[str, torch.Tensor] | Workload | None = None
    optim: str = "adamw_torch_fused"
    fp32_master_weights: bool = False
    offload_optimizer: bool = False
    fp16_accumulation: bool = False
    state_on_disk: bool = False
    accumulation: int = 1
    packing: bool = False
    saved: Literal["model", "adapters"] = "model"
    saves_in_background: bool = True
    tables: Mapping[str, Schedule] = field(default_factory=dict)
    new_tokens: int = 0
    vocabulary: int = 0
    forwards: int = 0
    updates: int = 1
    needs_norm: bool = True

    @classmethod
    def from_training(cls, given: Any, **others: Any) -> PlanInputs:
        """The inputs that the section `training` of a recipe, or a trainer's arguments, have by the same names."""
        return cls(
            optim=str(getattr(given.optim, "value", given.optim)),
            fp32_master_weights=given.fp32_master_weights,
            offload_optimizer=given.offload_optimizer,
            fp16_accumulation=given.fp16_accumulation,
            state_on_disk=given.optimizer_state_dir is not None,
            accumulation=given.size.accumulation,
            saves_in_background=given.save_in_background != "never",
            needs_norm=given.needs_norm,
            **others,
        )

    def for_rollouts(self, new_tokens: int, updates: int) -> PlanInputs:
        """Add rollouts: each step generates `new_tokens` for each row, and makes `updates` updates from them."""
        # With several updates one more pass notes the probabilities before them.
        return replace(self, new_tokens=new_tokens, forwards=int(updates > 1), updates=updates)

    def mini_batch(self, adapter: Adapter | None = None) -> Workload:
        """The shape of `example`, for the model of this adapter. Raises UserError where there is none."""
        if self.example is None:
            raise UserError(
                "the planner needs the shape of a mini-batch to choose auto values, to cut rows by tokens, or to cut "
                "the model by cost: give values in their place, or a Pipeline made with example=, a mini-batch as long "
                "as the longest to come (a stream does not tell how long its rows are)"
            )
        if isinstance(self.example, Workload):
            return self.example
        return Workload.from_batch(self.example, packing=self.packing, adapter=adapter)

    def entries_workload(self) -> Workload | None:
        """The shape of `example` for a model that reads no tokens; None: there is no example."""
        if self.example is None or isinstance(self.example, Workload):
            return self.example
        return Workload.from_entries(tensors_of(self.example))

    def check(self) -> None:
        """Raise UserError where the optimizer's state has no known size."""
        if self.optim not in OPTIMIZERS:
            raise UserError(
                f"the optimizer {self.optim!r} has no known size of state; use one of {', '.join(OPTIMIZERS)}"
                f"{nearest(self.optim, OPTIMIZERS)}"
            )

    def _updated_bytes(self, size: Parameters, dtype: str) -> float:
        """The bytes of the values that are updated: trainable weights of this type, or their float32 copies."""
        return size.trainable_bytes * (4 / ITEM_BYTES[dtype] if self.fp32_master_weights else 1)

    def own_state_bytes(self, size: Parameters, dtype: str) -> float:
        """The bytes of the optimizer's state of trainable weights of this type, wherever it is."""
        updated = self._updated_bytes(size, dtype)
        return OPTIMIZERS[self.optim].num_bytes(size.trainable_count, size.exact_count, updated)

    def state_bytes(self, size: Parameters, dtype: str) -> float:
        """The bytes of the optimizer's state, and of copies that it updates, on the device."""
        if self.offload_optimizer:
            return 0.0
        # A master copy and its gradient, and the state with them.
        return self.copy_bytes(size, dtype) if self.fp32_master_weights else self.own_state_bytes(size, dtype)

    def copy_bytes(self, size: Parameters, dtype: str) -> float:
        """The bytes of weights' copies, their gradients and the optimizer's state."""
        return 2 * self._updated_bytes(size, dtype) + self.own_state_bytes(size, dtype)

    def hosted_bytes(self, size: Parameters, dtype: str) -> float:
        """The bytes of `copy_bytes` that are in CPU memory."""
        return self.copy_bytes(size, dtype) - self.disk_bytes(size, dtype) if self.offload_optimizer else 0.0

    def disk_bytes(self, size: Parameters, dtype: str) -> float:
        """The bytes of the optimizer's state, and of copies, that are on a disk, of weights that a CPU updates."""
        if not self.state_on_disk:
            return 0.0
        has_copies = self.fp32_master_weights or self.offload_optimizer
        return self.own_state_bytes(size, dtype) + has_copies * self._updated_bytes(size, dtype)

    def saved_bytes(self, size: Parameters, dtype: str) -> float:
        """The bytes of optimizer state and master weights in a checkpoint."""
        return self.own_state_bytes(size, dtype) + self.fp32_master_weights * self._updated_bytes(size, dtype)

    def moved_bytes(self, size: Parameters, dtype: str) -> float:
        """The bytes that the host reads and writes in an update of trainable weights of this type."""
        # The host reads and writes weights, gradients and state, in float32 for master weights.
        return 2 * self.copy_bytes(size, dtype)

    @property
    def of_optimizer(self) -> dict[str, Any]:
        """The optimizer and where it keeps what, by the names of a plan's settings."""
        names = ("fp32_master_weights", "offload_optimizer")
        return {"optimizer": self.optim} | {name: getattr(self, name) for name in names}

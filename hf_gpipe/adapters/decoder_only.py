"""Decoder-only models: one stack of blocks whose hidden states are all that crosses a boundary."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch.nn import functional as F

from hf_gpipe.adapters.attention.documents import Documents, is_flash
from hf_gpipe.adapters.attention.known_mask import KnownMask
from hf_gpipe.adapters.base import IGNORED_LABEL, Inputs, StageParts, Tensors
from hf_gpipe.adapters.layers import Layer
from hf_gpipe.adapters.packing import used_columns
from hf_gpipe.adapters.routers import Router
from hf_gpipe.adapters.text import TextAdapter
from hf_gpipe.adapters.text_entries import IDS
from hf_gpipe.errors import DataError
from hf_gpipe.libraries.transformers import attention_implementation


class DecoderOnly(TextAdapter):
    """Llama and similar models: embedding, blocks, norm, head."""

    def prepare(self, micro_batch: Tensors) -> dict[str, torch.Tensor]:
        inputs = dict(micro_batch)
        ids = self.main_input(inputs)
        if "labels" in inputs and inputs["labels"].shape != ids.shape:
            shapes = tuple(inputs["labels"].shape), tuple(ids.shape)
            raise DataError(f"labels have the shape {shapes[0]} and {IDS} {shapes[1]}; a decoder's are the same")
        if (mask := inputs.get("attention_mask")) is None or mask.dim() != 2:
            return inputs
        if not bool(mask[:, 0].all()):
            # A position before a row's first token sees nothing: eager attention then averages over all columns, and
            # the model predicts the first token from it.
            return inputs
        return inputs | self._trimmed({n: t for n, t in inputs.items() if t.shape == mask.shape}, self._is_used(inputs))

    def no_targets(self, batch: Tensors, *, reads_logits: bool) -> torch.Tensor:
        return torch.full_like(self.main_input(batch), IGNORED_LABEL)

    def with_known_masks(self, inputs: Tensors) -> dict[str, torch.Tensor]:
        # Without a mask transformers looks at positions, and asks the device whether texts are packed into one row.
        # Positions that the model makes itself never say so.
        if not inputs.keys() & {"attention_mask", "position_ids"}:
            inputs = {**inputs, "attention_mask": torch.ones_like(self.main_input(inputs))}
        return super().with_known_masks(inputs)

    def packed(self, documents: Sequence[Tensors], *, is_compiled: bool = False) -> dict[str, torch.Tensor]:
        model = self.reference
        row = {name: torch.cat([document[name] for document in documents])[None] for name in documents[0]}
        lengths = [len(self.main_input(document)) for document in documents]
        borders = [0, *accumulate(lengths)]
        if "labels" in row:
            # The last token of a document does not predict the first one of the next.
            row["labels"][:, borders[:-1]] = IGNORED_LABEL
        packed = Documents.of(lengths, model, is_compiled=is_compiled)
        row["attention_mask"] = KnownMask.of(torch.ones_like(self.main_input(row)), packed)
        if is_flash(attention_implementation(model.config)):
            row["cu_seq_lens_q"] = row["cu_seq_lens_k"] = torch.tensor(borders, dtype=torch.int32)
        return row

    def row_lengths(self, batch: Tensors) -> torch.Tensor:
        mask, ids = batch.get("attention_mask"), self.main_input(batch)
        if mask is None or mask.dim() != 2:
            return torch.full(ids.shape[:1], ids.shape[1])
        return used_columns(self._is_used(batch))

    def _is_used(self, inputs: Tensors) -> torch.Tensor:
        """Mask (B, T) of the positions that are not padding."""
        is_used = inputs["attention_mask"].bool()
        for name in ("labels", "shift_labels"):
            if name in inputs:
                is_used = is_used | (inputs[name] != IGNORED_LABEL)
        return is_used

    def targets(self, inputs: Tensors) -> torch.Tensor:
        """The `shift_labels` of the batch, else the token after each position; the last position has none."""
        if "shift_labels" in inputs:
            return inputs["shift_labels"]
        return F.pad(inputs["labels"][:, 1:], (0, 1), value=IGNORED_LABEL)

    def carry_shapes(self, boundary: int, inputs: Inputs) -> dict[str, tuple[int, ...]]:
        ids = self.main_input(inputs)
        shapes = {"hidden": self.hidden_shape(boundary, ids)}
        if self._has_auxiliary_loss(inputs):
            sent = self._routers_before(boundary)
            shapes |= {router.name: (ids.numel(), router.num_experts) for router in sent}
        return shapes

    def sources(self, boundary: int) -> dict[str, tuple[Layer, ...]]:
        number = {layer.name: i for i, layer in enumerate(self.layers)}
        routers = {router.name: self.layers[: number[router.block] + 1] for router in self._routers_before(boundary)}
        return {"hidden": self.layers[:boundary], **routers}

    def _routers_before(self, boundary: int) -> list[Router]:
        before = {layer.name for layer in self.layers[:boundary]}
        return [router for router in self.routers if router.block in before]

    def _has_auxiliary_loss(self, inputs: Inputs) -> bool:
        """Whether the auxiliary loss is computed: not in generation, which has no loss."""
        return bool(self.routers) and not inputs.keys().isdisjoint(self.loss_keys)

    def run(self, stage: StageParts, inputs: Inputs, carry: Tensors) -> dict[str, torch.Tensor]:
        forward = {name: value for name, value in inputs.items() if name not in self.loss_keys}
        has_auxiliary_loss = self._has_auxiliary_loss(inputs)
        if self.routers:
            forward["output_router_logits"] = has_auxiliary_loss
        if "cu_seq_lens_q" in forward:
            longest = max(forward["attention_mask"].documents.lengths)
            forward |= {"max_length_q": longest, "max_length_k": longest}
        output = stage.model(**{"use_cache": False, **forward})
        if stage.is_last:
            loss = {"auxiliary_loss": stage.router_port.loss(stage.model, output)} if has_auxiliary_loss else {}
            return {"logits": output["logits" if self.has_head else "last_hidden_state"], **loss}
        routers = self._routers_before(stage.stop) if has_auxiliary_loss else []
        logits = zip(routers, stage.router_port.logits, strict=True)
        return {"hidden": stage.captured()} | {router.name: tensor for router, tensor in logits}

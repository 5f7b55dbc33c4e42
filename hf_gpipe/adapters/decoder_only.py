"""Decoder-only models: one stack of blocks whose hidden states are all that crosses a boundary."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from hf_gpipe.adapters.base import IGNORED_LABEL, Adapter, Inputs, StageModel, Tensors
from hf_gpipe.adapters.layers import Layer


class DecoderOnly(Adapter):
    """Llama and its kin: embedding, blocks, norm, head."""

    def prepare(self, micro_batch: Tensors) -> dict[str, torch.Tensor]:
        inputs = dict(micro_batch)
        if (mask := inputs.get("attention_mask")) is None or mask.dim() != 2:
            return inputs
        is_used = mask.bool() | (inputs["labels"] != IGNORED_LABEL) if "labels" in inputs else mask.bool()
        return inputs | self._trimmed({n: t for n, t in inputs.items() if t.shape == mask.shape}, is_used)

    def targets(self, inputs: Tensors) -> torch.Tensor:
        """The next token of each position; the last position has none."""
        return F.pad(inputs["labels"][:, 1:], (0, 1), value=IGNORED_LABEL)

    def carry_shapes(self, boundary: int, inputs: Inputs) -> dict[str, tuple[int, ...]]:
        return {"hidden": self.hidden_shape(boundary, inputs["input_ids"])}

    def sources(self, boundary: int) -> dict[str, tuple[Layer, ...]]:
        return {"hidden": self.layers[:boundary]}

    def run(self, stage: StageModel, inputs: Inputs, carry: Tensors) -> dict[str, torch.Tensor]:
        forward = {name: value for name, value in inputs.items() if name not in self.loss_keys}
        output = stage.model(**{"use_cache": False, **forward})
        return {"logits": output.logits} if stage.is_last else {"hidden": stage.captured()}

"""The identical work of every contender: a Llama with random weights, a fixed batch, AdamW."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM, ResNetConfig, ResNetForImageClassification

from bench.models import llama

IGNORED = -100
SHORTEST_ROW_TOKENS = 16


@dataclass(frozen=True)
class Work:
    """One setting. Every contender takes the same steps from the same weights on the same rows.

    Attributes:
        micro_batches: M of one pipeline, or of one process that takes the whole mini-batch.
        random_lengths: rows of 16 tokens up to `tokens`, padded to `tokens` at their ends.
        dtype: of weights, gradients and arithmetic.
        device: where the model and the micro-batches are made; "cuda" is the current GPU of a process.
        updates: mini-batches of a step, one after the other, each with an update.
    """

    layers: int = 8
    hidden: int = 384
    intermediate: int = 1024
    vocabulary: int = 8192
    rows: int = 16
    tokens: int = 128
    micro_batches: int = 8
    random_lengths: bool = False
    dtype: str = "float32"
    device: str = "cpu"
    updates: int = 1
    warmup_steps: int = 1
    steps: int = 4

    def tiny(self, **values: Any) -> Work:
        """The same with a model that takes no time, to see that everything runs."""
        updates = min(self.updates, 3)
        sizes = {"hidden": 64, "intermediate": 64, "vocabulary": 128, "tokens": 24, "steps": 1, "updates": updates}
        return replace(self, **{**sizes, **values})

    @property
    def rows_each(self) -> int:
        """Rows of a micro-batch."""
        return self.rows // self.micro_batches

    def model(self) -> Any:
        """A LlamaForCausalLM with the same weights on every call."""
        positions = max(256, self.tokens)
        own = {"max_position_embeddings": positions, "use_cache": False, "attn_implementation": "sdpa"}
        torch.manual_seed(0)
        with torch.device(self.device):
            model = LlamaForCausalLM(llama(self.hidden, self.layers, self.vocabulary, self.intermediate, **own))
            return model.to(getattr(torch, self.dtype)).train()

    def batch(self) -> dict[str, torch.Tensor]:
        """The mini-batch as a collator gives it: input_ids, labels and, with random lengths, attention_mask (N, T)."""
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(0, self.vocabulary, (self.rows, self.tokens), generator=generator)
        if not self.random_lengths:
            return {"input_ids": ids, "labels": ids.clone()}
        shortest = min(SHORTEST_ROW_TOKENS, self.tokens)
        lengths = torch.randint(shortest, self.tokens + 1, (self.rows,), generator=generator)
        lengths[0] = self.tokens
        mask = (torch.arange(self.tokens) < lengths[:, None]).long()
        return {"input_ids": ids, "labels": ids.masked_fill(mask == 0, IGNORED), "attention_mask": mask}

    def inputs_and_targets(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Of all rows the tokens and the next tokens, each (N, T).

        No mask is needed: a row's padding comes after all that has a target.
        """
        batch = {name: tensor.to(self.device) for name, tensor in self.batch().items()}
        return batch["input_ids"], F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)

    def micro_batches_of(
        self, part: int = 0, parts: int = 1, count: int | None = None
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(inputs, targets) of the micro-batches of one of equal parts of the rows; by default M / parts."""
        inputs, targets = (tensor.chunk(parts)[part] for tensor in self.inputs_and_targets())
        count = count or max(1, self.micro_batches // parts)
        return list(zip(inputs.chunk(count), targets.chunk(count), strict=True))

    def num_targets(self) -> int:
        """Target tokens of the whole mini-batch, by which its loss is divided."""
        return int((self.batch()["labels"][:, 1:] != IGNORED).sum())

    def logits(self, model: Any, inputs: torch.Tensor) -> torch.Tensor:
        """The scores that a model gives for the first entry of a micro-batch."""
        logits: torch.Tensor = model(input_ids=inputs, use_cache=False).logits
        return logits


@dataclass(frozen=True)
class Gpt2Work(Work):
    """The same of a GPT-2, with its dropout: the Transformer of examples/three_strategies.ipynb."""

    layers: int = 12
    hidden: int = 192
    vocabulary: int = 4096
    rows: int = 128
    tokens: int = 64

    def model(self) -> Any:
        torch.manual_seed(0)
        sizes = {"n_layer": self.layers, "n_embd": self.hidden, "n_head": 4, "vocab_size": self.vocabulary}
        return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).train()


@dataclass(frozen=True)
class ResNetWork(Work):
    """ResNet-50 on images, as in the same notebook.

    Attributes:
        pixels: rows and columns of an image.
        sizes: other values of the configuration than those of ResNet-50.
    """

    rows: int = 128
    pixels: int = 64
    sizes: tuple[tuple[str, Any], ...] = ()

    def tiny(self, **values: Any) -> Work:
        sizes = (("embedding_size", 4), ("hidden_sizes", [4, 8]), ("depths", [1, 1]))
        return replace(self, **{"pixels": 16, "rows": 16, "sizes": sizes, "steps": 1, **values})

    def model(self) -> Any:
        torch.manual_seed(0)
        return ResNetForImageClassification(ResNetConfig(num_labels=1000, **dict(self.sizes))).train()

    def batch(self) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        images = torch.randn(self.rows, 3, self.pixels, self.pixels, generator=generator)
        return {"pixel_values": images, "labels": torch.randint(0, 1000, (self.rows,), generator=generator)}

    def inputs_and_targets(self) -> tuple[torch.Tensor, torch.Tensor]:
        images, labels = self.batch().values()
        return images, labels

    def num_targets(self) -> int:
        return self.rows

    def logits(self, model: Any, inputs: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = model(inputs).logits
        return logits


def loss_share(logits: torch.Tensor, targets: torch.Tensor, num_targets: int) -> torch.Tensor:
    """A micro-batch's part of the mini-batch's mean loss; logits (B, T, V), targets (B, T)."""
    flat = logits.view(-1, logits.shape[-1])
    # In float32, as transformers' own loss.
    return F.cross_entropy(flat.float(), targets.reshape(-1), ignore_index=IGNORED, reduction="sum") / num_targets


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.01, fused=True)


def update(step: torch.optim.Optimizer) -> None:
    step.step()
    step.zero_grad()


def checkpoint_blocks(model: nn.Module) -> None:
    """transformers' own checkpointing of each block."""
    # transformers 5.23 renames the method.
    enable: Any = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})

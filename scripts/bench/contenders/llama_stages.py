"""The stages of a Llama for libraries that want modules of tensors: its own sub-modules, hung up anew."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bench.contenders import Options
from bench.work import Work


class BlockOnly(nn.Module):
    """A block that takes hidden states (B, T, D) and nothing else."""

    def __init__(self, block: nn.Module, rotary: nn.Module) -> None:
        super().__init__()
        self.block, self.rotary = block, rotary

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)
        angles = self.rotary(hidden, position_ids=positions)
        output: torch.Tensor = self.block(
            hidden, attention_mask=None, position_ids=positions, position_embeddings=angles
        )
        return output


class Blocks(nn.Sequential):
    """Consecutive blocks; with `recompute` only their input is kept for backward."""

    def __init__(self, blocks: list[BlockOnly], recompute: bool) -> None:
        super().__init__(*blocks)
        self.recompute = recompute

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if not (self.recompute and torch.is_grad_enabled()):
            return super().forward(hidden)
        output: torch.Tensor = checkpoint(super().forward, hidden, use_reentrant=False, preserve_rng_state=False)
        return output


def layers(model: Any) -> tuple[nn.Module, list[BlockOnly], nn.Module]:
    """Embedding, blocks, and norm with head."""
    blocks = [BlockOnly(block, model.model.rotary_emb) for block in model.model.layers]
    return model.model.embed_tokens, blocks, nn.Sequential(model.model.norm, model.lm_head)


def stages(work: Work, options: Options) -> list[nn.Module]:
    """The stages, with `options.blocks`."""
    embedding, blocks, head = layers(work.model())
    recompute = options.recompute != "none"
    parts: list[list[nn.Module]] = []
    for size in options.blocks:
        parts.append([Blocks(blocks[:size], recompute)])
        blocks = blocks[size:]
    parts[0].insert(0, embedding)
    parts[-1].append(head)
    return [nn.Sequential(*part) for part in parts]

"""Dividing the layers of a stage."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hf_gpipe.adapters import Adapter, StageModel
from hf_gpipe.adapters.parts.ranks import Ranks
from hf_gpipe.modes.tensor_parallel.adapted import plan_of
from hf_gpipe.modes.tensor_parallel.split import Division, part_of


def divide(stage: StageModel, ranks: Ranks) -> Division:
    """Keep this rank's part of every divided layer. Raises UserError where the model cannot be divided so."""
    adapter = stage.adapter
    blocks = frozenset(block for stack in adapter.stacks for block in stack.blocks)
    division = Division(plan_of(adapter, ranks.size), ranks, has_dropout=bool(adapter.dropout))
    division.apply(stage.model, stage.model.all_tied_weights_keys, blocks)
    return division


def parts(adapter: Adapter, parameters: Mapping[str, torch.Tensor], num_ranks: int) -> dict[str, torch.Tensor]:
    """The first of so many parts of each parameter that is divided, by name: the longest, where parts differ."""
    cuts = plan_of(adapter, num_ranks).cuts
    return {name: part_of(parameters[name], cuts[name], 0) for name in cuts.keys() & parameters.keys()}

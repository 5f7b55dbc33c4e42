"""The layers of other stages cost a stage's forward next to nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_gpipe.adapters import Blueprint, build_adapter
from hf_gpipe.model.clone import exact_clone, padded_batch
from hf_gpipe.pipeline.clone_steps import in_stages
from hf_gpipe.pipeline.variant import Variant
from scripts.families import default_config


@pytest.mark.parametrize("family", ["llama", "t5", "gpt2"])
def test_a_forward_makes_no_list_of_modules(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice of all blocks made a new `ModuleList` in each action: of 80 blocks in a quarter of a millisecond."""
    model = exact_clone(default_config(family), torch.float32)
    adapter = build_adapter(Blueprint(model.config, torch.float32, "eager", type(model)))
    first = in_stages(model, adapter, Variant(None)).parameters.models[0]
    made: list[int] = []
    init = nn.ModuleList.__init__

    def counted(self: nn.ModuleList, *args: object) -> None:
        made.append(1)
        init(self, *args)  # type: ignore[arg-type]  # the modules of a list

    monkeypatch.setattr(nn.ModuleList, "__init__", counted)
    first(adapter.prepare(padded_batch(model)), {})
    assert not made


def test_a_part_of_the_blocks_is_a_new_list() -> None:
    model = exact_clone(default_config("llama"), torch.float32)
    adapter = build_adapter(Blueprint(model.config, torch.float32, "eager", type(model)))
    blocks = in_stages(model, adapter, Variant(None)).parameters.models[0].model.get_submodule("model.layers")
    assert isinstance(blocks, nn.ModuleList)
    assert len(blocks) > 1
    assert blocks[:] is blocks[0 : len(blocks)] is blocks
    assert list(blocks[:1]) == [blocks[0]]
    assert list(blocks[::-1]) == list(blocks)[::-1]

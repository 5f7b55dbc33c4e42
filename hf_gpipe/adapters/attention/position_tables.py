"""Tables of relative positions that the first block of a stack has for all blocks of the stack, as in T5.

The first block computes the bias from its table, and the model passes the bias to the other blocks. Later stages could
receive the bias, (1, heads, T, T), with every micro-batch. Instead they share the table, a few hundred numbers, as a
tied parameter. The first block of each stage uses it and computes the bias by the family's own code.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedModel

_FLAG = "has_relative_attention_bias"


def shared_tables(model: PreTrainedModel, blocks: Sequence[str]) -> tuple[str, ...]:
    """Names of the tables in a stack's first block from which the other blocks, which have none, get the bias."""
    if len(blocks) < 2:
        return ()
    first, second = (model.get_submodule(block) for block in blocks[:2])
    tables = []
    for path, module in first.named_modules():
        if getattr(module, _FLAG, False) and getattr(second.get_submodule(path), _FLAG, True) is False:
            others = dict(second.get_submodule(path).named_children())
            tables += [f"{blocks[0]}.{path}.{name}" for name, _ in module.named_children() if name not in others]
    return tuple(tables)


def strip_weights(block: nn.Module, name: str, tables: tuple[str, ...]) -> None:
    """Remove all weights of a block but its tables. Modules stay, since the family's initialisation reads them."""
    for path, module in list(block.named_modules()):
        weights = dict(module.named_parameters(recurse=False))
        if not weights or f"{name}.{path}.".startswith(tables):
            continue
        empty = nn.Module()
        for weight_name, weight in weights.items():
            empty.__dict__[weight_name] = weight.data
        block.set_submodule(path, empty)


def share_tables(model: PreTrainedModel, tables: tuple[str, ...], from_block: str, to_block: str) -> None:
    """Let another block use the first block's tables as if they were its own."""
    for table in tables:
        path, _, child = table.removeprefix(f"{from_block}.").rpartition(".")
        borrower = model.get_submodule(to_block).get_submodule(path)
        setattr(borrower, _FLAG, True)
        setattr(borrower, child, model.get_submodule(table))

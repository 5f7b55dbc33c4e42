"""The list of layers that a Hugging Face model is: what a partition cuts and a stage holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torch import nn
from transformers import PreTrainedModel

from hf_gpipe.errors import UnsupportedModelError

LayerKind = Literal["embedding", "block", "norm", "head"]
StackName = Literal["encoder", "decoder"]

# Modules that run after the blocks, by the names the library gives them, in their order of call.
_AFTER_BLOCKS = ("norm", "final_norm", "ln_f", "final_layernorm", "final_layer_norm", "layer_norm", "project_out")
_BLOCK_LISTS = ("layers", "h", "block", "blocks")


@dataclass(frozen=True)
class Layer:
    """One entry of the list: the modules of the Hugging Face model that move between stages together.

    `modules` are names inside the whole model, in their order of call; every parameter below them is the layer's.
    """

    name: str
    kind: LayerKind
    stack: StackName
    modules: tuple[str, ...]


@dataclass(frozen=True)
class Stack:
    """One run of blocks with what comes before and after it, by module names inside the whole model."""

    name: StackName
    path: str
    embedding: tuple[str, ...]
    blocks: tuple[str, ...]
    norm: tuple[str, ...]

    def layers(self) -> Iterator[Layer]:
        yield Layer(f"{self.path}.embedding", "embedding", self.name, self.embedding)
        for block in self.blocks:
            yield Layer(block, "block", self.name, (block,))
        if self.norm:
            yield Layer(self.norm[0], "norm", self.name, self.norm)


def find_stack(model: PreTrainedModel, name: StackName, path: str) -> Stack:
    """Read a stack's parts off the module at `path`: its one list of blocks, what precedes it and what follows it.

    Raises UnsupportedModelError where the module has no list of blocks, or holds parameters of its own that belong
    to no layer.
    """
    module = model.get_submodule(path)
    family = model.config.model_type
    children = dict(module.named_children())
    lists = [n for n in _BLOCK_LISTS if isinstance(children.get(n), nn.ModuleList)]
    if len(lists) != 1:
        found = ", ".join(f"{n} ({type(child).__name__})" for n, child in children.items())
        raise UnsupportedModelError(f"{family}: expected one list of blocks in {path!r}, found {found}")
    if own := [n for n, _ in module.named_parameters(recurse=False)]:
        raise UnsupportedModelError(f"{family}: {path!r} has parameters of its own, outside of any layer: {own}")
    blocks = lists[0]
    after = tuple(f"{path}.{n}" for n in _AFTER_BLOCKS if n in children)
    before = tuple(
        f"{path}.{n}"
        for n, child in children.items()
        if n != blocks and f"{path}.{n}" not in after and next(child.parameters(), None) is not None
    )
    return Stack(
        name=name,
        path=path,
        embedding=before,
        blocks=tuple(f"{path}.{blocks}.{i}" for i in range(len(children[blocks]))),
        norm=after,
    )

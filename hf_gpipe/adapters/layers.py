"""A Hugging Face model as a list of layers, which a partition cuts into stages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedModel

from hf_gpipe.adapters.probe import BlockForm, Observation

LayerKind = Literal["vision", "embedding", "block", "norm", "head"]
StackName = Literal["encoder", "decoder"]


@dataclass(frozen=True)
class Layer:
    """One entry of the list: modules of the Hugging Face model that are always on the same stage.

    `modules` are names in the whole model, in the order in which they are called. The layer has all their parameters,
    and those of the modules in `idle`, which a forward on ids alone does not call.
    """

    name: str
    kind: LayerKind
    stack: StackName
    modules: tuple[str, ...]
    idle: tuple[str, ...] = ()

    @property
    def all_modules(self) -> tuple[str, ...]:
        return (*self.modules, *self.idle)


@dataclass(frozen=True)
class Stack:
    """Consecutive blocks, and the modules before and after them, by their names in the whole model."""

    name: StackName
    path: str
    embedding: tuple[str, ...]
    blocks: tuple[str, ...]
    norm: tuple[str, ...]
    form: BlockForm
    idle: tuple[str, ...]
    output: type

    def layers(self) -> Iterator[Layer]:
        yield Layer(self.embedding[0], "embedding", self.name, self.embedding, self.idle)
        for block in self.blocks:
            yield Layer(block, "block", self.name, (block,))
        if self.norm:
            yield Layer(self.norm[0], "norm", self.name, self.norm)


def stacks_of(model: PreTrainedModel, observation: Observation) -> tuple[Stack, ...]:
    """The stacks of the whole model, from what was observed on its tiny clone."""
    names: tuple[StackName, ...] = ("encoder", "decoder") if len(observation.stacks) == 2 else ("decoder",)
    return tuple(
        Stack(
            name=name,
            path=seen.blocks.rpartition(".")[0],
            embedding=seen.before,
            blocks=tuple(f"{seen.blocks}.{j}" for j in range(len(model.get_submodule(seen.blocks)))),
            norm=seen.after,
            form=seen.form,
            idle=() if i else observation.idle,
            output=seen.output,
        )
        for i, (name, seen) in enumerate(zip(names, observation.stacks, strict=True))
    )

"""Modes of one key, whose parts are where the key is read."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from hf_gpipe.settings.mode import RUN, Keys, Mode
from hf_gpipe.settings.section import Text, refuse_given


class SharedUpdates(Mode):
    """The updates of a stage, shared among its replicas (ZeRO-1)."""

    zero: Literal[0, 1] = 0
    """1: each replica of a stage keeps only a part of the optimizer's state and of float32 master weights, updates this
    part of the weights, and gets the rest from the other replicas (ZeRO-1); 0: each replica keeps and updates
    everything. With `replicas: auto`, 1 has an effect if the planner chooses replicas."""

    def among(self, count: int) -> int:
        """Among how many replicas the updates of a stage that has `count` of them are divided."""
        return count if self.zero else 1


class NarrowBoundary(Mode):
    """Tensors that are sent between stages in a narrower type."""

    boundary_dtype: Literal["bfloat16", "float16", "float32"] | None = None
    """The data type in which hidden states and their gradients are sent from stage to stage. A narrower type than the
    model's helps over slow links, and rounds them. null: the model's type, and nothing is rounded."""


class CompiledBlocks(Mode):
    """Blocks that are compiled."""

    torch_compile: Annotated[bool, RUN] = False
    """Whether to compile each block with torch.compile."""

    torch_compile_backend: Annotated[Text | None, RUN] = None
    """The backend of torch.compile; null: its default, inductor."""

    def check(self, keys: Keys) -> None:
        if not self.torch_compile:
            refuse_given(self, ("torch_compile_backend",), "torch_compile is false; set torch_compile to true")

    @property
    def backend(self) -> str | None:
        """The backend of torch.compile for blocks; None: blocks are not compiled."""
        return (self.torch_compile_backend or "inductor") if self.torch_compile else None


class LigerKernels(Mode):
    """Norms, rotary embeddings and feed-forwards that run the kernels of a package."""

    excludes: ClassVar[dict[str, str]] = {
        "compiled": "use_liger_kernel is true and torch_compile is true, which do not go together; leave one of them "
        "out",
        "division": "use_liger_kernel is true and tensor_parallel is {tensor_parallel}, which do not go together; "
        "leave one of them out",
    }

    use_liger_kernel: Annotated[bool, RUN] = False
    """Whether norms, rotary embeddings and feed-forwards run the kernels of the package liger-kernel, on GPUs."""

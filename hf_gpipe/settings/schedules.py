"""Modes that follow from `schedule` or `recompute`, and modes of one key."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from hf_gpipe.errors import UserError
from hf_gpipe.schedule import ASYNCHRONOUS_SCHEDULES
from hf_gpipe.schedule import DIVIDED_HEAD as DIVIDED_HEAD_SCHEDULES
from hf_gpipe.settings.mode import ASYNCHRONOUS, AUTO, COMPARED_ROWS, DIVIDED_HEAD, RUN, TEACHER, Keys, Mode
from hf_gpipe.settings.section import Text, refuse_given

_TEACHER = "there is a teacher and schedule is {schedule}, which do not go together; use 1f1b"


class SharedUpdates(Mode):
    """The updates of a stage, shared among its replicas (ZeRO-1)."""

    excludes: ClassVar[dict[str, str]] = {
        ASYNCHRONOUS: ": replicas share the whole step of an optimizer, and here each stage updates by itself"
    }

    zero: Literal[0, 1] = 0
    """1: each replica of a stage keeps only a part of the optimizer's state and of float32 master weights, updates this
    part of the weights, and gets the rest from the other replicas (ZeRO-1); 0: each replica keeps and updates
    everything. With `replicas: auto`, 1 has an effect if the planner chooses replicas."""

    def among(self, count: int) -> int:
        """Among how many replicas the updates of a stage that has `count` of them are divided."""
        return count if self.zero else 1


class DividedHead(Mode):
    """A head that is divided by the vocabulary over all stages."""

    excludes: ClassVar[dict[str, str]] = {TEACHER: _TEACHER}

    schedules = DIVIDED_HEAD_SCHEDULES


class Asynchronous(Mode):
    """Stages that update by themselves, so that steps run in windows."""

    excludes: ClassVar[dict[str, str]] = {
        TEACHER: _TEACHER,
        COMPARED_ROWS: "schedule {schedule!r}: the loss, a {loss}, compares the rows of a mini-batch in two passes, "
        "between which no stage may update; use a synchronous schedule, such as 1f1b",
    }

    schedules = (*ASYNCHRONOUS_SCHEDULES,)

    def check(self, keys: Keys) -> None:
        if self.is_on(keys) and AUTO in (keys["num_stages"], keys["replicas"]):
            name = "num_stages" if keys["num_stages"] == AUTO else "replicas"
            raise UserError(
                f"schedule is {keys['schedule']} and {name} is auto; give {name}, for with it the numbers of an "
                "asynchronous schedule change."
            )


class HostGraphs(Mode):
    """Activations that wait in CPU memory between forward and backward."""

    excludes: ClassVar[dict[str, str]] = {
        "visits": "recompute is {recompute} and offload_weights {offload_weights}: graphs on the host keep weights on "
        "the device; let recompute be stage, or leave offload_weights out."
    }

    @classmethod
    def setting(cls) -> str:
        return "recompute: host"

    def is_on(self, keys: Keys) -> bool:
        return "host" in (keys["recompute"] or ())


class NarrowBoundary(Mode):
    """Tensors that are sent between stages in a narrower type."""

    excludes: ClassVar[dict[str, str]] = {DIVIDED_HEAD: ""}

    boundary_dtype: Literal["bfloat16", "float16", "float32"] | None = None
    """The data type in which hidden states and their gradients are sent from stage to stage. A narrower type than the
    model's helps over slow links, and rounds them. null: the model's type, and nothing is rounded."""


class CompiledBlocks(Mode):
    """Blocks that are compiled."""

    excludes: ClassVar[dict[str, str]] = {
        ASYNCHRONOUS: ": compiled blocks would not see the versions of the weights that it keeps"
    }

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

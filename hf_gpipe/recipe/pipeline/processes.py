"""How the processes of `pipeline` compute and wait: their devices, memory, speed, types and times."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from hf_gpipe.errors import UserError
from hf_gpipe.recipe.pipeline.stages import ASYNCHRONOUS, HEAD_IN_PARTS, Listed
from hf_gpipe.recipe.pipeline.visits import VisitKeys
from hf_gpipe.recipe.section import NotWith, OneOf, Positive, Text, refuse_given, section
from hf_gpipe.recipe.sizes import read_bytes

#: About thirty years: longer times are none to a clock.
MOST_SECONDS = 10**9
#: More than the cores of any machine. With a hundred thousand torch ends the process by a segmentation fault.
MOST_THREADS = 4096
#: Marks keys of a run that a plan does not have; and those of them that may have another value in each process.
RUN, EACH_PROCESS = object(), object()


@section(kw_only=False)
class ProcessKeys(VisitKeys):
    """How processes compute and wait."""

    boundary_dtype: Annotated[Literal["bfloat16", "float16", "float32"] | None, NotWith((HEAD_IN_PARTS,))] = None
    """The data type in which hidden states and their gradients are sent from stage to stage. A narrower type than the
    model's helps over slow links, and rounds them. null: the model's type, and nothing is rounded."""

    memory: Annotated[Text | tuple[Text, ...] | None, Listed, EACH_PROCESS] = None
    """The memory limit of each process that the planner plans for, with a unit, such as 80GiB; or a list with one limit
    per process, such as [24GiB, 12GiB]; null: the memory of its device."""

    speeds: Annotated[tuple[Positive, ...] | Annotated[str, OneOf(("profile",))] | None, Listed, RUN] = None
    """The relative speed of each process, for the planner, such as [1, 0.5] if the second process is half as fast.
    profile: measured before training, by a block of the model. null: measured where the processes have GPUs of
    different models and something is left to the planner; otherwise all are equally fast."""

    device: Annotated[Literal["auto", "cpu", "cuda"], EACH_PROCESS] = "auto"
    """The type of device that stages run on; auto: GPUs if there are any."""

    devices: Annotated[tuple[Text, ...] | None, Listed, EACH_PROCESS] = None
    """Devices of this machine, divided evenly among the processes, such as [cuda:0, cuda:1]; a process spreads its
    stages over its devices. null: one device per process, of the type of `device`."""

    torch_compile: Annotated[
        bool,
        RUN,
        NotWith((ASYNCHRONOUS,), ": compiled blocks would not see the versions of the weights that it keeps"),
    ] = False
    """Whether to compile each block with torch.compile."""

    torch_compile_backend: Annotated[Text | None, RUN] = None
    """The backend of torch.compile; null: its default, inductor."""

    use_liger_kernel: Annotated[bool, RUN] = False
    """Whether norms, rotary embeddings and feed-forwards run the kernels of the package liger-kernel, on GPUs."""

    timeout_seconds: Annotated[float, Field(gt=0, le=MOST_SECONDS), RUN] = 1800.0
    """Seconds that a process waits for another process before the run fails; six times as long for a process that
    writes a checkpoint and reports that it is still working."""

    measure_links: Annotated[bool, RUN] = False
    """Whether the links between processes of one machine are measured before the model is made. Links between machines
    are always measured."""

    threads_per_process: Annotated[Annotated[int, Field(ge=1, le=MOST_THREADS)] | None, EACH_PROCESS] = None
    """CPU threads per process; null: OMP_NUM_THREADS, or the machine's cores divided evenly."""

    def check(self) -> None:
        super().check()
        for name, of_processes in (("memory", self.memory), ("speeds", self.speeds)):
            if isinstance(of_processes, tuple) and self.num_processes not in (None, len(of_processes)):
                raise UserError(
                    f"{name} {list(of_processes)} has {len(of_processes)} entries and num_processes is "
                    f"{self.num_processes}; give one entry for each process."
                )
        self.memory_bytes  # noqa: B018  # raises for a text that is no size
        if self.devices == ():
            raise UserError("devices [] is empty; name at least one device, or leave it out.")
        if not self.torch_compile:
            refuse_given(self, ("torch_compile_backend",), "torch_compile is false; set torch_compile to true")
        others = {"torch_compile is true": self.torch_compile, self.division.text: not self.division.is_whole}
        for what, is_so in others.items() if self.use_liger_kernel else ():
            if is_so:
                raise UserError(f"use_liger_kernel is true and {what}, which do not go together; leave one of them out")

    @staticmethod
    def compiling(given: dict[str, Any]) -> dict[str, Any]:
        """Values of keys, in which a string as `torch_compile` is the backend."""
        is_backend = isinstance(backend := given.get("torch_compile"), str)
        return {**given, "torch_compile": True, "torch_compile_backend": backend} if is_backend else given

    @property
    def compile_backend(self) -> str | None:
        """The backend of torch.compile for blocks; None: blocks are not compiled."""
        return (self.torch_compile_backend or "inductor") if self.torch_compile else None

    @property
    def memory_bytes(self) -> int | tuple[int, ...] | None:
        """`memory` as a number, or one for each process."""
        if isinstance(self.memory, tuple):
            return tuple(read_bytes(limit, "memory") for limit in self.memory)
        return None if self.memory is None else read_bytes(self.memory, "memory")

    @property
    def given_speeds(self) -> tuple[float, ...] | None:
        """`speeds`, where it has numbers."""
        return self.speeds if isinstance(self.speeds, tuple) else None

"""The trainers that are compared, one small file a library; each does the same work.

A contender is made in each of its processes and then takes steps: `step` returns the mini-batch's loss in a process
that knows it, else None.
"""

from __future__ import annotations

import importlib.util
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.work import Work


@dataclass(frozen=True)
class Options:
    """How a contender does the work.

    Attributes:
        recompute: "none", or what is recomputed: the peers know only "on", ours its own modes, also one for each stage.
        schedule: where there is a choice.
        length_bucketing: rows of similar length go together, and no micro-batch is longer than its longest row.
        peak_bytes: what the planner may let a process grow to, libraries included.
        blocks: on each stage; the embedding is on the first, norm and head on the last. Empty: `partition` says.
        partition: how ours is cut without `blocks`.
        is_v_shaped: whether each of P processes has the stages k and 2P - 1 - k, else one stage.
        replicas: D, pipelines side by side, each of which takes as large a part of the rows.
        zero: whether replicas share the update and the optimizer's state (ZeRO-1).
        others: other settings of ours.
    """

    recompute: str | tuple[str | int, ...] = "none"
    schedule: str = ""
    blocks: tuple[int, ...] = ()
    length_bucketing: bool = False
    peak_bytes: int | None = None
    partition: str | tuple[int, ...] = "auto"
    is_v_shaped: bool = False
    replicas: int = 1
    zero: bool = False
    others: tuple[tuple[str, Any], ...] = ()

    @property
    def num_stages(self) -> int:
        return len(self.blocks) or 2

    @property
    def num_processes(self) -> int:
        """Of one pipeline."""
        return self.num_stages // 2 if self.is_v_shaped else self.num_stages

    def stages_of(self, rank: int) -> list[int]:
        """The stages of one of its processes."""
        return [rank, self.num_stages - 1 - rank] if self.is_v_shaped else [rank]


@dataclass(frozen=True)
class Entry:
    """Where a contender is found, as module:class, how many processes it takes, and which library it needs.

    Attributes:
        num_processes: of one pipeline of two stages; None: one for each stage, or for two if the pipeline is V-shaped.
    """

    name: str
    num_processes: int | None
    needs: str = "torch"

    def load(self) -> Callable[[Work, Options, int], Any]:
        """The class that makes it from the work, how it is done, and the rank of this process."""
        made: Callable[[Work, Options, int], Any] = pkgutil.resolve_name(f"bench.contenders.{self.name}")
        return made

    def processes(self, options: Options) -> int:
        return self.num_processes or options.replicas * options.num_processes

    @property
    def is_installed(self) -> bool:
        return importlib.util.find_spec(self.needs) is not None


CONTENDERS = {
    "single": Entry("plain:Single", 1),
    "twin": Entry("plain:Twin", 2),
    "ddp": Entry("plain:DataParallel", 2),
    "torch": Entry("torch_pipelining:TorchPipelining", None),
    "deepspeed": Entry("deepspeed_pipeline:DeepSpeedPipeline", None, "deepspeed"),
    "torchgpipe": Entry("torchgpipe_one_process:TorchGPipe", 1, "torchgpipe"),
    "ours": Entry("ours:Ours", None),
}

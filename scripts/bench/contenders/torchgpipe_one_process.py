"""torchgpipe: GPipe over the devices of one process; on the CPU it computes on one core."""

from __future__ import annotations

from torch import nn
from torchgpipe import GPipe

from bench.contenders import Options
from bench.contenders.llama_stages import stages
from bench.work import Work, loss_share, optimizer, update


class TorchGPipe:
    """Two stages in one process; the library recomputes by itself, so the stages do not."""

    def __init__(self, work: Work, options: Options, rank: int) -> None:
        mode = "never" if options.recompute == "none" else "always"
        both = nn.Sequential(*stages(work, Options(blocks=options.blocks)))
        self.model = GPipe(both, balance=[1, 1], devices=["cpu", "cpu"], chunks=work.micro_batches, checkpoint=mode)
        self.optimizer = optimizer(self.model.parameters())
        ((self.ids, self.targets),) = work.micro_batches_of(count=1)
        self.num_targets = work.num_targets()

    def step(self) -> float | None:
        loss = loss_share(self.model(self.ids), self.targets, self.num_targets)
        loss.backward()
        update(self.optimizer)
        return loss.item()

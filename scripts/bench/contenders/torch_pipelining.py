"""torch.distributed.pipelining: ScheduleGPipe and Schedule1F1B."""

from __future__ import annotations

from functools import partial

import torch
from torch.distributed import pipelining

from bench.contenders import Options
from bench.contenders.llama_stages import stages
from bench.work import Work, loss_share, optimizer, update


class TorchPipelining:
    """It divides gradients by M, so the loss of a micro-batch is told M times as large."""

    def __init__(self, work: Work, options: Options, rank: int) -> None:
        self.module, self.rank = stages(work, options)[rank], rank
        self.is_last = rank == options.num_stages - 1
        device = next(self.module.parameters()).device
        micro_batches = work.micro_batches_of()
        self.ids = torch.cat([ids for ids, _ in micro_batches])
        self.targets = torch.cat([targets for _, targets in micro_batches])
        stage = pipelining.PipelineStage(self.module, rank, options.num_stages, device)
        schedule = getattr(pipelining, options.schedule)
        loss = partial(loss_share, num_targets=work.num_targets() / work.micro_batches)
        self.schedule = schedule(stage, work.micro_batches, loss_fn=loss)
        self.optimizer = optimizer(self.module.parameters())

    def step(self) -> float | None:
        losses: list[torch.Tensor] = []
        if self.rank == 0:
            self.schedule.step(self.ids, return_outputs=False)
        elif self.is_last:
            self.schedule.step(target=self.targets, losses=losses, return_outputs=False)
        else:
            self.schedule.step(return_outputs=False)
        update(self.optimizer)
        return torch.stack(losses).mean().item() if losses else None

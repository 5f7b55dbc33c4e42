"""torch.distributed.pipelining: ScheduleGPipe and Schedule1F1B, with replicas under DistributedDataParallel."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.nn.parallel import DistributedDataParallel

from bench.contenders import Options
from bench.contenders.llama_stages import stages
from bench.work import Work, loss_share, optimizer, update


class TorchPipelining:
    """It divides gradients by M/D and then by D, so the loss of a micro-batch is told M times as large.

    The processes of a pipeline are consecutive.
    """

    def __init__(self, work: Work, options: Options, rank: int) -> None:
        replicas, num_stages = options.replicas, options.num_stages
        pipeline, self.rank = divmod(rank, num_stages)
        self.module: nn.Module = stages(work, options)[self.rank]
        self.is_last = self.rank == num_stages - 1
        device = next(self.module.parameters()).device
        # Every process creates all groups.
        along = [dist.new_group([d * num_stages + s for s in range(num_stages)]) for d in range(replicas)]
        across = [dist.new_group([d * num_stages + s for d in range(replicas)]) for s in range(num_stages)]
        self.across = across[self.rank]
        if replicas > 1:
            self.module = DistributedDataParallel(self.module, process_group=self.across, gradient_as_bucket_view=True)
        rows, count = work.rows // replicas, work.micro_batches // replicas
        micro_batches = work.micro_batches_of(slice(pipeline * rows, (pipeline + 1) * rows), count)
        self.ids = torch.cat([ids for ids, _ in micro_batches])
        self.targets = torch.cat([targets for _, targets in micro_batches])
        stage = pipelining.PipelineStage(self.module, self.rank, num_stages, device, group=along[pipeline])
        schedule = getattr(pipelining, options.schedule)
        loss = partial(loss_share, num_targets=work.num_targets() / work.micro_batches)
        self.schedule = schedule(stage, count, loss_fn=loss)
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
        if not losses:
            return None
        mean = torch.stack(losses).mean().detach()
        dist.all_reduce(mean, group=self.across)
        return mean.item() / dist.get_world_size(self.across)

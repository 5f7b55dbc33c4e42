"""torch.distributed.pipelining: ScheduleGPipe, Schedule1F1B and the schedules of zero bubble, which split the backward.

Of the first two there may be replicas, under DistributedDataParallel.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import PipelineScheduleMulti
from torch.nn.parallel import DistributedDataParallel

from bench.contenders import Options
from bench.contenders.llama_stages import stages
from bench.work import Work, loss_share, optimizer, update


class TorchPipelining:
    """It divides gradients by M/D and then by D, so the loss of a micro-batch is told M times as large.

    The processes of a pipeline are consecutive.
    """

    def __init__(self, work: Work, options: Options, rank: int) -> None:
        replicas, size = options.replicas, options.num_processes
        pipeline, self.rank = divmod(rank, size)
        own = options.stages_of(self.rank)
        modules: list[nn.Module] = [module for s, module in enumerate(stages(work, options)) if s in own]
        self.is_last = options.num_stages - 1 in own
        device = next(modules[0].parameters()).device
        # Every process creates all groups.
        along = [dist.new_group([d * size + s for s in range(size)]) for d in range(replicas)]
        across = [dist.new_group([d * size + s for d in range(replicas)]) for s in range(size)]
        self.across = across[self.rank]
        if replicas > 1:
            given = {"process_group": self.across, "gradient_as_bucket_view": True}
            modules = [DistributedDataParallel(module, **given) for module in modules]
        micro_batches = work.micro_batches_of(pipeline, replicas)
        self.ids = torch.cat([ids for ids, _ in micro_batches])
        self.targets = torch.cat([targets for _, targets in micro_batches])
        pipeline_stages = [
            pipelining.PipelineStage(module, stage, options.num_stages, device, group=along[pipeline])
            for stage, module in zip(own, modules, strict=True)
        ]
        schedule = getattr(pipelining, options.schedule)
        loss = partial(loss_share, num_targets=work.num_targets() / work.micro_batches)
        stages_given = pipeline_stages if issubclass(schedule, PipelineScheduleMulti) else pipeline_stages[0]
        self.schedule = schedule(stages_given, len(micro_batches), loss_fn=loss)
        self.optimizer = optimizer([parameter for module in modules for parameter in module.parameters()])

    def step(self) -> float | None:
        losses: list[torch.Tensor] = []
        given = {"target": self.targets, "losses": losses} if self.is_last else {}
        self.schedule.step(*([self.ids] if self.rank == 0 else []), return_outputs=False, **given)
        update(self.optimizer)
        if not losses:
            return None
        mean = torch.stack(losses).mean().detach()
        dist.all_reduce(mean, group=self.across)
        return mean.item() / dist.get_world_size(self.across)

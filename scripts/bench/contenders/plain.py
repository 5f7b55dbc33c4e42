"""Without a pipeline: one process, two that know nothing of each other, and data parallelism."""

from __future__ import annotations

from contextlib import nullcontext

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bench.contenders import Options
from bench.work import Work, checkpoint_blocks, loss_share, optimizer, update


class Single:
    """One process that adds up the gradients of M micro-batches."""

    def __init__(self, work: Work, options: Options, rank: int) -> None:
        self.work, self.model = work, work.model()
        if options.recompute != "none":
            checkpoint_blocks(self.model)
        self.optimizer = optimizer(self.model.parameters())
        self.micro_batches = work.micro_batches_of()
        self.num_targets = work.num_targets()
        self.num_updates = work.updates

    def step(self) -> float | None:
        for _ in range(self.num_updates):
            losses = []
            for inputs, targets in self.micro_batches:
                loss = loss_share(self.work.logits(self.model, inputs), targets, self.num_targets)
                loss.backward()
                losses.append(loss.detach())
            update(self.optimizer)
        return sum(loss.item() for loss in losses)


class Twin(Single):
    """Two processes with half of the rows each and no communication: what two cores of this machine can give."""

    def __init__(self, work: Work, options: Options, rank: int) -> None:
        super().__init__(work, options, rank)
        self.micro_batches = work.micro_batches_of(rank, 2)

    def step(self) -> float | None:
        super().step()
        return None


class DataParallel:
    """DistributedDataParallel over half of the rows each; gradients are exchanged in the last backward."""

    def __init__(self, work: Work, options: Options, rank: int) -> None:
        model = work.model()
        if options.recompute != "none":
            checkpoint_blocks(model)
        self.model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        self.optimizer = optimizer(self.model.parameters())
        self.micro_batches = work.micro_batches_of(rank, 2)
        # Gradients are averaged over the processes, and here they are to be summed.
        self.num_targets = work.num_targets() / dist.get_world_size()

    def step(self) -> float | None:
        total = 0.0
        last = len(self.micro_batches) - 1
        for number, (ids, targets) in enumerate(self.micro_batches):
            with self.model.no_sync() if number < last else nullcontext():
                loss = loss_share(self.model(input_ids=ids, use_cache=False).logits, targets, self.num_targets)
                loss.backward()
            total += loss.item()
        update(self.optimizer)
        totals: list[float] = [0.0] * dist.get_world_size()
        dist.all_gather_object(totals, total)
        return sum(totals) / len(totals)

"""hf_gpipe, through its public interface."""

from __future__ import annotations

from dataclasses import replace

from bench import machine
from bench.contenders import Options
from bench.work import Work, optimizer
from hf_gpipe import Pipeline


class Ours:
    """Stages of a Pipeline."""

    def __init__(self, work: Work, options: Options, rank: int) -> None:
        recompute = options.recompute if isinstance(options.recompute, str) else list(options.recompute)
        partition = options.partition if isinstance(options.partition, str) else list(options.partition)
        if sizes := list(options.blocks):
            partition = sizes  # layers are the embedding, the blocks, the norm and the head
            partition[0] += 1
            partition[-1] += 2
        memory = None
        if options.peak_bytes is not None:
            # The planner counts what a pipeline needs; what the libraries take, they take at their first steps.
            _train_a_little(options)
            machine.reset_peak()
            memory = options.peak_bytes - machine.resident_bytes()
        self.batch = work.batch()
        self.pipe = Pipeline(
            work.model(),
            num_stages=options.num_stages,
            num_processes=options.num_processes if options.is_v_shaped else None,
            num_micro_batches=work.micro_batches,
            schedule=options.schedule,
            recompute=recompute,
            partition=partition,
            length_bucketing=options.length_bucketing,
            example=self.batch,
            memory=memory,
            replicas=options.replicas,
            zero=int(options.zero),
            **dict(options.others),
        )
        self.num_updates = work.updates
        self.optimizer = optimizer(self.pipe.parameters())
        if options.zero:
            self.pipe.shard_optimizer(self.optimizer)
        if self.pipe.runs_windows:
            models = self.pipe.models.items()
            self.of_stage = {number: optimizer(model.parameters.values()) for number, model in models}
        if not options.length_bucketing:
            # Without a mask, columns that only pad are computed like all others, as in the other contenders.
            self.batch.pop("attention_mask", None)

    def step(self) -> float | None:
        if self.pipe.runs_windows:
            self.pipe.train_window([[self.batch]] * self.num_updates, lambda stage, *_: self.of_stage[stage].step())
            return None  # later updates use older weights than the other contenders'
        for _ in range(self.num_updates):
            loss = self.pipe.train_step(self.batch)
            self.optimizer.step()
            self.pipe.zero_grad()
        return loss.item()

    def planned_bytes(self, rank: int) -> int:
        """The peak of a process by the planner."""
        return self.pipe.plan(self.batch).processes[rank].memory.total


def _train_a_little(options: Options) -> None:
    """Two steps of a tiny model, which bring in the libraries' own pages."""
    work = Work(layers=2, hidden=64, intermediate=64, vocabulary=128, rows=2, tokens=8, micro_batches=2)
    tiny = Ours(work, replace(options, recompute="stage", blocks=(1, 1), peak_bytes=None), 0)
    for _ in range(2):
        tiny.step()

"""hf_gpipe, through its public interface."""

from __future__ import annotations

from bench import machine
from bench.contenders import Options
from bench.work import Work, optimizer
from hf_gpipe import Pipeline


class Ours:
    """Two stages of a Pipeline."""

    def __init__(self, work: Work, options: Options, rank: int) -> None:
        recompute = options.recompute if isinstance(options.recompute, str) else list(options.recompute)
        # Layers are the embedding, the blocks, the norm and the head.
        first = 1 + options.split
        # The planner counts what a pipeline needs; what the libraries take is there already.
        memory = None if options.peak_bytes is None else options.peak_bytes - machine.resident_bytes()
        self.batch = work.batch()
        self.pipe = Pipeline(
            work.model(),
            num_stages=2,
            num_micro_batches=work.micro_batches,
            schedule=options.schedule,
            recompute=recompute,
            partition=[first, work.layers + 3 - first] if options.split else "auto",
            length_bucketing=options.length_bucketing,
            example=self.batch,
            memory=memory,
        )
        self.optimizer = optimizer(self.pipe.parameters())
        if not options.length_bucketing:
            # Without a mask, columns that only pad are computed like all others, as in the other contenders.
            self.batch.pop("attention_mask", None)

    def step(self) -> float | None:
        loss = self.pipe.train_step(self.batch)
        self.optimizer.step()
        self.pipe.zero_grad()
        return loss.item()

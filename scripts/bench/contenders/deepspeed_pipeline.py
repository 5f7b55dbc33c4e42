"""DeepSpeed's PipelineModule (1F1B), with replicas and its ZeRO-1."""

from __future__ import annotations

import logging
import os
from functools import partial
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
from deepspeed.pipe import PipelineModule

from bench.contenders import Options
from bench.contenders.llama_stages import layers
from bench.work import Work, loss_share, optimizer


class DeepSpeedPipeline:
    """Two stages. It divides the loss by M/D and gradients by D, so the loss of a micro-batch is told M times as large.

    Nothing is clipped.
    """

    def __init__(self, work: Work, options: Options, rank: int) -> None:
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        deepspeed.init_distributed("gloo", verbose=False)
        embedding, blocks, head = layers(work.model())
        cut = 1 + options.blocks[0]

        class TwoStages(PipelineModule):  # type: ignore[misc]  # the library is untyped
            """With the cut given, which the library can only derive from a method of its own."""

            def _partition_layers(self, method: str = "uniform") -> None:
                self.parts = [0, cut, len(blocks) + 2]
                self._set_bounds(start=self.parts[self.stage_id], stop=self.parts[self.stage_id + 1])

        module = TwoStages(
            layers=[embedding, *blocks, head],
            num_stages=2,
            loss_fn=partial(loss_share, num_targets=work.num_targets() / work.micro_batches),
            activation_checkpoint_interval=0 if options.recompute == "none" else 1,
            checkpointable_layers=["BlockOnly"],
        )
        config = {
            "train_batch_size": work.rows,
            "train_micro_batch_size_per_gpu": work.rows_each,
            "gradient_accumulation_steps": work.micro_batches // options.replicas,
            "zero_optimization": {"stage": int(options.zero)},
            "gradient_clipping": 0.0,
            "steps_per_print": 10**9,
            "zero_allow_untested_optimizer": True,
        }
        self.engine: Any
        self.engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer(module.parameters()), config=config)
        pipeline = module.topology().get_coord(rank).data
        self.micro_batches = work.micro_batches_of(pipeline, options.replicas)
        self.is_last = module.stage_id == 1

    def step(self) -> float | None:
        loss = self.engine.train_batch(data_iter=iter(self.micro_batches))
        return loss.item() if self.is_last else None

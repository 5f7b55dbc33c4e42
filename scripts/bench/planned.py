"""Cases that the planner predicts and this machine runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from transformers import PreTrainedConfig

from bench.processes import meet
from hf_gpipe import Pipeline
from hf_gpipe.adapters import adapter_for
from hf_gpipe.adapters.tiny import tiny_config
from hf_gpipe.partition import partition
from hf_gpipe.planner.chunks import each_chunk
from hf_gpipe.planner.costs import ModelCosts, mean_costs
from hf_gpipe.planner.devices import Device
from hf_gpipe.planner.measure import profile_layers
from hf_gpipe.planner.plan import Plan, Planner
from hf_gpipe.planner.workload import Chunks, PlanInputs, Workload
from hf_gpipe.recipe import DecidedConfig

CPU = torch.device("cpu")
#: Of a pipeline.
_OPTIONS = (
    *("num_stages", "num_micro_batches", "schedule", "recompute", "partition", "num_processes", "replicas", "zero"),
    *("placement", "sequence_chunks"),
)


@dataclass(frozen=True)
class Case:
    """One model and one way to train it; `num_processes` share the stages."""

    name: str
    config: PreTrainedConfig
    rows: int
    source: int
    target: int
    num_stages: int
    num_processes: int
    num_micro_batches: int
    schedule: str
    recompute: str
    replicas: int | tuple[int, ...] = 1
    zero: Literal[0, 1] = 0
    placement: str | None = None
    sequence_chunks: int = 1

    @property
    def workload(self) -> Workload:
        """Of its largest micro-batch."""
        return Workload(-(-self.rows // self.num_micro_batches), self.source, self.target)

    @property
    def partition(self) -> tuple[int, ...]:
        """The number of layers of each stage."""
        ranges = partition(len(adapter_for(self.config).layers), self.num_stages, "count")
        return tuple(len(layers) for layers in ranges)

    @property
    def settings(self) -> DecidedConfig:
        """As the planner is told."""
        return DecidedConfig(**{name: getattr(self, name) for name in _OPTIONS})

    def batch(self) -> dict[str, torch.Tensor]:
        """Random ids; the last row is a token shorter than the others."""
        generator = torch.Generator().manual_seed(0)
        vocabulary = self.config.vocab_size
        ids = torch.randint(3, vocabulary, (self.rows, self.source), generator=generator)
        labels = torch.randint(3, vocabulary, (self.rows, self.target), generator=generator)
        mask = torch.ones_like(ids)
        mask[:, -1] = torch.arange(self.rows) % self.num_micro_batches != 0
        if not self.config.is_encoder_decoder:
            labels = ids.masked_fill(mask == 0, -100)
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def tiny(case: Case) -> Case:
    """The same with a clone of the model that has sizes of a few dozen."""
    return replace(case, config=tiny_config(case.config), source=12, target=12)


def profile(case: Case) -> Sequence[ModelCosts]:
    """The costs of a case's layers for each chunk of its rows, measured while the other processes measure."""
    adapter = adapter_for(case.config)

    def costs_of(workload: Workload) -> ModelCosts:
        return profile_layers(
            adapter,
            workload,
            CPU,
            barrier=meet,
            make_optimizer=lambda parameters: torch.optim.AdamW(parameters, fused=True),
        )

    return each_chunk(case.workload, Chunks(case.sequence_chunks), costs_of)


def planned(measured: Sequence[Sequence[ModelCosts]], case: Case, device: Device, **options: Any) -> Plan:
    """The plan of a case by what each process has measured; `options` are the planner's."""
    of_chunks = [mean_costs(same) for same in zip(*measured, strict=True)]
    inputs = PlanInputs(Workload(case.rows, case.source, case.target))
    return Planner(lambda *_: of_chunks, inputs, device, **options).plan(case.settings)


def train_pipeline(
    case: Case, num_steps: int, after_step: Callable[[], None] = lambda: None
) -> tuple[Pipeline, tuple[float, ...]]:
    """Some steps of a case, and the seconds of each but the first; `after_step` is not in them."""
    pipe = Pipeline(case.config, **{name: getattr(case, name) for name in _OPTIONS}, device="cpu")
    optimizer = torch.optim.AdamW([p for p in pipe.parameters() if p.requires_grad], fused=True)
    if case.zero:
        pipe.shard_optimizer(optimizer)
    batch, seconds = case.batch(), []
    for _ in range(num_steps):
        meet()
        start = time.perf_counter()
        pipe.train_step(batch)
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        pipe.zero_grad()
        meet()
        seconds.append(time.perf_counter() - start)
        after_step()
    return pipe, tuple(seconds[1:])

"""A step of a tiny clone in stages, by the builder of every pipeline, to compare with a step of the plain clone."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import cast

import torch
from transformers import PreTrainedModel

from hf_gpipe.adapters import Adapter
from hf_gpipe.adapters.parts.ranks import ProcessRanks, Ranks
from hf_gpipe.job.facts import RankFacts
from hf_gpipe.job.world import World
from hf_gpipe.losses.loss import PLAIN
from hf_gpipe.model.clone import Batch
from hf_gpipe.model.reference import MICRO_BATCHES, HiddenLoss, Step
from hf_gpipe.model.spec import ModelSpec
from hf_gpipe.pipeline.building import build
from hf_gpipe.pipeline.decision import Decision, PipelineRequest
from hf_gpipe.pipeline.emulated_ranks import emulate
from hf_gpipe.pipeline.steps import Steps
from hf_gpipe.pipeline.variant import ModeVariant, Trust, Variant
from hf_gpipe.planner.workload import PlanInputs
from hf_gpipe.runtime.mesh import Mesh
from hf_gpipe.settings.division import Division
from hf_gpipe.settings.pipeline import PipelineConfig

CPU = torch.device("cpu")


@dataclass(frozen=True)
class _EmulatedMesh(Mesh):
    """The mesh of a process that stands for one of the ranks of a worker, which are its threads."""

    emulated: Ranks = field(kw_only=True)

    def worker_ranks(self, division: Division) -> ProcessRanks | None:
        return cast(ProcessRanks, self.emulated)


def in_stages(model: PreTrainedModel, adapter: Adapter, variant: Variant, ranks: Ranks | None = None) -> Steps:
    """The pipeline of a model, whose weights it shares, in this process; nothing of it is compared.

    Args:
        model: a tiny model.
        adapter: of the model.
        variant: how it is run.
        ranks: among which its layers are divided; None: they are whole.
    """
    num_layers = len(adapter.layers)
    config = PipelineConfig.of(
        None,
        num_stages=min(variant.stages or num_layers, num_layers),
        num_micro_batches=MICRO_BATCHES,
        schedule="zb_h1" if variant.splits_backward else "gpipe",
        recompute=variant.recompute,
        use_liger_kernel=variant.kernels is not None,
        **(variant.keys if isinstance(variant, ModeVariant) else {}),
    )
    inputs = PlanInputs(packing=variant.packing)
    loss = PLAIN if adapter.has_head else HiddenLoss()
    request = PipelineRequest(ModelSpec(model), config, inputs, loss=loss)
    world = World(0, (RankFacts.current(),)).on([str(variant.kernels or CPU)])
    decision = Decision.of(request, world, Trust(adapter))
    if ranks is not None:
        mesh = {one.name: getattr(decision.world, one.name) for one in fields(Mesh)}
        decision = replace(decision, world=_EmulatedMesh(**mesh, emulated=ranks))
    return build(request, decision)


def split_step(
    model: PreTrainedModel,
    adapter: Adapter,
    batch: Batch | Sequence[Batch],
    variant: Variant,
    ranks: Ranks | None = None,
) -> Step:
    """The step of a model in stages. The arguments are those of `in_stages`, and `batch` is that of `plain_step`."""
    model.zero_grad()
    steps = in_stages(model, adapter, variant, ranks)
    loss = steps.train_on([batch] if isinstance(batch, Mapping) else batch)
    stages = steps.parameters.models.values()
    parts = {name: (own, p.grad) for own in stages for name, p in own.parameters.items() if p.grad is not None}
    gradients = {name: own.division.whole(name, gradient).to(CPU) for name, (own, gradient) in parts.items()}
    return Step(float(loss), gradients, adapter.dtype)


def divided_steps(model: PreTrainedModel, adapter: Adapter, batch: Batch, variant: Variant) -> list[Step]:
    """`split_step` of a model whose layers are divided, as each rank has it, with whole gradients."""

    def run(ranks: Ranks | None = None) -> Step:
        return split_step(copy.deepcopy(model), adapter, batch, variant, ranks)

    return [run()] if variant.ranks == 1 else emulate(Division(variant.ranks), run)

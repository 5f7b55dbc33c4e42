"""The stages of this process, built with their weights and connected."""

from __future__ import annotations

import logging
import os

import torch
from transformers import PreTrainedConfig

from hf_gpipe.adapters import Adapter, StageModel
from hf_gpipe.adapters.modules.batch_norm import batch_norms_of
from hf_gpipe.adapters.modules.kernels import kernels_of
from hf_gpipe.checkpoint import hub
from hf_gpipe.errors import UserError, listed
from hf_gpipe.losses.loss import whole_logits
from hf_gpipe.model.assembly import assemble
from hf_gpipe.model.divided_head import divide_head
from hf_gpipe.model.opening import read_dtype
from hf_gpipe.model.stage_parameters import StageParameters
from hf_gpipe.pipeline.decision import Decision, PipelineRequest
from hf_gpipe.pipeline.forwards import Forwards
from hf_gpipe.pipeline.steps import Steps
from hf_gpipe.runtime.divided_head import HeadPart
from hf_gpipe.runtime.edges import connect, connect_head, connect_relays
from hf_gpipe.runtime.executor import Executor
from hf_gpipe.runtime.homes import Homes
from hf_gpipe.runtime.stage_with_teacher import PREFIX
from hf_gpipe.runtime.step import Row
from hf_gpipe.runtime.visits import leave_on_host, visits_of

logger = logging.getLogger(__name__)


def build(request: PipelineRequest, decision: Decision) -> Steps:
    """Build the stages of this process and connect them. Every process calls it.

    Raises UserError where weights cannot be made, or the stages cannot be trained as the schedule says.
    """
    adapter, config, world = decision.adapter, decision.config, decision.world
    sent = _boundary_dtype(config.boundary.boundary_dtype, adapter)
    seed = 0 if request.seed is None else request.seed
    weights = None if isinstance(request.model.model, PreTrainedConfig) else request.model.model
    others = hub.unexpected_tensors(adapter, weights) if isinstance(weights, str | os.PathLike) else []
    if others and world.is_main:
        logger.warning(
            f"{len(others)} tensors of the checkpoint {str(weights)!r} are not read, because the model has no "
            f"such parameters: {listed(others, 3)}; the head of another task is left out so, and any other tensor is a "
            "sign that the model's configuration is not that of the checkpoint"
        )
    ranks, divides_head = world.worker_ranks(config.division), decision.full_table.divides_head
    num_layers, visitors = len(adapter.layers), config.visits.offload_weights
    kernels = kernels_of(adapter.reference) if config.liger.use_liger_kernel else {}
    homes = Homes(world) if world.placement.is_dealt else None
    #: The stages that each worker of this process runs.
    run_by: dict[int, dict[int, StageModel]] = {worker: {} for worker in world.workers}
    for stage, layers in enumerate(decision.partition):
        if divides_head:
            layers = range(layers.start, min(layers.stop, num_layers - 1))
        for worker, own in run_by.items():
            if stage not in world.placement.stages_run_by(worker):
                continue
            device = world.device_of(worker, stage)
            own[stage] = assemble(adapter, layers, weights, device, seed, maps_files=bool(visitors), ranks=ranks)
            if visitors:
                # One stage after another, for together they may not fit.
                leave_on_host(own[stage], visitors, is_shared=homes is not None)
            if kernels:
                own[stage].use_kernels(kernels)
            if stage in decision.recompute.block_stages:
                own[stage].checkpoint_blocks()
            if config.compiled.backend is not None:
                own[stage].compile_blocks(config.compiled.backend)
            own[stage].overlap_sums()
        if homes is not None:
            homes.add(stage, {worker: own[stage] for worker, own in run_by.items()})
    models = {n: run_by[worker][n] for n, worker in world.own_workers.items()}
    parts: dict[int, HeadPart] = {}
    if divides_head:
        head = range(num_layers - 1, num_layers)
        heads = {n: assemble(adapter, head, weights, device, seed) for n, device in world.stage_devices.items()}
        for number, rows in divide_head(heads, models, world).items():
            parts[number] = HeadPart(heads[number], rows, number, config.num_stages, decision.loss)
    parameters = StageParameters(
        adapter, models, world, [*run_by.values()], bool(config.shared_updates.zero), seed, homes
    )
    if decision.is_asynchronous or homes is not None:
        _check_no_batch_norm(decision)
    if decision.is_asynchronous:
        _check_no_tie(decision, parameters)
    visits = visits_of(run_by, visitors, homes, world)
    parameters.ties.leave_out({p for own in visits.values() for p in own.parameters if not p.requires_grad})
    teacher = decision.teacher
    teachers = {} if teacher is None else teacher.stages(world.stage_devices, ranks)
    of_workers = {
        worker: Row(parameters.trainable.stages(own, decision.loss, teachers), visits[worker])
        for worker, own in run_by.items()
    }
    stages = {n: of_workers[worker].stages[n] for n, worker in world.own_workers.items()}
    for number, part in parts.items():
        stages[number].head = part
    if config.num_stages - 1 in models and (reason := whole_logits(adapter, decision.loss)):
        logger.warning(f"training makes the logits of a micro-batch whole: {reason}")

    def dtype_of(stage: int, name: str) -> torch.dtype:
        if teacher is not None and name.startswith(PREFIX):
            return teacher.carry_dtype(stage, name)
        return adapter.carry_dtype(decision.partition[stage][0], name)

    edges = connect(world, dtype_of, sent)
    head_edges = connect_head(world, next(iter(parts.values())).dtype_of) if parts else {}
    executor = Executor(of_workers, edges, parameters.replicas, head_edges, connect_relays(world), homes)
    executor.prepare(decision.full_table)
    if request.model.saved_adapters is not None:
        parameters.load_pretrained(request.model.saved_adapters)
    forwards = Forwards(
        decision,
        parameters,
        stages,
        edges,
        executor,
        {n: visits[worker] for n, worker in world.own_workers.items()},
        request.cutting(config),
        request.model.has_new_adapters,
    )
    return Steps(forwards)


def _boundary_dtype(name: str | None, adapter: Adapter) -> torch.dtype | None:
    """The type that `boundary_dtype` names. Raises UserError unless it is narrower than the model's."""
    dtype = read_dtype(name, "boundary_dtype")
    if dtype is not None and dtype.itemsize >= adapter.dtype.itemsize:
        raise UserError(
            f"boundary_dtype is {name} and the model's type is {str(adapter.dtype).removeprefix('torch.')}, which "
            "is not wider: nothing would be sent in fewer bytes; name a narrower type, or leave boundary_dtype out"
        )
    return dtype


def _check_no_batch_norm(decision: Decision) -> None:
    """Raise UserError where moving averages would have to change between the mini-batches of a window."""
    for name, layer in batch_norms_of(decision.adapter.reference).items():
        raise UserError(
            f"schedule {decision.config.schedule!r}: {name!r} is a {type(layer).__name__}, whose moving averages "
            "change once all micro-batches of a mini-batch are there, and mini-batches overlap; use a synchronous "
            "schedule, such as 1f1b, or a GroupNorm"
        )


def _check_no_tie(decision: Decision, parameters: StageParameters) -> None:
    """Raise UserError, on every process, where stages that update by themselves would train one parameter."""
    for name, stages in sorted(parameters.ties.stages_of.items()):
        if len(stages) > 1 and parameters.trainable.parameters[name]:
            raise UserError(
                f"schedule {decision.config.schedule!r}: {name} is tied, stages {stages} train it, and each of them "
                "would update it at another time; use a model whose weights are not tied (tie_word_embeddings: "
                "false), a partition that puts its layers into one stage, or a synchronous schedule, such as 1f1b"
            )

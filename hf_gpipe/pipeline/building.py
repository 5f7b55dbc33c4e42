"""The stages of this process, built with their weights and connected."""

from __future__ import annotations

import logging
import os

import torch
from transformers import PreTrainedConfig

from hf_gpipe.adapters import Adapter, StageModel
from hf_gpipe.adapters.modules.kernels import kernels_of
from hf_gpipe.checkpoint import stage_weights
from hf_gpipe.errors import UserError, listed
from hf_gpipe.losses.loss import whole_logits
from hf_gpipe.model.assembly import assemble
from hf_gpipe.model.opening import read_dtype
from hf_gpipe.model.stage_parameters import StageParameters
from hf_gpipe.pipeline.decision import Decision, PipelineRequest
from hf_gpipe.pipeline.forwards import Forwards
from hf_gpipe.pipeline.mode_builder import Building, ModeBuilder
from hf_gpipe.pipeline.steps import Steps
from hf_gpipe.registry import parts_of_modes
from hf_gpipe.runtime.edges import connect
from hf_gpipe.runtime.executor import Executor
from hf_gpipe.runtime.stage import Stage

logger = logging.getLogger(__name__)


def build(request: PipelineRequest, decision: Decision) -> Steps:
    """Build the stages of this process and connect them. Every process calls it.

    Raises UserError where weights cannot be made, or the stages cannot be trained as the schedule says.
    """
    adapter, config, world = decision.adapter, decision.config, decision.world
    sent = _boundary_dtype(config.boundary.boundary_dtype, adapter)
    seed = 0 if request.seed is None else request.seed
    weights = None if isinstance(request.model.model, PreTrainedConfig) else request.model.model
    others = stage_weights.unexpected_tensors(adapter, weights) if isinstance(weights, str | os.PathLike) else []
    if others and world.is_main:
        logger.warning(
            f"{len(others)} tensors of the checkpoint {str(weights)!r} are not read, because the model has no "
            f"such parameters: {listed(others, 3)}; the head of another task is left out so, and any other tensor is a "
            "sign that the model's configuration is not that of the checkpoint"
        )
    ranks = world.worker_ranks(config.division)
    kernels = kernels_of(adapter.reference) if config.liger.use_liger_kernel else {}
    building = Building(decision, weights, seed, ranks, run_by={worker: {} for worker in world.workers})
    modes: dict[str, ModeBuilder] = {name: mode.Builder(building) for name, mode in parts_of_modes("building").items()}
    maps_files = any(mode.maps_files for mode in modes.values())
    for stage, layers in enumerate(decision.partition):
        for mode in modes.values():
            layers = mode.layers(layers)
        made = {}
        for worker, own in building.run_by.items():
            if stage not in world.placement.stages_run_by(worker):
                continue
            device = world.device_of(worker, stage)
            model = assemble(adapter, layers, weights, device, seed, maps_files=maps_files, ranks=ranks)
            own[stage] = made[worker] = model
            if kernels:
                model.use_kernels(kernels)
            if stage in decision.recompute.block_stages:
                model.checkpoint_blocks()
            if config.compiled.backend is not None:
                model.compile_blocks(config.compiled.backend)
            model.overlap_sums()
        for mode in modes.values():
            mode.assembled(stage, made)
    models = building.models = {n: building.run_by[worker][n] for n, worker in world.own_workers.items()}
    for mode in modes.values():
        mode.add()
    del building.weights  # channels keep the modes' builders, which would keep a whole model in every process
    of_workers = [*building.run_by.values()]
    parameters = building.parameters = StageParameters(
        adapter, models, world, of_workers, bool(config.shared_updates.zero), seed, building.shared
    )
    for mode in modes.values():
        mode.check()

    def stage_of(number: int, model: StageModel) -> Stage:
        makes = (mode.stage_type(number) for mode in modes.values())
        make = next((make for make in makes if make is not None), Stage)
        return parameters.trainable.stage(model, make)

    rows = {worker: {n: stage_of(n, model) for n, model in own.items()} for worker, own in building.run_by.items()}
    stages = {n: rows[worker][n] for n, worker in world.own_workers.items()}
    if config.num_stages - 1 in models and (reason := whole_logits(adapter, decision.loss)):
        logger.warning(f"training makes the logits of a micro-batch whole: {reason}")

    def dtype_of(stage: int, name: str) -> torch.dtype:
        for mode in modes.values():
            if (dtype := mode.dtype_of(stage, name)) is not None:
                return dtype
        return adapter.carry_dtype(decision.partition[stage][0], name)

    edges = connect(world, dtype_of, sent)
    states = {name: mode.State(rows) for name, mode in parts_of_modes("runtime").items()}
    states |= {name: state for name, mode in modes.items() if (state := mode.state(rows)) is not None}
    executor = Executor(rows, edges, parameters.replicas, states)
    executor.prepare(decision.full_table)
    if request.model.saved_adapters is not None:
        parameters.load_pretrained(request.model.saved_adapters)
    forwards = Forwards(
        decision,
        parameters,
        stages,
        edges,
        executor,
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

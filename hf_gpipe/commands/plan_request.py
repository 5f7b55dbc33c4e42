"""The question to the command `plan`: a recipe, the devices it is planned for, and their planner.

Imports that take seconds are made where they are needed: what the options get wrong is said before them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from hf_gpipe.commands.base import loading
from hf_gpipe.errors import DataError, HfGpipeError, PartitionError, RecipeError, UserError
from hf_gpipe.recipe import Recipe, load_recipe
from hf_gpipe.registry import functions_of_modes
from hf_gpipe.schedule import Schedule, recompute_under
from hf_gpipe.schedule.placement import MOST_PLACES
from hf_gpipe.settings.sizes import read_bytes

if TYPE_CHECKING:
    import torch

    from hf_gpipe.adapters import Adapter
    from hf_gpipe.losses.loss import Loss
    from hf_gpipe.partition.cluster import Cluster
    from hf_gpipe.planner.costs.model_costs import ModelCosts
    from hf_gpipe.planner.machines.devices import Device
    from hf_gpipe.planner.plan import Plan, Planner
    from hf_gpipe.planner.workload import Workload
    from hf_gpipe.settings.pipeline import PipelineConfig


@dataclass(frozen=True)
class PlanRequest:
    """A recipe and the devices it is planned for.

    Attributes:
        recipe: on the devices that the options name.
        config: its pipeline, with the limit of memory.
        given: the pipeline of the recipe and its overrides alone.
        devices: of each process, or the one that all have.
        cluster: the links between the processes; None: every pair has the device's link.
        table: the schedule, where it is a file.
        is_profiled: whether the layers are measured.
    """

    recipe: Recipe
    config: PipelineConfig
    given: PipelineConfig
    devices: Sequence[Device]
    cluster: Cluster | None
    table: Schedule | None
    is_profiled: bool

    @classmethod
    def of(cls, options: argparse.Namespace) -> PlanRequest:
        """The request that the command's options ask. Raises UserError for what they get wrong."""
        # What the options get wrong is said before anything that takes seconds.
        num_devices, cluster = _count(options.devices), None
        if options.table and options.json:
            raise UserError("--table and --json exclude each other: both say what is printed; leave one of them out.")
        limits = tuple((options.memory or "").split(","))
        for limit in limits if options.memory else ():
            read_bytes(limit, "--memory")
        from hf_gpipe.planner.machines.network import read_cluster

        device, *others = _devices(options)
        if options.devices is not None and num_devices is None:
            cluster = read_cluster(options.devices, device)
            num_devices = cluster.num_devices
        if others and num_devices not in (None, 1 + len(others)):
            raise UserError(
                f"--device names {1 + len(others)} devices and --devices is {num_devices}: name one device for all, or "
                "each of them."
            )
        num_devices = 1 + len(others) if others else num_devices
        recipe = load_recipe(options.recipe, options.overrides)
        given = recipe.pipeline
        if num_devices is not None:
            num_devices = given.division.workers_among(num_devices)
        if others:
            device, *others = map(_weakest, given.division.by_worker([device, *others]))
        config = given.with_defaults(can_plan=True)
        if options.search and num_devices is not None:
            config = config.with_auto(num_devices)
        elif num_devices is not None:
            keeps_stages = _is_given("pipeline.num_stages", options.overrides)
            config = _on_devices(config, num_devices, keeps_stages=keeps_stages)
        recipe = recipe.replace(pipeline=config)
        if options.memory is not None:
            config = config.replace(memory=limits if len(limits) > 1 else options.memory)
        elif others and config.memory is None:
            config = config.replace(memory=tuple(f"{limited.memory_bytes} B" for limited in (device, *others)))
        if config.speeds == "profile":
            config = config.replace(speeds=None)
            if not others:
                print(
                    "pipeline.speeds is profile: a run measures them, and this plan takes all processes for equally "
                    "fast; name the device of each, such as --device rtx4090,rtx3090, to plan for unlike ones",
                    file=sys.stderr,
                )
        if config.is_mesh_open and config.num_processes is None:
            raise UserError(
                "pipeline.num_stages or pipeline.replicas is auto: they are chosen for a number of processes; give "
                "--devices, or pipeline.num_processes."
            )
        if options.screen:
            config = config.replace(memory=_beside_a_screen(config, device))
        table = recipe.table(config.processes)
        if table is not None:
            config = config.replace(recompute=recompute_under(table, config.recompute))
        with loading():
            import_module("hf_gpipe.planner.search.choose")  # and torch and transformers with it
        request = cls(_with_vocabulary(recipe), config, given, (device, *others), cluster, table, options.profile)
        request.planner.lighter = {keys: partial(request._plan_with, keys, options) for keys in _lighter(recipe)}
        return request

    def _plan_with(self, keys: str, options: argparse.Namespace) -> Plan:
        """The plan with some more keys of the model, also where it does not fit."""
        from hf_gpipe.planner.search.choose import best_plan

        other = load_recipe(options.recipe, [*options.overrides, *keys.split()])
        lighter = replace(self, recipe=self.recipe.replace(model=other.model, lora=other.lora))
        try:
            return best_plan(lighter.planner, self.config)
        except PartitionError:
            return lighter._unlimited()

    def divided(self, options: argparse.Namespace) -> Iterator[PlanRequest]:
        """Yield requests with layers divided among 2, 4 and 8 devices, where some are given and the model allows it."""
        is_given = _is_given("pipeline.tensor_parallel", options.overrides)
        has_devices = options.devices is not None or len(self.devices) > 1
        for size in (2, 4, 8) if has_devices and self.config.division.is_whole and not is_given else ():
            overrides = [*options.overrides, f"pipeline.tensor_parallel={size}"]
            with suppress(UserError):
                yield PlanRequest.of(argparse.Namespace(**{**vars(options), "overrides": overrides}))

    @cached_property
    def planner(self) -> Planner:
        """The planner of this request. Making it measures or traces the layers."""
        from hf_gpipe.from_recipe.checks import loss_of, verify_options, workload_of
        from hf_gpipe.from_recipe.model import companion_of
        from hf_gpipe.from_recipe.workload import plan_inputs
        from hf_gpipe.planner.costs.model_costs import rated_speeds
        from hf_gpipe.planner.of_model import planner_of
        from hf_gpipe.planner.search.choose import micro_batch_counts

        recipe, config, adapter = self.recipe, self.config, _adapter(self.recipe)
        verify_options(recipe, config, adapter)
        if self.is_profiled and not config.division.is_whole:
            raise UserError(
                f"{config.division.text}, and the seconds of divided layers cannot be measured in one process; leave "
                "--profile out, and plan with partition flops or auto"
            )
        companion, named = None, companion_of(recipe)
        if named is not None:
            from hf_gpipe.pipeline.probe import PROBE

            companion = named.opened(adapter, lambda spec: PROBE.open(spec, _here()))
        inputs, loss = plan_inputs(recipe, workload_of(recipe, adapter.config)), loss_of(recipe).planned
        if self.table is not None:
            inputs = replace(inputs, tables={recipe.pipeline.schedule: self.table})
        try:
            planner = planner_of(
                adapter,
                inputs,
                self.devices[0],
                config,
                loss=loss,
                as_on_gpu=True,
                seconds=partial(_profiled, adapter, loss) if self.is_profiled else None,
                cluster=self.cluster,
                companion=companion,
            )
            # The layers run here for the first time, in the smallest micro-batch that will be planned.
            costs = planner.costs(micro_batch_counts(planner.rows, recipe.pipeline.num_micro_batches)[-1])
        except HfGpipeError:
            raise
        except Exception as error:  # whatever the family's own code says of its configuration
            family = adapter.config.model_type
            raise RecipeError(f"model: transformers cannot make a {family} model of this: {error}") from error
        if len(self.devices) > 1 and planner.speeds is None:
            planner.speeds = rated_speeds(costs, self.devices)
        return planner

    def longer_rows(self, plan: Plan) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield keys with which longer rows may fit than in a plan, and their name; tiny clones are compared."""
        from hf_gpipe.from_recipe.checks import verify_options

        for of_mode in functions_of_modes("search", "longer_rows"):
            for name, keys in of_mode(plan.settings):
                try:
                    verify_options(self.recipe, self.config.replace(**keys), _adapter(self.recipe))
                except UserError:
                    continue
                yield name, keys

    def best(self) -> Plan:
        """The plan, with what is left open chosen. Raises UserError where nothing that is allowed fits."""
        from hf_gpipe.planner.search.advice import smallest_fix
        from hf_gpipe.planner.search.choose import best_plan

        try:
            return best_plan(self.planner, self.config)
        except PartitionError as error:
            if self.planner.memory_bytes is None:
                raise
            raise PartitionError(f"{error} {smallest_fix(self._unlimited())}") from None

    def _unlimited(self) -> Plan:
        """The plan where no split fits: without a limit there is one, which knows what would have to change."""
        from hf_gpipe.planner.search.choose import best_plan

        return replace(best_plan(self.planner.within(None), self.config), planner=self.planner)

    def fits_with(self, plan: Plan, lengths: Mapping[str, Any], keys: Mapping[str, Any]) -> bool:
        """Whether a plan of this request also fits with other values of keys of `data`, and of `pipeline`.

        Args:
            plan: the plan.
            lengths: the values of keys of `data`.
            keys: the values of keys of `pipeline`.
        """
        from hf_gpipe.planner.search.choose import ways_of_modes

        recipe = self.recipe.replace(data=self.recipe.data.replace(**lengths))
        planner = replace(self, recipe=recipe, is_profiled=False).planner
        settings = plan.settings
        if keys:
            (_, asked), *_ = ways_of_modes(planner, settings.reopened(**keys))
            settings = asked.decided()
        other = planner.plan(settings)
        # The planner cuts what the model has no positions for.
        return other.fits and other.costs.workload.target_tokens >= planner.inputs.mini_batch().target_tokens


def _count(text: str | None) -> int | None:
    """A number of devices; None for a cluster.

    Raises:
        UserError: the text is neither.
    """
    from hf_gpipe.planner.machines.network import is_cluster

    if text is None or is_cluster(text):
        return None
    try:
        count = int(text)
    except ValueError:
        raise UserError(
            f"--devices is {text!r}; write a number of devices, such as 8, or a cluster, such as 4x8 or "
            "4x8@25Gbit/s+50us,150GB/s+5us."
        ) from None
    if count < 1:
        raise UserError(f"--devices is {count}; a pipeline needs at least 1.")
    if count > MOST_PLACES:
        raise UserError(f"--devices is {count}; a plan is for at most {MOST_PLACES}.")
    return count


def _lighter(recipe: Recipe) -> list[str]:
    """The keys with which adapters are trained in place of all weights of a pretrained model, or beside fewer bits."""
    if recipe.model.path is None or recipe.model.quantization is not None:
        return []
    adapters = [] if recipe.lora.is_on else ["lora.r=16"]
    return [*adapters, " ".join([*adapters, "model.quantization=nf4"])]


def _on_devices(config: PipelineConfig, devices: int, *, keeps_stages: bool) -> PipelineConfig:
    """The pipeline on that many devices, one process each, of which the replicas of a pipeline have equally many.

    Where it has fewer stages, there is one for each device, unless the command line gives their number.
    """
    if config.is_mesh_open:
        return config.replace(num_processes=devices)
    num_stages, replicas = config.mesh
    if isinstance(replicas, int) and replicas > 1:
        of_replica, rest = divmod(devices, replicas)
        if rest or not of_replica or of_replica > num_stages:
            raise UserError(
                f"--devices is {devices}, pipeline.replicas {replicas} and pipeline.num_stages {num_stages}: every "
                "replica has equally many devices, and each of them at least one "
                f"stage; use a multiple of replicas, at most {replicas * num_stages}, or more stages."
            )
    elif devices > num_stages and config.places == num_stages:
        if keeps_stages:
            raise UserError(
                f"--devices is {devices} and pipeline.num_stages is {num_stages}: each device holds at least one "
                f"stage; use at most {num_stages} devices, or more stages."
            )
        if not isinstance(config.partition, str):
            raise UserError(
                f"--devices is {devices} and pipeline.partition lists {num_stages} stages; list {devices}, or use "
                "count."
            )
        num_stages = devices
    return config.replace(num_stages=num_stages, num_processes=devices)


def _beside_a_screen(config: PipelineConfig, device: Device) -> tuple[str, ...]:
    """The limits of all processes, the first without what a screen takes. Raises UserError: no limit is known."""
    from hf_gpipe.planner.machines.devices import SCREEN_BYTES

    limit = config.memory_bytes or device.memory_bytes
    if limit is None:
        raise UserError("--screen: no limit of memory is known; give --memory or --device.")
    count = config.num_processes or config.processes
    first, *others = limit if isinstance(limit, tuple) else (limit,) * count
    return tuple(f"{size} B" for size in (first - SCREEN_BYTES, *others))


def _is_given(key: str, overrides: Sequence[str]) -> bool:
    """Whether the command line gives a recipe's key."""
    return any(text.replace(" ", "").startswith(f"{key}=") for text in overrides)


def _devices(options: argparse.Namespace) -> list[Device]:
    """The device of each process, or the one that all have. The slowest link joins those that differ."""
    from hf_gpipe.planner.machines.devices import read_host

    names = options.device.split(",") if options.device else [options.device]
    alone = [_device_alone(argparse.Namespace(**{**vars(options), "device": name})) for name in names]
    given = options.host_link, options.host_memory, options.host_bandwidth
    devices = [replace(device, host=read_host(*given, device.host, options.disk_bandwidth)) for device in alone]
    if len(names) == 1:
        return devices
    if options.profile:
        raise UserError("--profile measures the device of this machine, and --device names several: leave one out.")
    slowest = min((device.link for device in devices), key=lambda link: link.bytes_per_second)
    return [replace(device, name=f"devices ({', '.join(names)})", link=slowest) for device in devices]


def _weakest(devices: Sequence[Device]) -> Device:
    """The slowest of a worker's devices, with the least memory of any."""
    slowest = min(devices, key=lambda device: device.flops_for("bfloat16"))
    return replace(slowest, memory_bytes=min(device.memory_bytes or 0 for device in devices))


def _device_alone(options: argparse.Namespace) -> Device:
    from hf_gpipe.planner.machines.devices import LINKS, custom, device, link_between, read_bandwidth, read_flops

    if options.device is None and options.flops is None and options.bandwidth is None:
        if options.profile:
            import torch

            from hf_gpipe.planner.costs.measure import this_machine

            measured = this_machine(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
            return measured if options.link is None else replace(measured, link=link_between(options.link))
        some = device("a100-80", options.link)
        return replace(some, memory_bytes=None, name="a device as fast as an a100-80 (--device names another)")
    if options.device is not None:
        if options.flops is not None or options.bandwidth is not None:
            raise UserError("--device and --flops or --bandwidth exclude each other: a device has its own rates.")
        return device(options.device, options.link)
    if options.flops is None or options.bandwidth is None:
        raise UserError("--flops and --bandwidth go together: give both, or a --device.")
    link = LINKS["pcie4"] if options.link is None else link_between(options.link)
    return custom(None, read_flops(options.flops, "--flops"), read_bandwidth(options.bandwidth, "--bandwidth"), link)


def _here() -> torch.device:
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _adapter(recipe: Recipe) -> Adapter:
    """The adapter of the recipe's model. Without CUDA the CPU shows the types under autocast; nearly all agree."""
    from hf_gpipe.from_recipe.checks import checked_adapter

    return checked_adapter(recipe, _here())


def _profiled(adapter: Adapter, loss: Loss, workload: Workload, costs: ModelCosts) -> ModelCosts:
    """The costs with the seconds that the layers take on a device of this machine."""
    from hf_gpipe.planner.costs.measure import profile_layers

    return profile_layers(adapter, workload, _here(), loss=loss, costs=costs)


def _with_vocabulary(recipe: Recipe) -> Recipe:
    """The recipe with the size of its vocabulary, which a run would take from the tokenizer."""
    model = recipe.model
    if model.path is not None or "vocab_size" in model.config or recipe.data.kind == "images":
        return recipe
    if recipe.tokenizer.path is not None:
        from hf_gpipe.data.tokenizer import read_tokenizer

        try:
            tokenizer = read_tokenizer(recipe.tokenizer.path, trust_remote_code=model.trust_remote_code)
        except DataError as error:
            raise RecipeError(f"tokenizer.path: {error}") from error
        vocab_size, source = len(tokenizer), f"the tokenizer at {recipe.tokenizer.path}"
    else:
        vocab_size, source = recipe.tokenizer.vocab_size, "tokenizer.vocab_size; a trained one may have a few more"
    print(f"vocabulary of {vocab_size} tokens, from {source}", file=sys.stderr)
    return recipe.replace(model=model.replace(config={**model.config, "vocab_size": vocab_size}))

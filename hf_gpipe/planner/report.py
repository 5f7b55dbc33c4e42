"""A plan as text and as JSON: what each stage holds, the time of a step, and whether it fits."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from itertools import groupby
from operator import itemgetter
from typing import Any

from hf_gpipe.errors import UserError
from hf_gpipe.planner.bound import limit_of_step
from hf_gpipe.planner.plan import Plan, StagePlan
from hf_gpipe.planner.saving import (
    copy_bytes,
    hosted_words,
    offload_text,
    offloaded_bytes,
    saving_text,
    visits_text,
)
from hf_gpipe.planner.search.advice import smallest_fix
from hf_gpipe.planner.search.bubble import smaller_bubble
from hf_gpipe.planner.search.search_all import SearchResult
from hf_gpipe.planner.search.table_file import TABLE_FILE
from hf_gpipe.planner.search.visiting import untried, way_of
from hf_gpipe.planner.traffic import is_mesh, mesh_dict, mesh_lines, traffic
from hf_gpipe.recipe import AUTO, PipelineConfig, keys_of
from hf_gpipe.schedule import DEALT, is_table_file, staleness
from hf_gpipe.schedule.messages import num_communicators
from hf_gpipe.text import bytes_text, count_text, seconds_text, size_text, table_text

#: The number of stages from which consecutive stages that are alike share a line of the table.
_MANY_STAGES = 17
_SEARCH_HEADER = (
    *("step", "bubble", "memory", "sent a row", "K", "M", "T"),
    *("replicas", "schedule", "recompute", "layers"),
)
#: The number of first columns of these, which have numbers.
_NUMBERS = 7


def report(plan: Plan) -> str:
    """Everything about a plan, in at most a screen of text for 16 stages or fewer."""
    settings, planner, costs = plan.settings, plan.planner, plan.costs
    workload, total = costs.workload, costs.total
    is_encoder_decoder = any(layer.stack == "encoder" for layer in costs.layers)
    columns = f"{workload.source_tokens} + {workload.target_tokens}" if is_encoder_decoder else workload.target_tokens
    rows = f"{columns} tokens"
    if workload.entries:
        rows = ", ".join(f"{name} {tuple(shape)}" for name, shape, _ in workload.entries if shape)
    table = plan.timeline.schedule
    num_micro_batches = table.num_micro_batches // (table.num_steps * table.chunks)
    of_rank, times = "", ""
    if not planner.division.is_whole:
        of_rank, times = " on each rank", f" times {planner.division.num_ranks}"
    cut = f", cut into {table.chunks} chunks of at most {-(-workload.target_tokens // table.chunks)} tokens"
    lines = [
        ("model", f"{count_text(total.count)} parameters{of_rank} in {len(costs.layers)} layers, {_types(plan)}"),
        (
            "mini-batch",
            f"{planner.rows} rows of {rows}, as {num_micro_batches} micro-batches of at most {workload.rows}"
            f"{', packed' if workload.is_packed else ''}{cut if table.chunks > 1 else ''}",
        ),
        ("devices", f"{settings.num_processes}{times} x {planner.device.name}, {planner.text}"),
        (
            "pipeline",
            f"{settings.num_stages} stages, schedule {settings.schedule}, recompute {_recompute(plan)}, layers a stage "
            f"{runs_text(settings.partition)}",
        ),
    ]
    if costs.whole_logits:
        lines.append(("logits", f"made whole: {costs.whole_logits}"))
    held = [round(stage.beside.held_bytes) for stage in plan.layout.stages]
    if any(held):
        text = f"{size_text(sum(held))} of weights in the same stages, at most {size_text(max(held))} in one"
        lines.append(("teacher", f"{text}; it runs in F"))
    lines += mesh_lines(plan)
    lines_after = [
        ("step", _step(plan)),
        ("before", _before(plan)),
        ("memory", memory_why(plan)),
        ("host", visits_text(plan)),
        ("optimizer", offload_text(plan)),
        ("saving", saving_text(plan)),
        ("time", time_why(plan)),
        ("limit", "" if table.is_asynchronous else limit_of_step(plan)),
        ("bubble", smaller_bubble(plan)),
        *asynchronous_lines(plan),
        ("verdict", verdict(plan)),
    ]
    return "\n".join([*map(_line, lines), "", _table(plan), "", *map(_line, filter(itemgetter(1), lines_after))])


def asynchronous_lines(plan: Plan) -> list[tuple[str, str]]:
    """Lines about how stale an asynchronous schedule's gradients are, and about the plan of a synchronous schedule."""
    table = plan.timeline.schedule
    if not table.is_asynchronous:
        return []
    late = "-".join(str(max(staleness(table, stage))) for stage in range(table.num_stages))
    other = plan.planner.plan(plan.settings.replace(schedule="1f1b"))
    rows = plan.planner.rows * plan.planner.inputs.accumulation
    return [
        ("staleness", f"gradients of the stages come {late} updates late; what that costs in loss a plan cannot know"),
        (
            "against",
            f"1f1b, with the plain model's numbers: {seconds_text(other.step_seconds / rows)} a row, here "
            f"{seconds_text(plan.step_seconds / rows)}; peak memory {size_text(other.peak_bytes)} in a process, "
            f"here {size_text(plan.peak_bytes)}",
        ),
    ]


def _before(plan: Plan) -> str:
    """The time of what a step does before its table; empty where there is nothing."""
    forwards, generation = plan.before
    inputs, count = plan.planner.inputs, plan.planner.num_forwards
    words = [f"{seconds_text(generation)} for {inputs.new_tokens} new tokens a row"] if generation else []
    if forwards:
        words.append(f"{seconds_text(forwards)} for {count} {'pass' if count == 1 else 'passes'} of forwards")
    if inputs.updates > 1:
        words.append(f"then the table {inputs.updates} times, {seconds_text(plan.table_seconds)} each")
    return f"of the step, {', '.join(words)}" if words else ""


def verdict(plan: Plan) -> str:
    """Whether a plan fits; where it does not, the smallest change that makes it fit."""
    process = plan.fullest_process
    limit = plan.planner.limit_of(process.number)
    if limit is None and plan.fits:
        return f"needs {size_text(plan.peak_bytes)} a process; --memory says whether that is there"
    needs = f"process {process.number} needs {size_text(plan.peak_bytes)}{f' of {size_text(limit)}' if limit else ''}"
    if plan.host_fullness > 1:
        host = plan.planner.device.host.memory_bytes or 0
        needs += f", and {hosted_words(plan)} need {size_text(plan.machine_bytes)} of {size_text(host)} of CPU memory"
    return f"fits: {needs}" if plan.fits else f"does not fit: {needs}; {smallest_fix(plan)}"


def memory_why(plan: Plan) -> str:
    """The process with the highest peak memory, and its largest items."""
    process = plan.fullest_process
    items = [(getattr(process.memory, item.name), item.metadata["words"]) for item in fields(process.memory)]
    items.sort(key=lambda item: -item[0])
    largest = ", ".join(f"{size_text(size)} {words}" for size, words in items[:3])
    stages = f"stage {process.stages[0]}" if len(process.stages) == 1 else f"stages {list(process.stages)}"
    return f"process {process.number} ({stages}) has the peak: {size_text(process.memory.total)}, of it {largest}"


def time_why(plan: Plan) -> str:
    """The slowest stage, and what makes it so."""
    slowest = plan.slowest_stage
    mean = sum(stage.busy_seconds for stage in plan.stages) / len(plan.stages)
    seconds = {index: plan.layout.sums.seconds(index, index + 1, "none").of_micro_batch() for index in slowest.layers}
    dearest = max(seconds, key=lambda index: seconds[index])
    share = seconds[dearest] / (sum(seconds.values()) or 1)
    reason = f"{len(slowest.layers)} layers"
    if len(seconds) > 1 and share > 1.5 / len(seconds):
        reason += f", {plan.costs.layers[dearest].name} is {share:.0%} of it"
    return (
        f"the slowest is stage {slowest.number}: {seconds_text(slowest.busy_seconds)} of work, "
        f"{slowest.busy_seconds / mean if mean else 1:.2f} times the mean ({reason})"
    )


def search_report(result: SearchResult, recipe: PipelineConfig) -> str:
    """The best plans of a search, by time under the limit, and the one with the least memory.

    The order of the processes is given where it is not the usual one.
    """
    shown = result.fastest[:8]
    rows = [_SEARCH_HEADER, *map(_search_row, (*shown, result.leanest))]
    header, *lines, leanest = table_text(rows, left=range(_NUMBERS, len(_SEARCH_HEADER))).split("\n")
    parts = [f"tried {result.num_tried} ways", ""]
    if shown:
        parts += ["fastest that fit, the best of each T, K, replicas and order:", header, *lines]
        parts += ["", "as overrides: " + overrides(shown[0], recipe)]
        parts += [f"{name:12}  {text}" for name, text in mesh_lines(shown[0])]
        if result.least is not None:
            size = result.least.num_ranks
            parts.append(
                f"where weights stay on their devices, it takes pipeline.tensor_parallel={size} or more to fit them"
            )
    else:
        parts.append("none of them fits")
    parts += ["", "each way, and what limits it:", *_ways(result)]
    if text := untried(*result.fastest, *result.ways, result.leanest):
        parts.append(text)
    return "\n".join([*parts, "", "least memory:", header, leanest])


#: The row of the table where all weights stay on their devices, and no plan was made.
_NO_SPLIT = ("-", "does not fit", "weights stay on their devices", "their memory: no split of the model fits it")


def _ways(result: SearchResult) -> list[str]:
    """Lines with the best plan and its limit for each way in which weights stay or visit, and for adapters."""
    every = [(way_of(plan), plan) for plan in result.ways]
    stays = [] if any(plan.settings.visits.offload_weights is None for plan in result.ways) else [_NO_SPLIT]
    for keys, make in result.leanest.planner.lighter.items():
        with suppress(UserError):
            every.append((f"{keys} (adapters alone are trained)", make()))
    rows = [
        (seconds_text(plan.step_seconds), "fits" if plan.fits else "does not fit", way, limit_of_step(plan))
        for way, plan in every
    ]
    return table_text([*rows, *stays], left=(1, 2, 3)).split("\n")


def overrides(plan: Plan, recipe: PipelineConfig) -> str:
    """The plan as key=value arguments of a recipe that has this configuration. They do not have a table that was made
    for the plan: the planner makes it again."""
    settings = plan.settings
    is_made, recompute = settings.schedule == TABLE_FILE, settings.recompute
    if not isinstance(recompute, str) or (is_made and recompute == "stage"):
        # What differs from stage to stage is what a table in a file has, or the planner chooses again under its limit.
        recompute = "stage" if is_table_file(settings.schedule) and not is_made else AUTO
    values = settings.of_plan | {"recompute": recompute}
    if is_made:
        # The planner makes the table again with these values.
        values["schedule"] = DEALT[0] if plan.timeline.schedule.placement.is_dealt else AUTO
    always = (*settings.in_short, "partition", "num_processes", "zero")
    own = recipe.values()
    plain = {name for name, key in keys_of(PipelineConfig).items() if values.get(name) == key.default == own[name]}
    shown = {name: value for name, value in values.items() if name in always or name not in plain}
    return " ".join(f"pipeline.{name}={_argument(value)}" for name, value in shown.items())


def _argument(value: Any) -> str:
    """Write a value for a shell and for YAML."""
    if value is None:
        return "null"
    return shlex.quote(value) if isinstance(value, str) else str(_listed(value)).replace(" ", "")


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def as_dict(plan: Plan) -> dict[str, Any]:
    """A plan for a JSON file: bytes, seconds, numbers and names."""
    chunks = plan.costs.workload.chunks
    return {
        "settings": plan.settings.of_plan | plan.planner.inputs.of_optimizer,
        "device": plan.planner.device.name,
        "memory_limit_bytes": plan.planner.memory_bytes,
        "num_parameters": plan.costs.total.count,
        "rows": plan.planner.rows,
        "micro_batch": asdict(plan.costs.workload) | {"chunks": chunks.most, "taper": chunks.taper},
        "is_measured": plan.costs.is_measured,
        "step_seconds": plan.step_seconds,
        "before_seconds": plan.before._asdict(),
        "bubble": plan.bubble,
        "peak_bytes": plan.peak_bytes,
        "fits": plan.fits,
        "fix": None if plan.fits else smallest_fix(plan),
        "stages": [
            {
                "stage": stage.number,
                "process": stage.process,
                "layers": len(stage.layers),
                "first_layer": stage.first_layer,
                "last_layer": stage.last_layer,
                "num_parameters": stage.num_parameters,
                "recompute": stage.recompute,
                "busy_seconds": stage.busy_seconds,
                "memory_bytes": {**asdict(stage.memory), "total": stage.memory.total},
            }
            for stage in plan.stages
        ],
        "processes": [
            {
                "process": process.number,
                "stages": list(process.stages),
                # NCCL's communicators between stages.
                "communicators": num_communicators(plan.timeline.schedule.placement, process.number),
                "memory_bytes": {**asdict(process.memory), "total": process.memory.total},
                # The copies in CPU memory while a checkpoint is saved in the background.
                "copy_bytes": copied,
                "offloaded_bytes": offloaded,
                "hosted_bytes": hosted,
                "seconds": asdict(process.time),
            }
            for process, copied, offloaded, hosted in zip(
                plan.processes, copy_bytes(plan), offloaded_bytes(plan), plan.hosted_bytes, strict=True
            )
        ],
        **(mesh_dict(plan) if is_mesh(plan) else {}),
    }


def _table(plan: Plan) -> str:
    header = ("stage", "process", "layers", "parameters", "weights", "grads", "optimizer", "kept", "working", "total")
    rows: list[tuple[str, ...]] = [(*header, "busy", "first layer .. last layer")]
    groups: list[list[StagePlan]] = [[stage] for stage in plan.stages]
    if len(plan.stages) >= _MANY_STAGES:
        groups = [list(group) for _, group in groupby(plan.stages, key=_looks)]
    for group in groups:
        stage, memory = group[0], group[0].memory
        kept = memory.boundaries + memory.activations + memory.logits + memory.early_gradients
        weights = memory.parameters + memory.stashes
        sizes = (weights, memory.gradients, memory.optimizer, kept, memory.working + memory.reserve + memory.libraries)
        rows.append(
            (
                _span([member.number for member in group]),
                _span([member.process for member in group]),
                str(len(stage.layers)),
                count_text(stage.num_parameters),
                *(size_text(size) for size in (*sizes, memory.total)),
                seconds_text(stage.busy_seconds),
                f"{stage.first_layer} .. {group[-1].last_layer}",
            )
        )
    return table_text(rows, left=(len(rows[0]) - 1,))


def _looks(stage: StagePlan) -> tuple[Any, ...]:
    """The part that stages on one line share: all but the number of live micro-batches, which decreases."""
    memory = stage.memory
    return len(stage.layers), stage.num_parameters, f"{memory.total:.2e}", f"{stage.busy_seconds:.2e}"


def _step(plan: Plan) -> str:
    times = [process.time for process in plan.processes]
    parts = {
        name: sum(getattr(time, name) for time in times) / len(times)
        for name in ("forward", "recompute", "backward", "update")
    }
    words = ", ".join(f"{name} {seconds_text(value)}" for name, value in parts.items())
    how = "measured layers" if plan.costs.is_measured else "rates of the device"
    return f"{seconds_text(plan.step_seconds)} (a process on average: {words}, bubble {plan.bubble:.1%}); from {how}"


def _search_row(plan: Plan) -> tuple[str, ...]:
    settings, sent = plan.settings, traffic(plan)
    order = "" if settings.placement is None else f"  processes {settings.placement}"
    return (
        seconds_text(plan.step_seconds),
        f"{plan.bubble:.1%}",
        size_text(plan.peak_bytes),
        bytes_text(sent.total),
        str(settings.num_stages),
        str(settings.num_micro_batches),
        str(plan.planner.division.num_ranks),
        runs_text(plan.timeline.schedule.placement.replicas),
        settings.schedule,
        _recompute(plan),
        f"{runs_text(settings.partition)}{order}",
    )


def _types(plan: Plan) -> str:
    costs = plan.costs
    return costs.dtype if costs.dtype == costs.compute_dtype else f"{costs.dtype}, computing in {costs.compute_dtype}"


def _recompute(plan: Plan) -> str:
    recompute = plan.settings.recompute
    return recompute if isinstance(recompute, str) else runs_text(recompute)


def runs_text(entries: Sequence[Any]) -> str:
    """A list with its repetitions counted: [3, 3, 2] is "2 x 3, 2"."""
    runs = [(entry, len(list(group))) for entry, group in groupby(entries)]
    return "[" + ", ".join(f"{count} x {entry}" if count > 1 else str(entry) for entry, count in runs) + "]"


def _span(numbers: Sequence[int]) -> str:
    return str(numbers[0]) if numbers[0] == numbers[-1] else f"{numbers[0]}-{numbers[-1]}"


def _line(item: tuple[str, str]) -> str:
    return f"{item[0]:11} {item[1]}"

"""A plan as text and as JSON: what each stage holds, the time of a step, and whether it fits."""

from __future__ import annotations

import re
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, fields
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any

from hf_gpipe.errors import UserError
from hf_gpipe.planner.machines.devices import SCREEN_BYTES
from hf_gpipe.planner.memory import MemoryEstimate
from hf_gpipe.planner.plan import Plan, StagePlan
from hf_gpipe.planner.search.advice import SMALL_BUBBLE, limit_of_step, smaller_bubble, smallest_fix, why_waiting
from hf_gpipe.planner.search.choose import SearchResult, way_of
from hf_gpipe.planner.search.listed import TABLE_FILE
from hf_gpipe.planner.traffic import traffic
from hf_gpipe.registry import functions_of_modes
from hf_gpipe.schedule import groups, is_table_file
from hf_gpipe.schedule.messages import num_communicators
from hf_gpipe.settings.mode import AUTO
from hf_gpipe.settings.pipeline import PipelineConfig
from hf_gpipe.settings.section import keys_of
from hf_gpipe.text import bytes_text, count_text, runs_text, seconds_text, size_text, table_text

#: The number of stages from which consecutive stages of as many layers and parameters share a line of the table.
_MANY_STAGES = 17
#: The columns that the table needs for all of its own.
_WIDE = 100
#: The bubble, as a share of a step, above which the verdict warns of it.
LARGE_BUBBLE = 0.4
_STAY = "weights stay on their devices"

# ---------------------------------------------------------------------- lines of text


def report(plan: Plan, *, verbose: bool = True, width: int | None = None) -> str:
    """A plan as text: whether it fits, its step and its memory, and a table of its stages.

    With `verbose` it also has what explains the prediction, and lists of stages and ranks in full. Lines of words have
    at most `width` columns; None: any number.
    """
    hosts = host_lines(plan)
    lines = lines_text(_lines(plan, hosts, str if verbose else folded), width)
    reasons = lines_text(_reasons(plan, hosts), width) if verbose else ""
    return "\n\n".join(filter(None, (lines, _table(plan, verbose, width), reasons)))


def _lines(plan: Plan, hosts: Mapping[str, str], short: Callable[[str], str]) -> Iterator[tuple[str, str]]:
    """Yield the lines above the table. One without a text is not shown; `short` leaves parts of long lists out."""
    settings, planner, costs, process = plan.settings, plan.planner, plan.costs, plan.processes[plan.fullest]
    inputs, workload, size = planner.inputs, costs.workload, plan.timeline.schedule.group_size
    yield "verdict", verdict(plan)
    yield "step", f"{seconds_text(plan.step_seconds)}, bubble {plan.bubble:.1%}, for a mini-batch of {_rows(plan)}"
    yield "bubble", _bubble(plan) if plan.bubble <= LARGE_BUBBLE else ""
    has_screen = planner.device.name.startswith("rtx") and isinstance(planner.memory_bytes, int)
    if has_screen and plan.fits and (spare := (planner.limit_of(0) or 0) - plan.memory[0].total) < SCREEN_BYTES:
        yield (
            "screen",
            f"process 0 has {size_text(spare)} to spare, and a desktop takes about {size_text(SCREEN_BYTES)}; if its "
            "card drives a screen, plan with --screen",
        )
    items = [(getattr(process.memory, item.name), item.metadata["words"]) for item in fields(process.memory)]
    largest = ", ".join(f"{size_text(size)} {words}" for size, words in sorted(items, key=lambda item: -item[0])[:3])
    stages = f"stage {process.stages[0]}" if len(process.stages) == 1 else f"stages {list(process.stages)}"
    peak = size_text(process.memory.total)
    yield "memory", f"process {process.number} ({stages}) has the peak: {peak}, of it {largest}"
    types = costs.dtype if costs.compute_dtype == costs.dtype else f"{costs.dtype}, computing in {costs.compute_dtype}"
    ranks, times = ("", "") if planner.division.is_whole else (" on each rank", f" times {planner.division.num_ranks}")
    yield "model", f"{count_text(costs.total.count)} parameters{ranks} in {len(costs.layers)} layers, {types}"
    number = plan.timeline.schedule.num_micro_batches // (plan.timeline.schedule.num_steps * size)
    cut = f", {groups.cut_in_words(size, workload.target_tokens)}" if size > 1 else ""
    longest = f"; rows are counted at {_columns(plan)} tokens, the longest" if workload.has_padding else ""
    micro_batches = f"{number} micro-batches of at most {workload.rows}{', packed' * workload.is_packed}{cut}"
    yield "mini-batch", f"{_rows(plan)}, as {micro_batches}{longest}"
    yield "devices", f"{settings.num_processes}{times} x {planner.device.name}, {short(planner.text)}"
    yield (
        "pipeline",
        f"{settings.num_stages} stages, schedule {settings.schedule}, recompute {short(_recompute(plan))}, layers "
        f"a stage {short(runs_text(settings.partition))}",
    )
    yield "logits", costs.whole_logits and f"made whole: {costs.whole_logits}"
    yield from _mesh_lines(plan, short)
    (forwards, generation), count = plan.before, planner.num_forwards
    words = {
        f"{seconds_text(generation)} for {inputs.new_tokens} new tokens a row": generation,
        f"{seconds_text(forwards)} for {count} {'pass' if count == 1 else 'passes'} of forwards": forwards,
        f"then the table {inputs.updates} times, {seconds_text(plan.table_seconds)} each": inputs.updates > 1,
    }
    if before := ", ".join(text for text, is_there in words.items() if is_there):
        yield "before", f"of the step, {before}"
    yield from ((name, hosts[name]) for name in ("host", "optimizer", "disk"))
    yield from (line for of_mode in functions_of_modes("cost", "lines") for line in of_mode(plan))


def _reasons(plan: Plan, hosts: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the lines below the table, which explain the prediction."""
    times, stages = [asdict(process.time) for process in plan.processes], plan.stages
    means = {name: sum(time[name] for time in times) / len(times) for name in times[0] if name != "bubble"}
    parts = ", ".join(f"{name} {seconds_text(value)}" for name, value in means.items())
    source = "measured layers" if plan.costs.is_measured else "rates of the device"
    yield "parts", f"a process on average: {parts}; from {source}"
    slowest, mean = plan.slowest_stage, sum(stage.busy_seconds for stage in stages) / len(stages)
    seconds = {index: plan.layout.sums.seconds(index, index + 1, "none").of_micro_batch() for index in slowest.layers}
    dearest = max(seconds, key=lambda index: seconds[index])
    share = seconds[dearest] / (sum(seconds.values()) or 1)
    is_dear = len(seconds) > 1 and share > 1.5 / len(seconds)
    dear = f", {plan.costs.layers[dearest].name} is {share:.0%} of it" if is_dear else ""
    yield (
        "time",
        f"the slowest is stage {slowest.number}: {seconds_text(slowest.busy_seconds)} of work, "
        f"{slowest.busy_seconds / mean if mean else 1:.2f} times the mean ({len(slowest.layers)} layers{dear})",
    )
    yield "limit", limit_of_step(plan)
    yield "saving", hosts["saving"]
    yield "layers", "; ".join(f"stage {stage.number}: {stage.first_layer} .. {stage.last_layer}" for stage in stages)


def lines_text(lines: Iterable[tuple[str, str]], width: int | None, end: str = "") -> str:
    """Names with their texts, which are wrapped at `width` columns; those without a text are left out. A line whose
    text goes on ends with `end`, such as a shell's backslash."""
    room = sys.maxsize if width is None else width - 12 - len(end)
    wrap = partial(textwrap.wrap, width=room, break_on_hyphens=False, break_long_words=False)
    text = "\n".join(f"{name:11} " + f"{end}\n{' ' * 12}".join(wrap(text)) for name, text in lines if text)
    # A shell joins the parts of a long list, which therefore go on at the margin.
    return (
        re.sub(rf"(?m)^(?=.{{{room + 13 + len(end)}}})(.{{1,{room + 10}}},)", r"\1\\\n", text)
        if end and width
        else text
    )


def folded(text: str, most: int = 48) -> str:
    """A list as text, of which a long one has only its first entries and its last."""
    if len(text) <= most:
        return text
    return f"{text[:most].rsplit(' ', 1)[0]} ... {text.rsplit(' ', 1)[-1]}"


def verdict(plan: Plan) -> str:
    """Whether a plan fits; where it does not, the smallest change that makes it fit; where devices wait much, why."""
    limit = plan.planner.limit_of(plan.fullest)
    waits = f", but {_bubble(plan)}" if plan.fits and plan.bubble > LARGE_BUBBLE else ""
    if limit is None and plan.fits:
        needs = f"needs {size_text(plan.peak_bytes)} a process; --memory says whether that is there"
        return f"{needs}{plan.uncounted}{waits}"
    needs = f"process {plan.fullest} needs {size_text(plan.peak_bytes)}{f' of {size_text(limit)}' if limit else ''}"
    if plan.host_fullness > 1:
        there = size_text(plan.planner.device.host.memory_bytes or 0)
        needs += f", and {_hosted(plan)} need {size_text(plan.machine_bytes)} of {there} of CPU memory"
    return f"fits: {needs}{plan.uncounted}{waits}" if plan.fits else f"does not fit: {needs}; {smallest_fix(plan)}"


def _rows(plan: Plan) -> str:
    """The mini-batch in words: "16 rows of 2048 tokens"."""
    shapes = ", ".join(f"{name} {tuple(shape)}" for name, shape, _ in plan.costs.workload.entries if shape)
    return f"{plan.planner.rows} rows of {shapes if plan.costs.workload.entries else f'{_columns(plan)} tokens'}"


def _columns(plan: Plan) -> str:
    """The tokens of a row: "2048", or "64 + 64" of an encoder and a decoder."""
    workload = plan.costs.workload
    is_encoder_decoder = any(layer.stack == "encoder" for layer in plan.costs.layers)
    return f"{workload.source_tokens} + " * is_encoder_decoder + str(workload.target_tokens)


def _bubble(plan: Plan) -> str:
    """Say what devices wait for, and which change lets them wait less; empty for a small bubble."""
    if plan.bubble <= SMALL_BUBBLE or not plan.fits:
        return ""
    change = smaller_bubble(plan)
    return f"devices wait for {plan.bubble:.0%} of the step: {why_waiting(plan)}{'; ' * bool(change)}{change}"


def host_lines(plan: Plan) -> dict[str, str]:
    """The CPU memory of all processes: of modes, of an offloaded optimizer, and of saves; empty where there is none."""
    is_on_disk = any(own.on_disk for own in plan.on_hosts)
    copies = "gradients of copies" if is_on_disk else "its state and copies"
    texts = {
        "host": ("hosted", f"{_hosted(plan)} are in CPU memory: ", ""),
        "optimizer": ("offloaded", f"{copies} of the weights are in CPU memory: ", ""),
        "disk": ("on_disk", "the optimizer's state and its master weights are in files, and not in CPU memory: ", ""),
        "saving": (
            *("copies", "in the background from copies in CPU memory: "),
            "; where processes compute on the CPU, this comes on top",
        ),
    }
    lines = {}
    for name, (of, words, end) in texts.items():
        own = [getattr(host, of) for host in plan.on_hosts]
        most = max(own)
        sizes = f"{size_text(sum(own))} in all, at most {size_text(most)} (process {own.index(most)})"
        lines[name] = f"{words}{sizes}{end}" if most else ""
    return lines


def _hosted(plan: Plan) -> str:
    """Words for what modes have in CPU memory."""
    return " and ".join(plan.on_hosts[0].of_modes)


def _table(plan: Plan, verbose: bool, width: int | None) -> str:
    """The layers, memory and work of each stage. Without `verbose` many stages that are alike share the line of the
    one that holds the most, and gradients and the optimizer's state are one column, as where there is little room."""
    are_apart, looks = verbose and (width is None or width >= _WIDE), attrgetter("num_parameters", "recompute")
    groups: list[list[StagePlan]] = [[stage] for stage in plan.stages]
    if len(plan.stages) >= _MANY_STAGES and not verbose:
        groups = [list(group) for _, group in groupby(plan.stages, key=lambda stage: (len(stage.layers), looks(stage)))]
    rows = []
    for group in groups:
        stage = max(group, key=lambda stage: stage.memory.total)
        memory = stage.memory
        trained = {"grads": memory.gradients, "optimizer": memory.optimizer}
        sizes = {
            "weights": memory.parameters + memory.stashes,
            **(trained if are_apart else {"training": sum(trained.values())}),
            "kept": memory.boundaries + memory.activations + memory.logits + memory.early_gradients,
            "working": memory.working + memory.reserve + memory.libraries,
            "total": memory.total,
        }
        row = {
            name: "-".join(dict.fromkeys(str(getattr(end, of)) for end in (group[0], group[-1])))
            for name, of in (("stage", "number"), ("process", "process"))
        }
        row |= {"layers": str(len(stage.layers)), "params": count_text(stage.num_parameters, ".3g")}
        row |= {name: size_text(size) for name, size in sizes.items()} | {"busy": seconds_text(stage.busy_seconds)}
        rows.append(row)
    shown = [name for name in rows[0] if name != "process" or any(row["stage"] != row["process"] for row in rows)]
    return table_text([shown, *([row[name] for name in shown] for row in rows)], left=())


def _is_mesh(plan: Plan) -> bool:
    """Whether links of several kinds or replicas are part of a plan."""
    planner = plan.planner
    return not (planner.cluster is None and planner.division.is_whole) or plan.timeline.schedule.placement.has_replicas


def _mesh_lines(plan: Plan, short: Callable[[str], str] = str) -> Iterator[tuple[str, str]]:
    """Yield the cluster, the replicas and what is sent; nothing for one pipeline on equal links."""
    if not _is_mesh(plan):
        return
    placement, sent, division = plan.timeline.schedule.placement, traffic(plan), plan.planner.division
    if (cluster := plan.planner.cluster) is not None:
        links = [f"{level.parts} at {level.bytes_per_second / 1e9:.4g} GB/s" for level in reversed(cluster.levels)]
        yield "cluster", f"{cluster}: {', each of '.join(links)}"
    yield "replicas", f"{runs_text(placement.replicas)} of the stages"
    yield "processes", short(f"{placement}, of each stage")
    in_layers = "" if division.is_whole else f", {bytes_text(sent.sums)} inside of layers"
    yield (
        "traffic",
        f"{bytes_text(sent.total)} a row ({bytes_text(sent.gradients)} gradients, {bytes_text(sent.boundaries)} "
        f"between stages{in_layers}); data parallelism on {division.num_ranks * placement.num_processes} devices "
        f"{bytes_text(sent.data_parallel)}",
    )


def _recompute(plan: Plan) -> str:
    recompute = plan.settings.recompute
    return recompute if isinstance(recompute, str) else runs_text(recompute)


# ---------------------------------------------------------------------- a search

#: The columns of a search's table, of which the first ones have numbers.
_COLUMNS: dict[str, Callable[[Plan], str]] = {
    "step": lambda plan: seconds_text(plan.step_seconds),
    "bubble": lambda plan: f"{plan.bubble:.1%}",
    "memory": lambda plan: size_text(plan.peak_bytes),
    "sent a row": lambda plan: bytes_text(traffic(plan).total),
    "K": lambda plan: str(plan.settings.num_stages),
    "M": lambda plan: str(plan.settings.num_micro_batches),
    "T": lambda plan: str(plan.planner.division.num_ranks),
    "replicas": lambda plan: folded(runs_text(plan.timeline.schedule.placement.replicas), 16),
    "schedule": lambda plan: plan.settings.schedule,
    "recompute": lambda plan: folded(_recompute(plan), 16),
}
_NUMBERS = 7


def search_report(result: SearchResult, recipe: PipelineConfig, width: int | None = None) -> str:
    """The best plans of a search, by time under the limit, and the one with the least memory, with overrides of the
    recipe for the fastest. Lines of words have at most `width` columns; None: any number."""
    shown = result.fastest[:8]
    rows = [[*_COLUMNS], *([of(plan) for of in _COLUMNS.values()] for plan in (*shown, result.leanest))]
    header, *lines, leanest = table_text(rows, left=range(_NUMBERS, len(_COLUMNS))).split("\n")
    parts = [f"tried {result.num_tried} ways", ""]
    if shown:
        size = result.least and f"pipeline.{result.least.setting()}={result.least.num_ranks}"
        stays = f"where {_STAY}, it takes {size} or more to fit them" if size else ""
        parts += ["fastest that fit, the best of each T, K, replicas and order:", header, *lines, ""]
        parts += [lines_text([("overrides", overrides(shown[0], recipe))], width, " \\")]
        parts += [lines_text([*_mesh_lines(shown[0]), ("divided", stays)], width)]
    else:
        parts.append("none of them fits")
    ways = [*_ways(result), ("left out", untried(None, *result.fastest, *result.ways, result.leanest))]
    parts += ["", "each way, and what limits it:", lines_text(ways, width)]
    return "\n".join([*parts, "", "least memory:", header, leanest])


def untried(config: PipelineConfig | None, *plans: Plan) -> str:
    """Say what modes have not tried for some plans. Without a configuration everything was left open."""
    return "; ".join(filter(None, (of_mode(config, plans) for of_mode in functions_of_modes("search", "untried"))))


def _ways(result: SearchResult) -> Iterator[tuple[str, str]]:
    """Yield the step of the best plan and its limit, for each way of having weights, and for adapters alone."""
    every = [(way_of(plan) or _STAY, plan) for plan in result.ways]
    for keys, make in result.leanest.planner.lighter.items():
        with suppress(UserError):
            every.append((f"{keys} (adapters alone are trained)", make()))
    for way, plan in every:
        fits = "fits" if plan.fits else "does not fit"
        yield seconds_text(plan.step_seconds), f"{fits}, {way}: {limit_of_step(plan)}"
    if all(map(way_of, result.ways)):
        yield "-", f"does not fit, {_STAY}: no split of the model fits their memory"


def overrides(plan: Plan, recipe: PipelineConfig) -> str:
    """The plan as key=value arguments of a recipe that has this configuration. They do not have a table that was made
    for the plan: the planner makes it again."""
    settings = plan.settings
    is_made, recompute = settings.schedule == TABLE_FILE, settings.recompute
    if is_made and (not isinstance(recompute, str) or recompute == "stage"):
        recompute = AUTO
    elif not isinstance(recompute, str) and is_table_file(settings.schedule):
        # What differs from stage to stage is what the table has.
        recompute = "stage"
    elif not isinstance(recompute, str) and isinstance(recompute[0], str) and len({*recompute}) == 1:
        recompute = recompute[0]
    values = settings.of_plan | {"recompute": recompute} | ({"schedule": plan.planner.made_by} if is_made else {})
    always, own = (*settings.in_short, "partition", "num_processes", "zero"), recipe.values()
    plain = {name for name, key in keys_of(PipelineConfig).items() if values.get(name) == key.default == own[name]}
    shown = {name: value for name, value in values.items() if name in always or name not in plain}
    return keys_text(shown)


def keys_text(keys: Mapping[str, Any]) -> str:
    """Keys of `pipeline` with their values, for a command line."""
    return " ".join(f"pipeline.{name}={_argument(value)}" for name, value in keys.items())


def _argument(value: Any) -> str:
    """Write a value for a shell and for YAML."""
    if value is None:
        return "null"
    listed = list(value) if isinstance(value, tuple) else value
    return shlex.quote(value) if isinstance(value, str) else str(listed).replace(" ", "")


# ---------------------------------------------------------------------- JSON


def as_dict(plan: Plan) -> dict[str, Any]:
    """A plan for a JSON file: bytes, seconds, numbers and names."""
    shape = asdict(plan.costs.workload)
    members = groups.as_dict(shape.pop("groups"), shape.pop("member"))
    of_stage = ("process", "first_layer", "last_layer", "num_parameters", "recompute", "busy_seconds")
    return {
        "settings": plan.settings.of_plan | plan.planner.inputs.of_optimizer,
        "device": plan.planner.device.name,
        "memory_limit_bytes": plan.planner.memory_bytes,
        "num_parameters": plan.costs.total.count,
        "rows": plan.planner.rows,
        "micro_batch": shape | members,
        "is_measured": plan.costs.is_measured,
        "step_seconds": plan.step_seconds,
        "before_seconds": plan.before._asdict(),
        "bubble": plan.bubble,
        "peak_bytes": plan.peak_bytes,
        "fits": plan.fits,
        "fix": None if plan.fits else smallest_fix(plan),
        "stages": [
            {"stage": stage.number, "layers": len(stage.layers), "memory_bytes": _bytes(stage.memory)}
            | {name: getattr(stage, name) for name in of_stage}
            for stage in plan.stages
        ],
        "processes": [
            {
                "process": process.number,
                "stages": list(process.stages),
                # NCCL's communicators between stages.
                "communicators": num_communicators(plan.timeline.schedule.placement, process.number),
                "memory_bytes": _bytes(process.memory),
                # The copies in CPU memory while a checkpoint is saved in the background.
                "copy_bytes": host.copies,
                "offloaded_bytes": host.offloaded,
                "hosted_bytes": host.hosted,
                "disk_bytes": host.on_disk,
                "seconds": asdict(process.time),
            }
            for process, host in zip(plan.processes, plan.on_hosts, strict=True)
        ],
        **(_mesh(plan) if _is_mesh(plan) else {}),
    }


def _mesh(plan: Plan) -> dict[str, Any]:
    """The content of `_mesh_lines` for JSON."""
    cluster, sent = plan.planner.cluster, traffic(plan)
    return {
        "cluster": cluster and {"name": str(cluster), "levels": [asdict(level) for level in cluster.levels]},
        "replicas": plan.settings.replicas,
        "processes_of_stages": [list(own) for own in plan.timeline.schedule.placement.workers],
        "bytes_per_row": {**asdict(sent), "total": sent.total},
    }


def _bytes(memory: MemoryEstimate) -> dict[str, int]:
    return {**asdict(memory), "total": memory.total}

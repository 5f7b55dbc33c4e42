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
from hf_gpipe.planner.search.listed import TABLE_FILE
from hf_gpipe.planner.search.search_all import SearchResult, way_of
from hf_gpipe.planner.traffic import is_mesh, mesh_dict, mesh_lines, traffic
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
    settings, planner, costs = plan.settings, plan.planner, plan.costs
    short: Callable[[str], str] = (lambda text: text) if verbose else folded
    types = costs.dtype if costs.compute_dtype == costs.dtype else f"{costs.dtype}, computing in {costs.compute_dtype}"
    ranks = "" if planner.division.is_whole else " on each rank"
    times = "" if planner.division.is_whole else f" times {planner.division.num_ranks}"
    hosts = host_lines(plan)
    first = [
        ("verdict", verdict(plan)),
        ("step", f"{seconds_text(plan.step_seconds)}, bubble {plan.bubble:.1%}, for a mini-batch of {rows_text(plan)}"),
        ("bubble", _bubble(plan) if plan.bubble <= LARGE_BUBBLE else ""),
        ("screen", _screen(plan)),
        ("memory", _memory(plan)),
        ("model", f"{count_text(costs.total.count)} parameters{ranks} in {len(costs.layers)} layers, {types}"),
        ("mini-batch", _mini_batch(plan)),
        ("devices", f"{settings.num_processes}{times} x {planner.device.name}, {short(planner.text)}"),
        (
            "pipeline",
            f"{settings.num_stages} stages, schedule {settings.schedule}, recompute {short(_recompute(plan))}, layers "
            f"a stage {short(runs_text(settings.partition))}",
        ),
        ("logits", f"made whole: {costs.whole_logits}" if costs.whole_logits else ""),
        *((name, short(text) if name == "processes" else text) for name, text in mesh_lines(plan)),
        ("before", _before(plan)),
        *((name, hosts[name]) for name in ("host", "optimizer", "disk")),
        *(line for of_mode in functions_of_modes("cost", "lines") for line in of_mode(plan)),
    ]
    why = [
        ("parts", _parts(plan)),
        ("time", _slowest(plan)),
        ("limit", limit_of_step(plan)),
        ("saving", hosts["saving"]),
        (
            "layers",
            "; ".join(f"stage {stage.number}: {stage.first_layer} .. {stage.last_layer}" for stage in plan.stages),
        ),
    ]
    parts = [lines_text(first, width), _table(plan, verbose, width), lines_text(why, width) if verbose else ""]
    return "\n\n".join(filter(None, parts))


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
    process = plan.fullest_process
    limit = plan.planner.limit_of(process.number)
    waits = f", but {_bubble(plan)}" if plan.fits and plan.bubble > LARGE_BUBBLE else ""
    if limit is None and plan.fits:
        needs = f"needs {size_text(plan.peak_bytes)} a process; --memory says whether that is there"
        return f"{needs}{plan.uncounted}{waits}"
    needs = f"process {process.number} needs {size_text(plan.peak_bytes)}{f' of {size_text(limit)}' if limit else ''}"
    if plan.host_fullness > 1:
        there = size_text(plan.planner.device.host.memory_bytes or 0)
        needs += f", and {_hosted(plan)} need {size_text(plan.machine_bytes)} of {there} of CPU memory"
    return f"fits: {needs}{plan.uncounted}{waits}" if plan.fits else f"does not fit: {needs}; {smallest_fix(plan)}"


def rows_text(plan: Plan) -> str:
    """The mini-batch in words: "16 rows of 2048 tokens"."""
    entries = plan.costs.workload.entries
    shapes = ", ".join(f"{name} {tuple(shape)}" for name, shape, _ in entries if shape)
    return f"{plan.planner.rows} rows of {shapes if entries else f'{_columns(plan)} tokens'}"


def _columns(plan: Plan) -> str:
    """The tokens of a row: "2048", or "64 + 64" of an encoder and a decoder."""
    workload = plan.costs.workload
    is_encoder_decoder = any(layer.stack == "encoder" for layer in plan.costs.layers)
    return f"{workload.source_tokens} + " * is_encoder_decoder + str(workload.target_tokens)


def _mini_batch(plan: Plan) -> str:
    workload, table = plan.costs.workload, plan.timeline.schedule
    size = table.group_size
    cut = f", {groups.cut_in_words(size, workload.target_tokens)}" if size > 1 else ""
    longest = f"; rows are counted at {_columns(plan)} tokens, the longest" if workload.has_padding else ""
    return (
        f"{rows_text(plan)}, as {table.num_micro_batches // (table.num_steps * size)} micro-batches of at most "
        f"{workload.rows}{', packed' * workload.is_packed}{cut}{longest}"
    )


def _bubble(plan: Plan) -> str:
    """Say what devices wait for, and which change lets them wait less; empty for a small bubble."""
    if plan.bubble <= SMALL_BUBBLE or not plan.fits:
        return ""
    change = smaller_bubble(plan)
    return f"devices wait for {plan.bubble:.0%} of the step: {why_waiting(plan)}{'; ' * bool(change)}{change}"


def _screen(plan: Plan) -> str:
    """Advice for a plan that leaves no room for a screen on its first device; empty where it does, or has no screen."""
    limit, planner = plan.planner.limit_of(0), plan.planner
    has_screen = planner.device.name.startswith("rtx") and isinstance(planner.memory_bytes, int)
    spare = 0 if limit is None else limit - plan.memory[0].total
    if not has_screen or not plan.fits or spare >= SCREEN_BYTES:
        return ""
    return (
        f"process 0 has {size_text(spare)} to spare, and a desktop takes about {size_text(SCREEN_BYTES)}; if its card "
        "drives a screen, plan with --screen"
    )


def host_lines(plan: Plan) -> dict[str, str]:
    """The CPU memory of all processes: of modes, of an offloaded optimizer, and of saves; empty where there is none."""
    every = plan.on_hosts
    sizes = {"host": plan.hosted_bytes, "optimizer": [o.offloaded for o in every], "saving": [o.copies for o in every]}
    sizes["disk"] = [own.on_disk for own in every]
    copies = "gradients of copies" if any(sizes["disk"]) else "its state and copies"
    texts = {
        "host": f"{_hosted(plan)} are in CPU memory: {{}}",
        "optimizer": f"{copies} of the weights are in CPU memory: {{}}",
        "disk": "the optimizer's state and its master weights are in files, and not in CPU memory: {}",
        "saving": "in the background from copies in CPU memory: {}; where processes compute on the CPU, this comes on "
        "top",
    }
    lines = {}
    for name, own in sizes.items():
        most = max(own)
        words = f"{size_text(sum(own))} in all, at most {size_text(most)} (process {own.index(most)})"
        lines[name] = texts[name].format(words) if most else ""
    return lines


def _hosted(plan: Plan) -> str:
    """Words for what modes have in CPU memory."""
    return " and ".join(plan.on_hosts[0].of_modes)


def _before(plan: Plan) -> str:
    """The time of what a step does before its table; empty where there is nothing."""
    (forwards, generation), inputs, count = plan.before, plan.planner.inputs, plan.planner.num_forwards
    words = {
        f"{seconds_text(generation)} for {inputs.new_tokens} new tokens a row": generation,
        f"{seconds_text(forwards)} for {count} {'pass' if count == 1 else 'passes'} of forwards": forwards,
        f"then the table {inputs.updates} times, {seconds_text(plan.table_seconds)} each": inputs.updates > 1,
    }
    shown = ", ".join(text for text, is_there in words.items() if is_there)
    return f"of the step, {shown}" if shown else ""


def _memory(plan: Plan) -> str:
    """The process with the highest peak memory, and its largest items."""
    process = plan.fullest_process
    items = [(getattr(process.memory, item.name), item.metadata["words"]) for item in fields(process.memory)]
    items.sort(key=lambda item: -item[0])
    largest = ", ".join(f"{size_text(size)} {words}" for size, words in items[:3])
    stages = f"stage {process.stages[0]}" if len(process.stages) == 1 else f"stages {list(process.stages)}"
    return f"process {process.number} ({stages}) has the peak: {size_text(process.memory.total)}, of it {largest}"


def _slowest(plan: Plan) -> str:
    """The slowest stage, and what makes it so."""
    slowest, mean = plan.slowest_stage, sum(stage.busy_seconds for stage in plan.stages) / len(plan.stages)
    seconds = {index: plan.layout.sums.seconds(index, index + 1, "none").of_micro_batch() for index in slowest.layers}
    dearest = max(seconds, key=lambda index: seconds[index])
    share = seconds[dearest] / (sum(seconds.values()) or 1)
    is_dear = len(seconds) > 1 and share > 1.5 / len(seconds)
    dear = f", {plan.costs.layers[dearest].name} is {share:.0%} of it" if is_dear else ""
    return (
        f"the slowest is stage {slowest.number}: {seconds_text(slowest.busy_seconds)} of work, "
        f"{slowest.busy_seconds / mean if mean else 1:.2f} times the mean ({len(slowest.layers)} layers{dear})"
    )


def _parts(plan: Plan) -> str:
    times = [asdict(process.time) for process in plan.processes]
    parts = {name: sum(time[name] for time in times) / len(times) for name in times[0] if name != "bubble"}
    words = ", ".join(f"{name} {seconds_text(value)}" for name, value in parts.items())
    how = "measured layers" if plan.costs.is_measured else "rates of the device"
    return f"a process on average: {words}; from {how}"


def _table(plan: Plan, verbose: bool, width: int | None) -> str:
    """The layers, memory and work of each stage. Without `verbose` many stages that are alike share the line of the
    one that holds the most, and gradients and the optimizer's state are one column, as where there is little room."""
    are_apart = verbose and (width is None or width >= _WIDE)
    trained = ("grads", "optimizer") if are_apart else ("training",)
    rows = [("stage", "process", "layers", "params", "weights", *trained, "kept", "working", "total", "busy")]
    groups: list[list[StagePlan]] = [[stage] for stage in plan.stages]
    if len(plan.stages) >= _MANY_STAGES and not verbose:
        looks = attrgetter("num_parameters", "recompute")
        groups = [list(group) for _, group in groupby(plan.stages, key=lambda stage: (len(stage.layers), looks(stage)))]
    for group in groups:
        stage = max(group, key=lambda stage: stage.memory.total)
        memory = stage.memory
        states = (memory.gradients, memory.optimizer)
        kept = memory.boundaries + memory.activations + memory.logits + memory.early_gradients
        working = memory.working + memory.reserve + memory.libraries
        sizes = (memory.parameters + memory.stashes, *(states if are_apart else (sum(states),)), kept, working)
        ends = [group[0], group[-1]]
        rows.append(
            (
                "-".join(dict.fromkeys(str(end.number) for end in ends)),
                "-".join(dict.fromkeys(str(end.process) for end in ends)),
                str(len(stage.layers)),
                count_text(stage.num_parameters, ".3g"),
                *map(size_text, (*sizes, memory.total)),
                seconds_text(stage.busy_seconds),
            )
        )
    if all(row[0] == row[1] for row in rows[1:]):
        rows = [(row[0], *row[2:]) for row in rows]
    return table_text(rows, left=())


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
        parts += [lines_text([*mesh_lines(shown[0]), ("divided", stays)], width)]
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
        **(mesh_dict(plan) if is_mesh(plan) else {}),
    }


def _bytes(memory: MemoryEstimate) -> dict[str, int]:
    return {**asdict(memory), "total": memory.total}

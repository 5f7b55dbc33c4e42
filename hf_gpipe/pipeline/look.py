"""How a pipeline shows itself: its stages as text, and in a notebook its table as a picture too."""

from __future__ import annotations

from collections.abc import Mapping

from hf_gpipe.adapters import StageModel
from hf_gpipe.pipeline.decision import Decision
from hf_gpipe.schedule import Costs, Schedule, simulate
from hf_gpipe.schedule.draw import figure, svg_of
from hf_gpipe.text import preformatted, size_text


def text_of(decision: Decision, models: Mapping[int, StageModel]) -> str:
    """The model and the schedule on one line, and a line for each stage; of this process's own stages also the size."""
    adapter, config, world = decision.adapter, decision.config, decision.world
    values = ", ".join(f"{name}={value!r}" for name, value in config.in_short.items())
    lines = [f"Pipeline({type(adapter.reference).__name__}, {values})"]
    for stage, layers in enumerate(decision.partition):
        workers = world.placement.workers[stage]
        where = f"process{'es' * (len(workers) > 1)} {', '.join(map(str, workers))}"
        ends = dict.fromkeys(adapter.layers[number].name for number in (layers[0], layers[-1]))
        words = [f"  stage {stage}", where, f"{len(layers)} layers, {' to '.join(ends)}"]
        if stage in models:
            parameters = models[stage].parameters.values()
            size = size_text(sum(parameter.nbytes for parameter in parameters))
            count = sum(parameter.numel() for parameter in parameters)
            words.append(f"{count:,} parameters, {size} on {world.stage_devices[stage]}")
        lines.append("; ".join(words))
    return "\n".join(lines)


def html_of(text: str, table: Schedule) -> str:
    """The text, and the table's picture, in which a backward takes as long as two forwards."""
    timeline = simulate(table, Costs(forward_seconds=1, backward_seconds=2))
    title = "the table, with a backward as long as two forwards"
    return preformatted(text) + svg_of(figure([timeline], [title]))

"""A finished run as a page: its losses, its memory and one step, each beside the prediction, and what it cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hf_gpipe.schedule import Timeline
from hf_gpipe.schedule.draw import figure, svg_of, titled
from hf_gpipe.text import html_page, html_table, seconds_text, size_text


def run_page(
    name: str,
    cost: Mapping[str, Any],
    log_history: Sequence[Mapping[str, Any]],
    measured: Timeline,
    predicted: Timeline,
) -> str:
    """The page of a run, which needs no other file.

    Args:
        name: of the run.
        cost: the entry of metrics.json.
        log_history: of the trainer's state.
        measured: one step.
        predicted: the same step.
    """
    parts = [
        ("Losses", _losses(log_history)),
        ("Memory", html_table(_memory(cost))),
        ("One step", svg_of(figure([measured, predicted], ["measured", "predicted"], width=8.0))),
        ("Bill", html_table(_bill(cost))),
    ]
    summary = (
        f"{cost['num_steps']} steps in {seconds_text(cost['training_seconds'])} of training, in "
        f"{cost['num_processes']} processes ({cost['device']}) with {cost['num_stages']} stages and "
        f"{cost['num_micro_batches']} micro-batches"
    )
    return html_page(f"The run {name}", summary, [(heading, html) for heading, html in parts if html])


def _losses(log_history: Sequence[Mapping[str, Any]]) -> str:
    """The losses over the steps as a picture; empty where none was logged."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(8.0, 3.0), layout="constrained")
    panel = picture.subplots()
    for key, words, look in (("loss", "training", "-"), ("eval_loss", "validation", "o--")):
        if points := [(line["step"], line[key]) for line in log_history if key in line]:
            panel.plot(*zip(*points, strict=True), look, label=words, markersize=4)
    if not (handles := panel.get_legend_handles_labels()[0]):
        return ""
    titled(panel, "Loss per target", handles, columns=2)
    panel.set_xlabel("step")
    return svg_of(picture)


def _memory(cost: Mapping[str, Any]) -> list[tuple[str, ...]]:
    predicted = cost["predicted"].get("peak_bytes", [])
    rows = [
        (str(number), size_text(peak), size_text(predicted[number]) if number < len(predicted) else "")
        for number, peak in enumerate(cost["peak_bytes"])
    ]
    # Without a GPU a process is measured with its libraries, which are no part of the prediction.
    of = "the whole process, with libraries" if cost["device"] == "cpu" else "the GPU"
    return [("process", f"peak of {of}", "predicted peak"), *rows]


def _bill(cost: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The rows of the bill: the time of all processes, and the speed."""
    hours = cost["wall_seconds"] * cost["num_processes"] / 3600
    rows = [
        ("from the start to the end", seconds_text(cost["wall_seconds"])),
        ("of all processes", f"{hours:.3g} device hours"),
        ("training", seconds_text(cost["training_seconds"])),
        ("a step", seconds_text(cost["seconds_per_step"]) if cost["seconds_per_step"] else ""),
        ("tokens a second", f"{cost['tokens_per_second']:.0f}" if cost["tokens_per_second"] else ""),
        ("parameters", f"{cost['num_parameters']:,}"),
    ]
    return [("", ""), *((name, text) for name, text in rows if text)]

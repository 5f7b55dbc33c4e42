"""Draw the pictures of the documentation from the code's own output.

    python scripts/pictures.py [NAME ...] [--output FOLDER]

model: the layers of a model, its stages, and what is sent between them, as `Pipeline` cuts it.
step: one step of three schedules, as the simulator times it.
plan: the memory of each process and a step, as `hf-gpipe plan --picture` draws them.
memory: what each process of that plan holds over a step, under 1f1b and under gpipe.
gpipe: one step of GPipe with four stages, as the simulator times it.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import fields
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from transformers import LlamaConfig

from hf_gpipe import Pipeline
from hf_gpipe.commands.plan import read_request
from hf_gpipe.planner.memory import MemoryEstimate
from hf_gpipe.planner.picture import draw_plan
from hf_gpipe.planner.plan import Plan
from hf_gpipe.schedule import Costs, build, simulate
from hf_gpipe.schedule.draw import draw_png, figure
from hf_gpipe.schedule.kinds import Held
from hf_gpipe.schedule.occupancy import occupancy
from scripts.your_model import command, device, memory_gib

REPOSITORY = Path(__file__).parents[1]
FOLDER = REPOSITORY / "docs/images"
STAGES = ["#4c78a8", "#f58518", "#72b7b2"]
GIB = 1 << 30
#: LoRA on 7 billion parameters, four cards of 24 GB: the example of docs/your_model.md.
CARDS = ["--devices", "4", "--device", device(24), "--memory", f"{memory_gib(24)}GiB"]


def planned(schedule: str, recompute: str) -> Plan:
    keys = ["pipeline.num_stages=4", "pipeline.replicas=1", "pipeline.partition=auto"]
    changed = [f"pipeline.schedule={schedule}", f"pipeline.recompute={recompute}"]
    return read_request([*command("7b", "lora"), *keys, *changed, *CARDS]).best()


def canvas(width: float, height: float) -> Figure:
    picture = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(picture)
    return picture


def model(path: Path) -> None:
    """Boxes of layers, coloured by stage; an arrow where a tensor is sent to the next process."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    pipe = Pipeline(LlamaConfig(vocab_size=512, num_hidden_layers=6, **sizes), num_stages=3, num_micro_batches=4)
    layers, stages, rows = pipe.adapter.layers, pipe.partition, {"input_ids": torch.zeros(2, 16, dtype=torch.long)}
    picture = canvas(10, 2.9)
    panel = picture.subplots()
    for stage, own in enumerate(stages):
        for index in own:
            place = index + 0.5 * stage
            box = FancyBboxPatch((place, 0), 0.82, 1, boxstyle="round,pad=0.02", facecolor=STAGES[stage], linewidth=0)
            panel.add_patch(box)
            panel.text(
                place + 0.41,
                0.5,
                layers[index].name,
                rotation=90,
                ha="center",
                va="center",
                color="white",
                fontsize=7.5,
            )
        left, right = own[0] + 0.5 * stage, own[-1] + 0.5 * stage + 0.82
        panel.text((left + right) / 2, 1.16, f"stage {stage}, on process {stage}", ha="center", fontsize=9)
        if stage + 1 < len(stages):
            (shape,) = pipe.adapter.carry_shapes(own[-1] + 1, rows).values()
            for way, height in (("->", 0.7), ("<-", 0.3)):
                panel.annotate("", (right + 0.62, height), (right + 0.06, height), arrowprops={"arrowstyle": way})
            sent = f"hidden states {shape}\nand their gradients"
            panel.text(right + 0.34, -0.22, sent, ha="center", va="top", fontsize=8)
    panel.set(xlim=(-0.1, len(layers) + 1.1), ylim=(-0.7, 1.4))
    panel.set_axis_off()
    picture.savefig(path)


def step(path: Path) -> None:
    costs = Costs(forward_seconds=1, backward_seconds=2, input_seconds=1, weight_seconds=1)
    names = ["gpipe", "1f1b", "zb_h1"]
    timelines = [simulate(build(name, 4, 8, recompute="none"), costs) for name in names]
    draw_png(path, *timelines, titles=names)


def plan(path: Path) -> None:
    draw_plan(path, planned("gpipe", "stage"))


def memory(path: Path) -> None:
    """A column for each schedule and a row for each process: GiB over the seconds of a step, item by item."""
    columns = [("1f1b", "auto"), ("gpipe", "stage")]
    plans = [planned(*column) for column in columns]
    picture = canvas(10, 6.4)
    panels = picture.subplots(4, len(plans), sharex="col", sharey=True)
    colours = {item.name: item.metadata["colour"] for item in fields(MemoryEstimate)}
    for column, (of, (schedule, recompute)) in enumerate(zip(plans, columns, strict=True)):
        sums = of.layout.sums
        for process, stage in zip(of.processes, of.layout.stages, strict=True):
            panel, number = panels[process.number, column], process.number
            gradients = {"gradients": sums.held(*stage.run).trainable_bytes}
            amounts = {**sums.amounts(stage), Held.WEIGHT_GRADIENTS: gradients}
            levels = [(0, {}), *occupancy(of.timeline, {number: amounts}, number)]
            times = [float(time) for time, _ in levels] + [of.step_seconds]
            fixed = {"parameters": process.memory.parameters, "optimizer": process.memory.optimizer}
            shown = [level | fixed for _, level in [*levels, levels[-1]]]
            items = {item: [level.get(item, 0) / GIB for level in shown] for item in colours}
            # What is too small to be seen has no entry in the legend.
            items = {item: values for item, values in items.items() if max(values) > of.peak_bytes / GIB / 100}
            look = {"colors": [colours[item] for item in items], "labels": [item.replace("_", " ") for item in items]}
            panel.stackplot(times, *items.values(), **look, step="post")
            panel.axhline(of.planner.memory_bytes / GIB, color="black", linestyle="--", linewidth=1)
            panel.spines[["top", "right"]].set_visible(False)
            if not column:
                panel.set_ylabel(f"process {number}\nGiB", fontsize=9)
        title = f"{schedule}, recompute {recompute}: a step of {of.step_seconds:.1f} s"
        panels[0, column].set_title(title, loc="left", fontsize=11)
        panels[-1, column].set_xlabel("seconds")
    shown = {}
    for panel in panels.flat:
        shown |= dict(zip(*reversed(panel.get_legend_handles_labels()), strict=True))
    picture.legend(shown.values(), shown, loc="outside upper center", ncols=6, frameon=False, fontsize=10)
    picture.savefig(path)


def gpipe(path: Path) -> None:
    timeline = simulate(build("gpipe", 4, 16, recompute="none"), Costs(forward_seconds=1, backward_seconds=2))
    figure([timeline], ["gpipe, 4 stages, 16 micro-batches"], width=9.0).savefig(path)


PICTURES = {"model": model, "step": step, "plan": plan, "memory": memory, "gpipe": gpipe}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(PICTURES)}; none: all")
    parser.add_argument("--output", type=Path, default=FOLDER)
    options = parser.parse_args()
    if unknown := set(options.names) - set(PICTURES):
        parser.error(f"{', '.join(sorted(unknown))}: no picture of that name; they are {', '.join(PICTURES)}")
    os.chdir(REPOSITORY)
    for name in options.names or PICTURES:
        PICTURES[name](options.output / f"{name}.png")


if __name__ == "__main__":
    main()

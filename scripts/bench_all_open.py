"""`auto` with everything open: its step beside the best of an exhaustive search, predicted and on emulated machines.

    python scripts/bench_all_open.py                    five models on three machines, about 20 minutes
    python scripts/bench_all_open.py llama --machines 4xrtx4090    one cell

Each machine has four devices. The exhaustive search plans every mesh (all ways to give four devices to stages, in every
order where they differ, and two stages a device), schedule, M and kind of recomputation, with the cut by cost. The plan
that `auto` chooses, the best of the search, and some plans beside it then run in four processes whose stages wait as
long as planned, a step scaled to about half a second: tables, executor and messages are the real ones. Run it while the
machine does nothing else.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise, permutations
from operator import attrgetter
from statistics import median
from typing import Any, NamedTuple

from bench.emulation import Emulated, emulate
from bench.models import llama
from bench.report import table
from bench.runner import await_quiet, bench_parser, say
from transformers import BartConfig, GPT2Config, MT5Config, PreTrainedConfig, T5Config

from hf_gpipe.adapters import adapter_for
from hf_gpipe.errors import UserError
from hf_gpipe.modes.divided_head.table import LOGITS, LOGITS_GRADIENT
from hf_gpipe.partition.cluster import parse_cluster
from hf_gpipe.planner.layout import costs_of_table
from hf_gpipe.planner.machines.devices import DEVICES
from hf_gpipe.planner.of_model import planner_of
from hf_gpipe.planner.plan import Plan, Planner
from hf_gpipe.planner.search.choose import AUTO_SCHEDULES, allowed_plans, best_plan, micro_batch_counts
from hf_gpipe.planner.search.meshes import with_mesh
from hf_gpipe.planner.workload import PlanInputs, Workload
from hf_gpipe.schedule import Costs, Placement
from hf_gpipe.settings.mode import AUTO
from hf_gpipe.settings.pipeline import PipelineConfig

NUM_DEVICES = 4
STEP_SECONDS = 0.5
#: Of the plans of a search that run beside the best: these places in the order of their steps.
PLACES = (0, 1, 2, 5, 20)
TOLERANCE = 0.05
HEADER = ["model", "machine", "plans", "auto", "best of all", "auto over the best: predicted, run"]


class Machine(NamedTuple):
    """Four devices.

    Attributes:
        device: the fastest of them.
        memory: of each, as a share of its own.
        speeds: of each.
        links: as the text of a cluster; None: those of the device.
    """

    device: str
    memory: Sequence[float] = (1.0,) * NUM_DEVICES
    speeds: Sequence[float] | None = None
    links: str | None = None


MACHINES = {
    "4xrtx4090": Machine("rtx4090"),
    "4xh100, a fifth of the memory": Machine("h100", (0.2,) * NUM_DEVICES),
    "2+2 unlike, 2 hosts": Machine("rtx4090", (1.0, 1.0, 0.5, 0.5), (1.0, 1.0, 0.5, 0.5), "2x2@1.25GB/s,25GB/s"),
}


class Model(NamedTuple):
    config: PreTrainedConfig
    workload: Workload


def models() -> dict[str, Model]:
    """Two decoders and three encoder-decoders, of which one has a head that is larger than its blocks."""
    tokens: dict[str, Any] = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    t5 = {"d_kv": 64, **tokens}
    sides = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in (("layers", 12), ("ffn_dim", 4096))}
    heads = {"encoder_attention_heads": 16, "decoder_attention_heads": 16, "forced_eos_token_id": None}
    return {
        "llama": Model(llama(2048, 16, 32000, 5632, dtype="bfloat16"), Workload(32, 1024, 1024)),
        "gpt2": Model(GPT2Config(n_embd=1024, n_layer=24, n_head=16), Workload(32, 512, 512)),
        "t5": Model(
            T5Config(**t5, vocab_size=32128, d_model=1024, d_ff=4096, num_heads=16, num_layers=24),
            Workload(32, 256, 256),
        ),
        "mt5": Model(
            MT5Config(**t5, vocab_size=250112, d_model=768, d_ff=2048, num_heads=12, num_layers=12),
            Workload(32, 128, 128),
        ),
        "bart": Model(BartConfig(**sides, **heads, **tokens, d_model=1024, vocab_size=50265), Workload(32, 512, 128)),
    }


def planner_for(model: Model, machine: Machine) -> Planner:
    device = DEVICES[machine.device]
    memory = tuple(f"{int(share * (device.memory_bytes or 0))} B" for share in machine.memory)
    return planner_of(
        *(adapter_for(model.config), PlanInputs(model.workload), device),
        PipelineConfig(1, memory=memory, speeds=machine.speeds),
        as_on_gpu=True,
        cluster=None if machine.links is None else parse_cluster(machine.links),
    )


def placements(machine: Machine) -> Iterator[Placement]:
    """Every way to give the devices to stages, with one stage a device, of equal ones one. Unlike devices come in two
    halves, each on a host of its own."""
    devices, is_unlike = range(NUM_DEVICES), machine.speeds is not None
    seen = set()
    for count in range(1, NUM_DEVICES + 1):
        for cuts in combinations(devices[1:], count - 1):
            for order in permutations(devices):
                workers = [tuple(sorted(order[start:stop])) for start, stop in pairwise((0, *cuts, NUM_DEVICES))]
                kinds = tuple(tuple(is_unlike * 2 * device // NUM_DEVICES for device in own) for own in workers)
                if kinds not in seen:
                    seen.add(kinds)
                    yield Placement(workers)


def search(planner: Planner, machine: Machine, free: PipelineConfig) -> list[Plan]:
    """All plans that fit, the fastest first."""
    asked = [with_mesh(free, placement) for placement in placements(machine)]
    asked += [free.replace(num_stages=2 * count, replicas=NUM_DEVICES // count) for count in (2, 4)]
    plans: list[Plan] = []
    for mesh in asked:
        for schedule in AUTO_SCHEDULES:
            for count in micro_batch_counts(planner.rows, AUTO):
                for recompute in (AUTO, "none", "block", "stage"):
                    config = mesh.replace(schedule=schedule, num_micro_batches=count, recompute=recompute)
                    try:
                        plans += [plan for plan in allowed_plans(planner, config) if plan.fits]
                    except UserError:
                        continue
    return sorted(plans, key=attrgetter("step_seconds"))


def emulated(plan: Plan, name: str, scale: float) -> Emulated:
    """The table of a plan with its own seconds, without updates and copies."""
    schedule = plan.timeline.schedule
    costs: Any = costs_of_table(plan.layout)

    def scaled(seconds: Any) -> list[float]:
        return [scale * float(value) for value in seconds]

    of_boundary = [
        max((scale * value for edge, value in costs.transfer_seconds.items() if edge[0] == boundary), default=0.0)
        for boundary in range(schedule.num_stages - 1)
    ]
    named = {name: scaled(getattr(costs, f"{name}_seconds")) for name in ("forward", "backward", "weight", "reduce")}
    inputs = [whole - weight for whole, weight in zip(named["backward"], named["weight"], strict=True)]
    heads = {kind: scaled(costs.others[kind]) for kind in (LOGITS, LOGITS_GRADIENT) if schedule.has_turns}
    return Emulated(
        schedule,
        Costs(
            **{f"{name}_seconds": values for name, values in named.items()},
            input_seconds=inputs,
            transfer_seconds=of_boundary,
            others=heads,
        ),
        name=name,
    )


def text_of(plan: Plan) -> str:
    settings = plan.settings
    places = settings.placement or f"{settings.num_stages} stages x {settings.replicas}"
    return f"{places}, M = {settings.num_micro_batches}, {settings.schedule}, {settings.recompute}"


def run_beside(chosen: Plan, plans: Sequence[Plan], options: Any) -> float:
    """The step of a plan over the shortest of it and of some others, all run on emulated devices."""
    scale = STEP_SECONDS / chosen.step_seconds
    others = [plans[place] for place in PLACES if place < len(plans)]
    settings = [emulated(plan, text_of(plan), scale) for plan in (chosen, *others)]
    await_quiet(options)
    seconds = [median(step.seconds for step in steps) for steps in emulate(settings, options.steps, say)]
    return seconds[0] / min(seconds)


def main(argv: Sequence[str] | None = None) -> int:
    """See the top of the file. The exit code is 1 where a plan of `auto` takes longer than the tolerance."""
    parser = bench_parser(__doc__, steps=5)
    parser.add_argument("models", nargs="*", help=f"of {', '.join(models())}; none: all")
    parser.add_argument("--no-run", action="store_true", help="the predictions alone")
    parser.add_argument("--machines", nargs="+", choices=MACHINES, default=[*MACHINES])
    options = parser.parse_args(argv)
    rows, is_near = [], True
    for model_name in options.models or models():
        for machine_name in options.machines:
            machine, model = MACHINES[machine_name], models()[model_name]
            planner = planner_for(model, machine)
            free = PipelineConfig(num_processes=NUM_DEVICES).with_auto(NUM_DEVICES)
            chosen, plans = best_plan(planner, free), search(planner, machine, free)
            ratios = [chosen.step_seconds / plans[0].step_seconds]
            if not options.no_run:
                ratios.append(run_beside(chosen, plans, options))
            is_near = is_near and max(ratios) <= 1 + TOLERANCE
            shown = [f"{ratio:.3f}" for ratio in ratios]
            rows.append([model_name, machine_name, len(plans), text_of(chosen), text_of(plans[0]), " ".join(shown)])
            print(table(HEADER, rows[-1:]), flush=True)
    print(table(HEADER, rows))
    return 0 if is_near else 1


if __name__ == "__main__":
    sys.exit(main())

"""hf-gpipe launch ENGINE recipe.yaml --nodes N: prints the file that starts a run on several machines."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hf_gpipe.commands.base import Parser, run_with_options
from hf_gpipe.commands.launch_file import ENGINES, job_file
from hf_gpipe.errors import UserError, nearest
from hf_gpipe.recipe import Recipe, load_recipe

if TYPE_CHECKING:
    from hf_gpipe.commands.plan_request import PlanRequest
    from hf_gpipe.planner.plan import Plan

DESCRIPTION = """\
Prints a file that starts the training of a recipe on several machines, and submits nothing. The file stops the training
in time to save (training.stop_seconds), starts it again, and has the planner's estimate as comments.

  hf-gpipe launch slurm recipe.yaml --nodes 2 --nproc-per-node 4 > job.sh

docs/clusters.md says what to do with the file.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    args = list(sys.argv[1:] if argv is None else argv)

    def work(options: argparse.Namespace) -> int:
        print(_text(options, args), end="")
        return 0

    return run_with_options(args, _parser(), work)


def _text(options: argparse.Namespace, args: Sequence[str]) -> str:
    if options.engine not in ENGINES:
        hint = nearest(options.engine, ENGINES)
        raise UserError(f"{options.engine!r} is not an engine; it must be one of {', '.join(ENGINES)}{hint}")
    recipe = load_recipe(options.recipe, options.overrides)
    _check_lines([*args, recipe.training.output_dir])
    per_node = _per_node(recipe, options.nodes, options.nproc_per_node)
    arguments = [options.recipe, *options.overrides]
    comments = [f"Printed by: hf-gpipe launch {shlex.join(args)}", ""]
    if options.no_plan:
        comments.append("Nothing is planned (--no-plan).")
    else:
        changed, estimate = _planned(options, per_node)
        keys = {argument.partition("=")[0] for argument in changed}
        arguments = [argument for argument in arguments if argument.partition("=")[0].strip() not in keys] + changed
        comments += estimate
    return job_file(
        options.engine,
        load_recipe(options.recipe, arguments[1:]),
        arguments,
        options.nodes,
        per_node,
        comments,
        device=options.device,
        image=options.image,
        claim=options.claim,
    )


def _check_lines(values: Sequence[str]) -> None:
    """Raise UserError for a value with control characters: what follows a line break would be a command of its own."""
    for value in values:
        if not value.isprintable():
            raise UserError(
                f"{value!r} has a line break or another control character, and a job's file is read line by line; give "
                "the recipe, its output directory and the options values without one"
            )


def _per_node(recipe: Recipe, nodes: int, asked: int | None) -> int:
    """Processes of each machine. Raises UserError where neither the recipe nor the option says how many."""
    if nodes < 1 or (asked is not None and asked < 1):
        raise UserError(f"--nodes is {nodes} and --nproc-per-node {asked}; both are at least 1")
    pipeline = recipe.pipeline
    if pipeline.is_mesh_open and pipeline.num_processes is None:
        if asked is None:
            raise UserError(
                "the planner is to choose stages or replicas, for a number of processes that is not given; add "
                "--nproc-per-node P, the processes (GPUs) of each machine"
            )
        return asked
    total = pipeline.division.num_ranks * pipeline.processes
    if asked is None and total % nodes:
        raise UserError(
            f"the recipe has {total} processes, and --nodes is {nodes}; each machine has as many as the others: give "
            "--nproc-per-node, other numbers of stages or replicas, or pipeline.num_processes"
        )
    return asked or total // nodes


def _planned(options: argparse.Namespace, per_node: int) -> tuple[list[str], list[str]]:
    """The key=value arguments that the plan adds to the recipe's, and the plan in words."""
    from hf_gpipe.commands.plan import read_request
    from hf_gpipe.planner.report import LARGE_BUBBLE, overrides, report

    links = f"@{options.links}" if options.links else ""
    words = [options.recipe, *options.overrides, "--devices", f"{options.nodes}x{per_node}{links}"]
    for name in ("device", "memory"):
        if value := getattr(options, name):
            words += [f"--{name}", value]
    request = read_request(words)
    plan = _in_the_best_order(request)
    given = request.given
    changed = []
    if given.is_mesh_open or given.mesh != (plan.settings.num_stages, plan.settings.replicas):
        changed = shlex.split(overrides(plan, given))
    elif plan.settings.placement != given.placement:
        values = {"placement": plan.settings.placement, "num_processes": plan.settings.num_processes}
        changed = [f"pipeline.{key}={value}" for key, value in values.items()]
    if plan.bubble > LARGE_BUBBLE:
        print(f"the plan has a bubble of {plan.bubble:.0%}; see the comments of the file", file=sys.stderr)
    if not plan.fits:
        print("the plan does not fit; see the comments of the file", file=sys.stderr)
    lines = ["The planner's estimate:", *(f"  {line}" for line in report(plan, verbose=False, width=95).splitlines())]
    return changed, [*lines, "", _ranks(plan, per_node)]


def _in_the_best_order(request: PlanRequest) -> Plan:
    """The plan; where it has equal replicas, with the order of ranks that is faster: each pipeline's together, or the
    replicas of each stage together."""
    from hf_gpipe.schedule import Placement

    plan = request.best()
    config, placement = plan.settings, plan.timeline.schedule.placement
    counts = set(placement.replicas)
    is_given = config.placement is not None or len(counts) > 1 or request.table is not None
    if is_given or counts == {1} or config.num_processes != placement.num_stages * placement.replicas[0]:
        return plan
    count = placement.replicas[0]
    beside = Placement([range(stage * count, (stage + 1) * count) for stage in range(placement.num_stages)])
    other = request.planner.plan(config.replace(placement=str(beside)))
    return other if other.step_seconds < plan.step_seconds else plan


def _ranks(plan: Plan, per_node: int) -> str:
    """Which machines have the processes of each stage."""
    placement = plan.timeline.schedule.placement
    ranks = [[rank for worker in own for rank in placement.ranks_of(worker)] for own in placement.workers]
    machines = [sorted({rank // per_node for rank in own}) for own in ranks]
    stages = "; ".join(f"stage {stage}: {', '.join(map(str, own))}" for stage, own in enumerate(machines))
    return f"Ranks 0 to {per_node - 1} are on machine 0, the next {per_node} on machine 1. Machines of {stages}"


def _parser() -> Parser:
    parser = Parser(DESCRIPTION, "launch")
    parser.add_argument("engine", help=", ".join(ENGINES))
    parser.add_argument("recipe", help="the recipe; every machine has it under this path")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="replaces a value of the recipe")
    parser.add_argument("--nodes", type=int, required=True, metavar="N", help="number of machines")
    parser.add_argument(
        "--nproc-per-node",
        type=int,
        metavar="P",
        help="processes of each machine, one per GPU (default: the recipe's, divided by --nodes)",
    )
    parser.add_argument("--device", help="for the planner: name of the GPUs, such as a100-80")
    parser.add_argument("--memory", help="for the planner: memory limit of a process, such as 80GiB")
    parser.add_argument(
        "--links",
        metavar="25Gbit/s+50us,150GB/s",
        help="for the planner: the links between machines and between the devices of a machine (default: 100 Gbit/s "
        "and the device's own)",
    )
    parser.add_argument("--no-plan", action="store_true", help="print the file without planning")
    parser.add_argument("--image", help="kubernetes: a container image with hf_gpipe")
    parser.add_argument("--claim", help="kubernetes: the PersistentVolumeClaim with recipe, data and output")
    return parser

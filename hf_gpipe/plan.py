"""python -m hf_gpipe.plan recipe.yaml [key=value ...]: will it fit, and how fast? Without a GPU and without weights."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hf_gpipe.command import Parser, run_command
from hf_gpipe.errors import HfGpipeError, PartitionError, RecipeError, UserError
from hf_gpipe.recipe import ROW_LENGTH_KINDS, SEQUENCE_KINDS, Recipe, load_recipe
from hf_gpipe.recipe.sizes import read_bytes
from hf_gpipe.schedule import Schedule, draw_text, recompute_under

if TYPE_CHECKING:
    from hf_gpipe.partition.cluster import Cluster
    from hf_gpipe.planner.devices import Device
    from hf_gpipe.planner.limits import MemoryLimit
    from hf_gpipe.planner.plan import Plan, Planner
    from hf_gpipe.recipe import PipelineConfig

#: Longer texts are not tried.
_MOST_TOKENS = 1 << 20

DESCRIPTION = """\
Predicts how the model of a recipe is split, the layers and the memory of each stage, how long a step takes, and whether
it fits; if it does not, the smallest change that makes it fit. Nothing is trained and no data is read: every example is
assumed to be as long as data.max_source_tokens and data.max_target_tokens (or data.max_length) allow.

Exit code: 0 it fits, 1 it does not, 2 an error that you can correct.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    if not args:
        parser.print_help()
        return 2

    def work() -> int:
        try:
            code = _plan(parser.parse_intermixed_args(args))
            sys.stdout.flush()
            return code
        except BrokenPipeError:
            # A reader such as head has seen enough. What is still buffered must not fail at the interpreter's end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0

    return run_command(work)


@dataclass(frozen=True)
class Question:
    """A recipe, the devices it is planned for, and their planner.

    Attributes:
        recipe: on the devices that the options name.
        config: its pipeline, with the limit of memory.
        device: of each process.
        cluster: the links between the processes; None: every pair has the device's link.
        table: the schedule, where it is a file.
        planner: of all this.
    """

    recipe: Recipe
    config: PipelineConfig
    device: Device
    cluster: Cluster | None
    table: Schedule | None
    planner: Planner

    @classmethod
    def of(cls, options: argparse.Namespace) -> Question:
        """The question that the command's options ask. Raises UserError for what they get wrong."""
        # What the options get wrong is said before anything that takes seconds.
        num_devices, cluster = _count(options.devices), None
        if options.table and options.json:
            raise UserError("--table and --json exclude each other: both say what is printed; leave one of them out.")
        limits = tuple((options.memory or "").split(","))
        for limit in limits if options.memory else ():
            read_bytes(limit, "--memory")
        from hf_gpipe.planner.network import read_cluster

        device = _device(options)
        if options.devices is not None and num_devices is None:
            cluster = read_cluster(options.devices, device)
            num_devices = cluster.num_devices
        recipe = load_recipe(options.recipe, options.overrides)
        if options.search and num_devices is not None:
            recipe = replace(recipe, pipeline=recipe.pipeline.opened(num_devices))
        else:
            recipe = _on_devices(recipe, options.overrides, num_devices)
        config = recipe.pipeline
        if options.memory is not None:
            config = replace(config, memory=limits if len(limits) > 1 else options.memory)
        if config.is_mesh_open and config.num_processes is None:
            raise UserError(
                "pipeline.num_stages or pipeline.replicas is auto: they are chosen for a number of processes; give "
                "--devices, or pipeline.num_processes."
            )
        table = config.table(recipe.training.gradient_accumulation_steps, config.processes)
        if table is not None:
            config = replace(config, recompute=recompute_under(table, config.recompute))
        recipe = _with_vocabulary(recipe)
        planner = _planner(recipe, device, config.memory_bytes, table, is_profiled=options.profile)
        planner.cluster, planner.speeds = cluster, config.speeds
        return cls(recipe, config, device, cluster, table, planner)

    @classmethod
    def read(cls, args: Sequence[str]) -> Question:
        """The question of the command's arguments, for another command. Raises UserError for what they get wrong."""
        return cls.of(_parser().parse_intermixed_args(args))

    def best(self) -> Plan:
        """The plan, with what is left open chosen. Raises UserError where nothing that is allowed fits."""
        return _best(self.planner, self.config)


def _plan(options: argparse.Namespace) -> int:
    question = Question.of(options)
    recipe, config, planner = question.recipe, question.config, question.planner

    from hf_gpipe.planner.listed import listed_plan
    from hf_gpipe.planner.picture import draw_plan
    from hf_gpipe.planner.report import as_dict, overrides, report, search_report
    from hf_gpipe.planner.search import search

    if options.longest and planner.memory_bytes is None:
        raise UserError("--longest: no limit of memory is known; give --memory or --device.")
    if options.search:
        found = search(planner, config)
        best = found.fastest[0] if found.fastest else found.leanest
        best = listed_plan(best) if options.listed else best
        if options.json:
            plans = {"fastest": [as_dict(plan) for plan in found.fastest], "leanest": as_dict(found.leanest)}
            print(json.dumps({"num_tried": found.num_tried, **plans}, indent=2))
        else:
            print(search_report(found), file=sys.stderr if options.table else sys.stdout)
    else:
        best = question.best()
        best = listed_plan(best) if options.listed else best
        if options.json:
            print(json.dumps(as_dict(best), indent=2))
        elif not options.table:
            print(report(best))
        if not options.json and not config.is_decided:
            print(f"{'chosen':11} {overrides(best)}", file=sys.stderr if options.table else sys.stdout)
    if options.longest:
        key = "max_length" if recipe.data.kind in ROW_LENGTH_KINDS else "max_target_tokens"

        def fits(tokens: int) -> bool:
            changes: dict[str, Any] = {key: tokens}
            longer = replace(recipe, data=replace(recipe.data, **changes))
            other = _planner(longer, question.device, planner.memory_bytes, question.table, is_profiled=False)
            other.cluster, other.speeds = question.cluster, config.speeds
            plan = other.plan(best.settings)
            # The planner cuts what the model has no positions for.
            return plan.fits and plan.costs.workload.target_tokens >= other.inputs.mini_batch().target_tokens

        is_data = options.json or options.table
        print(f"{'longest':11} {_longest(f'data.{key}', fits)}", file=sys.stderr if is_data else sys.stdout)
    if options.table:
        # The drawing goes elsewhere, so that `--table > mine.txt` is a table and is seen all the same.
        print(best.timeline.schedule.text(), end="")
        print(draw_text(best.timeline), file=sys.stderr)
    if options.picture is not None:
        draw_plan(options.picture, best)
        is_data = options.json or options.table
        print(f"{'picture':11} {options.picture}", file=sys.stderr if is_data else sys.stdout)
    return 0 if best.fits else 1


def _longest(key: str, fits: Callable[[int], bool]) -> str:
    """The largest value of a key that fits, to within 2%, in words."""
    low, high = 1, 256
    while high < _MOST_TOKENS and fits(high):
        low, high = high, 2 * high
    if high >= _MOST_TOKENS:
        return f"{key}={low} fits; longer ones were not tried"
    while high - low > max(1, low // 50):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    if low == 1:
        return "no length fits"
    return f"{key}={low} fits and {high} does not, all else equal"


def _count(text: str | None) -> int | None:
    """A number of devices; None for a cluster.

    Raises:
        UserError: the text is neither.
    """
    from hf_gpipe.planner.network import is_cluster

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
    return count


def _best(planner: Planner, config: PipelineConfig) -> Plan:
    from hf_gpipe.planner.choose import best_plan

    try:
        return best_plan(planner, config)
    except PartitionError as error:
        if planner.memory_bytes is None:
            raise
        from hf_gpipe.planner.advice import smallest_fix

        # The same without a limit can be planned, and knows what would have to change.
        unlimited = best_plan(planner.within(None), config)
        fix = smallest_fix(replace(unlimited, planner=planner))
        raise PartitionError(f"{error} {fix}") from None


def _on_devices(recipe: Recipe, overrides: Sequence[str], devices: int | None) -> Recipe:
    """The recipe on that many devices, one process each; a recipe with fewer stages gets one stage per device."""
    if devices is None:
        return recipe
    pipeline = recipe.pipeline
    if pipeline.is_mesh_open:
        return replace(recipe, pipeline=replace(pipeline, num_processes=devices))
    num_stages, _ = pipeline.mesh
    if isinstance(pipeline.replicas, int) and pipeline.replicas > 1:
        return _replicas_on_devices(recipe, pipeline.replicas, devices)
    if devices > num_stages and pipeline.places == num_stages:
        if any(text.replace(" ", "").startswith("pipeline.num_stages=") for text in overrides):
            raise UserError(
                f"--devices is {devices} and pipeline.num_stages is {num_stages}: each device holds at least one "
                f"stage; use at most {num_stages} devices, or more stages."
            )
        if not isinstance(pipeline.partition, str):
            raise UserError(
                f"--devices is {devices} and pipeline.partition lists {num_stages} stages; list {devices}, or use "
                "count."
            )
        num_stages = devices
    return replace(recipe, pipeline=replace(pipeline, num_stages=num_stages, num_processes=devices))


def _replicas_on_devices(recipe: Recipe, replicas: int, devices: int) -> Recipe:
    """The recipe with so many replicas of a pipeline, which share the devices evenly."""
    of_replica, rest = divmod(devices, replicas)
    num_stages, _ = recipe.pipeline.mesh
    if rest or not of_replica or of_replica > num_stages:
        raise UserError(
            f"--devices is {devices}, pipeline.replicas {replicas} and pipeline.num_stages {num_stages}: every "
            "replica has equally many devices, and each of them at least one "
            f"stage; use a multiple of replicas, at most {replicas * num_stages}, or more stages."
        )
    return replace(recipe, pipeline=replace(recipe.pipeline, num_processes=devices))


def _device(options: argparse.Namespace) -> Device:
    from hf_gpipe.planner.devices import LINKS, custom, device, link_between, read_bandwidth, read_flops

    if options.device is None and options.flops is None and options.bandwidth is None:
        if options.profile:
            import torch

            from hf_gpipe.planner.measure import this_machine

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


def _planner(
    recipe: Recipe, device: Device, memory_bytes: MemoryLimit, table: Schedule | None, *, is_profiled: bool
) -> Planner:
    """The planner of the recipe; `table`: its schedule, where it is a file; `is_profiled`: layers are measured."""
    import torch

    from hf_gpipe.adapters import adapter_for
    from hf_gpipe.adapters.autocast import Autocast
    from hf_gpipe.adapters.classifiers import classifier_of
    from hf_gpipe.adapters.peft import make_peft
    from hf_gpipe.planner.choose import micro_batch_counts
    from hf_gpipe.planner.plan import Planner
    from hf_gpipe.planner.workload import PlanInputs
    from hf_gpipe.training.from_recipe import (
        checked_adapter,
        loss_of,
        model_config,
        model_dtype,
        peft_config_of,
        quantization_config_of,
    )

    if recipe.model.depth_scaled_feed_forward or recipe.data.kind in SEQUENCE_KINDS:
        # A run would raise these errors; the planner cannot find them.
        checked_adapter(recipe)
    config, training = model_config(recipe, None), recipe.training
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        # A run takes it from the tokenizer. Any token will do here.
        config.decoder_start_token_id = 0
    # Without CUDA the types under autocast are observed on the CPU, whose list of operations is nearly the same.
    half = torch.bfloat16 if training.bf16 else torch.float16 if training.fp16 else None
    here = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    inputs = PlanInputs.of_recipe(recipe, is_encoder_decoder=config.is_encoder_decoder)
    if table is not None:
        inputs = replace(inputs, tables={recipe.pipeline.schedule: table})
    try:
        adapter = adapter_for(
            config,
            model_dtype(recipe),
            recipe.model.attn_implementation,
            classifier_of(config),
            trust_remote_code=recipe.model.trust_remote_code,
            autocast=None if half is None else Autocast(half, here),
            quantization_config=quantization_config_of(recipe),
        )
        lora = peft_config_of(recipe, config)
        planner = Planner.of(
            adapter,
            inputs,
            device,
            peft=None if lora is None else make_peft(adapter, "default", lora),
            loss=loss_of(recipe).planned,
            as_on_gpu=True,
            profile_on=here if is_profiled else None,
            memory_bytes=memory_bytes,
        )
        # The layers run here for the first time, in the smallest micro-batch that will be planned.
        planner.costs(micro_batch_counts(planner.rows, recipe.pipeline.num_micro_batches)[-1])
    except HfGpipeError:
        raise
    except Exception as error:  # whatever the family's own code says of its configuration
        raise RecipeError(f"model: transformers cannot make a {config.model_type} model of this: {error}") from error
    return planner


def _with_vocabulary(recipe: Recipe) -> Recipe:
    """The recipe with the size of its vocabulary, which a run would take from the tokenizer."""
    model = recipe.model
    if model.path is not None or "vocab_size" in model.config:
        return recipe
    if recipe.tokenizer.path is not None:
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(recipe.tokenizer.path, trust_remote_code=model.trust_remote_code)
        except (OSError, ValueError) as error:
            raise RecipeError(f"tokenizer.path: no tokenizer at {recipe.tokenizer.path!r}: {error}") from error
        vocab_size, source = len(tokenizer), f"the tokenizer at {recipe.tokenizer.path}"
    else:
        vocab_size, source = recipe.tokenizer.vocab_size, "tokenizer.vocab_size; a trained one may have a few more"
    print(f"vocabulary of {vocab_size} tokens, from {source}", file=sys.stderr)
    return replace(recipe, model=replace(model, config={**model.config, "vocab_size": vocab_size}))


def _parser() -> argparse.ArgumentParser:
    from hf_gpipe.planner.devices import DEVICES, LINKS

    parser = Parser(
        prog="python -m hf_gpipe.plan", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", help="the recipe")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="replaces a value of the recipe")
    parser.add_argument(
        "--devices",
        metavar="8 or 4x8",
        help="number of devices, one process each (default: the recipe's), or a cluster: 4x8 is 4 machines of 8 "
        "devices, 4x8@25Gbit/s+50us,150GB/s+5us names the links from the outside in, pipedream-a is a known one",
    )
    parser.add_argument("--memory", help="memory limit of a process, such as 80GiB, or of each: 24GiB,12GiB")
    parser.add_argument("--device", help=f"the device of each process: {', '.join(DEVICES)}")
    parser.add_argument("--flops", help="for another device: operations per second, such as 312TFLOPS")
    parser.add_argument("--bandwidth", help="for another device: memory bandwidth, such as 2TB/s")
    parser.add_argument("--link", help=f"the link between devices: {', '.join(LINKS)}, or a rate, such as 25GB/s")
    parser.add_argument("--profile", action="store_true", help="measure the layers on this machine's device")
    parser.add_argument(
        "--search", action="store_true", help="try other K, replicas, M, schedules, recomputation and splits"
    )
    parser.add_argument(
        "--longest", action="store_true", help="find the largest data.max_target_tokens (chats: max_length) that fits"
    )
    parser.add_argument(
        "--listed",
        action="store_true",
        help="also make a table with I and W for this very plan, and take it where it is faster; "
        "--listed --table > listed.txt writes it",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--table",
        action="store_true",
        help="print the schedule's table, which pipeline.schedule=FILE.txt runs; its drawing goes to stderr",
    )
    parser.add_argument("--picture", metavar="FILE.png", help="draw the memory of each process and the predicted step")
    return parser


if __name__ == "__main__":
    sys.exit(main())

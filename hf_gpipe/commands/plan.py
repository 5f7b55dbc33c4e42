"""hf-gpipe plan recipe.yaml [key=value ...]: will it fit, and how fast? Without a GPU and without weights."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hf_gpipe.commands.base import Parser, run_with_options
from hf_gpipe.errors import UserError
from hf_gpipe.schedule import draw_text
from hf_gpipe.text import GREEN, RED, YELLOW, coloured

if TYPE_CHECKING:
    from hf_gpipe.commands.plan_request import PlanRequest

#: Longer texts are not tried.
_MOST_TOKENS = 1 << 20
#: The most columns of a line, and the least; between them a terminal's own number decides.
_WIDEST, _NARROWEST = 100, 60

DESCRIPTION = """\
Says whether the training of a recipe fits the devices, and how long a step takes: the layers and the memory of each
stage, the bubble, and, if it does not fit, the smallest change that makes it fit. It needs no GPU, no weights and no
data: every row counts as long as data.max_source_tokens and data.max_target_tokens, or data.max_length, allow.

  hf-gpipe plan recipes/causal/lora.yaml --device rtx3090                  on the devices of the recipe
  hf-gpipe plan recipe.yaml --devices 8 --device rtx4090 --search          the fastest way to use 8 cards
  hf-gpipe plan recipe.yaml --devices 4x8@25Gbit/s+50us,150GB/s+5us        4 machines of 8 devices

Exit code: 0 it fits, 1 it does not fit, 2 an error that you can correct. If the partition is by cost and no split fits,
the exit code is 2.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    return run_with_options(argv, _parser(), _plan)


def read_request(args: Sequence[str]) -> PlanRequest:
    """The request of the command's arguments, for another command. Raises UserError for what they get wrong."""
    from hf_gpipe.commands.plan_request import PlanRequest

    return PlanRequest.of(_parser().parse_intermixed_args(args))


def _plan(options: argparse.Namespace) -> int:
    from hf_gpipe.commands.plan_request import PlanRequest

    request = PlanRequest.of(options)

    from hf_gpipe.planner.picture import draw_plan
    from hf_gpipe.planner.report import as_dict, keys_text, lines_text, overrides, report, search_report, untried
    from hf_gpipe.planner.search.choose import search_all
    from hf_gpipe.planner.search.listed import TABLE_FILE

    if options.longest and request.planner.memory_bytes is None:
        raise UserError("--longest: no limit of memory is known; give --memory or --device.")
    # JSON and a table are data, and are alone on the standard output.
    words = sys.stderr if options.json or options.table else sys.stdout
    width = max(_NARROWEST, min(_WIDEST, shutil.get_terminal_size((_WIDEST, 24)).columns))

    def say(name: str, text: str, end: str = "") -> None:
        print(lines_text([(name, text)], width, end), file=words)

    if options.search:
        outcome = search_all((asked.planner, asked.config) for asked in (request, *request.divided(options)))
        best = outcome.fastest[0] if outcome.fastest else outcome.leanest
        if options.json:
            plans = {"fastest": [as_dict(plan) for plan in outcome.fastest], "leanest": as_dict(outcome.leanest)}
            print(json.dumps({"num_tried": outcome.num_tried, **plans}, indent=2))
        else:
            print(search_report(outcome, request.given, width), file=words)
    else:
        best = request.best()
        if options.json:
            print(json.dumps(as_dict(best), indent=2))
        elif not options.table:
            text = report(best, verbose=options.verbose, width=width)
            print(_with_verdict(text))
            print()
        if not options.json and not request.config.is_decided:
            say("chosen", overrides(best, request.given), " \\")
        if text := untried(request.config, best):
            say("left out", text)
    if best.settings.schedule == TABLE_FILE:
        say("table", "made for this plan by pipeline.schedule=auto; --table > mine.txt writes it")
    if options.longest:
        key = request.recipe.data.length_key

        def longest(keys: Mapping[str, Any]) -> str:
            return _longest(f"data.{key}", lambda tokens: request.fits_with(best, {key: tokens}, keys))

        say("longest", longest({}))
        for name, keys in request.longer_rows(best):
            say(name, f"{longest(keys)}; {keys_text(keys)}")
    if options.table:
        # The drawing goes elsewhere, so that `--table > mine.txt` is a table and is seen all the same.
        print(best.timeline.schedule.text(), end="")
        print(draw_text(best.timeline), file=sys.stderr)
    if options.picture is not None:
        draw_plan(options.picture, best)
        say("picture", str(options.picture))
    if words is sys.stdout and not options.search and not options.verbose:
        say("more", "--verbose explains it, --picture plan.html draws it, --search looks for a faster one")
    return 0 if best.fits else 1


def _with_verdict(text: str) -> str:
    """A report whose verdict is green on a terminal, yellow where devices wait much, or red."""
    verdict = re.match(r"verdict .*(?:\n {12}.*)*", text)
    assert verdict is not None, "a report begins with it"
    is_slow = "but devices wait" in " ".join(verdict[0].split())
    colour = RED if re.match(r"verdict +does not", text) else YELLOW if is_slow else GREEN
    return coloured(verdict[0], colour, sys.stdout) + text[verdict.end() :]


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


def _parser() -> Parser:
    from hf_gpipe.planner.machines.devices import DEVICES, LINKS

    parser = Parser(DESCRIPTION, "plan")
    parser.add_argument("recipe", help="the recipe")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="replaces a value of the recipe")
    parser.add_argument(
        "--devices",
        metavar="8 or 4x8",
        help="number of devices, one process each (default: the recipe's), or a cluster: 4x8 is 4 machines of 8 "
        "devices, and 4x8@25Gbit/s+50us,150GB/s+5us also gives the links between machines and inside of a machine; "
        "pipedream-a is the name of a cluster",
    )
    parser.add_argument("--memory", help="memory limit of every process, such as 80GiB, or one for each: 24GiB,12GiB")
    parser.add_argument(
        "--device",
        help="the device of every process, or one for each, such as rtx4090,rtx3090 (default: one as fast as an "
        "a100-80, without a limit of memory): "
        f"{', '.join(DEVICES)}",
    )
    parser.add_argument(
        "--screen", action="store_true", help="the first device also drives a screen, which takes 1 GiB of its memory"
    )
    parser.add_argument("--flops", help="for another device: operations per second, such as 312TFLOPS")
    parser.add_argument("--bandwidth", help="for another device: memory bandwidth, such as 2TB/s")
    parser.add_argument("--link", help=f"the link between devices: {', '.join(LINKS)}, or a rate, such as 25GB/s")
    parser.add_argument(
        "--host-link",
        metavar="pcie4/2",
        help="for weights that visit: the link between a device and its host; /2: two devices share a link",
    )
    parser.add_argument("--host-memory", help="for weights that visit: CPU memory of a machine, such as 256GiB")
    parser.add_argument("--host-bandwidth", help="bandwidth of the CPU memory of a machine, such as 100GB/s")
    parser.add_argument("--disk-bandwidth", help="for optimizer_state_dir: bandwidth of the disk, such as 5GB/s")
    parser.add_argument("--profile", action="store_true", help="measure the layers on this machine's device")
    parser.add_argument(
        "--search",
        action="store_true",
        help="compare other numbers of stages, replicas and micro-batches, schedules, recomputation, splits and tensor "
        "parallelism; may take minutes",
    )
    parser.add_argument(
        "--longest",
        action="store_true",
        help="find the largest data.max_length (or data.max_target_tokens) that fits, with rows whole and cut",
    )
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument(
        "--verbose", action="store_true", help="also explain the prediction, and list stages and ranks in full"
    )
    parser.add_argument(
        "--table",
        action="store_true",
        help="print the schedule's table, which pipeline.schedule=FILE.txt runs, and draw it on stderr",
    )
    parser.add_argument("--picture", metavar="FILE.png", help="draw the memory of each process and the predicted step")
    return parser

"""Plans models of 1.5 to 70 billion parameters on 1 to 8 cards of 12 to 80 GB, and writes docs/your_model.md.

python scripts/your_model.py            plans every cell into docs/your_model/cells.csv, and writes the tables
python scripts/your_model.py --longest  finds the longest rows, into docs/your_model/longest.csv, and writes the page
python scripts/your_model.py --draw     writes the page from both files, and plans nothing
python scripts/your_model.py --check    exit code 1 where the page is not that of the files
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from itertools import chain, product, starmap
from operator import attrgetter
from pathlib import Path
from typing import Any

from pages import block, write

from hf_gpipe.commands.plan import read_request
from hf_gpipe.errors import UserError
from hf_gpipe.planner.plan import Plan, Planner
from hf_gpipe.planner.search.choose import best_plan
from hf_gpipe.settings.pipeline import PipelineConfig

DOCS = Path(__file__).parents[1] / "docs"
CELLS, LONGEST, PAGE = DOCS / "your_model" / "cells.csv", DOCS / "your_model" / "longest.csv", DOCS / "your_model.md"
SIZES = ("1.5b", "3b", "7b", "14b", "32b", "70b")
#: What each method adds to the command.
METHODS = {
    "full": ("training.fp32_master_weights=true",),
    "lora": ("lora.r=16",),
    "qlora": ("lora.r=16", "model.quantization=nf4", "model.double_quantization=true"),
}
COUNTS = (1, 2, 4, 8)
CARDS_GB = (12, 16, 24, 48, 80)
#: Where the longest rows are looked for: cards, and tokens of a row.
LONGEST_GB, LENGTHS = (24, 80), tuple(1024 * 2**power for power in range(1, 8))
CHUNK_TOKENS, LONG_ROWS = 2048, 4
#: One row a micro-batch, so no larger number is possible.
MICRO_BATCHES = 16
BASE = (
    "model.dtype=bfloat16",
    "training.bf16=false",
    "data.max_length=2048",
    f"training.batch_size={MICRO_BATCHES}",
    f"pipeline.num_micro_batches={MICRO_BATCHES}",
    "pipeline.schedule=1f1b",
)
WORDS = {"full": "full fine-tuning", "lora": "LoRA", "qlora": "QLoRA"}
#: The driver reports less than a card's name says, and a CUDA context takes a part (planner/machines/devices.py).
USABLE_SHARE, CONTEXT_GIB = 0.98, 0.5


@dataclass(frozen=True)
class Cell:
    """The plan of a model by a method on some cards; the fields after `fits` are empty where none fits."""

    size: str
    method: str
    cards: int
    gb: int
    fits: bool
    stages: int | None = None
    replicas: int | None = None
    recompute: str | None = None
    step_seconds: float | None = None
    peak_gib: float | None = None


@dataclass(frozen=True)
class Longest:
    """The tokens of the longest rows of `LENGTHS` that fit, whole and in chunks; 0 where none does."""

    size: str
    method: str
    cards: int
    gb: int
    whole: int
    chunks: int


def memory_gib(gb: int) -> float:
    """The GiB of a card that a process may use."""
    return round(USABLE_SHARE * gb - CONTEXT_GIB, 1)


def device(gb: int) -> str:
    """The card whose rates are taken: a GeForce on PCIe 4, or an A100 with NVLink."""
    return "a100-80" if gb == 80 else "rtx3090"


def command(size: str, method: str) -> list[str]:
    """The arguments of `hf-gpipe plan`, without the devices."""
    return ["recipes/causal/chat.yaml", f"model.path=docs/your_model/{size}", *BASE, *METHODS[method]]


def cells_of(size: str, method: str, counts: Iterable[int] = COUNTS, cards: Iterable[int] = CARDS_GB) -> Iterator[Cell]:
    """Plan a model by a method.

    A plan for less memory also fits more, and the fastest within some memory is also the fastest within less where it
    still fits. So the cards are tried from the largest to the smallest, and each gets the fastest plan that was found.
    """
    cards = sorted(cards, reverse=True)
    requests = {name: read_request([*command(size, method), "--device", name]) for name in {*map(device, cards)}}
    for count in counts:
        plans: dict[str, list[Plan]] = {name: [] for name in requests}
        for gb in cards:
            own_plans, limit = plans[device(gb)], _limit(gb)
            if not own_plans or own_plans[-1].peak_bytes > limit:
                request = requests[device(gb)]
                own_plans += filter(None, [_best(request.planner.within(limit), request.config, count)])
        for gb in cards:
            fit = [plan for plan in plans[device(gb)] if plan.peak_bytes <= _limit(gb)]
            yield Cell(size, method, count, gb, **_described(min(fit, key=attrgetter("sort_key"), default=None), count))


def _limit(gb: int) -> int:
    return round(memory_gib(gb) * 2**30)


def _described(plan: Plan | None, count: int) -> dict[str, Any]:
    if plan is None:
        return {"fits": False}
    modes = {str(stage.recompute) for stage in plan.stages}
    return {
        "fits": True,
        "stages": plan.settings.num_stages,
        "replicas": count // plan.settings.num_stages,
        "recompute": modes.pop() if len(modes) == 1 else "mixed",
        "step_seconds": round(plan.step_seconds, 2),
        "peak_gib": round(plan.peak_bytes / 2**30, 1),
    }


def longest_of(size: str, method: str, counts: Iterable[int] = COUNTS) -> Iterator[Longest]:
    """The longest rows of a model by a method on each number of cards."""
    longest = {(count, gb): [0, 0] for gb in LONGEST_GB for count in counts}
    for gb in LONGEST_GB:
        waiting = {(count, in_chunks) for count in counts for in_chunks in (False, True)}
        for tokens in LENGTHS:
            rows = f"data.max_length={tokens}", f"training.batch_size={LONG_ROWS}"
            request = read_request([*command(size, method), "--device", device(gb), *rows])
            planner = request.planner.within(_limit(gb))
            for count, in_chunks in sorted(waiting):
                chunks = f"{CHUNK_TOKENS} tokens" if in_chunks else 1
                config = request.config.replace(sequence_chunks=chunks, num_micro_batches=LONG_ROWS)
                if _best(planner, config, count) is None:
                    waiting.remove((count, in_chunks))
                else:
                    longest[count, gb][in_chunks] = tokens
            if not waiting:
                break
    for (count, gb), lengths in longest.items():
        yield Longest(size, method, count, gb, *lengths)


def _best(planner: Planner, config: PipelineConfig, count: int) -> Plan | None:
    """The fastest plan that fits: K stages with count / K replicas, and what is recomputed; None where none fits."""
    plans = []
    for num_stages in (k for k in range(1, count + 1) if count % k == 0):
        for recompute in ("auto", "block"):
            mesh = {"num_stages": num_stages, "replicas": count // num_stages, "num_processes": count}
            try:
                plans.append(best_plan(planner, config.replace(**mesh, recompute=recompute, partition="auto")))
            except UserError:
                continue
    return min((plan for plan in plans if plan.fits), key=attrgetter("sort_key"), default=None)


def write_lines(path: Path, kind: type[Cell] | type[Longest], lines: Iterable[Cell] | Iterable[Longest]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(kind)], lineterminator="\n")
        writer.writeheader()
        for line in lines:
            writer.writerow(asdict(line))
            file.flush()


def read_lines(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def parts(cells: list[dict[str, str]], longest: list[dict[str, str]]) -> dict[str, str]:
    """The parts of the page that these cells and longest rows give, by their names in it."""
    cells_by_key = {(cell["size"], cell["method"], int(cell["cards"]), int(cell["gb"])): cell for cell in cells}
    texts = {}
    for size in SIZES:
        lines = [f"| | cards | {' | '.join(f'{gb} GB' for gb in CARDS_GB)} |", "|---|--:|" + "---|" * len(CARDS_GB)]
        for method in METHODS:
            for count in COUNTS:
                own = [_text(cells_by_key[size, method, count, gb]) for gb in CARDS_GB]
                lines.append(f"| {WORDS[method] if count == 1 else ''} | {count} | {' | '.join(own)} |")
        texts[size] = block("\n".join(lines))
    example, limit = cells_by_key["7b", "lora", 4, 24], memory_gib(24)
    mesh = "pipeline.num_stages={stages} pipeline.replicas={replicas} pipeline.recompute={recompute}".format(**example)
    by_hand = [
        *("hf-gpipe plan recipes/causal/chat.yaml model.path=docs/your_model/7b lora.r=16", *BASE),
        *(f"{mesh} pipeline.partition=auto", f"--devices 4 --device {device(24)} --memory {limit}GiB"),
    ]
    cards = [f"| {gb} GB | {memory_gib(gb)} GiB | `{device(gb)}` |" for gb in CARDS_GB]
    methods = [f"| {WORDS[name]} | `{' '.join(keys)}` |" for name, keys in METHODS.items()]
    return texts | {
        "cards": block("\n".join(["| card | limit of memory | computes and sends like |", "|---|--:|---|", *cards])),
        "methods": block("\n".join(["| method | keys |", "|---|---|", *methods])),
        "longest": block(_longest_rows(longest)),
        "by hand": block("```bash\n" + " \\\n    ".join(by_hand) + "\n```"),
        "two cards": f"`{_text(cells_by_key['7b', 'lora', 2, 24])}`",
        "highest peak": f"{example['peak_gib']} of {limit} GiB",
        "step seconds": f"{example['step_seconds']} s",
    }


def _longest_rows(lines: list[dict[str, str]]) -> str:
    """A table of the longest rows, whole and in chunks."""
    lines_by_key = {tuple(list(line.values())[:4]): line for line in lines}
    columns = [(str(count), str(gb)) for gb in LONGEST_GB for count in COUNTS]
    table = [
        f"| model | | {' | '.join(f'{count} x {gb} GB' for count, gb in columns)} |",
        "|---|---|" + "--:|" * len(columns),
    ]
    for size in SIZES:
        for number, method in enumerate(METHODS):
            cells = [lines_by_key[size, method, *column] for column in columns]
            texts = (f"{_tokens(cell['whole'])}, {_tokens(cell['chunks'])}" for cell in cells)
            table.append(f"| {size.upper() if not number else ''} | {WORDS[method]} | {' | '.join(texts)} |")
    return "\n".join(table)


def _tokens(text: str) -> str:
    """A number of tokens in thousands; that of the longest that were tried has a plus."""
    return "no" if text == "0" else f"{int(text) // 1024}k{'+' * (int(text) == LENGTHS[-1])}"


def _text(cell: dict[str, str]) -> str:
    """A cell of the table: stages x replicas, what is recomputed, and the step."""
    if cell["fits"] != "True":
        return "no"
    recompute = "" if cell["recompute"] == "none" else f", {cell['recompute']}"
    return f"{cell['stages']}x{cell['replicas']}{recompute}, {float(cell['step_seconds']):.3g} s"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--longest", action="store_true", help="find the longest rows")
    parser.add_argument("--draw", action="store_true", help="write the page from the files")
    parser.add_argument("--check", action="store_true", help="compare the page with the files")
    options = parser.parse_args()
    if options.longest and not options.check:
        write_lines(LONGEST, Longest, chain.from_iterable(starmap(longest_of, product(SIZES, METHODS))))
    elif not (options.draw or options.check):
        write_lines(CELLS, Cell, chain.from_iterable(starmap(cells_of, product(SIZES, METHODS))))
    is_right = write(PAGE, parts(read_lines(CELLS), read_lines(LONGEST)), only_check=options.check)
    return int(options.check and not is_right)


if __name__ == "__main__":
    raise SystemExit(main())

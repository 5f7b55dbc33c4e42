"""Plans models of 1.5 to 70 billion parameters on 1 to 8 cards of 12 to 80 GB, and writes docs/your_model.md.

python scripts/your_model.py            plans every cell into docs/your_model/cells.csv, and writes the page
python scripts/your_model.py --longest  finds the longest rows, into docs/your_model/longest.csv, and writes the page
python scripts/your_model.py --draw     writes the page from both files, and plans nothing
python scripts/your_model.py --check    exit code 1 where the page is not that of the files
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from itertools import chain, product, starmap
from operator import attrgetter
from pathlib import Path
from typing import Any

from hf_gpipe.commands.plan import read_request
from hf_gpipe.errors import UserError
from hf_gpipe.planner.plan import Plan, Planner
from hf_gpipe.planner.search.choose import best_plan
from hf_gpipe.recipe import PipelineConfig

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
#: Of the published models: the configuration is in docs/your_model, under the size.
PUBLISHED = {
    "1.5b": "Qwen2.5-1.5B",
    "3b": "Qwen2.5-3B",
    "7b": "Qwen2.5-7B",
    "14b": "Qwen2.5-14B",
    "32b": "Qwen2.5-32B",
    "70b": "Llama-3-70B",
}
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
                config = replace(request.config, sequence_chunks=chunks, num_micro_batches=LONG_ROWS)
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
                plans.append(best_plan(planner, replace(config, **mesh, recompute=recompute, partition="auto")))
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


def page(cells: list[dict[str, str]], longest: list[dict[str, str]]) -> str:
    """The page of these cells and longest rows."""
    cells_by_key = {(cell["size"], cell["method"], int(cell["cards"]), int(cell["gb"])): cell for cell in cells}
    sections = []
    for size in SIZES:
        lines = [
            f"## {size.upper().replace('B', ' billion')}",
            "",
            f"[{PUBLISHED[size]}](your_model/{size}/config.json).",
            "",
        ]
        lines += [f"| | cards | {' | '.join(f'{gb} GB' for gb in CARDS_GB)} |", "|---|--:|" + "---|" * len(CARDS_GB)]
        for method in METHODS:
            for count in COUNTS:
                texts = [_text(cells_by_key[size, method, count, gb]) for gb in CARDS_GB]
                lines.append(f"| {WORDS[method] if count == 1 else ''} | {count} | {' | '.join(texts)} |")
        sections.append("\n".join(lines))
    example = cells_by_key["7b", "lora", 4, 24]
    return PAGE_TEXT.format(
        batch=MICRO_BATCHES,
        memory="\n".join(f"| {gb} GB | {memory_gib(gb)} GiB | `{device(gb)}` |" for gb in CARDS_GB),
        base=" \\\n    ".join(BASE),
        methods="\n".join(f"| {WORDS[name]} | `{' '.join(keys)}` |" for name, keys in METHODS.items()),
        limit=memory_gib(24),
        sections="\n\n".join(sections),
        longest=_longest_rows(longest),
        two_cards=_text(cells_by_key["7b", "lora", 2, 24]),
        sizes=", ".join(f"[{size[:-1]}](#{size[:-1].replace('.', '')}-billion)" for size in SIZES) + " billion",
        chunk=f"{CHUNK_TOKENS:,}",
        long_rows=LONG_ROWS,
        **example,
    )


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


PAGE_TEXT = """\
# Your model on your cards

Does a model of your size fit your cards, and how long is a step? Look up your row in these tables,
and then make the plan of your own model and data with `hf-gpipe plan`. **The tables are
predictions; no GPU has run them.**

For example, LoRA on 7 billion parameters and two cards of 24 GB: the [table](#7-billion) says
`{two_cards}`. The model is cut into 2 stages with 1 replica each, each stage recomputes as much as
its memory demands, and `s` are the seconds of a step with {batch} rows of 2,048 tokens. This
command plans your own model on two cards:

```bash
hf-gpipe plan recipes/causal/lora.yaml model.path=YOUR/MODEL --devices 2 --device rtx3090
```

Sizes in parameters: {sizes}.
[The longest rows](#the-longest-rows) says how many tokens a row may have.

## How to read a cell

| in a cell | meaning |
|---|---|
| `2x4` | 2 stages with 4 replicas each, on 8 cards |
| no word | nothing is recomputed |
| `stage`, `block` | stages, or single blocks, are recomputed in the backward |
| `mixed` | each stage recomputes as much as its memory demands |
| `host` | [activations wait in CPU memory](memory.md#activations-in-cpu-memory) |
| `4.9 s` | seconds of a step |
| `no` | no plan of those tried fits |

Every step has {batch} rows of 2,048 tokens in {batch} micro-batches, under the schedule `1f1b`.
Weights are bfloat16 in all three methods:

| method | keys |
|---|---|
{methods}

Full fine-tuning with float32 master weights takes 20 bytes for each parameter. Without this key it
takes 8, but then AdamW's state is bfloat16 too, which rounds small updates away.

| card | limit of memory | computes and sends like |
|---|--:|---|
{memory}

The limit is 98 % of the card's nominal memory, less half a GiB for CUDA and its kernels. Up to 48
GB the columns differ only in memory; the 80 GB column is of an A100 with NVLink. With a faster or
slower card the seconds change, and hardly what fits.

{sections}

## The longest rows

`4k, 32k` means that rows of 4,096 tokens fit if they are whole, and rows of 32,768 tokens if they
are cut into chunks of {chunk} tokens ([long rows](long_rows.md)). The script tried the powers of
two from 2k to 128k tokens, with {long_rows} rows a step and the plans of the tables above. `128k+`
fits, and longer rows were not tried. `no` means that rows of 2k tokens do not fit. `python
scripts/your_model.py --longest` writes this table from [longest.csv](your_model/longest.csv);
`hf-gpipe plan --longest` finds the longest rows of your own model and data.

{longest}

## One row by hand

This command makes the plan of one cell: LoRA on 7 billion parameters and 4 cards of 24 GB.

```bash
hf-gpipe plan recipes/causal/chat.yaml model.path=docs/your_model/7b lora.r=16 \\
    {base} \\
    pipeline.num_stages={stages} pipeline.replicas={replicas} pipeline.recompute={recompute} pipeline.partition=auto \\
    --devices 4 --device rtx3090 --memory {limit}GiB
```

![Memory of the four processes, and the predicted step](images/plan.png)

`python scripts/pictures.py plan` draws this picture; `--picture plan.png` draws that of your plan.

* **Weights.** 7.6 billion parameters of 2 bytes are 14.2 GiB, and each of the four stages has 3.5
  to 3.7 GiB of them.
* **Trained numbers.** LoRA of rank 16 trains 40 million float32 numbers. With gradients and AdamW's
  state they take 0.15 GiB on a stage.
* **Stored activations.** Under `1f1b` stage s of K keeps K - s micro-batches: four on the first
  stage, one on the last. So the planner gives the first stage a layer less. Then process 1 has the
  highest peak, {peak_gib} of {limit} GiB.
* **Time.** Each of the 16 micro-batches passes 4 stages, so the bubble is 3 / (16 + 3) = 16 % for
  equal stages. The planner's stages are not quite equal, and its bubble is 20.5 %: {step_seconds} s
  in all.
* **Less memory?** With blocks recomputed the same training fits cards of 12 GB.

## What was left out

* **Other schedules and meshes.** The script tries only `1f1b`, with the same number of replicas for
  each stage. `--search` also tries other schedules, other numbers of micro-batches and uneven
  replicas, and is often faster, in particular for few cards.
* **ZeRO-1 and offloaded optimizer state** would make full fine-tuning fit more cards ([less
  memory](memory.md)).
* **Weights in CPU memory.** Where a cell says `no`, weights may still [visit the
  cards](visiting_weights.md). With `--search` the command prints the best plan of each way: weights
  that stay, weights that visit, LoRA and QLoRA; and for each what limits its step.

`python scripts/your_model.py` writes this page, from [cells.csv](your_model/cells.csv).
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--longest", action="store_true", help="find the longest rows")
    parser.add_argument("--draw", action="store_true", help="write the page from the files")
    parser.add_argument("--check", action="store_true", help="compare the page with the files")
    options = parser.parse_args()
    if options.check:
        return int(PAGE.read_text(encoding="utf-8") != page(read_lines(CELLS), read_lines(LONGEST)))
    if options.longest:
        write_lines(LONGEST, Longest, chain.from_iterable(starmap(longest_of, product(SIZES, METHODS))))
    elif not options.draw:
        write_lines(CELLS, Cell, chain.from_iterable(starmap(cells_of, product(SIZES, METHODS))))
    PAGE.write_text(page(read_lines(CELLS), read_lines(LONGEST)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

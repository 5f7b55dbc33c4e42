"""Plans trainings whose speed others have published, and writes predicted beside published tokens a second.

python scripts/published.py           plans every row into docs/published/rows.csv, and writes the table of its page
python scripts/published.py --draw    writes the table from that file, and plans nothing
python scripts/published.py --check   exit code 1 where the page is not that of the file

The published programs differ from this one in their kernels and in how they share the work, so a row tells whether the
planner's seconds are near, not whether they are right. docs/planner_published.md says why a row is off.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import json
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from pages import block, write

from hf_gpipe.commands.plan import main as plan
from hf_gpipe.planner.machines.devices import DEVICES, Device

ROOT = Path(__file__).parents[1]
FILE, PAGE = ROOT / "docs" / "published" / "rows.csv", ROOT / "docs" / "planner_published.md"
#: The rows that are off by more are explained on the page.
NEAR = 0.15
QWEN = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "dtype": "bfloat16"}
QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "dtype": "bfloat16", "head_dim": 128}
MOE = QWEN3 | {
    **{"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]},
    **{"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1536},
}
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}


def _shape(family: dict[str, Any], *sizes: int, tied: bool = False) -> dict[str, Any]:
    """A configuration from its width, feed-forward width, blocks, heads, key heads and vocabulary."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    return {**family, **dict(zip((*names, "vocab_size"), sizes, strict=True)), "tie_word_embeddings": tied}


MODELS = {
    "Qwen2.5-0.5B": _shape(QWEN, 896, 4864, 24, 14, 2, 151936, tied=True),
    "Qwen2.5-1.5B": _shape(QWEN, 1536, 8960, 28, 12, 2, 151936, tied=True),
    "Qwen2.5-3B": _shape(QWEN, 2048, 11008, 36, 16, 2, 151936, tied=True),
    "Qwen2.5-7B": _shape(QWEN, 3584, 18944, 28, 28, 4, 152064),
    "Qwen2.5-14B": _shape(QWEN, 5120, 13824, 48, 40, 8, 152064),
    "Qwen2.5-32B": _shape(QWEN, 5120, 27648, 64, 40, 8, 152064),
    "Qwen3-1.7B": _shape(QWEN3, 2048, 6144, 28, 16, 8, 151936, tied=True),
    "Llama-3.1-8B": _shape(LLAMA, 4096, 14336, 32, 32, 8, 128256),
    "Qwen3-32B": _shape(QWEN3, 5120, 25600, 64, 64, 8, 151936),
    "Qwen3-235B-A22B": _shape(MOE, 4096, 12288, 94, 64, 4, 151936),
}


@dataclass(frozen=True)
class Run:
    """A published training.

    Attributes:
        source: whose figure it is; empty: nobody's.
        device: its card, of the planner's table.
        cards: how many of them.
        published: tokens a second; 0: none.
        rows, tokens: rows of a step of the plan, and tokens of a row.
        keys: of the recipe.
        rate: of products, over that of the planner's table.
    """

    source: str
    model: str
    device: str
    cards: int
    published: float
    rows: int
    tokens: int
    keys: tuple[str, ...]
    rate: float = 1.0


@dataclass(frozen=True)
class Row:
    """A run beside its plan.

    Attributes:
        predicted: tokens a second.
        products_alone: the same, if all but matrix products took no time, as with perfectly fused kernels.
    """

    source: str
    model: str
    device: str
    cards: int
    published: float
    predicted: float
    products_alone: float
    peak_gib: float


def _one_card(rows_of_micro_batch: int, recompute: str) -> tuple[str, ...]:
    return (
        "pipeline.num_stages=1",
        "pipeline.num_processes=1",
        f"pipeline.num_micro_batches={512 // rows_of_micro_batch}",
        "pipeline.schedule=gpipe_fused",
        f"pipeline.recompute={recompute}",
    )


def _visiting(stages: int, micro_batches: int, schedule: str = "breadth_first") -> tuple[str, ...]:
    return (
        f"pipeline.num_stages={stages}",
        f"pipeline.num_micro_batches={micro_batches}",
        f"pipeline.schedule={schedule}",
        "pipeline.recompute=stage",
        "pipeline.offload_weights=all",
    )


def _adapters(stages: int, micro_batches: int) -> tuple[str, ...]:
    """LoRA on weights that visit, which needs no master weights."""
    keys = _visiting(stages, micro_batches)[:-1]
    lora = ("lora.r=16",)
    return (*keys, "pipeline.offload_weights=frozen", *lora)


LLMQ, FACTORY = "LLMQ", "LLaMA-Factory, by LLMQ"
ROUNDPIPE = "RoundPipe"
RUNS = (
    Run(LLMQ, "Qwen2.5-0.5B", "rtx4090", 1, 39842, 512, 1024, _one_card(16, "none")),
    Run(FACTORY, "Qwen2.5-0.5B", "rtx4090", 1, 30183, 512, 1024, _one_card(16, "block")),
    Run(LLMQ, "Qwen2.5-1.5B", "rtx4090", 1, 14070, 512, 1024, _one_card(4, "none")),
    Run(FACTORY, "Qwen2.5-1.5B", "rtx4090", 1, 9419, 512, 1024, _one_card(32, "block")),
    Run(LLMQ, "Qwen2.5-0.5B", "h100", 1, 149500, 512, 1024, _one_card(32, "none")),
    Run(LLMQ, "Qwen2.5-1.5B", "h100", 1, 59200, 512, 1024, _one_card(32, "none")),
    Run(LLMQ, "Qwen2.5-3B", "h100", 1, 30916, 512, 1024, _one_card(16, "none")),
    Run(LLMQ, "Qwen2.5-7B", "h100", 1, 13830, 512, 1024, _one_card(4, "none")),
    Run(LLMQ, "Qwen2.5-7B", "rtx4090", 1, 2777, 64, 1024, _visiting(30, 16)),
    Run(FACTORY, "Qwen2.5-7B", "rtx4090", 1, 2523, 64, 1024, _visiting(30, 16)),
    Run(LLMQ, "Qwen2.5-14B", "rtx4090", 1, 1348, 64, 1024, _visiting(50, 16)),
    Run(FACTORY, "Qwen2.5-14B", "rtx4090", 1, 1135, 64, 1024, _visiting(50, 16)),
    Run(LLMQ, "Qwen2.5-7B", "rtx4090", 4, 10895, 256, 1024, _visiting(30, 64, "round_robin")),
    Run(FACTORY, "Qwen2.5-7B", "rtx4090", 4, 6929, 256, 1024, _visiting(30, 64, "round_robin")),
    Run(LLMQ, "Qwen2.5-14B", "rtx4090", 4, 5261, 256, 1024, _visiting(50, 64, "round_robin")),
    Run(FACTORY, "Qwen2.5-14B", "rtx4090", 4, 2630, 256, 1024, _visiting(50, 64, "round_robin")),
    Run(LLMQ, "Qwen2.5-32B", "rtx4090", 4, 2205, 256, 1024, _visiting(66, 64, "round_robin")),
    Run(ROUNDPIPE, "Qwen3-1.7B", "rtx4090", 8, 56489, 256, 2048, _visiting(30, 64, "round_robin"), 2.0),
    Run(ROUNDPIPE, "Llama-3.1-8B", "rtx4090", 8, 18888, 256, 2048, _visiting(34, 64, "round_robin"), 2.0),
    Run(ROUNDPIPE, "Qwen3-32B", "rtx4090", 8, 4164, 256, 2048, _visiting(66, 64, "round_robin"), 2.0),
    Run(ROUNDPIPE, "Qwen3-235B-A22B, LoRA", "rtx4090", 8, 1592, 256, 2048, _adapters(96, 64), 2.0),
    Run("", "Qwen2.5-7B", "rtx4090", 2, 0, 128, 1024, _visiting(30, 32, "round_robin")),
    Run("", "Qwen2.5-7B", "rtx4090", 8, 0, 512, 1024, _visiting(30, 128, "round_robin")),
    *(Run("", "Qwen2.5-7B, LoRA", "rtx4090", n, 0, 64 * n, 1024, _adapters(30 // n * n, 16 * n)) for n in (1, 2, 4, 8)),
    Run("", "Qwen2.5-32B", "rtx4090", 1, 0, 16, 1024, _visiting(33, 16)),
    *(Run("", "Qwen2.5-32B", "rtx4090", n, 0, 16 * n, 1024, _visiting(66, 16 * n, "round_robin")) for n in (2, 4, 8)),
    *(
        Run("", f"{model}, LoRA", "rtx4090", n, 0, 16 * n, 1024, _adapters(stages // n * n, 16 * n))
        for model, stages in (("Qwen2.5-32B", 33), ("Qwen3-235B-A22B", 96))
        for n in (1, 2, 4, 8)
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", action="store_true", help="plan nothing")
    parser.add_argument("--check", action="store_true", help="plan and write nothing")
    parser.add_argument(
        "--only", default="", help="plan the rows whose source, model or device has this word, and print"
    )
    options = parser.parse_args()
    if options.only:
        for run in RUNS:
            if options.only in f"{run.source} {run.model} {run.device} {run.cards}":
                print(planned(run), flush=True)
        return 0
    if not (options.draw or options.check):
        FILE.parent.mkdir(exist_ok=True)
        with FILE.open("w", newline="") as file:
            writer = csv.DictWriter(file, [field.name for field in fields(Row)], lineterminator="\n")
            writer.writeheader()
            for run in RUNS:
                writer.writerow(asdict(planned(run)))
                file.flush()
    is_same = write(PAGE, {"published": block("\n".join(table(read())))}, only_check=options.check)
    return int(options.check and not is_same)


def planned(run: Run) -> Row:
    """Plan a run in bfloat16: full fine-tuning with float32 master weights, or LoRA."""
    card = DEVICES[run.device]
    card = replace(card, flops_per_second={dtype: run.rate * rate for dtype, rate in card.flops_per_second.items()})
    predicted, peak = _tokens_per_second(run, card)
    alone = 0
    if run.published:
        fused = replace(card, bytes_per_second=1e3 * card.bytes_per_second, call_seconds=0.0)
        alone, _ = _tokens_per_second(run, fused)
    peak_gib = round(peak / 2**30, 1)
    return Row(run.source, run.model, run.device, run.cards, run.published, predicted, alone, peak_gib)


def _tokens_per_second(run: Run, card: Device) -> tuple[int, float]:
    """The tokens a second and the peak bytes of a plan on a card."""
    DEVICES["published"] = card
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODELS[run.model.partition(",")[0]]))
        words = (
            f"model.path={folder}",
            "model.dtype=bfloat16",
            "training.bf16=false",
            *(() if "LoRA" in run.model else ("training.fp32_master_weights=true",)),
            "pipeline.partition=count",
            f"data.max_length={run.tokens}",
            f"training.batch_size={run.rows}",
            *run.keys,
            f"pipeline.num_processes={run.cards}",
        )
        options = ("--device", "published", "--host-memory", "500GiB", "--host-bandwidth", "200GB/s", "--json")
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            plan([str(ROOT / "recipes" / "causal" / "chat.yaml"), *words, *options])  # 1: it does not fit
    found = json.loads(out.getvalue())
    return round(run.rows * run.tokens / found["step_seconds"]), found["peak_bytes"]


def read() -> list[Row]:
    """The rows of the file."""
    with FILE.open(newline="") as file:
        return [
            Row(
                own["source"],
                own["model"],
                own["device"],
                int(own["cards"]),
                *(float(own[name]) for name in ("published", "predicted", "products_alone", "peak_gib")),
            )
            for own in csv.DictReader(file)
        ]


def table(rows: list[Row]) -> Iterator[str]:
    """The lines of the page's table."""
    yield "| published by | model | cards | published, tokens/s | predicted | ratio | products alone | GiB of a card |"
    yield "|---|---|---|--:|--:|--:|--:|--:|"
    for row in rows:
        cards = f"{row.cards} x {row.device}"
        compared = f"- | {row.predicted:,.0f} | - | -"
        if row.published:
            ratio = row.predicted / row.published
            word = f"{ratio:.2f}" if abs(ratio - 1) <= NEAR else f"**{ratio:.2f}**"
            alone = f"{row.products_alone / row.published:.2f}" if row.products_alone else "-"
            compared = f"{row.published:,.0f} | {row.predicted:,.0f} | {word} | {alone}"
        yield f"| {row.source or '-'} | {row.model} | {cards} | {compared} | {row.peak_gib:.1f} |"


if __name__ == "__main__":
    raise SystemExit(main())

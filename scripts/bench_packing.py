"""Tokens per second of packed mini-batches, against padded and length-bucketed ones of the same rows.

    python scripts/bench_packing.py                              two processes, a llama of 8 blocks of width 256
    python scripts/bench_packing.py --schedule zb_h1 --attention eager
    python scripts/bench_packing.py --quick                      a trial run of seconds

The rows' lengths are drawn like those of chats, from 32 to 2048 tokens. padded: mini-batches of random rows, each
micro-batch as long as its longest row. bucketed: rows of similar length share a mini-batch and a micro-batch. packed:
the mini-batches of padded, packed. The ways take turns; tokens are the rows' own, without padding, of forwards and
backwards without updates. The ratios are of one repetition each; medians, with the smallest and the largest.
"""

from __future__ import annotations

from argparse import Namespace
from functools import partial
from typing import Any

import numpy as np
import torch
from bench.models import llama
from bench.processes import in_turns, run_job
from bench.report import Spread, paired, table, write_json
from bench.runner import bench_parser

from hf_gpipe import Pipeline
from hf_gpipe.data import PairCollator
from hf_gpipe.data.batches import length_bucketed_batches
from hf_gpipe.runtime.cutting import make_micro_batches

#: How `Pipeline` cuts the mini-batches of each way.
WAYS: dict[str, dict[str, bool]] = {"padded": {}, "bucketed": {"length_bucketing": True}, "packed": {"packing": True}}
QUICK = {
    **{"rows": 12, "batch_size": 6, "micro_batches": 3, "width": 64, "blocks": 2, "reps": 1},
    **{"shortest": 4, "median": 20, "longest": 64},
}


def lengths_of(given: Namespace) -> list[int]:
    """Tokens of each row: the logarithm is normal, as of the messages of chats, cut to the shortest and longest."""
    drawn = np.random.default_rng(given.seed).lognormal(np.log(given.median), given.sigma, given.rows)
    return [int(length) for length in np.clip(drawn, given.shortest, given.longest)]


def measure(given: Namespace) -> dict[str, Any]:
    """One process's part: for each way the seconds of each repetition, over all rows, and what it computed.

    The ways take turns. A repetition has the forwards and backwards of all mini-batches, without updates. The
    mini-batches of `padded` and `packed` have the same rows, so their losses are compared.
    """
    lengths, size = lengths_of(given), given.batch_size
    generator = torch.Generator().manual_seed(given.seed)
    rows = [torch.randint(3, given.vocabulary, (length,), generator=generator).tolist() for length in lengths]
    in_order = [list(range(start, min(start + size, len(rows)))) for start in range(0, len(rows), size)]
    by_length = length_bucketed_batches(lengths, size, given.seed, 0)
    collate = PairCollator(pad_token_id=0)
    batches = {
        way: [
            collate([{"input_ids": rows[index], "labels": rows[index]} for index in batch])
            for batch in (by_length if way == "bucketed" else in_order)
        ]
        for way in WAYS
    }
    shape = {"intermediate": given.width * 8 // 3 // 8 * 8, "max_position_embeddings": given.longest}
    config = llama(given.width, given.blocks, given.vocabulary, **shape)
    table_of = (given.stages, given.micro_batches, given.schedule, given.recompute)
    common = {"attn_implementation": given.attention, "device": "cpu"}
    pipes = {way: Pipeline(config, *table_of, **common, **options) for way, options in WAYS.items()}
    losses: dict[str, list[float]] = {}

    def step(way: str) -> None:
        losses[way] = [float(pipes[way].steps.train_on([batch])) for batch in batches[way]]
        pipes[way].zero_grad()

    seconds = in_turns({way: partial(step, way) for way in WAYS}, given.reps)
    computed = {way: sum(computed_tokens(pipes[way], batch) for batch in batches[way]) for way in WAYS}
    pairs = zip(losses["padded"], losses["packed"], strict=True)
    difference = max(abs(padded - packed) for padded, packed in pairs)
    return {"seconds": seconds, "tokens": sum(lengths), "computed_tokens": computed, "loss_difference": difference}


def computed_tokens(pipe: Pipeline, batch: dict[str, torch.Tensor]) -> int:
    """Tokens of a mini-batch's micro-batches, padding included."""
    made = make_micro_batches(pipe.adapter, [batch], pipe.cutting, 0, 0)
    return sum(micro_batch.inputs["input_ids"].numel() for micro_batch in made)


def main(arguments: list[str] | None = None) -> None:
    numbers = {"rows": 128, "batch_size": 32, "micro_batches": 8, "stages": 2, "width": 256, "blocks": 8}
    numbers |= {"vocabulary": 8000, "shortest": 32, "longest": 2048, "median": 300, "reps": 3, "seed": 0}
    parser = bench_parser(__doc__, **numbers)
    parser.add_argument("--sigma", type=float, default=1.0, help="of the logarithm of a row's length; default: 1")
    for name, default in (("schedule", "1f1b"), ("recompute", "none"), ("attention", "sdpa")):
        parser.add_argument(f"--{name}", default=default, help=f"default: {default}")
    given = parser.parse_args(arguments)
    if given.quick:
        given = Namespace(**{**vars(given), **QUICK})
    parts = run_job(measure, (given,), given.stages, timeout_seconds=7200)
    first, tokens = parts[0], parts[0]["tokens"]
    rates = {
        way: [tokens / max(times) for times in zip(*(part["seconds"][way] for part in parts), strict=True)]
        for way in WAYS
    }
    ratios = {way: paired(rates["packed"], rates[way]) for way in ("padded", "bucketed")}
    print(f"{given.rows} rows, {tokens} tokens, {given.shortest} to {given.longest}; K = {given.stages}")
    rows = [
        [way, Spread.of(own).text(0), f"{first['computed_tokens'][way] / tokens:.2f}"] for way, own in rates.items()
    ]
    print(table(["way", "tokens per second", "computed for one token"], rows))
    for way, ratio in ratios.items():
        print(f"packed over {way}: {ratio.text()}")
    print(f"largest difference of a mini-batch's loss, packed and padded: {first['loss_difference']:.1e}")
    job = {name: value for name, value in vars(given).items() if name != "json"}
    write_json(given.json, job=job, tokens_per_second=rates, packed_over=ratios, **first)


if __name__ == "__main__":
    main()

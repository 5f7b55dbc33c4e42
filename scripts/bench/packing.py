"""The same rows as padded, length-bucketed and packed mini-batches of one pipeline, in the processes of a job."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import LlamaConfig

from bench.processes import Job
from hf_gpipe import Pipeline
from hf_gpipe.data import PairCollator
from hf_gpipe.data.batches import length_bucketed_batches
from hf_gpipe.runtime.micro_batch import make_micro_batches

#: How `Pipeline` cuts the mini-batches of each way.
WAYS: dict[str, dict[str, bool]] = {"padded": {}, "bucketed": {"length_bucketing": True}, "packed": {"packing": True}}
HEAD_SIZE = 64


def lengths_of(job: Job) -> list[int]:
    """Tokens of each row: the logarithm is normal, as of the messages of chats, cut to the shortest and longest."""
    drawn = np.random.default_rng(job["seed"]).lognormal(np.log(job["median"]), job["sigma"], job["rows"])
    return [int(length) for length in np.clip(drawn, job["shortest"], job["longest"])]


def measure(job: Job) -> dict[str, Any]:
    """One process's part: for each way the seconds of each repetition, over all rows, and what it computed.

    The ways take turns. A repetition has the forwards and backwards of all mini-batches, without updates. The
    mini-batches of `padded` and `packed` have the same rows, so their losses are compared.
    """
    lengths = lengths_of(job)
    generator = torch.Generator().manual_seed(job["seed"])
    rows = [torch.randint(3, job["vocabulary"], (length,), generator=generator).tolist() for length in lengths]
    size = job["batch_size"]
    in_order = [list(range(start, min(start + size, len(rows)))) for start in range(0, len(rows), size)]
    by_length = length_bucketed_batches(lengths, size, job["seed"], 0)
    collate = PairCollator(pad_token_id=0)
    batches = {
        way: [
            collate([{"input_ids": rows[index], "labels": rows[index]} for index in batch])
            for batch in (by_length if way == "bucketed" else in_order)
        ]
        for way in WAYS
    }
    pipes = {way: _pipeline(job, options) for way, options in WAYS.items()}
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    losses: dict[str, list[float]] = {}
    for repetition in range(job["repetitions"] + 1):
        for way, pipe in pipes.items():
            chosen = batches[way] if repetition else batches[way][:1]
            _meet()
            start = time.perf_counter()
            found = [pipe.train_on([batch]) for batch in chosen]
            _meet()
            if repetition:  # the one before warms up
                seconds[way].append(time.perf_counter() - start)
            losses[way] = [float(loss) for loss in found]
            pipe.zero_grad()
    pairs = zip(losses["padded"], losses["packed"], strict=True)
    return {
        "seconds": seconds,
        "tokens": sum(lengths),
        "computed_tokens": {way: sum(map(_computed(pipes[way]), batches[way])) for way in WAYS},
        "loss_difference": max(abs(one - other) for one, other in pairs),
    }


def _pipeline(job: Job, options: dict[str, bool]) -> Pipeline:
    heads = max(job["width"] // HEAD_SIZE, 1)
    config = LlamaConfig(
        vocab_size=job["vocabulary"],
        hidden_size=job["width"],
        intermediate_size=job["width"] * 8 // 3 // 8 * 8,
        num_hidden_layers=job["blocks"],
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=job["longest"],
    )
    return Pipeline(
        config,
        job["stages"],
        job["micro_batches"],
        job["schedule"],
        job["recompute"],
        attn_implementation=job["attention"],
        device="cpu",
        **options,
    )


def _computed(pipe: Pipeline) -> Any:
    """Tokens of a mini-batch's micro-batches, padding included."""

    def count(batch: dict[str, torch.Tensor]) -> int:
        made = make_micro_batches(
            pipe.adapter,
            [batch],
            pipe.num_micro_batches,
            0,
            0,
            length_bucketing=pipe.length_bucketing,
            packing=pipe.packing,
        )
        return sum(one.inputs["input_ids"].numel() for one in made)

    return count


def _meet() -> None:
    if dist.is_initialized():
        dist.barrier()

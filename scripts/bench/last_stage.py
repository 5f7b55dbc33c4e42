"""One F and B of a last stage, with logits in chunks or whole: seconds, and memory beyond the model's."""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import LlamaConfig

from bench import machine
from bench.processes import Job
from hf_gpipe.adapters import StageModel, adapter_for
from hf_gpipe.checkpoint.hub import initialise
from hf_gpipe.planner.tracing import context_of
from hf_gpipe.runtime.stage import Stage

CPU = torch.device("cpu")


def measure_process(job: Job) -> dict[str, Any]:
    """The seconds of every step, the growth of the process in one, and the loss.

    Args:
        job: how ("chunks" or "whole"), vocabulary, width, blocks, rows, tokens, steps and threads.
    """
    torch.set_num_threads(job["threads"])
    width = job["width"]
    config = LlamaConfig(
        vocab_size=job["vocabulary"],
        hidden_size=width,
        intermediate_size=4 * width,
        # The first block is on the stage before.
        num_hidden_layers=job["blocks"] + 1,
        num_attention_heads=max(1, width // 64),
        num_key_value_heads=max(1, width // 64),
        max_position_embeddings=job["tokens"],
        tie_word_embeddings=False,
        pad_token_id=0,
    )
    adapter = adapter_for(config)
    model = StageModel(adapter, 2, len(adapter.layers))
    initialise(model, CPU, seed=0)
    model.seal(CPU)
    if job["how"] == "whole":
        model.deferred_logits = lambda: None  # type: ignore[method-assign]  # of this one stage
    stage = Stage(model, lambda boundary: {"hidden": True})
    torch.manual_seed(0)
    ids = torch.randint(1, job["vocabulary"], (job["rows"], job["tokens"]))
    context = context_of(model, {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)})

    def step() -> float:
        loss = stage.forward(context, keep_graph=True)["loss"]
        stage.backward(0, {})
        return float(loss)

    step()  # from now on the gradients are there
    machine.reset_peak()
    before = machine.resident_bytes()
    loss = step()
    grown = machine.peak_bytes() - before
    seconds = []
    for _ in range(job["steps"]):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return {"seconds": seconds, "grown_bytes": grown, "loss": loss}

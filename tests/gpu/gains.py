"""Measure how much time CUDA graphs would save, and how long an action takes on the host."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from bench.models import llama
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from hf_gpipe import Pipeline
from tests.gpu.checks import Check
from tests.oracle import padded_batch, plain_model, tiny_config

_REPETITIONS = 20
#: Tokens of a micro-batch: few, so that the launches of kernels take longer than the kernels, to many.
_TOKENS = (128, 512, 2048)


def checks(*, quick: bool, emulated: bool) -> list[Check]:
    """Both prototypes."""
    job = {"quick": quick, "emulated": emulated}
    names = {"CUDA graphs of a block": "graphs", "host microseconds an action": "host"}
    return [Check("gain", name, f"gains:{function}", job) for name, function in names.items()]


class _Block(nn.Module):
    """A block of a Llama in bfloat16, of hidden states (1, T, D) alone."""

    def __init__(self, width: int, tokens: int, device: torch.device) -> None:
        super().__init__()
        config = llama(width, 1, 128, attn_implementation="sdpa")
        with device:
            self.block = LlamaDecoderLayer(config, 0).to(torch.bfloat16)
            blank, positions = torch.zeros(1, tokens, width, dtype=torch.bfloat16), torch.arange(tokens)[None]
            self.positions = LlamaRotaryEmbedding(config)(blank, positions)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output = self.block(hidden, position_embeddings=self.positions)
        return output[0] if isinstance(output, tuple) else output


def graphs(job: dict[str, Any]) -> dict[str, Any]:
    """Forward and backward of a block, launched kernel by kernel and replayed."""
    device, figures = torch.device("cuda:0"), {}
    width = 64 if job["emulated"] else 2048
    for tokens in _TOKENS[: 1 if job["quick"] else None]:
        block = _Block(width, 8 if job["emulated"] else tokens, device)
        shape = (1, block.positions[0].shape[1], width)
        hidden = torch.zeros(shape, dtype=torch.bfloat16, device=device, requires_grad=True)

        def step(block: nn.Module, hidden: torch.Tensor = hidden) -> None:
            block(hidden).sum().backward()

        eager = _seconds(partial(step, block))
        if job["emulated"]:
            continue
        replayed = torch.cuda.make_graphed_callables(block, (hidden,))
        figures[f"{tokens} tokens: ms, replayed ms"] = [1e3 * eager, 1e3 * _seconds(partial(step, replayed))]
    return {"figures": figures, "problems": []}


def host(job: dict[str, Any]) -> dict[str, Any]:
    """A step of a model whose kernels take no time, for each action of the table."""
    pipe = Pipeline(plain_model(tiny_config("llama"), dtype=torch.float32), 2, 4, "1f1b", "none", device="cuda:0")
    batch = padded_batch(pipe.adapter.config)
    seconds = _seconds(lambda: pipe.train_step(batch), 2 if job["emulated"] else _REPETITIONS)
    if job["emulated"]:
        return {}
    return {"figures": {"microseconds an action": 1e6 * seconds / (2 * 2 * 4)}, "problems": []}


def _seconds(function: Callable[[], object], count: int = _REPETITIONS) -> float:
    """The median time of a function, after two calls that do not count."""
    seconds = []
    for _ in range(count + 2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return median(seconds[2:])

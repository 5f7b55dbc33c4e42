"""Saved tensors of graphs go to the host: the graphs that stay, the memory of three, and no wait of the host."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import LlamaConfig

from hf_gpipe import Pipeline
from hf_gpipe.errors import StageError
from hf_gpipe.modes.host_graphs import copies as offload
from hf_gpipe.modes.host_graphs.copies import HostCopies, SavedTensors
from hf_gpipe.modes.host_graphs.table import OFFLOAD
from tests.emulated_cuda.comparing import assert_near
from tests.emulated_cuda.device import counting
from tests.emulated_cuda.happens_before import checking
from tests.emulated_cuda.models import config_of
from tests.emulated_cuda.mutants import mutate
from tests.emulated_cuda.processes import on_emulated_cuda
from tests.oracle import padded_batch, plain_model

TWO = ["cuda:0", "cuda:1"]


def numbers(family: str, recompute: str, *, tied: bool = True, **options: Any) -> dict[str, torch.Tensor]:
    """Losses and gradients of two steps."""
    given = {"num_stages": 4, "num_micro_batches": 6, "device": TWO} | copy.deepcopy(options)
    torch.manual_seed(0)
    model = plain_model(config_of(family, dropout=0.2, tied=tied))
    pipe = Pipeline(model, seed=3, recompute=recompute, **given)
    assert (OFFLOAD in pipe.schedule(6).kinds) is (recompute == "host")
    batch, found = padded_batch(pipe.adapter.config), {}
    for step in range(2):
        found[f"loss {step}"] = pipe.train_step(batch).cpu()
        found |= {f"{n} {step}": p.grad.cpu().clone() for n, p in pipe.named_parameters() if p.grad is not None}
    return found


@on_emulated_cuda()
def test_the_numbers_of_graphs_that_stay() -> None:
    offload.SMALLEST_BYTES = 1  # what these models save is small
    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    for family, options in (
        ("llama", {"schedule": "breadth_first"}),
        ("llama", {"schedule": "zb_h1", "tied": False}),
        ("t5", {"schedule": "interleaved_1f1b"}),
        ("marian", {"schedule": "vocab_gpipe", "num_stages": 2, "device": "cuda:0"}),
        ("llama", {"schedule": "gpipe", "num_stages": 2, "peft_config": lora}),
    ):
        assert_near(numbers(family, "host", **options), numbers(family, "none", **options), 0.0, f"{options}: number")


def wide(recompute: str, **options: Any) -> tuple[Pipeline, dict[str, torch.Tensor]]:
    """Blocks that save more than they have weights."""
    torch.manual_seed(0)
    given = {"num_stages": 2, "num_micro_batches": 8, "schedule": "gpipe", "device": TWO} | options
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 64}
    config = LlamaConfig(num_hidden_layers=6, tie_word_embeddings=False, **sizes)
    ids = torch.randint(3, 20, (16, 48))
    pipe = Pipeline(plain_model(config), recompute=recompute, **given)
    return pipe, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


@on_emulated_cuda()
def test_a_device_has_three_graphs_and_the_host_does_not_wait() -> None:
    peaks = {}
    for recompute in ("none", "host"):
        pipe, batch = wide(recompute)
        pipe.train_step(batch)
        before = [torch.cuda.memory_allocated(device) for device in TWO]
        for device in TWO:
            torch.cuda.reset_peak_memory_stats(device)
        with counting() as counts:
            pipe.train_step(batch)
        peaks[recompute] = [torch.cuda.max_memory_allocated(one) - of for one, of in zip(TWO, before, strict=True)]
        assert len(counts.synchronisations) <= 1, str(counts)
        assert not counts.pageable_copies, str(counts)
    for kept, found in zip(peaks["none"], peaks["host"], strict=True):
        assert found <= 1.1 * 3 / 8 * kept, "of eight graphs three, and inputs and what the running action works with"
    # Six graphs of less than a piece are away, each with a piece that graphs take in turn.
    every = pipe.steps.executor.modes["host_graphs"].copies.values()
    assert [copies.num_bytes // offload.PIECE_BYTES for copies in every] == [6, 6]


def problems(steps: int) -> str:
    with checking() as (checker, _):
        pipe, batch = wide("host", num_stages=4, num_micro_batches=6, schedule="breadth_first")
        for _ in range(steps):
            pipe.train_step(batch)
    return "; ".join(checker.problems)


@on_emulated_cuda()
def test_streams_wait_for_each_other() -> None:
    """Also where a piece of the host's memory is taken again in the same step."""
    assert not problems(2)


@pytest.mark.parametrize(
    ("target", "line"),
    [
        (HostCopies, 'self._stream("out")\n            stream.wait_stream('),
        (HostCopies, 'self._stream("in")\n            stream.wait_stream('),
        (HostCopies, "stream.wait_event(piece.is_free)"),
        (HostCopies, "current_stream(self._device).wait_event("),
        (SavedTensors, "current_stream(self.device).wait_event("),
    ],
)
@on_emulated_cuda()
def test_a_wait_less(target: type, line: str) -> None:
    mutate(target, line, re.sub(r"wait_(stream|event)\(", "__eq__(", line))
    try:
        found = problems(1)
    except StageError as error:
        found = str(error)
    assert re.search("is not ordered after|may still use it|was written before its copy", found), found

"""The memory of optimizers that a plan counts is what they keep after a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from hf_gpipe import Pipeline, PipelineTrainingArguments
from hf_gpipe.planner.costs.layers import ModelLayers
from hf_gpipe.planner.parameters import Parameters
from hf_gpipe.planner.workload import PlanInputs, Workload
from hf_gpipe.settings.optimizers import OPTIMIZERS
from hf_gpipe.training.optim import make_optimizer

CONFIG = LlamaConfig(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    tie_word_embeddings=False,
)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_plan_counts_what_the_optimizer_keeps(name: str, dtype: str, tmp_path: Path) -> None:
    """Of bitsandbytes' optimizers the planner knew nothing: it left M at 1, and no two stages overlapped."""
    if OPTIMIZERS[name].needs_bitsandbytes:
        pytest.importorskip("bitsandbytes")
    pipe = Pipeline(CONFIG, 2, 2, dtype=dtype)
    optimizer = make_optimizer(pipe, PipelineTrainingArguments(output_dir=str(tmp_path), optim=name, use_cpu=True))
    for parameter in pipe.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    kept: dict[int, Any] = {}
    for state in optimizer.state.values():
        # The tables of codes are one for all parameters.
        kept |= {t.data_ptr(): t.nbytes for n, t in state.items() if torch.is_tensor(t) and "qmap" not in n}
    size = sum(ModelLayers(pipe.adapter).sizes.values(), start=Parameters())
    expected = PlanInputs(optim=name).state_bytes(size, dtype)
    if name == "adafactor":  # an estimate, of larger matrices
        assert sum(kept.values()) < 0.1 * size.trainable_bytes
    else:
        assert sum(kept.values()) == pytest.approx(expected, rel=5e-3)


def test_what_is_left_open_is_planned_with_every_optimizer() -> None:
    """It was gpipe with recomputed stages, and one micro-batch, which keeps a stage idle while the other works."""
    for name in OPTIMIZERS:
        pipe = Pipeline(CONFIG, 2, 2, example=Workload(4, 8, 8), optim=name)
        assert pipe.planned is not None, name
        assert pipe.schedule_name == "1f1b"

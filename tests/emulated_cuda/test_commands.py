"""The commands on emulated devices, in a process that a launcher could have started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hf_gpipe.commands import plan, train
from tests.conftest import leave_out
from tests.emulated_cuda.processes import on_emulated_cuda
from tests.emulated_cuda.test_measuring import measure_little

RECIPE = """\
model:
  config: {model_type: t5, d_model: 16, d_kv: 8, num_heads: 2, num_layers: 1, num_decoder_layers: 1, d_ff: 16}
data: {kind: cldr, languages: [de, fr], templates: [weekday, month_day], examples_per_language: 200, test_fraction: 0.1}
tokenizer: {vocab_size: 320}
pipeline: {num_stages: 2, num_micro_batches: 2, num_processes: 1}
training: {output_dir: OUTPUT, max_steps: 3, batch_size: 4, logging_steps: 1, save_steps: 3}
evaluation: {max_examples: 2, max_new_tokens: 4, samples: 1}
"""


@on_emulated_cuda()
def test_plan_and_train(tmp_path: Path) -> None:
    measure_little()
    losses = []
    recipe = tmp_path / "recipe.yaml"
    for number, device in enumerate(("devices=[cuda:1, cuda:0]", "device=cpu")):
        folder = tmp_path / str(number)
        recipe.write_text(RECIPE.replace("OUTPUT", str(folder)))
        decided = []
        if "cpu" in device:
            leave_out(pytest.MonkeyPatch())
            decided = ["pipeline.schedule=gpipe", "pipeline.partition=count", "pipeline.recompute=none"]
        assert train.main([str(recipe), f"pipeline.{device}", *decided]) == 0
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        losses.append([line["loss"] for line in lines if "loss" in line])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert plan.main([str(recipe), "--profile", "pipeline.partition=profile", "--memory", "1GiB"]) == 0

"""A run of the command on a stream, killed and started again, trains on the same mini-batches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hf_gpipe.train import main
from tests.test_train import kill_once

pytestmark = pytest.mark.usefixtures("undo_the_command_s_settings", "no_prediction")

STEPS = 60

RECIPE = f"""
model:
  config: {{model_type: t5, d_model: 16, d_kv: 8, num_heads: 2, num_layers: 1, num_decoder_layers: 1, d_ff: 16}}
data:
  kind: jsonl
  path: FOLDER/{{language}}.jsonl
  languages: [large, small]
  streaming: true
  counts: {{large: 300, small: 40}}
  temperature: 5.0
  max_source_tokens: 24
  max_target_tokens: 24
tokenizer: {{vocab_size: 300}}
pipeline: {{num_stages: 2, num_micro_batches: 2, device: cpu, schedule: gpipe, partition: count, recompute: stage}}
training: {{output_dir: FOLDER/out, max_steps: {STEPS}, batch_tokens: 100, batch_size: 8, logging_steps: 1,
  save_steps: 10}}
evaluation: {{max_examples: 2, max_new_tokens: 4, samples: 0}}
"""

WORDS = "ein Schiff fährt langsam über das weite Meer"


def write(folder: Path) -> Path:
    for language, count in (("large", 300), ("small", 40)):
        rows = [
            {"source": f"{language} {number} {WORDS[: number % 40]}", "target": f"{number} {WORDS[-(number % 30) :]}"}
            for number in range(count)
        ]
        (folder / f"{language}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = folder / "recipe.yaml"
    path.write_text(RECIPE.replace("FOLDER", str(folder)))
    return path


def losses(folder: Path) -> list[float]:
    """Of every step that is logged; the last line may be half written."""
    path = folder / "out" / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    logs = [json.loads(line) for line in lines if line.endswith("\n")]
    return [log["loss"] for log in logs if "loss" in log]


def test_a_killed_run_trains_on_the_same_mini_batches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The steps after the last checkpoint are trained twice, the second time in one process, with the same losses."""
    recipe = write(tmp_path)
    kill_once(lambda: len(losses(tmp_path)) >= 13 and (tmp_path / "out/checkpoint-10").exists(), recipe)
    assert not (tmp_path / "out" / "metrics.json").exists(), "it had ended before it was killed"
    before = losses(tmp_path)
    assert main([str(recipe), "pipeline.num_processes=1"]) == 0
    said = capsys.readouterr().out
    assert "mini-batches of about 100 target tokens" in said
    assert "resuming   from" in said
    after = losses(tmp_path)
    assert len(after) == STEPS
    assert after[: len(before)] == pytest.approx(before, rel=1e-5)
